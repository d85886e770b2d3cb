//! The cache: what is looked up, stored and pinned.

use alloc::vec::Vec;
use core::fmt;

use super::error::{InsertError, PinError};
use super::hash::HashKey;
use super::holders::{GiveBack, GroupHolders, HoldersRef};
use super::lease::Lease;
use super::stats::{PrefixEvent, PrefixSink, PrefixStats};
use super::tree::{NodeId, Tree};
use super::{Inserted, Pin, Priority};
use crate::id::{CacheEra, PageGroup};

/// Finds the page groups that hold the beginning of a prompt already.
///
/// The room's [essay](super) says what it is and what it promises. `P` is the way to the pool:
/// `&SharedPagedKv`, or an `Arc` of it.
///
/// # Memory
///
/// A cached block takes 56 bytes and four for each of its tokens, twice that at worst after the
/// vectors have grown; 6 to 12 bytes in a hash table; four for each group that the pool can hand
/// out; and 24 to 60 where no block stands behind it. With blocks of 64 that is 320 to 710 bytes.
/// There is no bound to set: each cached block holds a group, so that the pool is the bound. A salt
/// that blocks stand behind takes as much as a block, and its own bytes: bound how long one may be.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{HashKey, PrefixCache, Priority};
///
/// let shared = SharedPagedKv::new(1, 4, 8, 1, 1); // 8 blocks of 4 positions
/// let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
/// let groups = prefixes.acquire_groups(2)?; // a request writes its rows there
/// prefixes.insert(b"tenant", &[1, 2, 3, 4, 5, 6, 7, 8], &groups, Priority::NORMAL)?;
/// groups.into_iter().for_each(|group| assert!(!shared.release_group(group))); // and is done
/// assert_eq!((prefixes.block_size(), prefixes.stats().cached, shared.free_groups()), (4, 2, 6));
///
/// let lease = prefixes.lookup(b"tenant", &[1, 2, 3, 4, 5, 6, 9, 9]);
/// assert_eq!((lease.covered(), prefixes.evictable()), (6, 0));
/// prefixes.check_invariants([lease.groups()])?;
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
///
/// # Deadlock
///
/// Takes the pool's group table, a leaf, and waits for no reader and no writer: its methods are legal
/// under any guard of the pool. It has no lock of its own; keep it behind one of yours.
///
/// # Panics
///
/// It does not by itself; what is whole where the pool's holders panic says [`GroupHolders`]. If following
/// `P` panics when this is dropped, there is no way to the pool, and what it holds stays held.
pub struct PrefixCache<P: HoldersRef> {
    pub(super) holders: P,
    pub(super) key: HashKey,
    pub(super) tree: Tree,
    /// Time, in uses.
    pub(super) clock: u64,
    era: CacheEra,
    /// Pins that are out.
    pins: u32,
    /// Blocks that they cover.
    pub(super) pinned: usize,
    pin_budget: usize,
    pub(super) counts: PrefixStats,
    sink: Option<PrefixSink>,
}

/// The end of a way through the tree.
struct Found {
    node: NodeId,
    hash: u64,
    /// Full blocks on the way.
    blocks: usize,
}

impl<P: HoldersRef> PrefixCache<P> {
    /// An empty cache of blocks of `block_size` positions, which must be what the pool's blocks
    /// have in every layer. Nothing can be pinned until a budget is set.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// use std::sync::Arc;
    /// use paged_kv::cache::SharedPagedKv;
    /// use paged_kv::prefix::{HashKey, PrefixCache};
    ///
    /// let shared = Arc::new(SharedPagedKv::new(2, 16, 8, 1, 4));
    /// let mut prefixes = PrefixCache::new(Arc::clone(&shared), 16, HashKey::new([7; 16]));
    /// assert_eq!((prefixes.block_size(), prefixes.pin_budget()), (16, 0));
    /// assert!(prefixes.lookup(b"", &[1; 100]).is_empty());
    /// # }
    /// ```
    ///
    /// # Panics
    ///
    /// If `block_size` is 0.
    #[track_caller]
    pub fn new(holders: P, block_size: usize, key: HashKey) -> Self {
        assert!(block_size > 0, "a block has at least one position");
        PrefixCache {
            holders,
            key,
            tree: Tree::new(block_size, u64::MAX),
            clock: 0,
            era: CacheEra::fresh(),
            pins: 0,
            pinned: 0,
            pin_budget: 0,
            counts: PrefixStats::default(),
            sink: None,
        }
    }

