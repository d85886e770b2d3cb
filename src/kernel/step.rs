//! Some rows over one softmax tile: scores, softmax, values.

use core::marker::PhantomData;

use super::exp::exp2;
use super::scores::{KeyStep, Queries, Scores};
use super::softmax::{Rule, raise, transform, weigh};
use super::values::{Extent, Scales, ValueStep, Values};
use super::{Piece, ScoreRow, TILE, Tiles, rows_at_once};
use crate::cut;
use crate::element::tile::Panels;
use crate::simd::{Kernel, LANES, Simd};

/// One step of the walk: rows of one KV head, at most as many as the register tile is high, over
/// one softmax tile.
///
/// It is one function for each level and number of rows. What passes between its parts is checked
/// once and stays in the nearest cache.
pub(crate) struct Step<'s, 'k, 'a, K: KeyStep, V> {
    pub(crate) q: Queries<'k, K::Factor>,
    pub(crate) keys: Side<'k, 'a>,
    pub(crate) values: Side<'k, 'a>,
    pub(crate) v_width: usize,
    /// The positions that any row sees.
    pub(crate) extent: Extent,
    /// What each row sees, where they differ; the values are then left to the caller.
    pub(crate) extents: Option<&'s [Extent]>,
    /// What is done to the scores of each row; empty where nothing is.
    pub(crate) rules: &'s [Rule],
    /// Takes the scores, and the weights after that.
    pub(crate) scores: &'s mut [ScoreRow],
    /// Room for what becomes of weights before they meet values.
    pub(crate) factors: &'s mut [ScoreRow],
    /// Maximum and denominator of each row.
    pub(crate) heads: &'s mut [[f32; 2]],
    /// Output rows, `stride` apart.
    pub(crate) outs: &'s mut [f32],
    pub(crate) stride: usize,
    /// Takes the factors by which outputs shrink.
    pub(crate) shrink: &'s mut [f32; LANES],
    pub(crate) arithmetic: PhantomData<V>,
}

/// The keys, or the values, of one KV head in a softmax tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side<'k, 'a> {
    pub(crate) tiles: Tiles<'k, 'a>,
    pub(crate) panels: Panels,
    pub(crate) scales: Scales<'k>,
}

impl<'k, 'a> Side<'k, 'a> {
    /// The same where the tile was unpacked.
    #[inline(always)]
    pub(crate) fn unpacked(self, piece: &'k [Piece<'a>], panels: Panels) -> Self {
        let tiles = Tiles { pieces: piece, head: 0, next_head: 0, next: &[] };
        Side { tiles, panels, ..self }
    }
}

impl<K: KeyStep, V: ValueStep> Step<'_, '_, '_, K, V> {
    /// Does it, for so many rows, at most `S::ROWS`, `K::ROWS` and `V::ROWS`.
    #[inline(always)]
    pub(crate) fn run<S: Simd>(self, s: S, rows: usize) {
        match rows {
            1 => s.run(Rows::<K, V, 1>(self)),
            2 if most::<S, K, V>() >= 2 => s.run(Rows::<K, V, 2>(self)),
            3 if most::<S, K, V>() >= 3 => s.run(Rows::<K, V, 3>(self)),
            4 if most::<S, K, V>() >= 4 => s.run(Rows::<K, V, 4>(self)),
            5 if most::<S, K, V>() >= 5 => s.run(Rows::<K, V, 5>(self)),
            6 if most::<S, K, V>() >= 6 => s.run(Rows::<K, V, 6>(self)),
            7 if most::<S, K, V>() >= 7 => s.run(Rows::<K, V, 7>(self)),
            8 if most::<S, K, V>() >= 8 => s.run(Rows::<K, V, 8>(self)),
            _ => cut::out_of_bounds(),
        }
    }
}

/// [`Step`] of `MR` rows.
struct Rows<'s, 'k, 'a, K: KeyStep, V, const MR: usize>(Step<'s, 'k, 'a, K, V>);

