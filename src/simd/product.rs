//! The one inner loop: a register tile of a matrix product.
//!
//! `C[rows x 16 columns] += A . B`, with A broadcast number by number and B loaded sixteen
//! neighbours at a time. Queries times keys and probabilities times values are both this, for one
//! query row and for many. What one step of it does with a vector of B, whatever is stored there,
//! is a [`Step`].
//!
//! Lengths are checked once, before the loop; in the loop there is no check, no branch and no
//! call. Each element of C is one chain in the order of B's numbers, whatever the tile's size: that
//! is why a row's result does not depend on what else is in the tile.

use super::{Kernel, LANES, Level, RowsKernel, Simd};
use crate::cut::out_of_bounds;

/// What a cell of B holds, and how the factors that meet it are added up.
pub(crate) trait Step: Copy + 'static {
    /// What stands in memory: one or more numbers of one column.
    type Cell: bytemuck::Pod;
    /// What is broadcast.
    type Factor: bytemuck::Pod;
    /// What is added up.
    type Sum<S: Simd>: Copy;

    /// Numbers in a cell.
    const NUMBERS: usize;

    /// Factors that meet a cell: one for each number, or one for all of them.
    const FACTORS: usize;

    /// The most rows that are worth a register tile, see [`Simd::ROWS`].
    const ROWS: usize;

    /// Runs a kernel of this step at the level, which has it.
    fn run<K: Kernel>(level: Level, kernel: K) -> K::Output;

    /// Runs a kernel of this step for so many rows, at most [`Step::ROWS`] and [`Simd::ROWS`].
    #[inline(always)]
    fn run_rows<S: Simd, K: RowsKernel>(s: S, rows: usize, kernel: K) {
        s.run_rows(rows, kernel);
    }

    /// Nothing added yet.
    fn zero<S: Simd>(s: S) -> Self::Sum<S>;

    /// Adds the numbers `from .. to` of a row of cells to each row's sums, in order.
    /// `factor(row, index)` is what the number meets; where one factor meets all, index is 0.
    fn add<S: Simd, const MR: usize, const NV: usize>(
        s: S,
        sums: &mut [[Self::Sum<S>; NV]; MR],
        cells: [&[Self::Cell; LANES]; NV],
        from_to: (usize, usize),
        factor: impl Fn(usize, usize) -> Self::Factor,
    );
}

/// Vectors per row in a register tile of `MR` rows.
#[inline(always)]
pub(crate) fn columns<S: Simd, T: Step, const MR: usize>() -> usize {
    if T::FACTORS > 1 { S::UNPACKED_COLUMNS[MR] } else { S::COLUMNS[MR] }
}

/// Where the rows of A stand: at one distance, so that one check does for all. With a slice and a check for
/// each, prompts of 512 took 1.01 to 1.07 times as long.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, F> {
    /// The factors from the first one of the first row on.
    pub(crate) factors: &'a [F],
    /// Factors between rows.
    pub(crate) stride: usize,
}

/// Where the columns of B stand: `NV` runs of sixteen neighbouring cells, and the distance from a
/// cell to the one below it, the same for all of them.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a, T, const NV: usize> {
    /// For each run, the cells from its first one on.
    pub(crate) cells: [&'a [T]; NV],
    /// Cells between rows.
    pub(crate) stride: usize,
    /// Numbers of the first cell that are left out.
    pub(crate) skip: usize,
    /// Numbers that are added, in each column.
    pub(crate) numbers: usize,
    /// For each run, bytes from the cells at hand to those that are needed next.
    pub(crate) ahead: [isize; NV],
}

/// Adds `a . b` to `acc`. The first factor of a row meets the first number that is not left out, or
/// the first cell.
///
/// # Panics
///
/// If `a` ends before its last row does, or a run of `b` is too short: both are faults of this crate, and stop here
/// before memory is touched that is not ours.
#[inline(always)]
pub(crate) fn product<S: Simd, T: Step, const MR: usize, const NV: usize>(
    s: S,
    acc: &mut [[T::Sum<S>; NV]; MR],
    a: Rows<'_, T::Factor>,
    b: Columns<'_, T::Cell, NV>,
) {
    if b.numbers == 0 {
        return;
    }
    let one_each = T::FACTORS == T::NUMBERS;
    let rows = (b.skip + b.numbers).div_ceil(T::NUMBERS);
    let factors = if one_each { b.numbers } else { rows };
    let reach = (rows - 1).checked_mul(b.stride).and_then(|last| last.checked_add(LANES));
    let fits = |run: &[T::Cell]| reach.is_some_and(|reach| reach <= run.len());
    if b.skip >= T::NUMBERS || !b.cells.iter().all(|run| fits(run)) {
        out_of_bounds();
    }
    let needed = a.stride.checked_mul(MR - 1).and_then(|last| last.checked_add(factors));
    debug_assert!(MR == 1 || factors <= a.stride, "rows stand beside each other");
    if needed.is_none_or(|needed| needed > a.factors.len()) {
        out_of_bounds();
    }
    let mut row = 0;
    if T::NUMBERS > 1 && b.skip > 0 {
        let to = T::NUMBERS.min(b.skip + b.numbers);
        // SAFETY: row 0 of at least one; lengths were checked above.
        unsafe { step::<S, T, MR, NV>(s, acc, &a, &b, row, (b.skip, to)) };
        row = 1;
    }
    let whole = (b.skip + b.numbers) / T::NUMBERS;
    while row < whole {
        if S::AHEAD > 0 {
            fetch_ahead::<S, T, MR, NV>(s, &b, row);
        }
        // SAFETY: `row < whole <= rows`; lengths were checked above.
        unsafe { step::<S, T, MR, NV>(s, acc, &a, &b, row, (0, T::NUMBERS)) };
        row += 1;
    }
    if T::NUMBERS > 1 && row < rows {
        let to = b.skip + b.numbers - row * T::NUMBERS;
        // SAFETY: `row < rows`; lengths were checked above.
        unsafe { step::<S, T, MR, NV>(s, acc, &a, &b, row, (0, to)) };
    }
}

