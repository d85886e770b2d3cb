//! One request's keys and values: a sequence over all layers of the shared store.
//!
//! ```text
//! table, layer  | b3 b8            | b1 b0           | b5 ...
//!                 found             own, of the prompt  taken as the answer grows
//! groups        | held with others | held alone      |
//! ```
//!
//! The table of a sequence holds its blocks by itself. The groups are held beside it as long as a
//! prefix cache may know them: a group that somebody holds is not evicted, so that an eviction
//! always frees a block and never just takes the cache's name off one that is in use.

use paged_kv::cache::{Holder, PagedKvCache, PagedKvStore, PagedSequence, SharedPagedKv};
use paged_kv::{Element, PagedKvError};

use crate::error::Error;
use crate::pool::{Pages, Pool};

/// A request's memory. Dropping it, also while a panic unwinds, gives every block back.
#[derive(Debug)]
pub struct PagedMemory<'p, E: Element> {
    sequence: PagedSequence<&'p SharedPagedKv<E>, E>,
    pages: Pages<'p, E>,
    pool: &'p Pool<E>,
}

impl<'p, E: Element> PagedMemory<'p, E> {
    /// An empty memory, which takes its blocks as it is written.
    pub fn new(pool: &'p Pool<E>) -> Self {
        PagedMemory { sequence: PagedSequence::new(pool.shared()), pages: Pages::none(pool), pool }
    }

    /// A memory that begins with pages found, all of them full, and goes on in pages of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where the store refuses, which it does for a handle that has expired.
    pub fn begin(found: Pages<'p, E>, own: Pages<'p, E>) -> Result<Self, Error> {
        let pool = found.pool();
        let len = found.groups().len() * pool.block_size();
        let pages = found.and(own);
        let mut sequence = PagedSequence::new(pool.shared());
        sequence.adopt_groups(pages.groups(), len).map_err(Error::kv)?;
        Ok(PagedMemory { sequence, pages, pool })
    }

    /// Makes room for `n` positions more, in all layers or in none.
    ///
    /// # Errors
    ///
    /// As [`PagedSequence::reserve`]: [`PagedKvError::Exhausted`] where blocks are short.
    pub fn reserve(&mut self, n: usize) -> Result<(), PagedKvError> {
        self.pool.watch(|| self.sequence.reserve(n))
    }

    /// Keeps the first `count` groups and lets go of the others, whose blocks the sequence holds.
    pub fn keep_groups(&mut self, count: usize) {
        self.pages.truncate(count);
    }

    /// A second memory of the same positions, in the same blocks. Nothing is copied before one of
    /// the two is written.
    ///
    /// To be called when the groups that are held are full blocks: others are written by nobody
    /// while two hold them.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where a block has as many holders as can be counted.
    pub fn fork(&self) -> Result<Self, Error> {
        let sequence = self.sequence.fork().map_err(Error::kv)?;
        Ok(PagedMemory { sequence, pages: self.pages.share(), pool: self.pool })
    }

    /// Writes rows into one layer, under its write guard, into room that was reserved. The last
    /// layer ends the step.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where there is no room.
    pub fn append(
        &mut self,
        store: &mut PagedKvStore<E>,
        layer: usize,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), Error> {
        self.sequence.append_to(store, layer, k, v, n).map_err(Error::kv)?;
        if layer + 1 == self.pool.shared().layer_count() {
            self.sequence.commit(n).map_err(Error::kv)?;
        }
        Ok(())
    }

    /// The sequence in one layer.
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        self.sequence.cache(layer)
    }

    /// The groups that are held, in order of positions.
    pub fn pages(&self) -> &Pages<'p, E> {
        &self.pages
    }

    /// All that is held, for a recount.
    pub fn holders(&self) -> impl Iterator<Item = Holder<'_>> {
        let groups = self.pages.groups().iter();
        self.sequence.holders().chain(groups.map(|&group| Holder::Group(group)))
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