    /// As [`new`](Self::new), but its tables see only so many bits of a hash, so that collisions
    /// are the rule.
    #[cfg(feature = "internal")]
    #[doc(hidden)]
    pub fn with_hash_bits(holders: P, block_size: usize, key: HashKey, bits: u32) -> Self {
        let mask = u64::MAX.checked_shr(u64::BITS - bits).unwrap_or(0);
        let mut cache = Self::new(holders, block_size, key);
        cache.tree.mask = mask;
        cache
    }

    /// How many blocks may be pinned at once. Lowering it unpins nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PinError, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// let refused = prefixes.pin(b"tenant", &prompt);
    /// assert_eq!(refused, Err(PinError::OverBudget { need: 2, left: 0 }));
    /// prefixes.set_pin_budget(2);
    /// assert_eq!(prefixes.pin_budget(), 2);
    /// let pin = prefixes.pin(b"tenant", &prompt)?;
    /// # prefixes.unpin(pin)?;
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn set_pin_budget(&mut self, blocks: usize) {
        self.pin_budget = blocks;
    }

    /// Has every event told to `sink`, or to nobody.
    ///
    /// It is called in the middle of an operation, under the caller's lock: it should pass the
    /// event on and return. If it panics, the cache is whole, all that it was told of has happened,
    /// and it may not be told of the rest of that operation. Where [`GroupHolders`] panics, it is told
    /// of nothing that was not told before.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, PrefixEvent, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// use core::sync::atomic::{AtomicUsize, Ordering};
    /// use std::sync::Arc;
    ///
    /// let removed = Arc::new(AtomicUsize::new(0));
    /// let count = Arc::clone(&removed);
    /// prefixes.set_sink(Some(Box::new(move |event| {
    ///     let gone = usize::from(matches!(event, PrefixEvent::Removed { .. }));
    ///     count.fetch_add(gone, Ordering::Relaxed);
    /// })));
    /// prefixes.evict(2);
    /// assert_eq!(removed.load(Ordering::Relaxed), 2);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn set_sink(&mut self, sink: Option<PrefixSink>) {
        self.sink = sink;
    }

    /// Forgets every block and every pin, and gives the groups back. How many have gone back to the
    /// pool.
    pub(super) fn forget(&mut self) -> usize {
        // Followed first: where `P` panics, nothing is forgotten.
        let holders = &*self.holders;
        let Tree { block_size, mask, .. } = self.tree;
        let tree = core::mem::replace(&mut self.tree, Tree::new(block_size, mask));
        (self.pinned, self.pins, self.era) = (0, 0, CacheEra::fresh());
        give_back(holders, &tree)
    }

    pub(super) fn tell(&mut self, event: PrefixEvent<'_>) {
        if let Some(sink) = &mut self.sink {
            sink(event);
        }
    }

    /// Finds the cached beginning of a prompt and holds its groups.
    ///
    /// The lease covers one position less than there are tokens at most: what comes after a prompt
    /// is computed from its last position. It ends with a part of a block where a cached block
    /// begins with the next tokens and goes on otherwise, or would cover the last one. A group
    /// that cannot be held (because somebody released the cache's own count of it) ends it as if
    /// it were not there.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// let lease = prefixes.lookup(b"tenant", &prompt);
    /// assert_eq!(lease.covered(), 7); // what follows is computed from the last token's row
    /// assert!(prefixes.lookup(b"another tenant", &prompt).is_empty());
    /// assert_eq!(prefixes.evict(2), 0); // not while it is held
    /// # drop(lease);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Cost
    ///
    /// One allocation for a hit, none for a miss; for each block one hash, one comparison of its
    /// tokens and one count at the pool; for the end, the logarithm of the blocks behind one
    /// parent and of those without children. Independent of what else is cached and of the pool's size.
    ///
    /// Of 4,096 tokens on a Zen 4, hashing takes 1.1 ns a token in blocks of 16 and 0.74 in blocks of
    /// 64 (ids below 2^21; others a fifth more): SipHash goes through eight bytes at a time, one after
    /// the other, and five times more for each block. With the table and the comparison it is 1.6 and
    /// 0.9 ([`peek`](Self::peek)), and with the counts of one layer 3.2 and 1.3.
    pub fn lookup(&mut self, salt: &[u8], tokens: &[u32]) -> Lease<P> {
        // The lease's own, while there is nothing to be lost.
        let holders = self.holders.clone();
        let (groups, covered) = self.find_and_hold(salt, tokens).unwrap_or_default();
        self.counts.tokens_asked += tokens.len() as u64;
        self.counts.tokens_saved += covered as u64;
        self.counts.hits += u64::from(covered > 0);
        self.counts.misses += u64::from(covered == 0);
        self.counts.partial_hits += u64::from(!covered.is_multiple_of(self.tree.block_size));
        Lease::new(holders, groups, covered, self.tree.block_size)
    }

    /// How many positions a lookup would cover. Holds nothing and counts as no use: by the time
    /// the caller acts on it they may be evicted.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// // Where should this request go?
    /// assert_eq!(prefixes.peek(b"tenant", &[1, 2, 3, 4, 5, 9, 9]), 5);
    /// assert_eq!(prefixes.stats().tokens_asked, 0); // that was no lookup
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn peek(&self, salt: &[u8], tokens: &[u32]) -> usize {
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let Some(found) = self.descend(salt, most) else { return 0 };
        let full = found.blocks * self.tree.block_size;
        full + self.closest(&found, most).map_or(0, |(_, positions)| positions)
    }

    /// Stores the full blocks of `tokens`, whose rows are in `groups`; the cache becomes one more
    /// holder of each group it stores. All or nothing.
    ///
    /// To be called when every row of these blocks is written in every layer, and with groups that
    /// the caller holds. `groups[i]` holds the positions from `i * block_size` on; what is
    /// behind the last full block is not looked at. A block that is cached already stays as it
    /// is, with the group it has: the caller's own copy is not stored.
    ///
    /// All these blocks, stored or known, count as used now, and have this priority at least.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// let longer = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]; // three full blocks
    /// let groups = prefixes.acquire_groups(4)?;
    /// let inserted = prefixes.insert(b"tenant", &longer, &groups, Priority::NORMAL)?;
    /// assert_eq!((inserted.known, inserted.stored), (2, 1));
    /// # groups.into_iter().for_each(|group| drop(shared.release_group(group)));
    /// assert_eq!(shared.free_groups(), 5); // the caller has given back its four
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InsertError::GroupCount`] for fewer groups than full blocks, [`InsertError::GroupCached`]
    /// for a group that holds other tokens, or is named twice, [`InsertError::Group`] for a handle
    /// that the pool refuses.
    ///
    /// # Cost
    ///
    /// As [`lookup`](Self::lookup), and amortised no allocation; the tokens are copied.
    pub fn insert(
        &mut self,
        salt: &[u8],
        tokens: &[u32],
        groups: &[PageGroup],
        priority: Priority,
    ) -> Result<Inserted, InsertError> {
        let size = self.tree.block_size;
        let need = tokens.len() / size;
        if groups.len() < need {
            return Err(InsertError::GroupCount { need, have: groups.len() });
        }
        if need == 0 {
            return Ok(Inserted::default());
        }
        let used = self.tick();
        let from = self.descend(salt, tokens);
        let holders = &*self.holders;
        let from = from.unwrap_or_else(|| {
            let hash = self.key.root(salt);
            Found { node: self.tree.add_root(hash, salt), hash, blocks: 0 }
        });
        let (tree, counts) = (&mut self.tree, &mut self.counts);
        let mut path =
            Growing { holders, tree, counts, from: from.node, end: from.node, used, priority };
        let mut hash = from.hash;
        for (tokens, &group) in tokens.chunks_exact(size).zip(groups).skip(from.blocks) {
            hash = self.key.block(hash, tokens);
            if let Err(error) = path.grow(hash, tokens, group) {
                path.take_back();
                return Err(error);
            }
        }
        let end = path.end;
        drop(path);
        let stored = need - from.blocks;
        if stored == 0 {
            self.tree.touch(end, used, Some(priority));
        }
        self.tell_stored(salt, end, stored);
        Ok(Inserted { stored, known: from.blocks })
    }

    /// Keeps the full blocks of `tokens` from being evicted until the pin is given back.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// prefixes.set_pin_budget(2);
    /// let pin = prefixes.pin(b"tenant", &prompt)?; // a system prompt
    /// assert_eq!((prefixes.evict(2), prefixes.stats().pinned), (0, 2));
    /// prefixes.unpin(pin)?;
    /// assert_eq!(prefixes.evict(2), 2);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PinError::TooShort`], [`PinError::NotCached`] where one of them is not cached, and
    /// [`PinError::OverBudget`]; [`PinError::TooMany`] at 2^32 pins.
    ///
    /// # Cost
    ///
    /// One hash and one comparison for each block.
    pub fn pin(&mut self, salt: &[u8], tokens: &[u32]) -> Result<Pin, PinError> {
        let size = self.tree.block_size;
        let need = tokens.len() / size;
        if need == 0 {
            return Err(PinError::TooShort { need: size, have: tokens.len() });
        }
        let end = match self.descend(salt, tokens) {
            Some(found) if found.blocks == need => found.node,
            found => {
                let have = found.map_or(0, |found| found.blocks);
                return Err(PinError::NotCached { need, have });
            }
        };
        // What is before a pinned block is pinned.
        let fresh = self.tree.path(end).take_while(|node| self.tree[*node].pins == 0).count();
        let left = self.pin_budget.saturating_sub(self.pinned);
        if fresh > left {
            return Err(PinError::OverBudget { need: fresh, left });
        }
        self.pins = self.pins.checked_add(1).ok_or(PinError::TooMany)?;
        self.pinned += fresh;
        self.tree.pin(end);
        Ok(Pin { end, era: self.era })
    }

    /// Gives a pin back. Returns how many blocks are no longer pinned by anybody.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::SharedPagedKv;
    /// # use paged_kv::prefix::{HashKey, PinError, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// prefixes.set_pin_budget(2);
    /// let first = prefixes.pin(b"tenant", &prompt)?;
    /// let second = prefixes.pin(b"tenant", &prompt[..4])?; // the first block, pinned twice
    /// assert_eq!(prefixes.unpin(first), Ok(1));
    /// prefixes.clear();
    /// assert_eq!(prefixes.unpin(second), Err(PinError::UnknownPin));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PinError::UnknownPin`].
    pub fn unpin(&mut self, pin: Pin) -> Result<usize, PinError> {
        if pin.era != self.era {
            return Err(PinError::UnknownPin);
        }
        let free = self.tree.unpin(pin.end);
        self.pinned -= free;
        self.pins -= 1;
        Ok(free)
    }

    /// Positions of a block.
    pub fn block_size(&self) -> usize {
        self.tree.block_size
    }

    /// How many blocks may be pinned at once.
    pub fn pin_budget(&self) -> usize {
        self.pin_budget
    }

    /// What it holds, and what it has done.
    pub fn stats(&self) -> PrefixStats {
        PrefixStats {
            block_size: self.tree.block_size,
            bytes_per_block: self.tree.bytes_per_block(),
            cached: self.tree.blocks.len(),
            pinned: self.pinned,
            salts: self.tree.roots.len(),
            ..self.counts
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// As far as the full blocks of `tokens` are cached.
    fn descend(&self, salt: &[u8], tokens: &[u32]) -> Option<Found> {
        let hash = self.key.root(salt);
        let mut found = Found { node: self.tree.root(hash, salt)?, hash, blocks: 0 };
        for tokens in tokens.chunks_exact(self.tree.block_size) {
            let hash = self.key.block(found.hash, tokens);
            let Some(node) = self.tree.child(found.node, hash, tokens) else { break };
            found = Found { node, hash, blocks: found.blocks + 1 };
        }
        Some(found)
    }

    /// The block behind that begins with more of `tokens`, and how many.
    fn closest(&self, found: &Found, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let rest = &tokens[found.blocks * self.tree.block_size..];
        self.tree.closest(found.node, &rest[..rest.len().min(self.tree.block_size)])
    }

    /// The groups of a hit, and the positions they cover; `None` for a miss.
    fn find_and_hold(&mut self, salt: &[u8], tokens: &[u32]) -> Option<(Vec<PageGroup>, usize)> {
        let size = self.tree.block_size;
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let found = self.descend(salt, most)?;
        let (end, mut covered) = match self.closest(&found, most) {
            Some((node, positions)) => (node, found.blocks * size + positions),
            None => (found.node, found.blocks * size),
        };
        let mut groups = Vec::with_capacity(covered.div_ceil(size));
        groups.extend(self.tree.path(end).filter_map(|node| self.tree[node].group));
        groups.reverse();
        let held = self.holders.retain_each(&groups);
        if held < groups.len() {
            groups.truncate(held);
            covered = held * size;
        }
        let used = self.tick();
        self.tree.touch(end, used, None);
        Some((groups, covered))
    }

    /// Tells of the last `stored` blocks up to `end`, the first of them first.
    fn tell_stored(&mut self, salt: &[u8], end: NodeId, stored: usize) {
        let Some(sink) = &mut self.sink else { return };
        let tree = &self.tree;
        let path: Vec<_> = tree.path(end).take(stored).collect();
        for node in path.into_iter().rev() {
            let block = &tree[node];
            if let (Some(group), Some(parent)) = (block.group, block.parent) {
                let (parent, hash) = (tree[parent].hash, block.hash);
                sink(PrefixEvent::Stored { salt, parent, hash, tokens: tree.tokens(node), group });
            }
        }
    }
}

/// Blocks on their way in, from one that is known, or a root, to the last of them. Wherever it ends,
/// what is in is whole: it ends in the middle where [`GroupHolders`] panics.
struct Growing<'a, H: GroupHolders + ?Sized> {
    holders: &'a H,
    tree: &'a mut Tree,
    counts: &'a mut PrefixStats,
    from: NodeId,
    end: NodeId,
    used: u64,
    priority: Priority,
}

