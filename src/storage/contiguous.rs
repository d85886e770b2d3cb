//! A cache of one sequence that owns its pages alone.
//!
//! Contiguous means: position after position, no table in between. The pages are laid out like
//! those of a shared store, so that one kernel reads both and gives the same bits, and they are
//! separate allocations in order, so that growing never moves or lays out anything again.
//!
//! With a pool, two units meet. The *account* is in the pool's blocks, which are a number of
//! positions the pool's owner chose; the *memory* is in pages of up to 64 positions, which is
//! what attention reads fastest. Both can be asked: [`KvCache::held_blocks`] and
//! [`KvCache::memory_bytes`].

#[cfg(target_has_atomic = "ptr")]
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::POISON;
use super::memory::Memory;
#[cfg(target_has_atomic = "ptr")]
use super::pool::KvBlockPool;
use super::rows;
use super::view::KvView;
use crate::element::Element;
use crate::element::tile::{Layout, PANEL};
use crate::error::{KvCacheError, KvPoolExhausted, ShapeError, Side};
use crate::shape::KvShape;

/// The share of a pool that a cache holds. Without `Arc` there are no pools.
#[cfg(target_has_atomic = "ptr")]
#[derive(Debug)]
struct Lease {
    pool: Arc<KvBlockPool>,
    held: usize,
}

#[cfg(not(target_has_atomic = "ptr"))]
#[derive(Debug)]
enum Lease {}

/// The keys and values of one sequence, in memory of its own, growing one position at a time.
///
/// Without a pool it grows as long as there is memory. With one
/// ([`with_pool`](Self::with_pool)) it may hold so many positions as it has taken blocks for.
///
/// # What a pooled cache holds, and until when
///
/// It holds one block from the start and takes one more each time it grows past what it holds.
/// [`truncate`](Self::truncate) and [`clear`](Self::clear) take positions back and keep the
/// blocks: a cache that is rolled back and grows again cannot run out in between.
/// [`release_to_pool`](Self::release_to_pool) and dropping the cache give all of them back.
///
/// It is not `Clone`, because a copy has to be accounted for and that can fail:
/// [`try_clone`](Self::try_clone).
///
/// # Examples
///
/// ```
/// use paged_kv::cache::KvCache;
///
/// let mut cache = KvCache::new(2, 4); // 2 KV heads of width 4
/// assert!(cache.is_empty());
/// cache.push(&[1.0; 8], &[2.0; 8])?;
/// cache.append(&[3.0; 16], &[4.0; 16], 2)?;
/// assert_eq!(cache.seq_len(), 3);
/// # Ok::<(), paged_kv::KvPoolExhausted>(())
/// ```
#[derive(Debug)]
pub struct KvCache<E: Element = f32> {
    layout: Layout<E>,
    pages: Vec<Memory>,
    len: usize,
    lease: Option<Lease>,
    poison: bool,
}

impl KvCache<f32> {
    /// An empty cache for `n_kv_heads` heads whose key and value rows are `head_dim` numbers.
    /// Allocates nothing yet.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let cache = KvCache::new(8, 128); // 8 KV heads of 128
    /// assert_eq!((cache.shape().k_row_len(), cache.shape().block_size()), (8 * 128, 64));
    /// assert_eq!((cache.memory_bytes(), cache.held_blocks()), (0, 0));
    /// ```
    ///
    /// # Panics
    ///
    /// On a shape that cannot exist; [`with_shape`](Self::with_shape) takes checked ones.
    #[track_caller]
    pub fn new(n_kv_heads: usize, head_dim: usize) -> Self {
        match KvShape::square(PANEL, n_kv_heads, head_dim) {
            Ok(shape) => Self::with_shape(shape),
            Err(error) => rows::impossible(error),
        }
    }

