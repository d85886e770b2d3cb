//! AVX-512: a vector is one zmm register.
//!
//! Where a multiply-add unit is 512 bits wide only in name (Zen 4) the peak is AVX2's; what is
//! gained there are half the instructions and twice the registers, so that a tile of a whole
//! group of query heads by a whole panel stays in registers.

use core::arch::x86_64::*;
use core::mem::transmute;

use super::avx2::Avx2;
use super::scalar::{MAGIC, ONE};
use super::sealed::Sealed;
use super::{ForRows, Kernel, LANES, MOST_ROWS, RowsKernel, Simd};
use crate::cut::out_of_bounds;

/// No dot products beyond the base features.
pub(super) const PLAIN: u8 = 0;
/// Pairs of bf16: `avx512bf16`.
pub(super) const BF16: u8 = 1;
/// Fours of bytes: `avx512vnni`.
pub(super) const VNNI: u8 = 2;

/// Signed numbers of four bits as bf16, by the lowest five bits of what holds them.
static NIBBLES: [u16; 32] = {
    let mut table = [0; 32];
    let mut bits: i32 = 0;
    while bits < 32 {
        let number = (bits << 28 >> 28) as f32;
        table[bits as usize] = (number.to_bits() >> 16) as u16;
        bits += 1;
    }
    table
};

/// The upper half of each word of one vector and of another one, in turns.
static UPPER_HALVES: [u16; 32] = {
    let mut table = [0; 32];
    let mut at = 0;
    while at < 32 {
        table[at] = (at + 1) as u16 | 1;
        if at % 2 == 1 {
            table[at] = 32 + at as u16;
        }
        at += 1;
    }
    table
};

/// Proof that the processor and the operating system have AVX-512 F, BW, DQ and VL, AVX2, FMA and
/// F16C, and the dot products that `DOT` names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512<const DOT: u8>(());

/// Quarters, or pairs of a quarter, of two vectors: the first and the second of each, or ...
const FIRST_HALVES: i32 = 0b01_00_01_00;
const SECOND_HALVES: i32 = 0b11_10_11_10;
/// ... every other one.
const EVEN: i32 = 0b10_00_10_00;
const ODD: i32 = 0b11_01_11_01;

impl<const DOT: u8> Avx512<DOT> {
    /// One step of a tree.
    #[inline(always)]
    fn join<const MAX: bool>(self, low: __m512, high: __m512) -> __m512 {
        if MAX { self.max(low, high) } else { self.add(low, high) }
    }

    /// Sixteen lanes of two rows to eight of each.
    #[inline(always)]
    fn eights<const MAX: bool>(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        let (low, high) = unsafe {
            let low = _mm512_shuffle_f32x4::<FIRST_HALVES>(a, b);
            (low, _mm512_shuffle_f32x4::<SECOND_HALVES>(a, b))
        };
        self.join::<MAX>(low, high)
    }

    /// Eight lanes of four rows to four of each.
    #[inline(always)]
    fn fours<const MAX: bool>(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        let (low, high) =
            unsafe { (_mm512_shuffle_f32x4::<EVEN>(a, b), _mm512_shuffle_f32x4::<ODD>(a, b)) };
        self.join::<MAX>(low, high)
    }

    /// # Safety
    ///
    /// The processor must have `avx512f`, `avx512bw`, `avx512dq`, `avx512vl`, `avx2`, `fma` and
    /// `f16c`, with [`BF16`] also `avx512bf16`, with [`VNNI`] also `avx512vnni`, and the operating
    /// system must save zmm and the mask registers.
    pub(super) unsafe fn assume() -> Self {
        Avx512(())
    }

    /// The same without the dot products.
    pub(super) fn plain(self) -> Avx512<PLAIN> {
        Avx512(())
    }

    /// The signed byte in bits 15 to 22 of each word, as a number: there it is what is added to
    /// 256 in an `f32`, whose ones stand in bit 15.
    ///
    /// A ternary operation and a subtraction keep other ports busy than the shift that brought it
    /// there, with which a second shift would compete: pairs of a tile are made in two thirds of
    /// the time. In the products of four rows, where registers are few, the three constants cost
    /// more than that, and the second shift stays.
    #[inline(always)]
    fn placed_byte(self, bits: __m512i) -> __m512 {
        // SAFETY: the token proves AVX-512.
        let number = unsafe {
            // Turning the sign over adds 128.
            _mm512_xor_si512(self.mask(bits, 0x007f_8000), _mm512_set1_epi32(0x43c0_0000))
        };
        self.sub(self.as_f32(number), self.splat(384.0))
    }

