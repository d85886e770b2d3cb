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

pub(crate) mod dot;
pub(crate) mod exp;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod state;
pub(crate) mod step;

pub(crate) mod unpack;
pub(crate) mod values;

use crate::element::{Format, Widen};
use crate::simd::{LANES, Simd};

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

/// Numbers in a [`ScoreRow`].
pub(crate) const WIDTH: usize = size_of::<ScoreRow>() / size_of::<f32>();

/// A vector's numbers on a line of their own, from where they are read back before they have reached
/// the cache: one that lies across two lines is not found there as a whole.
#[repr(C, align(64))]
pub(crate) struct Aligned(pub(crate) [f32; LANES]);

impl Aligned {
    #[inline(always)]
    pub(crate) fn zeros() -> Self {
        Aligned([0.0; LANES])
    }
}

/// The number of each lane.
pub(crate) const LANE: [f32; LANES] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

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

impl Piece<'_> {
    pub(crate) const NONE: Self = Piece { words: &[], row: 0, at: 0, len: 0 };
}

/// The most pieces in a tile where blocks have sixteen positions or more.
pub(crate) const USUAL_PIECES: usize = TILE / 16 + 1;

/// One KV head's tiles of some pieces, and where the next ones are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles<'t, 'a> {
    pub(crate) pieces: &'t [Piece<'a>],
    /// Words from the first head's tile to this one's.
    pub(crate) head: usize,
    /// Words from the first head's tile to the one that is needed next ...
    pub(crate) next_head: usize,
    /// ... in these pieces.
    pub(crate) next: &'t [Piece<'a>],
}

impl Tiles<'_, '_> {
    /// Bytes from a piece's tile to the one that is needed next; 0 where nothing is.
    #[inline(always)]
    pub(crate) fn ahead(&self, index: usize) -> isize {
        match (self.pieces.get(index), self.next.get(index)) {
            (Some(here), Some(next)) => {
                let blocks = next.words.as_ptr().addr().wrapping_sub(here.words.as_ptr().addr());
                let heads = self.next_head.wrapping_sub(self.head).wrapping_mul(size_of::<u64>());
                blocks.wrapping_add(heads).cast_signed()
            }
            _ => 0,
        }
    }
}

/// Multiplies the numbers of a tile by their positions' scales.
#[inline(always)]
fn scale<S: Simd>(s: S, row: &mut ScoreRow, scales: &ScoreRow) {
    let vectors = row.as_chunks_mut().0.iter_mut().zip(scales.as_chunks().0);
    for (number, scale) in vectors.take(TILE / LANES) {
        s.store(s.mul(s.load(number), s.load(scale)), number);
    }
}

impl<F: Format> scores::KeyStep for Widen<F> {
    #[inline(always)]
    fn score<S: Simd>(_: S, sum: S::F32, _: &scores::Queries<'_, f32>, _: usize) -> S::F32 {
        sum
    }
}

impl<F: Format> values::ValueStep for Widen<F> {
    const PLAIN: bool = true;

    #[inline(always)]
    fn factors<S: Simd>(
        s: S,
        weights: &ScoreRow,
        scales: Option<&ScoreRow>,
        _: values::Extent,
        factors: &mut ScoreRow,
    ) {
        let vectors =
            weights.as_chunks().0.iter().zip(factors.as_chunks_mut().0).take(TILE / LANES);
        match scales {
            // Products at positions that are not seen are met by no value.
            Some(scales) => {
                for ((weight, factor), scale) in vectors.zip(scales.as_chunks().0) {
                    s.store(s.mul(s.load(weight), s.load(scale)), factor);
                }
            }
            None => {
                for (weight, factor) in vectors {
                    s.store(s.load(weight), factor);
                }
            }
        }
    }

    #[inline(always)]
    fn resume<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }

    #[inline(always)]
    fn sum<S: Simd>(_: S, sum: S::F32) -> S::F32 {
        sum
    }
}
