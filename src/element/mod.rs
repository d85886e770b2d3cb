//! What a stored number is, and where it stands in a page.
//!
//! This room knows two things. [`tile`] draws the page: which of a block's bytes belong to which
//! position, KV head and column. A [`Format`] says how numbers are packed into *cells*, and the
//! [`Element`] trait which formats and scales a stored type has. The room refuses to know about block
//! tables, free lists and locks (`storage`), and about softmax (`kernel`).
//!
//! There is one file for each type:
//!
//! | file | type | cells of keys | cells of values | scales |
//! |---|---|---|---|---|
//! | `float` | `f32` | one number | one | none |
//! | `f16` | `half::f16` | one number | one | none |
//! | `bf16` | `half::bf16` | pairs in a word | pairs in a word | none |
//! | `int8` | [`Int8`] | fours of bytes in a word | one byte | one a row and KV head |
//! | `int4` | [`Int4`] | pairs in a byte | pairs in a byte | one for each 32 of a row |
//!
//! # Cells
//!
//! A cell is what a lane of a vector reads at once: one `f32`, or two neighbouring bf16, or four
//! bytes. The numbers of a cell are neighbours along the *chain* of a product (the width of a key,
//! the positions of a value), never along the lanes, so that one load of sixteen cells feeds that
//! many steps of the chain. How cells are packed belongs to the type and not to the level: any
//! level reads any store.
//!
//! # Scales
//!
//! Integers come with scales: one `f32` for each row and each group of [`Element::META_GROUP`]
//! numbers of it. The numbers in the cells are multiplied as they are; a key's scale is applied to
//! the score it produced, a value's to the weight that it is multiplied by, in both cases once for
//! sixteen positions at a time. Whether a tile is read in place or unpacked first, the arithmetic is
//! the same, and so are the bits.
//!
//! # Adding a type
//!
//! One file here: the formats, the scales, and the entry methods that compile the kernels for it.
//! The entry methods are not generic on purpose: what is generic is compiled in the crate that uses
//! it, with *that* crate's optimisation level, and an inference engine's debug build would then run
//! attention a hundred times slower. They are the one place where this room looks at a room behind
//! it (`attention::Job`).

mod bf16;
mod f16;
pub(crate) mod float;
mod int4;
mod int8;
pub(crate) mod tile;

pub use int4::Int4;
pub use int8::Int8;

use core::fmt::Debug;

use bytemuck::Pod;

use crate::attention::Job;
use crate::simd::product::Step;
use crate::simd::{Kernel, LANES, Level, RowsKernel, Simd};
use tile::Layout;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for super::Int8 {}
    impl Sealed for super::Int4 {}
}

/// `Format::ROWS` of what is narrower than `f32`. Making numbers of cells costs about as much as
/// two multiply-adds, which four rows share.
const NARROW_ROWS: usize = 4;

/// How numbers are packed into cells.
pub trait Format: Copy + Debug + Send + Sync + 'static {
    /// What stands in memory.
    type Cell: Pod;

    /// Sixteen cells in registers.
    type Raw<S: Simd>: Copy;

    /// Numbers in a cell: 1, 2 or 4.
    const NUMBERS: usize;

    /// The most rows for which cells are read in place; with more, tiles are unpacked to `f32` first
    /// and read once for all of them.
    const ROWS: usize;

    /// Runs a kernel for so many rows, at most [`Format::ROWS`].
    fn run_rows<S: Simd, K: RowsKernel>(s: S, rows: usize, kernel: K) {
        s.run_few_rows(rows, kernel);
    }

    /// Reads sixteen neighbouring cells.
    fn load<S: Simd>(s: S, cells: &[Self::Cell; LANES]) -> Self::Raw<S>;

    /// Number `index` of each cell.
    fn number<S: Simd>(s: S, raw: Self::Raw<S>, index: usize) -> S::F32;

    /// Packs two neighbouring numbers, each by its cell and its place there, to the halves of bf16
    /// pairs; those that share a cell begin at an even place. Only where bf16 holds them exactly,
    /// and at levels that have bf16.
    #[inline(always)]
    fn store_pairs<S: Simd>(
        s: S,
        low: (Self::Raw<S>, usize),
        high: (Self::Raw<S>, usize),
        to: &mut [u32; LANES],
    ) {
        s.store_pairs(Self::number(s, low.0, low.1), Self::number(s, high.0, high.1), to);
    }

    /// Puts a number, divided by its scale, in place `index` of a cell.
    fn set(cell: &mut Self::Cell, index: usize, number: f32);

    /// Number `index` of a cell, its scale left out.
    fn get(cell: Self::Cell, index: usize) -> f32;

    /// Puts number `from_index` of a cell in place `index` of another, bit by bit.
    #[inline(always)]
    fn put(cell: &mut Self::Cell, index: usize, from: Self::Cell, from_index: usize) {
        const { assert!(Self::NUMBERS == 1, "a number that shares its cell is cut out of it") };
        debug_assert!(index == 0 && from_index == 0);
        *cell = from;
    }
}