    /// As [`new`](Self::new), with memory for `max_seq_len` positions taken now. It grows past
    /// that like any other.
    ///
    /// A cache for fewer than 64 positions has pages of `max_seq_len`, rounded up to a multiple
    /// of 16.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::with_capacity(1, 4, 100);
    /// let taken = cache.memory_bytes();
    /// assert_eq!((cache.capacity(), taken), (128, 128 * (4 + 4) * 4)); // two pages of 64
    /// cache.append(&[0.5; 100 * 4], &[0.5; 100 * 4], 100)?;
    /// assert_eq!(cache.memory_bytes(), taken);
    /// # Ok::<(), paged_kv::KvPoolExhausted>(())
    /// ```
    ///
    /// # Panics
    ///
    /// On a shape that cannot exist and on memory that cannot be had.
    /// [`try_with_capacity`](Self::try_with_capacity) returns those as errors.
    #[track_caller]
    pub fn with_capacity(n_kv_heads: usize, head_dim: usize, max_seq_len: usize) -> Self {
        match Self::try_with_capacity(n_kv_heads, head_dim, max_seq_len) {
            Ok(cache) => cache,
            Err(error) => rows::impossible(error),
        }
    }

    /// As [`with_capacity`](Self::with_capacity), with the impossible as a value.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::ShapeError;
    /// use paged_kv::cache::KvCache;
    ///
    /// let head_dim = 0; // as a damaged file says
    /// let refused = KvCache::try_with_capacity(8, head_dim, 4096).unwrap_err();
    /// assert_eq!(refused, ShapeError::Zero { what: "k_width" });
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShapeError`], for a shape that cannot exist and memory that cannot be had.
    pub fn try_with_capacity(
        n_kv_heads: usize,
        head_dim: usize,
        max_seq_len: usize,
    ) -> Result<Self, ShapeError> {
        let shape = KvShape::square(page_size(max_seq_len), n_kv_heads, head_dim)?;
        let mut cache = Self::with_shape(shape);
        cache.grow_memory(max_seq_len)?;
        Ok(cache)
    }

    /// An empty cache that holds one block of `pool` and takes more as it grows.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use paged_kv::cache::{KvBlockPool, KvCache};
    ///
    /// let pool = Arc::new(KvBlockPool::new(16, 3));
    /// let mut cache = KvCache::with_pool(1, 2, &pool)?;
    /// assert_eq!((cache.held_blocks(), cache.capacity()), (1, 16));
    /// cache.append(&[0.5; 40], &[0.5; 40], 20)?; // 20 positions: one block more
    /// assert_eq!((cache.held_blocks(), pool.free_blocks()), (2, 1));
    /// # Ok::<(), paged_kv::KvPoolExhausted>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvPoolExhausted`] where the pool has no block free.
    ///
    /// # Panics
    ///
    /// On a shape that cannot exist; [`with_shape_in_pool`](Self::with_shape_in_pool) takes
    /// checked ones.
    #[cfg(target_has_atomic = "ptr")]
    #[track_caller]
    pub fn with_pool(
        n_kv_heads: usize,
        head_dim: usize,
        pool: &Arc<KvBlockPool>,
    ) -> Result<Self, KvPoolExhausted> {
        match KvShape::square(page_size(pool.block_size()), n_kv_heads, head_dim) {
            Ok(shape) => Self::with_shape_in_pool(shape, pool),
            Err(error) => rows::impossible(error),
        }
    }
}

impl<E: Element> KvCache<E> {
    /// An empty cache of any shape and any stored number; its pages hold `block_size` positions.
    /// Allocates nothing yet.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    /// use paged_kv::{KvDims, KvShape, bf16};
    ///
    /// let dims = KvDims { block_size: 16, n_kv_heads: 1, k_width: 96, v_width: 64 };
    /// let mut cache = KvCache::<bf16>::with_shape(KvShape::new(dims)?);
    /// cache.push(&[1.0; 96], &[2.0; 64])?; // rows go in as `f32`
    /// assert_eq!(cache.memory_bytes(), 16 * (96 + 64) * 2); // a page of 16 positions
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn with_shape(shape: KvShape) -> Self {
        let layout = Layout::new(shape);
        KvCache { layout, pages: Vec::new(), len: 0, lease: None, poison: POISON }
    }

