//! `f32`, stored as it is.

use super::Element;
use super::tile::Layout;
use crate::kernel::Job;
use crate::simd::Level;

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

    #[inline(never)]
    fn write(layout: &Layout<f32>, block: &mut [f32], first: usize, k: &[f32], v: &[f32]) {
        layout.write(block, first, k, v);
    }

    #[inline(never)]
    fn attend(level: Level, job: &mut Job<'_, f32>) {
        level.run(job.kernel());
    }
}
