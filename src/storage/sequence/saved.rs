//! A sequence that is saved, and one that comes back.

use core::ops::Range;

use super::PagedKvCache;
use super::window::{Hole, KvWindow};
use crate::element::Element;
use crate::error::PagedKvError;
use crate::id::{BlockId, StoreId};
use crate::shape::KvShape;
use crate::storage::page::Page;
use crate::storage::paged::PagedKvStore;

impl PagedKvCache {
    /// The blocks that hold the first `len` positions: the place of each in the sequence, its id, and
    /// how many of the positions stand in it.
    pub(crate) fn pages(
        &self,
        shape: KvShape,
        len: usize,
    ) -> impl Iterator<Item = (usize, BlockId, usize)> {
        let size = shape.block_size();
        // Not by looking whether each is missing: a sequence may be as long as somebody has claimed.
        let (hole, blocks) = (self.hole.range(), shape.blocks_for(len));
        let kept = (0..hole.start.min(blocks)).chain(hole.end..blocks);
        kept.zip(&self.table)
            .map(move |(index, &block)| (index, block, size.min(len - index * size)))
    }

    /// What is missing from it.
    pub(crate) fn hole(&self) -> Hole {
        self.hole
    }

    /// It must hold nothing, and come back into its own store.
    pub(crate) fn check_blank<E: Element>(
        &self,
        store: &PagedKvStore<E>,
    ) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        if self.len != 0 || !self.table.is_empty() {
            return Err(PagedKvError::NotEmpty { len: self.len, blocks: self.table.len() });
        }
        Ok(())
    }

    /// Takes what a page needs, as room, and writes it there. So many blocks are free.
    pub(crate) fn load_page<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        page: &Page<'_>,
        hole: Hole,
    ) {
        let shape = store.shape();
        let last = page.index * page.block_size + page.rows - 1;
        let blocks = last / shape.block_size() + 1;
        // A page that ends in the hole needs what is in front of it.
        let entries = match hole.range() {
            gone if gone.contains(&(blocks - 1)) => gone.start,
            _ => hole.entries(blocks),
        };
        self.take_up_to(store, entries);
        store.load_page(page, &self.table, hole);
    }

    /// Takes what the sequence needs up to its block `index`, which is not in the hole, as room, and says
    /// where that block is. So many are free.
    pub(crate) fn room_for<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        hole: Hole,
        index: usize,
    ) -> BlockId {
        let entry = hole.entry(index);
        self.take_up_to(store, entry + 1);
        self.table[entry]
    }

    fn take_up_to<E: Element>(&mut self, store: &mut PagedKvStore<E>, entries: usize) {
        while self.table.len() < entries {
            self.store = Some(store.id());
            self.table.push(store.take());
        }
    }

    /// What was taken as room holds the first `len` positions from now on, but for the hole.
    pub(crate) fn fill(&mut self, len: usize, hole: Hole) {
        debug_assert!(self.len == 0 && self.hole == Hole::NONE && self.filled == 0);
        (self.len, self.hole) = (len, hole);
    }

    /// Gives back what was taken, and is bound to what it was bound to.
    pub(crate) fn forget<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        bound: Option<StoreId>,
    ) {
        self.shorten(store.shape(), 0, |block| store.give_back(block));
        self.store = bound;
    }
}

impl KvWindow {
    /// What a sequence that was `saved` with this hole, under `before`, is without when it comes back
    /// under `window` in blocks of another size.
    ///
    /// Under the window that it had it keeps what it kept, so that as much of it can be taken back;
    /// under another one, what that needs.
    pub(crate) fn hole_of_saved(
        window: Option<KvWindow>,
        shape: KvShape,
        len: usize,
        before: Option<KvWindow>,
        missing: Range<usize>,
    ) -> Hole {
        let Some(planned) = window.map(|window| window.hole(shape, len)) else { return Hole::NONE };
        if window != before {
            return planned;
        }
        let range = planned.range();
        let end = missing.end.div_ceil(shape.block_size()).min(range.end);
        Hole::new(range.start, end.saturating_sub(range.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    /// A saved sequence may claim any length, if a window has passed nearly all of it.
    #[test]
    fn pages_are_told_by_what_is_held_and_not_by_what_is_missing() {
        let shape = KvShape::square(16, 1, 1).unwrap();
        let mut cache = PagedKvCache::new();
        cache.table = (0..5).map(BlockId::from_raw).collect();
        for gone in [0, 1, usize::MAX / 64] {
            cache.hole = Hole::new(2, gone);
            let end = 2 + gone;
            let pages: Vec<_> = cache.pages(shape, (end + 3) * 16 - 5).collect();
            let places = [0, 1, end, end + 1, end + 2].into_iter().zip([16, 16, 16, 16, 11]);
            let table = cache.table.iter().copied().zip(places);
            let want: Vec<_> = table.map(|(block, (index, rows))| (index, block, rows)).collect();
            assert_eq!(pages, want, "{gone} missing");
        }
    }
}
