//! What is to be done: a call over one layer, cut into items.
//!
//! An *item* is some KV heads by some query rows by some positions, and leaves one state for each
//! of its rows. With few query rows an item takes many heads and walks tile by tile, heads inside,
//! which is the order of memory; with many it takes one KV head and up to [`ITEM_ROWS`] rows, so
//! that their state stays in the cache while keys and values stream by. How a call is cut is only
//! a matter of speed: no sum crosses a row, and along the positions items begin where a split does.

use core::ops::Range;

use super::options::Resolved;
use super::tree::TreeMask;
use crate::cut;
use crate::element::Element;
use crate::kernel::{SPLIT, TILE, WIDTH};
use crate::shape::GqaShape;
use crate::simd::{LANES, MOST_ROWS};
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;
use crate::storage::view::KvView;

/// Rows of one KV head that an item takes at most, unless a single position has more.
///
/// 64 to 96 were measured alike; 96 rows of 128 + 2 x 128 floats are 144 KiB.
pub(crate) const ITEM_ROWS: usize = 96;

/// Up to this many rows a KV head, an item takes all heads ...
pub(crate) const DECODE_ROWS: usize = 16;

/// ... unless they are more than this many rows together: 256 of 128 + 2 x 128 floats are 384 KiB
/// of state, which has to stay in the second-level cache.
pub(crate) const TOGETHER_ROWS: usize = 256;

/// One sequence of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member<'a, E: Element> {
    pub(crate) view: KvView<'a, E>,
    /// Its first query row in `q`, and how many it has.
    pub(crate) first: usize,
    pub(crate) n_q: usize,
    /// Its place among those that the caller handed in.
    pub(crate) index: usize,
}

impl<E: Element> Member<'_, E> {
    /// The position of the sequence's first query row, where it has one.
    #[inline(always)]
    pub(crate) fn base(&self) -> isize {
        self.view.len().cast_signed() - self.n_q.cast_signed()
    }
}

/// Which sequence of a batch is meant, and where its query rows stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its place among those that the caller handed in.
    pub(crate) index: usize,
    /// Its first query row in `q`, and how many it has.
    pub(crate) first: usize,
    pub(crate) n_q: usize,
}

/// The sequences of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Members<'a, E: Element> {
    One(Member<'a, E>),
    /// Sequences of one store, in the order of `places`, which is not the caller's: those that
    /// share blocks stand beside each other.
    Batch {
        store: &'a PagedKvStore<E>,
        caches: &'a [&'a PagedKvCache],
        places: &'a [Place],
    },
}

/// An attention call over one layer, checked.
#[derive(Debug)]
pub(crate) struct Task<'a, E: Element> {
    pub(crate) shape: GqaShape,
    pub(crate) options: Resolved<'a>,
    /// `[rows][n_heads][k_width]`, the rows of one sequence after the other.
    pub(crate) q: &'a [f32],
    pub(crate) members: Members<'a, E>,
}

impl<'a, E: Element> Task<'a, E> {
    /// The call's `index`-th sequence.
    #[inline(always)]
    pub(crate) fn member(&self, index: usize) -> Member<'a, E> {
        match self.members {
            Members::One(member) => member,
            Members::Batch { store, caches, places } => {
                let Place { index, first, n_q } = *cut::one(places, index);
                let cache = cut::one(caches, index);
                let view = cache.view_of(store);
                Member { view, first, n_q, index }
            }
        }
    }

    /// The tree at a sequence's end, if there is one, and the positions before it.
    #[inline(always)]
    pub(super) fn tree(&self, member: &Member<'a, E>) -> Option<(TreeMask<'a>, usize)> {
        let tree = *cut::one(self.options.trees?, member.index);
        let before = member.view.len().saturating_sub(tree.rows());
        (tree.rows() > 0).then_some((tree, before))
    }

    /// What a query row sees of a tile as far as trees are concerned, a bit for each position.
    #[inline(always)]
    pub(super) fn tree_bits(&self, member: &Member<'a, E>, query: usize, start: usize) -> u64 {
        let Some((tree, before)) = self.tree(member) else { return u64::MAX };
        match (query + tree.rows()).checked_sub(member.n_q) {
            Some(row) if start + TILE > before => {
                tree.bits(row, before.cast_signed() - start.cast_signed())
            }
            _ => u64::MAX,
        }
    }
}

