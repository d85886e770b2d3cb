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

use super::{PagedKvCache, hold_all};
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
}

impl Lack {
    /// Blocks to take.
    pub(crate) fn blocks(self) -> usize {
        self.more + usize::from(self.copy)
    }
}

impl PagedKvCache {
    /// What the table lacks before the positions up to `end` can be written.
    ///
    /// Visits the blocks that are to be written, and no others.
    pub(crate) fn lack(&self, blocks: &Blocks, shape: KvShape, end: usize) -> Lack {
        let had = self.table.len();
        if end <= self.len {
            return Lack { keep: had, more: 0, copy: false };
        }
        let last = shape.blocks_for(end);
        let filled = shape.blocks_for(self.len);
        let mut room = filled..last.min(had);
        let keep = room.find(|&index| !self.may_write(blocks, index)).unwrap_or(had);
        let begun = self.len / shape.block_size() < filled;
        let copy = begun && !self.may_write(blocks, filled - 1);
        Lack { keep, more: last.saturating_sub(keep), copy }
    }

    /// Sees to it that taking what it lacks allocates nothing.
    pub(crate) fn prepare(&mut self, lack: Lack) {
        self.table.reserve((lack.keep + lack.more).saturating_sub(self.table.len()));
    }

    /// Takes what it lacks; gives the block that the one being filled is to be copied into.
    ///
    /// Called by the one taker, who has seen that so many are free.
    pub(crate) fn take_room(&mut self, blocks: &Blocks, lack: Lack) -> Option<BlockId> {
        let take = || blocks.take().expect("free blocks were counted by the one taker");
        if lack.more > 0 {
            self.give_back_from(blocks, lack.keep);
            self.table.extend((0..lack.more).map(|_| take()));
        }
        lack.copy.then(take)
    }

    /// Copies the block that is being filled into `spare`, which takes its place.
    ///
    /// Where the others have let go of it in the meantime it stays, and `spare` goes back.
    pub(crate) fn move_tail<E: Element>(&mut self, store: &mut PagedKvStore<E>, spare: BlockId) {
        let index = self.len / store.block_size();
        if self.may_write(store.blocks(), index) {
            store.give_back(spare);
            return;
        }
        let shared = core::mem::replace(&mut self.table[index], spare);
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
        let end = self.len.checked_add(n).ok_or(PagedKvError::TooLong)?;
        let have = self.writable(store.blocks(), shape, self.len, n);
        if have < n {
            return Err(PagedKvError::NotReserved { need: n, have });
        }
        rows::by_block(shape, self.len, n, k, v, |index, row, k, v| {
            // Taken, or rolled back, without the store.
            store.forget_rows(self.table[index], row);
            store.write(self.table[index], row, k, v);
        });
        self.len = end;
        Ok(())
    }

    /// How many positions behind the first `from` may be written, of `n`.
    pub(crate) fn writable(&self, blocks: &Blocks, shape: KvShape, from: usize, n: usize) -> usize {
        let size = shape.block_size();
        let mut indices = from / size..shape.blocks_for(from + n);
        let ours = |index| index < self.table.len() && self.may_write(blocks, index);
        match indices.find(|&index| !ours(index)) {
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
                let place = |position| (self.table[position / size], position % size);
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
        self.give_back_from(blocks, shape.blocks_for(len));
        self.filled = self.filled.min(self.table.len());
    }

    /// A table of the first `len` positions, in the same blocks, each of which it holds as well.
    pub(crate) fn fork_at(
        &self,
        blocks: &Blocks,
        shape: KvShape,
        len: usize,
    ) -> Result<PagedKvCache, PagedKvError> {
        let held = &self.table[..shape.blocks_for(len)];
        hold_all(blocks, held)?;
        Ok(PagedKvCache { store: self.store, table: held.to_vec(), len, filled: held.len() })
    }

    /// Makes this table, which is empty, hold these blocks: the first `len` positions are there, and
    /// the first `filled` blocks may have rows of others behind those.
    pub(crate) fn begin_with(
        &mut self,
        blocks: &Blocks,
        held: impl Iterator<Item = BlockId>,
        filled: usize,
        len: usize,
    ) -> Result<(), PagedKvError> {
        debug_assert!(self.table.is_empty() && self.len == 0);
        self.table.extend(held);
        if let Err(refused) = hold_all(blocks, &self.table) {
            self.table.clear();
            return Err(refused);
        }
        self.len = len;
        self.filled = filled;
        Ok(())
    }

    fn give_back_from(&mut self, blocks: &Blocks, index: usize) {
        for block in self.table.drain(index.min(self.table.len())..) {
            let released = blocks.drop_table(block);
            debug_assert!(released.is_ok(), "a table holds a count on each of its blocks");
        }
    }
}
