//! The store that all requests share, and how blocks are taken from it.
//!
//! A request gets every block it can ever need before it starts, as page groups: one block in each
//! layer, all layers or none. Asking for blocks while running would let two requests, each half
//! done, wait for the other's half; with everything in hand a request that has started ends, and no
//! step can fail for want of a block.

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
    ///
    /// # Errors
    ///
    /// [`Error::NeverFits`] for more groups than the pool has.
    pub fn acquire(&self, count: usize) -> Result<Option<Pages<'_, E>>, Error> {
        if count > self.blocks {
            let positions = count.saturating_mul(self.block_size());
            return Err(Error::NeverFits { positions, need: count, have: self.blocks });
        }
        let mut pages = Pages { pool: self, groups: Vec::with_capacity(count) };
        while pages.groups.len() < count {
            match self.shared.acquire_group() {
                Some(group) => pages.groups.push(group),
                // Those that were had go back with `pages`.
                None => return Ok(None),
            }
        }
        self.handed_out.set(self.handed_out.get() + count);
        self.peak.set(self.peak.get().max(self.blocks - self.shared.free_groups()));
        Ok(Some(pages))
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

impl<E: Element> Pages<'_, E> {
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
}

impl<E: Element> Drop for Pages<'_, E> {
    fn drop(&mut self) {
        for group in self.groups.drain(..) {
            self.pool.shared.release_group(group);
        }
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
        let pages = pool.acquire(3).unwrap().unwrap();
        let again = pages.share();
        drop(pages);
        assert_eq!(pool.shared().free_groups(), 2);
        drop(again);
        assert_eq!(pool.shared().free_groups(), 5);
        assert_eq!((pool.peak(), pool.handed_out()), (3, 3));
    }

    #[test]
    fn all_or_none() {
        let pool = pool::<Int8>(5);
        let held = pool.acquire(3).unwrap().unwrap();
        assert!(pool.acquire(3).unwrap().is_none());
        assert_eq!((pool.shared().free_groups(), pool.handed_out()), (2, 3));
        drop(held);
        assert_eq!(pool.acquire(5).unwrap().unwrap().groups().len(), 5);
    }

    #[test]
    fn more_than_the_pool_is_refused_at_once() {
        let error = pool::<f32>(5).acquire(6).unwrap_err();
        assert!(matches!(error, Error::NeverFits { need: 6, have: 5, .. }), "{error}");
    }

    #[test]
    fn a_token_takes_what_its_numbers_take() {
        // Two layers, keys and values of 4 numbers.
        assert_eq!(pool::<f32>(1).bytes_per_token(), 2 * 2 * 4 * 4);
    }
}
