//! Some rows over one softmax tile: scores, softmax, values.

use core::marker::PhantomData;

use super::exp::exp2;
use super::scores::{KeyStep, Queries, Scores};
use super::softmax::{Hide, Rule, Transform, largest, weigh};
use super::values::{Apart, Extent, Scales, ValueStep, Values};
use super::{Aligned, LANE, Piece, ScoreRow, TILE, Tiles, scale};
use crate::cut;
use crate::element::tile::Panels;
use crate::simd::{Kernel, LANES, RowsKernel, Simd};

/// One step of the walk: rows of one KV head, at most as many as the register tile is high, over
/// one softmax tile.
///
/// It is one function for each level and number of rows. What passes between its parts is checked
/// once and stays in the nearest cache.
pub(crate) struct Step<'s, 'k, 'a, K: KeyStep, V> {
    pub(crate) q: &'s Queries<'k, K::Factor>,
    pub(crate) keys: &'s Side<'k, 'a>,
    pub(crate) values: &'s Side<'k, 'a>,
    pub(crate) v_width: usize,
    /// The positions that any row sees.
    pub(crate) extent: Extent,
    /// What each row sees, where they differ.
    pub(crate) extents: Option<&'s [Extent]>,
    /// Which positions each row sees, a bit for each of the tile, where those are not all in its
    /// extent.
    pub(crate) masks: Option<&'s [u64]>,
    /// What is done to the scores of each row; empty where nothing is.
    pub(crate) rules: &'s [Rule],
    /// Takes the scores, and the weights after that.
    pub(crate) scores: &'s mut [ScoreRow],
    /// Room for what becomes of weights before they meet values.
    pub(crate) factors: &'s mut [ScoreRow],
    /// Rows.
    pub(crate) rows: usize,
    /// Maximum and denominator of each row, and of others behind them up to `MOST_ROWS`.
    pub(crate) heads: &'s mut [[f32; 2]],
    /// Output rows, `stride` apart.
    pub(crate) outs: &'s mut [f32],
    pub(crate) stride: usize,
    /// Takes the factors by which outputs shrink, each twice.
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

/// By reference: there is much in it, and it passes two doors.
impl<K: KeyStep, V: ValueStep> Kernel for &mut Step<'_, '_, '_, K, V> {
    type Output = ();

    /// At most `S::ROWS`, `K::ROWS` and `V::ROWS` rows.
    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        // Of the two, the one with fewer rows knows how many there can be. As a constant, so that
        // the other one's functions are not compiled.
        if const { V::ROWS < K::ROWS } {
            V::run_rows(s, self.rows, self);
        } else {
            K::run_rows(s, self.rows, self);
        }
    }
}

impl<K: KeyStep, V: ValueStep> RowsKernel for &mut Step<'_, '_, '_, K, V> {
    #[inline(always)]
    fn call<S: Simd, const MR: usize>(self, s: S) {
        let mut rows = Rows::<K, V, MR>(self);
        rows.scores(s);
        rows.softmax(s);
        match (rows.0.extents, rows.0.masks) {
            (None, _) => rows.values(s, rows.0.extent),
            (Some(extents), None) => rows.values_of_each(s, extents),
            (Some(extents), Some(masks)) => rows.values_of_masks(s, extents, masks),
        }
    }
}

/// [`Step`] of `MR` rows.
struct Rows<'r, 's, 'k, 'a, K: KeyStep, V, const MR: usize>(&'r mut Step<'s, 'k, 'a, K, V>);

