//! The softmax of one row over one tile.

use super::exp::{exp2, tanh};
use super::values::Extent;
use super::{LANE, ScoreRow, TILE};
use crate::cut;
use crate::simd::{Kernel, LANES, Simd};

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

impl Rule {
    pub(crate) const NONE: Rule = Rule { cap: None, slope: None, distance: 0.0 };
}

/// The largest scores of one row in a tile, lane by lane. Scores outside the extent become -inf.
///
/// The running maximum rises to the largest, and the row's output and denominator shrink by two to the
/// power of what it rose by, `old - new`:
///
/// - No score at all, or only -inf so far: nothing changes (there is no `-inf - -inf`).
/// - A score of +inf takes everything, shared evenly between all +inf: the limit of a finite
///   score that grows, instead of `inf - inf`.
/// - A NaN score makes the row NaN.
#[inline(always)]
pub(crate) fn largest<S: Simd>(s: S, row: &mut ScoreRow, extent: Extent) -> S::F32 {
    let nothing = s.splat(f32::NEG_INFINITY);
    if extent.is_empty() {
        return nothing;
    }
    if let Some([a, b, c, d]) = whole(row, extent) {
        return s.max(s.max(s.load(a), s.load(b)), s.max(s.load(c), s.load(d)));
    }
    // In registers: numbers stored one by one could not be read back as a vector at once.
    let mut most = nothing;
    let mut position = s.splat((extent.from / LANES * LANES) as f32);
    position = s.add(position, s.load(&LANE));
    let (from, to) = (s.splat(extent.from as f32), s.splat(extent.to as f32));
    for vector in covered(row, extent) {
        let seen = s.select_less(position, to, s.load(vector), nothing);
        let seen = s.select_less(position, from, nothing, seen);
        s.store(seen, vector);
        most = s.max(most, seen);
        position = s.add(position, s.splat(LANES as f32));
    }
    most
}

/// Turns the scores into weights relative to the maximum and adds them up, lane by lane.
#[inline(always)]
pub(crate) fn weigh<S: Simd>(s: S, row: &mut ScoreRow, extent: Extent, max: f32) -> S::F32 {
    let mut sum = s.splat(0.0);
    if extent.is_empty() {
        return sum;
    }
    if max.is_infinite() {
        let vectors = covered(row, extent);
        weigh_infinite(vectors.as_flattened_mut(), max);
        for vector in &*vectors {
            sum = s.add(sum, s.load(vector));
        }
        return sum;
    }
    let base = s.splat(max);
    // Written out for the usual case, so that the exponentials overlap.
    if let Some([a, b, c, d]) = whole(row, extent) {
        for vector in [a, b, c, d] {
            sum = s.add(sum, weigh_lanes(s, vector, base));
        }
    } else {
        for vector in covered(row, extent) {
            sum = s.add(sum, weigh_lanes(s, vector, base));
        }
    }
    sum
}

/// Turns sixteen scores into weights. Not a closure: one that is not inlined is compiled without
/// the level's instructions.
#[inline(always)]
fn weigh_lanes<S: Simd>(s: S, vector: &mut [f32; LANES], base: S::F32) -> S::F32 {
    let weight = exp2(s, s.sub(s.load(vector), base));
    s.store(weight, vector);
    weight
}

/// The vectors of a row that an extent lies in.
#[inline(always)]
fn covered(row: &mut ScoreRow, extent: Extent) -> &mut [[f32; LANES]] {
    debug_assert!(extent.to <= TILE, "a tile has {TILE} positions");
    let from = extent.from / LANES * LANES;
    let len = extent.to.next_multiple_of(LANES) - from;
    cut::part_mut(row, from, len).as_chunks_mut().0
}

/// A row's vectors, where all of the tile counts.
#[inline(always)]
fn whole(row: &mut ScoreRow, extent: Extent) -> Option<&mut [[f32; LANES]; TILE / LANES]> {
    if extent.from == 0 && extent.to == TILE {
        row.as_chunks_mut().0.first_chunk_mut()
    } else {
        None
    }
}

/// Soft cap, then ALiBi, over the vectors that an extent lies in. A kernel of its own, since it is
/// long and seldom asked for.
pub(crate) struct Transform<'t> {
    pub(crate) row: &'t mut ScoreRow,
    pub(crate) extent: Extent,
    pub(crate) rule: Rule,
}

impl Kernel for Transform<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        if !self.extent.is_empty() {
            let from = self.extent.from / LANES * LANES;
            transform(s, covered(self.row, self.extent), from, self.rule);
        }
    }
}

/// Makes the scores of what a row does not see -inf. A kernel of its own, as [`Transform`] is.
pub(crate) struct Hide<'h> {
    pub(crate) row: &'h mut ScoreRow,
    pub(crate) extent: Extent,
    /// A bit for each position of the tile that is seen.
    pub(crate) mask: u64,
}

impl Kernel for Hide<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        if self.extent.is_empty() {
            return;
        }
        let (nothing, half) = (s.splat(f32::NEG_INFINITY), s.splat(0.5));
        let first = self.extent.from / LANES * LANES;
        for (at, vector) in (first..).step_by(LANES).zip(covered(self.row, self.extent)) {
            let mut seen = [0.0; LANES];
            for (lane, seen) in seen.iter_mut().enumerate() {
                *seen = (self.mask >> (at + lane) & 1) as f32;
            }
            let score = s.load(vector);
            s.store(s.select_less(half, s.load(&seen), score, nothing), vector);
        }
    }
}

/// `scores` start at position `from` of the tile.
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