/// A type that keys and values can be stored as. Sealed: the implementors are this crate's.
///
/// | type | bytes a number, at width 128 | storing is off by at most |
/// |---|---|---|
/// | `f32` | 4 | nothing |
/// | [`f16`](half::f16) | 2 | 2^-11 of the number, from 2^-14 up; above 65,504 it is infinite |
/// | [`bf16`](half::bf16) | 2 | 2^-8 of the number |
/// | [`Int8`] | 1.03 | 1/254 of the row's largest number |
/// | [`Int4`] | 0.625 | 1/14 of the largest of 32 neighbours |
///
/// Numbers are rounded to nearest, ties to even. What is stored is then attended over exactly: sums
/// are `f32` for every type, and the error beyond storing is that of `f32`. (Two levels that are only
/// used on request are an exception and say so.) What storing makes of attention's results is told in
/// figures in [`manual::accuracy`](crate::manual::accuracy).
///
/// A NaN is stored as a NaN and an infinity as one; for [`Int8`] and [`Int4`] either of them makes NaN
/// of everything that shares its scale.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::PagedKvStore;
/// use paged_kv::{Element, Int4, KvShape, ShapeError, f16};
///
/// /// What an engine prints before it picks a stored type.
/// fn line<E: Element>(shape: KvShape) -> Result<String, ShapeError> {
///     let block = PagedKvStore::<E>::with_shape(shape, 1)?.bytes_per_block();
///     Ok(format!("{}: {} bytes a position", E::NAME, block / shape.block_size()))
/// }
///
/// let shape = KvShape::square(64, 8, 128)?;
/// assert_eq!(line::<f16>(shape)?, "f16: 4096 bytes a position");
/// assert_eq!(line::<Int4>(shape)?, "int4: 1280 bytes a position");
/// # Ok::<(), ShapeError>(())
/// ```
pub trait Element: sealed::Sealed + Copy + Debug + Send + Sync + 'static {
    /// How keys are packed, along the width.
    #[doc(hidden)]
    type K: Format;

    /// How values are packed, along the positions.
    #[doc(hidden)]
    type V: Format;

    /// The name used in reports: `f32`.
    const NAME: &'static str;

    /// The name in saved sequences: never 0, and never another's.
    #[doc(hidden)]
    const CODE: u8;

    /// Neighbouring numbers of a row that share a scale; 0 where there are no scales.
    #[doc(hidden)]
    const META_GROUP: usize = 0;

    /// Whether keys and values are bf16 pairs as they stand.
    #[doc(hidden)]
    const PAIRS: bool = false;

    /// Whether numbers, without their scales, are whole and small: bf16 holds them exactly.
    #[doc(hidden)]
    const WHOLE: bool = false;

    /// Whether keys stand in fours of signed bytes.
    #[doc(hidden)]
    const QUADS: bool = false;

    /// The scale of a group: what its numbers are divided by before they are stored.
    #[doc(hidden)]
    fn scale(group: &[f32]) -> f32 {
        let _ = group;
        1.0
    }

    /// Writes rows `[n][n_kv_heads][k_width]` and `[n][n_kv_heads][v_width]` to the positions
    /// `first ..` of a block.
    #[doc(hidden)]
    fn write(layout: &Layout<Self>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]);

    /// Runs attention over pages of this type.
    #[doc(hidden)]
    fn attend(job: &mut Job<'_, '_, Self>);
}

