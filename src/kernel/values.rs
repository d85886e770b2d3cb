//! Probabilities times value panels.

use core::marker::PhantomData;

use bytemuck::must_cast_slice;

use super::{Piece, TILE, Tiles, rows_at_once};
use crate::cut;
use crate::element::tile::{PANEL, Panels};
use crate::simd::product::{Columns, Step, product};
use crate::simd::{Kernel, LANES, Simd};

/// Positions of a softmax tile, `from .. to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Extent {
    pub(crate) const EMPTY: Extent = Extent { from: 0, to: 0 };

    pub(crate) fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// What is in the softmax tile at `start`, counted in it.
    #[inline(always)]
    pub(crate) fn in_tile(self, start: usize) -> Extent {
        let at = |position: usize| position.saturating_sub(start).min(TILE);
        let extent = Extent { from: at(self.from), to: at(self.to) };
        if extent.is_empty() { Extent::EMPTY } else { extent }
    }

    /// The positions of a piece that are in here.
    #[inline(always)]
    fn within(self, piece: &Piece<'_>) -> Extent {
        Extent { from: self.from.max(piece.at), to: self.to.min(piece.at + piece.len) }
    }
}

/// How a sum goes on where another kernel has left it.
pub(crate) trait ValueStep: Step {
    /// A sum so far.
    fn resume<S: Simd>(s: S, sum: S::F32) -> Self::Sum<S>;

    /// The sum.
    fn sum<S: Simd>(s: S, sum: Self::Sum<S>) -> S::F32;
}

/// The weights of some rows over one softmax tile.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'w, F> {
    /// Rows of factors, `stride` apart: one a position, or one a cell.
    pub(crate) rows: &'w [F],
    pub(crate) stride: usize,
    /// What the rows' outputs so far are multiplied by first.
    pub(crate) shrink: &'w [f32],
    /// The positions to add, and no other: a value that a row does not see is not multiplied at
    /// all, since 0 x inf and 0 x NaN are not 0.
    pub(crate) extent: Extent,
}

/// Output rows, `stride` apart, a multiple of sixteen. Columns past the width of the values are
/// scratch: they are written and read by nobody else.
pub(crate) struct Outputs<'o> {
    pub(crate) rows: &'o mut [f32],
    pub(crate) stride: usize,
    /// The columns to work on.
    pub(crate) columns: Extent,
}

/// `out = shrink x out + weights . V` for some rows.
pub(crate) struct Values<'k, 'a, T: Step> {
    pub(crate) weights: Weights<'k, T::Factor>,
    pub(crate) tiles: Tiles<'k, 'a>,
    pub(crate) panels: Panels,
    pub(crate) out: Outputs<'k>,
    pub(crate) step: PhantomData<T>,
}

impl<T: ValueStep> Values<'_, '_, T> {
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

/// [`Values`] of `MR` rows.
struct Rows<'k, 'a, T: Step, const MR: usize>(Values<'k, 'a, T>);

impl<T: ValueStep, const MR: usize> Kernel for Rows<'_, '_, T, MR> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        let wide = S::COLUMNS[MR] * LANES;
        let mut column = self.0.out.columns.from;
        while column < self.0.out.columns.to {
            let left = (self.0.out.columns.to - column).min(PANEL - column % PANEL);
            if left < wide {
                self.block::<S, 1>(s, column);
                column += left.min(LANES);
                continue;
            }
            match S::COLUMNS[MR] {
                4 => self.block::<S, 4>(s, column),
                2 => self.block::<S, 2>(s, column),
                _ => self.block::<S, 1>(s, column),
            }
            column += wide;
        }
    }
}

impl<T: ValueStep, const MR: usize> Rows<'_, '_, T, MR> {
    /// One register tile of outputs, kept in registers over all pieces.
    #[inline(always)]
    fn block<S: Simd, const NV: usize>(&mut self, s: S, column: usize) {
        // Loops over whole arrays by index: so the compiler unrolls them and keeps the sums in
        // registers. Over iterators of unknown length it kept a copy of them in memory.
        let mut acc = [[T::zero(s); NV]; MR];
        for line in 0..MR {
            let row = cut::from(self.0.out.rows, line * self.0.out.stride + column);
            let factor = s.splat(*cut::one(self.0.weights.shrink, line));
            for index in 0..NV {
                let part = lanes_at(row, index * LANES);
                acc[line][index] = T::resume(s, s.mul(factor, s.load(part)));
            }
        }
        let panel = self.0.panels.panel(column / PANEL);
        for (piece, ahead) in self.0.tiles.pieces.list().iter().zip(self.0.tiles.ahead) {
            let ahead = *ahead;
            let extent = self.0.weights.extent.within(piece);
            if extent.is_empty() {
                continue;
            }
            let row = piece.row + extent.from - piece.at;
            let (line, skip) = (row / T::NUMBERS, row % T::NUMBERS);
            let words = cut::from(piece.words, self.0.tiles.head);
            let start = panel.start + line * panel.width + column % PANEL;
            let run = cut::from(must_cast_slice::<u64, T::Cell>(words), start);
            let mut cells: [&[T::Cell]; NV] = [&[]; NV];
            for (index, cells) in cells.iter_mut().enumerate() {
                *cells = cut::from(run, index * LANES);
            }
            let first = extent.from / (T::NUMBERS / T::FACTORS);
            let mut factors: [&[T::Factor]; MR] = [&[]; MR];
            for (index, row) in factors.iter_mut().enumerate() {
                let row_of = cut::from(self.0.weights.rows, index * self.0.weights.stride + first);
                *row = cut::part(row_of, 0, self.0.weights.stride - first);
            }
            let numbers = extent.to - extent.from;
            let columns = Columns { cells, stride: panel.width, skip, numbers, ahead };
            product::<S, T, MR, NV>(s, &mut acc, factors, columns);
        }
        for line in 0..MR {
            for index in 0..NV {
                let at = line * self.0.out.stride + column + index * LANES;
                s.store(T::sum(s, acc[line][index]), lanes_at_mut(self.0.out.rows, at));
            }
        }
    }
}

/// Sixteen numbers.
#[inline(always)]
fn lanes_at(row: &[f32], at: usize) -> &[f32; LANES] {
    match cut::from(row, at).first_chunk() {
        Some(lanes) => lanes,
        None => cut::out_of_bounds(),
    }
}

/// Sixteen numbers, to be written.
#[inline(always)]
fn lanes_at_mut(row: &mut [f32], at: usize) -> &mut [f32; LANES] {
    match row.get_mut(at..).and_then(<[f32]>::first_chunk_mut) {
        Some(lanes) => lanes,
        None => cut::out_of_bounds(),
    }
}
