//! `wide`: whatever vector registers the target has when this crate is built.
//!
//! On NEON and wasm, whose features are fixed at build time, this level is the whole story. On
//! x86-64 it is SSE2 unless the build says otherwise: `wide` chooses by `cfg`, and a `wide` loop
//! compiled inside an AVX2 function was measured to emit no AVX2 instruction at all. That is why
//! the x86 levels have files of their own.

use bytemuck::must_cast;
use wide::{f32x4, f32x16, i32x16};

use super::scalar::{MAGIC, ONE};
use super::sealed::Sealed;
use super::{LANES, MOST_ROWS, Simd};

/// The token: what the build allows needs no further proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

impl Sealed for Portable {}

/// Whether there are 32 vector registers of 128 bits (then six rows of four fit) or 16 or none.
const MANY_REGISTERS: bool = cfg!(any(target_arch = "aarch64", target_feature = "avx"));

impl Simd for Portable {
    // As `wide` decides it; a test asks the arithmetic itself.
    const FUSED: bool = cfg!(any(
        all(target_feature = "sse2", target_feature = "fma"),
        all(target_feature = "neon", target_arch = "aarch64")
    ));
    const ROWS: usize = if MANY_REGISTERS { 6 } else { 2 };
    // Sixteen xmm: 2 rows x 4 accumulators + 4 loaded + 1 broadcast + 1 product = 14.
    const COLUMNS: [usize; MOST_ROWS + 1] =
        if MANY_REGISTERS { [1, 4, 2, 1, 1, 1, 1, 1, 1] } else { [1, 2, 1, 1, 1, 1, 1, 1, 1] };

    type F32 = f32x16;

    #[inline(always)]
    fn splat(self, number: f32) -> f32x16 {
        f32x16::splat(number)
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> f32x16 {
        f32x16::new(*from)
    }

    /// By quarters, written out: a loop over the numbers becomes a call of `memcpy`, and this
    /// stands in the product loop of every tail. `tests/inner_loops` looks for that call.
    #[inline(always)]
    fn load_partial(self, from: &[f32]) -> f32x16 {
        let (full, rest) = from.as_chunks::<4>();
        let last = match *rest {
            [a] => f32x4::new([a, 0.0, 0.0, 0.0]),
            [a, b] => f32x4::new([a, b, 0.0, 0.0]),
            [a, b, c] => f32x4::new([a, b, c, 0.0]),
            _ => f32x4::splat(0.0),
        };
        let zero = f32x4::splat(0.0);
        let quarters = match *full {
            [] => [last, zero, zero, zero],
            [a] => [f32x4::new(a), last, zero, zero],
            [a, b] => [f32x4::new(a), f32x4::new(b), last, zero],
            [a, b, c] => [f32x4::new(a), f32x4::new(b), f32x4::new(c), last],
            [a, b, c, d, ..] => [a, b, c, d].map(f32x4::new),
        };
        must_cast(quarters)
    }

    #[inline(always)]
    fn store(self, vector: f32x16, to: &mut [f32; LANES]) {
        *to = vector.to_array();
    }

    #[inline(always)]
    fn add(self, a: f32x16, b: f32x16) -> f32x16 {
        a + b
    }

    #[inline(always)]
    fn sub(self, a: f32x16, b: f32x16) -> f32x16 {
        a - b
    }

    #[inline(always)]
    fn mul(self, a: f32x16, b: f32x16) -> f32x16 {
        a * b
    }

    #[inline(always)]
    fn div(self, a: f32x16, b: f32x16) -> f32x16 {
        a / b
    }

    #[inline(always)]
    fn max(self, a: f32x16, b: f32x16) -> f32x16 {
        a.fast_max(b)
    }

    #[inline(always)]
    fn mul_add(self, a: f32x16, b: f32x16, c: f32x16) -> f32x16 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn select_less(self, a: f32x16, b: f32x16, then: f32x16, or: f32x16) -> f32x16 {
        a.simd_lt(b).bitselect(then, or)
    }

    #[inline(always)]
    fn whole_and_power(self, x: f32x16) -> (f32x16, f32x16) {
        let shifted = x + f32x16::splat(MAGIC);
        let whole = shifted - f32x16::splat(MAGIC);
        let bits: i32x16 = must_cast(shifted);
        let power = (bits << 23) + i32x16::splat(ONE.cast_signed());
        (whole, must_cast(power))
    }

    #[inline(always)]
    fn reduce_max(self, vector: f32x16) -> f32 {
        let quarters: [f32x4; 4] = must_cast(vector);
        let four = quarters[0]
            .fast_max(quarters[2])
            .fast_max(quarters[1].fast_max(quarters[3]))
            .to_array();
        let larger = |a: f32, b: f32| if a > b { a } else { b };
        larger(larger(four[0], four[2]), larger(four[1], four[3]))
    }

    #[inline(always)]
    fn reduce_sum(self, vector: f32x16) -> f32 {
        let quarters: [f32x4; 4] = must_cast(vector);
        let four = ((quarters[0] + quarters[2]) + (quarters[1] + quarters[3])).to_array();
        (four[0] + four[2]) + (four[1] + four[3])
    }
}
