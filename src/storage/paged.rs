//! One memory of equal blocks that many sequences share.

#[cfg(target_has_atomic = "ptr")]
use alloc::sync::Arc;
use core::ops::Range;

use super::blocks::{Blocks, Released};
use super::memory::Memory;
use super::rows;
use super::view::KvView;
use crate::element::Element;
use crate::element::tile::Layout;
use crate::error::{Miscount, PagedStoreExhausted, ShapeError};
use crate::id::{BlockId, StoreId};
use crate::shape::KvShape;

/// The store's free list, which the shared layer holds a second handle to.
#[cfg(target_has_atomic = "ptr")]
pub(crate) type Handle = Arc<Blocks>;
/// Without compare-and-swap there is no `Arc` and no shared layer: the store owns its free list.
#[cfg(not(target_has_atomic = "ptr"))]
pub(crate) type Handle = alloc::boxed::Box<Blocks>;

/// The physical block storage of one layer, which many sequences' block tables address into.
///
/// A [`KvBlockPool`](crate::cache::KvBlockPool) bounds a count of blocks; this *is* the memory. A
/// sequence is a [`PagedKvCache`](crate::cache::PagedKvCache): a list of block ids and a length.
/// That indirection is what lets two sequences share a prefix, and a sequence grow without ever
/// being moved; "position 37 lives in block 12" has no meaning in a contiguous buffer.
///
/// The parameter is the stored number, `f32` unless said otherwise.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 8, 2, 4); // 8 blocks of 16 positions, 2 heads of 4
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[1.0; 8], &[2.0; 8])?;
/// assert_eq!((cache.seq_len(), store.free_block_count()), (1, 7));
/// cache.release(&mut store)?;
/// assert_eq!(store.free_block_count(), 8);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
///
/// # Cost
///
/// Opening asks the system for zeroed pages and touches none of them: a large store costs nothing
/// until rows are written. Per block there are 8 bytes of bookkeeping beside
/// [`bytes_per_block`](Self::bytes_per_block).
#[derive(Debug)]
pub struct PagedKvStore<E: Element = f32> {
    id: StoreId,
    layout: Layout<E>,
    memory: Memory,
    blocks: Handle,
    poison: bool,
}

impl PagedKvStore<f32> {
    /// A store of `total_blocks` blocks of `block_size` positions, for `n_kv_heads` heads whose
    /// key and value rows are `head_dim` numbers of `f32`.
    ///
    /// Zero blocks are legal: every push is then exhausted.
    ///
    /// # Panics
    ///
    /// On a shape that cannot exist and on memory that cannot be had. Where the numbers come from
    /// outside, use [`try_new`](Self::try_new).
    #[track_caller]
    pub fn new(block_size: usize, total_blocks: usize, n_kv_heads: usize, head_dim: usize) -> Self {
        match Self::try_new(block_size, total_blocks, n_kv_heads, head_dim) {
            Ok(store) => store,
            Err(error) => rows::impossible(error),
        }
    }

    /// As [`new`](Self::new), with the impossible as a value.
    ///
    /// # Errors
    ///
    /// As [`with_shape`](Self::with_shape).
    pub fn try_new(
        block_size: usize,
        total_blocks: usize,
        n_kv_heads: usize,
        head_dim: usize,
    ) -> Result<Self, ShapeError> {
        Self::with_shape(KvShape::square(block_size, n_kv_heads, head_dim)?, total_blocks)
    }
}

impl<E: Element> PagedKvStore<E> {
    /// A store of `total_blocks` blocks of any shape and any stored number.
    ///
    /// # Errors
    ///
    /// [`ShapeError::TooLarge`] for more blocks than ids, [`ShapeError::Overflow`] where the bytes
    /// do not fit one allocation, [`ShapeError::OutOfMemory`] where the allocator refuses.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::PagedKvStore;
    /// use paged_kv::{KvDims, KvShape};
    ///
    /// let shape = KvShape::new(KvDims { block_size: 64, n_kv_heads: 1, k_width: 96, v_width: 64 })?;
    /// let store = PagedKvStore::<f32>::with_shape(shape, 4)?;
    /// assert_eq!(store.bytes_per_block(), 64 * (96 + 64) * 4);
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    pub fn with_shape(shape: KvShape, total_blocks: usize) -> Result<Self, ShapeError> {
        let layout = Layout::new(shape);
        let words = total_blocks.checked_mul(layout.block_words()).ok_or(ShapeError::Overflow)?;
        let blocks = Handle::new(Blocks::new(total_blocks)?);
        let memory = Memory::zeroed(words)?;
        Ok(PagedKvStore { id: StoreId::fresh(), layout, memory, blocks, poison: false })
    }

