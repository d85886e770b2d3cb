//! Probabilities times value panels.

use core::marker::PhantomData;

use bytemuck::must_cast_slice;

use super::{Piece, ScoreRow, TILE, Tiles, WIDTH};
use crate::cut;
use crate::element::tile::{PANEL, Panels};
use crate::simd::product::{Columns, Rows, Step, columns, product};
use crate::simd::{Kernel, LANES, Simd};

/// Positions of a softmax tile, `from .. to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl Extent {
    pub(crate) const EMPTY: Extent = Extent { from: 0, to: 0 };
    /// All positions of a tile.
    pub(crate) const WHOLE: Extent = Extent { from: 0, to: TILE };

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

    /// The least extent that holds both.
    pub(crate) fn and(self, other: Extent) -> Extent {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Extent { from: self.from.min(other.from), to: self.to.max(other.to) },
        }
    }

    /// The positions of a piece that are in here.
    #[inline(always)]
    fn within(self, piece: &Piece<'_>) -> Extent {
        Extent { from: self.from.max(piece.at), to: self.to.min(piece.at + piece.len) }
    }

    /// A bit for each position of the tile.
    #[inline(always)]
    pub(crate) fn mask(self) -> u64 {
        if self.is_empty() { 0 } else { u64::MAX >> (TILE - (self.to - self.from)) << self.from }
    }

    /// The first run of bits in a mask of the tile's positions.
    #[inline(always)]
    pub(crate) fn first_run(mask: u64) -> Extent {
        if mask == 0 {
            return Extent::EMPTY;
        }
        let from = mask.trailing_zeros() as usize;
        Extent { from, to: from + (mask >> from).trailing_ones() as usize }
    }

    /// The positions that are in all of these, cut to whole cells of so many.
    #[inline(always)]
    pub(crate) fn in_common(extents: &[Extent], together: usize) -> Extent {
        let from = extents.iter().map(|extent| extent.from).max().unwrap_or(0);
        let to = extents.iter().map(|extent| extent.to).min().unwrap_or(0);
        let from = from.next_multiple_of(together);
        Extent { from, to: (to - to % together).max(from) }
    }
}

/// How values are weighted.
pub(crate) trait ValueStep: Step {
    /// Whether factors are the weights themselves, if there are no scales.
    const PLAIN: bool;

    /// A sum so far.
    fn resume<S: Simd>(s: S, sum: S::F32) -> Self::Sum<S>;

    /// The sum.
    fn sum<S: Simd>(s: S, sum: Self::Sum<S>) -> S::F32;

    /// Turns a row's weights into factors, each weight first multiplied by its position's scale.
    /// What is not in the extent becomes nothing that counts.
    fn factors<S: Simd>(
        s: S,
        weights: &ScoreRow,
        scales: Option<&ScoreRow>,
        extent: Extent,
        factors: &mut ScoreRow,
    );
}

/// `out = shrink x out + weights . V` for some rows.
pub(crate) struct Values<'s, 'k, 'a> {
    pub(crate) weights: &'s [ScoreRow],
    /// Room for factors.
    pub(crate) factors: &'s mut [ScoreRow],
    pub(crate) scales: Scales<'k>,
    /// What the rows' outputs so far are multiplied by first, each twice.
    pub(crate) shrink: &'s [f32],
    /// The positions to add, and no other: a value that a row does not see is not multiplied at
    /// all, since 0 x inf and 0 x NaN are not 0.
    pub(crate) extent: Extent,
    pub(crate) tiles: &'s Tiles<'k, 'a>,
    pub(crate) panels: Panels,
    pub(crate) v_width: usize,
    /// Output rows, `stride` apart, a multiple of sixteen. Columns past the width of the values
    /// are scratch: they are written and read by nobody else.
    pub(crate) outs: &'s mut [f32],
    pub(crate) stride: usize,
}

