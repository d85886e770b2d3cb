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

use crate::element::Element;
use crate::element::tile::Layout;

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

/// Neighbouring positions of one page tile, inside one K panel and one softmax tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a, E: Element> {
    /// The page tile's numbers.
    pub(crate) cells: &'a [E::Stored],
    /// How they are laid out.
    pub(crate) layout: Layout<E>,
    /// The first position, counted in its block.
    pub(crate) row: usize,
    /// The first position, counted in the softmax tile.
    pub(crate) at: usize,
    /// Positions.
    pub(crate) len: usize,
}
