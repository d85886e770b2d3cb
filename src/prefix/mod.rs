//! Which prompts begin like one that was computed before, and where the rows of that beginning are.
//!
//! Requests share beginnings: a system prompt, the turns of a conversation so far, a document that
//! many ask about. Their keys and values depend on the tokens up to them and on nothing else, so
//! whoever has filled a block of positions has filled it for everybody with the same tokens up to
//! its end. A [`PrefixCache`] keeps such blocks, as page groups, after their request is done, and
//! finds them for the next one.
//!
//! The room knows token ids and handles of page groups. It refuses to know what a row is, which
//! layers there are, and who waits for whom. It evicts when it is asked for room that is not there.
//!
//! # The tree
//!
//! A block is named by what it holds *and* by all that is before it, so blocks form a tree for each
//! salt. Here blocks of four, after three prompts:
//!
//! ```text
//! "tenant 1" ── [ 1  2  3  4] ─┬─ [ 5  6  7  8] ── [ 9 10 11 12]     1..12
//!               group 0v0      │  group 1v0        group 2v0
//!                              └─ [ 5  6  9  9]                      1..6, 9, 9
//!                                 group 3v0
//! "tenant 2" ── [ 1  2  3  4]                                        1..4
//!               group 4v0
//!
//! lookup("tenant 1", [1 2 3 4 5 6 7 8 9 9])    0v0, 1v0 whole, 1 position of 2v0: covers 9
//! lookup("tenant 1", [1 2 3 4 5 6 7 8])        0v0 whole, 3 positions of 1v0: covers 7
//! lookup("tenant 2", [5 6 7 8 9])              covers 0
//! ```
//!
//! A lookup goes from the salt down, and at each step asks a hash table for the block that holds
//! the next tokens behind the block it stands at. The hash chains all that came before, and is never
//! trusted: parent and tokens are compared, and the parent's were compared before, so that by
//! induction a hit is the same tokens from the first on. Two blocks that collide are two entries.
//! Trusting the hash instead, a collision would show up as another conversation's tokens rather than
//! as a crash.
//!
//! The last prompt token is never covered: what comes after it is computed from its query row. Where
//! the next block is not cached as a whole, the lease ends with the longest common part of one that is.
//!
//! # Salts
//!
//! Whatever else the rows depend on is the salt: the weights (a LoRA), and whoever must not learn
//! from a fast answer what others have asked (a tenant). Salts are bytes, compared as they are. An
//! image in the middle of a prompt does not need one, which would also part what is before it:
//! write a digest of the image over its placeholder ids, of which eight hold 256 bits.
//!
//! # Who holds what
//!
//! A cache holds each cached group once, a [`Lease`] holds each of its groups once more, and both
//! counts are those of the pool itself ([`GroupHolders`]). There is no second book of who uses what:
//! a group may be evicted when the pool says that the cache is its only holder, and that no sequence
//! has adopted its blocks, which would not come back. So nothing has to be
//! told to the cache when a lease ends, a lease can end anywhere, and a cache that is dropped first
//! leaves leases whole.
//!
//! ```text
//! request                    cache             pool
//!   lookup  ───────────────▶ find  ──────────▶ retain each            Lease
//!   acquire_groups  ───────▶ evict ──────────▶ release                where the pool is short
//!   adopt
//!   reserve ───────────────▶ evict ──────────▶ release                where the pool is short
//!   prefill
//!   insert  ───────────────▶ store ──────────▶ retain each new one
//!   decode ...
//!   drop    ─────────────────────────────────▶ release each           not the cache
//! ```
//!
//! A request that looked up, prefilled and inserted twice the same thing beside another one that
//! did so at the same time finds its blocks known: the first ones stay cached, its own copies live
//! as long as it does.
//!
//! # Which goes first
//!
//! Leaves of the tree only: a block whose parent is gone could not be found, and would be memory
//! that nobody can use. Of these the lowest [`Priority`] first, then the one that was not used for
//! longest. Whoever uses a block uses all before it, and whoever stores one says of all before it
//! that they matter as much, so the order of leaves is an order of all: no block goes before one
//! that was used longer ago, but for those that are pinned or used by anybody else, which stay.
//!
//! Room is made for a request as a whole or not at all: where all that may go would not be enough,
//! [`PrefixCache::reserve`] evicts nothing, and others still find it.
//!
//! # Threads
//!
//! A cache has no lock: keep it behind one of yours, for a lookup or an insertion at a time, which
//! take microseconds. Its methods and the drop of a lease take the pool's group table alone, so that
//! all of it is legal under any guard of the pool.
//!
//! # Examples
//!
//! A request's life, twice:
//!
//! ```
//! # #[cfg(not(any(feature = "std", feature = "spin")))]
//! # fn main() {}
//! # #[cfg(any(feature = "std", feature = "spin"))]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use paged_kv::cache::{PagedSequence, SharedPagedKv};
//! use paged_kv::prefix::{HashKey, PrefixCache, Priority};
//!
//! let shared = SharedPagedKv::new(1, 4, 8, 1, 2); // one layer, 8 blocks of 4 positions
//! let key = HashKey::new([7; 16]); // in earnest: random bytes
//! let mut prefixes = PrefixCache::new(&shared, 4, key);
//! let prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
//!
//! for computed in [10, 2] {
//!     // What is cached: 0 positions, then 8.
//!     let mut lease = prefixes.lookup(b"tenant 1", &prompt);
//!     lease.release_partial(); // a part of a block is not worth a copy here
//!     let covered = lease.covered();
//!     assert_eq!(prompt.len() - covered, computed);
//!
//!     // Groups for the rest; where there are too few, others' blocks go. An error says to wait.
//!     let mut groups = lease.groups().to_vec();
//!     let found = groups.len();
//!     groups.extend(prefixes.acquire_groups(prompt.len().div_ceil(4) - found)?);
//!
//!     // The sequence begins with what was found, and computes the rest.
//!     let mut sequence = PagedSequence::new(&shared);
//!     sequence.adopt_groups(&groups, covered)?;
//!     prefixes.reserve(&mut sequence, computed)?;
//!     for &token in &prompt[covered..] {
//!         let row = [token as f32; 2];
//!         sequence.push(0, &row, &row)?;
//!     }
//!     sequence.commit(computed)?;
//!
//!     // Two blocks are full. The third is not, and is not stored.
//!     let inserted = prefixes.insert(b"tenant 1", &prompt, &groups, Priority::NORMAL)?;
//!     assert_eq!((inserted.known, inserted.stored), (found, 2 - found));
//!
//!     // ... decode; then everything goes, but for what is cached.
//!     for group in groups.drain(found..) {
//!         shared.release_group(group);
//!     }
//! }
//! assert_eq!(shared.free_groups(), 6);
//! assert_eq!(prefixes.stats().tokens_saved, 8);
//! # prefixes.check_invariants([])?;
//! # Ok(())
//! # }
//! ```

