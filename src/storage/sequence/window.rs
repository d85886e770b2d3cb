//! What a sequence keeps of its past, and the hole where a window has passed.

use core::ops::Range;

use super::PagedKvCache;
use crate::element::tile::PANEL;
use crate::error::PagedKvError;
use crate::id::BlockId;
use crate::shape::KvShape;
use crate::storage::blocks::Blocks;

/// What a sequence keeps where attention looks at a part of the past alone: the last positions, and,
/// if asked for, the first ones.
///
/// Blocks that hold neither are given back when the next ones are taken, so that a sequence of any
/// length holds a bounded number of blocks. Positions keep their numbers. Attention over such a
/// sequence needs a [window](crate::attention::AttentionOptions::window) that is no longer than
/// this one (and [`keep_first`](crate::attention::AttentionOptions::keep_first) no larger); it refuses
/// to look at what is gone.
///
/// The first few positions are those that StreamingLLM keeps (Xiao et al. 2023), which softmax leans
/// on whatever they say.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(64, 4, 1, 1);
/// let mut sequence = PagedKvCache::with_window(KvWindow::last(100));
/// for _ in 0..10_000 {
///     sequence.push(&mut store, &[1.0], &[2.0])?; // four blocks are enough for any length
/// }
/// assert_eq!(sequence.freed_blocks(), 0..154);
/// # sequence.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvWindow {
    last: usize,
    first: usize,
}

impl KvWindow {
    /// Keeps what the last `window` positions up to a query need, its own included, as a sliding
    /// window does.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::AttentionOptions;
    /// use paged_kv::cache::KvWindow;
    ///
    /// let kept = KvWindow::last(4096);
    /// assert_eq!((kept.window(), kept.first()), (4096, 0));
    /// // Attention asks for no more than what is kept.
    /// let options = AttentionOptions::new().window(kept.window());
    /// assert_eq!(options, AttentionOptions::new().window(4096));
    /// ```
    ///
    /// # Panics
    ///
    /// If `window` is 0: a query sees itself at least.
    #[track_caller]
    pub const fn last(window: usize) -> Self {
        assert!(window > 0, "a window of 0 positions");
        KvWindow { last: window, first: 0 }
    }

    /// Keeps the first `n` positions as well.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
    ///
    /// let kept = KvWindow::last(64).and_first(4);
    /// assert_eq!((kept.window(), kept.first()), (64, 4));
    /// let mut store = PagedKvStore::new(16, 20, 1, 1);
    /// let mut cache = PagedKvCache::with_window(kept);
    /// for _ in 0..257 {
    ///     cache.push(&mut store, &[0.5], &[0.5])?;
    /// }
    /// assert_eq!(cache.freed_blocks(), 4..12); // the first tile of 64 positions stays
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub const fn and_first(self, n: usize) -> Self {
        KvWindow { first: n, ..self }
    }

    /// Positions up to a query, its own included.
    pub const fn window(&self) -> usize {
        self.last
    }

    /// Positions at the beginning.
    pub const fn first(&self) -> usize {
        self.first
    }

    /// The first position of the window of a query that stands at `len`.
    fn from(self, len: usize) -> usize {
        (len + 1).saturating_sub(self.last)
    }

    /// The blocks that no query from position `len` on looks at.
    ///
    /// Attention reads tiles of [`PANEL`] positions and masks what is not seen, so that a block is
    /// needed as long as its tile is.
    pub(crate) fn hole(self, shape: KvShape, len: usize) -> Hole {
        let end = self.from(len) / PANEL * PANEL / shape.block_size();
        let first = self.first.checked_next_multiple_of(PANEL);
        let at = first.map_or(end, |first| shape.blocks_for(first));
        if at < end { Hole { at, blocks: end - at } } else { Hole::NONE }
    }

    /// The most blocks that a sequence holds on its way to `len` positions, one at a time.
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only a sequence over all layers asks it")
    )]
    pub(crate) fn most_blocks(self, shape: KvShape, len: usize) -> usize {
        // A block is taken for the position `last x block_size`. What is held then grows until the
        // window has passed the first tile, and goes round with tiles and blocks after that: in
        // 64 blocks at most.
        let taken = (0..shape.blocks_for(len)).rev().take(PANEL);
        let held = |last: usize| last + 1 - self.hole(shape, last * shape.block_size()).blocks;
        taken.map(held).max().unwrap_or(0)
    }
}

