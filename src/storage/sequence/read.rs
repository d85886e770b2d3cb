//! Rows read back.

use super::PagedKvCache;
use crate::element::Element;
use crate::error::{PagedKvError, Side};
use crate::id::BlockId;
use crate::storage::paged::PagedKvStore;
use crate::storage::rows;

impl PagedKvCache {
    /// Copies the key row of one position and KV head into `out`.
    ///
    /// Keys are stored transposed, so that no slice of the store is a row; this gathers one.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(1, 4, 2, 1); // blocks of one position, 2 heads of 1
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[1.0, 2.0, 3.0, 4.0], &[0.5; 4], 2)?;
    /// let mut key = [0.0];
    /// cache.copy_k_row(&store, 1, 0, &mut key)?; // position 1, head 0
    /// assert_eq!(key, [3.0]);
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::WrongStore`], [`PagedKvError::PositionOutOfRange`],
    /// [`PagedKvError::HeadOutOfRange`], [`PagedKvError::PositionFreed`] for a position that the
    /// window has passed, and [`PagedKvError::RowLength`] where `out` is not `k_width` long. `out`
    /// is as it was then.
    pub fn copy_k_row<E: Element>(
        &self,
        store: &PagedKvStore<E>,
        pos: usize,
        kv_head: usize,
        out: &mut [f32],
    ) -> Result<(), PagedKvError> {
        let block = self.find(store, pos, kv_head)?;
        rows::check_out(Side::Key, store.shape().k_width(), out)?;
        store.read_k(block, kv_head, pos % store.block_size(), out);
        Ok(())
    }

    /// Copies the value row of one position and KV head into `out`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::PagedKvError;
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut store, &[1.0, 2.0], &[3.0, 4.0])?;
    /// let mut value = [0.0; 2];
    /// cache.copy_v_row(&store, 0, 0, &mut value)?;
    /// assert_eq!(value, [3.0, 4.0]);
    /// let none = Err(PagedKvError::PositionOutOfRange { position: 1, len: 1 });
    /// assert_eq!(cache.copy_v_row(&store, 1, 0, &mut value), none);
    /// # cache.release(&mut store)?;
    /// # Ok::<(), PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`copy_k_row`](Self::copy_k_row), for `v_width`.
    pub fn copy_v_row<E: Element>(
        &self,
        store: &PagedKvStore<E>,
        pos: usize,
        kv_head: usize,
        out: &mut [f32],
    ) -> Result<(), PagedKvError> {
        let block = self.find(store, pos, kv_head)?;
        rows::check_out(Side::Value, store.shape().v_width(), out)?;
        store.read_v(block, kv_head, pos % store.block_size(), out);
        Ok(())
    }

    fn find<E: Element>(
        &self,
        store: &PagedKvStore<E>,
        position: usize,
        head: usize,
    ) -> Result<BlockId, PagedKvError> {
        self.check_store(store.id())?;
        rows::check_place(store.shape(), self.len, position, head)?;
        self.check_kept(store.shape(), position)?;
        Ok(self.table[self.hole.entry(position / store.block_size())])
    }
}
