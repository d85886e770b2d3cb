//! AVX2 with FMA and F16C: a vector is two ymm registers.

use core::arch::x86_64::*;

use super::scalar::{MAGIC, ONE};
use super::sealed::Sealed;
use super::{ForRows, Kernel, LANES, MOST_ROWS, RowsKernel, Simd};
use crate::cut::out_of_bounds;

/// Proof that the processor and the operating system have AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

impl Avx2 {
    /// # Safety
    ///
    /// The processor must have `avx2`, `fma` and `f16c`, and the operating system must save ymm.
    pub(super) unsafe fn assume() -> Self {
        Avx2(())
    }

    /// One step of a tree.
    #[inline(always)]
    fn join<const MAX: bool>(self, low: __m256, high: __m256) -> __m256 {
        // SAFETY: the token proves AVX2.
        unsafe { if MAX { _mm256_max_ps(low, high) } else { _mm256_add_ps(low, high) } }
    }

    /// Eight lanes of two rows to four of each.
    #[inline(always)]
    fn fours<const MAX: bool>(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the token proves AVX2.
        let (low, high) = unsafe {
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            (low, _mm256_permute2f128_ps::<0x31>(a, b))
        };
        self.join::<MAX>(low, high)
    }

    /// The trees of four rows, each step for as many of them as a register has room for.
    #[inline(always)]
    fn fold_four<const MAX: bool>(self, rows: [[__m256; 2]; 4]) -> __m256 {
        let [a, b, c, d] = [
            self.join::<MAX>(rows[0][0], rows[0][1]),
            self.join::<MAX>(rows[1][0], rows[1][1]),
            self.join::<MAX>(rows[2][0], rows[2][1]),
            self.join::<MAX>(rows[3][0], rows[3][1]),
        ];
        let (even, odd) = (self.fours::<MAX>(a, c), self.fours::<MAX>(b, d));
        // SAFETY: the token proves AVX2.
        let (low, high) = unsafe {
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(even, odd);
            (low, _mm256_shuffle_ps::<0b11_10_11_10>(even, odd))
        };
        let twos = self.join::<MAX>(low, high);
        // SAFETY: the token proves AVX2.
        let second = unsafe { _mm256_movehdup_ps(twos) };
        let one = self.join::<MAX>(twos, second);
        // SAFETY: the token proves AVX2.
        unsafe { _mm256_moveldup_ps(one) }
    }

