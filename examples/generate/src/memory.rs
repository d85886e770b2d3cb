//! One request's keys and values: pages of the shared store.
//!
//! ```text
//! groups        | prefix, held with others | own, alone |
//! table, layer  | b3 b8                    | b1 b0 b5   |     one for each layer
//!                 full, never written        written as the request goes on
//! ```

use paged_kv::cache::{PagedKvCache, PagedKvStore, PagedSequence, SharedPagedKv};
use paged_kv::{Element, PagedKvError};

use crate::error::Error;
use crate::pool::{Pages, Pool};

/// A request's memory. Dropping it, also while a panic unwinds, gives every block back.
#[derive(Debug)]
pub struct PagedMemory<'p, E: Element> {
    // A block is free when tables and groups have both let go of it.
    sequence: PagedSequence<&'p SharedPagedKv<E>, E>,
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
        let groups: Vec<_> = full.iter().chain(own.groups()).copied().collect();
        let mut sequence = PagedSequence::new(shared);
        sequence.adopt_groups(&groups, full.len() * pool.block_size()).map_err(refused)?;
        Ok(PagedMemory { sequence, own, _prefix: prefix, pool })
    }

    /// Gives up the sequence and keeps the pages of its own, for others to adopt.
    ///
    /// A block is written only while its group has one holder, so this comes before anybody
    /// shares them.
    pub fn into_pages(self) -> Pages<'p, E> {
        self.own
    }

    /// Writes rows into one layer, under its write guard. The last layer ends the step.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where the pages of its own are full.
    pub fn append(
        &mut self,
        store: &mut PagedKvStore<E>,
        layer: usize,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), Error> {
        self.sequence.append_to(store, layer, k, v, n).map_err(refused)?;
        if layer + 1 == self.pool.shared().layer_count() {
            self.sequence.commit(n).map_err(refused)?;
        }
        Ok(())
    }

    /// The sequence in one layer.
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        self.sequence.cache(layer)
    }

    /// The pool that its pages are from.
    pub fn pool(&self) -> &'p Pool<E> {
        self.pool
    }

    /// Positions held in every layer.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn refused(error: PagedKvError) -> Error {
    Error::Kv(error.to_string())
}
