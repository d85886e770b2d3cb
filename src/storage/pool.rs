//! A bound on how far many contiguous caches may grow together. It counts and holds no memory.

use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering};

use super::rows;
use crate::error::{KvPoolExhausted, ShapeError};

/// A bounded number of blocks, in positions, shared by many [`KvCache`](crate::cache::KvCache)s;
/// typically one pool for a server process.
///
/// [`KvCache::with_pool`](crate::cache::KvCache::with_pool) takes one block up front and one more
/// each time it grows past what it holds, and gives them back when it is dropped. So
/// [`free_blocks`](Self::free_blocks) is a live signal for admission control: a caller can check it
/// before accepting a request, instead of running out after committing memory.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use paged_kv::cache::{KvBlockPool, KvCache};
///
/// let pool = Arc::new(KvBlockPool::new(16, 2));
/// let cache = KvCache::with_pool(1, 4, &pool)?;
/// assert_eq!((pool.free_blocks(), pool.total_blocks()), (1, 2));
/// // A prompt of 20 positions has to wait.
/// assert!(20_usize.div_ceil(pool.block_size()) > pool.free_blocks());
/// drop(cache);
/// assert_eq!(pool.free_blocks(), 2);
/// # Ok::<(), paged_kv::KvPoolExhausted>(())
/// ```
///
/// # Cost
///
/// Taking and giving back is one atomic step each; there is no lock.
pub struct KvBlockPool {
    block_size: usize,
    total_blocks: usize,
    free: AtomicUsize,
}

impl KvBlockPool {
    /// A pool of `total_blocks` blocks of `block_size` positions. Zero blocks are legal: nothing
    /// can then be taken.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::KvBlockPool;
    ///
    /// let pool = KvBlockPool::new(64, 1000);
    /// // 64,000 positions, for all caches together.
    /// assert_eq!(pool.free_blocks() * pool.block_size(), 64_000);
    /// ```
    ///
    /// # Panics
    ///
    /// If `block_size` is 0. [`try_new`](Self::try_new) returns that as an error.
    #[track_caller]
    pub fn new(block_size: usize, total_blocks: usize) -> Self {
        match Self::try_new(block_size, total_blocks) {
            Ok(pool) => pool,
            Err(error) => rows::impossible(error),
        }
    }

    /// As [`new`](Self::new), with the impossible as a value.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::ShapeError;
    /// use paged_kv::cache::KvBlockPool;
    ///
    /// let refused = KvBlockPool::try_new(0, 1000).unwrap_err();
    /// assert_eq!(refused, ShapeError::Zero { what: "block_size" });
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShapeError::Zero`] if `block_size` is 0.
    pub fn try_new(block_size: usize, total_blocks: usize) -> Result<Self, ShapeError> {
        if block_size == 0 {
            return Err(ShapeError::Zero { what: "block_size" });
        }
        Ok(KvBlockPool { block_size, total_blocks, free: AtomicUsize::new(total_blocks) })
    }

    /// Positions in one block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks there are, taken and free.
    pub fn total_blocks(&self) -> usize {
        self.total_blocks
    }

    /// Blocks that no cache holds now. By the time a caller acts on it another cache may have
    /// taken them, which is why a push asks again.
    pub fn free_blocks(&self) -> usize {
        self.free.load(Ordering::Acquire)
    }

    /// Takes `need` blocks, all or none.
    pub(crate) fn take(&self, need: usize) -> Result<(), KvPoolExhausted> {
        self.free
            .fetch_update(Ordering::Acquire, Ordering::Acquire, |free| free.checked_sub(need))
            .map(drop)
            .map_err(|free| KvPoolExhausted { need, free })
    }

    /// Gives blocks back that were taken.
    pub(crate) fn give_back(&self, blocks: usize) {
        let before = self.free.fetch_add(blocks, Ordering::Release);
        debug_assert!(before + blocks <= self.total_blocks, "more given back than was taken");
    }
}

impl fmt::Debug for KvBlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvBlockPool")
            .field("block_size", &self.block_size)
            .field("total_blocks", &self.total_blocks)
            .field("free_blocks", &self.free_blocks())
            .finish()
    }
}
