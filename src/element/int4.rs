//! Four bits a number, two neighbours to a byte, with a scale for each 32 numbers of a row.

use super::int8::{round, scale};
use super::tile::Layout;
use super::{Element, Format, NARROW_ROWS};
use crate::attention::Job;
use crate::simd::{LANES, Simd};

/// Four bits a number, with one `f32` scale for each 32 neighbouring numbers of a row.
///
/// The name of a stored type: `PagedKvStore::<Int4>::with_shape(..)`. Nobody holds a value of it.
///
/// # What is stored
///
/// A group's scale is its largest `|x|` divided by 7; each number is `x / scale`, rounded to the
/// nearest whole number (ties to even), in `-7 ..= 7`. The last group of a row is shorter where the
/// width is no multiple of 32.
///
/// # Size
///
/// Half a byte a number and four bytes a group: 0.625 bytes a number, 5 bits, where 32 divides the
/// width. Two neighbours share a byte (along the width for keys, along the positions for values),
/// of which an odd width or an odd block size leaves half unused in the last.
///
/// # Error
///
/// Storing is off by half a step at most: 1/14 (7.2 %) of the group's largest number. That is a lot,
/// and whether a model bears it has to be tried. Attention works on the stored numbers exactly and
/// adds no error beyond that of `f32`.
///
/// # Groups that cannot be scaled
///
/// As for [`Int8`](crate::Int8), group by group: with a NaN or an infinity in it all of a group is
/// NaN, and a group whose largest number is below 8.3e-38 is stored as zeros.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::{Int4, KvShape};
///
/// let mut store = PagedKvStore::<Int4>::with_shape(KvShape::square(16, 1, 4)?, 8)?;
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[1.0, -0.5, 0.25, 0.0], &[2.0; 4])?;
/// let mut row = [0.0; 4];
/// cache.copy_k_row(&store, 0, 0, &mut row)?;
/// assert!((row[1] + 0.5).abs() <= 1.0 / 14.0);
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Int4 {}

/// A cell is two numbers in two's complement: number 0 in the low four bits, number 1 in the high
/// ones.
#[derive(Clone, Copy, Debug)]
pub struct Nibbles;

impl Format for Nibbles {
    type Cell = u8;
    type Raw<S: Simd> = S::Bits;

    const NUMBERS: usize = 2;
    const ROWS: usize = NARROW_ROWS;

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[u8; LANES]) -> S::Bits {
        s.widen_i8(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(s: S, raw: S::Bits, index: usize) -> S::F32 {
        let whole = match index {
            0 => s.shift_right::<28>(s.shift_left::<28>(raw)),
            // The byte's sign, which the word has, is this number's.
            _ => s.shift_right::<4>(raw),
        };
        s.whole_to_f32(whole)
    }

    /// Both numbers of a cell at once.
    #[inline(always)]
    fn store_pairs<S: Simd>(
        s: S,
        (raw, _): (S::Bits, usize),
        _: (S::Bits, usize),
        to: &mut [u32; LANES],
    ) {
        s.store_nibble_pairs(raw, to);
    }

    #[inline(always)]
    fn set(cell: &mut u8, index: usize, number: f32) {
        let bits = round(number).cast_unsigned();
        *cell = match index {
            0 => *cell & 0xf0 | bits & 0x0f,
            _ => *cell & 0x0f | bits << 4,
        };
    }

    #[inline(always)]
    fn get(cell: u8, index: usize) -> f32 {
        let top = match index {
            0 => cell << 4,
            _ => cell,
        };
        f32::from(top.cast_signed() >> 4)
    }

    #[inline(always)]
    fn put(cell: &mut u8, index: usize, from: u8, from_index: usize) {
        let bits = (from >> (4 * from_index)) & 0x0f;
        *cell = match index {
            0 => *cell & 0xf0 | bits,
            _ => *cell & 0x0f | bits << 4,
        };
    }
}

impl Element for Int4 {
    type K = Nibbles;
    type V = Nibbles;

    const NAME: &'static str = "int4";
    const CODE: u8 = 5;
    const META_GROUP: usize = 32;
    const WHOLE: bool = true;

    #[inline(always)]
    fn scale(group: &[f32]) -> f32 {
        scale(group, 7.0)
    }

    #[inline(never)]
    fn write(layout: &Layout<Int4>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(job: &mut Job<'_, '_, Int4>) {
        job.run();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::{assert_every_level_reads, assert_pairs_are_exact};

    #[test]
    fn every_byte_is_read_exactly() {
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = core::array::from_fn(|lane| first + lane as u8);
            let signed = |bits: u8| f32::from(if bits < 8 { bits as i8 } else { bits as i8 - 16 });
            assert_every_level_reads::<Nibbles>(&bytes, 0, &bytes.map(|byte| signed(byte % 16)));
            assert_every_level_reads::<Nibbles>(&bytes, 1, &bytes.map(|byte| signed(byte / 16)));
        }
    }

    #[test]
    fn every_byte_is_a_pair_of_bf16() {
        for first in (0..=u8::MAX).step_by(LANES) {
            let bytes: [u8; LANES] = core::array::from_fn(|lane| first + lane as u8);
            assert_pairs_are_exact::<Nibbles>(&bytes, 0);
        }
    }

    #[test]
    fn a_number_is_set_beside_its_neighbour() {
        for before in 0..=u8::MAX {
            for whole in -7_i8..=7 {
                for off in [0.0, 0.499, -0.499] {
                    for index in 0..2 {
                        let mut cell = before;
                        Nibbles::set(&mut cell, index, f32::from(whole) + off);
                        assert_eq!(Nibbles::get(cell, index), f32::from(whole));
                        assert_eq!(Nibbles::get(cell, 1 - index), Nibbles::get(before, 1 - index));
                    }
                }
            }
        }
    }

    #[test]
    fn scales_of_groups_that_cannot_be_scaled() {
        assert!(Int4::scale(&[1.0, f32::NEG_INFINITY]).is_nan());
        assert!(Int4::scale(&[f32::NAN, 1.0]).is_nan());
        assert_eq!(Int4::scale(&[8.2e-38, 0.0]), 0.0);
        assert!(Int4::scale(&[8.3e-38]) >= f32::MIN_POSITIVE);
        assert_eq!(Int4::scale(&[1.0, -7.0]), 1.0);
        assert!((Int4::scale(&[f32::MIN]) * 7.0).is_finite());
    }
}