impl<H: GroupHolders + ?Sized> Growing<'_, H> {
    /// One more, whose group is not cached and gets one more holder.
    fn grow(&mut self, hash: u64, tokens: &[u32], group: PageGroup) -> Result<(), InsertError> {
        if self.tree.cached(group).is_some() {
            return Err(InsertError::GroupCached { group });
        }
        self.holders.retain(group)?;
        self.end = self.tree.add_block(self.end, hash, tokens, group, self.used, self.priority);
        self.counts.stored += 1;
        Ok(())
    }

    /// All of them out again.
    fn take_back(mut self) {
        while self.end != self.from {
            let group = self.tree[self.end].group;
            self.end = self.tree.remove_block(self.end);
            self.counts.stored -= 1;
            let _just_retained = group.map(|group| self.holders.release(group));
        }
    }
}

impl<H: GroupHolders + ?Sized> Drop for Growing<'_, H> {
    fn drop(&mut self) {
        if self.end == self.from {
            self.tree.remove_if_empty_root(self.from);
        } else {
            self.tree.touch(self.end, self.used, Some(self.priority));
        }
    }
}

impl<P: HoldersRef> Drop for PrefixCache<P> {
    fn drop(&mut self) {
        give_back(&*self.holders, &self.tree);
    }
}

/// Gives the groups of all blocks back.
fn give_back<H: GroupHolders + ?Sized>(holders: &H, tree: &Tree) -> usize {
    let groups = tree.blocks.iter().filter_map(|node| tree[*node].group);
    GiveBack { holders, groups }.run()
}

impl<P: HoldersRef> fmt::Debug for PrefixCache<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = &self.tree.block_size;
        f.debug_struct("PrefixCache")
            .field("block_size", size)
            .field("pin_budget", &self.pin_budget)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Once;
    use super::*;

    #[test]
    fn a_pin_is_counted_until_it_is_taken_back() {
        let mut cache = PrefixCache::new(&Once, 2, HashKey::new([7; 16]));
        cache.insert(b"", &[1, 2], &[PageGroup::new(0, 0, 0)], Priority::NORMAL).unwrap();
        cache.set_pin_budget(1);
        let pins = [(); 2].map(|()| cache.pin(b"", &[1, 2]).unwrap());
        for (pin, left) in pins.into_iter().zip([1, 0]) {
            cache.unpin(pin).unwrap();
            assert_eq!(cache.pins, left);
        }
        cache.pins = u32::MAX;
        assert_eq!(cache.pin(b"", &[1, 2]).err(), Some(PinError::TooMany));
    }
}
