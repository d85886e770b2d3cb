//! One sequence in a shared store: a table of blocks and a length.

mod read;
pub(crate) mod saved;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
pub(crate) mod step;
pub(crate) mod window;

use alloc::vec::Vec;

use super::blocks::{Blocks, Refused};
use super::paged::PagedKvStore;
use super::rows;
use super::view::KvView;
use crate::element::Element;
use crate::error::{PagedKvError, WrongStore};
use crate::id::{BlockId, StoreId};
use crate::shape::KvShape;
use window::{Hole, KvWindow};

/// One sequence's view into a shared [`PagedKvStore`]: which blocks its positions live in, in
/// order, and how many positions have been written.
///
/// It holds no numbers itself; every read and write goes through the store. It remembers which
/// store filled it, and any other one, even of the same shape, is refused as
/// [`PagedKvError::WrongStore`]: reading a block table against another store shows up as another
/// conversation's tokens rather than as a crash.
///
/// # Ownership
///
/// Every block counts its holders. [`fork`](Self::fork) and [`adopt`](Self::adopt) add counts,
/// [`truncate`](Self::truncate) and [`release`](Self::release) drop them, and a block whose last
/// count is dropped is free. For that reason the type is not `Clone`.
///
/// A write never changes what somebody else sees. A block is written in place only while no other
/// table names it and no page group holds it, with one exception: a block that was adopted without
/// rows, as room to grow into, is written while its group holds it too, as long as that group has
/// never had another holder. The first write into any other block takes a new one and copies the old.
///
/// **Dropping a `PagedKvCache` does not give its blocks back.** It has no way to reach the store,
/// so they stay counted, and the store is smaller by that many blocks for ever. Call
/// [`release`](Self::release). The shared layer has a sequence that does so by itself when it is
/// dropped.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.append(&mut store, &[1.0, 2.0, 3.0, 4.0], &[0.0; 4], 2)?;
///
/// // Both see the same two positions; the one that writes next gets a block of its own.
/// let mut other = cache.fork(&mut store)?;
/// other.push(&mut store, &[5.0, 6.0], &[0.0; 2])?;
/// assert_ne!(cache.block_table(), other.block_table());
///
/// let mut row = [0.0; 2];
/// other.copy_k_row(&store, 1, 0, &mut row)?;
/// assert_eq!(row, [3.0, 4.0]);
/// # cache.release(&mut store)?;
/// # other.release(&mut store)?;
/// # assert_eq!(store.free_block_count(), 4);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Debug, Default)]
pub struct PagedKvCache {
    store: Option<StoreId>,
    table: Vec<BlockId>,
    len: usize,
    /// The first blocks of the table, which others filled: by adoption or before a fork.
    filled: usize,
    /// What it keeps, where that is not everything.
    window: Option<KvWindow>,
    /// The blocks that are gone because the window has passed them.
    hole: Hole,
}

impl PagedKvCache {
    /// An empty sequence, bound to no store. Allocates nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// assert!(cache.is_empty() && cache.store_id().is_none());
    /// cache.push(&mut store, &[0.5; 2], &[0.5; 2])?;
    /// assert_eq!(cache.store_id(), Some(store.id())); // it belongs to this store from now on
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub const fn new() -> Self {
        PagedKvCache {
            store: None,
            table: Vec::new(),
            len: 0,
            filled: 0,
            window: None,
            hole: Hole::NONE,
        }
    }

