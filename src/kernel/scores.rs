//! Query rows times key panels.

use super::{ScoreRow, Span};
use crate::element::Element;
use crate::element::tile::PANEL;
use crate::simd::product::{Columns, product};
use crate::simd::{LANES, Simd};

/// Runs of sixteen keys that wait to be multiplied together, so that a register tile is as wide as
/// the level can hold even where a panel is narrower.
struct Waiting<'a, T> {
    cells: [&'a [T]; 4],
    at: [usize; 4],
    stride: usize,
    count: usize,
}

/// Writes the products of `MR` query rows with the keys of `spans` into `out`, at the positions'
/// places in the softmax tile.
///
/// Lanes of a run that lie past its span hold products with whatever the page has there; the
/// softmax masks them before they are used.
#[inline(always)]
pub(crate) fn scores<'a, S: Simd, E: Element, const MR: usize>(
    s: S,
    q: [&[f32]; MR],
    spans: impl Iterator<Item = Span<'a, E>>,
    out: &mut [ScoreRow],
) {
    let mut waiting = Waiting { cells: [&[]; 4], at: [0; 4], stride: 0, count: 0 };
    for span in spans {
        let panel = span.layout.k_panel(span.row);
        let first = span.row % PANEL;
        let mut done = 0;
        while done < span.len {
            let column = first + done;
            let width = (panel.width - column).min(LANES);
            let cells = &span.cells[panel.start + column..];
            let at = span.at + done;
            if width < LANES {
                let columns = Columns { cells: [cells], stride: panel.width, width };
                multiply::<S, E, MR, 1>(s, q, columns, [at], out);
            } else {
                if waiting.stride != panel.width {
                    one_by_one::<S, E, MR>(s, q, &mut waiting, out);
                    waiting.stride = panel.width;
                }
                waiting.cells[waiting.count] = cells;
                waiting.at[waiting.count] = at;
                waiting.count += 1;
                if waiting.count == S::COLUMNS[MR] {
                    together::<S, E, MR>(s, q, &mut waiting, out);
                }
            }
            done += width;
        }
    }
    one_by_one::<S, E, MR>(s, q, &mut waiting, out);
}

/// Multiplies as many waiting runs as the level takes at once.
#[inline(always)]
fn together<S: Simd, E: Element, const MR: usize>(
    s: S,
    q: [&[f32]; MR],
    waiting: &mut Waiting<'_, E::Stored>,
    out: &mut [ScoreRow],
) {
    let (cells, at, stride) = (waiting.cells, waiting.at, waiting.stride);
    match S::COLUMNS[MR] {
        4 => multiply::<S, E, MR, 4>(s, q, Columns { cells, stride, width: LANES }, at, out),
        2 => {
            let cells = [cells[0], cells[1]];
            let columns = Columns { cells, stride, width: LANES };
            multiply::<S, E, MR, 2>(s, q, columns, [at[0], at[1]], out);
        }
        _ => {
            let columns = Columns { cells: [cells[0]], stride, width: LANES };
            multiply::<S, E, MR, 1>(s, q, columns, [at[0]], out);
        }
    }
    waiting.count = 0;
}

/// Multiplies what is left waiting.
#[inline(always)]
fn one_by_one<S: Simd, E: Element, const MR: usize>(
    s: S,
    q: [&[f32]; MR],
    waiting: &mut Waiting<'_, E::Stored>,
    out: &mut [ScoreRow],
) {
    for (cells, at) in waiting.cells.iter().zip(waiting.at).take(waiting.count) {
        let columns = Columns { cells: [*cells], stride: waiting.stride, width: LANES };
        multiply::<S, E, MR, 1>(s, q, columns, [at], out);
    }
    waiting.count = 0;
}

/// One register tile of scores.
#[inline(always)]
fn multiply<S: Simd, E: Element, const MR: usize, const NV: usize>(
    s: S,
    q: [&[f32]; MR],
    keys: Columns<'_, E::Stored, NV>,
    at: [usize; NV],
    out: &mut [ScoreRow],
) {
    let zero = [[s.splat(0.0); NV]; MR];
    let tile = product(s, zero, q, keys, |s, cells| E::load(s, cells));
    for (vectors, row) in tile.iter().zip(out) {
        for (vector, at) in vectors.iter().zip(at) {
            if let Some(place) = row.get_mut(at..).and_then(<[f32]>::first_chunk_mut) {
                s.store(*vector, place);
            }
        }
    }
}
