//! Probabilities times value panels.

use super::{ScoreRow, Span};
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

/// `out = shrink x out + p . V` for `MR` rows, over the positions of `extent` alone.
///
/// `out` holds rows of `stride` numbers, a multiple of sixteen; columns past the value's width
/// are written with zeros' products and read by nobody.
#[inline(always)]
pub(crate) fn values<'a, S: Simd, E: Element, const MR: usize>(
    s: S,
    p: &[ScoreRow; MR],
    extent: Extent,
    shrink: [f32; MR],
    spans: impl Iterator<Item = Span<'a, E>> + Clone,
    out: &mut [f32],
    stride: usize,
    v_width: usize,
) {
    let panels = v_width.div_ceil(PANEL);
    for panel in 0..panels {
        let width = (v_width - panel * PANEL).min(PANEL);
        let mut column = 0;
        while column < width {
            let place = Place { panel, column, stride };
            let wide = S::COLUMNS[MR];
            let left = width - column;
            if wide == 4 && left >= 4 * LANES {
                block::<S, E, MR, 4>(s, p, extent, shrink, spans.clone(), out, place, LANES);
                column += 4 * LANES;
            } else if wide == 2 && left >= 2 * LANES {
                block::<S, E, MR, 2>(s, p, extent, shrink, spans.clone(), out, place, LANES);
                column += 2 * LANES;
            } else if left >= LANES {
                block::<S, E, MR, 1>(s, p, extent, shrink, spans.clone(), out, place, LANES);
                column += LANES;
            } else {
                block::<S, E, MR, 1>(s, p, extent, shrink, spans.clone(), out, place, left);
                column += left;
            }
        }
    }
}

/// Which columns of the output a register tile holds.
#[derive(Clone, Copy)]
struct Place {
    panel: usize,
    column: usize,
    stride: usize,
}

/// One register tile of outputs, kept in registers over all spans.
#[inline(always)]
fn block<'a, S: Simd, E: Element, const MR: usize, const NV: usize>(
    s: S,
    p: &[ScoreRow; MR],
    extent: Extent,
    shrink: [f32; MR],
    spans: impl Iterator<Item = Span<'a, E>>,
    out: &mut [f32],
    place: Place,
    width: usize,
) {
    let first = place.panel * PANEL + place.column;
    let mut acc = [[s.splat(0.0); NV]; MR];
    for (line, row) in out.chunks_exact(place.stride).enumerate().take(MR) {
        let factor = s.splat(shrink[line]);
        for (index, part) in row[first..].as_chunks().0.iter().enumerate().take(NV) {
            acc[line][index] = s.mul(factor, s.load(part));
        }
    }
    for span in spans {
        let from = span.at.max(extent.from);
        let to = (span.at + span.len).min(extent.to);
        if from >= to {
            continue;
        }
        let panel = span.layout.v_panel(place.panel);
        let row = span.row + from - span.at;
        let start = panel.start + row * panel.width + place.column;
        let mut cells = [&span.cells[start..]; NV];
        for (index, run) in cells.iter_mut().enumerate().skip(1) {
            *run = &span.cells[start + index * LANES..];
        }
        let mut weights: [&[f32]; MR] = [&[]; MR];
        for (line, part) in weights.iter_mut().enumerate() {
            *part = &p[line][from..to];
        }
        let columns = Columns { cells, stride: panel.width, width };
        acc = product(s, acc, weights, columns, |s, cells| E::load(s, cells));
    }
    for (line, row) in out.chunks_exact_mut(place.stride).enumerate().take(MR) {
        for (index, part) in row[first..].as_chunks_mut().0.iter_mut().enumerate().take(NV) {
            s.store(acc[line][index], part);
        }
    }
}