/// Blocks that are missing from a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
    allow(unreachable_pub, reason = "what layers that are shared have in common shows it")
)]
pub struct Hole {
    /// Blocks in front of it.
    at: usize,
    blocks: usize,
}

impl Hole {
    pub(crate) const NONE: Hole = Hole { at: 0, blocks: 0 };

    /// Where in the table a block of the sequence stands that is not missing.
    #[inline(always)]
    pub(crate) fn entry(self, index: usize) -> usize {
        if index < self.at { index } else { index.wrapping_sub(self.blocks) }
    }

    /// How many entries of the table the first blocks of the sequence have, whose end is not inside
    /// of the hole.
    pub(crate) fn entries(self, blocks: usize) -> usize {
        if blocks <= self.at { blocks } else { blocks - self.blocks }
    }

    /// The missing blocks, counted in the sequence.
    #[inline(always)]
    pub(crate) fn range(self) -> Range<usize> {
        self.at..self.at + self.blocks
    }

    /// Blocks that a saved sequence is without.
    pub(crate) fn new(at: usize, blocks: usize) -> Self {
        if blocks == 0 { Hole::NONE } else { Hole { at, blocks } }
    }

    /// Missing blocks.
    pub(crate) fn blocks(self) -> usize {
        self.blocks
    }

    /// The entries of a table with the hole `before` that are missing when this one has taken its
    /// place.
    fn widens(self, before: Hole) -> Range<usize> {
        debug_assert!(before.blocks == 0 || self.at == before.at, "a hole grows at its end");
        self.at..self.at + self.blocks.saturating_sub(before.blocks)
    }
}

impl PagedKvCache {
    /// An empty sequence that keeps what this window needs. Allocates nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(64, 8, 1, 1);
    /// let mut cache = PagedKvCache::with_window(KvWindow::last(64));
    /// for _ in 0..300 {
    ///     cache.push(&mut store, &[0.5], &[0.5])?;
    /// }
    /// assert_eq!(cache.window(), Some(KvWindow::last(64)));
    /// // Of the five blocks of 300 positions, three were given back.
    /// assert_eq!((cache.freed_blocks(), cache.block_table().len()), (0..3, 2));
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub const fn with_window(window: KvWindow) -> Self {
        let mut cache = PagedKvCache::new();
        cache.window = Some(window);
        cache
    }

    /// What it keeps, where that is not everything.
    pub fn window(&self) -> Option<KvWindow> {
        self.window
    }

    /// The blocks of the sequence that were given back because the window has passed them, counted
    /// from its beginning. They are missing from [`block_table`](Self::block_table).
    pub fn freed_blocks(&self) -> Range<usize> {
        self.hole.range()
    }

    /// How many first blocks it shares with another sequence of the same store. What a window has
    /// passed is shared with nobody.
    pub(crate) fn blocks_in_common(&self, other: &PagedKvCache) -> usize {
        let whole = |cache: &PagedKvCache| match cache.hole.range() {
            hole if hole.is_empty() => cache.table.len(),
            hole => hole.start,
        };
        let (most, pairs) = (whole(self).min(whole(other)), self.table.iter().zip(&other.table));
        pairs.take(most).take_while(|(one, other)| one == other).count()
    }

    /// What no query from position `len` on looks at.
    pub(crate) fn passed(&self, shape: KvShape, len: usize) -> Hole {
        let hole = self.window.map_or(Hole::NONE, |window| window.hole(shape, len));
        debug_assert!(hole.blocks >= self.hole.blocks, "a rollback ends where the window is whole");
        hole
    }

    /// Blocks that become free when `hole` takes the place of the one there is.
    ///
    /// Whoever holds a block alone goes on doing so until it gives it back.
    pub(crate) fn gains(&self, blocks: &Blocks, hole: Hole) -> usize {
        let entries = &self.table[hole.widens(self.hole)];
        entries.iter().filter(|&&block| blocks.sole_holder(block)).count()
    }

    /// Gives back what a wider hole leaves out; returns how many entries are gone.
    pub(crate) fn widen(&mut self, hole: Hole, give_back: impl FnMut(BlockId)) -> usize {
        let gone = hole.widens(self.hole);
        self.filled -= gone.end.min(self.filled) - gone.start.min(self.filled);
        self.hole = hole;
        self.table.drain(gone.clone()).for_each(give_back);
        gone.len()
    }

