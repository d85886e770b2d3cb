//! What is kept of a row between tiles, and how two such states become one.
//!
//! A state is a maximum `m`, a denominator `d` and an output row `o`, all relative to `m`: the
//! softmax so far is `o / d`. Two states over different keys merge exactly (FlashAttention's
//! online softmax, Milakov and Gimelshein 2018): with `m = max(m1, m2)` and `a = 2^(m1 - m)`,
//! `b = 2^(m2 - m)`, it is `(m, a d1 + b d2, a o1 + b o2)`. The empty state, with `m = -inf` and
//! `d = 0`, is the neutral element, and is legal everywhere.

use core::f32::consts::LOG2_E;
use core::f64::consts::LN_2;

use super::Aligned;
use super::exp::{exp2_one, ln};
use crate::cut;
use crate::simd::{LANES, Simd};

/// Maximum and denominator of one row; the maximum in units of log2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Head {
    pub(crate) max: f32,
    pub(crate) denom: f32,
}

impl Head {
    pub(crate) const EMPTY: Head = Head { max: f32::NEG_INFINITY, denom: 0.0 };

    /// Whether no key was seen. A NaN seen under a maximum of -inf stands in `denom`.
    pub(crate) fn is_empty(self) -> bool {
        self.max == f32::NEG_INFINITY && self.denom == 0.0
    }
}

/// The factor from a state's own maximum to the common one, also where both are infinite.
#[inline(always)]
fn factor<S: Simd>(s: S, own: f32, common: f32) -> f32 {
    if own == common { 1.0 } else { exp2_one(s, own - common) }
}

/// Merges `from` into `into`. Products are rounded before they are added, at every level.
#[inline(always)]
pub(crate) fn merge<S: Simd>(
    s: S,
    into: &mut Head,
    into_out: &mut [f32],
    from: Head,
    from_out: &[f32],
) {
    if from.is_empty() {
        return;
    }
    if into.is_empty() {
        *into = from;
        into_out.copy_from_slice(from_out);
        return;
    }
    let max = if from.max > into.max { from.max } else { into.max };
    let (a, b) = (factor(s, into.max, max), factor(s, from.max, max));
    *into = Head { max, denom: into.denom * a + from.denom * b };
    for (sum, number) in into_out.iter_mut().zip(from_out) {
        *sum = *sum * a + *number * b;
    }
}

/// Writes the row's answer.
///
/// A sink is a learned logit with a zero value: it joins the denominator, once, here. An empty
/// state gives zeros.
#[inline(always)]
pub(crate) fn finish<S: Simd>(
    s: S,
    head: Head,
    out: &[f32],
    sink: Option<f32>,
    answer: &mut [f32],
) {
    if head.is_empty() {
        answer.fill(0.0);
        return;
    }
    let (mut scale, mut denom) = (1.0, head.denom);
    if let Some(sink) = sink {
        let sink = sink * LOG2_E;
        let max = if sink > head.max { sink } else { head.max };
        scale = factor(s, head.max, max);
        denom = head.denom * scale + factor(s, sink, max);
    }
    let (whole, rest) = answer.as_chunks_mut();
    for (answer, numbers) in whole.iter_mut().zip(out.as_chunks().0) {
        let scaled = s.mul(s.load(numbers), s.splat(scale));
        s.store(s.div(scaled, s.splat(denom)), answer);
    }
    let last = cut::from(out, whole.len() * LANES);
    // A state's row is whole vectors; a strip of merged ones and a caller's own end with the width.
    if let Some(numbers) = last.first_chunk() {
        let Aligned(lanes) = &mut Aligned::zeros();
        let scaled = s.mul(s.load(numbers), s.splat(scale));
        s.store(s.div(scaled, s.splat(denom)), lanes);
        copy_few(lanes, rest);
        return;
    }
    for (answer, number) in rest.iter_mut().zip(last) {
        *answer = *number * scale / denom;
    }
}

/// Copies fewer numbers than a vector has, in pieces of known lengths: a copy of any length is a call.
#[inline(always)]
fn copy_few(lanes: &[f32; LANES], to: &mut [f32]) {
    let at = copy_chunk::<8>(lanes, to, 0);
    let at = copy_chunk::<4>(lanes, to, at);
    let at = copy_chunk::<2>(lanes, to, at);
    copy_chunk::<1>(lanes, to, at);
}

/// Copies `N` numbers, if so many are left, and returns where the next ones are.
#[inline(always)]
fn copy_chunk<const N: usize>(lanes: &[f32; LANES], to: &mut [f32], at: usize) -> usize {
    let to = to.get_mut(at..).and_then(<[f32]>::first_chunk_mut::<N>);
    match (lanes.get(at..).and_then(<[f32]>::first_chunk), to) {
        (Some(lanes), Some(to)) => {
            *to = *lanes;
            at + N
        }
        _ => at,
    }
}

/// `ln(sum of e^score)`: the log-sum-exp, a natural logarithm that leaves the sink out; -inf of an
/// empty state.
pub(crate) fn log_sum_exp(head: Head) -> f32 {
    if head.is_empty() {
        return f32::NEG_INFINITY;
    }
    let unusual = head.max.is_infinite() || !head.denom.is_finite() || head.denom <= 0.0;
    if unusual {
        return if head.denom.is_nan() { f32::NAN } else { head.max };
    }
    (f64::from(head.max) * LN_2 + ln(head.denom)) as f32
}
