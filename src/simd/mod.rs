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
//! The `#[target_feature]` of a level stands at its back end's one `door` function and nowhere
//! else. Operations and kernels are `#[inline(always)]`, so that a whole kernel is compiled inside
//! the door with its features on; a piece left outside would be compiled for the baseline
//! processor, silently and ten times slower. Parts that pass the door again, as functions of their
//! own, compile in 60 % of the time and cost 2 to 6 % of decode: measured, and not done.
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

    /// Sixteen lanes.
    type F32: Copy;

    /// The number in every lane.
    fn splat(self, number: f32) -> Self::F32;

    /// Sixteen numbers, from any alignment.
    fn load(self, from: &[f32; LANES]) -> Self::F32;

    /// The first sixteen numbers of `from`, or all of them and zeros behind.
    fn load_partial(self, from: &[f32]) -> Self::F32;

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

    /// The largest lane, in the tree of [`Simd::reduce_sum`].
    fn reduce_max(self, vector: Self::F32) -> f32;

    /// The sum of all lanes in one written order: lane `i` with lane `i + 8`, then `i + 4`, then
    /// `i + 2`, then the last two.
    fn reduce_sum(self, vector: Self::F32) -> f32;
}

/// Work that can be done at any level: a closure, written as a struct so that it inlines.
pub(crate) trait Kernel {
    /// What it gives back.
    type Output;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn call<S: Simd>(self, s: S) -> Self::Output;
}

#[cfg(test)]
mod tests;
