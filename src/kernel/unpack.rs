//! Unpacks a tile once for many rows.
//!
//! With few rows it is cheapest to widen cells on their way into the registers. With many, each
//! cell would be widened again for every handful of rows; so the tile is written out as panels of
//! `f32`, or of bf16 pairs, in the caller's scratch, as if it stood in blocks of 64, and the
//! kernels go on there. The numbers are the same, and so is every sum.

use core::marker::PhantomData;
use core::ops::Range;

use bytemuck::must_cast_slice;

use super::{Piece, TILE, Tiles};
use crate::cut;
use crate::element::Format;
use crate::element::tile::{LINE, PANEL, Panels};
use crate::simd::{Kernel, LANES, Simd};

/// What a tile is unpacked to.
pub(crate) trait Target {
    /// Numbers along the chain that share a word.
    const NUMBERS: usize;

    /// Writes a word for sixteen columns: of a number, or of two, each by its cell and its place
    /// there.
    fn store<S: Simd, F: Format>(
        s: S,
        low: (F::Raw<S>, usize),
        high: (F::Raw<S>, usize),
        to: &mut [u32; LANES],
    );
}

/// `f32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToF32;

impl Target for ToF32 {
    const NUMBERS: usize = 1;

    #[inline(always)]
    fn store<S: Simd, F: Format>(
        s: S,
        (raw, index): (F::Raw<S>, usize),
        _: (F::Raw<S>, usize),
        to: &mut [u32; LANES],
    ) {
        s.store(F::number(s, raw, index), bytemuck::must_cast_mut(to));
    }
}

/// bf16 pairs, of numbers that bf16 holds exactly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToPairs;

impl Target for ToPairs {
    const NUMBERS: usize = 2;

    #[inline(always)]
    fn store<S: Simd, F: Format>(
        s: S,
        low: (F::Raw<S>, usize),
        high: (F::Raw<S>, usize),
        to: &mut [u32; LANES],
    ) {
        F::store_pairs(s, low, high, to);
    }
}

/// Rows of cells, and the rows of words that they are unpacked to.
///
/// Lengths are checked once for each row, and a row is written in whole vectors, so that a vector
/// costs little more than its instructions and its way to the second-level cache: with a check for each
/// of them, and one whether it may be written whole, it was nine cycles instead of four, and prefill
/// over narrow types lost 8 %.
struct Rows<'r, F: Format, T> {
    /// From the first number's cell in the first column on.
    cells: &'r [F::Cell],
    /// Cells from a row to the next one.
    stride: usize,
    /// Numbers of the first row of cells that are left out. None where words hold more than one.
    skip: usize,
    /// Numbers along the chain.
    numbers: usize,
    /// Bytes from the cells at hand to those that are needed next.
    ahead: isize,
    /// From the first number's word in the first column on.
    words: &'r mut [u32],
    words_stride: usize,
    to: PhantomData<T>,
}

