//! bfloat16, two neighbours to a cell.
//!
//! A bf16 is the upper half of an `f32`, so that a shift or a mask makes it one. Two of them share
//! a word because that is what the processor's dot products of bf16 read; for plain arithmetic it
//! makes no difference which of the two comes first.

use half::bf16;

use super::tile::Layout;
use super::{Element, Format, NARROW_ROWS};
use crate::attention::Job;
use crate::simd::{LANES, Simd};

/// A cell is two numbers: number 0 in the low half of the word, number 1 in the high half.
#[derive(Clone, Copy, Debug)]
pub struct Pair;

/// The half of the word that is an `f32`'s upper half already.
const HIGH: u32 = 0xffff_0000;

impl Format for Pair {
    type Cell = u32;
    type Raw<S: Simd> = S::Bits;

    const NUMBERS: usize = 2;
    const ROWS: usize = NARROW_ROWS;

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[u32; LANES]) -> S::Bits {
        s.load_bits(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(s: S, raw: S::Bits, index: usize) -> S::F32 {
        match index {
            0 => s.as_f32(s.shift_left::<16>(raw)),
            _ => s.as_f32(s.mask(raw, HIGH)),
        }
    }

    #[inline(always)]
    fn set(cell: &mut u32, index: usize, number: f32) {
        let bits = u32::from(bf16::from_f32(number).to_bits());
        *cell = match index {
            0 => *cell & HIGH | bits,
            _ => *cell & !HIGH | bits << 16,
        };
    }

    #[inline(always)]
    fn get(cell: u32, index: usize) -> f32 {
        match index {
            0 => f32::from_bits(cell << 16),
            _ => f32::from_bits(cell & HIGH),
        }
    }

    #[inline(always)]
    fn put(cell: &mut u32, index: usize, from: u32, from_index: usize) {
        let bits = (from >> (16 * from_index)) & !HIGH;
        *cell = match index {
            0 => *cell & HIGH | bits,
            _ => *cell & !HIGH | bits << 16,
        };
    }
}

impl Element for bf16 {
    type K = Pair;
    type V = Pair;

    const PAIRS: bool = true;
    const NAME: &'static str = "bf16";
    const CODE: u8 = 3;

    #[inline(never)]
    fn write(layout: &Layout<bf16>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(job: &mut Job<'_, '_, bf16>) {
        job.run();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::assert_every_level_reads;

    /// All 65,536 of them, in both places, beside a neighbour that is another number.
    #[test]
    fn every_bit_pattern_is_read_exactly() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = core::array::from_fn(|lane| first + lane as u16);
            let want = bits.map(|bits| bf16::from_bits(bits).to_f32());
            let low = bits.map(|bits| u32::from(!bits) << 16 | u32::from(bits));
            assert_every_level_reads::<Pair>(&low, 0, &want);
            let high = bits.map(|bits| u32::from(bits) << 16 | u32::from(!bits));
            assert_every_level_reads::<Pair>(&high, 1, &want);
        }
    }

    /// As `half` rounds, and the neighbour keeps its bits.
    #[test]
    fn numbers_are_rounded_to_nearest_even_beside_their_neighbour() {
        for index in 0..2 {
            let (mut cell, neighbour) = (0x1234_5678, [0x1234_0000, 0x5678][index]);
            let mut stored = |number: f32| {
                Pair::set(&mut cell, index, number);
                assert_eq!(cell & [HIGH, !HIGH][index], neighbour);
                (cell >> (16 * index)) as u16
            };
            for bits in 0..0x7f7f_u16 {
                let here = f32::from_bits(u32::from(bits) << 16);
                let middle = f32::from_bits(u32::from(bits) << 16 | 0x8000);
                assert_eq!((stored(here), stored(-here)), (bits, bits | 0x8000));
                assert_eq!(stored(middle), bits + (bits & 1), "{middle}");
                assert_eq!(stored(middle.next_down()), bits, "{middle}");
                assert_eq!(stored(middle.next_up()), bits + 1, "{middle}");
            }
            assert_eq!(stored(f32::MAX), 0x7f80, "infinity");
            assert!(bf16::from_bits(stored(f32::NAN)).is_nan());
            // A NaN whose payload is all in the lower half stays a NaN.
            assert!(bf16::from_bits(stored(f32::from_bits(0x7f80_0001))).is_nan());
        }
    }
}
