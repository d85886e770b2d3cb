//! Query rows times key panels.

use super::{ScoreRow, Span};
use crate::cut;
use crate::element::Element;
use crate::element::tile::PANEL;
use crate::simd::product::{Columns, product};
use crate::simd::{LANES, Simd};

/// At most sixteen neighbouring keys of one panel, and where their scores go.
struct Run<'a, E: Element> {
    cells: &'a [E::Stored],
    stride: usize,
    width: usize,
    at: usize,
}

impl<E: Element> Clone for Run<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Element> Copy for Run<'_, E> {}

/// Runs in the widest register tile.
const WIDEST: usize = 4;

/// Writes the products of `MR` query rows with the keys of `spans` into `out`, at the positions'
/// places in the softmax tile.
///
/// Full runs wait until there are as many as the level's register tile is wide, so that blocks of
/// sixteen positions are read four at a time; what is left over, and runs cut short by the end of
/// their panel, go one by one. Lanes of a run that lie past its span hold products with whatever
/// the page has there; the softmax masks them before they are used.
#[inline(always)]
pub(crate) fn scores<'a, S: Simd, E: Element, const MR: usize>(
    s: S,
    q: [&[f32]; MR],
    spans: impl Iterator<Item = Span<'a, E>>,
    out: &mut [ScoreRow],
) {
    let mut runs = Runs { spans, span: None };
    let none = Run::<E> { cells: &[], stride: 0, width: 0, at: 0 };
    // One place more than can wait, for a run that cannot.
    let mut waiting = [none; WIDEST + 1];
    let mut count = 0;
    loop {
        let next = runs.next();
        let joins = next.is_some_and(|run| {
            run.width == LANES && (count == 0 || run.stride == waiting[0].stride)
        });
        if let (true, Some(run)) = (joins, next) {
            *cut::one_mut(&mut waiting, count) = run;
            count += 1;
            if count == S::COLUMNS[MR] {
                together::<S, E, MR>(s, q, &waiting, out);
                count = 0;
            }
            continue;
        }
        if let Some(run) = next {
            *cut::one_mut(&mut waiting, count) = run;
            count += 1;
        }
        for run in waiting.iter().take(count) {
            let columns = Columns { cells: [run.cells], stride: run.stride, width: run.width };
            multiply::<S, E, MR, 1>(s, q, columns, [run.at], out);
        }
        count = 0;
        if next.is_none() {
            return;
        }
    }
}

/// Cuts spans into runs.
struct Runs<'a, E: Element, I> {
    spans: I,
    span: Option<Span<'a, E>>,
}

impl<'a, E: Element, I: Iterator<Item = Span<'a, E>>> Runs<'a, E, I> {
    #[inline(always)]
    fn next(&mut self) -> Option<Run<'a, E>> {
        let mut span = match self.span.take() {
            Some(span) => span,
            None => self.spans.next()?,
        };
        let panel = span.layout.k_panel(span.row);
        let column = span.row % PANEL;
        let width = (panel.width - column).min(LANES);
        let cells = cut::from(span.cells, panel.start + column);
        let run = Run { cells, stride: panel.width, width, at: span.at };
        if span.len > width {
            span.row += width;
            span.at += width;
            span.len -= width;
            self.span = Some(span);
        }
        Some(run)
    }
}

/// Multiplies as many runs as the level takes at once; they have one stride.
#[inline(always)]
fn together<S: Simd, E: Element, const MR: usize>(
    s: S,
    q: [&[f32]; MR],
    runs: &[Run<'_, E>; WIDEST + 1],
    out: &mut [ScoreRow],
) {
    let [a, b, c, d, _] = runs;
    let (stride, width) = (a.stride, LANES);
    match S::COLUMNS[MR] {
        4 => {
            let columns = Columns { cells: [a.cells, b.cells, c.cells, d.cells], stride, width };
            multiply::<S, E, MR, 4>(s, q, columns, [a.at, b.at, c.at, d.at], out);
        }
        2 => {
            let columns = Columns { cells: [a.cells, b.cells], stride, width };
            multiply::<S, E, MR, 2>(s, q, columns, [a.at, b.at], out);
        }
        _ => {
            let columns = Columns { cells: [a.cells], stride, width };
            multiply::<S, E, MR, 1>(s, q, columns, [a.at], out);
        }
    }
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
