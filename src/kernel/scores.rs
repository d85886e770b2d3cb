//! Query rows times key panels.

use bytemuck::must_cast_slice;

use super::values::Extent;
use super::{ScoreRow, Tiles};
use crate::cut;
use crate::element::tile::{PANEL, Panels};
use crate::simd::product::{Columns, Rows, Step, columns, product};
use crate::simd::{LANES, Simd};

/// How a sum becomes a score.
pub(crate) trait KeyStep: Step {
    /// The score of sixteen keys; `line` is the query row that was multiplied.
    fn score<S: Simd>(
        s: S,
        sum: Self::Sum<S>,
        q: &Queries<'_, Self::Factor>,
        line: usize,
    ) -> S::F32;
}

/// Query rows, one after the other.
#[derive(Clone, Copy)]
pub(crate) struct Queries<'k, F> {
    pub(crate) rows: &'k [F],
    /// Factors in a row.
    pub(crate) width: usize,
    /// The first factor that is used, and with it the first row of cells.
    pub(crate) first: usize,
    pub(crate) first_row: usize,
    /// Numbers of a key that are used.
    pub(crate) numbers: usize,
}

impl<'k, F> Queries<'k, F> {
    /// Rows of `width` factors of which all are used.
    pub(crate) fn whole(rows: &'k [F], width: usize, numbers: usize) -> Self {
        Queries { rows, width, first: 0, first_row: 0, numbers }
    }

    /// All factors of a row.
    #[inline(always)]
    pub(crate) fn row(&self, line: usize) -> &'k [F] {
        cut::part(self.rows, line * self.width, self.width)
    }
}

/// Writes the products of some query rows with the keys of some tiles into `out`, at the positions'
/// places in the softmax tile.
///
/// Sixteen keys at a time are a *run*. As many runs as the level's register tile is wide are read
/// together, so that blocks of sixteen positions are read four at a time. Lanes of a run that lie
/// past its piece hold products with whatever the page has there; they are written over by the
/// next piece, or masked by the softmax.
pub(crate) struct Scores<'s, 'k, 'a, K: Step> {
    pub(crate) q: Queries<'k, K::Factor>,
    pub(crate) tiles: &'s Tiles<'k, 'a>,
    pub(crate) panels: Panels,
    /// The positions that any row sees; runs that have none of them are left out.
    pub(crate) extent: Extent,
    pub(crate) out: &'s mut [ScoreRow],
}

/// At most sixteen neighbouring keys of one panel, and where their scores go.
struct Run<'a, C> {
    cells: &'a [C],
    stride: usize,
    at: usize,
    ahead: isize,
}

impl<C> Clone for Run<'_, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Run<'_, C> {}

/// Runs in the widest register tile.
const WIDEST: usize = 4;

impl<T: KeyStep> Scores<'_, '_, '_, T> {
    /// Does it, for `MR` rows.
    #[inline(always)]
    pub(crate) fn compute<S: Simd, const MR: usize>(mut self, s: S) {
        let none = Run { cells: &[], stride: 0, at: 0, ahead: 0 };
        let mut waiting = [none; WIDEST];
        let mut count = 0;
        for (index, piece) in self.tiles.pieces.iter().enumerate() {
            let ahead = if S::AHEAD > 0 { self.tiles.ahead(index) } else { 0 };
            let panel = self.panels.panel(piece.row / PANEL);
            let words = cut::from(piece.words, self.tiles.head);
            let start = panel.start + self.q.first_row * panel.width + piece.row % PANEL;
            let cells = cut::from(must_cast_slice::<u64, T::Cell>(words), start);
            let mut done = 0;
            while done < piece.len {
                let at = piece.at + done;
                if at < self.extent.to && at + LANES > self.extent.from {
                    if count > 0 && waiting[0].stride != panel.width {
                        self.singly::<S, MR>(s, &waiting, count);
                        count = 0;
                    }
                    let cells = cut::from(cells, done);
                    *cut::one_mut(&mut waiting, count) =
                        Run { cells, stride: panel.width, at, ahead };
                    count += 1;
                    if count == columns::<S, T, MR>() {
                        self.together::<S, MR>(s, &waiting);
                        count = 0;
                    }
                }
                done += LANES;
            }
        }
        self.singly::<S, MR>(s, &waiting, count);
    }

    #[inline(always)]
    fn singly<S: Simd, const MR: usize>(
        &mut self,
        s: S,
        runs: &[Run<'_, T::Cell>; WIDEST],
        count: usize,
    ) {
        if columns::<S, T, MR>() == 1 {
            return;
        }
        for run in runs.iter().take(count) {
            self.multiply::<S, MR, 1>(s, [*run]);
        }
    }

    /// As many runs as the level takes at once; they have one stride.
    #[inline(always)]
    fn together<S: Simd, const MR: usize>(&mut self, s: S, runs: &[Run<'_, T::Cell>; WIDEST]) {
        let [a, b, c, d] = *runs;
        match columns::<S, T, MR>() {
            4 => self.multiply::<S, MR, 4>(s, [a, b, c, d]),
            2 => self.multiply::<S, MR, 2>(s, [a, b]),
            _ => self.multiply::<S, MR, 1>(s, [a]),
        }
    }

    /// One register tile of scores.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "by index, so that sums stay in registers")]
    fn multiply<S: Simd, const MR: usize, const NV: usize>(
        &mut self,
        s: S,
        runs: [Run<'_, T::Cell>; NV],
    ) {
        let mut cells: [&[T::Cell]; NV] = [&[]; NV];
        for (cells, run) in cells.iter_mut().zip(&runs) {
            *cells = run.cells;
        }
        let stride = runs[0].stride;
        let mut ahead = [0; NV];
        for (ahead, run) in ahead.iter_mut().zip(&runs) {
            *ahead = run.ahead;
        }
        let columns = Columns { cells, stride, skip: 0, numbers: self.q.numbers, ahead };
        let factors = cut::from(self.q.rows, self.q.first);
        let rows = Rows { factors, stride: self.q.width };
        let mut tile = [[T::zero(s); NV]; MR];
        product::<S, T, MR, NV>(s, &mut tile, rows, columns);
        for line in 0..MR {
            for index in 0..NV {
                let score = T::score(s, tile[line][index], &self.q, line);
                let out = cut::one_mut(self.out, line).get_mut(runs[index].at..);
                match out.and_then(<[f32]>::first_chunk_mut) {
                    Some(place) => s.store(score, place),
                    None => cut::out_of_bounds(),
                }
            }
        }
    }
}
