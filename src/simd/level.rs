//! A level is a token chosen at run time.

use core::fmt;
use core::hash::{Hash, Hasher};
use core::iter::FusedIterator;
use core::sync::atomic::{AtomicU8, Ordering};

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::{Avx512, BF16, PLAIN, VNNI};
#[cfg(target_arch = "x86_64")]
use super::detect;
use super::portable::Portable;
use super::scalar::Scalar;
use super::{Kernel, Simd};
use crate::cut::out_of_bounds;

/// A set of vector instructions that this processor has.
///
/// A value of this type is the proof: it can only be had by asking the processor, so no safe code
/// can run an instruction that is not there.
///
/// ```compile_fail
/// // Its inside is private: a level cannot be forged.
/// let level = paged_kv::Level(todo!());
/// ```
///
/// Within a class ([`Level::is_fused`]) all levels give the same bits.
///
/// # Examples
///
/// ```
/// use paged_kv::Level;
///
/// let best = Level::detect();
/// assert!(Level::available().any(|level| level == best));
/// assert_eq!(Level::from_name("scalar"), Some(Level::SCALAR));
/// ```
#[derive(Clone, Copy)]
pub struct Level(Tier);

#[derive(Clone, Copy)]
enum Tier {
    Scalar(Scalar),
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<PLAIN>),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512<BF16>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<VNNI>),
}

impl Level {
    /// One lane after the other: the reference.
    pub const SCALAR: Level = Level(Tier::Scalar(Scalar));

    /// The vector registers that this build may assume of its target.
    pub const PORTABLE: Level = Level(Tier::Portable(Portable));

    /// The fastest level of this processor.
    ///
    /// Asks the processor once and remembers; after that it is one relaxed load. Works without
    /// std, and believes the operating system as well as the processor.
    pub fn detect() -> Level {
        // 0: not asked yet, otherwise the level's place in `BEST_LAST` plus one.
        static BEST: AtomicU8 = AtomicU8::new(0);
        let known = BEST.load(Ordering::Relaxed);
        if known > 0
            // SAFETY: `ask` stores what `present` counted.
            && let Some(level) = unsafe { Self::at(usize::from(known) - 1) }
        {
            return level;
        }
        ask(&BEST)
    }

    /// Every level that this processor has, the reference first and the fastest last.
    pub fn available() -> Levels {
        Levels { present: present(), next: 0 }
    }

    /// The level with this name, if this processor has it; those that are not exact included.
    pub fn from_name(name: &str) -> Option<Level> {
        let inexact = Self::opt_in().into_iter().flatten();
        Self::available().chain(inexact).find(|level| level.name() == name)
    }

