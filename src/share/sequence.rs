//! A sequence over every layer, which cannot be forgotten.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;

use super::shared::SharedPagedKv;
use crate::element::Element;
use crate::error::PagedKvError;
use crate::storage::sequence::PagedKvCache;

/// One request's sequence in every layer of a [`SharedPagedKv`], given back when it is dropped.
///
/// A bare [`PagedKvCache`] cannot reach its store and so leaks its blocks when it is dropped. This
/// holds one for each layer, and the way to the free lists: `P` is `&SharedPagedKv` or an `Arc` of
/// it.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{SharedPagedKv, SharedSequence};
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
/// let mut sequence = SharedSequence::new(&shared);
/// for layer in 0..2 {
///     // The write guard for the push alone ...
///     sequence.cache_mut(layer).push(&mut shared.write(layer), &[1.0; 2], &[2.0; 2])?;
///     // ... and attention under a read guard.
///     let mut row = [0.0; 2];
///     sequence.cache(layer).copy_k_row(&shared.read(layer), 0, 0, &mut row)?;
/// }
/// assert_eq!(shared.free_groups(), 3);
/// drop(sequence);
/// assert_eq!(shared.free_groups(), 4);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
///
/// # Deadlock
///
/// Dropping it waits for nothing: it is legal under any guard and while unwinding.
pub struct SharedSequence<P, E = f32>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: Element,
{
    shared: P,
    caches: Vec<PagedKvCache>,
}

impl<P, E> SharedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: Element,
{
    /// An empty sequence. One allocation; takes no block and no lock.
    ///
    /// Its cache in each layer belongs to that layer's store from the start: pushed to another
    /// layer's, it says [`PagedKvError::WrongStore`].
    pub fn new(shared: P) -> Self {
        let caches = (0..shared.layer_count()).map(|_| PagedKvCache::new()).collect();
        let mut sequence = SharedSequence { shared, caches };
        sequence.bind();
        sequence
    }

    /// The sequence in one layer.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        &self.caches[layer]
    }

    /// The sequence in one layer, to be changed with the store of that layer.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn cache_mut(&mut self, layer: usize) -> &mut PagedKvCache {
        &mut self.caches[layer]
    }

    /// The sequence in every layer, in ascending order, to go with
    /// [`SharedPagedKv::write_all`].
    pub fn caches_mut(&mut self) -> &mut [PagedKvCache] {
        &mut self.caches
    }

    /// The layers it lives in.
    pub fn shared(&self) -> &SharedPagedKv<E> {
        &self.shared
    }

    /// Gives every block of every layer back. Waits for nothing.
    ///
    /// # Errors
    ///
    /// [`PagedKvError::WrongStore`] for a layer whose cache was filled from a store of somebody
    /// else's, which is not ours to give back. It is as it was, the other layers are given back.
    pub fn release(&mut self) -> Result<(), PagedKvError> {
        let caches = self.caches.iter_mut().enumerate();
        let results = caches.map(|(layer, cache)| self.shared.release(layer, cache));
        // All of them first, then the first that was refused.
        let result = results.fold(Ok(()), Result::and);
        self.bind();
        result
    }

    /// Binds what holds nothing to its layer's store.
    fn bind(&mut self) {
        for (layer, cache) in self.caches.iter_mut().enumerate() {
            if cache.block_table().is_empty() {
                cache.bind(self.shared.store_id(layer));
            }
        }
    }
}

impl<P, E> Drop for SharedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: Element,
{
    fn drop(&mut self) {
        // There is nobody to tell in the middle of unwinding, and the rows of a cache that was
        // filled elsewhere are safe where they are.
        let _elsewhere = self.release();
    }
}

impl<P, E> fmt::Debug for SharedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: Element,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.caches).finish()
    }
}