    /// What works on the halves of a vector.
    #[inline(always)]
    fn halves(self) -> Avx2 {
        // SAFETY: the token proves AVX2 and FMA too, and zmm state includes ymm state.
        unsafe { Avx2::assume() }
    }
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn door<K: Kernel, const DOT: u8>(kernel: K, token: Avx512<DOT>) -> K::Output {
    kernel.call(token)
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")]
fn bf16_door<K: Kernel, const DOT: u8>(kernel: K, token: Avx512<DOT>) -> K::Output {
    kernel.call(token)
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512vnni")]
fn vnni_door<K: Kernel, const DOT: u8>(kernel: K, token: Avx512<DOT>) -> K::Output {
    kernel.call(token)
}

impl<const DOT: u8> Sealed for Avx512<DOT> {}

impl<const DOT: u8> Simd for Avx512<DOT> {
    const FUSED: bool = true;
    const ROWS: usize = 8;
    // 32 zmm: 6 x 4 is 24 accumulators + 4 loaded + 1 broadcast = 29; 8 x 2 is 16 + 2 + 1 = 19.
    const COLUMNS: [usize; MOST_ROWS + 1] = [1, 4, 4, 4, 4, 4, 4, 2, 2];
    const UNPACKED_COLUMNS: [usize; MOST_ROWS + 1] = Self::COLUMNS;
    const AHEAD: usize = 1;
    const DOT_BF16: bool = DOT == BF16;
    const DOT_I8: bool = DOT == VNNI;

    type F32 = __m512;
    type Bits = __m512i;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe {
            match DOT {
                BF16 => bf16_door(kernel, self),
                VNNI => vnni_door(kernel, self),
                _ => door(kernel, self),
            }
        }
    }

    #[inline(always)]
    fn run_rows<K: RowsKernel>(self, rows: usize, kernel: K) {
        match rows {
            5 => self.run(ForRows::<K, 5>(kernel)),
            6 => self.run(ForRows::<K, 6>(kernel)),
            7 => self.run(ForRows::<K, 7>(kernel)),
            8 => self.run(ForRows::<K, 8>(kernel)),
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
    fn zero_below(self, limit: __m512, x: __m512, value: __m512) -> __m512 {
        // Asked the other way round, so that the mask is not turned over after it.
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), value) }
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
    fn load_bits(self, from: &[u32; LANES]) -> __m512i {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen numbers.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn widen_i8(self, from: &[u8; LANES]) -> __m512i {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen bytes.
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn widen_f16(self, from: &[u16; LANES]) -> __m512 {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen numbers.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn shift_left<const BY: u32>(self, bits: __m512i) -> __m512i {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_slli_epi32::<BY>(bits) }
    }

    #[inline(always)]
    fn shift_right<const BY: u32>(self, bits: __m512i) -> __m512i {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_srai_epi32::<BY>(bits) }
    }

    #[inline(always)]
    fn mask(self, bits: __m512i, mask: u32) -> __m512i {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_and_si512(bits, _mm512_set1_epi32(mask.cast_signed())) }
    }

    #[inline(always)]
    fn as_f32(self, bits: __m512i) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_castsi512_ps(bits) }
    }