impl<K: KeyStep, V: ValueStep, const MR: usize> Rows<'_, '_, '_, '_, K, V, MR> {
    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S) {
        let step = &mut self.0;
        let (tiles, panels, extent) = (&step.keys.tiles, step.keys.panels, step.extent);
        let scales = step.keys.scales;
        // Where there are scales each group has a chain of its own, and is scaled before it joins.
        // One loop for all: what is in it is large, and compiled for every level and row count.
        let groups = scales.rows.len().max(1);
        for index in 0..groups {
            let first = index * scales.group;
            let numbers =
                if groups == 1 { step.q.numbers } else { scales.group.min(step.q.numbers - first) };
            // A factor may meet all numbers of a cell: of pairs there are half as many.
            let first_row = first / K::NUMBERS;
            let q = Queries { first: first_row * K::FACTORS, first_row, numbers, ..*step.q };
            let out = if index == 0 { &mut *step.scores } else { &mut *step.factors };
            Scores::<K> { q, tiles, panels, extent, out }.compute::<S, MR>(s);
            let Some(scales) = scales.rows.get(index) else { return };
            for line in 0..MR {
                let score = cut::one_mut(step.scores, line);
                if index == 0 {
                    scale(s, score, scales);
                } else {
                    add_scaled(s, score, cut::one(step.factors, line), scales);
                }
            }
        }
    }

    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S) {
        let step = &mut self.0;
        let mut extents = [step.extent; MR];
        if let Some(own) = step.extents {
            extents.copy_from_slice(cut::part(own, 0, MR));
        }
        for (line, rule) in step.rules.iter().enumerate().take(MR) {
            let row = cut::one_mut(step.scores, line);
            s.run(Transform { row, extent: extents[line], rule: *rule });
        }
        if let Some(masks) = step.masks {
            for (line, mask) in masks.iter().enumerate().take(MR) {
                let row = cut::one_mut(step.scores, line);
                s.run(Hide { row, extent: extents[line], mask: *mask });
            }
        }
        // Of all rows at once: with a tree for each and states that were gathered one by one, the eight rows
        // of a prompt took 1.1 times as long for their softmax. Without a branch: which tiles raise a
        // maximum nobody foresees.
        let mut most = [s.splat(f32::NEG_INFINITY); MR];
        for line in 0..MR {
            most[line] = largest(s, cut::one_mut(step.scores, line), extents[line]);
        }
        let most = s.max_of_rows(most);
        let heads = match step.heads.as_flattened_mut().first_chunk_mut() {
            Some(heads) => heads,
            None => cut::out_of_bounds(),
        };
        let states = s.load(heads);
        let old = s.evens(states);
        let Aligned(maxima) = &mut Aligned::zeros();
        // False where the tile's maximum is a NaN, so that a maximum itself never is one.
        let max = s.select_less(old, most, most, old);
        s.store(max, maxima);
        let rise = s.select_less(old, most, s.sub(old, most), s.splat(0.0));
        let shrink = exp2(s, rise);
        s.store(shrink, step.shrink);
        let mut sums = [s.splat(0.0); MR];
        for line in 0..MR {
            let row = cut::one_mut(step.scores, line);
            sums[line] = weigh(s, row, extents[line], maxima[2 * line]);
        }
        let denoms = s.add(s.mul(states, shrink), s.sums_of_rows(sums));
        // Maxima stand in the even lanes. Behind the rows at hand are other rows' states.
        let lanes = s.load(&LANE);
        let new = s.select_less(s.load(&ODD), s.splat(0.5), max, denoms);
        s.store(s.select_less(lanes, s.splat(2.0 * MR as f32), new, states), heads);
    }

    #[inline(always)]
    fn values<S: Simd>(&mut self, s: S, extent: Extent) {
        self.0.values_over(extent).compute::<S, V, MR>(s);
    }

    /// A row never multiplies a value that it does not see, not even by zero: 0 x inf and 0 x NaN
    /// are not 0. What all rows see is done together, and in between what each sees before and
    /// behind that.
    #[inline(always)]
    fn values_of_each<S: Simd>(&mut self, s: S, extents: &[Extent]) {
        let extents = cut::part(extents, 0, MR);
        // Positions that share a factor stay together.
        let common = Extent::in_common(extents, V::NUMBERS / V::FACTORS);
        let mut own = [Extent::EMPTY; MR];
        if extents.iter().any(|extent| extent.from < common.from) {
            for line in 0..MR {
                let Extent { from, to } = extents[line];
                own[line] = Extent { from, to: to.min(common.from) };
            }
            self.values_apart(s, &own);
        }
        if !common.is_empty() {
            self.values(s, common);
            self.0.shrink.fill(1.0);
        }
        for line in 0..MR {
            let Extent { from, to } = extents[line];
            own[line] = Extent { from: from.max(common.to), to };
        }
        self.values_apart(s, &own);
    }

    /// The same where rows see some positions between others: run by run of neighbours.
    #[inline(always)]
    fn values_of_masks<S: Simd>(&mut self, s: S, extents: &[Extent], masks: &[u64]) {
        let mut left = [0; MR];
        for (left, (extent, mask)) in left.iter_mut().zip(extents.iter().zip(masks)) {
            *left = extent.mask() & mask;
        }
        while left.iter().any(|left| *left != 0) {
            let mut runs = [Extent::EMPTY; MR];
            for (run, left) in runs.iter_mut().zip(&mut left) {
                *run = Extent::first_run(*left);
                *left &= !run.mask();
            }
            self.values_apart(s, &runs);
        }
    }

    /// Adds to each row what it alone sees.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "loops of a length that the compiler knows")]
    fn values_apart<S: Simd>(&mut self, s: S, extents: &[Extent; MR]) {
        let values = self.0.values_over(Extent::EMPTY);
        s.run(Apart::<V> { values, extents, how: PhantomData });
        for line in 0..MR {
            // What has shrunk once must not shrink again.
            if !extents[line].is_empty() {
                self.0.shrink[2 * line] = 1.0;
            }
        }
    }
}

impl<'k, 'a, K: KeyStep, V> Step<'_, 'k, 'a, K, V> {
    #[inline(always)]
    fn values_over(&mut self, extent: Extent) -> Values<'_, 'k, 'a> {
        Values {
            weights: self.scores,
            factors: self.factors,
            scales: self.values.scales,
            shrink: self.shrink,
            extent,
            tiles: &self.values.tiles,
            panels: self.values.panels,
            v_width: self.v_width,
            outs: self.outs,
            stride: self.stride,
        }
    }
}

/// The odd lanes.
const ODD: [f32; LANES] =
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0];

/// Adds the scores of another group, multiplied by its scales.
#[inline(always)]
fn add_scaled<S: Simd>(s: S, row: &mut ScoreRow, part: &ScoreRow, scales: &ScoreRow) {
    let parts = part.as_chunks().0.iter().zip(scales.as_chunks().0);
    for (score, (part, scale)) in row.as_chunks_mut().0.iter_mut().zip(parts).take(TILE / LANES) {
        s.store(s.mul_add(s.load(part), s.load(scale), s.load(score)), score);
    }
}
