//! The arithmetic of attention, over any level and any stored type.
//!
//! The room knows numbers: products of query rows with key panels ([`scores`]), the softmax of one
//! tile ([`softmax`]), probabilities times value panels ([`values`]) and what is kept between
//! tiles ([`state`]). It refuses to know where pages come from: a [`Span`] hands it cells that
//! are already found. It allocates nothing and contains no `unsafe`.
//!
//! # One order for everything
//!
//! A row's result must not depend on how it was asked for: alone or in a chunk, from contiguous
//! or paged memory, in blocks of 16 or 144, at one level or another of its class. So each of the
//! sums below has one order, fixed by absolute positions:
//!
//! - a score is one chain over the key's width ([`scores`]; a lane is a position);
//! - the softmax works on tiles of [`TILE`] positions whose borders are multiples of [`TILE`]; a
//!   tile's exponentials are added lane by lane and then in the tree of `Simd::reduce_sum`;
//! - values are added in the order of positions, one chain for each column;
//! - after each [`SPLIT`] positions, counted from position 0, the running state is merged into the
//!   row's total and a new one begins, whether or not anybody works in parallel.
//!
//! Masked positions take part as exact zeros or not at all, so that a longer chunk or a wider
//! tile adds nothing to a row that does not see it.

pub(crate) mod exp;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod state;
pub(crate) mod values;

use crate::cut;
use crate::element::{Format, Widen};
use crate::simd::Simd;
use crate::simd::product::Step;
use values::Extent;

/// Positions in a softmax tile.
///
/// Measured against 64: 16 costs 11 to 46 %, 128 gains 1 % in decode and 2 % in prefill, which is
/// not worth a second number that decode and prefill could round differently by.
pub(crate) const TILE: usize = 64;

/// Positions after which a partial state is merged into the row's total.
///
/// 512 positions of 128 + 128 floats are 512 KiB of one KV head, some 15 us of cold memory: about
/// the least work that is worth handing to another thread. The merge costs a thousandth of it.
pub(crate) const SPLIT: usize = 512;

const _: () = assert!(SPLIT.is_multiple_of(TILE));

/// One row of scores, then of probabilities, with room for a vector stored at its last position.
pub(crate) type ScoreRow = [f32; TILE + 16];

/// Neighbouring positions of one block, inside one K panel and one softmax tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// The memory from the block's first tile on. It reaches a line further than the last block,
    /// so that whole vectors can be read to the end; what is read too much is not used.
    pub(crate) words: &'a [u64],
    /// The first position, counted in its block.
    pub(crate) row: usize,
    /// The first position, counted in the softmax tile.
    pub(crate) at: usize,
    /// Positions.
    pub(crate) len: usize,
}

/// The most pieces that are worked on at once: a tile in blocks of sixteen needs at most five.
pub(crate) const MOST_PIECES: usize = 8;

/// Pieces of one softmax tile in the order of positions: all of it, unless blocks are smaller than
/// sixteen positions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces<'a> {
    list: [Piece<'a>; MOST_PIECES],
    count: usize,
}

impl<'a> Pieces<'a> {
    pub(crate) const NONE: Self =
        Pieces { list: [Piece { words: &[], row: 0, at: 0, len: 0 }; MOST_PIECES], count: 0 };

    pub(crate) fn is_full(&self) -> bool {
        self.count == MOST_PIECES
    }

    pub(crate) fn push(&mut self, piece: Piece<'a>) {
        *cut::one_mut(&mut self.list, self.count) = piece;
        self.count += 1;
    }

    #[inline(always)]
    pub(crate) fn list(&self) -> &[Piece<'a>] {
        cut::part(&self.list, 0, self.count)
    }

    /// The position behind the last one, where there may be more in the extent; the extent's end
    /// where there is not.
    #[inline(always)]
    pub(crate) fn end_if_more(&self, extent: Extent) -> usize {
        if !self.is_full() {
            return extent.to;
        }
        self.list().last().map_or(extent.to, |last| last.at + last.len)
    }
}

/// One KV head's tiles of some pieces, and where the next ones are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles<'t, 'a> {
    pub(crate) pieces: &'t Pieces<'a>,
    /// Words from the first head's tile to this one's.
    pub(crate) head: usize,
    /// For each piece, bytes from its tile to the one that is needed next; 0 where nothing is.
    pub(crate) ahead: &'t [isize; MOST_PIECES],
}

/// Rows of the largest register tile for this step at this level.
#[inline(always)]
pub(crate) const fn rows_at_once<S: Simd, T: Step>() -> usize {
    if T::ROWS < S::ROWS { T::ROWS } else { S::ROWS }
}

impl<F: Format> scores::KeyStep for Widen<F> {
    #[inline(always)]
    fn score<S: Simd>(_: S, sum: S::F32, _: &[f32]) -> S::F32 {
        sum
    }
}

impl<F: Format> values::ValueStep for Widen<F> {
    #[inline(always)]
    fn resume<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }

    #[inline(always)]
    fn sum<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }
}