    /// Whether a query at position `len` would find what it looks at, after a rollback to there.
    pub(crate) fn check_cut(&self, shape: KvShape, len: usize) -> Result<(), PagedKvError> {
        let (Some(window), gone) = (self.window, self.hole.range()) else { return Ok(()) };
        // In front of the hole nothing is missing. Behind it, the window begins where it is whole.
        let whole = gone.is_empty() || shape.blocks_for(len) <= gone.start;
        if whole || window.from(len) / PANEL * PANEL / shape.block_size() >= gone.end {
            return Ok(());
        }
        let oldest = gone.end.saturating_mul(shape.block_size());
        Err(PagedKvError::PositionFreed { position: window.from(len), oldest })
    }

    /// Whether a position is there.
    pub(crate) fn check_kept(&self, shape: KvShape, position: usize) -> Result<(), PagedKvError> {
        let gone = self.hole.range();
        if gone.contains(&(position / shape.block_size())) {
            let oldest = gone.end.saturating_mul(shape.block_size());
            return Err(PagedKvError::PositionFreed { position, oldest });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn shape(block_size: usize) -> KvShape {
        KvShape::square(block_size, 1, 1).unwrap()
    }

    /// Position by position: a block is missing if none of its tiles is seen by any later query.
    #[test]
    fn the_hole_is_what_no_later_query_needs() {
        for block_size in [1, 5, 16, 48, 64, 100, 128] {
            for (last, first) in [(1, 0), (64, 0), (65, 1), (100, 4), (130, 70), (1000, 0)] {
                let window = KvWindow::last(last).and_first(first);
                for len in [0, 1, 63, 64, 65, 127, 128, 200, 500, 777] {
                    let tile_is_needed = |tile: usize| {
                        (tile * 64..(tile + 1) * 64).any(|j| j < first || j + last > len)
                    };
                    let needed = |block: usize| {
                        let positions = block * block_size..(block + 1) * block_size;
                        positions.into_iter().any(|j| tile_is_needed(j / 64))
                    };
                    let want: Vec<usize> =
                        (0..len / block_size).filter(|&block| !needed(block)).collect();
                    let hole = window.hole(shape(block_size), len);
                    let have: Vec<usize> = hole.range().collect();
                    assert_eq!(have, want, "blocks of {block_size}, {window:?}, {len}");
                    assert_eq!(want.is_empty(), hole == Hole::NONE, "an empty hole is `NONE`");
                }
            }
        }
    }

    /// Entries behind a hole are not the first blocks of a sequence.
    #[test]
    fn what_is_shared_ends_at_the_hole() {
        let mut store = crate::cache::PagedKvStore::new(64, 10, 1, 1);
        let mut cache = PagedKvCache::with_window(KvWindow::last(64).and_first(64));
        cache.append(&mut store, &[1.0; 200], &[1.0; 200], 200).unwrap();
        let fork = cache.fork(&mut store).unwrap();
        assert_eq!(cache.blocks_in_common(&fork), 4);
        cache.append(&mut store, &[1.0; 60], &[1.0; 60], 60).unwrap();
        assert_eq!((cache.freed_blocks(), fork.freed_blocks()), (1..2, 0..0));
        assert_eq!((cache.blocks_in_common(&fork), fork.blocks_in_common(&cache)), (1, 1));
        let late = cache.fork(&mut store).unwrap();
        assert_eq!(cache.blocks_in_common(&late), 1);
    }

    #[test]
    fn the_most_blocks_are_those_of_the_worst_step() {
        for block_size in [1, 5, 16, 48, 64, 100, 128] {
            for (last, first) in [(1, 0), (64, 0), (100, 4), (130, 70), (1000, 0)] {
                let window = KvWindow::last(last).and_first(first);
                let shape = shape(block_size);
                let mut most = 0;
                for len in 1..1500 {
                    let hole = window.hole(shape, (len - 1) / block_size * block_size);
                    most = most.max(shape.blocks_for(len) - hole.blocks());
                    assert_eq!(window.most_blocks(shape, len), most, "{block_size}, {window:?}");
                }
            }
        }
    }
}