    /// Writes the next position: `k` is `[n_kv_heads][k_width]`, `v` is `[n_kv_heads][v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(2, 4, 1, 2); // blocks of two positions
    /// let mut cache = PagedKvCache::new();
    /// for position in 0..3 {
    ///     cache.push(&mut store, &[position as f32; 2], &[0.5; 2])?;
    /// }
    /// assert_eq!((cache.seq_len(), cache.block_table().len()), (3, 2));
    /// assert_eq!(store.free_block_count(), 2);
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::Exhausted`] where a block is needed and none is free,
    /// [`PagedKvError::WrongStore`] for a store that did not fill this sequence. Nothing has
    /// changed then.
    ///
    /// # Panics
    ///
    /// If a row has the wrong length, before anything is changed. [`try_push`](Self::try_push)
    /// returns that as an error.
    ///
    /// # Cost
    ///
    /// Takes a block at each block boundary, and one for the first write into a block that others
    /// hold, which is copied. Allocates nothing, except that the table of ids may grow when a
    /// block is taken; [`reserve`](Self::reserve) does both ahead of time.
    #[track_caller]
    pub fn push<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), PagedKvError> {
        self.append(store, k, v, 1)
    }

    /// As [`push`](Self::push), with rows of the wrong length as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::{PagedKvError, Side};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// // The values of a wider model.
    /// let refused = cache.try_push(&mut store, &[0.5; 2], &[0.5; 4]);
    /// assert_eq!(refused, Err(PagedKvError::RowLength { side: Side::Value, need: 2, have: 4 }));
    /// assert_eq!(store.free_block_count(), 4);
    /// ```
    ///
    /// # Errors
    ///
    /// As `push`, and [`PagedKvError::RowLength`].
    pub fn try_push<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), PagedKvError> {
        self.try_append(store, k, v, 1)
    }

    /// Writes the next `n` positions, all or none: `k` is `[n][n_kv_heads][k_width]`, `v` is
    /// `[n][n_kv_heads][v_width]`.
    ///
    /// The blocks for all of them are taken before the first row is written.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[0.5; 20 * 2], &[2.0; 20 * 2], 20)?; // a chunk of a prompt
    /// assert_eq!((cache.seq_len(), cache.block_table().len()), (20, 2));
    /// // 45 more need three blocks, and two are free: none of them is written.
    /// assert!(cache.append(&mut store, &[0.5; 45 * 2], &[2.0; 45 * 2], 45).is_err());
    /// assert_eq!((cache.seq_len(), store.free_block_count()), (20, 2));
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    ///
    /// # Panics
    ///
    /// If the rows have the wrong length, before anything is changed.
    #[track_caller]
    pub fn append<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        // The store first: a row that fits the right store is no mistake of the rows.
        self.check_store(store.id())?;
        if let Err(wrong) = rows::check(store.shape(), n, k, v) {
            wrong.panic();
        }
        self.append_checked(store, k, v, n)
    }

    /// As [`append`](Self::append), with rows of the wrong length as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::{PagedKvError, Side};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// // Keys of three positions, values of two.
    /// let refused = cache.try_append(&mut store, &[0.5; 6], &[0.5; 4], 2);
    /// assert_eq!(refused, Err(PagedKvError::RowLength { side: Side::Key, need: 4, have: 6 }));
    /// assert!(cache.is_empty());
    /// ```
    ///
    /// # Errors
    ///
    /// As `append`, and [`PagedKvError::RowLength`].
    pub fn try_append<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        rows::check(store.shape(), n, k, v)?;
        self.append_checked(store, k, v, n)
    }

    /// Makes room for `n` more positions, all or nothing.
    ///
    /// Until something else is done with the blocks, the next `n` pushes take no block and
    /// allocate nothing. What undoes that: [`truncate`](Self::truncate) gives reserved blocks
    /// back, and [`fork`](Self::fork) shares the block that is being filled, so that the next
    /// write into it takes one.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.reserve(&mut store, 40)?; // before the step: three blocks
    /// assert_eq!((cache.seq_len(), store.free_block_count()), (0, 1));
    /// cache.append(&mut store, &[0.5; 80], &[0.5; 80], 40)?; // takes none
    /// assert_eq!(store.free_block_count(), 1);
    /// assert!(cache.reserve(&mut store, 25).is_err()); // 65 positions need five
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push), and [`PagedKvError::TooLong`] where the length would not fit an
    /// index.
    pub fn reserve<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        n: usize,
    ) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        self.make_room(store, n)
    }

    /// Makes this empty sequence the holder of blocks that others filled: the first `len`
    /// positions are theirs.
    ///
    /// This is the door for the blocks of a page group or of a cached prefix. Each block gets one
    /// more holder, and keeps it past the group's last release; [`release`](Self::release) drops
    /// exactly these counts. Blocks that come with rows stay as they are while anybody else holds
    /// them (a prefix that ends inside a block costs one more: its first write copies it); blocks
    /// past `len` are room to grow into. What a [window](Self::with_window) has passed at `len` is
    /// not held. All or nothing.
    ///
    /// The layer and `len` are taken on trust: an id read from another layer, or more positions
    /// than were written, is whatever rows lie there. Ids do not expire as handles do: between
    /// reading them and this call the caller holds the group, or a table that names them, or they
    /// may be somebody else's by then.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut first = PagedKvCache::new();
    /// first.append(&mut store, &[0.5; 64], &[0.5; 64], 32)?;
    ///
    /// // Another prompt begins with the same 16 tokens.
    /// let mut second = PagedKvCache::new();
    /// second.adopt(&mut store, &first.block_table()[..1], 16)?;
    /// second.push(&mut store, &[1.0; 2], &[1.0; 2])?; // into a block of its own
    /// first.release(&mut store)?; // the shared block stays
    /// assert_eq!((second.seq_len(), store.free_block_count()), (17, 2));
    /// # second.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::NotEmpty`] where the sequence has positions or blocks,
    /// [`PagedKvError::WrongStore`] where it is bound to another store,
    /// [`PagedKvError::BlockCount`] for fewer blocks than `len` positions need,
    /// [`PagedKvError::BlockOutOfRange`] for an id the store does not have,
    /// [`PagedKvError::BlockTwice`] for an id named twice, [`PagedKvError::BlockFree`] for a block
    /// nobody holds, [`PagedKvError::TooManyHolders`] where the count is full.
    ///
    /// # Cost
    ///
    /// One allocation for the table; sorts the ids once.
    pub fn adopt<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        blocks: &[BlockId],
        len: usize,
    ) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        if self.len != 0 || !self.table.is_empty() {
            return Err(PagedKvError::NotEmpty { len: self.len, blocks: self.table.len() });
        }
        let need = store.shape().blocks_for(len);
        if blocks.len() < need {
            return Err(PagedKvError::BlockCount { need, have: blocks.len() });
        }
        let total = store.total_blocks();
        if let Some(&block) = blocks.iter().find(|block| block.index() >= total) {
            return Err(PagedKvError::BlockOutOfRange { block, total });
        }
        if let Some(block) = self.named_twice(blocks) {
            return Err(PagedKvError::BlockTwice { block });
        }
        self.begin_with(store.blocks(), store.shape(), blocks.iter().copied(), need, len)?;
        if !blocks.is_empty() {
            self.store = Some(store.id());
        }
        for index in self.filled..self.table.len() {
            if self.may_write(store.blocks(), index) {
                store.forget_rows(self.table[index], 0);
            }
        }
        Ok(())
    }

    /// Takes back all positions from `len` on, and gives back every block that the rest does not
    /// need, reserved ones too.
    ///
    /// This is the rollback of rejected draft tokens. The sequence stays bound to its store.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[0.5; 36], &[0.5; 36], 18)?;
    /// cache.truncate(&mut store, 15)?; // three drafted tokens were rejected
    /// assert_eq!((cache.seq_len(), store.free_block_count()), (15, 3));
    /// assert!(cache.truncate(&mut store, 16).is_err());
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::PositionOutOfRange`] where the sequence is shorter than `len`: a rollback
    /// by the wrong count is a mistake and shall not pass for a short one.
    /// [`PagedKvError::PositionFreed`] where the window of the next position begins before the
    /// oldest one that was kept. [`PagedKvError::WrongStore`]. Nothing has changed then.
    pub fn truncate<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        len: usize,
    ) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        if len > self.len {
            return Err(PagedKvError::PositionOutOfRange { position: len, len: self.len });
        }
        self.check_cut(store.shape(), len)?;
        self.shorten(store.shape(), len, |block| store.give_back(block));
        let row = len % store.block_size();
        if let Some(tail) = self.table.len().checked_sub(1)
            && row != 0
            && self.may_write(store.blocks(), tail)
        {
            store.forget_rows(self.table[tail], row);
        }
        Ok(())
    }

    /// A second sequence with the same positions, in the same blocks.
    ///
    /// Nothing is copied: each block that holds positions gets one more holder. Whichever of the
    /// two writes first into the last, half-filled block takes a block of its own for it. Reserved
    /// blocks stay with this sequence.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 8, 1, 2);
    /// let mut prompt = PagedKvCache::new();
    /// prompt.append(&mut store, &[0.5; 40], &[0.5; 40], 20)?; // two blocks
    /// let mut beams = [prompt.fork(&mut store)?, prompt.fork(&mut store)?];
    /// assert_eq!(store.free_block_count(), 6);
    /// for beam in &mut beams {
    ///     beam.push(&mut store, &[1.0; 2], &[1.0; 2])?; // copies the second block, not the first
    /// }
    /// assert_eq!(store.free_block_count(), 4);
    /// # prompt.release(&mut store)?;
    /// # beams.iter_mut().try_for_each(|beam| beam.release(&mut store))?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::WrongStore`]; [`PagedKvError::TooManyHolders`] where a count is full.
    ///
    /// # Cost
    ///
    /// One allocation for the table; one atomic step for each block.
    pub fn fork<E: Element>(&self, store: &mut PagedKvStore<E>) -> Result<Self, PagedKvError> {
        self.check_store(store.id())?;
        let mut child = self.fork_at(store.blocks(), store.shape(), self.len)?;
        if child.table.is_empty() {
            child.store = None;
        }
        Ok(child)
    }

    /// Gives every block back; the sequence is empty afterwards and bound to no store.
    ///
    /// Blocks that others hold too stay with them.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let [mut store, mut other] = [(); 2].map(|()| PagedKvStore::new(16, 4, 1, 2));
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[0.5; 40], &[0.5; 40], 20)?;
    /// assert!(cache.release(&mut other).is_err()); // they are not this one's
    /// cache.release(&mut store)?;
    /// assert_eq!(store.free_block_count(), 4);
    /// cache.push(&mut other, &[0.5; 2], &[0.5; 2])?; // and begins anew, wherever it likes
    /// # cache.release(&mut other)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::WrongStore`], and nothing is lost: release it to the right one.
    ///
    /// # Cost
    ///
    /// One atomic step for each block. Keeps the table's memory for the next use.
    pub fn release<E: Element>(&mut self, store: &mut PagedKvStore<E>) -> Result<(), PagedKvError> {
        self.check_store(store.id())?;
        self.shorten(store.shape(), 0, |block| store.give_back(block));
        self.store = None;
        Ok(())
    }

    /// Binds this sequence, which holds nothing, to a store before its first push.
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only the shared layer knows the store ahead")
    )]
    pub(crate) fn bind(&mut self, store: StoreId) {
        debug_assert!(self.table.is_empty(), "what holds blocks is bound already");
        self.store = Some(store);
    }

    /// As [`release`](Self::release), with the free list alone: needs no `&mut` of the store and
    /// so no lock.
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only the shared layer holds a free list by itself")
    )]
    pub(crate) fn release_to(
        &mut self,
        store: StoreId,
        blocks: &Blocks,
        shape: KvShape,
    ) -> Result<(), PagedKvError> {
        self.check_store(store)?;
        self.shorten(shape, 0, |block| give_back(blocks, block));
        self.store = None;
        Ok(())
    }

    /// Positions written.
    pub fn seq_len(&self) -> usize {
        self.len
    }

    /// Whether no position has been written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The blocks this sequence holds, in the order of its positions; reserved ones come last, and
    /// [those that a window has passed](Self::freed_blocks) are missing.
    pub fn block_table(&self) -> &[BlockId] {
        &self.table
    }

    /// The store that this sequence belongs to: the one that filled it, or, in a shared sequence,
    /// its layer's from the start. `None` while any store will do.
    pub fn store_id(&self) -> Option<StoreId> {
        self.store
    }

    /// The sequence's pages, for attention. An empty sequence bound to no store views any.
    pub(crate) fn view<'a, E: Element>(
        &'a self,
        store: &'a PagedKvStore<E>,
    ) -> Result<KvView<'a, E>, WrongStore> {
        self.check_store(store.id())?;
        Ok(self.view_of(store))
    }

    /// As [`view`](Self::view), of the store that this is known to be in.
    #[inline(always)]
    pub(crate) fn view_of<'a, E: Element>(&'a self, store: &'a PagedKvStore<E>) -> KvView<'a, E> {
        store.view(&self.table, self.hole, self.len)
    }

    pub(crate) fn check_store(&self, have: StoreId) -> Result<(), WrongStore> {
        match self.store {
            Some(need) if need != have => Err(WrongStore { need, have }),
            _ => Ok(()),
        }
    }

    /// Sorts a copy in the memory that becomes the table anyway.
    fn named_twice(&mut self, blocks: &[BlockId]) -> Option<BlockId> {
        debug_assert!(self.table.is_empty());
        self.table.extend_from_slice(blocks);
        self.table.sort_unstable();
        let twice = self.table.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        self.table.clear();
        twice
    }

    fn append_checked<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        self.make_room(store, n)?;
        rows::by_block(store.shape(), self.len, n, k, v, |index, row, k, v| {
            store.write(self.table[self.hole.entry(index)], row, k, v);
        });
        self.len += n;
        Ok(())
    }

    /// Sees to it that the next `n` positions have blocks, and that nobody else holds them.
    ///
    /// Everything that can fail comes first. Whether a block is ours alone can change under our
    /// hands, because groups are retained and released without the store. So it is asked once for
    /// each block, and the answers are noted by index behind the table: a group retained after
    /// that is a group retained after the write. (Asked twice, a block that became shared in
    /// between took the copy that another one had been counted for, and that one was overwritten.)
    fn make_room<E: Element>(
        &mut self,
        store: &mut PagedKvStore<E>,
        n: usize,
    ) -> Result<(), PagedKvError> {
        if n == 0 {
            return Ok(());
        }
        let shape = store.shape();
        let end = crate::storage::grown(self.len, n).ok_or(PagedKvError::TooLong)?;
        let mut had = self.table.len();
        // As entries of the table: what is written is behind the hole.
        let first = self.len / shape.block_size() - self.hole.blocks();
        let last = shape.blocks_for(end) - self.hole.blocks();
        let more = last.saturating_sub(had);
        for index in first.min(had)..last.min(had) {
            if !self.may_write(store.blocks(), index) {
                self.table.push(BlockId::from_raw(index as u32));
            }
        }
        let copies = self.table.len() - had;
        if copies + more == 0 {
            return Ok(());
        }
        let passed = self.passed(shape, self.len);
        let gains = self.gains(store.blocks(), passed);
        if let Err(exhausted) = store.check_free((copies + more).saturating_sub(gains)) {
            self.table.truncate(had);
            return Err(exhausted.into());
        }
        let gone = self.widen(passed, |block| store.give_back(block));
        had -= gone;
        for note in had..had + copies {
            let index = self.table[note].index() - gone;
            let (old, new) = (self.table[index], store.take());
            // Blocks past the one that is being filled hold nothing of this sequence.
            if (index + self.hole.blocks()) * shape.block_size() < self.len {
                store.copy_block(old, new);
            }
            self.table[index] = new;
            store.give_back(old);
        }
        self.table.truncate(had);
        self.table.reserve(more);
        for _ in 0..more {
            let block = store.take();
            self.table.push(block);
        }
        self.store = Some(store.id());
        Ok(())
    }

    /// Makes this table, which is empty, hold these blocks: the first `len` positions are there,
    /// and the first `filled` blocks may have rows of others behind those. What the window has
    /// passed is left out.
    pub(crate) fn begin_with(
        &mut self,
        counts: &Blocks,
        shape: KvShape,
        blocks: impl Iterator<Item = BlockId>,
        filled: usize,
        len: usize,
    ) -> Result<(), PagedKvError> {
        debug_assert!(self.table.is_empty() && self.len == 0);
        let hole = self.passed(shape, len);
        let kept = blocks.enumerate().filter(|(index, _)| !hole.range().contains(index));
        self.table.extend(kept.map(|(_, block)| block));
        if let Err(refused) = hold_all(counts, &self.table) {
            self.table.clear();
            return Err(refused);
        }
        (self.len, self.filled, self.hole) = (len, filled - hole.blocks(), hole);
        Ok(())
    }

    /// A table of the first `len` positions, in the same blocks, each of which it holds as well.
    pub(crate) fn fork_at(
        &self,
        blocks: &Blocks,
        shape: KvShape,
        len: usize,
    ) -> Result<PagedKvCache, PagedKvError> {
        let held = &self.table[..self.hole.entries(shape.blocks_for(len))];
        hold_all(blocks, held)?;
        let (table, filled) = (held.to_vec(), held.len());
        Ok(PagedKvCache { table, len, filled, ..*self })
    }

    /// Is `len` positions long, and gives back every block that those do not need.
    pub(crate) fn shorten(&mut self, shape: KvShape, len: usize, give_back: impl FnMut(BlockId)) {
        let blocks = shape.blocks_for(len);
        self.len = len;
        self.table.drain(self.hole.entries(blocks).min(self.table.len())..).for_each(give_back);
        self.filled = self.filled.min(self.table.len());
        if blocks <= self.hole.range().start {
            self.hole = Hole::NONE;
        }
    }

    /// Whether a write into the table's `index`-th block is seen by nobody else.
    ///
    /// No other table may name it. A group may hold it where the block came without rows, as room
    /// to grow into: then it is this sequence's own group, as long as nobody else has ever retained it.
    /// A block that came with rows is somebody's prefix, and stays as it is while a group holds it.
    fn may_write(&self, blocks: &Blocks, index: usize) -> bool {
        let block = self.table[index];
        if index < self.filled { blocks.sole_holder(block) } else { blocks.sole_table(block) }
    }
}