    /// As [`with_shape`](Self::with_shape), bounded by a pool.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use paged_kv::cache::{KvBlockPool, KvCache};
    /// use paged_kv::{Int8, KvShape};
    ///
    /// let (shape, pool) = (KvShape::square(64, 2, 32)?, Arc::new(KvBlockPool::new(128, 1)));
    /// let cache = KvCache::<Int8>::with_shape_in_pool(shape, &pool)?;
    /// assert_eq!(cache.capacity(), 128); // of the pool; its pages hold 64 each
    /// let refused = KvCache::<Int8>::with_shape_in_pool(shape, &pool).unwrap_err();
    /// assert_eq!((refused.need, refused.free), (1, 0));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvPoolExhausted`] where the pool has no block free.
    #[cfg(target_has_atomic = "ptr")]
    pub fn with_shape_in_pool(
        shape: KvShape,
        pool: &Arc<KvBlockPool>,
    ) -> Result<Self, KvPoolExhausted> {
        pool.take(1)?;
        let lease = Some(Lease { pool: Arc::clone(pool), held: 1 });
        Ok(KvCache { lease, ..Self::with_shape(shape) })
    }

    /// A copy with memory of its own. A pooled cache's copy takes blocks of the same pool: as many
    /// as its positions need, one at least.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut prompt = KvCache::new(1, 2);
    /// prompt.push(&[1.0; 2], &[2.0; 2])?;
    /// let mut answer = prompt.try_clone()?;
    /// answer.push(&[3.0; 2], &[4.0; 2])?;
    /// assert_eq!((prompt.seq_len(), answer.seq_len()), (1, 2));
    /// # Ok::<(), paged_kv::KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvCacheError::Exhausted`] where the pool has too few blocks, [`KvCacheError::Shape`]
    /// where memory cannot be had. Nothing has been taken then.
    pub fn try_clone(&self) -> Result<Self, KvCacheError> {
        let mut copy = Self::with_shape(self.shape());
        copy.poison = self.poison;
        #[cfg(target_has_atomic = "ptr")]
        if let Some(lease) = &self.lease {
            let held = self.len.div_ceil(lease.pool.block_size()).max(1);
            lease.pool.take(held)?;
            // From here on dropping the copy gives them back.
            copy.lease = Some(Lease { pool: Arc::clone(&lease.pool), held });
        }
        copy.grow_memory(self.len)?;
        for (to, from) in copy.pages.iter_mut().zip(&self.pages) {
            to.words_mut().copy_from_slice(from.words());
        }
        copy.len = self.len;
        Ok(copy)
    }

    /// Writes the next position: `k` is `[n_kv_heads][k_width]`, `v` is `[n_kv_heads][v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(2, 2);
    /// cache.push(&[1.0, 2.0, 3.0, 4.0], &[0.5; 4])?; // the key row of head 0, then that of head 1
    /// let mut key = [0.0; 2];
    /// cache.copy_k_row(0, 1, &mut key)?;
    /// assert_eq!(key, [3.0, 4.0]);
    /// # Ok::<(), paged_kv::KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvPoolExhausted`] where another block is needed and the pool has none, with nothing
    /// changed. A cache without a pool never returns it.
    ///
    /// # Panics
    ///
    /// If a row has the wrong length, or memory cannot be had, before anything is changed.
    /// [`try_push`](Self::try_push) returns both as errors.
    ///
    /// # Cost
    ///
    /// Allocates one page at each page boundary; rows that are there are not moved.
    #[track_caller]
    pub fn push(&mut self, k: &[f32], v: &[f32]) -> Result<(), KvPoolExhausted> {
        self.append(k, v, 1)
    }

