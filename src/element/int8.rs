//! Bytes with one scale for each row of a head, and what all whole numbers with scales share.

use super::tile::Layout;
use super::{Element, Format, NARROW_ROWS};
use crate::attention::Job;
use crate::simd::{LANES, Simd};

/// Signed bytes, with one `f32` scale for each key row and each value row of a KV head.
///
/// The name of a stored type: `PagedKvStore::<Int8>::with_shape(..)`. Nobody holds a value of it.
///
/// # What is stored
///
/// A row's scale is its largest `|x|` divided by 127; each number is `x / scale`, rounded to the
/// nearest whole number (ties to even), in `-127 ..= 127`.
///
/// # Size
///
/// A byte a number and four bytes a row: at width 128, 132 bytes a row, 1.03 bytes a number. Keys
/// stand in fours, so that a key row of a width that is no multiple of four takes up to three bytes
/// more.
///
/// # Error
///
/// Storing is off by half a step at most: 1/254 (0.4 %) of the row's largest number. Attention
/// works on the stored numbers exactly and adds no error beyond that of `f32`.
///
/// # Rows that cannot be scaled
///
/// - With a NaN or an infinity in it, a row's scale is NaN, and so is all of the row: whatever is
///   attended over it is NaN, as it would be for the one number otherwise.
/// - A row whose largest number is so small that the scale would be denormal, below 1.5e-36, is
///   stored as zeros.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::{Int8, KvShape};
///
/// let mut store = PagedKvStore::<Int8>::with_shape(KvShape::square(16, 1, 4)?, 8)?;
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[1.0, -0.5, 0.25, 0.0], &[2.0; 4])?;
/// let mut row = [0.0; 4];
/// cache.copy_k_row(&store, 0, 0, &mut row)?;
/// assert!((row[1] + 0.5).abs() <= 1.0 / 254.0);
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Int8 {}

/// Four bytes in a word, number `j` in byte `j`: what the processor's dot products of bytes read.
#[derive(Clone, Copy, Debug)]
pub struct Quad;

/// A cell is a byte.
#[derive(Clone, Copy, Debug)]
pub struct Byte;

impl Format for Quad {
    type Cell = u32;
    type Raw<S: Simd> = S::Bits;