impl<K: KeyStep, V: ValueStep, const MR: usize> Kernel for Rows<'_, '_, '_, K, V, MR> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        self.scores(s);
        match self.0.extents {
            None => {
                let extent = self.0.extent;
                self.softmax(s, |_| extent);
                self.values(s);
            }
            Some(extents) => self.softmax(s, |line| *cut::one(extents, line)),
        }
    }
}

impl<K: KeyStep, V: ValueStep, const MR: usize> Rows<'_, '_, '_, K, V, MR> {
    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S) {
        let step = &mut self.0;
        let (tiles, panels, extent) = (&step.keys.tiles, step.keys.panels, step.extent);
        let scales = step.keys.scales;
        if scales.rows.len() <= 1 {
            let out = &mut *step.scores;
            Scores::<K> { q: step.q, tiles, panels, extent, out }.compute::<S, MR>(s);
        }
        if let [scales] = scales.rows {
            for line in 0..MR {
                scale(s, cut::one_mut(step.scores, line), scales);
            }
            return;
        }
        // Each group has a chain of its own, and is scaled before it joins.
        for (index, scales_of) in scales.rows.iter().enumerate() {
            let first = index * scales.group;
            let numbers = scales.group.min(step.q.numbers - first);
            let first_row = first / K::NUMBERS;
            let q = Queries { first, first_row, numbers, ..step.q };
            let out = &mut *step.factors;
            Scores::<K> { q, tiles, panels, extent, out }.compute::<S, MR>(s);
            for line in 0..MR {
                let score = cut::one_mut(step.scores, line);
                let part = cut::one_mut(step.factors, line);
                if index == 0 {
                    scale(s, part, scales_of);
                    *score = *part;
                } else {
                    add_scaled(s, score, part, scales_of);
                }
            }
        }
    }

    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S, extent: impl Fn(usize) -> Extent) {
        let step = &mut self.0;
        for (line, rule) in step.rules.iter().enumerate().take(MR) {
            transform(s, cut::one_mut(step.scores, line), extent(line), *rule);
        }
        let mut rises = [0.0; LANES];
        for line in 0..MR {
            let (scores, head) = (cut::one_mut(step.scores, line), cut::one_mut(step.heads, line));
            rises[line] = raise(s, scores, extent(line), head);
        }
        s.store(exp2(s, s.load(&rises)), step.shrink);
        for line in 0..MR {
            let (scores, head) = (cut::one_mut(step.scores, line), cut::one_mut(step.heads, line));
            weigh(s, scores, extent(line), step.shrink[line], head);
        }
    }

    #[inline(always)]
    fn values<S: Simd>(self, s: S) {
        let step = self.0;
        let values = Values {
            weights: step.scores,
            factors: step.factors,
            scales: step.values.scales,
            shrink: step.shrink,
            extent: step.extent,
            tiles: &step.values.tiles,
            panels: step.values.panels,
            v_width: step.v_width,
            outs: step.outs,
            stride: step.stride,
        };
        values.compute::<S, V, MR>(s);
    }
}

/// Rows of the largest register tile that both steps have.
const fn most<S: Simd, K: KeyStep, V: ValueStep>() -> usize {
    let (keys, values) = (rows_at_once::<S, K>(), rows_at_once::<S, V>());
    if keys < values { keys } else { values }
}

/// Multiplies the scores of a tile by their positions' scales.
#[inline(always)]
fn scale<S: Simd>(s: S, row: &mut ScoreRow, scales: &ScoreRow) {
    let vectors = row.as_chunks_mut().0.iter_mut().zip(scales.as_chunks().0);
    for (score, scale) in vectors.take(TILE / LANES) {
        s.store(s.mul(s.load(score), s.load(scale)), score);
    }
}

/// Adds the scores of another group, multiplied by its scales.
#[inline(always)]
fn add_scaled<S: Simd>(s: S, row: &mut ScoreRow, part: &ScoreRow, scales: &ScoreRow) {
    let parts = part.as_chunks().0.iter().zip(scales.as_chunks().0);
    for (score, (part, scale)) in row.as_chunks_mut().0.iter_mut().zip(parts).take(TILE / LANES) {
        s.store(s.mul_add(s.load(part), s.load(scale), s.load(score)), score);
    }
}
