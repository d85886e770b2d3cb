//! Beginnings of prompts that are in the store already, found by their tokens.
//!
//! A [`PrefixCache`] in whole chunks. It would find any number of tokens, but what it finds is only
//! worth having where a request would have computed the same bits, and those depend on how many
//! rows went through a product together (see [`model`](crate::model)). So blocks are stored of
//! whole chunks alone, and what is found ends where both a block and a chunk end:
//!
//! ```text
//! prompt    |....chunk....|....chunk....|..    blocks of 48:   64 and 48 meet every 192 positions
//! stored    |.............|.............|
//! found     |.............|                    another prompt, which differs in the second chunk
//! ```

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use paged_kv::Element;
use paged_kv::cache::{Holder, PageGroup, SharedPagedKv};
use paged_kv::prefix::{HashKey, PrefixCache, PrefixEvent, Priority};

use crate::error::Error;
use crate::model::CHUNK;
use crate::pool::{Pages, Pool};

/// One model and nobody to keep apart.
const SALT: &[u8] = b"";

/// The beginnings of prompts that were computed and not evicted.
#[derive(Debug)]
pub struct Prefixes<'p, E: Element> {
    pool: &'p Pool<E>,
    cache: PrefixCache<&'p SharedPagedKv<E>>,
    /// Positions that are stored and found together.
    step: usize,
    /// The groups that the cache holds, as it tells of them.
    cached: Arc<Mutex<HashSet<PageGroup>>>,
}

impl<'p, E: Element> Prefixes<'p, E> {
    /// Nothing yet, of a pool.
    pub fn new(pool: &'p Pool<E>) -> Self {
        let mut cache = PrefixCache::new(pool.shared(), pool.block_size(), key());
        let cached = Arc::new(Mutex::new(HashSet::new()));
        let told = Arc::clone(&cached);
        cache.set_sink(Some(Box::new(move |event| {
            let mut cached = told.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                PrefixEvent::Stored { group, .. } => _ = cached.insert(group),
                PrefixEvent::Removed { group, .. } => _ = cached.remove(&group),
                PrefixEvent::Cleared => cached.clear(),
                _ => (),
            }
        })));
        Prefixes { pool, cache, step: step(pool.block_size()), cached }
    }

    /// How many positions of a prompt would be found. One at least is left to compute: somebody
    /// needs its logits.
    pub fn peek(&self, prompt: &[u32]) -> usize {
        self.whole(self.cache.peek(SALT, prompt))
    }

    /// The pages of what is found of a prompt, held from here on.
    pub fn find(&mut self, prompt: &[u32]) -> Pages<'p, E> {
        // No more is looked up than is taken, so that the cache's own account is right.
        let asked = prompt.len().min(self.peek(prompt) + 1);
        let lease = self.cache.lookup(SALT, &prompt[..asked]);
        let blocks = self.whole(lease.covered()) / self.pool.block_size();
        let mut pages = self.pool.pages(lease.into_groups());
        pages.truncate(blocks);
        pages
    }

    /// How many positions of the second prompt will be found when the first is computed.
    pub fn in_common(&self, first: &[u32], second: &[u32]) -> usize {
        let common = first.iter().zip(second).take_while(|(a, b)| a == b).count();
        self.whole(common.min(second.len().saturating_sub(1)))
    }

    /// Stores a prompt, all of it computed, that stands in these pages. How many of them, from the
    /// first on, hold what is stored.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] where the cache refuses.
    pub fn insert(&mut self, prompt: &[u32], pages: &Pages<'p, E>) -> Result<usize, Error> {
        let whole = &prompt[..self.whole(prompt.len())];
        let stored = self.cache.insert(SALT, whole, pages.groups(), Priority::NORMAL);
        stored.map_err(Error::kv)?;
        Ok(whole.len() / self.pool.block_size())
    }

    /// Frees `n` blocks in each layer that nobody uses, or as many as there are. How many.
    pub fn evict(&mut self, n: usize) -> usize {
        self.cache.evict(n)
    }

    /// Takes `n` groups that are free or that the cache can spare, all or none. It spares none that
    /// do not suffice.
    pub fn acquire(&mut self, n: usize) -> Option<Pages<'p, E>> {
        let short = n.saturating_sub(self.pool.shared().free_groups());
        if short > 0 {
            if self.cache.evictable() < short {
                return None;
            }
            self.evict(short);
        }
        self.pool.acquire(n)
    }

    /// Blocks evicted so far, in each layer.
    pub fn evicted(&self) -> u64 {
        self.cache.stats().evicted
    }

    /// Recounts the cache and the pool from the pages that requests hold and from all their holdings.
    ///
    /// # Errors
    ///
    /// [`Error::Kv`] with all that is wrong.
    pub fn check<'a>(
        &self,
        pages: impl Iterator<Item = &'a Pages<'p, E>>,
        holders: impl Iterator<Item = Holder<'a>>,
    ) -> Result<(), Error>
    where
        'p: 'a,
    {
        self.cache.check_invariants(pages.map(Pages::groups)).map_err(Error::kv)?;
        let cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        let cached = cached.iter().map(|&group| Holder::Group(group));
        self.pool.shared().check_invariants(holders.chain(cached)).map_err(Error::kv)
    }

    fn whole(&self, positions: usize) -> usize {
        positions - positions % self.step
    }
}

/// Positions after which both a block and a chunk end. Where they are more than can be counted,
/// they are more than any prompt has.
fn step(block_size: usize) -> usize {
    (CHUNK / gcd(CHUNK, block_size)).saturating_mul(block_size)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Sixteen bytes by chance, of which std gives eight to everybody who makes a hash table.
fn key() -> HashKey {
    let word = || RandomState::new().build_hasher().finish().to_le_bytes();
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&word());
    bytes[8..].copy_from_slice(&word());
    HashKey::new(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_ends_a_block_and_a_chunk() {
        for (block_size, positions) in [(16, 64), (64, 64), (48, 192), (128, 128), (100, 1600)] {
            assert_eq!(step(block_size), positions, "block size {block_size}");
        }
        assert_eq!(step(usize::MAX), usize::MAX);
    }

    #[test]
    fn keys_are_not_alike() {
        // Of the hash of nothing, which is the same for the same key.
        let word = || RandomState::new().build_hasher().finish();
        assert_ne!(word(), word());
    }
}
