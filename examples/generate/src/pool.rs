//! The store that all requests share, and how blocks are taken from it.
//!
//! A prompt's blocks are taken as page groups, one block in each layer, all layers or none: what is
//! to be found again must have a handle that all layers know. What comes behind a prompt is taken
//! block by block, as the answer grows.

use std::cell::Cell;

use paged_kv::cache::{PageGroup, SharedPagedKv};
use paged_kv::{Element, GqaShape, KvShape};

use crate::error::Error;
use crate::model::Sizes;

/// The shared store, with a note of what was taken from it.
#[derive(Debug)]
pub struct Pool<E: Element> {
    shared: SharedPagedKv<E>,
    shape: GqaShape,
    blocks: usize,
    peak: Cell<usize>,
    handed_out: Cell<usize>,
}

/// Some page groups, one holder each, given up when dropped.
#[derive(Debug)]
pub struct Pages<'p, E: Element> {
    pool: &'p Pool<E>,
    groups: Vec<PageGroup>,
}

impl<E: Element> Pool<E> {
    /// A store of `blocks` blocks in each layer of a model.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where no memory can have that size, or no page that shape.
    pub fn new(sizes: &Sizes, block_size: usize, blocks: usize) -> Result<Self, Error> {
        let open = || {
            let kv = KvShape::square(block_size, sizes.n_kv_heads, sizes.head_dim)?;
            let shared = SharedPagedKv::with_shape(sizes.layers, kv, blocks)?;
            Ok((shared, GqaShape::new(kv, sizes.n_heads)?))
        };
        let (shared, shape) = open().map_err(|error: paged_kv::ShapeError| {
            Error::Kv(format!("{blocks} blocks of {block_size} positions of {}: {error}", E::NAME))
        })?;
        Ok(Pool { shared, shape, blocks, peak: Cell::new(0), handed_out: Cell::new(0) })
    }

    /// Takes `count` groups, all or none: `None` where they are not free.
    pub fn acquire(&self, count: usize) -> Option<Pages<'_, E>> {
        let groups = self.watch(|| self.shared.acquire_groups(count)).ok()?;
        Some(Pages { pool: self, groups })
    }

    /// Makes some groups, one count on each of which is handed over, pages.
    pub(crate) fn pages(&self, groups: Vec<PageGroup>) -> Pages<'_, E> {
        Pages { pool: self, groups }
    }

    /// Has blocks taken, and takes note of how many.
    pub(crate) fn watch<T>(&self, take: impl FnOnce() -> T) -> T {
        let before = self.shared.free_groups();
        let taken = take();
        let free = self.shared.free_groups();
        self.handed_out.set(self.handed_out.get() + before.saturating_sub(free));
        self.peak.set(self.peak.get().max(self.blocks - free));
        taken
    }

    /// Why a request of so many positions can never run, if so.
    pub fn refusal(&self, positions: usize) -> Option<Error> {
        let refused = !self.shared.can_ever_fit(positions);
        let need = positions.div_ceil(self.block_size());
        refused.then_some(Error::NeverFits { positions, need, have: self.blocks })
    }

    /// The store.
    pub fn shared(&self) -> &SharedPagedKv<E> {
        &self.shared
    }

    /// The shape of its pages, and the query heads that ask of them.
    pub fn shape(&self) -> GqaShape {
        self.shape
    }

    /// Positions in one block.
    pub fn block_size(&self) -> usize {
        self.shape.kv().block_size()
    }

    /// Blocks in each layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes that a position takes, over all layers, scales and padding included.
    pub fn bytes_per_token(&self) -> usize {
        let layers = 0..self.shared.layer_count();
        let bytes: usize = layers.map(|layer| self.shared.read(layer).bytes_per_block()).sum();
        bytes.div_ceil(self.block_size())
    }

    /// The most blocks that were held at once, in each layer.
    pub fn peak(&self) -> usize {
        self.peak.get()
    }

    /// Blocks handed out since the start, in each layer.
    pub fn handed_out(&self) -> usize {
        self.handed_out.get()
    }
}

impl<'p, E: Element> Pages<'p, E> {
    /// No groups.
    pub fn none(pool: &'p Pool<E>) -> Self {
        Pages { pool, groups: Vec::new() }
    }

    /// The groups, in order of positions.
    pub fn groups(&self) -> &[PageGroup] {
        &self.groups
    }

    /// A second holder of the same groups.
    pub fn share(&self) -> Self {
        let mut pages = Pages { pool: self.pool, groups: Vec::with_capacity(self.groups.len()) };
        for &group in &self.groups {
            self.pool.shared.retain_group(group);
            pages.groups.push(group);
        }
        pages
    }

    /// These groups and then those.
    #[must_use]
    pub fn and(mut self, mut those: Self) -> Self {
        self.groups.append(&mut those.groups);
        self
    }

    /// Keeps the first `count` groups and gives up the others.
    pub fn truncate(&mut self, count: usize) {
        for group in self.groups.drain(count.min(self.groups.len())..) {
            self.pool.shared.release_group(group);
        }
    }

    /// The pool they are from.
    pub fn pool(&self) -> &'p Pool<E> {
        self.pool
    }
}

impl<E: Element> Drop for Pages<'_, E> {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paged_kv::Int8;

    fn pool<E: Element>(blocks: usize) -> Pool<E> {
        let sizes = Sizes {
            layers: 2,
            width: 8,
            inner: 8,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            vocabulary: 10,
            context: 100,
            rope_base: 1e4,
            epsilon: 1e-5,
        };
        Pool::new(&sizes, 16, blocks).unwrap()
    }

    #[test]
    fn what_is_dropped_comes_back() {
        let pool = pool::<f32>(5);
        let mut pages = pool.acquire(3).unwrap();
        let again = pages.share();
        pages.truncate(1);
        assert_eq!((pages.groups().len(), pool.shared().free_groups()), (1, 2));
        drop(again);
        assert_eq!(pool.shared().free_groups(), 4);
        let both = pages.and(pool.acquire(2).unwrap());
        assert_eq!((both.groups().len(), pool.shared().free_groups()), (3, 2));
        drop(both);
        assert_eq!(pool.shared().free_groups(), 5);
        assert_eq!((pool.peak(), pool.handed_out()), (3, 5));
    }

    #[test]
    fn all_or_none() {
        let pool = pool::<Int8>(5);
        let held = pool.acquire(3).unwrap();
        assert!(pool.acquire(3).is_none());
        assert_eq!((pool.shared().free_groups(), pool.handed_out()), (2, 3));
        drop(held);
        assert_eq!(pool.acquire(5).unwrap().groups().len(), 5);
    }

    #[test]
    fn more_than_the_pool_is_refused() {
        let pool = pool::<f32>(5);
        assert!(pool.refusal(5 * 16).is_none());
        let refusal = pool.refusal(5 * 16 + 1).unwrap();
        assert!(matches!(refusal, Error::NeverFits { positions: 81, need: 6, have: 5 }));
    }

    #[test]
    fn a_token_takes_what_its_numbers_take() {
        // Two layers, keys and values of 4 numbers.
        assert_eq!(pool::<f32>(1).bytes_per_token(), 2 * 2 * 4 * 4);
    }
}