    /// As [`push`](Self::push), with every failure as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use paged_kv::KvCacheError;
    /// use paged_kv::cache::{KvBlockPool, KvCache};
    ///
    /// let pool = Arc::new(KvBlockPool::new(1, 1)); // one block of one position
    /// let mut cache = KvCache::with_pool(1, 2, &pool)?;
    /// cache.try_push(&[0.5; 2], &[0.5; 2])?;
    /// let refused = cache.try_push(&[0.5; 2], &[0.5; 2]);
    /// let Err(KvCacheError::Exhausted(short)) = refused else { unreachable!() };
    /// assert_eq!((short.need, short.free, cache.seq_len()), (1, 0, 1));
    /// # Ok::<(), KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvCacheError::Exhausted`], [`KvCacheError::RowLength`], or [`KvCacheError::Shape`] where
    /// memory cannot be had. Nothing has changed then.
    pub fn try_push(&mut self, k: &[f32], v: &[f32]) -> Result<(), KvCacheError> {
        self.try_append(k, v, 1)
    }

    /// Writes the next `n` positions, all or none: `k` is `[n][n_kv_heads][k_width]`, `v` is
    /// `[n][n_kv_heads][v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// cache.append(&[1.0, 1.0, 2.0, 2.0, 3.0, 3.0], &[0.5; 6], 3)?; // a prompt of three tokens
    /// let mut key = [0.0; 2];
    /// cache.copy_k_row(2, 0, &mut key)?;
    /// assert_eq!((cache.seq_len(), key), (3, [3.0, 3.0]));
    /// # Ok::<(), paged_kv::KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    ///
    /// # Panics
    ///
    /// As [`push`](Self::push).
    #[track_caller]
    pub fn append(&mut self, k: &[f32], v: &[f32], n: usize) -> Result<(), KvPoolExhausted> {
        if let Err(wrong) = rows::check(self.shape(), n, k, v) {
            wrong.panic();
        }
        match self.append_checked(k, v, n) {
            Ok(()) => Ok(()),
            Err(KvCacheError::Exhausted(exhausted)) => Err(exhausted),
            Err(other) => no_memory(other),
        }
    }

    /// As [`append`](Self::append), with every failure as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    /// use paged_kv::{KvCacheError, Side};
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// let refused = cache.try_append(&[0.5; 6], &[0.5; 4], 2); // keys of three positions
    /// assert_eq!(refused, Err(KvCacheError::RowLength { side: Side::Key, need: 4, have: 6 }));
    /// assert!(cache.is_empty());
    /// ```
    ///
    /// # Errors
    ///
    /// As [`try_push`](Self::try_push).
    pub fn try_append(&mut self, k: &[f32], v: &[f32], n: usize) -> Result<(), KvCacheError> {
        rows::check(self.shape(), n, k, v)?;
        self.append_checked(k, v, n)
    }

    /// Takes back all positions from `len` on. Blocks and memory stay held.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvCacheError;
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// cache.append(&[0.5; 8], &[0.5; 8], 4)?;
    /// cache.truncate(2)?; // two drafted tokens were rejected
    /// assert_eq!(cache.seq_len(), 2);
    /// let too_long = KvCacheError::PositionOutOfRange { position: 3, len: 2 };
    /// assert_eq!(cache.truncate(3), Err(too_long));
    /// # Ok::<(), KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvCacheError::PositionOutOfRange`] where the cache is shorter than `len`: a rollback by
    /// the wrong count is a mistake and shall not pass for a short one.
    pub fn truncate(&mut self, len: usize) -> Result<(), KvCacheError> {
        if len > self.len {
            return Err(KvCacheError::PositionOutOfRange { position: len, len: self.len });
        }
        self.len = len;
        self.forget_rows();
        Ok(())
    }

    /// Takes all positions back. Blocks and memory stay held.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::with_capacity(1, 2, 64);
    /// cache.append(&[0.5; 6], &[0.5; 6], 3)?;
    /// cache.clear(); // the next request
    /// assert!(cache.is_empty());
    /// assert_eq!(cache.capacity(), 64);
    /// # Ok::<(), paged_kv::KvPoolExhausted>(())
    /// ```
    pub fn clear(&mut self) {
        self.len = 0;
        self.forget_rows();
    }

