//! IEEE 754 binary16, as it is.

use half::f16;

use super::tile::Layout;
use super::{Element, Format, NARROW_ROWS};
use crate::attention::Job;
use crate::simd::{LANES, Simd};

/// A cell is a number of sixteen bits.
#[derive(Clone, Copy, Debug)]
pub struct Half;

impl Format for Half {
    type Cell = u16;
    type Raw<S: Simd> = S::F32;

    const NUMBERS: usize = 1;
    const ROWS: usize = NARROW_ROWS;

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[u16; LANES]) -> S::F32 {
        s.widen_f16(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(_: S, raw: S::F32, _: usize) -> S::F32 {
        raw
    }

    #[inline(always)]
    fn set(cell: &mut u16, _: usize, number: f32) {
        *cell = f16::from_f32(number).to_bits();
    }

    #[inline(always)]
    fn get(cell: u16, _: usize) -> f32 {
        f16::from_bits(cell).to_f32()
    }
}

impl Element for f16 {
    type K = Half;
    type V = Half;

    const NAME: &'static str = "f16";
    const CODE: u8 = 2;

    #[inline(never)]
    fn write(layout: &Layout<f16>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(job: &mut Job<'_, '_, f16>) {
        job.run();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::tests::{assert_every_level_reads, same_nan};

    /// All 65,536 of them, in registers at every level and one by one.
    #[test]
    fn every_bit_pattern_is_read_exactly() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let cells: [u16; LANES] = core::array::from_fn(|lane| first + lane as u16);
            let want = cells.map(|bits| f16::from_bits(bits).to_f32());
            assert_every_level_reads::<Half>(&cells, 0, &want);
        }
    }

    /// What a number is stored as is read back as the same bits, and numbers in between go to the
    /// nearest, to the even one where two are.
    #[test]
    fn numbers_are_rounded_to_nearest_even() {
        let stored = |number: f32| {
            let mut cell = 0;
            Half::set(&mut cell, 0, number);
            cell
        };
        for bits in 0..0x7bff_u16 {
            let here = Half::get(bits, 0);
            assert_eq!((stored(here), stored(-here)), (bits, bits | 0x8000));
            // Exact: two neighbours have one bit more between them than either.
            let middle = (here + Half::get(bits + 1, 0)) / 2.0;
            assert_eq!(stored(middle), bits + (bits & 1), "{middle}");
            assert_eq!(stored(middle.next_down()), bits, "{middle}");
            assert_eq!(stored(middle.next_up()), bits + 1, "{middle}");
        }
        assert_eq!(stored(65_519.99), 0x7bff);
        assert_eq!(stored(65_520.0), 0x7c00, "infinity, from half a step past 65,504 on");
        assert_eq!(stored(f32::NEG_INFINITY), 0xfc00);
        assert_eq!(same_nan(Half::get(stored(f32::NAN), 0)), same_nan(f32::NAN));
        assert_eq!(stored(2.0_f32.powi(-25)), 0);
        assert_eq!(stored(-2.0_f32.powi(-25).next_up()), 0x8001);
    }
}
