//! `2^x`, `tanh` and the logarithm, each defined once for every level.
//!
//! `core` has none of them, the standard library's differ from platform to platform, and at 148
//! cycles for sixteen values they would cost more than the attention around them. What is written
//! here is part of the bit promise: the same steps in the same order at every level.

use crate::simd::Simd;

/// Below this the result of [`exp2`] is exactly zero: the next smaller ones would be denormal, and
/// a denormal weight costs a hundred cycles on some processors and changes no sum.
pub(crate) const EXP2_FLOOR: f32 = -126.0;

/// Coefficients of `(2^r - 1) / r` on [-1/2, 1/2]: minimax, error 2.6e-9 of the whole.
/// The first is the float above ln 2, not the nearest to it: there the whole is best.
const EXP2: [f32; 6] =
    [0.693_147_24, 0.240_226_53, 0.055_503_11, 0.009_617_693, 0.001_340_664_4, 0.000_155_946_78];

/// `2^x` for `x <= 127`, to 1.8 units of 2^-24 (1.4 where products are fused); exactly 0 below
/// [`EXP2_FLOOR`], exactly 1 at 0. A NaN stays one.
///
/// `x` is split into the nearest whole number and a rest of at most one half; the rest goes
/// through a polynomial whose constant is exactly 1, and the whole number becomes an exponent.
/// That product is exact: the polynomial lies in [0.7, 1.42] and denormal results are cut off.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let (whole, power) = s.whole_and_power(x);
    let rest = s.sub(x, whole);
    let mut sum = s.splat(EXP2[5]);
    for index in [4, 3, 2, 1, 0] {
        sum = s.mul_add(sum, rest, s.splat(EXP2[index]));
    }
    let near_one = s.mul_add(sum, rest, s.splat(1.0));
    s.zero_below(s.splat(EXP2_FLOOR), x, s.mul(near_one, power))
}

/// [`exp2`] of one number.
#[inline(always)]
pub(crate) fn exp2_one<S: Simd>(s: S, x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    s.store(exp2(s, s.splat(x)), &mut lanes);
    lanes[0]
}

/// Where [`tanh`] changes from the polynomial to the quotient.
const TANH_BEND: f32 = 0.625;

/// Coefficients of `(tanh(x) / x - 1) / x^2` in `x^2` below the bend: minimax, error 4.4e-9 of
/// the whole.
const TANH: [f32; 5] = [-0.333_332_8, 0.133_314_42, -0.053_739_715, 0.020_639_087, -0.005_704_987];

/// `tanh(x)` to 3.2 units of 2^-24, for any x; a NaN stays one.
///
/// Near zero an odd polynomial, since the quotient `(1 - e) / (1 + e)` with `e = 2^(-2 |x| log2 e)`
/// loses digits there; beyond, the quotient, which reaches exactly 1 where `e` vanishes.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let size = s.select_less(x, zero, s.sub(zero, x), x);
    let square = s.mul(x, x);
    let mut sum = s.splat(TANH[4]);
    for index in [3, 2, 1, 0] {
        sum = s.mul_add(sum, square, s.splat(TANH[index]));
    }
    let near = s.mul_add(s.mul(sum, square), x, x);
    let e = exp2(s, s.mul(size, s.splat(-2.0 * core::f32::consts::LOG2_E)));
    let far = s.div(s.sub(one, e), s.add(one, e));
    let far = s.select_less(x, zero, s.sub(zero, far), far);
    s.select_less(size, s.splat(TANH_BEND), near, far)
}