/// Asks for what is needed next where the row at hand is now: one line of those that a wide row
/// has, or all of them.
///
/// The processor brings neighbouring lines by itself, and more requests than it can keep are lost;
/// but cells that are widened for several rows are worked on in bursts, and bytes are over before
/// it has noticed them. Measured cold at AVX-512 in blocks of 64, ns for a cached position with one
/// line in four and with all of them: bf16 with four rows 245 and 174, with two 168 and 189, with
/// one 138 and 203; pairs of bf16 with four 212 and 206, with one 148 and 216; fours of bytes as
/// dot products with four rows 213 and 166, with one 190 and 133, and widened 235 and 186, 187 and
/// 118.
///
/// A tile of two vectors comes by twice as often and skips every other line where it asks for one. At
/// AVX2, one line and all of them: bf16 with one row 209 and 179, fours of bytes and bytes 207 and 123,
/// with two rows 292 and 173, 181 and 122; f32 with two 485 and 460. At AVX-512, eight rows of bf16 pairs,
/// 512 of a prompt behind 2048 positions: 122 and 115 ms.
#[inline(always)]
fn fetch_ahead<S: Simd, T: Step, const MR: usize, const NV: usize>(
    s: S,
    b: &Columns<'_, T::Cell, NV>,
    row: usize,
) {
    let widened = T::FACTORS == T::NUMBERS;
    let single = widened && T::NUMBERS == 1 && size_of::<T::Cell>() == 4;
    let all = T::NUMBERS == 4 || NV == 2 || widened && MR > T::NUMBERS && !single;
    // As many neighbouring runs as share a line.
    let apart = if all { 4 / size_of::<T::Cell>() } else { 4 };
    // Written out: any loop over the runs stayed one, inside of the innermost.
    fetch_one::<S, T, NV>(s, b, row, 0);
    if apart == 1 {
        fetch_one::<S, T, NV>(s, b, row, 1);
        fetch_one::<S, T, NV>(s, b, row, 3);
    }
    if apart <= 2 {
        fetch_one::<S, T, NV>(s, b, row, 2);
    }
}

/// The line of one run, where there is one.
#[inline(always)]
fn fetch_one<S: Simd, T: Step, const NV: usize>(
    s: S,
    b: &Columns<'_, T::Cell, NV>,
    row: usize,
    index: usize,
) {
    if let (Some(run), Some(ahead)) = (b.cells.get(index), b.ahead.get(index)) {
        let line = run.as_ptr().wrapping_add(row * b.stride).cast::<u8>();
        s.fetch_ahead(line.wrapping_offset(*ahead));
    }
}

/// One row of cells, of which the numbers `from_to` count.
///
/// # Safety
///
/// Each run has sixteen cells from `row * stride` on, and each row of `a` the factors of this row.
#[inline(always)]
unsafe fn step<S: Simd, T: Step, const MR: usize, const NV: usize>(
    s: S,
    acc: &mut [[T::Sum<S>; NV]; MR],
    a: &Rows<'_, T::Factor>,
    b: &Columns<'_, T::Cell, NV>,
    row: usize,
    from_to: (usize, usize),
) {
    // SAFETY: the caller vouches for sixteen cells.
    let run = |cells: &[T::Cell]| unsafe {
        &*cells.as_ptr().add(row * b.stride).cast::<[T::Cell; LANES]>()
    };
    let mut cells = [run(b.cells[0]); NV];
    for (cells, from) in cells.iter_mut().zip(b.cells) {
        *cells = run(from);
    }
    let first =
        if T::FACTORS == T::NUMBERS { (row * T::NUMBERS).wrapping_sub(b.skip) } else { row };
    T::add(s, acc, cells, from_to, |line, index| {
        // SAFETY: the caller vouches for the factors of `MR` rows, and `line` is one of them; `index` is
        // in `from_to`, of which none comes before the first factor.
        unsafe { *a.factors.get_unchecked(line * a.stride + first.wrapping_add(index)) }
    });
}
