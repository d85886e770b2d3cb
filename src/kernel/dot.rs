//! Dot products of neighbouring numbers, where the processor has them.
//!
//! They are faster and not exact: queries and weights are rounded, to bf16 or to bytes. Nobody gets
//! them without asking for their level by name.

use super::scores::{KeyStep, Queries};
use super::values::{Extent, ValueStep};
use super::{LANE, ScoreRow};
use crate::cut;
use crate::simd::product::Step;
use crate::simd::{Kernel, LANES, Level, MOST_ROWS, Simd};

/// Pairs of bf16. One factor is a pair, too; products of a pair are added in the processor's
/// order, with sums that are denormal taken for zero.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Pairs;

impl Step for Bf16Pairs {
    type Cell = u32;
    type Factor = u32;
    type Sum<S: Simd> = S::F32;

    const NUMBERS: usize = 2;
    const FACTORS: usize = 1;
    const ROWS: usize = MOST_ROWS;

    #[inline(always)]
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output {
        level.run_bf16(kernel)
    }

    #[inline(always)]
    fn zero<S: Simd>(s: S) -> S::F32 {
        s.splat(0.0)
    }

    #[inline(always)]
    fn add<S: Simd, const MR: usize, const NV: usize>(
        s: S,
        sums: &mut [[S::F32; NV]; MR],
        cells: [&[u32; LANES]; NV],
        from_to: (usize, usize),
        factor: impl Fn(usize, usize) -> u32,
    ) {
        // A number that is not seen is not multiplied by zero but made zero: it may be a NaN.
        let mask = match from_to {
            (0, 2) => u32::MAX,
            (0, _) => 0x0000_ffff,
            _ => 0xffff_0000,
        };
        let mut pairs = [s.load_bits(cells[0]); NV];
        for (pair, cells) in pairs.iter_mut().zip(cells) {
            *pair = s.load_bits(cells);
            if from_to != (0, 2) {
                *pair = s.mask(*pair, mask);
            }
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let number = factor(row, 0);
            for (sum, pair) in sums.iter_mut().zip(pairs) {
                *sum = s.dot_bf16(*sum, number, pair);
            }
        }
    }
}

impl KeyStep for Bf16Pairs {
    #[inline(always)]
    fn score<S: Simd>(_: S, sum: S::F32, _: &Queries<'_, u32>, _: usize) -> S::F32 {
        sum
    }
}

impl ValueStep for Bf16Pairs {
    const PLAIN: bool = false;

    #[inline(always)]
    fn resume<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }

    #[inline(always)]
    fn sum<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }

    #[inline(always)]
    fn factors<S: Simd>(
        s: S,
        weights: &ScoreRow,
        scales: Option<&ScoreRow>,
        extent: Extent,
        factors: &mut ScoreRow,
    ) {
        let words = bytemuck::must_cast_slice_mut::<f32, u32>(factors);
        let (from, to) = (s.splat(extent.from as f32), s.splat(extent.to as f32));
        let nothing = s.splat(0.0);
        for vector in extent.from / LANES..extent.to.div_ceil(LANES) {
            let mut weight = s.load(cut::one(weights.as_chunks().0, vector));
            if let Some(scales) = scales {
                weight = s.mul(weight, s.load(cut::one(scales.as_chunks().0, vector)));
            }
            // What is not seen may be anything here, and its scale, too.
            if extent != Extent::WHOLE {
                let position = s.add(s.splat((vector * LANES) as f32), s.load(&LANE));
                weight = s.select_less(position, to, weight, nothing);
                weight = s.select_less(position, from, nothing, weight);
            }
            s.store_bf16(weight, cut::one_mut(words.as_chunks_mut().0, vector));
        }
    }
}

/// Packs a query row into pairs; where its width is odd, the last pair's other number is zero.
#[inline(always)]
pub(crate) fn pack_pairs<S: Simd>(s: S, row: &[f32], pairs: &mut [u32]) {
    let (whole, rest) = row.as_chunks();
    let (packed, packed_rest) = cut::split(pairs, whole.len() * LANES / 2);
    for (numbers, pairs) in whole.iter().zip(packed.as_chunks_mut().0) {
        s.store_bf16(s.load(numbers), pairs);
    }
    if !rest.is_empty() {
        let mut lanes = [0.0; LANES];
        cut::part_mut(&mut lanes, 0, rest.len()).copy_from_slice(rest);
        let mut packed = [0; LANES / 2];
        s.store_bf16(s.load(&lanes), &mut packed);
        packed_rest.copy_from_slice(cut::part(&packed, 0, packed_rest.len()));
    }
}