/// The name of the stored type with this [`Element::CODE`].
pub(crate) fn name_of(code: u8) -> Option<&'static str> {
    fn named<E: Element>() -> (u8, &'static str) {
        (E::CODE, E::NAME)
    }
    let all = [
        named::<f32>(),
        named::<half::f16>(),
        named::<half::bf16>(),
        named::<Int8>(),
        named::<Int4>(),
    ];
    all.into_iter().find(|named| named.0 == code).map(|named| named.1)
}

/// Plain arithmetic: every stored number becomes an `f32` and meets a factor of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widen<F>(core::marker::PhantomData<F>);

impl<F: Format> Step for Widen<F> {
    type Cell = F::Cell;
    type Factor = f32;
    type Sum<S: Simd> = S::F32;

    const NUMBERS: usize = F::NUMBERS;
    const FACTORS: usize = F::NUMBERS;
    const ROWS: usize = F::ROWS;

    #[inline(always)]
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output {
        level.run(kernel)
    }

    #[inline(always)]
    fn run_rows<S: Simd, K: RowsKernel>(s: S, rows: usize, kernel: K) {
        F::run_rows(s, rows, kernel);
    }

    #[inline(always)]
    fn zero<S: Simd>(s: S) -> S::F32 {
        s.splat(0.0)
    }

    #[inline(always)]
    fn add<S: Simd, const MR: usize, const NV: usize>(
        s: S,
        sums: &mut [[S::F32; NV]; MR],
        cells: [&[F::Cell; LANES]; NV],
        (from, to): (usize, usize),
        factor: impl Fn(usize, usize) -> f32,
    ) {
        let mut raw = [F::load(s, cells[0]); NV];
        for (raw, cells) in raw.iter_mut().zip(cells) {
            *raw = F::load(s, cells);
        }
        for index in 0..F::NUMBERS {
            if index < from || index >= to {
                continue;
            }
            let mut vectors = [s.splat(0.0); NV];
            for (vector, raw) in vectors.iter_mut().zip(raw) {
                *vector = F::number(s, raw, index);
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let number = s.splat(factor(row, index));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = s.mul_add(number, vector, *sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Kernel;

    /// Bits, with one pattern for every NaN: payloads are nobody's promise.
    pub(super) fn same_nan(number: f32) -> u32 {
        if number.is_nan() { 0x7fc0_0000 } else { number.to_bits() }
    }

    struct Read<'a, F: Format>(&'a [F::Cell; LANES], usize);

    impl<F: Format> Kernel for Read<'_, F> {
        type Output = [f32; LANES];

        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> [f32; LANES] {
            let mut numbers = [0.0; LANES];
            s.store(F::number(s, F::load(s, self.0), self.1), &mut numbers);
            numbers
        }
    }

    /// Number `index` of each cell is what is wanted, one by one and in registers at every level.
    pub(super) fn assert_every_level_reads<F: Format>(
        cells: &[F::Cell; LANES],
        index: usize,
        want: &[f32; LANES],
    ) {
        let want = want.map(same_nan);
        assert_eq!(cells.map(|cell| same_nan(F::get(cell, index))), want);
        for level in crate::Level::available() {
            let have = level.run(Read::<F>(cells, index)).map(same_nan);
            assert_eq!(have, want, "{level}, number {index}");
        }
    }

    struct Pairs<'a, F: Format>(&'a [F::Cell; LANES], usize);

    impl<F: Format> Kernel for Pairs<'_, F> {
        type Output = [u32; LANES];

        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> [u32; LANES] {
            let mut pairs = [0; LANES];
            if S::DOT_BF16 {
                let raw = F::load(s, self.0);
                F::store_pairs(s, (raw, self.1), (raw, self.1 + 1), &mut pairs);
            }
            pairs
        }
    }

    /// Two neighbouring numbers of each cell become the upper halves of what they are as `f32`.
    pub(super) fn assert_pairs_are_exact<F: Format>(cells: &[F::Cell; LANES], index: usize) {
        let Some(level) = crate::Level::avx512_bf16() else {
            std::eprintln!("NOT TESTED: this processor has no bf16");
            return;
        };
        let want = cells.map(|cell| {
            let bits = |index| F::get(cell, index).to_bits();
            bits(index) >> 16 | bits(index + 1)
        });
        assert_eq!(level.run_bf16(Pairs::<F>(cells, index)), want);
    }
}
