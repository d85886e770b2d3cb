//! One memory of equal blocks that many sequences share.

#[cfg(target_has_atomic = "ptr")]
use alloc::sync::Arc;
use core::ops::Range;

use super::POISON;
use super::blocks::{Blocks, Released};
use super::memory::{Memory, RefusedMemory, StoreMemory, bytes_for};
use super::report::{Recount, StoreMap, StoreStats};
use super::rows;
use super::sequence::window::Hole;
use super::view::KvView;
use crate::element::Element;
use crate::element::tile::Layout;
use crate::error::{InvariantReport, PagedStoreExhausted, ShapeError};
use crate::id::{BlockId, StoreId};
use crate::shape::KvShape;

/// The store's free list, which the shared layer holds a second handle to.
#[cfg(target_has_atomic = "ptr")]
pub(crate) type Handle = Arc<Blocks>;
/// Without compare-and-swap there is no `Arc` and no shared layer: the store owns its free list.
#[cfg(not(target_has_atomic = "ptr"))]
pub(crate) type Handle = alloc::boxed::Box<Blocks>;

/// Lines of a store that poison fills when it is opened: 16 MiB. In a larger one, which costs nothing to
/// open, blocks are filled when they are taken.
#[cfg(feature = "internal")]
const MOST_LINES: usize = 16 << 14;

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
/// assert_eq!((cache.seq_len(), store.free_block_count(), store.total_blocks()), (1, 7, 8));
/// assert_eq!(cache.store_id(), Some(store.id()));
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
///
/// Nothing is cleared later either: a block that is taken, for the first time or again, holds what
/// it held, and no row of it is read before it is written. Memory that the system backs a page at
/// a time is backed at the first write to it; under std on Linux it is advised to do so in huge
/// pages of 2 MiB.
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
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::PagedKvStore;
    ///
    /// let store = PagedKvStore::new(16, 8, 2, 64); // 8 blocks of 16 positions, 2 KV heads of 64
    /// assert_eq!((store.block_size(), store.total_blocks()), (16, 8));
    /// assert_eq!(store.shape().k_row_len(), 2 * 64);
    /// ```
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
    /// # Examples
    ///
    /// ```
    /// use paged_kv::ShapeError;
    /// use paged_kv::cache::PagedKvStore;
    ///
    /// let n_kv_heads = 0; // as a damaged file says
    /// let refused = PagedKvStore::try_new(16, 8, n_kv_heads, 64).unwrap_err();
    /// assert_eq!(refused, ShapeError::Zero { what: "n_kv_heads" });
    /// ```
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
        let lines = Self::lines(shape, total_blocks)?;
        let blocks = Handle::new(Blocks::new(total_blocks)?);
        let store = Self::assemble(shape, blocks, Memory::zeroed(lines)?);
        #[cfg(feature = "internal")]
        if POISON && lines <= MOST_LINES {
            let mut store = store;
            store.poison_free();
            return Ok(store);
        }
        Ok(store)
    }

    /// A store of as many blocks as `memory` holds, or of as many as were asked for with
    /// [`StoreMemory::with_blocks`].
    ///
    /// [`memory_needed`](Self::memory_needed) says how many bytes that takes. What the bytes hold
    /// does not matter, and they are not cleared. An owned buffer is freed with the store.
    ///
    /// # Errors
    ///
    /// [`ShapeError::MemoryTooSmall`] where the blocks that were asked for do not fit, or not one
    /// does; [`ShapeError::TooLarge`] for more blocks than ids, [`ShapeError::OutOfMemory`] where
    /// the allocator refuses the bookkeeping. The memory comes back, with no byte changed.
    ///
    /// # Cost
    ///
    /// Touches none of the memory. The bookkeeping, 8 bytes for each block, is allocated.
    ///
    /// # Examples
    ///
    /// A buffer that the store owns:
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::PagedKvStore;
    ///
    /// let shape = KvShape::square(16, 2, 64)?;
    /// let buffer = vec![0; PagedKvStore::<f32>::memory_needed(shape, 12)?];
    /// let store = PagedKvStore::<f32>::from_memory(shape, buffer)?;
    /// assert_eq!(store.total_blocks(), 12);
    ///
    /// let refused = PagedKvStore::<f32>::from_memory(shape, vec![0; 1000]).unwrap_err();
    /// assert_eq!(refused.to_string(), "1 blocks need 16511 bytes of memory, got 1000");
    /// assert_eq!(refused.memory.as_bytes(), [0; 1000]); // it can be put to another use
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// A static buffer, as a microcontroller has it, whose size the compiler works out:
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::PagedKvStore;
    ///
    /// type Store = PagedKvStore<f32>;
    /// const SHAPE: KvShape = match KvShape::square(16, 1, 32) {
    ///     Ok(shape) => shape,
    ///     Err(_) => panic!("the shape cannot exist"),
    /// };
    /// const BYTES: usize = match Store::memory_needed(SHAPE, 4) {
    ///     Ok(bytes) => bytes,
    ///     Err(_) => panic!("the store cannot exist"),
    /// };
    /// static mut BUFFER: [u8; BYTES] = [0; BYTES];
    ///
    /// // SAFETY: `main` runs once, and names the buffer once.
    /// let buffer: &'static mut [u8] = unsafe { &mut *(&raw mut BUFFER) };
    /// let store = Store::from_memory(SHAPE, buffer)?;
    /// assert_eq!(store.total_blocks(), 4);
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    pub fn from_memory(
        shape: KvShape,
        memory: impl Into<StoreMemory>,
    ) -> Result<Self, RefusedMemory> {
        let memory = memory.into();
        let opened = Self::fitting(shape, &memory)
            .and_then(|total| Ok((Self::lines(shape, total)?, Blocks::new(total)?)));
        match opened {
            Ok((lines, blocks)) => {
                Ok(Self::assemble(shape, Handle::new(blocks), Memory::brought(memory, lines)))
            }
            Err(error) => Err(RefusedMemory { error, memory }),
        }
    }

    /// Bytes that [`from_memory`](Self::from_memory) needs for `total_blocks` blocks, whatever
    /// the address of the first: [`bytes_per_block`](Self::bytes_per_block) for each, one line of
    /// 64 that kernels may read behind the last one, and 63 to skip in front of the first.
    ///
    /// A buffer of exactly this length holds exactly so many blocks at every address.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::PagedKvStore;
    ///
    /// let shape = KvShape::square(16, 2, 64)?;
    /// let bytes = PagedKvStore::<f32>::memory_needed(shape, 12)?;
    /// assert_eq!(bytes, 12 * 2 * 16 * (64 + 64) * 4 + 64 + 63);
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShapeError::Overflow`] where the bytes do not fit `isize`.
    pub const fn memory_needed(shape: KvShape, total_blocks: usize) -> Result<usize, ShapeError> {
        match Self::lines(shape, total_blocks) {
            Ok(lines) => match bytes_for(lines) {
                Some(bytes) => Ok(bytes),
                None => Err(ShapeError::Overflow),
            },
            Err(error) => Err(error),
        }
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

    /// Answers the `nth` question for free blocks from now on as if somebody had just taken all of
    /// them, and tells the truth after that.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn refuse_room(&self, nth: u32) {
        self.blocks.refuse(nth);
    }

    /// Whether the refusal is still to come. It does not come any more.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn cancel_refusal(&self) -> bool {
        self.blocks.cancel_refusal()
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
    /// Exact: the store's memory is this times [`total_blocks`](Self::total_blocks), one line that
    /// kernels may read behind the last block, and what the first block is moved by to be aligned:
    /// up to 63 bytes. Under std on Linux, stores of 2 MiB and more begin and end on 2 MiB, for
    /// the sake of huge pages; what that adds, less than 4 MiB, is address space that nobody
    /// touches.
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
    /// An [`InvariantReport`] of all that is wrong.
    ///
    /// # Cost
    ///
    /// Visits every block (about a nanosecond each) and allocates 5 bytes for each, so that a
    /// server may well ask between two steps.
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
    /// let report = store.check_invariants([]).unwrap_err();
    /// assert!(report.to_string().contains("block 0 has a holder count of 1, found 0"));
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub fn check_invariants<'a>(
        &self,
        holders: impl IntoIterator<Item = &'a [BlockId]>,
    ) -> Result<(), InvariantReport> {
        let mut recount = Recount::new(&self.blocks);
        for &block in holders.into_iter().flatten() {
            recount.hold(block);
        }
        let mut report = InvariantReport::default();
        recount.finish(|miscount| report.note(None, miscount));
        report.into_result()
    }

    /// How many blocks are free, held, shared. A snapshot where others give back meanwhile.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 8, 1, 2);
    /// let mut prompt = PagedKvCache::new();
    /// prompt.append(&mut store, &[0.5; 40], &[0.5; 40], 20)?;
    /// let mut answer = prompt.fork(&mut store)?; // the same two blocks
    /// let stats = store.stats();
    /// assert_eq!((stats.held, stats.shared, stats.peak), (2, 2, 2));
    /// let line = "8 blocks of 16 positions: 6 free, 2 held (2 shared, 0 cached), 2 at most";
    /// assert_eq!(stats.to_string(), line);
    /// # prompt.release(&mut store)?;
    /// # answer.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Cost
    ///
    /// Visits the blocks that were ever held; allocates nothing.
    pub fn stats(&self) -> StoreStats {
        StoreStats::of(&self.blocks, self.shape(), self.bytes_per_block())
    }

    /// The blocks and their holders as a picture in letters, to be printed.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 8, 1, 2);
    /// let mut prompt = PagedKvCache::new();
    /// prompt.append(&mut store, &[0.5; 40], &[0.5; 40], 20)?;
    /// let mut answer = prompt.fork(&mut store)?;
    /// answer.push(&mut store, &[0.5; 2], &[0.5; 2])?; // copies the second block
    /// assert_eq!(store.map().to_string(), "       0 211.....");
    /// # prompt.release(&mut store)?;
    /// # answer.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Cost
    ///
    /// Visits every block and allocates at most a byte for each.
    pub fn map(&self) -> StoreMap {
        StoreMap::of(&self.blocks)
    }

    pub(crate) fn blocks(&self) -> &Handle {
        &self.blocks
    }

    /// The first `len` positions of the blocks in `table` and its hole, for attention.
    pub(crate) fn view<'a>(
        &'a self,
        table: &'a [BlockId],
        hole: Hole,
        len: usize,
    ) -> KvView<'a, E> {
        KvView::table(&self.layout, self.memory.with_slack(), table, hole, len)
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

    /// Copies the rows of a position of one block to a position of one.
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub(crate) fn copy_position(&mut self, from: (BlockId, usize), to: (BlockId, usize)) {
        let [from, to] = [from, to].map(|(block, position)| (block.index(), position));
        self.layout.copy_position(self.memory.words_mut(), from, to);
    }

    /// Writes rows to the positions `first ..` of a block. Lengths have been checked.
    pub(crate) fn write(&mut self, block: BlockId, first: usize, k: &[f32], v: &[f32]) {
        let range = self.range(block);
        E::write(&self.layout, &mut self.memory.words_mut()[range], first, k, v);
    }

    /// Reads a key row back. Indices and the length of `out` have been checked.
    pub(crate) fn read_k(&self, block: BlockId, head: usize, position: usize, out: &mut [f32]) {
        self.layout.read_k(self.words(block), head, position, out);
    }

    /// Reads a value row back. Indices and the length of `out` have been checked.
    pub(crate) fn read_v(&self, block: BlockId, head: usize, position: usize, out: &mut [f32]) {
        self.layout.read_v(self.words(block), head, position, out);
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

    /// Lines that so many blocks stand in.
    const fn lines(shape: KvShape, total_blocks: usize) -> Result<usize, ShapeError> {
        let block = Layout::<E>::new(shape).block_lines();
        match block.checked_mul(total_blocks) {
            Some(lines) => Ok(lines),
            None => Err(ShapeError::Overflow),
        }
    }

    /// How many blocks a store in this memory has.
    fn fitting(shape: KvShape, memory: &StoreMemory) -> Result<usize, ShapeError> {
        let block = Self::lines(shape, 1)?;
        let fit = memory.lines().map(|lines| lines / block);
        // No block at all can be asked for, and is not what somebody means who asks for none.
        let blocks = memory.blocks().unwrap_or(fit.unwrap_or(0).max(1));
        if fit.is_some_and(|fit| blocks <= fit) {
            return Ok(blocks);
        }
        let need = Self::memory_needed(shape, blocks)?;
        Err(ShapeError::MemoryTooSmall { blocks, need, have: memory.as_bytes().len() })
    }

    fn assemble(shape: KvShape, blocks: Handle, memory: Memory) -> Self {
        let layout = Layout::new(shape);
        PagedKvStore { id: StoreId::fresh(), layout, memory, blocks, poison: POISON }
    }

    fn fill_poison(&mut self, block: BlockId) {
        let range = self.range(block);
        self.memory.words_mut()[range].fill(u64::MAX);
    }

    pub(super) fn layout(&self) -> &Layout<E> {
        &self.layout
    }

    /// The words of a block.
    pub(crate) fn words(&self, block: BlockId) -> &[u64] {
        &self.memory.words()[self.range(block)]
    }

    /// The words of a block, to be written, and where what stands there.
    pub(super) fn words_mut(&mut self, block: BlockId) -> (&Layout<E>, &mut [u64]) {
        let range = self.range(block);
        (&self.layout, &mut self.memory.words_mut()[range])
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
        let shape = store.shape();
        let needed = |blocks| PagedKvStore::<f32>::memory_needed(shape, blocks);
        assert_eq!(needed(7), Ok(7 * store.bytes_per_block() + 64 + 63));
        assert_eq!(needed(0), Ok(64 + 63));
        assert_eq!(needed(usize::MAX / 256), Err(ShapeError::Overflow));
        assert_eq!(needed(usize::MAX), Err(ShapeError::Overflow));
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

    /// Neither opening nor taking touches a byte; writing touches the row's alone.
    #[test]
    fn taking_a_block_clears_nothing() {
        let shape = KvShape::square(3, 2, 5).unwrap();
        let bytes = PagedKvStore::<f32>::memory_needed(shape, 4).unwrap();
        let mut store = PagedKvStore::<f32>::from_memory(shape, alloc::vec![0xa5; bytes]).unwrap();
        let taken = |store: &PagedKvStore| {
            let bytes: &[u8] = bytemuck::cast_slice(store.memory.with_slack());
            bytes.iter().filter(|byte| **byte != 0xa5).count()
        };
        for _ in 0..2 {
            let blocks = [(); 4].map(|()| store.take());
            assert_eq!(taken(&store), 0);
            for block in blocks {
                store.give_back(block);
            }
        }
        let block = store.take();
        store.write(block, 1, &[0.0; 10], &[0.0; 10]);
        assert_eq!(taken(&store), 20 * size_of::<f32>());
    }
}
