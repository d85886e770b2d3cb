//! Rows handed in from outside: are there as many numbers as there should be?

use crate::error::{KvCacheError, PagedKvError, ShapeError, Side};
use crate::shape::KvShape;

/// Cuts `n` rows, whose lengths have been checked, where blocks end: hands `write` the block's place
/// in the sequence, the first row in it, and the key and value rows that go there.
pub(crate) fn by_block(
    shape: KvShape,
    first: usize,
    n: usize,
    k: &[f32],
    v: &[f32],
    mut write: impl FnMut(usize, usize, &[f32], &[f32]),
) {
    let (mut position, mut k, mut v) = (first, k, v);
    while position < first + n {
        let row = position % shape.block_size();
        let count = (shape.block_size() - row).min(first + n - position);
        let (k_now, k_rest) = k.split_at(count * shape.k_row_len());
        let (v_now, v_rest) = v.split_at(count * shape.v_row_len());
        write(position / shape.block_size(), row, k_now, v_now);
        (position, k, v) = (position + count, k_rest, v_rest);
    }
}

/// Rows of the wrong length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongRows {
    side: Side,
    need: usize,
    have: usize,
}

/// Checks that `k` and `v` hold `n` rows each.
#[inline]
pub(crate) fn check(shape: KvShape, n: usize, k: &[f32], v: &[f32]) -> Result<(), WrongRows> {
    check_side(Side::Key, n, shape.k_row_len(), k.len())?;
    check_side(Side::Value, n, shape.v_row_len(), v.len())
}

#[inline]
fn check_side(side: Side, n: usize, row_len: usize, have: usize) -> Result<(), WrongRows> {
    // No slice is `usize::MAX` numbers long, so that a product that does not fit is never met.
    let need = n.saturating_mul(row_len);
    if need == have { Ok(()) } else { Err(WrongRows { side, need, have }) }
}

/// Checks that `out` is as long as one row of one head.
#[inline]
pub(crate) fn check_out(side: Side, width: usize, out: &[f32]) -> Result<(), WrongRows> {
    check_side(side, 1, width, out.len())
}

/// A row that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRow {
    Position { position: usize, len: usize },
    Head { head: usize, n_kv_heads: usize },
}

/// Checks that a sequence of `len` positions has this one, and its shape this KV head.
#[inline]
pub(crate) fn check_place(
    shape: KvShape,
    len: usize,
    position: usize,
    head: usize,
) -> Result<(), NoRow> {
    let n_kv_heads = shape.n_kv_heads();
    if position >= len {
        Err(NoRow::Position { position, len })
    } else if head >= n_kv_heads {
        Err(NoRow::Head { head, n_kv_heads })
    } else {
        Ok(())
    }
}

impl From<NoRow> for PagedKvError {
    fn from(none: NoRow) -> Self {
        match none {
            NoRow::Position { position, len } => PagedKvError::PositionOutOfRange { position, len },
            NoRow::Head { head, n_kv_heads } => PagedKvError::HeadOutOfRange { head, n_kv_heads },
        }
    }
}

impl From<NoRow> for KvCacheError {
    fn from(none: NoRow) -> Self {
        match none {
            NoRow::Position { position, len } => KvCacheError::PositionOutOfRange { position, len },
            NoRow::Head { head, n_kv_heads } => KvCacheError::HeadOutOfRange { head, n_kv_heads },
        }
    }
}

impl WrongRows {
    /// For the doors whose signature has no room for this mistake of the caller's.
    #[cold]
    #[inline(never)]
    #[track_caller]
    pub(crate) fn panic(self) -> ! {
        panic!("{} rows need {} numbers, got {}", self.side, self.need, self.have)
    }
}

impl From<WrongRows> for PagedKvError {
    fn from(WrongRows { side, need, have }: WrongRows) -> Self {
        PagedKvError::RowLength { side, need, have }
    }
}

impl From<WrongRows> for KvCacheError {
    fn from(WrongRows { side, need, have }: WrongRows) -> Self {
        KvCacheError::RowLength { side, need, have }
    }
}

/// For the constructors whose signature has no room for an impossible shape.
#[cold]
#[inline(never)]
#[track_caller]
pub(crate) fn impossible(error: ShapeError) -> ! {
    panic!("this KV memory cannot be had: {error}")
}
