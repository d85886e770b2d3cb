//! One lane after the other: the reference level.
//!
//! It is what every other level of the class without fused products is compared with, bit by bit.
//! Nothing here is hand-vectorised; the compiler may do so, it cannot change a result by that.

use super::sealed::Sealed;
use super::{ForRows, Kernel, LANES, MOST_ROWS, RowsKernel, Simd};
use crate::cut::out_of_bounds;

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
    const UNPACKED_COLUMNS: [usize; MOST_ROWS + 1] = Self::COLUMNS;
    const AHEAD: usize = 0;

    type F32 = [f32; LANES];
    type Bits = [u32; LANES];

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        door(kernel, self)
    }

    #[inline(always)]
    fn run_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        self.run_few_rows(rows, kernel);
    }

    #[inline(always)]
    fn run_few_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            1 => self.run(ForRows::<K, 1>(kernel)),
            _ => out_of_bounds(),
        }
    }

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        [number; LANES]
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        *from
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
    fn load_bits(self, from: &[u32; LANES]) -> Self::Bits {
        *from
    }

    #[inline(always)]
    fn widen_i8(self, from: &[u8; LANES]) -> Self::Bits {
        from.map(|byte| i32::from(byte.cast_signed()).cast_unsigned())
    }

    #[inline(always)]
    fn widen_f16(self, from: &[u16; LANES]) -> Self::F32 {
        from.map(f32_of_f16)
    }

    #[inline(always)]
    fn shift_left<const BY: u32>(self, bits: Self::Bits) -> Self::Bits {
        bits.map(|lane| lane << BY)
    }

    #[inline(always)]
    fn shift_right<const BY: u32>(self, bits: Self::Bits) -> Self::Bits {
        bits.map(|lane| (lane.cast_signed() >> BY).cast_unsigned())
    }

    #[inline(always)]
    fn mask(self, bits: Self::Bits, mask: u32) -> Self::Bits {
        bits.map(|lane| lane & mask)
    }

    #[inline(always)]
    fn as_f32(self, bits: Self::Bits) -> Self::F32 {
        bits.map(f32::from_bits)
    }

    #[inline(always)]
    fn whole_to_f32(self, bits: Self::Bits) -> Self::F32 {
        bits.map(|lane| lane.cast_signed() as f32)
    }

    #[inline(always)]
    fn fetch_ahead(self, _: *const u8) {}

    #[inline(always)]
    fn reduce_max(self, vector: Self::F32) -> f32 {
        tree(vector, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn reduce_sum(self, vector: Self::F32) -> f32 {
        tree(vector, |a, b| a + b)
    }
}

#[inline(never)]
fn door<K: Kernel>(kernel: K, token: Scalar) -> K::Output {
    kernel.call(token)
}

/// The number that sixteen bits of IEEE 754 binary16 stand for: exact.
///
/// The exponent is moved to its place and the difference of the biases multiplied away, which also
/// makes denormals normal; infinities and NaNs have their exponent set.
#[inline(always)]
pub(super) fn f32_of_f16(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    let scaled = f32::from_bits(rest) * F16_SCALE;
    let special = if rest >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | sign)
}

/// `2^112`, the difference of the biases of binary32 and binary16.
pub(super) const F16_SCALE: f32 = f32::from_bits((127 + 112) << 23);

/// `1.5 x 2^23`: adding it leaves a number's nearest whole number (ties to even) in the low bits.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// The bits of `1.0`, which is the exponent's bias in its place.
pub(super) const ONE: u32 = 0x3f80_0000;
