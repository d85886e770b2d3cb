//! A table whose blocks come and go without its store: what a sequence over all layers is made of.
//!
//! A bare sequence takes blocks in the middle of a push, under the `&mut` of its store. A request
//! over many layers must not: it would hold half of what it needs when the third layer has run
//! out. So here a step is cut in two. What it *lacks* is asked first, in every layer, and taken
//! ahead by whoever may take (`share` says who); after that rows are written into room that is
//! there, and nothing can run out.
//!
//! Whether a block is this table's alone can change at any time, because groups are retained
//! without the store. So it is asked once, the answer is the [`Lack`], and what was counted is what
//! is taken. A write asks again, and is refused where the room has become somebody else's.

use super::window::Hole;
use super::{PagedKvCache, give_back};
use crate::element::Element;
use crate::error::PagedKvError;
use crate::id::BlockId;
use crate::shape::KvShape;
use crate::storage::blocks::Blocks;
use crate::storage::paged::PagedKvStore;
use crate::storage::rows;

/// What a table lacks before positions can be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lack {
    /// Entries of the table that stay. Behind them is room that others hold as well.
    keep: usize,
    /// Blocks to take behind those.
    more: usize,
    /// Whether the block that is being filled has to be copied before it is written.
    copy: bool,
    /// What the window has passed, which is given back before anything is taken ...
    passed: Hole,
    /// ... and the blocks that become free by that.
    gains: usize,
}

impl Lack {
    /// Room for an empty table.
    pub(crate) fn room(blocks: usize) -> Self {
        Lack { more: blocks, ..Lack::default() }
    }

    /// Blocks to take.
    pub(crate) fn blocks(self) -> usize {
        self.more + usize::from(self.copy)
    }

    /// Whether blocks become free on the way.
    pub(crate) fn gives_back(self) -> bool {
        self.gains > 0
    }

    /// Blocks that have to be free for that.
    pub(crate) fn free(self) -> usize {
        self.blocks().saturating_sub(self.gains)
    }
}

impl PagedKvCache {
    /// What the table lacks before the positions up to `end` can be written, of which those before
    /// `from` are there to stay.
    ///
    /// Visits the blocks that are to be written, those that the window has passed, and no others.
    pub(crate) fn lack(&self, blocks: &Blocks, shape: KvShape, from: usize, end: usize) -> Lack {
        let had = self.table.len();
        if end <= self.len {
            return Lack::default();
        }
        let last = self.hole.entries(shape.blocks_for(end));
        let filled = self.hole.entries(shape.blocks_for(self.len));
        let mut room = filled..last.min(had);
        let keep = room.find(|&entry| !self.may_write(blocks, entry)).unwrap_or(had);
        let begun = !self.len.is_multiple_of(shape.block_size());
        let copy = begun && !self.may_write(blocks, filled - 1);
        let more = last.saturating_sub(keep);
        if more == 0 && !copy {
            return Lack::default();
        }
        let passed = self.passed(shape, from);
        Lack { keep, more, copy, passed, gains: self.gains(blocks, passed) }
    }

    /// Sees to it that taking what it lacks allocates nothing.
    pub(crate) fn prepare(&mut self, lack: Lack) {
        self.table.reserve((lack.keep + lack.more).saturating_sub(self.table.len()));
    }

    /// Gives back what the window has passed and takes what is lacking; gives the block that the one
    /// being filled is to be copied into.
    ///
    /// Called by the one taker, who has seen that so many are free.
    pub(crate) fn take_room(&mut self, blocks: &Blocks, lack: Lack) -> Option<BlockId> {
        if lack.blocks() == 0 {
            return None;
        }
        let gone = self.widen(lack.passed, |block| give_back(blocks, block));
        let take = || blocks.take().expect("free blocks were counted by the one taker");
        if lack.more > 0 {
            self.give_back_from(blocks, lack.keep - gone);
            self.table.extend((0..lack.more).map(|_| take()));
        }
        lack.copy.then(take)
    }

    /// Copies the block that is being filled into `spare`, which takes its place.
    ///
    /// Where the others have let go of it in the meantime it stays, and `spare` goes back.
    pub(crate) fn move_tail<E: Element>(&mut self, store: &mut PagedKvStore<E>, spare: BlockId) {
        let entry = self.hole.entry(self.len / store.block_size());
        if self.may_write(store.blocks(), entry) {
            store.give_back(spare);
            return;
        }
        let shared = core::mem::replace(&mut self.table[entry], spare);
        store.copy_block(shared, spare);
        store.give_back(shared);
    }

