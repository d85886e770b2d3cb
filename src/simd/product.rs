//! The one inner loop: a register tile of a matrix product.
//!
//! `C[rows x 16 columns] += A . B`, with A broadcast number by number and B loaded sixteen
//! neighbours at a time. Queries times keys and probabilities times values are both this, for one
//! query row and for many.
//!
//! Lengths are checked once, before the loop; in the loop there is no check, no branch and no
//! call. Each element of C is one chain of `mul_add` in the order of B's rows, whatever the tile's
//! size: that is why a row's result does not depend on what else is in the tile.

use super::{LANES, Simd};
use crate::cut::out_of_bounds;

/// A register tile: `MR` rows of `NV` vectors.
pub(crate) type Tile<S, const MR: usize, const NV: usize> = [[<S as Simd>::F32; NV]; MR];

/// Where the columns of B stand: `NV` runs of `width` neighbouring cells, and the distance from
/// a cell to the one below it, the same for all of them.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a, T, const NV: usize> {
    /// For each run, the cells from its first one on.
    pub(crate) cells: [&'a [T]; NV],
    /// Cells between rows.
    pub(crate) stride: usize,
    /// Cells in a run, at most sixteen.
    pub(crate) width: usize,
}

/// Adds `a . b` to `acc`. `load` turns a run of `width` cells into a vector.
///
/// All rows of `a` have one length, which is the number of rows of `b` that are read.
///
/// # Panics
///
/// If a row of `a` has another length than the first, or a run of `b` is too short: both are
/// faults of this crate, and stop here before memory is touched that is not ours.
#[inline(always)]
pub(crate) fn product<S: Simd, T, const MR: usize, const NV: usize>(
    s: S,
    mut acc: Tile<S, MR, NV>,
    a: [&[f32]; MR],
    b: Columns<'_, T, NV>,
    load: impl Fn(S, &[T]) -> S::F32,
) -> Tile<S, MR, NV> {
    let rows = a[0].len();
    if rows == 0 {
        return acc;
    }
    let reach = (rows - 1).checked_mul(b.stride).and_then(|last| last.checked_add(b.width));
    let fits = |run: &[T]| reach.is_some_and(|reach| reach <= run.len());
    if b.width > LANES || !b.cells.iter().all(|run| fits(run)) {
        out_of_bounds();
    }
    if !a.iter().all(|row| row.len() == rows) {
        out_of_bounds();
    }
    for row in 0..rows {
        let mut vectors = [s.splat(0.0); NV];
        for (vector, cells) in vectors.iter_mut().zip(b.cells) {
            // SAFETY: `row < rows`, and `(rows - 1) * stride + width` cells are there, so this run
            // ends inside the slice.
            let run = unsafe {
                let first = cells.as_ptr().add(row * b.stride);
                core::slice::from_raw_parts(first, b.width)
            };
            *vector = load(s, run);
        }
        for (sums, line) in acc.iter_mut().zip(a) {
            // SAFETY: every row of `a` is `rows` long.
            let number = s.splat(unsafe { *line.get_unchecked(row) });
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = s.mul_add(number, vector, *sum);
            }
        }
    }
    acc
}