    #[inline(always)]
    fn whole_to_f32(self, bits: __m512i) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_cvtepi32_ps(bits) }
    }

    #[inline(always)]
    fn fetch_ahead(self, at: *const u8) {
        // SAFETY: the token proves SSE, and a hint touches no memory, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn dot_bf16(self, sum: __m512, a: u32, b: __m512i) -> __m512 {
        if DOT != BF16 {
            out_of_bounds();
        }
        // SAFETY: the token proves AVX-512 BF16; vectors of 512 bits are any numbers.
        unsafe {
            let a = _mm512_set1_epi32(a.cast_signed());
            let (a, b) = (transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(b));
            _mm512_dpbf16_ps(sum, a, b)
        }
    }

    #[inline(always)]
    fn store_bf16(self, vector: __m512, to: &mut [u32; LANES / 2]) {
        if DOT != BF16 {
            out_of_bounds();
        }
        // SAFETY: the token proves AVX-512 BF16; the reference proves the 256 bits.
        unsafe {
            let bits = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(vector));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
        }
    }

    #[inline(always)]
    fn store_pairs(self, low: __m512, high: __m512, to: &mut [u32; LANES]) {
        // SAFETY: the token proves AVX-512; the reference proves the sixteen words.
        unsafe {
            let halves = _mm512_loadu_si512(UPPER_HALVES.as_ptr().cast());
            let (low, high) = (_mm512_castps_si512(low), _mm512_castps_si512(high));
            let pairs = _mm512_permutex2var_epi16(low, halves, high);
            _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs);
        }
    }

    #[inline(always)]
    fn store_byte_pairs<const UPPER: bool>(self, bits: __m512i, to: &mut [u32; LANES]) {
        let (low, high) = if UPPER {
            // The sign stands where it should: two instructions do.
            let high = self.whole_to_f32(self.shift_right::<24>(bits));
            (self.placed_byte(self.shift_right::<1>(bits)), high)
        } else {
            let low = self.placed_byte(self.shift_left::<15>(bits));
            (low, self.placed_byte(self.shift_left::<7>(bits)))
        };
        self.store_pairs(low, high, to);
    }

    #[inline(always)]
    fn store_nibble_pairs(self, bits: __m512i, to: &mut [u32; LANES]) {
        if DOT != BF16 {
            out_of_bounds();
        }
        // SAFETY: the token proves AVX-512 F and BW; the references prove the 512 bits.
        unsafe {
            let table = _mm512_loadu_si512(NIBBLES.as_ptr().cast());
            // The table is asked with five bits of each half, of which four count.
            let halves = _mm512_or_si512(self.mask(bits, 0xff), self.shift_left::<12>(bits));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_permutexvar_epi16(halves, table));
        }
    }

    #[inline(always)]
    fn offset_i8(self, bytes: __m512i) -> __m512i {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_xor_si512(bytes, _mm512_set1_epi32(0x8080_8080_u32.cast_signed())) }
    }

    #[inline(always)]
    fn dot_i8(self, sum: __m512i, a: u32, b: __m512i) -> __m512i {
        if DOT != VNNI {
            out_of_bounds();
        }
        // SAFETY: the token proves AVX-512 VNNI.
        unsafe { _mm512_dpbusd_epi32(sum, b, _mm512_set1_epi32(a.cast_signed())) }
    }

    #[inline(always)]
    fn subtract(self, words: __m512i, word: u32) -> __m512i {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_sub_epi32(words, _mm512_set1_epi32(word.cast_signed())) }
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

    #[inline(always)]
    fn fold_rows<const MAX: bool, const MR: usize>(self, rows: [__m512; MR]) -> __m512 {
        if MR == 1 {
            return self.splat(if MAX {
                self.reduce_max(rows[0])
            } else {
                self.reduce_sum(rows[0])
            });
        }
        // Rows that are not there stand for others.
        let [a, b, c, d] = [rows[0], rows[1 % MR], rows[2 % MR], rows[3 % MR]];
        let (mut even, mut odd) = (self.eights::<MAX>(a, c), self.eights::<MAX>(b, d));
        let (mut more_even, mut more_odd) = (even, odd);
        if MR > 4 {
            let [a, b, c, d] = [rows[4 % MR], rows[5 % MR], rows[6 % MR], rows[7 % MR]];
            (more_even, more_odd) = (self.eights::<MAX>(a, c), self.eights::<MAX>(b, d));
        }
        (even, odd) = (self.fours::<MAX>(even, more_even), self.fours::<MAX>(odd, more_odd));
        // SAFETY: the token proves AVX-512.
        let (low, high) = unsafe {
            let low = _mm512_shuffle_ps::<FIRST_HALVES>(even, odd);
            (low, _mm512_shuffle_ps::<SECOND_HALVES>(even, odd))
        };
        let twos = self.join::<MAX>(low, high);
        // SAFETY: the token proves AVX-512.
        let second = unsafe { _mm512_movehdup_ps(twos) };
        self.evens(self.join::<MAX>(twos, second))
    }

    #[inline(always)]
    fn evens(self, vector: __m512) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_moveldup_ps(vector) }
    }
}
