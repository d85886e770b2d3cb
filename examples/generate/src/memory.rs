//! One request's keys and values: pages of the shared store, attended by this crate.
//!
//! ```text
//! groups        | prefix, held with others | own, alone |
//! table, layer  | b3 b8                    | b1 b0 b5   |     one for each layer
//!                 full, never written        written as the request goes on
//! ```
//!
//! A layer's write guard is held for the append alone; attention then reads under a read guard
//! together with every other request. Nothing can break in between: the blocks that a request
//! writes are its own.

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedKvCache, SharedPagedKv, SharedSequence};
use paged_kv::{BlockId, GqaShape, KvShape, Level};

use crate::error::Error;
use crate::model::{Memory, Rows};
use crate::pool::{Pages, Pool};

/// A request's memory. Dropping it, also while a panic unwinds, gives every block back.
#[derive(Debug)]
pub struct PagedMemory<'p> {
    // Dropped in this order. A block is free when tables and groups have both let go of it, and
    // it is the drop of the pages that wakes those who wait for blocks.
    sequence: SharedSequence<&'p SharedPagedKv>,
    own: Pages<'p>,
    _prefix: Option<Pages<'p>>,
    shared: &'p SharedPagedKv,
    shape: GqaShape,
    level: Level,
    scratch: Vec<f32>,
}

impl<'p> PagedMemory<'p> {
    /// A memory that begins with the pages of a prefix, all of them full, and goes on in pages of
    /// its own.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where the store refuses, which it does for a handle that has expired.
    pub fn new(
        pool: &'p Pool,
        prefix: Option<Pages<'p>>,
        own: Pages<'p>,
        level: Level,
    ) -> Result<Self, Error> {
        let sizes = pool.sizes();
        let shape = KvShape::square(pool.block_size(), sizes.n_kv_heads, sizes.head_dim)
            .and_then(|kv| GqaShape::new(kv, sizes.n_heads))
            .map_err(refused)?;
        let shared = pool.shared();
        let full = prefix.as_ref().map_or(&[][..], Pages::groups);
        let mut sequence = SharedSequence::new(shared);
        for layer in 0..sizes.layers {
            let table: Vec<BlockId> = full
                .iter()
                .chain(own.groups())
                .map(|&group| shared.group_block(group, layer))
                .collect::<Option<_>>()
                .ok_or_else(|| Error::Kv("a page group has expired".into()))?;
            sequence
                .cache_mut(layer)
                .adopt(&mut shared.write(layer), &table, full.len() * pool.block_size())
                .map_err(refused)?;
        }
        let scratch = Vec::new();
        Ok(PagedMemory { sequence, own, _prefix: prefix, shared, shape, level, scratch })
    }

    /// Gives up the sequence and keeps the pages of its own, for others to adopt.
    ///
    /// A block is written only while its group has one holder, so this comes before anybody
    /// shares them.
    pub fn into_pages(self) -> Pages<'p> {
        self.own
    }

    /// The sequence in one layer.
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        self.sequence.cache(layer)
    }
}

impl Memory for PagedMemory<'_> {
    /// The length in the last layer: between two forward steps all layers are equally long.
    fn len(&self) -> usize {
        self.sequence.cache(self.shared.layer_count() - 1).seq_len()
    }

    fn attend(&mut self, layer: usize, rows: Rows<'_>, out: &mut [f32]) -> Result<(), Error> {
        let need = attention_scratch_len(&self.shape, rows.count);
        if self.scratch.len() < need {
            self.scratch.resize(need, 0.0);
        }
        // The guard lives to the end of this statement.
        self.sequence
            .cache_mut(layer)
            .try_append(&mut self.shared.write(layer), rows.k, rows.v, rows.count)
            .map_err(refused)?;
        let options = AttentionOptions::new().level(self.level);
        let store = self.shared.read(layer);
        let n_heads = self.shape.n_heads();
        let cache = self.sequence.cache(layer);
        let scratch = &mut self.scratch;
        causal_gqa_attention_paged_into(rows.q, &store, cache, n_heads, &options, out, scratch)
            .map_err(refused)
    }
}

fn refused(error: impl std::error::Error) -> Error {
    Error::Kv(error.to_string())
}