impl<F: Format, T: Target> Rows<'_, F, T> {
    /// Numbers of the chain that are taken at once: whole cells and whole words. The larger count
    /// is a multiple of the smaller one.
    const STEP: usize = if F::NUMBERS > T::NUMBERS { F::NUMBERS } else { T::NUMBERS };

    /// Unpacks so many vectors of each row. The four of a full panel are written out.
    #[inline(always)]
    fn unpack<S: Simd>(self, s: S, vectors: usize) {
        match vectors {
            4 => self.walk(s, 4),
            _ => self.walk(s, vectors),
        }
    }

    #[inline(always)]
    fn walk<S: Simd>(mut self, s: S, vectors: usize) {
        let end = self.skip + self.numbers;
        let mut first = 0;
        if self.skip > 0 {
            self.step(s, vectors, first, (self.skip, Self::STEP.min(end)));
            first = Self::STEP;
        }
        while first + Self::STEP <= end {
            self.step(s, vectors, first, (0, Self::STEP));
            first += Self::STEP;
        }
        if first < end {
            self.step(s, vectors, first, (0, end - first));
        }
    }

    /// The numbers `from .. to` of the step that begins with number `first`.
    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S, vectors: usize, first: usize, (from, to): (usize, usize)) {
        for part in 0..Self::STEP / F::NUMBERS {
            if S::AHEAD > 0 && part * F::NUMBERS < to {
                self.fetch_ahead(s, vectors, first / F::NUMBERS + part);
            }
        }
        // Row by row: what a last vector has too much is written over by the next row.
        for part in 0..Self::STEP / T::NUMBERS {
            let number = part * T::NUMBERS;
            if number < from || number >= to {
                continue;
            }
            let row = (first + number - self.skip) / T::NUMBERS;
            let words = cut::part_mut(self.words, row * self.words_stride, vectors * LANES);
            let low = row_of(self.cells, self.stride, (first + number) / F::NUMBERS, vectors);
            // The other number of a pair is in the same cell or in the next row. Where there is
            // none, anything will do that is a number: its factor is zero.
            let other = if number + 1 < to { number + 1 } else { number };
            let high = row_of(self.cells, self.stride, (first + other) / F::NUMBERS, vectors);
            for (words, (low, high)) in words.as_chunks_mut().0.iter_mut().zip(low.iter().zip(high))
            {
                let low = (F::load(s, low), number % F::NUMBERS);
                let high = (F::load(s, high), other % F::NUMBERS);
                T::store::<S, F>(s, low, high, words);
            }
        }
    }

    /// Asks for what is needed next where this row is now, for every line of it: it is over before
    /// the processor has noticed that there are more.
    #[inline(always)]
    fn fetch_ahead<S: Simd>(&self, s: S, vectors: usize, row: usize) {
        let line = self.cells.as_ptr().wrapping_add(row * self.stride).cast::<u8>();
        let line = line.wrapping_offset(self.ahead);
        for at in (0..vectors * LANES * size_of::<F::Cell>()).step_by(LINE) {
            s.fetch_ahead(line.wrapping_add(at));
        }
    }
}

/// So many vectors of a row of cells.
#[inline(always)]
fn row_of<C>(cells: &[C], stride: usize, row: usize, vectors: usize) -> &[[C; LANES]] {
    cut::part(cells, row * stride, vectors * LANES).as_chunks().0
}

/// The cells of a piece's panel from a place on.
#[inline(always)]
fn cells<'a, C: bytemuck::Pod>(piece: &Piece<'a>, head: usize, start: usize) -> &'a [C] {
    cut::from(must_cast_slice(cut::from(piece.words, head)), start)
}

/// Keys of some tiles, to rows of 64 columns.
pub(crate) struct UnpackKeys<'u, 't, 'a, F, T> {
    pub(crate) tiles: &'u Tiles<'t, 'a>,
    pub(crate) panels: Panels,
    pub(crate) width: usize,
    pub(crate) to: &'u mut [u32],
    pub(crate) how: PhantomData<(F, T)>,
}

impl<F: Format, T: Target> Kernel for UnpackKeys<'_, '_, '_, F, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let UnpackKeys { tiles, panels, width, to, .. } = self;
        for (index, piece) in tiles.pieces.iter().enumerate() {
            let panel = panels.panel(piece.row / PANEL);
            let cells = cells(piece, tiles.head, panel.start + piece.row % PANEL);
            // What is written behind a piece is the next one's place, or not seen; but a row ends
            // where the next one begins.
            let vectors = piece.len.div_ceil(LANES).min((TILE - piece.at) / LANES);
            let rows = Rows::<F, T> {
                cells,
                stride: panel.width,
                skip: 0,
                numbers: width,
                ahead: tiles.ahead(index),
                words: cut::part_mut(to, piece.at, to.len() - piece.at),
                words_stride: PANEL,
                to: PhantomData,
            };
            rows.unpack(s, vectors);
            let done = vectors * LANES;
            if done < piece.len {
                let (at, columns) = (piece.at + done, piece.len - done);
                last_columns::<S, F, T>(
                    s,
                    cut::from(cells, done),
                    panel.width,
                    width,
                    to,
                    at..at + columns,
                );
            }
        }
    }
}

