//! Probabilities times value panels.

use super::{ScoreRow, Span};
use crate::cut;
use crate::element::Element;
use crate::element::tile::PANEL;
use crate::simd::product::{Columns, product};
use crate::simd::{LANES, Simd};

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
}

/// The weights of `MR` rows over one softmax tile.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'w, const MR: usize> {
    pub(crate) rows: &'w [ScoreRow; MR],
    /// What the rows' outputs so far are multiplied by first.
    pub(crate) shrink: &'w [f32; MR],
    /// The positions to add, and no other: a value that a row does not see is not multiplied at
    /// all, since 0 x inf and 0 x NaN are not 0.
    pub(crate) extent: Extent,
}

/// Output rows of `width` numbers, `stride` apart, a multiple of sixteen. Columns past the width
/// are scratch: they are written and read by nobody else.
pub(crate) struct Outputs<'o> {
    pub(crate) rows: &'o mut [f32],
    pub(crate) stride: usize,
    pub(crate) width: usize,
}

/// `out = shrink x out + weights . V` for `MR` rows.
#[inline(always)]
pub(crate) fn values<'a, S: Simd, E: Element, const MR: usize>(
    s: S,
    weights: Weights<'_, MR>,
    spans: impl Iterator<Item = Span<'a, E>> + Clone,
    out: &mut Outputs<'_>,
) {
    let wide = S::COLUMNS[MR] * LANES;
    let mut first = 0;
    while first < out.width {
        let (panel, column) = (first / PANEL, first % PANEL);
        let left = (out.width - first).min(PANEL - column);
        let columns = |width| Place { panel, column, width };
        if left < wide {
            // What is left over, and the end of a width that is no multiple of sixteen.
            let width = left.min(LANES);
            block::<S, E, MR, 1>(s, weights, spans.clone(), out, columns(width));
            first += width;
            continue;
        }
        match S::COLUMNS[MR] {
            4 => block::<S, E, MR, 4>(s, weights, spans.clone(), out, columns(LANES)),
            2 => block::<S, E, MR, 2>(s, weights, spans.clone(), out, columns(LANES)),
            _ => block::<S, E, MR, 1>(s, weights, spans.clone(), out, columns(LANES)),
        }
        first += wide;
    }
}

/// Which columns of a V panel a register tile takes: vectors of `width` from `column` on.
#[derive(Clone, Copy)]
struct Place {
    panel: usize,
    column: usize,
    width: usize,
}

/// One register tile of outputs, kept in registers over all spans.
#[inline(always)]
fn block<'a, S: Simd, E: Element, const MR: usize, const NV: usize>(
    s: S,
    weights: Weights<'_, MR>,
    spans: impl Iterator<Item = Span<'a, E>>,
    out: &mut Outputs<'_>,
    place: Place,
) {
    let first = place.panel * PANEL + place.column;
    let mut acc = [[s.splat(0.0); NV]; MR];
    let rows = out.rows.chunks_exact(out.stride);
    for ((sums, row), shrink) in acc.iter_mut().zip(rows).zip(weights.shrink) {
        let factor = s.splat(*shrink);
        for (sum, part) in sums.iter_mut().zip(cut::from(row, first).as_chunks().0) {
            *sum = s.mul(factor, s.load(part));
        }
    }
    for span in spans {
        let from = span.at.max(weights.extent.from);
        let to = (span.at + span.len).min(weights.extent.to);
        if from >= to {
            continue;
        }
        let panel = span.layout.v_panel(place.panel);
        let row = span.row + from - span.at;
        let start = panel.start + row * panel.width + place.column;
        let mut cells: [&[E::Stored]; NV] = [&[]; NV];
        for (index, run) in cells.iter_mut().enumerate() {
            *run = cut::from(span.cells, start + index * LANES);
        }
        let mut lines: [&[f32]; MR] = [&[]; MR];
        for (line, row) in lines.iter_mut().zip(weights.rows) {
            *line = cut::part(row, from, to - from);
        }
        let columns = Columns { cells, stride: panel.width, width: place.width };
        acc = product(s, acc, lines, columns, |s, cells| E::load(s, cells));
    }
    for (sums, row) in acc.iter().zip(out.rows.chunks_exact_mut(out.stride)) {
        for (sum, part) in sums.iter().zip(cut::part_mut(row, first, NV * LANES).as_chunks_mut().0)
        {
            s.store(*sum, part);
        }
    }
}
