//! Query rows times key panels.

use core::marker::PhantomData;

use bytemuck::must_cast_slice;

use super::values::Extent;
use super::{ScoreRow, Tiles, rows_at_once};
use crate::cut;
use crate::element::tile::{PANEL, Panels};
use crate::simd::product::{Columns, Step, product};
use crate::simd::{Kernel, LANES, Simd};

/// How a sum becomes a score.
pub(crate) trait KeyStep: Step {
    /// The score of sixteen keys; `row` is the query row that was multiplied.
    fn score<S: Simd>(s: S, sum: Self::Sum<S>, row: &[Self::Factor]) -> S::F32;
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

/// Writes the products of some query rows with the keys of some tiles into `out`, at the positions'
/// places in the softmax tile.
///
/// Sixteen keys at a time are a *run*. As many runs as the level's register tile is wide are read
/// together, so that blocks of sixteen positions are read four at a time. Lanes of a run that lie
/// past its piece hold products with whatever the page has there; they are written over by the
/// next piece, or masked by the softmax.
pub(crate) struct Scores<'k, 'a, T: Step> {
    pub(crate) q: Queries<'k, T::Factor>,
    pub(crate) tiles: Tiles<'k, 'a>,
    pub(crate) panels: Panels,
    /// The positions that any row sees; runs that have none of them are left out.
    pub(crate) extent: Extent,
    pub(crate) out: &'k mut [ScoreRow],
    pub(crate) step: PhantomData<T>,
}

impl<T: KeyStep> Scores<'_, '_, T> {
    /// Does it, for so many rows, at most `S::ROWS` and `T::ROWS`.
    #[inline(always)]
    pub(crate) fn run<S: Simd>(self, s: S, rows: usize) {
        match rows {
            1 => s.run(Rows::<T, 1>(self)),
            2 if rows_at_once::<S, T>() >= 2 => s.run(Rows::<T, 2>(self)),
            3 if rows_at_once::<S, T>() >= 3 => s.run(Rows::<T, 3>(self)),
            4 if rows_at_once::<S, T>() >= 4 => s.run(Rows::<T, 4>(self)),
            5 if rows_at_once::<S, T>() >= 5 => s.run(Rows::<T, 5>(self)),
            6 if rows_at_once::<S, T>() >= 6 => s.run(Rows::<T, 6>(self)),
            7 if rows_at_once::<S, T>() >= 7 => s.run(Rows::<T, 7>(self)),
            8 if rows_at_once::<S, T>() >= 8 => s.run(Rows::<T, 8>(self)),
            _ => cut::out_of_bounds(),
        }
    }
}

/// [`Scores`] of `MR` rows.
struct Rows<'k, 'a, T: Step, const MR: usize>(Scores<'k, 'a, T>);

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

impl<T: KeyStep, const MR: usize> Kernel for Rows<'_, '_, T, MR> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        let none = Run { cells: &[], stride: 0, at: 0, ahead: 0 };
        let mut waiting = [none; WIDEST];
        let mut count = 0;
        for (piece, ahead) in self.0.tiles.pieces.list().iter().zip(self.0.tiles.ahead) {
            let ahead = *ahead;
            let panel = self.0.panels.panel(piece.row / PANEL);
            let words = cut::from(piece.words, self.0.tiles.head);
            let start = panel.start + self.0.q.first_row * panel.width + piece.row % PANEL;
            let cells = cut::from(must_cast_slice::<u64, T::Cell>(words), start);
            let mut done = 0;
            while done < piece.len {
                let at = piece.at + done;
                if at < self.0.extent.to && at + LANES > self.0.extent.from {
                    if count > 0 && waiting[0].stride != panel.width {
                        self.singly(s, &waiting, count);
                        count = 0;
                    }
                    let cells = cut::from(cells, done);
                    *cut::one_mut(&mut waiting, count) =
                        Run { cells, stride: panel.width, at, ahead };
                    count += 1;
                    if count == S::COLUMNS[MR] {
                        self.together(s, &waiting);
                        count = 0;
                    }
                }
                done += LANES;
            }
        }
        self.singly(s, &waiting, count);
    }
}

impl<T: KeyStep, const MR: usize> Rows<'_, '_, T, MR> {
    #[inline(always)]
    fn singly<S: Simd>(&mut self, s: S, runs: &[Run<'_, T::Cell>; WIDEST], count: usize) {
        if S::COLUMNS[MR] == 1 {
            return;
        }
        for run in runs.iter().take(count) {
            self.multiply::<S, 1>(s, [*run]);
        }
    }

    /// As many runs as the level takes at once; they have one stride.
    #[inline(always)]
    fn together<S: Simd>(&mut self, s: S, runs: &[Run<'_, T::Cell>; WIDEST]) {
        let [a, b, c, d] = *runs;
        match S::COLUMNS[MR] {
            4 => self.multiply::<S, 4>(s, [a, b, c, d]),
            2 => self.multiply::<S, 2>(s, [a, b]),
            _ => self.multiply::<S, 1>(s, [a]),
        }
    }

    /// One register tile of scores.
    #[inline(always)]
    fn multiply<S: Simd, const NV: usize>(&mut self, s: S, runs: [Run<'_, T::Cell>; NV]) {
        let mut cells: [&[T::Cell]; NV] = [&[]; NV];
        for (cells, run) in cells.iter_mut().zip(&runs) {
            *cells = run.cells;
        }
        let (stride, ahead) = (runs[0].stride, runs[0].ahead);
        let columns = Columns { cells, stride, skip: 0, numbers: self.0.q.numbers, ahead };
        let mut rows: [&[T::Factor]; MR] = [&[]; MR];
        for (line, row) in rows.iter_mut().enumerate() {
            *row = cut::part(self.0.q.rows, line * self.0.q.width, self.0.q.width);
        }
        let mut factors = rows;
        for row in &mut factors {
            *row = cut::from(row, self.0.q.first);
        }
        let mut tile = [[T::zero(s); NV]; MR];
        product::<S, T, MR, NV>(s, &mut tile, factors, columns);
        // By index, so that the sums stay in registers.
        for line in 0..MR {
            for index in 0..NV {
                let score = T::score(s, tile[line][index], rows[line]);
                let out = cut::one_mut(self.0.out, line).get_mut(runs[index].at..);
                match out.and_then(<[f32]>::first_chunk_mut) {
                    Some(place) => s.store(score, place),
                    None => cut::out_of_bounds(),
                }
            }
        }
    }
}
