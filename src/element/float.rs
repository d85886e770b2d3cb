//! `f32`, stored as it is.

use super::Element;
use super::tile::Layout;
use crate::attention::Job;
use crate::simd::{Level, Simd};

impl Element for f32 {
    type Stored = f32;

    const NAME: &'static str = "f32";
    const POISON: f32 = f32::NAN;

    #[inline(always)]
    fn encode(number: f32) -> f32 {
        number
    }

    #[inline(always)]
    fn decode(stored: f32) -> f32 {
        stored
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, cells: &[f32]) -> S::F32 {
        match cells.first_chunk() {
            Some(full) => s.load(full),
            None => s.load_partial(cells),
        }
    }

    #[inline(never)]
    fn write(layout: &Layout<f32>, block: &mut [f32], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(level: Level, job: &mut Job<'_, f32>) {
        level.run(job.kernel());
    }
}