    /// The last three steps of [`Simd::reduce_max`].
    #[inline(always)]
    pub(super) fn max_of_eight(self, eight: __m256) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe {
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    /// The last three steps of [`Simd::reduce_sum`].
    #[inline(always)]
    pub(super) fn sum_of_eight(self, eight: __m256) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn door<K: Kernel>(kernel: K, token: Avx2) -> K::Output {
    kernel.call(token)
}

impl Sealed for Avx2 {}

impl Simd for Avx2 {
    const FUSED: bool = true;
    const ROWS: usize = 6;
    // Sixteen ymm, two a vector: 6 x 1 is 12 accumulators + 2 loaded + 1 broadcast = 15.
    const COLUMNS: [usize; MOST_ROWS + 1] = [1, 4, 2, 1, 1, 1, 1, 1, 1];
    // Half of that: unpacked cells take registers, too. 1 x 4 had 12 spills and reloads for 16
    // multiply-adds over pairs, and 21 for 32 over fours of bytes. 2 x 2 spills as well and gains
    // all the same, since cells are widened for half as many tiles: 0.85 of the time of 2 x 1 over
    // four bits, 0.9 over bytes; over pairs of bf16, which a shift and a mask widen, 1.05.
    const UNPACKED_COLUMNS: [usize; MOST_ROWS + 1] = [1, 2, 2, 1, 1, 1, 1, 1, 1];

    // Every line: without it cold pages are read at a third of the speed.
    const AHEAD: usize = 1;

    type F32 = [__m256; 2];
    type Bits = [__m256i; 2];

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe { door(kernel, self) }
    }

    #[inline(always)]
    fn run_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            5 => self.run(ForRows::<K, 5>(kernel)),
            6 => self.run(ForRows::<K, 6>(kernel)),
            _ => self.run_few_rows(rows, kernel),
        }
    }

    #[inline(always)]
    fn run_few_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            1 => self.run(ForRows::<K, 1>(kernel)),
            2 => self.run(ForRows::<K, 2>(kernel)),
            3 => self.run(ForRows::<K, 3>(kernel)),
            4 => self.run(ForRows::<K, 4>(kernel)),
            _ => out_of_bounds(),
        }
    }

    #[inline(always)]
    fn splat(self, number: f32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_set1_ps(number); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F32 {
        let at = from.as_ptr();
        // SAFETY: the token proves AVX2; both halves lie in the sixteen numbers.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
    }

    #[inline(always)]
    fn store(self, vector: Self::F32, to: &mut [f32; LANES]) {
        let at = to.as_mut_ptr();
        // SAFETY: the token proves AVX2; both halves lie in the sixteen numbers.
        unsafe {
            _mm256_storeu_ps(at, vector[0]);
            _mm256_storeu_ps(at.add(8), vector[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        // SAFETY: the token proves FMA.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn select_less(self, a: Self::F32, b: Self::F32, then: Self::F32, or: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe {
            let less =
                [_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])];
            [_mm256_blendv_ps(or[0], then[0], less[0]), _mm256_blendv_ps(or[1], then[1], less[1])]
        }
    }

    #[inline(always)]
    fn whole_and_power(self, x: Self::F32) -> (Self::F32, Self::F32) {
        let magic = self.splat(MAGIC);
        let shifted = self.add(x, magic);
        let whole = self.sub(shifted, magic);
        // SAFETY: the token proves AVX2.
        let power = unsafe {
            let one = _mm256_set1_epi32(ONE.cast_signed());
            let scale = |v: __m256| {
                let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(v));
                _mm256_castsi256_ps(_mm256_add_epi32(exponent, one))
            };
            [scale(shifted[0]), scale(shifted[1])]
        };
        (whole, power)
    }

    #[inline(always)]
    fn load_bits(self, from: &[u32; LANES]) -> Self::Bits {
        let at = from.as_ptr();
        // SAFETY: the token proves AVX2; both halves lie in the sixteen numbers.
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(8).cast())] }
    }

    #[inline(always)]
    fn widen_i8(self, from: &[u8; LANES]) -> Self::Bits {
        let at = from.as_ptr();
        // SAFETY: the token proves AVX2; both halves lie in the sixteen bytes.
        unsafe {
            let (low, high) = (_mm_loadl_epi64(at.cast()), _mm_loadl_epi64(at.add(8).cast()));
            [_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)]
        }
    }

    #[inline(always)]
    fn widen_f16(self, from: &[u16; LANES]) -> Self::F32 {
        let at = from.as_ptr();
        // SAFETY: the token proves AVX2 and F16C; both halves lie in the sixteen numbers.
        unsafe {
            let (low, high) = (_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(8).cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn shift_left<const BY: u32>(self, bits: Self::Bits) -> Self::Bits {
        // SAFETY: the token proves AVX2.
        unsafe {
            let by = _mm_cvtsi32_si128(BY.cast_signed());
            [_mm256_sll_epi32(bits[0], by), _mm256_sll_epi32(bits[1], by)]
        }
    }

    #[inline(always)]
    fn shift_right<const BY: u32>(self, bits: Self::Bits) -> Self::Bits {
        // SAFETY: the token proves AVX2.
        unsafe {
            let by = _mm_cvtsi32_si128(BY.cast_signed());
            [_mm256_sra_epi32(bits[0], by), _mm256_sra_epi32(bits[1], by)]
        }
    }

    #[inline(always)]
    fn mask(self, bits: Self::Bits, mask: u32) -> Self::Bits {
        // SAFETY: the token proves AVX2.
        unsafe {
            let mask = _mm256_set1_epi32(mask.cast_signed());
            [_mm256_and_si256(bits[0], mask), _mm256_and_si256(bits[1], mask)]
        }
    }

    #[inline(always)]
    fn as_f32(self, bits: Self::Bits) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_castsi256_ps(bits[0]), _mm256_castsi256_ps(bits[1])] }
    }

    #[inline(always)]
    fn whole_to_f32(self, bits: Self::Bits) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_cvtepi32_ps(bits[0]), _mm256_cvtepi32_ps(bits[1])] }
    }

    #[inline(always)]
    fn fetch_ahead(self, at: *const u8) {
        // SAFETY: the token proves SSE, and a hint touches no memory, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn reduce_max(self, vector: Self::F32) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe { self.max_of_eight(_mm256_max_ps(vector[0], vector[1])) }
    }

    #[inline(always)]
    fn reduce_sum(self, vector: Self::F32) -> f32 {
        // SAFETY: the token proves AVX2.
        unsafe { self.sum_of_eight(_mm256_add_ps(vector[0], vector[1])) }
    }

    #[inline(always)]
    fn fold_rows<const MAX: bool, const MR: usize>(self, rows: [[__m256; 2]; MR]) -> [__m256; 2] {
        if MR == 1 {
            return self.splat(if MAX {
                self.reduce_max(rows[0])
            } else {
                self.reduce_sum(rows[0])
            });
        }
        // Rows that are not there stand for others.
        let four = [rows[0], rows[1 % MR], rows[2 % MR], rows[3 % MR]];
        let low = self.fold_four::<MAX>(four);
        if MR <= 4 {
            return [low; 2];
        }
        let four = [rows[4 % MR], rows[5 % MR], rows[6 % MR], rows[7 % MR]];
        [low, self.fold_four::<MAX>(four)]
    }

    #[inline(always)]
    fn evens(self, vector: Self::F32) -> Self::F32 {
        // SAFETY: the token proves AVX2.
        unsafe { [_mm256_moveldup_ps(vector[0]), _mm256_moveldup_ps(vector[1])] }
    }
}
