//! `f32`, stored as it is.

use super::tile::Layout;
use super::{Element, Format};
use crate::attention::Job;
use crate::simd::{LANES, MOST_ROWS, RowsKernel, Simd};

/// A cell is a number.
#[derive(Clone, Copy, Debug)]
pub struct Single;

impl Format for Single {
    type Cell = f32;
    type Raw<S: Simd> = S::F32;

    const NUMBERS: usize = 1;
    const ROWS: usize = MOST_ROWS;

    #[inline(always)]
    fn run_rows<S: Simd, K: RowsKernel>(s: S, rows: usize, kernel: K) {
        s.run_rows(rows, kernel);
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[f32; LANES]) -> S::F32 {
        s.load(cells)
    }

    #[inline(always)]
    fn number<S: Simd>(_: S, raw: S::F32, _: usize) -> S::F32 {
        raw
    }

    #[inline(always)]
    fn set(cell: &mut f32, _: usize, number: f32) {
        *cell = number;
    }

    #[inline(always)]
    fn get(cell: f32, _: usize) -> f32 {
        cell
    }
}

impl Element for f32 {
    type K = Single;
    type V = Single;

    const NAME: &'static str = "f32";
    const CODE: u8 = 1;

    #[inline(never)]
    fn write(layout: &Layout<f32>, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(job: &mut Job<'_, '_, f32>) {
        job.run();
    }
}