    /// From now on, blocks that nobody has written hold what is not a number, so that a row read
    /// before it was written cannot be taken for data: blocks when they are taken and when they
    /// are given back through `&mut` of this store, rows that a truncation takes back.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn poison_free(&mut self) {
        self.poison = true;
        for index in 0..self.total_blocks() {
            let block = BlockId::from_raw(index as u32);
            if self.blocks.holders(block) == 0 {
                self.fill_poison(block);
            }
        }
    }

    /// How many hold this block: tables, and at most one group.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn holders(&self, block: BlockId) -> u32 {
        self.blocks.holders(block)
    }

    /// This store's name, which the sequences it fills remember.
    pub fn id(&self) -> StoreId {
        self.id
    }

    /// The shape of the layer.
    pub fn shape(&self) -> KvShape {
        self.layout.shape()
    }

    /// Positions in one block.
    pub fn block_size(&self) -> usize {
        self.shape().block_size()
    }

    /// Blocks there are, held and free.
    pub fn total_blocks(&self) -> usize {
        self.blocks.total()
    }

    /// Blocks that nobody holds.
    ///
    /// Under `&mut`, or under a write guard of the shared layer, the number can only grow until
    /// the caller itself takes some: others may give blocks back, nobody else takes any.
    pub fn free_block_count(&self) -> usize {
        self.blocks.free()
    }

    /// Bytes of rows in one block, the rounding of each head's tile to a cache line included.
    ///
    /// Exact: the store's memory is this times [`total_blocks`](Self::total_blocks), and one line
    /// for the alignment of the first block.
    pub fn bytes_per_block(&self) -> usize {
        self.layout.block_words() * size_of::<u64>()
    }

    /// Recounts every block from those who hold some: the block tables of all sequences, and one
    /// slice for each page group with its block of this layer.
    ///
    /// It checks that each block has as many holders as name it, that the free list has every
    /// other block once, and that free and held make up the total. It finds sequences that were
    /// dropped without being released. Nobody may give blocks back meanwhile.
    ///
    /// # Errors
    ///
    /// The first `Miscount`.
    ///
    /// # Panics
    ///
    /// If a holder names a block that the store does not have.
    ///
    /// # Cost
    ///
    /// Visits every block and allocates 5 bytes for each: for tests and debug builds.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 1);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut store, &[1.0], &[1.0])?;
    /// assert!(store.check_invariants([cache.block_table()]).is_ok());
    /// drop(cache); // without a release
    /// assert!(store.check_invariants([]).is_err());
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub fn check_invariants<'a>(
        &self,
        holders: impl IntoIterator<Item = &'a [BlockId]>,
    ) -> Result<(), Miscount> {
        let mut found = alloc::vec![0; self.total_blocks()];
        for block in holders.into_iter().flatten() {
            found[block.index()] += 1;
        }
        self.blocks.audit(&found)
    }

    pub(crate) fn blocks(&self) -> &Handle {
        &self.blocks
    }

    /// The first `len` positions of the blocks in `table`, for attention.
    pub(crate) fn view<'a>(&'a self, table: &'a [BlockId], len: usize) -> KvView<'a, E> {
        KvView::table(&self.layout, self.memory.with_slack(), table, len)
    }

    /// Whether `need` blocks can be taken.
    pub(crate) fn check_free(&self, need: usize) -> Result<(), PagedStoreExhausted> {
        self.blocks.check(need)
    }

    /// Takes a block for a table.
    ///
    /// # Panics
    ///
    /// Where there is none: the caller has asked [`check_free`](Self::check_free), under the same
    /// `&mut`.
    pub(crate) fn take(&mut self) -> BlockId {
        let block = self.blocks.take().expect("free blocks were counted under this `&mut`");
        if self.poison {
            self.fill_poison(block);
        }
        block
    }

    /// A table lets go of a block.
    pub(crate) fn give_back(&mut self, block: BlockId) {
        let released = self.blocks.drop_table(block);
        debug_assert!(released.is_ok(), "a table holds a count on each of its blocks");
        if self.poison && released == Ok(Released::Freed) {
            self.fill_poison(block);
        }
    }

    /// Copies all rows of one block into another.
    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let (from, to) = (self.range(from), self.range(to));
        self.memory.words_mut().copy_within(from, to.start);
    }

    /// Writes rows to the positions `first ..` of a block. Lengths have been checked.
    pub(crate) fn write(&mut self, block: BlockId, first: usize, k: &[f32], v: &[f32]) {
        let range = self.range(block);
        E::write(&self.layout, &mut self.memory.words_mut()[range], first, k, v);
    }

    /// Reads a key row back. Indices and the length of `out` have been checked.
    pub(crate) fn read_k(&self, block: BlockId, head: usize, position: usize, out: &mut [f32]) {
        let words = &self.memory.words()[self.range(block)];
        self.layout.read_k(words, head, position, out);
    }

    /// Reads a value row back. Indices and the length of `out` have been checked.
    pub(crate) fn read_v(&self, block: BlockId, head: usize, position: usize, out: &mut [f32]) {
        let words = &self.memory.words()[self.range(block)];
        self.layout.read_v(words, head, position, out);
    }

    /// In poison mode, what was at the positions `first ..` of this block is nobody's any more.
    pub(crate) fn forget_rows(&mut self, block: BlockId, first: usize) {
        if !self.poison {
            return;
        }
        let shape = self.shape();
        let n = shape.block_size() - first;
        let nothing = alloc::vec![f32::NAN; n * shape.k_row_len().max(shape.v_row_len())];
        let (k, v) = (&nothing[..n * shape.k_row_len()], &nothing[..n * shape.v_row_len()]);
        self.write(block, first, k, v);
    }

    fn fill_poison(&mut self, block: BlockId) {
        let range = self.range(block);
        self.memory.words_mut()[range].fill(u64::MAX);
    }

    fn range(&self, block: BlockId) -> Range<usize> {
        let len = self.layout.block_words();
        let start = block.index() * len;
        start..start + len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_for_awkward_shapes() {
        // 3 positions x (5 + 5) numbers = 30, rounded to two lines of 16, for each of 2 heads.
        let store = PagedKvStore::new(3, 7, 2, 5);
        assert_eq!(store.bytes_per_block(), 2 * 32 * 4);
        assert_eq!(store.memory.words().len() * 8, 7 * store.bytes_per_block());
    }

    #[test]
    fn sizes_that_cannot_be_are_errors() {
        let shape = KvShape::square(16, 1, 16).unwrap();
        let most = PagedKvStore::<f32>::with_shape(shape, usize::MAX).err();
        assert_eq!(most, Some(ShapeError::Overflow));
        assert_eq!(
            PagedKvStore::try_new(0, 1, 1, 1).err(),
            Some(ShapeError::Zero { what: "block_size" })
        );
    }
}
