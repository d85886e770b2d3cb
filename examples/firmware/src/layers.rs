//! Five layers and the requests in them.
//!
//! On a processor with compare-and-swap an author has [`SharedPagedKv`](paged_kv::cache::SharedPagedKv),
//! which keeps the layers together and counts who holds what: [`shared`]. On any other there are the
//! stores alone, and the author keeps them together himself: [`Stores`]. Either way the prefix is
//! in memory once, and the bits are the same.

use alloc::vec::Vec;

use paged_kv::attention::{AttentionOptions, causal_gqa_attention_paged_into};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::{Element, KvShape};

use crate::{BLOCKS, LAYERS, N_HEADS, Result};

/// Key and value rows.
pub(crate) struct Rows {
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

impl Rows {
    fn count(&self) -> usize {
        self.k.len() / crate::KV_ROW
    }
}

/// What a program asks of its layers.
pub(crate) trait Layers: Sized {
    /// One sequence, in all layers.
    type Request;

    /// Empty layers.
    fn open(shape: KvShape) -> Result<Self>;

    /// Appends to what all requests begin with.
    fn write_prefix(&mut self, layer: usize, rows: &Rows) -> Result<()>;

    /// A request that begins with the prefix and copies none of it.
    fn begin(&mut self) -> Result<Self::Request>;

    /// The next position of a layer.
    fn write(&mut self, request: &mut Self::Request, layer: usize, rows: &Rows) -> Result<()>;

    /// Attends over a layer, the position just written included.
    fn attend(
        &self,
        request: &Self::Request,
        layer: usize,
        q: &[f32],
        options: &AttentionOptions<'_>,
        out: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<()>;

    /// All layers are written: the request is one position longer.
    fn end_step(&mut self, request: &mut Self::Request) -> Result<()>;

    /// The request's blocks go back; with the last request, those of the prefix.
    fn end(&mut self, request: Self::Request) -> Result<()>;

    /// Free blocks of all layers.
    fn free_blocks(&self) -> usize;
}

/// What rows can be stored as, where layers can be shared and where not.
#[cfg(target_has_atomic = "ptr")]
pub(crate) trait Stored:
    Element + paged_kv::cache::LayerElement<Store = PagedKvStore<Self>>
{
}

#[cfg(target_has_atomic = "ptr")]
impl<E: Element + paged_kv::cache::LayerElement<Store = PagedKvStore<E>>> Stored for E {}

#[cfg(not(target_has_atomic = "ptr"))]
pub(crate) use paged_kv::Element as Stored;

/// A store for each layer, and of each request a block table for each.
pub(crate) struct Stores<E: Element> {
    stores: Vec<PagedKvStore<E>>,
    /// The prefix, until the last request has begun.
    prefix: Vec<PagedKvCache>,
    to_begin: usize,
}

impl<E: Element> Layers for Stores<E> {
    type Request = Vec<PagedKvCache>;

    fn open(shape: KvShape) -> Result<Self> {
        let mut stores = Vec::new();
        for _ in 0..LAYERS {
            stores.push(PagedKvStore::with_shape(shape, BLOCKS)?);
        }
        let prefix = stores.iter().map(|_| PagedKvCache::new()).collect();
        Ok(Stores { stores, prefix, to_begin: crate::REQUESTS })
    }

    fn write_prefix(&mut self, layer: usize, rows: &Rows) -> Result<()> {
        let (store, cache) = (&mut self.stores[layer], &mut self.prefix[layer]);
        Ok(cache.append(store, &rows.k, &rows.v, rows.count())?)
    }

    fn begin(&mut self) -> Result<Self::Request> {
        self.to_begin -= 1;
        if self.to_begin == 0 {
            return Ok(core::mem::take(&mut self.prefix));
        }
        let mut request = Vec::new();
        for (store, cache) in self.stores.iter_mut().zip(&self.prefix) {
            request.push(cache.fork(store)?);
        }
        Ok(request)
    }

    fn write(&mut self, request: &mut Self::Request, layer: usize, rows: &Rows) -> Result<()> {
        Ok(request[layer].push(&mut self.stores[layer], &rows.k, &rows.v)?)
    }