mod cache;
mod check;
mod error;
mod evict;
mod hash;
mod holders;
mod lease;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
mod room;
mod siblings;
mod stats;
mod tree;

#[cfg(all(test, loom))]
mod loom_tests;

pub use cache::PrefixCache;
pub use check::{PrefixFault, PrefixReport};
pub use error::{InsertError, PinError, RemoveError};
pub use hash::HashKey;
#[cfg(test)]
pub(crate) use holders::Once;
pub use holders::{GroupHolders, HoldersRef};
pub use lease::{Lease, PartialBlock};
pub use stats::{PrefixEvent, PrefixSink, PrefixStats};

use crate::id::CacheEra;
use tree::NodeId;

/// How long a cached block should stay, compared with others: those of a lower priority go first,
/// however lately they were used.
///
/// # Examples
///
/// ```
/// use paged_kv::prefix::Priority;
///
/// assert!(Priority::LOWEST < Priority::new(17) && Priority::new(17) < Priority::default());
/// assert_eq!((Priority::NORMAL.get(), Priority::HIGHEST.get()), (128, 255));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(u8);

impl Priority {
    /// The first to go.
    pub const LOWEST: Priority = Priority(0);
    /// In the middle.
    pub const NORMAL: Priority = Priority(128);
    /// The last to go.
    pub const HIGHEST: Priority = Priority(255);

    /// The higher, the longer it stays.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::prefix::Priority;
    ///
    /// let system_prompt = Priority::new(200);
    /// assert!(Priority::NORMAL < system_prompt && system_prompt < Priority::HIGHEST);
    /// ```
    pub const fn new(priority: u8) -> Self {
        Priority(priority)
    }

    /// The number it was made from.
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl Default for Priority {
    fn default() -> Self {
        Priority::NORMAL
    }
}

/// What [`PrefixCache::insert`] did.
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
/// // Somebody else has computed the same prompt meanwhile.
/// let groups = prefixes.acquire_groups(2)?;
/// let inserted = prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
/// assert_eq!((inserted.known, inserted.stored), (2, 0));
/// # groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inserted {
    /// Blocks that were stored.
    pub stored: usize,
    /// Blocks that were cached before, and keep the groups they had.
    pub known: usize,
}

/// Keeps cached blocks from being evicted until it is given to [`PrefixCache::unpin`].
///
/// Dropped instead, they stay until the cache is cleared or dropped.
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
/// prefixes.set_pin_budget(1);
/// drop(prefixes.pin(b"tenant", &prompt[..4])?);
/// assert_eq!(prefixes.evict(2), 1); // the pinned block stays
/// assert_eq!((prefixes.clear(), prefixes.stats().pinned), (1, 0));
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[must_use = "what is pinned stays until the pin is given back"]
#[derive(Debug, PartialEq, Eq)]
pub struct Pin {
    end: NodeId,
    /// The cache, and the time between two clears, that `end` means something in.
    era: CacheEra,
}
