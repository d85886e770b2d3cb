//! `wide`: whatever vector registers the target has when this crate is built.
//!
//! On NEON and wasm, whose features are fixed at build time, this level is the whole story. On
//! x86-64 it is SSE2 unless the build says otherwise: `wide` chooses by `cfg`, and a `wide` loop
//! compiled inside an AVX2 function was measured to emit no AVX2 instruction at all. That is why
//! the x86 levels have files of their own.

use bytemuck::must_cast;
use wide::{f32x4, f32x16, i32x16};

use super::scalar::{F16_SCALE, MAGIC, ONE};
use super::sealed::Sealed;
use super::{ForRows, Kernel, LANES, MOST_ROWS, RowsKernel, Simd};
use crate::cut::out_of_bounds;

/// The token: what the build allows needs no further proof.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

impl Sealed for Portable {}

#[inline(never)]
fn door<K: Kernel>(kernel: K, token: Portable) -> K::Output {
    kernel.call(token)
}

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
    const UNPACKED_COLUMNS: [usize; MOST_ROWS + 1] =
        if MANY_REGISTERS { [1, 2, 1, 1, 1, 1, 1, 1, 1] } else { [1; MOST_ROWS + 1] };

    // Where there is a hint that costs nothing to ask for; every line, as for AVX2.
    const AHEAD: usize = if cfg!(target_arch = "x86_64") { 1 } else { 0 };

    type F32 = f32x16;
    type Bits = i32x16;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        door(kernel, self)
    }

    #[inline(always)]
    fn run_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            #[cfg(any(target_arch = "aarch64", target_feature = "avx"))]
            5 => self.run(ForRows::<K, 5>(kernel)),
            #[cfg(any(target_arch = "aarch64", target_feature = "avx"))]
            6 => self.run(ForRows::<K, 6>(kernel)),
            _ => self.run_few_rows(rows, kernel),
        }
    }

    #[inline(always)]
    fn run_few_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            1 => self.run(ForRows::<K, 1>(kernel)),
            2 => self.run(ForRows::<K, 2>(kernel)),
            #[cfg(any(target_arch = "aarch64", target_feature = "avx"))]
            3 => self.run(ForRows::<K, 3>(kernel)),
            #[cfg(any(target_arch = "aarch64", target_feature = "avx"))]
            4 => self.run(ForRows::<K, 4>(kernel)),
            _ => out_of_bounds(),
        }
    }

    #[inline(always)]
    fn splat(self, number: f32) -> f32x16 {
        f32x16::splat(number)
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> f32x16 {
        f32x16::new(*from)
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
    fn load_bits(self, from: &[u32; LANES]) -> i32x16 {
        must_cast(*from)
    }

    #[inline(always)]
    fn widen_i8(self, from: &[u8; LANES]) -> i32x16 {
        let mut words = [0; LANES];
        for (word, byte) in words.iter_mut().zip(from) {
            *word = i32::from(byte.cast_signed());
        }
        i32x16::new(words)
    }

    #[inline(always)]
    fn widen_f16(self, from: &[u16; LANES]) -> f32x16 {
        // `f32_of_f16` on vectors. Over lanes one by one it was a function that each step of the
        // inner loop called, with all sums in memory meanwhile; `.ci/codegen` would notice.
        let mut words = [0; LANES];
        for (word, bits) in words.iter_mut().zip(from) {
            *word = i32::from(*bits);
        }
        let bits = i32x16::new(words);
        let sign: i32x16 = (bits & i32x16::splat(0x8000)) << 16;
        let rest: i32x16 = (bits & i32x16::splat(0x7fff)) << 13;
        let scaled = must_cast::<i32x16, f32x16>(rest) * f32x16::splat(F16_SCALE);
        let special = rest.simd_gt(i32x16::splat(0x0f7f_ffff)) & i32x16::splat(0x7f80_0000);
        must_cast(must_cast::<f32x16, i32x16>(scaled) | special | sign)
    }

    #[inline(always)]
    fn shift_left<const BY: u32>(self, bits: i32x16) -> i32x16 {
        bits << BY
    }

    #[inline(always)]
    fn shift_right<const BY: u32>(self, bits: i32x16) -> i32x16 {
        bits >> BY
    }

    #[inline(always)]
    fn mask(self, bits: i32x16, mask: u32) -> i32x16 {
        bits & i32x16::splat(mask.cast_signed())
    }

    #[inline(always)]
    fn as_f32(self, bits: i32x16) -> f32x16 {
        must_cast(bits)
    }

    #[inline(always)]
    fn whole_to_f32(self, bits: i32x16) -> f32x16 {
        f32x16::from_i32x16(bits)
    }

    #[inline(always)]
    fn fetch_ahead(self, at: *const u8) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of every x86-64 build that has vectors, and a hint touches no memory,
        // whatever the address.
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(at.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = at;
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
