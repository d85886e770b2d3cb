//! What a lookup found, held until it is let go.

use alloc::vec::Vec;
use core::fmt;

use super::holders::{GiveBack, HoldersRef};
use crate::id::PageGroup;

/// The cached groups that cover the beginning of a prompt, each held once more until the lease is
/// dropped.
///
/// Keep it as long as the sequence that uses the groups: nothing it holds is evicted meanwhile. It
/// does not borrow the cache and may outlive it; what it holds is held at the pool itself.
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
/// let lease = prefixes.lookup(b"tenant", &[1, 2, 3, 4, 5, 6, 9, 9]);
/// assert!(!lease.is_empty());
/// assert_eq!((lease.covered(), lease.groups().len(), lease.full_groups().len()), (6, 2, 1));
/// drop(prefixes); // the lease holds what it holds
/// assert_eq!(shared.free_groups(), 6);
/// drop(lease);
/// assert_eq!(shared.free_groups(), 8);
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
///
/// # Deadlock
///
/// Dropping it takes the pool's group table and nothing else, and never the cache: it is legal
/// under the lock that the cache is kept behind, under any guard of the pool, and while unwinding.
///
/// # Panics
///
/// If following `P` panics when this is dropped, there is no way to the pool, and the groups stay held.
///
/// ```compile_fail
/// fn twice<T: Clone>(_: T) {}
/// let shared = paged_kv::cache::SharedPagedKv::new(1, 16, 1, 1, 1);
/// let key = paged_kv::prefix::HashKey::new([1; 16]);
/// let mut cache = paged_kv::prefix::PrefixCache::new(&shared, 16, key);
/// twice(cache.lookup(b"", &[]));
/// ```
#[must_use = "dropping the lease lets its groups go"]
pub struct Lease<P: HoldersRef> {
    holders: P,
    groups: Vec<PageGroup>,
    covered: usize,
    block_size: usize,
}

/// A cached block of which only the first positions are of use.
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
/// let lease = prefixes.lookup(b"tenant", &[1, 2, 3, 4, 5, 6, 9, 9]);
/// let part = lease.partial().expect("it ends inside a block");
/// assert_eq!((part.positions, part.group), (2, lease.groups()[1])); // 5 and 6
/// # drop(lease);
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartialBlock {
    /// Where the rows are.
    pub group: PageGroup,
    /// How many of its positions, from the first on.
    pub positions: usize,
}

impl<P: HoldersRef> Lease<P> {
    /// `groups` are held already.
    pub(super) fn new(
        holders: P,
        groups: Vec<PageGroup>,
        covered: usize,
        block_size: usize,
    ) -> Self {
        debug_assert_eq!(groups.len(), covered.div_ceil(block_size));
        Lease { holders, groups, covered, block_size }
    }

    /// Lets the partly used block go, once its rows are copied. The lease covers the full blocks
    /// from then on.
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
    /// let mut lease = prefixes.lookup(b"tenant", &[1, 2, 3, 4, 5, 6, 9, 9]);
    /// lease.release_partial();
    /// assert_eq!((lease.covered(), lease.groups().len()), (4, 1));
    /// assert_eq!(prefixes.evict(2), 1); // the block of 5 to 8
    /// # drop(lease);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn release_partial(&mut self) {
        let full = self.covered / self.block_size;
        // Followed first: where `P` panics, the part is held as before.
        let holders = &*self.holders;
        self.covered = full * self.block_size;
        GiveBack { holders, groups: self.groups.drain(full..) }.run();
    }

    /// Hands the groups over, with their counts: whoever takes them releases each once.
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
    /// let groups = prefixes.lookup(b"tenant", &prompt[..5]).into_groups();
    /// assert_eq!(shared.group_refs(groups[0]), 2); // the cache, and whoever has this list
    /// assert!(!shared.release_group(groups[0]));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    #[must_use = "nobody releases the groups but who takes them"]
    pub fn into_groups(mut self) -> Vec<PageGroup> {
        core::mem::take(&mut self.groups)
    }

    /// Positions that need not be computed: at most one less than the tokens looked up.
    pub fn covered(&self) -> usize {
        self.covered
    }

    /// Whether it covers nothing.
    pub fn is_empty(&self) -> bool {
        self.covered == 0
    }

    /// All groups, in the order of their positions; the last is used in part where
    /// [`partial`](Self::partial) says so.
    pub fn groups(&self) -> &[PageGroup] {
        &self.groups
    }

    /// The groups that are covered whole.
    pub fn full_groups(&self) -> &[PageGroup] {
        &self.groups[..self.covered / self.block_size]
    }

    /// The last group, where only its first positions are covered.
    ///
    /// Its other rows belong to another prompt. A sequence that
    /// [adopts](crate::cache::PagedSequence::adopt_groups) all groups with
    /// [`covered`](Self::covered) positions copies the block in every layer when it first reserves,
    /// so that nobody's rows are written over; from then on the lease may
    /// [let it go](Self::release_partial). The copy is in no group, so that it and what comes behind
    /// it cannot be inserted. Or the request does without and computes those positions.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// # use paged_kv::cache::{PagedSequence, SharedPagedKv};
    /// # use paged_kv::prefix::{HashKey, PrefixCache, Priority};
    /// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
    /// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
    /// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
    /// # let groups = prefixes.acquire_groups(2)?;
    /// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
    /// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
    /// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
    /// let mut lease = prefixes.lookup(b"tenant", &[1, 2, 3, 4, 5, 6, 9, 9]);
    /// assert!(lease.partial().is_some());
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.adopt_groups(lease.groups(), lease.covered())?;
    /// sequence.reserve(2)?; // copies the part
    /// lease.release_partial();
    /// assert_eq!((lease.partial(), sequence.len()), (None, 6));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn partial(&self) -> Option<PartialBlock> {
        let positions = self.covered % self.block_size;
        let group = *self.groups.last()?;
        (positions > 0).then_some(PartialBlock { group, positions })
    }
}

impl<P: HoldersRef> Drop for Lease<P> {
    fn drop(&mut self) {
        // Handed over or a miss: a panic on the way would lose what was handed over.
        if self.groups.is_empty() {
            return;
        }
        // From the last to the first, as they would be evicted.
        GiveBack { holders: &*self.holders, groups: self.groups.drain(..).rev() }.run();
    }
}

impl<P: HoldersRef> fmt::Debug for Lease<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = &self.groups;
        f.debug_struct("Lease").field("groups", groups).field("covered", &self.covered).finish()
    }
}
