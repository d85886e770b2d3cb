//! One lane after the other: the reference level.
//!
//! It is what every other level of the class without fused products is compared with, bit by bit.
//! Nothing here is hand-vectorised; the compiler may do so, it cannot change a result by that.

use super::sealed::Sealed;
use super::{LANES, MOST_ROWS, Simd};

/// The token: needs no proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalar;

impl Sealed for Scalar {}

#[inline(always)]
fn each(mut lane: impl FnMut(usize) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (index, number) in out.iter_mut().enumerate() {
        *number = lane(index);
    }
    out
}

/// Folds the lanes in the order that [`Simd::reduce_sum`] writes down.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; LANES], join: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] = join(lanes[lane], lanes[lane + half]);
        }
    }
    lanes[0]
}

impl Simd for Scalar {
    const FUSED: bool = false;
    const ROWS: usize = 1;
    const COLUMNS: [usize; MOST_ROWS + 1] = [1; MOST_ROWS + 1];

    type F32 = [f32; LANES];

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        [number; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        *from
    }

    #[inline(always)]
    fn load_partial(self, from: &[f32]) -> Self::F32 {
        let mut out = [0.0; LANES];
        for (lane, number) in out.iter_mut().zip(from) {
            *lane = *number;
        }
        out
    }

    #[inline(always)]
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]) {
        *to = vector;
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        each(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn select_less(self, a: Self::F32, b: Self::F32, then: Self::F32, or: Self::F32) -> Self::F32 {
        each(|i| if a[i] < b[i] { then[i] } else { or[i] })
    }

    #[inline(always)]
    fn whole_and_power(self, x: Self::F32) -> (Self::F32, Self::F32) {
        let shifted = each(|i| x[i] + MAGIC);
        let whole = each(|i| shifted[i] - MAGIC);
        let power = each(|i| f32::from_bits((shifted[i].to_bits() << 23).wrapping_add(ONE)));
        (whole, power)
    }

    #[inline(always)]
    fn reduce_max(self, vector: Self::F32) -> f32 {
        tree(vector, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn reduce_sum(self, vector: Self::F32) -> f32 {
        tree(vector, |a, b| a + b)
    }
}

/// `1.5 x 2^23`: adding it leaves a number's nearest whole number (ties to even) in the low bits.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// The bits of `1.0`, which is the exponent's bias in its place.
pub(super) const ONE: u32 = 0x3f80_0000;