/// A part of a call. Plain data: it depends on lengths and shapes alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) sequences: Range<usize>,
    pub(crate) heads: Range<usize>,
    /// Query rows, counted in each of the sequences.
    pub(crate) rows: Range<usize>,
    /// The first position, a multiple of [`SPLIT`], and the one behind the last.
    pub(crate) positions: Range<usize>,
    /// Positions below this one, a multiple of [`TILE`], stand in the same blocks for all of the
    /// sequences.
    pub(crate) joint: usize,
}

impl Item {
    /// Rows of one KV head.
    #[inline(always)]
    pub(crate) fn rows_per_head(&self, shape: &GqaShape) -> usize {
        self.sequences.len() * self.rows.len() * shape.group()
    }

    /// Whether more than one split has to be merged.
    #[inline(always)]
    pub(crate) fn merges(&self) -> bool {
        self.positions.end > self.positions.start + SPLIT
    }

    /// Numbers of scratch that the item needs, its states included.
    pub(crate) fn scratch_len(&self, shape: &GqaShape) -> usize {
        scratch_for(shape, self.rows(shape), self.merges())
    }

    /// Rows over all of its heads.
    pub(crate) fn rows(&self, shape: &GqaShape) -> usize {
        self.heads.len().saturating_mul(self.rows_per_head(shape))
    }

    /// Numbers at the beginning of its scratch that hold its states when it is done: behind them
    /// another item may work.
    pub(crate) fn states_len(&self, shape: &GqaShape) -> usize {
        // The first state starts on a line, wherever the scratch does.
        let row = shape.kv().v_width().next_multiple_of(LANES) + 2;
        self.rows(shape).saturating_mul(row).saturating_add(LANES)
    }
}

/// Numbers of scratch for an item of so many rows, for any stored type at any level.
pub(crate) fn scratch_for(shape: &GqaShape, rows: usize, merges: bool) -> usize {
    let (k_width, v_width) = (shape.kv().k_width(), shape.kv().v_width());
    // A width is anybody's number: what is too much for any memory is said to be all there is.
    let sum = |numbers: &[usize]| numbers.iter().fold(0, |all: usize, n| all.saturating_add(*n));
    let state = v_width.saturating_add(LANES - 1) / LANES * LANES + 2;
    let states = state.saturating_mul(if merges { 2 } else { 1 });
    // A vector of MOST_ROWS maxima and denominators may begin at the last row, of a split and of the
    // totals.
    let behind = 2 * 2 * MOST_ROWS;
    // A query row as it is, and rounded for a dot product, with two words more.
    let query = sum(&[k_width, k_width.div_ceil(2), 2]);
    let scores = 2 * MOST_ROWS * WIDTH;
    let scales = (k_width.div_ceil(32) + v_width.div_ceil(32)).saturating_mul(WIDTH);
    let panels = sum(&[k_width, v_width]).saturating_mul(TILE);
    // Each of the regions starts on a line, and the first one where the caller's memory has one.
    let rows = rows.saturating_mul(sum(&[states, query]));
    sum(&[rows, behind, scores, scales, panels, 10 * LANES])
}

/// Whether so many query rows of a sequence are few, as in decode and in the verification of a
/// draft: then an item takes many heads, and otherwise one.
pub(crate) fn few_rows(shape: &GqaShape, n_q: usize) -> bool {
    let few = n_q.saturating_mul(shape.group()) <= DECODE_ROWS
        && n_q.saturating_mul(shape.n_heads()) <= TOGETHER_ROWS;
    few || n_q <= 1
}

