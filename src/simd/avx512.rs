//! AVX-512: a vector is one zmm register.
//!
//! Where a multiply-add unit is 512 bits wide only in name (Zen 4) the peak is AVX2's; what is
//! gained there are half the instructions and twice the registers, so that a tile of a whole
//! group of query heads by a whole panel stays in registers.

use core::arch::x86_64::*;

use super::avx2::Avx2;
use super::scalar::{MAGIC, ONE};
use super::sealed::Sealed;
use super::{Kernel, LANES, MOST_ROWS, Simd};

/// Proof that the processor and the operating system have AVX-512 F, BW, DQ and VL, AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

impl Avx512 {
    /// # Safety
    ///
    /// The processor must have `avx512f`, `avx512bw`, `avx512dq`, `avx512vl`, `avx2` and `fma`,
    /// and the operating system must save zmm and the mask registers.
    pub(super) unsafe fn assume() -> Self {
        Avx512(())
    }

    /// Runs a kernel with the features on.
    #[inline(always)]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe { door(kernel, self) }
    }

    /// What works on the halves of a vector.
    #[inline(always)]
    fn halves(self) -> Avx2 {
        // SAFETY: the token proves AVX2 and FMA too, and zmm state includes ymm state.
        unsafe { Avx2::assume() }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn door<K: Kernel>(kernel: K, token: Avx512) -> K::Output {
    kernel.call(token)
}

impl Sealed for Avx512 {}

impl Simd for Avx512 {
    const FUSED: bool = true;
    const ROWS: usize = 8;
    // 32 zmm: 6 x 4 is 24 accumulators + 4 loaded + 1 broadcast = 29; 8 x 2 is 16 + 2 + 1 = 19.
    const COLUMNS: [usize; MOST_ROWS + 1] = [1, 4, 4, 4, 4, 4, 4, 2, 2];

    type F32 = __m512;

    #[inline(always)]
    fn splat(self, number: f32) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen numbers.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn load_partial(self, from: &[f32]) -> __m512 {
        let mask = (1u32 << from.len().min(LANES)).wrapping_sub(1) as __mmask16;
        // SAFETY: the token proves AVX-512; a masked load touches only the set lanes, which are
        // the first `from.len()`.
        unsafe { _mm512_maskz_loadu_ps(mask, from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, vector: __m512, to: &mut [f32; LANES]) {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen numbers.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn select_less(self, a: __m512, b: __m512, then: __m512, or: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), or, then) }
    }

    #[inline(always)]
    fn whole_and_power(self, x: __m512) -> (__m512, __m512) {
        let magic = self.splat(MAGIC);
        let shifted = self.add(x, magic);
        let whole = self.sub(shifted, magic);
        // SAFETY: the token proves AVX-512.
        let power = unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
            let one = _mm512_set1_epi32(ONE.cast_signed());
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, one))
        };
        (whole, power)
    }

    #[inline(always)]
    fn reduce_max(self, vector: __m512) -> f32 {
        // SAFETY: the token proves AVX-512 F and DQ, AVX2 with them.
        unsafe {
            let low = _mm512_castps512_ps256(vector);
            let high = _mm512_extractf32x8_ps::<1>(vector);
            self.halves().max_of_eight(_mm256_max_ps(low, high))
        }
    }

    #[inline(always)]
    fn reduce_sum(self, vector: __m512) -> f32 {
        // SAFETY: the token proves AVX-512 F and DQ, AVX2 with them.
        unsafe {
            let low = _mm512_castps512_ps256(vector);
            let high = _mm512_extractf32x8_ps::<1>(vector);
            self.halves().sum_of_eight(_mm256_add_ps(low, high))
        }
    }
}