    const NUMBERS: usize = 4;
    const ROWS: usize = NARROW_ROWS;

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[u32; LANES]) -> S::Bits {
        s.load_bits(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(s: S, raw: S::Bits, index: usize) -> S::F32 {
        // To the top of the word, then down again with its sign.
        let top = match index {
            0 => s.shift_left::<24>(raw),
            1 => s.shift_left::<16>(raw),
            2 => s.shift_left::<8>(raw),
            _ => raw,
        };
        s.whole_to_f32(s.shift_right::<24>(top))
    }

    #[inline(always)]
    fn store_pairs<S: Simd>(
        s: S,
        (raw, index): (S::Bits, usize),
        _: (S::Bits, usize),
        to: &mut [u32; LANES],
    ) {
        match index {
            0 => s.store_byte_pairs::<false>(raw, to),
            _ => s.store_byte_pairs::<true>(raw, to),
        }
    }

    #[inline(always)]
    fn set(cell: &mut u32, index: usize, number: f32) {
        let mut bytes = cell.to_le_bytes();
        bytes[index] = round(number).cast_unsigned();
        *cell = u32::from_le_bytes(bytes);
    }

    #[inline(always)]
    fn get(cell: u32, index: usize) -> f32 {
        f32::from(cell.to_le_bytes()[index].cast_signed())
    }

    #[inline(always)]
    fn put(cell: &mut u32, index: usize, from: u32, from_index: usize) {
        let mut bytes = cell.to_le_bytes();
        bytes[index] = from.to_le_bytes()[from_index];
        *cell = u32::from_le_bytes(bytes);
    }
}

impl Format for Byte {
    type Cell = u8;
    type Raw<S: Simd> = S::Bits;

    const NUMBERS: usize = 1;
    const ROWS: usize = NARROW_ROWS;

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[u8; LANES]) -> S::Bits {
        s.widen_i8(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(s: S, raw: S::Bits, _: usize) -> S::F32 {
        s.whole_to_f32(raw)
    }

    #[inline(always)]
    fn set(cell: &mut u8, _: usize, number: f32) {
        *cell = round(number).cast_unsigned();
    }

    #[inline(always)]
    fn get(cell: u8, _: usize) -> f32 {
        f32::from(cell.cast_signed())
    }
}

impl Element for Int8 {
    type K = Quad;
    type V = Byte;

    const NAME: &'static str = "int8";
    const CODE: u8 = 4;
    const META_GROUP: usize = usize::MAX;
    const WHOLE: bool = true;
    const QUADS: bool = true;

    #[inline(always)]
    fn scale(row: &[f32]) -> f32 {
        scale(row, 127.0)
    }

    #[inline(never)]
    fn write(layout: &Layout<Int8>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(job: &mut Job<'_, '_, Int8>) {
        job.run();
    }
}

/// What numbers are divided by, so that the largest of them becomes `most`: NaN where one is not
/// finite, 0 where the scale would be denormal.
#[inline(always)]
pub(super) fn scale(numbers: &[f32], most: f32) -> f32 {
    // Sizes order like their bits, with infinity and then NaN above all numbers.
    let size = |number: &f32| number.to_bits() & 0x7fff_ffff;
    let largest = f32::from_bits(numbers.iter().map(size).fold(0, u32::max));
    if !largest.is_finite() {
        return f32::NAN;
    }
    let scale = largest / most;
    if scale < f32::MIN_POSITIVE {
        0.0
    } else if scale * most == f32::INFINITY {
        // `f32::MAX` itself, whose 127th part is rounded up.
        scale.next_down()
    } else {
        scale
    }
}

/// The nearest whole number of at most seven bits and a sign, ties to even; 0 for a NaN.
#[inline(always)]
pub(super) fn round(number: f32) -> i8 {
    // Beside 1.5 x 2^23 there are only whole numbers.
    const MAGIC: f32 = 12_582_912.0;
    ((number + MAGIC) - MAGIC) as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::{assert_every_level_reads, assert_pairs_are_exact};

    /// Every byte in every place of a cell, the places beside it full of others.
    #[test]
    fn every_byte_is_read_exactly() {
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = core::array::from_fn(|lane| first + lane as u8);
            let want = bytes.map(|byte| f32::from(byte.cast_signed()));
            assert_every_level_reads::<Byte>(&bytes, 0, &want);
            for index in 0..4 {
                for beside in [0x00, 0x7f, 0x80, 0xff, 0xa5] {
                    let cells = bytes.map(|byte| {
                        let mut cell = [beside; 4];
                        cell[index] = byte;
                        u32::from_le_bytes(cell)
                    });
                    assert_every_level_reads::<Quad>(&cells, index, &want);
                    assert_pairs_are_exact::<Quad>(&cells, index / 2 * 2);
                }
            }
        }
    }

    #[test]
    fn numbers_are_rounded_to_nearest_even_beside_their_neighbours() {
        for index in 0..4 {
            let before = [0x80, 0x7f, 0x12, 0xfe];
            let mut cell = u32::from_le_bytes(before);
            for whole in -127_i8..=127 {
                for (off, want) in [
                    (0.0, whole),
                    (0.499_99, whole),
                    (-0.499_99, whole),
                    (0.5, whole.saturating_add(whole & 1)),
                ] {
                    if whole == 127 && off == 0.5 {
                        // Past what a scale makes of the largest number.
                        continue;
                    }
                    Quad::set(&mut cell, index, f32::from(whole) + off);
                    let mut expected = before;
                    expected[index] = want.cast_unsigned();
                    assert_eq!(cell.to_le_bytes(), expected, "{whole} + {off}");
                    assert_eq!(Quad::get(cell, index), f32::from(want));
                    let mut byte = 0xaa;
                    Byte::set(&mut byte, 0, f32::from(whole) + off);
                    assert_eq!(Byte::get(byte, 0), f32::from(want));
                }
            }
        }
        assert_eq!((round(f32::NAN), round(-f32::NAN)), (0, 0));
    }

    #[test]
    fn scales_of_rows_that_cannot_be_scaled() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in [[1.0, bad, 2.0], [bad, 0.0, 0.0], [f32::MAX, 1.0, bad]] {
                assert!(Int8::scale(&row).is_nan());
            }
        }
        assert_eq!(Int8::scale(&[]), 0.0);
        assert_eq!(Int8::scale(&[0.0, -0.0]).to_bits(), 0);
        assert_eq!(Int8::scale(&[0.0, -1e-40]), 0.0);
        assert_eq!(Int8::scale(&[1.49e-36, 0.0]), 0.0);
        assert!(Int8::scale(&[1.5e-36]) >= f32::MIN_POSITIVE);
        assert_eq!(Int8::scale(&[-127.0, 3.0]), 1.0);
        for large in [f32::MAX, f32::MIN, f32::MAX.next_down()] {
            let scale = Int8::scale(&[1.0, large]);
            assert!((scale * 127.0).is_finite());
            assert_eq!(f32::from(round(large * (1.0 / scale))), 127.0_f32.copysign(large));
        }
    }
}
