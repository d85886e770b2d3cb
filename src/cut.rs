//! Parts of slices, checked, whose failure is one cold call.
//!
//! The kernels find their numbers by arithmetic on checked shapes, so none of these checks can
//! fail unless this crate is wrong; they are what turns such a fault into a stop instead of a read
//! of somebody else's memory. Plain indexing would do the same, and put a call with the message's
//! numbers next to each loop. Here the hot code holds a compare and a branch, and nothing that
//! formats.

/// Everything from `start` on.
#[inline(always)]
pub(crate) fn from<T>(cells: &[T], start: usize) -> &[T] {
    match cells.get(start..) {
        Some(part) => part,
        None => out_of_bounds(),
    }
}

/// `len` cells from `start` on.
#[inline(always)]
pub(crate) fn part<T>(cells: &[T], start: usize, len: usize) -> &[T] {
    match from(cells, start).get(..len) {
        Some(part) => part,
        None => out_of_bounds(),
    }
}

/// `len` cells from `start` on, to be written.
#[inline(always)]
pub(crate) fn part_mut<T>(cells: &mut [T], start: usize, len: usize) -> &mut [T] {
    match cells.get_mut(start..).and_then(|rest| rest.get_mut(..len)) {
        Some(part) => part,
        None => out_of_bounds(),
    }
}

/// One cell.
#[inline(always)]
pub(crate) fn one<T>(cells: &[T], index: usize) -> &T {
    match cells.get(index) {
        Some(cell) => cell,
        None => out_of_bounds(),
    }
}

/// One cell, to be written.
#[inline(always)]
pub(crate) fn one_mut<T>(cells: &mut [T], index: usize) -> &mut T {
    match cells.get_mut(index) {
        Some(cell) => cell,
        None => out_of_bounds(),
    }
}

/// The first `len` cells, and the rest.
#[inline(always)]
pub(crate) fn split<T>(cells: &mut [T], len: usize) -> (&mut [T], &mut [T]) {
    match cells.split_at_mut_checked(len) {
        Some(parts) => parts,
        None => out_of_bounds(),
    }
}

/// Stops where a part would reach past its whole.
#[cold]
#[inline(never)]
pub(crate) fn out_of_bounds() -> ! {
    panic!("a tile reaches past its page: this is a fault in paged-kv");
}