/// The natural logarithm of a positive, finite, normal number, in double precision.
///
/// Once a row, so plain arithmetic will do: the number is split into `2^e m` with m in
/// [0.7, 1.42), and `ln m = 2 atanh((m - 1) / (m + 1))` by its series, whose argument is below
/// 0.172, so that eleven terms leave less than 1e-18.
pub(crate) fn ln(x: f32) -> f64 {
    let bits = f64::from(x).to_bits();
    // The exponent of x / sqrt(2) rounded, so that m straddles 1.
    let shifted = bits.wrapping_sub(core::f64::consts::FRAC_1_SQRT_2.to_bits());
    let exponent = shifted.cast_signed() >> 52;
    let m = f64::from_bits(bits.wrapping_sub((exponent << 52).cast_unsigned()));
    let y = (m - 1.0) / (m + 1.0);
    let square = y * y;
    let mut sum = 0.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    exponent as f64 * core::f64::consts::LN_2 + 2.0 * y * sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Level};

    #[derive(Clone, Copy)]
    enum Function {
        Exp2,
        Tanh,
    }

    struct Apply<'a>(Function, &'a [f32; 16]);

    impl Kernel for Apply<'_> {
        type Output = [f32; 16];

        #[inline(always)]
        fn call<S: Simd>(self, s: S) -> [f32; 16] {
            let x = s.load(self.1);
            let y = match self.0 {
                Function::Exp2 => exp2(s, x),
                Function::Tanh => tanh(s, x),
            };
            let mut out = [0.0; 16];
            s.store(y, &mut out);
            out
        }
    }

    /// Runs a function over the numbers with the bit patterns `step * i`, sixteen at a time, and
    /// hands every (x, y) on.
    fn sweep(level: Level, function: Function, step: usize, mut see: impl FnMut(f32, f32)) {
        let mut pattern = 0u64;
        while pattern <= u64::from(u32::MAX) {
            let x = core::array::from_fn(|lane| {
                f32::from_bits((pattern + (lane * step) as u64).min(u64::from(u32::MAX)) as u32)
            });
            let y = level.run(Apply(function, &x));
            for lane in 0..16 {
                see(x[lane], y[lane]);
            }
            pattern += 16 * step as u64;
        }
    }

    fn bits(x: f32) -> u32 {
        if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
    }

    fn check(function: Function, step: usize) {
        // Every level of a class gives the same bits: compare by a running hash of all of them.
        let mut digests = [None::<u64>; 2];
        for level in Level::available() {
            let mut digest = 0u64;
            let mut worst = 0.0f64;
            sweep(level, function, step, |x, y| {
                let in_range = match function {
                    Function::Exp2 => x <= 127.0 || x.is_nan(),
                    Function::Tanh => true,
                };
                if !in_range {
                    return;
                }
                digest =
                    digest.rotate_left(5) ^ u64::from(bits(y)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                if x.is_nan() {
                    assert!(y.is_nan(), "{level}: a NaN vanished");
                    return;
                }
                let want = match function {
                    Function::Exp2 if x < EXP2_FLOOR => {
                        assert_eq!(y.to_bits(), 0, "{level}: 2^{x}");
                        return;
                    }
                    Function::Exp2 => f64::from(x).exp2(),
                    Function::Tanh => f64::from(x).tanh(),
                };
                // In units of 2^-24 of the value.
                let error = if want == 0.0 {
                    f64::from(y).abs() * 1e38
                } else {
                    ((f64::from(y) - want) / want).abs() * 16_777_216.0
                };
                // Denormal arguments of tanh round to a denormal: one step of those is allowed.
                if want.abs() > f64::from(f32::MIN_POSITIVE) {
                    worst = worst.max(error);
                }
            });
            let most = match function {
                Function::Exp2 if level.is_fused() => 1.4,
                Function::Exp2 => 1.8,
                Function::Tanh => 3.2,
            };
            assert!(worst < most, "{level}: {worst} units of 2^-24");
            std::println!("{level}: worst error {worst:.3} x 2^-24, digest {digest:016x}");
            let known = &mut digests[usize::from(level.is_fused())];
            assert_eq!(*known.get_or_insert(digest), digest, "{level} differs from its class");
        }
    }

    #[test]
    fn exp2_is_right_and_the_same_at_every_level() {
        check(Function::Exp2, 1009);
    }

    #[test]
    fn tanh_is_right_and_the_same_at_every_level() {
        check(Function::Tanh, 1009);
    }

    /// All 2^32 numbers: seven minutes, whenever this file changes.
    #[test]
    #[ignore = "all 2^32 inputs at every level take minutes; the tests above take every 1009th"]
    fn both_over_every_float_there_is() {
        check(Function::Exp2, 1);
        check(Function::Tanh, 1);
    }

    #[test]
    fn exp2_is_exact_where_it_must_be() {
        let x = [0.0, -0.0, f32::NEG_INFINITY, f32::MIN, -126.0, -126.000_01, 1.0, -1.0, 2.0]
            .iter()
            .copied()
            .chain(core::iter::repeat(-3.0));
        let mut lanes = [0.0; 16];
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = x;
        }
        for level in Level::available() {
            let y = level.run(Apply(Function::Exp2, &lanes));
            let want = [1.0, 1.0, 0.0, 0.0, f32::MIN_POSITIVE, 0.0, 2.0, 0.5, 4.0];
            assert_eq!(y[..9], want, "{level}");
            assert_eq!(y[9..], [0.125; 7], "{level}");
        }
    }

    #[test]
    fn ln_agrees_with_std() {
        for step in 0..400_000u32 {
            let x = f32::from_bits(0x0080_0000 + step * 5_300);
            if x.is_finite() {
                let want = f64::from(x).ln();
                assert!((ln(x) - want).abs() <= want.abs().max(1.0) * 1e-15, "ln {x}");
            }
        }
        assert_eq!(ln(1.0), 0.0);
    }
}
