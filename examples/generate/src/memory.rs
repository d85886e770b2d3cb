//! One request's keys and values: pages of the shared store.
//!
//! ```text
//! groups        | prefix, held with others | own, alone |
//! table, layer  | b3 b8                    | b1 b0 b5   |     one for each layer
//!                 full, never written        written as the request goes on
//! ```

use paged_kv::cache::{PagedKvCache, SharedPagedKv, SharedSequence};
use paged_kv::{BlockId, Element};

use crate::error::Error;
use crate::pool::{Pages, Pool};

/// A request's memory. Dropping it, also while a panic unwinds, gives every block back.
#[derive(Debug)]
pub struct PagedMemory<'p, E: Element> {
    // A block is free when tables and groups have both let go of it.
    sequence: SharedSequence<&'p SharedPagedKv<E>, E>,
    own: Pages<'p, E>,
    _prefix: Option<Pages<'p, E>>,
    pool: &'p Pool<E>,
}

impl<'p, E: Element> PagedMemory<'p, E> {
    /// A memory that begins with the pages of a prefix, all of them full, and goes on in pages of
    /// its own.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where the store refuses, which it does for a handle that has expired.
    pub fn new(
        pool: &'p Pool<E>,
        prefix: Option<Pages<'p, E>>,
        own: Pages<'p, E>,
    ) -> Result<Self, Error> {
        let shared = pool.shared();
        let full = prefix.as_ref().map_or(&[][..], Pages::groups);
        let mut sequence = SharedSequence::new(shared);
        for layer in 0..shared.layer_count() {
            let table: Vec<BlockId> = full
                .iter()
                .chain(own.groups())
                .map(|&group| shared.group_block(group, layer))
                .collect::<Option<_>>()
                .ok_or_else(|| Error::Kv("a page group has expired".into()))?;
            sequence
                .cache_mut(layer)
                .adopt(&mut shared.write(layer), &table, full.len() * pool.block_size())
                .map_err(|error| Error::Kv(error.to_string()))?;
        }
        Ok(PagedMemory { sequence, own, _prefix: prefix, pool })
    }

    /// Gives up the sequence and keeps the pages of its own, for others to adopt.
    ///
    /// A block is written only while its group has one holder, so this comes before anybody
    /// shares them.
    pub fn into_pages(self) -> Pages<'p, E> {
        self.own
    }

    /// The sequence in one layer, to be appended to.
    pub fn cache_mut(&mut self, layer: usize) -> &mut PagedKvCache {
        self.sequence.cache_mut(layer)
    }

    /// The sequence in one layer.
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        self.sequence.cache(layer)
    }

    /// The pool that its pages are from.
    pub fn pool(&self) -> &'p Pool<E> {
        self.pool
    }

    /// Positions held. The length in the last layer: between two steps all layers are equally long.
    pub fn len(&self) -> usize {
        self.sequence.cache(self.pool.shared().layer_count() - 1).seq_len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