/// Writes columns of a row that are less than a vector, and may not be written beyond.
#[inline(always)]
fn last_columns<S: Simd, F: Format, T: Target>(
    s: S,
    cells: &[F::Cell],
    stride: usize,
    width: usize,
    to: &mut [u32],
    columns: Range<usize>,
) {
    let step = Rows::<F, T>::STEP;
    for first in (0..width).step_by(step) {
        let mut room = [[0; LANES]; 4];
        let numbers = step.min(width - first);
        let rows = Rows::<F, T> {
            cells: cut::from(cells, first / F::NUMBERS * stride),
            stride,
            skip: 0,
            numbers,
            ahead: 0,
            words: room.as_flattened_mut(),
            words_stride: LANES,
            to: PhantomData,
        };
        rows.walk(s, 1);
        for (row, words) in room.iter().enumerate().take(numbers.div_ceil(T::NUMBERS)) {
            let start = (first / T::NUMBERS + row) * PANEL + columns.start;
            let place = cut::part_mut(to, start, columns.len());
            place.copy_from_slice(cut::part(words, 0, columns.len()));
        }
    }
}

/// Values of some tiles, to column panels of 64 positions. Pairs need blocks of even sizes.
pub(crate) struct UnpackValues<'u, 't, 'a, F, T> {
    pub(crate) tiles: &'u Tiles<'t, 'a>,
    pub(crate) panels: Panels,
    pub(crate) width: usize,
    /// With room for a vector at the last column.
    pub(crate) to: &'u mut [u32],
    pub(crate) how: PhantomData<(F, T)>,
}

impl<F: Format, T: Target> Kernel for UnpackValues<'_, '_, '_, F, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let UnpackValues { tiles, panels, width, to, .. } = self;
        let unpacked = Panels::new(TILE / T::NUMBERS, width);
        for column in (0..width).step_by(PANEL) {
            let (panel, place) = (panels.panel(column / PANEL), unpacked.panel(column / PANEL));
            for (index, piece) in tiles.pieces.iter().enumerate() {
                let start = panel.start + piece.row / F::NUMBERS * panel.width;
                let place_start = place.start + piece.at / T::NUMBERS * place.width;
                let rows = Rows::<F, T> {
                    cells: cells(piece, tiles.head, start),
                    stride: panel.width,
                    skip: piece.row % F::NUMBERS,
                    numbers: piece.len,
                    ahead: tiles.ahead(index),
                    words: cut::part_mut(to, place_start, to.len() - place_start),
                    words_stride: place.width,
                    to: PhantomData,
                };
                // In the order of positions, so that what the last vector of a row has too much
                // does not stay.
                rows.unpack(s, place.width.div_ceil(LANES));
            }
        }
    }
}

/// Copies the scales of some groups to the positions of a tile.
pub(crate) struct GatherScales<'u, 't, 'a> {
    pub(crate) tiles: &'u Tiles<'t, 'a>,
    /// Where the first group's scales begin in a tile, and how far it is to the next group's.
    pub(crate) first: usize,
    pub(crate) block_size: usize,
    /// A row for each group.
    pub(crate) to: &'u mut [super::ScoreRow],
}

impl Kernel for GatherScales<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let GatherScales { tiles, first, block_size, to } = self;
        for (group, to) in to.iter_mut().enumerate() {
            let start = first + group * block_size;
            for (index, piece) in tiles.pieces.iter().enumerate() {
                let from: &[f32] = cells(piece, tiles.head, start + piece.row);
                let ahead = tiles.ahead(index);
                // A line more than the tile has: what is copied too much is written over, or not
                // seen.
                let whole = piece.len.next_multiple_of(LANES);
                let from = cut::part(from, 0, whole).as_chunks().0;
                let to = cut::part_mut(to, piece.at, whole).as_chunks_mut().0;
                for (from, to) in from.iter().zip(to) {
                    s.fetch_ahead(from.as_ptr().cast::<u8>().wrapping_offset(ahead));
                    s.store(s.load(from), to);
                }
            }
        }
    }
}