    /// AVX2 with FMA, on the caller's word.
    ///
    /// # Safety
    ///
    /// The processor must have `avx2`, `fma` and `f16c`, and the operating system must save ymm.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn assume_avx2() -> Level {
        // SAFETY: the caller promises the features.
        Level(Tier::Avx2(unsafe { Avx2::assume() }))
    }

    /// AVX-512, on the caller's word.
    ///
    /// # Safety
    ///
    /// The processor must have `avx512f`, `avx512bw`, `avx512dq`, `avx512vl`, `avx2`, `fma` and
    /// `f16c`, and the operating system must save zmm and the mask registers.
    #[cfg(target_arch = "x86_64")]
    pub unsafe fn assume_avx512() -> Level {
        // SAFETY: the caller promises the features.
        Level(Tier::Avx512(unsafe { Avx512::assume() }))
    }

    /// `scalar`, `portable`, `avx2`, `avx512`, `avx512-bf16` or `avx512-vnni`.
    pub const fn name(self) -> &'static str {
        match self.0 {
            Tier::Scalar(_) => "scalar",
            Tier::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16(_) => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni(_) => "avx512-vnni",
        }
    }

    /// Whether a product and the sum it goes into are rounded once, together.
    ///
    /// The two classes differ by a rounding here and there; inside one class all levels give the
    /// same bits.
    pub const fn is_fused(self) -> bool {
        match self.0 {
            Tier::Scalar(_) => Scalar::FUSED,
            Tier::Portable(_) => Portable::FUSED,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2(_) => Avx2::FUSED,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512(_) | Tier::Avx512Bf16(_) | Tier::Avx512Vnni(_) => true,
        }
    }

    /// AVX-512 with dot products of bf16 pairs, where the processor has them. Only on request: it is
    /// not exact.
    ///
    /// Over stores of bf16, `Int8` and `Int4` whose block size is even, queries and weights are
    /// rounded to bf16, 8 bits, before they are multiplied; everything is still added up in `f32`.
    /// An output is then off by up to some 2^-8 of the largest value where inputs have unit variance,
    /// and by more where scores are large (measured: [`manual::accuracy`](crate::manual::accuracy)).
    /// Anything else is done as at `avx512`, with the same bits.
    pub fn avx512_bf16() -> Option<Level> {
        Self::opt_in().into_iter().flatten().find(|level| level.name() == "avx512-bf16")
    }

    /// AVX-512 with dot products of bytes (VNNI), where the processor has them. Only on request: it
    /// is not exact.
    ///
    /// Over stores of `Int8`, queries are rounded to bytes with one scale a row and head before
    /// they are multiplied with keys; values are weighted as at `avx512`. A score is then off by up
    /// to half a step of the query's scale for each number of the key. Anything else, and keys of
    /// more than 66,311 numbers, is done as at `avx512`, with the same bits.
    pub fn avx512_vnni() -> Option<Level> {
        Self::opt_in().into_iter().flatten().find(|level| level.name() == "avx512-vnni")
    }

    /// The levels that are not exact, where this processor has them: they are not among the
    /// [`available`](Self::available) ones and never chosen by [`detect`](Self::detect).
    #[cfg(target_arch = "x86_64")]
    fn opt_in() -> [Option<Level>; 2] {
        let features = detect::features();
        // SAFETY: the processor was asked.
        let bf16 = features.bf16.then(|| Level(Tier::Avx512Bf16(unsafe { Avx512::assume() })));
        // SAFETY: the processor was asked.
        let vnni = features.vnni.then(|| Level(Tier::Avx512Vnni(unsafe { Avx512::assume() })));
        [bf16, vnni]
    }

    /// The levels that are not exact, where this processor has them.
    #[cfg(not(target_arch = "x86_64"))]
    fn opt_in() -> [Option<Level>; 2] {
        [None, None]
    }

    /// Runs a kernel that uses no dot products.
    ///
    /// Each kernel is compiled for each level that it can be run at: three ways in, so that none is
    /// compiled for levels that it does not need.
    #[inline(always)]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            Tier::Scalar(token) => token.run(kernel),
            Tier::Portable(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512(token) => token.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16(token) => token.plain().run(kernel),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni(token) => token.plain().run(kernel),
        }
    }

    /// Runs a kernel of bf16 pairs.
    ///
    /// # Panics
    ///
    /// Where not [`has_bf16`](Self::has_bf16): a fault of this crate.
    #[inline(always)]
    pub(crate) fn run_bf16<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16(token) => token.run(kernel),
            _ => {
                let _ = kernel;
                out_of_bounds()
            }
        }
    }

    /// Runs a kernel of bytes.
    ///
    /// # Panics
    ///
    /// Where not [`has_i8`](Self::has_i8): a fault of this crate.
    #[inline(always)]
    pub(crate) fn run_i8<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni(token) => token.run(kernel),
            _ => {
                let _ = kernel;
                out_of_bounds()
            }
        }
    }

    /// Whether kernels of bf16 pairs can be run.
    pub(crate) const fn has_bf16(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Bf16(_) => true,
            _ => false,
        }
    }

    /// Whether kernels of bytes can be run.
    pub(crate) const fn has_i8(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512Vnni(_) => true,
            _ => false,
        }
    }

    /// Rows of the largest register tile.
    #[inline(always)]
    pub(crate) const fn rows(self) -> usize {
        match self.0 {
            Tier::Scalar(_) => Scalar::ROWS,
            Tier::Portable(_) => Portable::ROWS,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2(_) => Avx2::ROWS,
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512(_) | Tier::Avx512Bf16(_) | Tier::Avx512Vnni(_) => {
                <Avx512<PLAIN> as Simd>::ROWS
            }
        }
    }

    /// The level at this place from the reference up, as `present` counts them.
    ///
    /// # Safety
    ///
    /// The place must be below what `present` counts on this processor.
    unsafe fn at(place: usize) -> Option<Level> {
        match place {
            0 => Some(Self::SCALAR),
            1 => Some(Self::PORTABLE),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller promises that `present` counts this far: it has seen the features.
            2 => Some(unsafe { Self::assume_avx2() }),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller promises that `present` counts this far: it has seen the features.
            3 => Some(unsafe { Self::assume_avx512() }),
            _ => None,
        }
    }
}

impl PartialEq for Level {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Level {}

impl Hash for Level {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name().hash(state);
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The levels of this processor, see [`Level::available`].
///
/// # Examples
///
/// ```
/// use paged_kv::Level;
///
/// // The last is the best that gives the default bits; one can be asked for by name.
/// for level in Level::available() {
///     println!("{level}");
/// }
/// assert!(Level::available().any(|level| level.name() == "scalar"));
/// ```
#[derive(Clone, Debug)]
pub struct Levels {
    present: usize,
    next: usize,
}

impl Iterator for Levels {
    type Item = Level;

    fn next(&mut self) -> Option<Level> {
        let place = (self.next < self.present).then_some(self.next)?;
        self.next += 1;
        // SAFETY: below `present`.
        unsafe { Level::at(place) }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.present - self.next;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Levels {}

impl FusedIterator for Levels {}

/// How many levels there are, from the reference up without a gap.
fn present() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let features = detect::features();
        2 + usize::from(features.avx2) + usize::from(features.avx512)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        2
    }
}

/// Asks the processor and remembers. Two threads that ask at once write the same answer.
#[cold]
#[inline(never)]
fn ask(best: &AtomicU8) -> Level {
    let present = present();
    best.store(present as u8, Ordering::Relaxed);
    // SAFETY: the last place that `present` counts.
    unsafe { Level::at(present - 1) }.unwrap_or(Level::PORTABLE)
}