    /// Empties the cache, frees its memory and gives every block back to the pool, also the one
    /// it was opened with. The cache can be used again, and then takes blocks as it grows.
    ///
    /// Without a pool it empties the cache and frees its memory.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use paged_kv::cache::{KvBlockPool, KvCache};
    ///
    /// let pool = Arc::new(KvBlockPool::new(16, 2));
    /// let mut cache = KvCache::with_pool(1, 2, &pool)?;
    /// cache.append(&[0.5; 40], &[0.5; 40], 20)?;
    /// cache.release_to_pool();
    /// assert_eq!((cache.held_blocks(), cache.memory_bytes(), pool.free_blocks()), (0, 0, 2));
    /// cache.push(&[0.5; 2], &[0.5; 2])?; // takes a block again
    /// assert_eq!(pool.free_blocks(), 1);
    /// # Ok::<(), paged_kv::KvPoolExhausted>(())
    /// ```
    pub fn release_to_pool(&mut self) {
        self.len = 0;
        self.pages = Vec::new();
        #[cfg(target_has_atomic = "ptr")]
        if let Some(lease) = &mut self.lease {
            lease.pool.give_back(core::mem::take(&mut lease.held));
        }
    }

    /// From now on, memory that no row was written to holds what is not a number.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn poison_free(&mut self) {
        self.poison = true;
        self.forget_rows();
    }

    /// Positions written.
    pub fn seq_len(&self) -> usize {
        self.len
    }

    /// Whether no position has been written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The shape of the layer; its `block_size` is the positions in one page of this cache.
    pub fn shape(&self) -> KvShape {
        self.layout.shape()
    }

    /// Blocks of the pool that this cache holds; 0 without a pool.
    pub fn held_blocks(&self) -> usize {
        #[cfg(target_has_atomic = "ptr")]
        if let Some(lease) = &self.lease {
            return lease.held;
        }
        0
    }

    /// Positions this cache can hold before it has to take another block of its pool, or, without
    /// a pool, another page of memory.
    pub fn capacity(&self) -> usize {
        #[cfg(target_has_atomic = "ptr")]
        if let Some(lease) = &self.lease {
            return lease.held.saturating_mul(lease.pool.block_size());
        }
        self.pages.len() * self.shape().block_size()
    }

    /// Bytes of rows in the pages this cache has allocated.
    pub fn memory_bytes(&self) -> usize {
        self.pages.len() * self.layout.block_words() * size_of::<u64>()
    }

    /// Copies the key row of one position and KV head into `out`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvCacheError;
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// cache.push(&[1.0, 2.0], &[3.0, 4.0])?;
    /// let mut row = [0.0; 2];
    /// cache.copy_k_row(0, 0, &mut row)?;
    /// assert_eq!(row, [1.0, 2.0]);
    /// let no_head = KvCacheError::HeadOutOfRange { head: 1, n_kv_heads: 1 };
    /// assert_eq!(cache.copy_k_row(0, 1, &mut row), Err(no_head));
    /// # Ok::<(), KvCacheError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`KvCacheError::PositionOutOfRange`], [`KvCacheError::HeadOutOfRange`], and
    /// [`KvCacheError::RowLength`] where `out` is not `k_width` long. `out` is as it was then.
    pub fn copy_k_row(
        &self,
        pos: usize,
        kv_head: usize,
        out: &mut [f32],
    ) -> Result<(), KvCacheError> {
        let page = self.find(pos, kv_head)?;
        rows::check_out(Side::Key, self.shape().k_width(), out)?;
        self.layout.read_k(page.words(), kv_head, pos % self.shape().block_size(), out);
        Ok(())
    }

    /// Copies the value row of one position and KV head into `out`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvCache;
    /// use paged_kv::{KvShape, f16};
    ///
    /// let mut cache = KvCache::<f16>::with_shape(KvShape::square(16, 1, 2)?);
    /// cache.push(&[0.0; 2], &[0.5, 2049.0])?;
    /// let mut row = [0.0; 2];
    /// cache.copy_v_row(0, 0, &mut row)?;
    /// assert_eq!(row, [0.5, 2048.0]); // as it is stored: `f16` has 11 bits
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`copy_k_row`](Self::copy_k_row), for `v_width`.
    pub fn copy_v_row(
        &self,
        pos: usize,
        kv_head: usize,
        out: &mut [f32],
    ) -> Result<(), KvCacheError> {
        let page = self.find(pos, kv_head)?;
        rows::check_out(Side::Value, self.shape().v_width(), out)?;
        self.layout.read_v(page.words(), kv_head, pos % self.shape().block_size(), out);
        Ok(())
    }

    /// The pages in order, for attention.
    pub(crate) fn view(&self) -> KvView<'_, E> {
        KvView::owned(&self.layout, &self.pages, self.len)
    }

    fn find(&self, position: usize, head: usize) -> Result<&Memory, KvCacheError> {
        rows::check_place(self.shape(), self.len, position, head)?;
        Ok(&self.pages[position / self.shape().block_size()])
    }

    /// In poison mode, what stands past the length is nobody's any more.
    fn forget_rows(&mut self) {
        if !self.poison {
            return;
        }
        let shape = self.shape();
        let written = shape.blocks_for(self.len);
        for page in &mut self.pages[written..] {
            page.words_mut().fill(u64::MAX);
        }
        let row = self.len % shape.block_size();
        if row != 0 {
            let n = shape.block_size() - row;
            let (k, v) = (n * shape.k_row_len(), n * shape.v_row_len());
            let nothing = alloc::vec![f32::NAN; k.max(v)];
            let page = self.pages[written - 1].words_mut();
            E::write(&self.layout, page, row, &nothing[..k], &nothing[..v]);
        }
    }

    fn append_checked(&mut self, k: &[f32], v: &[f32], n: usize) -> Result<(), KvCacheError> {
        let end = crate::storage::grown(self.len, n).ok_or(KvCacheError::TooLong)?;
        let taken = self.take_blocks(end)?;
        if let Err(refused) = self.grow_memory(end) {
            self.untake_blocks(taken);
            return Err(refused.into());
        }
        rows::by_block(self.shape(), self.len, n, k, v, |index, row, k, v| {
            E::write(&self.layout, self.pages[index].words_mut(), row, k, v);
        });
        self.len = end;
        Ok(())
    }

    /// Takes the pool's blocks that `positions` need beyond those held; says how many.
    #[cfg(target_has_atomic = "ptr")]
    fn take_blocks(&mut self, positions: usize) -> Result<usize, KvPoolExhausted> {
        let Some(lease) = &mut self.lease else { return Ok(0) };
        let more = positions.div_ceil(lease.pool.block_size()).saturating_sub(lease.held);
        if more > 0 {
            lease.pool.take(more)?;
            lease.held += more;
        }
        Ok(more)
    }

    #[cfg(target_has_atomic = "ptr")]
    fn untake_blocks(&mut self, taken: usize) {
        if let Some(lease) = &mut self.lease {
            lease.held -= taken;
            lease.pool.give_back(taken);
        }
    }

    #[cfg(not(target_has_atomic = "ptr"))]
    fn take_blocks(&mut self, _: usize) -> Result<usize, KvPoolExhausted> {
        match &self.lease {
            None => Ok(0),
            Some(lease) => match *lease {},
        }
    }

    #[cfg(not(target_has_atomic = "ptr"))]
    fn untake_blocks(&mut self, _: usize) {}

    /// Pages for `positions`, all or none of those that are missing.
    fn grow_memory(&mut self, positions: usize) -> Result<(), ShapeError> {
        let had = self.pages.len();
        let need = self.shape().blocks_for(positions);
        if need <= had {
            return Ok(());
        }
        let bytes = (need - had).checked_mul(self.layout.block_words() * size_of::<u64>());
        let bytes = bytes.ok_or(ShapeError::Overflow)?;
        // The list of pages grows by doubling, as any `Vec`; only the list is ever moved.
        self.pages.try_reserve(need - had).map_err(|_| ShapeError::OutOfMemory { bytes })?;
        let lines = self.layout.block_lines();
        for _ in had..need {
            match Memory::zeroed(lines) {
                Ok(page) => self.pages.push(page),
                Err(refused) => {
                    self.pages.truncate(had);
                    return Err(refused);
                }
            }
        }
        if self.poison {
            for page in &mut self.pages[had..] {
                page.words_mut().fill(u64::MAX);
            }
        }
        Ok(())
    }
}