/// One count less on a block of a table.
fn give_back(counts: &Blocks, block: BlockId) {
    let released = counts.drop_table(block);
    debug_assert!(released.is_ok(), "a table holds a count on each of its blocks");
}

/// One count more on each of these blocks, or on none.
fn hold_all(counts: &Blocks, blocks: &[BlockId]) -> Result<(), PagedKvError> {
    for (index, &block) in blocks.iter().enumerate() {
        if let Err(refused) = counts.add_table(block) {
            for &held in &blocks[..index] {
                let dropped = counts.drop_table(held);
                debug_assert!(dropped.is_ok(), "this count was added a moment ago");
            }
            return Err(match refused {
                Refused::NotHeld => PagedKvError::BlockFree { block },
                Refused::TooMany => PagedKvError::TooManyHolders { block },
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Miscount;

    #[test]
    fn an_empty_sequence_views_any_store_and_a_filled_one_its_own() {
        let mut store = PagedKvStore::new(2, 4, 1, 1);
        let other = PagedKvStore::new(2, 4, 1, 1);
        let mut cache = PagedKvCache::new();
        assert_eq!(cache.view(&other).unwrap().len(), 0);
        cache.append(&mut store, &[1.0; 3], &[2.0; 3], 3).unwrap();
        assert_eq!(cache.view(&store).unwrap().len(), 3);
        let wrong = PagedKvError::WrongStore { need: store.id(), have: other.id() };
        assert_eq!(cache.view(&other).err().map(PagedKvError::from), Some(wrong));
    }

    /// The rows of a sequence whose numbers are their positions, where no window has passed them.
    fn check_positions(cache: &PagedKvCache, store: &PagedKvStore) {
        let passed = cache.freed_blocks();
        for at in (0..cache.seq_len()).filter(|at| !passed.contains(&(at / store.block_size()))) {
            let mut row = [0.0];
            cache.copy_k_row(store, at, 0, &mut row).unwrap();
            assert_eq!(row, [at as f32], "of {}, without {passed:?}", cache.len);
        }
    }

    fn positions(from: usize, n: usize) -> alloc::vec::Vec<f32> {
        (from..from + n).map(|at| at as f32).collect()
    }

    /// In one call the block that is being filled is copied, what the window has passed goes, and
    /// room is taken.
    #[test]
    fn a_fork_is_written_while_the_window_moves() {
        for block_size in [16, 48, 64, 100] {
            for window in [KvWindow::last(64), KvWindow::last(70).and_first(3)] {
                let mut store = PagedKvStore::new(block_size, 100, 1, 1);
                let mut cache = PagedKvCache::with_window(window);
                while cache.len < 400 {
                    let rows = positions(cache.len, 7);
                    cache.append(&mut store, &rows, &rows, 7).unwrap();
                    for n in [1, 3, 150] {
                        let mut fork = cache.fork(&mut store).unwrap();
                        let rows = positions(fork.len, n);
                        fork.append(&mut store, &rows, &rows, n).unwrap();
                        check_positions(&fork, &store);
                        check_positions(&cache, &store);
                        let tables = [fork.block_table(), cache.block_table()];
                        assert_eq!(store.check_invariants(tables), Ok(()));
                        fork.release(&mut store).unwrap();
                    }
                }
                assert!(!cache.freed_blocks().is_empty());
            }
        }
    }

    #[test]
    fn blocks_that_are_adopted_bind_to_their_store() {
        let mut store = PagedKvStore::new(2, 4, 1, 1);
        let mut other = PagedKvStore::new(2, 4, 1, 1);
        let mut cache = PagedKvCache::new();
        cache.adopt(&mut other, &[], 0).unwrap();
        assert_eq!(cache.store_id(), None, "no block of it");
        let block = store.blocks().take().unwrap();
        cache.adopt(&mut store, &[block], 0).unwrap();
        assert_eq!(cache.store_id(), Some(store.id()));
        let wrong = PagedKvError::WrongStore { need: store.id(), have: other.id() };
        assert_eq!(cache.push(&mut other, &[1.0], &[1.0]), Err(wrong));
    }

    /// The group's holder finds in its block what it put there, though it was room to the sequence
    /// that was forked.
    #[test]
    fn a_fork_does_not_write_into_the_group_of_the_one_it_was_forked_from() {
        let mut store = PagedKvStore::new(4, 4, 1, 1);
        let block = store.blocks().take_for_group().unwrap();
        let mut cache = PagedKvCache::new();
        cache.adopt(&mut store, &[block], 0).unwrap();
        cache.append(&mut store, &[0.0, 1.0], &[0.0, 1.0], 2).unwrap();
        assert_eq!(cache.block_table(), [block], "room of its own group is written in place");
        let mut fork = cache.fork(&mut store).unwrap();
        cache.release(&mut store).unwrap();
        fork.push(&mut store, &[2.0], &[2.0]).unwrap();
        assert_ne!(fork.block_table(), [block]);
        check_positions(&fork, &store);
        fork.release(&mut store).unwrap();
        assert_eq!((store.blocks().holders(block), store.free_block_count()), (1, 3));
        let wrong = Miscount::Holders { block, counted: 1, found: 0 };
        let report = store.check_invariants([]).unwrap_err();
        assert_eq!(report.miscounts().collect::<alloc::vec::Vec<_>>(), [(None, wrong)]);
    }

    #[test]
    fn the_table_does_not_grow_after_a_reserve() {
        let mut store = PagedKvStore::new(1, 100, 1, 1);
        let mut cache = PagedKvCache::new();
        cache.reserve(&mut store, 100).unwrap();
        let capacity = cache.table.capacity();
        for _ in 0..100 {
            cache.push(&mut store, &[1.0], &[1.0]).unwrap();
        }
        assert_eq!(cache.table.capacity(), capacity);
        cache.release(&mut store).unwrap();
        assert_eq!(cache.table.capacity(), capacity, "kept for the next use");
    }
}
