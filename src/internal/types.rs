//! Each test for every stored type.
//!
//! A test is a function of the type, and [`every_type!`](crate::every_type) makes one `#[test]` of
//! it for each: `stored_f32::name`, `stored_f16::name` and so on. A type that is added to the list
//! below is tested by all of them.

use crate::element::Element;

/// Makes a test of each of these functions for every stored type.
///
/// ```ignore
/// fn rows_come_back<E: Element>() { .. }
/// paged_kv::every_type! { rows_come_back }
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! every_type {
    ($($test:ident),+ $(,)?) => {
        $crate::every_type!(@type stored_f32, f32, $($test),+);
        $crate::every_type!(@type stored_f16, $crate::f16, $($test),+);
        $crate::every_type!(@type stored_bf16, $crate::bf16, $($test),+);
        $crate::every_type!(@type stored_int8, $crate::Int8, $($test),+);
        $crate::every_type!(@type stored_int4, $crate::Int4, $($test),+);
    };
    (@type $name:ident, $type:ty, $($test:ident),+) => {
        mod $name {
            $(
                #[test]
                fn $test() {
                    super::$test::<$type>();
                }
            )+
        }
    };
}

/// Whether this is the type that every test runs for in full.
pub fn is_f32<E: Element>() -> bool {
    E::NAME == <f32 as Element>::NAME
}

/// How many of `cases` are run for this type: all for `f32`, a part for the others, which take the
/// same walk with other cells.
pub fn cases<E: Element>(cases: u32, part: u32) -> u32 {
    some_of(if is_f32::<E>() { cases } else { cases / part })
}

/// How many of `cases` are run: all, or one in so many as `PAGED_KV_FEWER` said when the test kit was
/// compiled, for processors that are emulated and take a hundred times as long.
pub const fn some_of(cases: u32) -> u32 {
    const FEWER: u32 = match option_env!("PAGED_KV_FEWER") {
        Some(digits) => match u32::from_str_radix(digits, 10) {
            Ok(fewer) if fewer > 0 => fewer,
            _ => panic!("PAGED_KV_FEWER is no number from 1 on"),
        },
        None => 1,
    };
    cases.div_ceil(FEWER)
}

/// Whether rows are stored as whole numbers with scales: what is not finite spreads to all that
/// share its scale.
pub fn has_scales<E: Element>() -> bool {
    E::META_GROUP != 0
}

/// How far a stored number may be from what it was, as a part of the largest number that it shares
/// a scale with (of itself, where there are no scales), for numbers of ordinary size.
pub fn storing_error<E: Element>() -> f64 {
    match E::NAME {
        "f32" => 0.0,
        // Half a unit in the last place: 11 and 8 bits of precision.
        "f16" => 1.0 / 2048.0,
        "bf16" => 1.0 / 256.0,
        // Half a step, and what rounding the scale and the quotient adds to it.
        "int8" => 0.5 / 127.0 * (1.0 + 1e-4),
        "int4" => 0.5 / 7.0 * (1.0 + 1e-5),
        other => unreachable!("{other} has no bound yet"),
    }
}
