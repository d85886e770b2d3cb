//! Unpacks a tile once for many rows.
//!
//! With few rows it is cheapest to widen cells on their way into the registers. With many, each
//! cell would be widened again for every handful of rows; so the tile is written out as panels of
//! `f32`, or of bf16 pairs, in the caller's scratch, as if it stood in blocks of 64, and the
//! kernels go on there. The numbers are the same, and so is every sum.

use core::marker::PhantomData;

use bytemuck::must_cast_slice;

use super::{Piece, TILE, Tiles};
use crate::cut;
use crate::element::Format;
use crate::element::tile::{PANEL, Panels};
use crate::simd::{Kernel, LANES, Simd};

/// What a tile is unpacked to.
pub(crate) trait Target {
    /// Numbers along the chain that share a cell.
    const NUMBERS: usize;

    /// Writes the numbers of one cell of the chain for sixteen columns.
    fn store<S: Simd>(s: S, numbers: [S::F32; 2], to: &mut [u32; LANES]);
}

/// `f32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToF32;

impl Target for ToF32 {
    const NUMBERS: usize = 1;

    #[inline(always)]
    fn store<S: Simd>(s: S, [number, _]: [S::F32; 2], to: &mut [u32; LANES]) {
        s.store(number, bytemuck::must_cast_mut(to));
    }
}

/// bf16 pairs, of numbers that bf16 holds exactly.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToPairs;

impl Target for ToPairs {
    const NUMBERS: usize = 2;

    #[inline(always)]
    fn store<S: Simd>(s: S, [low, high]: [S::F32; 2], to: &mut [u32; LANES]) {
        s.store_pairs(low, high, to);
    }
}

/// Keys of some tiles, to rows of 64 columns.
pub(crate) struct UnpackKeys<'u, 't, 'a, F, T> {
    pub(crate) tiles: &'u Tiles<'t, 'a>,
    pub(crate) panels: Panels,
    pub(crate) width: usize,
    pub(crate) to: &'u mut [u32],
    pub(crate) how: PhantomData<(F, T)>,
}

/// The cells of a piece's panel from a place on.
#[inline(always)]
fn cells<'a, C: bytemuck::Pod>(piece: &Piece<'a>, head: usize, start: usize) -> &'a [C] {
    cut::from(must_cast_slice(cut::from(piece.words, head)), start)
}

#[inline(always)]
fn sixteen<C>(cells: &[C], at: usize) -> &[C; LANES] {
    match cut::from(cells, at).first_chunk() {
        Some(cells) => cells,
        None => cut::out_of_bounds(),
    }
}

/// Writes sixteen words, or as many as there is room for before `end`.
#[inline(always)]
fn put<S: Simd, T: Target>(s: S, numbers: [S::F32; 2], to: &mut [u32], at: usize, end: usize) {
    if let Some(place) = to.get_mut(at..end).and_then(<[u32]>::first_chunk_mut) {
        T::store(s, numbers, place);
        return;
    }
    let mut words = [0; LANES];
    T::store(s, numbers, &mut words);
    let place = cut::part_mut(to, at, end - at);
    place.copy_from_slice(cut::part(&words, 0, end - at));
}

impl<F: Format, T: Target> Kernel for UnpackKeys<'_, '_, '_, F, T> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let UnpackKeys { tiles, panels, width, to, .. } = self;
        for (index, piece) in tiles.pieces.iter().enumerate() {
            let panel = panels.panel(piece.row / PANEL);
            let from: &[F::Cell] = cells(piece, tiles.head, panel.start + piece.row % PANEL);
            let ahead = tiles.ahead(index);
            let end = piece.at + piece.len;
            // A step writes whole cells of both formats: the larger count is a multiple of the
            // smaller one.
            let step = if F::NUMBERS > T::NUMBERS { F::NUMBERS } else { T::NUMBERS };
            for first in (0..width).step_by(step) {
                for at in (piece.at..end).step_by(LANES) {
                    let zero = s.splat(0.0);
                    let mut numbers = [zero; 4];
                    for part in 0..step / F::NUMBERS {
                        let row = first / F::NUMBERS + part;
                        if row * F::NUMBERS >= width {
                            continue;
                        }
                        let place = row * panel.width + (at - piece.at);
                        if S::AHEAD > 0 && at == piece.at {
                            let line = from.as_ptr().wrapping_add(place).cast::<u8>();
                            s.fetch_ahead(line.wrapping_offset(ahead));
                        }
                        let raw = F::load(s, sixteen(from, place));
                        for index in 0..F::NUMBERS {
                            numbers[part * F::NUMBERS + index] = F::number(s, raw, index);
                        }
                    }
                    for part in 0..step / T::NUMBERS {
                        let row = first / T::NUMBERS + part;
                        if row * T::NUMBERS < width {
                            let pair = if T::NUMBERS == 2 {
                                [numbers[2 * part], numbers[2 * part + 1]]
                            } else {
                                [numbers[part], zero]
                            };
                            let start = row * PANEL;
                            put::<S, T>(s, pair, to, start + at, start + TILE.min(at + LANES));
                        }
                    }
                }
            }
        }
    }
}

/// Values of some tiles, to column panels of 64 positions. Pairs need blocks of even sizes.
pub(crate) struct UnpackValues<'u, 't, 'a, F, T> {
    pub(crate) tiles: &'u Tiles<'t, 'a>,
    pub(crate) panels: Panels,
    pub(crate) width: usize,
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
                let from: &[F::Cell] = cells(piece, tiles.head, panel.start);
                let ahead = tiles.ahead(index);
                let mut at = piece.at;
                while at < piece.at + piece.len {
                    // As many positions as share a cell; blocks of even sizes keep them together.
                    let count = T::NUMBERS.min(piece.at + piece.len - at);
                    for first in (0..place.width).step_by(LANES) {
                        let mut numbers = [s.splat(0.0); 2];
                        for (next, number) in numbers.iter_mut().enumerate().take(count) {
                            let row = piece.row + (at - piece.at) + next;
                            let start = row / F::NUMBERS * panel.width + first;
                            if S::AHEAD > 0 && first == 0 {
                                let line = from.as_ptr().wrapping_add(start).cast::<u8>();
                                s.fetch_ahead(line.wrapping_offset(ahead));
                            }
                            let raw = F::load(s, sixteen(from, start));
                            *number = one_of::<S, F>(s, raw, row % F::NUMBERS);
                        }
                        let start = place.start + at / T::NUMBERS * place.width;
                        put::<S, T>(
                            s,
                            numbers,
                            to,
                            start + first,
                            start + place.width.min(first + LANES),
                        );
                    }
                    at += count;
                }
            }
        }
    }
}

/// A number of a cell whose place is not known to the compiler.
#[inline(always)]
fn one_of<S: Simd, F: Format>(s: S, raw: F::Raw<S>, index: usize) -> S::F32 {
    let mut number = F::number(s, raw, 0);
    for other in 1..F::NUMBERS {
        if other == index {
            number = F::number(s, raw, other);
        }
    }
    number
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
                for at in (0..piece.len).step_by(LANES) {
                    // A line more than the tile has: what is copied too much is written over, or
                    // not seen.
                    let place = to.get_mut(piece.at + at..).and_then(<[f32]>::first_chunk_mut);
                    let Some(place) = place else { cut::out_of_bounds() };
                    let scales = sixteen(from, at);
                    s.fetch_ahead(scales.as_ptr().cast::<u8>().wrapping_offset(ahead));
                    s.store(s.load(scales), place);
                }
            }
        }
    }
}