/// How the rows of one sequence are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ItemSize {
    /// KV heads in an item.
    pub(crate) heads: usize,
    /// Query rows in an item.
    pub(crate) rows: usize,
}

impl ItemSize {
    pub(crate) fn new(shape: &GqaShape, n_q: usize) -> Self {
        if few_rows(shape, n_q) {
            ItemSize { heads: shape.kv().n_kv_heads(), rows: n_q.max(1) }
        } else {
            ItemSize { heads: 1, rows: (ITEM_ROWS / shape.group()).clamp(1, n_q) }
        }
    }

    /// Rows of an item, over all of its heads.
    fn in_item(&self, shape: &GqaShape) -> usize {
        self.heads * self.rows * shape.group()
    }
}

/// Numbers of scratch that attention over this shape needs for up to `n_q` query rows.
///
/// What is enough for many rows is enough for fewer: ask once, for the largest chunk. The number
/// is bounded whatever `n_q` is (an item has at most 256 rows, or one for each query head, or 96
/// for one KV head), and depends neither on the length of the sequence nor on the stored type.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::attention_scratch_len;
/// use paged_kv::{GqaShape, KvShape};
///
/// let shape = GqaShape::new(KvShape::square(16, 8, 128)?, 32)?;
/// let most = attention_scratch_len(&shape, 512); // for chunks of up to 512 rows
/// assert!(attention_scratch_len(&shape, 1) <= most);
/// assert_eq!(attention_scratch_len(&shape, 100_000), most);
/// # Ok::<(), paged_kv::ShapeError>(())
/// ```
pub fn attention_scratch_len(shape: &GqaShape, n_q: usize) -> usize {
    // Rows grow with `n_q` on either side of the change from all heads to one; it comes somewhere
    // in 1 ..= DECODE_ROWS.
    let most = (1..=n_q.min(DECODE_ROWS)).chain([n_q]).map(|n_q| scratch_needed(shape, n_q));
    most.max().unwrap_or(0)
}

/// Numbers of scratch that exactly `n_q` query rows need.
pub(super) fn scratch_needed(shape: &GqaShape, n_q: usize) -> usize {
    scratch_for(shape, ItemSize::new(shape, n_q).in_item(shape), true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::KvShape;

    #[test]
    fn what_no_memory_holds_is_all_there_is() {
        let of = |width, n_heads| {
            let kv = KvShape::square(1, 1, width).unwrap();
            attention_scratch_len(&GqaShape::new(kv, n_heads).unwrap(), 1)
        };
        let most = 1 << (usize::BITS - 6);
        assert_eq!((of(most, 1), of(1, 2 * most)), (usize::MAX, usize::MAX));
        assert!(of(most >> 10, 1) < usize::MAX && of(1, most >> 10) < usize::MAX);
    }
    #[test]
    fn scratch_for_many_rows_is_enough_for_fewer() {
        for (n_heads, n_kv_heads, width) in
            [(32, 8, 128), (128, 128, 128), (9, 3, 64), (8, 8, 8), (100, 2, 8), (1, 1, 1)]
        {
            let kv = KvShape::square(16, n_kv_heads, width).unwrap();
            let shape = GqaShape::new(kv, n_heads).unwrap();
            let mut most = attention_scratch_len(&shape, 0);
            for n_q in (1..300).chain([512, 10_000, usize::MAX]) {
                let len = attention_scratch_len(&shape, n_q);
                assert!(len >= most, "{n_heads}/{n_kv_heads} heads, {n_q} rows");
                assert!(len >= scratch_needed(&shape, n_q));
                most = len;
            }
            // An item has at most 256 rows, or one for each head, or 96 of one KV head.
            let rows = 256.max(n_heads).max(96.max(shape.group()));
            let row = 2 * width.next_multiple_of(16) + 4 + width + width.div_ceil(2) + 2;
            assert!(most <= 4096 + rows * row + 64 * 2 * (width + 2));
        }
    }
}