    fn attend(
        &self,
        request: &Self::Request,
        layer: usize,
        q: &[f32],
        options: &AttentionOptions<'_>,
        out: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<()> {
        let (store, cache) = (&self.stores[layer], &request[layer]);
        Ok(causal_gqa_attention_paged_into(q, store, cache, N_HEADS, options, out, scratch)?)
    }

    fn end_step(&mut self, _: &mut Self::Request) -> Result<()> {
        Ok(())
    }

    fn end(&mut self, mut request: Self::Request) -> Result<()> {
        for (store, cache) in self.stores.iter_mut().zip(&mut request) {
            cache.release(store)?;
        }
        Ok(())
    }

    fn free_blocks(&self) -> usize {
        self.stores.iter().map(PagedKvStore::free_block_count).sum()
    }
}

/// The layers in one, for requests on several threads or in interrupts' shadows.
#[cfg(target_has_atomic = "ptr")]
pub(crate) mod shared {
    use alloc::sync::Arc;
    use alloc::vec::Vec;

    use paged_kv::attention::{AttentionOptions, causal_gqa_attention_paged_into};
    use paged_kv::cache::{PagedSequence, SharedPagedKv};
    use paged_kv::{KvShape, PageGroup};

    use super::{Layers, Rows, Stored};
    use crate::{BLOCK, BLOCKS, LAYERS, N_HEADS, PREFIX, Result};

    /// The prefix is held in page groups until the last request has adopted them.
    pub(crate) struct Shared<E: Stored> {
        layers: Arc<SharedPagedKv<E>>,
        groups: Vec<PageGroup>,
        writer: PagedSequence<Arc<SharedPagedKv<E>>, E>,
        to_begin: usize,
    }

    impl<E: Stored> Layers for Shared<E> {
        type Request = PagedSequence<Arc<SharedPagedKv<E>>, E>;

        fn open(shape: KvShape) -> Result<Self> {
            let layers = Arc::new(SharedPagedKv::with_shape(LAYERS, shape, BLOCKS)?);
            let groups = layers.acquire_groups(PREFIX / BLOCK)?;
            // Nothing of it is written yet: all of it is room to grow into.
            let mut writer = PagedSequence::new(Arc::clone(&layers));
            writer.adopt_groups(&groups, 0)?;
            Ok(Shared { layers, groups, writer, to_begin: crate::REQUESTS })
        }

        fn write_prefix(&mut self, layer: usize, rows: &Rows) -> Result<()> {
            self.writer.append(layer, &rows.k, &rows.v, rows.count())?;
            if layer == LAYERS - 1 {
                self.writer.commit(rows.count())?;
            }
            Ok(())
        }

        fn begin(&mut self) -> Result<Self::Request> {
            let mut request = PagedSequence::new(Arc::clone(&self.layers));
            request.adopt_groups(&self.groups, PREFIX)?;
            self.to_begin -= 1;
            if self.to_begin == 0 {
                // The requests hold the blocks from here on.
                self.writer.release();
                for group in self.groups.drain(..) {
                    self.layers.release_group(group);
                }
            }
            Ok(request)
        }

        fn write(&mut self, request: &mut Self::Request, layer: usize, rows: &Rows) -> Result<()> {
            if layer == 0 {
                // Room in all layers, or in none.
                request.reserve(1)?;
            }
            Ok(request.push(layer, &rows.k, &rows.v)?)
        }

        fn attend(
            &self,
            request: &Self::Request,
            layer: usize,
            q: &[f32],
            options: &AttentionOptions<'_>,
            out: &mut [f32],
            scratch: &mut [f32],
        ) -> Result<()> {
            let store = self.layers.read(layer);
            let cache = request.cache(layer);
            Ok(causal_gqa_attention_paged_into(q, &store, cache, N_HEADS, options, out, scratch)?)
        }

        fn end_step(&mut self, request: &mut Self::Request) -> Result<()> {
            Ok(request.commit(1)?)
        }

        fn end(&mut self, request: Self::Request) -> Result<()> {
            drop(request);
            Ok(())
        }

        fn free_blocks(&self) -> usize {
            (0..LAYERS).map(|layer| self.layers.free_blocks(layer)).sum()
        }
    }
}