#[cfg(target_has_atomic = "ptr")]
impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.give_back(self.held);
    }
}

/// Positions in a page of a cache that is to hold, or to grow by, so many: 64 is what attention
/// reads fastest, and a smaller multiple of 16 gives the same bits and wastes less.
fn page_size(positions: usize) -> usize {
    if positions >= PANEL { PANEL } else { positions.next_multiple_of(16).max(16) }
}

#[cold]
#[inline(never)]
#[track_caller]
fn no_memory(error: KvCacheError) -> ! {
    panic!("the cache cannot grow: {error}")
}

#[cfg(all(test, feature = "internal"))]
mod tests {
    use super::*;

    /// What stands in a cache at these positions, whether they are written or not.
    fn stands(cache: &mut KvCache, positions: core::ops::Range<usize>) -> alloc::vec::Vec<f32> {
        let len = core::mem::replace(&mut cache.len, positions.end);
        let mut found = alloc::vec::Vec::new();
        for position in positions {
            let mut row = [0.0; 2];
            cache.copy_k_row(position, 0, &mut row).unwrap();
            found.extend(row);
            cache.copy_v_row(position, 0, &mut row).unwrap();
            found.extend(row);
        }
        cache.len = len;
        found
    }

    #[cfg(target_has_atomic = "ptr")]
    #[test]
    fn what_was_taken_for_nothing_goes_back() {
        let pool = alloc::sync::Arc::new(crate::cache::KvBlockPool::new(2, 9));
        let mut cache = KvCache::<f32>::with_pool(1, 1, &pool).unwrap();
        cache.append(&[1.0; 5], &[1.0; 5], 5).unwrap();
        assert_eq!((cache.held_blocks(), cache.take_blocks(10)), (3, Ok(2)));
        cache.untake_blocks(2);
        assert_eq!((cache.held_blocks(), pool.free_blocks()), (3, 6));
    }

    #[test]
    fn in_poison_mode_rows_that_nobody_has_are_not_numbers() {
        let rows: alloc::vec::Vec<f32> = (0..40).map(|x| x as f32).collect();
        // Pages of 16 positions.
        let mut cache = KvCache::<f32>::with_capacity(1, 2, 16);
        cache.poison_free();
        let is_nothing = |rows: alloc::vec::Vec<f32>| rows.iter().all(|x| x.is_nan());
        assert!(is_nothing(stands(&mut cache, 0..16)), "memory that is there already");
        cache.append(&rows, &rows, 20).unwrap();
        let first = stands(&mut cache, 0..5);
        assert!(first.iter().all(|x| x.is_finite()));
        assert!(is_nothing(stands(&mut cache, 20..32)), "memory that is taken later");
        for len in [16, 5, 0] {
            cache.truncate(len).unwrap();
            assert!(is_nothing(stands(&mut cache, len..32)), "cut to {len}");
            let kept = len.min(5);
            assert_eq!(stands(&mut cache, 0..kept), first[..4 * kept], "cut to {len}");
        }
    }
}