/// Fours of signed bytes, for keys: exact sums of whole numbers, made scores by the row's scale.
///
/// A row of factors has two words more: what the sum is too large by, since the processor
/// multiplies unsigned bytes and 128 is added to each byte of a key; and the scale, as bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct I8Quads;

/// Words behind a row of quads.
pub(crate) const QUADS_TAIL: usize = 2;

/// The widest key whose sums are sure to fit: 66,311 numbers of at most 255, with 128 added, times at
/// most 127. Wider ones are multiplied as `f32`.
pub(crate) const QUADS_WIDTH: usize = (i32::MAX / (255 * 127)) as usize;

impl Step for I8Quads {
    type Cell = u32;
    type Factor = u32;
    type Sum<S: Simd> = S::Bits;

    const NUMBERS: usize = 4;
    const FACTORS: usize = 1;
    const ROWS: usize = MOST_ROWS;

    #[inline(always)]
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output {
        level.run_i8(kernel)
    }

    #[inline(always)]
    fn zero<S: Simd>(s: S) -> S::Bits {
        s.load_bits(&[0; LANES])
    }

    #[inline(always)]
    fn add<S: Simd, const MR: usize, const NV: usize>(
        s: S,
        sums: &mut [[S::Bits; NV]; MR],
        cells: [&[u32; LANES]; NV],
        _: (usize, usize),
        factor: impl Fn(usize, usize) -> u32,
    ) {
        let mut quads = [s.load_bits(cells[0]); NV];
        for (quad, cells) in quads.iter_mut().zip(cells) {
            *quad = s.offset_i8(s.load_bits(cells));
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let number = factor(row, 0);
            for (sum, quad) in sums.iter_mut().zip(quads) {
                *sum = s.dot_i8(*sum, number, quad);
            }
        }
    }
}

impl KeyStep for I8Quads {
    #[inline(always)]
    fn score<S: Simd>(s: S, sum: S::Bits, q: &Queries<'_, u32>, line: usize) -> S::F32 {
        match q.row(line).last_chunk::<QUADS_TAIL>() {
            Some([excess, scale]) => {
                let whole = s.subtract(sum, *excess);
                s.mul(s.whole_to_f32(whole), s.splat(f32::from_bits(*scale)))
            }
            None => cut::out_of_bounds(),
        }
    }
}

/// Rounds a query row to bytes and packs them in fours, with the tail that [`I8Quads`] wants. A
/// number that is none makes all of the row's scores NaN.
pub(crate) fn pack_quads(row: &[f32], quads: &mut [u32]) {
    let Some((quads, tail)) = quads.split_last_chunk_mut::<QUADS_TAIL>() else {
        cut::out_of_bounds()
    };
    let finite = row.iter().all(|number| number.is_finite());
    let most = row.iter().fold(0.0, |most: f32, number| most.max(number.abs()));
    // Below this, its inverse would be infinite, and scores are zero as well as anything.
    let usable = finite && most > 127.0 / f32::MAX;
    let inverse = if usable { 127.0 / most } else { 0.0 };
    let mut total = 0i32;
    for (numbers, quad) in row.chunks(4).zip(quads) {
        let mut bytes = [0u8; 4];
        for (byte, number) in bytes.iter_mut().zip(numbers) {
            // To nearest, ties to even, by the sum that leaves no digits behind the point.
            const WHOLE: f32 = 12_582_912.0;
            let whole = (number * inverse + WHOLE) - WHOLE;
            let whole = whole.clamp(-127.0, 127.0) as i8;
            total += i32::from(whole);
            *byte = whole.cast_unsigned();
        }
        *quad = u32::from_le_bytes(bytes);
    }
    let scale = if finite { most / 127.0 } else { f32::NAN };
    *tail = [(total * 128).cast_unsigned(), scale.to_bits()];
}