impl Values<'_, '_, '_> {
    /// Does it, for `MR` rows.
    #[inline(always)]
    pub(crate) fn compute<S: Simd, T: ValueStep, const MR: usize>(mut self, s: S) {
        let scales = self.scales;
        // One loop for all: what is in it is large, and compiled for every level and row count.
        let groups = scales.rows.len().max(1);
        let plain = T::PLAIN && scales.rows.is_empty();
        for index in 0..groups {
            let from = index * scales.group;
            let to = if index + 1 == groups { self.v_width } else { from + scales.group };
            if !plain {
                self.prepare::<S, T, MR>(s, scales.rows.get(index));
            }
            self.columns::<S, T, MR>(s, from, to, plain);
        }
    }

    #[inline(always)]
    fn prepare<S: Simd, T: ValueStep, const MR: usize>(&mut self, s: S, scales: Option<&ScoreRow>) {
        for line in 0..MR {
            let weights = cut::one(self.weights, line);
            let factors = cut::one_mut(self.factors, line);
            T::factors(s, weights, scales, self.extent, factors);
        }
    }

    #[inline(always)]
    fn columns<S: Simd, T: ValueStep, const MR: usize>(
        &mut self,
        s: S,
        from: usize,
        to: usize,
        plain: bool,
    ) {
        let wide = columns::<S, T, MR>() * LANES;
        let mut column = from;
        while column < to {
            let left = (to - column).min(PANEL - column % PANEL);
            if left < wide {
                self.block::<S, T, MR, 1>(s, column, plain);
                column += left.min(LANES);
                continue;
            }
            match columns::<S, T, MR>() {
                4 => self.block::<S, T, MR, 4>(s, column, plain),
                2 => self.block::<S, T, MR, 2>(s, column, plain),
                _ => self.block::<S, T, MR, 1>(s, column, plain),
            }
            column += wide;
        }
    }

    /// One register tile of outputs, kept in registers over all pieces.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "by index, so that sums stay in registers")]
    fn block<S: Simd, T: ValueStep, const MR: usize, const NV: usize>(
        &mut self,
        s: S,
        column: usize,
        plain: bool,
    ) {
        // Loops over whole arrays by index: so the compiler unrolls them and keeps the sums in
        // registers. Over iterators of unknown length it kept a copy of them in memory.
        let mut acc = [[T::zero(s); NV]; MR];
        for line in 0..MR {
            let row = cut::part(self.outs, line * self.stride + column, NV * LANES);
            let factor = s.splat(*cut::one(self.shrink, 2 * line));
            for index in 0..NV {
                let part = s.load(&row.as_chunks().0[index]);
                acc[line][index] = T::resume(s, s.mul(factor, part));
            }
        }
        let panel = self.panels.panel(column / PANEL);
        let weights = if plain { self.weights } else { &*self.factors };
        let factors = must_cast_slice::<f32, T::Factor>(weights.as_flattened());
        for (index, piece) in self.tiles.pieces.iter().enumerate() {
            let extent = self.extent.within(piece);
            if extent.is_empty() {
                continue;
            }
            let row = piece.row + extent.from - piece.at;
            let (line, skip) = (row / T::NUMBERS, row % T::NUMBERS);
            let words = cut::from(piece.words, self.tiles.head);
            let start = panel.start + line * panel.width + column % PANEL;
            let run = cut::from(must_cast_slice::<u64, T::Cell>(words), start);
            let mut cells: [&[T::Cell]; NV] = [&[]; NV];
            for (index, cells) in cells.iter_mut().enumerate() {
                *cells = cut::from(run, index * LANES);
            }
            let first = extent.from / (T::NUMBERS / T::FACTORS);
            let rows = Rows { factors: cut::from(factors, first), stride: WIDTH };
            let numbers = extent.to - extent.from;
            let ahead = if S::AHEAD > 0 { self.tiles.ahead(index) } else { 0 };
            let ahead = [ahead; NV];
            let columns = Columns { cells, stride: panel.width, skip, numbers, ahead };
            product::<S, T, MR, NV>(s, &mut acc, rows, columns);
        }
        for line in 0..MR {
            let row = cut::part_mut(self.outs, line * self.stride + column, NV * LANES);
            for index in 0..NV {
                s.store(T::sum(s, acc[line][index]), &mut row.as_chunks_mut().0[index]);
            }
        }
    }
}

/// Scales of a tile: a row for each group of numbers, one for each position in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales<'k> {
    /// Empty where there are none.
    pub(crate) rows: &'k [ScoreRow],
    /// Numbers in a group.
    pub(crate) group: usize,
}

/// [`Values`] of rows that do not see the same positions, each over what it sees: the edge of
/// causality or of a window. A kernel of its own, since few tiles have an edge.
pub(crate) struct Apart<'s, 'k, 'a, T> {
    pub(crate) values: Values<'s, 'k, 'a>,
    /// What is added to each row; instead of the extent of `values`.
    pub(crate) extents: &'s [Extent],
    pub(crate) how: PhantomData<T>,
}

impl<T: ValueStep> Kernel for Apart<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        // Rows of a group see the same: four of them stay together.
        let mut line = 0;
        while line < self.extents.len() {
            let extent = *cut::one(self.extents, line);
            let same = |others: &[Extent]| others.iter().all(|other| *other == extent);
            let four = self.extents.get(line..line + 4).is_some_and(same);
            if S::ROWS >= 4 && four {
                self.some::<S, 4>(s, line, extent);
                line += 4;
            } else {
                self.some::<S, 1>(s, line, extent);
                line += 1;
            }
        }
    }
}

impl<T: ValueStep> Apart<'_, '_, '_, T> {
    #[inline(always)]
    fn some<S: Simd, const MR: usize>(&mut self, s: S, line: usize, extent: Extent) {
        if extent.is_empty() {
            return;
        }
        let values = &mut self.values;
        let stride = values.stride;
        let some = Values {
            weights: cut::part(values.weights, line, MR),
            factors: &mut *values.factors,
            shrink: cut::part(values.shrink, 2 * line, 2 * MR),
            extent,
            outs: cut::part_mut(values.outs, line * stride, MR * stride),
            ..*values
        };
        some.compute::<S, T, MR>(s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_and_an_extent_are_the_extent() {
        let (some, more) = (Extent { from: 16, to: 20 }, Extent { from: 40, to: 41 });
        for nothing in [Extent::EMPTY, Extent { from: 50, to: 7 }] {
            assert_eq!((nothing.and(some), some.and(nothing)), (some, some));
            assert!(nothing.and(nothing).is_empty());
        }
        assert_eq!((some.and(more), more.and(some)), (Extent { from: 16, to: 41 }, some.and(more)));
    }
}
