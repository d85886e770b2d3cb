//! The softmax of one row over one tile.

use super::exp::{exp2, exp2_one, tanh};
use super::state::Head;
use super::values::Extent;
use super::{ScoreRow, TILE};
use crate::cut;
use crate::simd::{LANES, Simd};

/// What is done to a product before the softmax. Both numbers are in units of `log2`, as scores
/// are in the kernel: the query comes scaled by `scale x log2(e)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    /// `cap x log2(e)`; the query then comes scaled by `scale / cap`.
    pub(crate) cap: Option<f32>,
    /// The head's ALiBi slope x log2(e).
    pub(crate) slope: Option<f32>,
    /// The query's position minus the tile's first one.
    pub(crate) distance: f32,
}

const LANE: [f32; LANES] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

/// Turns the scores in `extent` into weights relative to the running maximum, updates the head's
/// maximum and denominator, and returns the factor by which its output shrinks.
///
/// - No score at all, or only -inf so far: nothing changes (there is no `-inf - -inf`).
/// - A score of +inf takes everything, shared evenly between all +inf: the limit of a finite
///   score that grows, instead of `inf - inf`.
/// - A NaN score makes the row NaN.
#[inline(always)]
pub(crate) fn softmax<S: Simd>(
    s: S,
    row: &mut ScoreRow,
    extent: Extent,
    rule: Rule,
    head: &mut Head,
) -> f32 {
    debug_assert!(extent.to <= TILE, "a tile has {TILE} positions");
    if extent.is_empty() {
        return 1.0;
    }
    let from = extent.from / LANES * LANES;
    let len = extent.to.next_multiple_of(LANES) - from;
    let scores = cut::part_mut(row, from, len);
    transform(s, scores.as_chunks_mut().0, from, rule);
    cut::part_mut(scores, 0, extent.from - from).fill(f32::NEG_INFINITY);
    cut::part_mut(scores, extent.to - from, len - (extent.to - from)).fill(f32::NEG_INFINITY);

    let vectors: &mut [[f32; LANES]] = scores.as_chunks_mut().0;
    let mut most = s.splat(f32::NEG_INFINITY);
    for vector in &*vectors {
        most = s.max(most, s.load(vector));
    }
    let most = s.reduce_max(most);
    let old = head.max;
    // False where the tile's maximum is a NaN, so that `max` itself never is one.
    let new = if most > old { most } else { old };
    let mut sum = s.splat(0.0);
    if new.is_infinite() {
        weigh_infinite(vectors.as_flattened_mut(), new);
        for vector in &*vectors {
            sum = s.add(sum, s.load(vector));
        }
    } else {
        let base = s.splat(new);
        for vector in vectors {
            let weight = exp2(s, s.sub(s.load(vector), base));
            s.store(weight, vector);
            sum = s.add(sum, weight);
        }
    }
    let shrink = if new == old { 1.0 } else { exp2_one(s, old - new) };
    head.max = new;
    head.denom = head.denom * shrink + s.reduce_sum(sum);
    shrink
}

/// Soft cap, then ALiBi, over vectors that start at position `from` of the tile.
#[inline(always)]
fn transform<S: Simd>(s: S, scores: &mut [[f32; LANES]], from: usize, rule: Rule) {
    if let Some(cap) = rule.cap {
        let cap = s.splat(cap);
        for vector in &mut *scores {
            let score = tanh(s, s.load(vector));
            s.store(s.mul(score, cap), vector);
        }
    }
    if let Some(slope) = rule.slope {
        let slope = s.splat(-slope);
        let lanes = s.load(&LANE);
        for (index, vector) in scores.iter_mut().enumerate() {
            let first = s.splat(rule.distance - (from + index * LANES) as f32);
            let distance = s.sub(first, lanes);
            let size = s.max(distance, s.sub(s.splat(0.0), distance));
            let score = s.mul_add(slope, size, s.load(vector));
            s.store(score, vector);
        }
    }
}

/// The weights where the maximum is infinite: 1 for each +inf under a maximum of +inf, 0 for
/// everything else, and a NaN stays one.
#[cold]
#[inline(never)]
fn weigh_infinite(row: &mut [f32], max: f32) {
    for score in row {
        if !score.is_nan() {
            *score = if *score == max && max > 0.0 { 1.0 } else { 0.0 };
        }
    }
}
