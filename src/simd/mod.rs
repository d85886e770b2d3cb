//! Sixteen numbers at a time: the room of `unsafe`.
//!
//! The room knows vector instructions and nothing else. It refuses to know what the numbers mean:
//! there is no key, no block and no softmax in here.
//!
//! A back end is a zero-sized *token* that can only be had by detecting the processor's features,
//! and its operations are safe methods of that token: who holds an `Avx512` has proof that the
//! instructions exist. Kernels are structs that implement [`Kernel`] over any token and contain
//! no `unsafe`. [`Level`] is a token chosen at run time, and [`Level::run`] is the way in.
//!
//! The `#[target_feature]` of a level stands at its back end's `door` functions and nowhere else.
//! Operations and kernels are `#[inline(always)]`, so that a whole kernel is compiled inside a door
//! with its features on; a piece left outside would be compiled for the baseline processor,
//! silently and ten times slower.
//!
//! A kernel may run smaller ones through [`Simd::run`]: each is then a function of its own, with
//! the registers to itself. The inner loops are compiled so. In one function with everything
//! around them they were slower by up to a fifth, because constants of the softmax, kept in
//! registers over the whole walk, left them too few.
//!
//! # One vector, sixteen lanes
//!
//! Every back end shows the same logical vector of sixteen `f32`, whatever its registers: one zmm,
//! two ymm, four xmm or sixteen plain floats. That costs nothing (a tile of two zmm is a tile of
//! four ymm) and it is what makes bits comparable: a lane is a position at every level, and the
//! one tree in which sixteen lanes are summed is written down once, see [`Simd::reduce_sum`].
//!
//! # Two classes
//!
//! `mul_add` rounds once where the processor fuses it and twice where it does not, and
//! [`Simd::FUSED`] says which. Inside a class every level gives the same bits. The compiler never
//! contracts `a * b + c` by itself.

#![expect(
    unsafe_code,
    reason = "the room of unsafe: intrinsics behind tokens, and the loop behind its check"
)]

pub(crate) mod product;

mod level;
mod portable;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod detect;

pub use level::{Level, Levels};

/// Lanes of the logical vector.
pub(crate) const LANES: usize = 16;

/// The largest number of rows in a register tile, over all levels.
pub(crate) const MOST_ROWS: usize = 8;

// A vector has two lanes for each row.
const _: () = assert!(LANES == 2 * MOST_ROWS);

use crate::cut::out_of_bounds;

mod sealed {
    pub trait Sealed {}
}