    /// Writes rows, whose store and lengths have been checked, into room that is there.
    pub(crate) fn append_into_room<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        if n == 0 {
            return Ok(());
        }
        let shape = store.shape();
        let end = crate::storage::grown(self.len, n).ok_or(PagedKvError::TooLong)?;
        let have = self.writable(store.blocks(), shape, self.len, n);
        if have < n {
            return Err(PagedKvError::NotReserved { need: n, have });
        }
        rows::by_block(shape, self.len, n, k, v, |index, row, k, v| {
            let block = self.table[self.hole.entry(index)];
            // Taken, or rolled back, without the store.
            store.forget_rows(block, row);
            store.write(block, row, k, v);
        });
        self.len = end;
        Ok(())
    }

    /// How many positions behind the first `from` may be written, of `n`.
    pub(crate) fn writable(&self, blocks: &Blocks, shape: KvShape, from: usize, n: usize) -> usize {
        let size = shape.block_size();
        let mut indices = from / size..shape.blocks_for(from + n);
        let ours = |entry| entry < self.table.len() && self.may_write(blocks, entry);
        match indices.find(|&index| !ours(self.hole.entry(index))) {
            Some(index) => (index * size).saturating_sub(from),
            None => n,
        }
    }

    /// Of what was written from `from` on, keeps the positions `from + path[i]`, moved together, and
    /// takes the rest back. The path ascends, and its positions may be written.
    pub(crate) fn keep_path<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        from: usize,
        path: &[usize],
    ) {
        let size = store.block_size();
        for (to, &row) in (from..).zip(path) {
            let row = from + row;
            if row != to {
                let block = |position: usize| self.table[self.hole.entry(position / size)];
                let place = |position| (block(position), position % size);
                store.copy_position(place(row), place(to));
            }
        }
        self.rewind(from + path.len());
    }

    /// Takes back what was written from `len` on. Its blocks stay, as room.
    pub(crate) fn rewind(&mut self, len: usize) {
        debug_assert!(len <= self.len, "a step ends where it began, or behind that");
        self.len = self.len.min(len);
    }

    /// Gives back every block that the first `len` positions do not need, and what is past them.
    pub(crate) fn cut_to(&mut self, blocks: &Blocks, shape: KvShape, len: usize) {
        self.rewind(len);
        self.shorten(shape, len, |block| give_back(blocks, block));
    }

    fn give_back_from(&mut self, blocks: &Blocks, entry: usize) {
        let gone = self.table.drain(entry.min(self.table.len())..);
        gone.for_each(|block| give_back(blocks, block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::KvWindow;

    /// Room that somebody else's group has come to hold is given back for room of one's own, from
    /// behind what the window has passed in the same step.
    #[test]
    fn room_that_may_not_be_written_is_changed_while_the_window_moves() {
        let mut store = PagedKvStore::new(64, 40, 1, 1);
        let mut cache = PagedKvCache::with_window(KvWindow::last(64));
        cache.append(&mut store, &[1.0; 256], &[1.0; 256], 256).unwrap();
        let kept = cache.table[3];
        let theirs = store.blocks().take_for_group().unwrap();
        store.blocks().add_table(theirs).unwrap();
        store.blocks().mark_group_shared(theirs);
        cache.table.push(theirs);

        let lack = cache.lack(store.blocks(), store.shape(), 256, 24 * 64);
        // The next query sees from position 193 on, which is in block 3: blocks 0 to 2 are passed.
        assert_eq!((lack.keep, lack.more, lack.copy, lack.gains), (4, 20, false, 3));
        assert_eq!((lack.blocks(), lack.free()), (20, 17));
        cache.prepare(lack);
        let capacity = cache.table.capacity();
        assert!((24..=60).contains(&capacity), "{capacity} entries for 24");
        assert_eq!(cache.take_room(store.blocks(), lack), None);
        assert_eq!(cache.table.capacity(), capacity);
        assert_eq!((cache.table.len(), cache.table[0], cache.freed_blocks()), (21, kept, 0..3));
        assert_eq!(store.blocks().holders(theirs), 1, "the group's own");
        assert_eq!(store.blocks().drop_group(theirs), Ok(crate::storage::blocks::Released::Freed));
        assert_eq!(store.check_invariants([cache.block_table()]), Ok(()));
    }
}
