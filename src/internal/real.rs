//! Functions of real numbers in double precision, which `core` does not have.
//!
//! Written for the oracle alone, plainly, by the series of the textbook, and on purpose another
//! way than the kernels': an error in a shared polynomial would agree with itself.

use core::f64::consts::{LN_2, LOG2_E, SQRT_2};

/// `e^x`, to about 1e-15 of itself; below the normal numbers it is 0.
pub fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x > 709.7 {
        return f64::INFINITY;
    }
    if x < -708.0 {
        return 0.0;
    }
    let n = (x * LOG2_E + if x < 0.0 { -0.5 } else { 0.5 }) as i64;
    // The upper 32 bits of ln 2, so that n times it is exact, and the rest.
    const HIGH: f64 = 0.693_147_180_369_123_8;
    const LOW: f64 = 1.908_214_929_270_587_7e-10;
    let rest = (x - n as f64 * HIGH) - n as f64 * LOW;
    // |rest| < 0.35: the 19th term is below 1e-25.
    let mut sum = 1.0;
    for k in (1..19).rev() {
        sum = 1.0 + sum * rest / f64::from(k);
    }
    sum * f64::from_bits(((1023 + n) as u64) << 52)
}

/// `tanh(x)`, to about 1e-16 of one.
pub fn tanh(x: f64) -> f64 {
    let e = exp(-2.0 * x.abs());
    let size = (1.0 - e) / (1.0 + e);
    if x < 0.0 { -size } else { size }
}

/// The natural logarithm of a positive normal number.
pub fn ln(x: f64) -> f64 {
    let mut exponent = ((x.to_bits() >> 52) as i64) - 1023;
    let mut m = f64::from_bits((x.to_bits() & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if m > SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    // A first guess to about 1e-3, then Newton on e^y = m, which doubles its digits each time.
    let z = m - 1.0;
    let mut y = z - z * z / 2.0 + z * z * z / 3.0;
    for _ in 0..5 {
        y += m * exp(-y) - 1.0;
    }
    exponent as f64 * LN_2 + y
}

/// The square root of a number that is not negative.
pub fn sqrt(x: f64) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    // Half the exponent is right to a factor below 1.5; Newton does the rest.
    let mut root = f64::from_bits((x.to_bits() >> 1) + (0x3ff0_0000_0000_0000 >> 1));
    for _ in 0..6 {
        root = 0.5 * (root + x / root);
    }
    root
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_agree_with_std() {
        for step in -60_000..60_000 {
            let x = f64::from(step) * 0.0117;
            let (want, have) = (x.exp(), exp(x));
            assert!((have - want).abs() <= want * 2e-15, "exp {x}: {have} {want}");
            let x = x / 30.0;
            assert!((tanh(x) - x.tanh()).abs() <= 4e-16, "tanh {x}");
            let x = want.clamp(1e-300, 1e300);
            assert!((ln(x) - x.ln()).abs() <= x.ln().abs().max(1.0) * 4e-16, "ln {x}");
            assert!((sqrt(x) - x.sqrt()).abs() <= x.sqrt() * 3e-16, "sqrt {x}");
        }
    }

    #[test]
    fn the_edges_are_right() {
        assert_eq!((exp(0.0), exp(f64::NEG_INFINITY), exp(-1e9)), (1.0, 0.0, 0.0));
        assert_eq!((exp(f64::INFINITY), tanh(f64::INFINITY)), (f64::INFINITY, 1.0));
        assert_eq!((ln(1.0), sqrt(0.0), tanh(f64::NEG_INFINITY)), (0.0, 0.0, -1.0));
        assert!(exp(f64::NAN).is_nan() && tanh(f64::NAN).is_nan());
    }
}