/// A proof that a set of instructions exists, and what can be done with them.
///
/// Comparisons and `max` with a NaN are not the same at every level (some processors keep the
/// NaN, some drop it), so a kernel must not depend on them to see one; arithmetic keeps it.
pub trait Simd: sealed::Sealed + Copy + 'static {
    /// Whether `mul_add` rounds once.
    const FUSED: bool;

    /// Rows of the largest register tile, at most [`MOST_ROWS`].
    const ROWS: usize;

    /// Vectors per row in a register tile of that many rows: 1, 2 or 4.
    ///
    /// `rows x columns` accumulators, `columns` loaded vectors and one broadcast must fit the
    /// registers with one to spare, or the tile spills and runs at half speed. With one row the
    /// loaded vectors need no registers of their own: each is used once, straight from memory.
    const COLUMNS: [usize; MOST_ROWS + 1];

    /// The same where each cell is unpacked to several numbers, all while it stands in registers.
    const UNPACKED_COLUMNS: [usize; MOST_ROWS + 1];

    /// Lines of cache that the product loop asks for ahead of each row of cells: 0 or 1.
    const AHEAD: usize;

    /// Whether [`Simd::dot_bf16`] exists.
    const DOT_BF16: bool = false;

    /// Whether [`Simd::dot_i8`] exists.
    const DOT_I8: bool = false;

    /// Sixteen lanes.
    type F32: Copy;

    /// Sixteen lanes of 32 bits.
    type Bits: Copy;

    /// Runs a kernel with the instructions of this level, as a function of its own.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    /// Runs a kernel for so many rows, at most [`Simd::ROWS`], as a function for that number.
    ///
    /// The back end matches the number, so that no function is compiled for numbers it never sees.
    fn run_rows<K: RowsKernel>(self, rows: usize, kernel: K);

    /// The same for at most four rows.
    fn run_few_rows<K: RowsKernel>(self, rows: usize, kernel: K);

    /// The number in every lane.
    fn splat(self, number: f32) -> Self::F32;

    /// Sixteen numbers, from any alignment.
    fn load(self, from: &[f32; LANES]) -> Self::F32;

    /// Writes the lanes, to any alignment.
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]);

    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// `a - b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// `a * b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// `a / b`.
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// The larger; either, where one is a NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;

    /// `a * b + c`, rounded once where [`Simd::FUSED`].
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;

    /// `then` where `a < b`, `or` elsewhere and where one is a NaN.
    fn select_less(self, a: Self::F32, b: Self::F32, then: Self::F32, or: Self::F32) -> Self::F32;

    /// Splits `x` into the nearest whole number `n` (ties to even) and `2^n` times nothing else:
    /// returns `(n, 2^n)`. Right for `-126 <= x <= 127`; lanes outside hold any number, and a NaN
    /// in `x` stays a NaN in `n`.
    fn whole_and_power(self, x: Self::F32) -> (Self::F32, Self::F32);

    /// Sixteen words.
    fn load_bits(self, from: &[u32; LANES]) -> Self::Bits;

    /// Sixteen signed bytes as words.
    fn widen_i8(self, from: &[u8; LANES]) -> Self::Bits;

    /// Sixteen numbers of IEEE 754 binary16, exactly.
    fn widen_f16(self, from: &[u16; LANES]) -> Self::F32;

    /// Each word shifted left.
    fn shift_left<const BY: u32>(self, bits: Self::Bits) -> Self::Bits;

    /// Each word shifted right, its sign kept.
    fn shift_right<const BY: u32>(self, bits: Self::Bits) -> Self::Bits;

    /// Each word and the mask.
    fn mask(self, bits: Self::Bits, mask: u32) -> Self::Bits;

    /// The words taken for the bits of `f32`.
    fn as_f32(self, bits: Self::Bits) -> Self::F32;

    /// The words, signed whole numbers below 2^24, as numbers.
    fn whole_to_f32(self, bits: Self::Bits) -> Self::F32;

    /// Asks for the line at this address to be brought near: to the second-level cache, since in
    /// the first it would drive out what is being worked on. Nothing is read: any address will do.
    fn fetch_ahead(self, at: *const u8);

    /// `sum + a.b` for pairs of bf16 in each lane, `a` the same pair in all of them. Denormal numbers
    /// count as zero.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_BF16`]: a fault of this crate.
    #[inline(always)]
    fn dot_bf16(self, _sum: Self::F32, _a: u32, _b: Self::Bits) -> Self::F32 {
        out_of_bounds()
    }

    /// Rounds to bf16, to nearest, denormal numbers to zero: two neighbours share a word.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_BF16`]: a fault of this crate.
    #[inline(always)]
    fn store_bf16(self, _vector: Self::F32, _to: &mut [u32; LANES / 2]) {
        out_of_bounds()
    }

    /// Packs numbers that bf16 holds exactly: `low` to the low halves, `high` to the high ones.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_BF16`]: a fault of this crate.
    #[inline(always)]
    fn store_pairs(self, _low: Self::F32, _high: Self::F32, _to: &mut [u32; LANES]) {
        out_of_bounds()
    }

    /// Packs two signed bytes of each word, the lower two or the upper two: the low one to the low
    /// half.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_BF16`]: a fault of this crate.
    #[inline(always)]
    fn store_byte_pairs<const UPPER: bool>(self, _bits: Self::Bits, _to: &mut [u32; LANES]) {
        out_of_bounds()
    }

    /// Packs the two signed numbers of four bits in the lowest byte of each word: the low one to the
    /// low half.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_BF16`]: a fault of this crate.
    #[inline(always)]
    fn store_nibble_pairs(self, _bits: Self::Bits, _to: &mut [u32; LANES]) {
        out_of_bounds()
    }

    /// Adds 128 to each byte, which makes signed ones unsigned.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_I8`]: a fault of this crate.
    #[inline(always)]
    fn offset_i8(self, _bytes: Self::Bits) -> Self::Bits {
        out_of_bounds()
    }

    /// `sum + a.b` for fours of bytes in each lane, in whole numbers: `a` the same four signed ones in
    /// all lanes, `b` unsigned.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_I8`]: a fault of this crate.
    #[inline(always)]
    fn dot_i8(self, _sum: Self::Bits, _a: u32, _b: Self::Bits) -> Self::Bits {
        out_of_bounds()
    }

    /// The same word subtracted from each.
    ///
    /// # Panics
    ///
    /// Where not [`Simd::DOT_I8`]: a fault of this crate.
    #[inline(always)]
    fn subtract(self, _words: Self::Bits, _word: u32) -> Self::Bits {
        out_of_bounds()
    }

    /// `value` where `x` is not below the limit (a NaN is not), and zero where it is.
    #[inline(always)]
    fn zero_below(self, limit: Self::F32, x: Self::F32, value: Self::F32) -> Self::F32 {
        self.select_less(x, limit, self.splat(0.0), value)
    }

    /// The largest lane, in the tree of [`Simd::reduce_sum`].
    fn reduce_max(self, vector: Self::F32) -> f32;

    /// The sum of all lanes in one written order: lane `i` with lane `i + 8`, then `i + 4`, then
    /// `i + 2`, then the last two.
    fn reduce_sum(self, vector: Self::F32) -> f32;

    /// The largest lane of each row in lanes `2 row` and `2 row + 1`, in the tree of
    /// [`Simd::reduce_sum`]. There are one to [`MOST_ROWS`] rows; other lanes hold anything.
    #[inline(always)]
    fn max_of_rows<const MR: usize>(self, rows: [Self::F32; MR]) -> Self::F32 {
        self.fold_rows::<true, MR>(rows)
    }

    /// The sum of each row in lanes `2 row` and `2 row + 1`, as [`Simd::reduce_sum`] adds them up.
    /// There are one to [`MOST_ROWS`] rows; other lanes hold anything.
    #[inline(always)]
    fn sums_of_rows<const MR: usize>(self, rows: [Self::F32; MR]) -> Self::F32 {
        self.fold_rows::<false, MR>(rows)
    }

    /// [`Simd::max_of_rows`], or [`Simd::sums_of_rows`].
    #[inline(always)]
    fn fold_rows<const MAX: bool, const MR: usize>(self, rows: [Self::F32; MR]) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        for (pair, row) in lanes.as_chunks_mut().0.iter_mut().zip(rows) {
            *pair = [if MAX { self.reduce_max(row) } else { self.reduce_sum(row) }; 2];
        }
        self.load(&lanes)
    }

    /// Each even lane, and once more behind itself.
    #[inline(always)]
    fn evens(self, vector: Self::F32) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        self.store(vector, &mut lanes);
        for pair in lanes.as_chunks_mut().0 {
            let [even, _] = *pair;
            *pair = [even; 2];
        }
        self.load(&lanes)
    }
}

/// Work that can be done at any level: a closure, written as a struct so that it inlines.
pub trait Kernel {
    /// What it gives back.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn call<S: Simd>(self, s: S) -> Self::Output;
}

/// Work on some rows at once, which is compiled for each number of them.
pub trait RowsKernel {
    /// Does the work for `MR` rows. Implementations are `#[inline(always)]`.
    fn call<S: Simd, const MR: usize>(self, s: S);
}

/// A [`RowsKernel`] for so many rows.
struct ForRows<K, const MR: usize>(K);

impl<K: RowsKernel, const MR: usize> Kernel for ForRows<K, MR> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        self.0.call::<S, MR>(s);
    }
}

#[cfg(test)]
mod tests;
