//! Whoever counts the holders of page groups.

use core::ops::Deref;

use crate::error::GroupError;
use crate::id::PageGroup;

/// Counts the holders of page groups: [`SharedPagedKv`](crate::cache::SharedPagedKv), or a wrapper
/// around it.
///
/// A prefix cache asks this and keeps no count of its own: who holds a group is written down in one
/// place, so that two books cannot disagree about when its pages are free. It calls these under
/// whatever lock the caller keeps the cache behind, and from the drop of a lease, so none of them
/// may wait for a reader or a writer.
///
/// # Where they panic
///
/// The panic goes on to the caller and the cache is whole. A holder that was to be taken counts as not
/// taken, and one that was to be given back as given back: the cache never counts on what it may not
/// hold. The rest of what was to be given back is given back or cached as before. An insertion, an
/// eviction and a `remove_salt` may have got a part of the way, so that rows of a removed salt may still
/// be found, and the sink is not told of that part; nor is it told of a `clear`. Whoever routes by these
/// events should be told to forget this cache. (A second panic in the rest ends the process, as it does
/// where a `Vec` is dropped.)
///
/// # Examples
///
/// A wrapper that an engine passes around instead of the layers themselves:
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{GroupHolders, HashKey, PrefixCache};
/// use paged_kv::{GroupError, PageGroup};
///
/// struct Layers(SharedPagedKv);
///
/// impl GroupHolders for Layers {
///     fn retain(&self, group: PageGroup) -> Result<(), GroupError> {
///         self.0.try_retain(group)
///     }
///
///     fn release(&self, group: PageGroup) -> Result<bool, GroupError> {
///         self.0.try_release(group)
///     }
///
///     fn holders(&self, group: PageGroup) -> u32 {
///         self.0.group_refs(group)
///     }
/// }
///
/// let layers = Layers(SharedPagedKv::new(1, 16, 1, 1, 1));
/// let mut cache = PrefixCache::new(&layers, 16, HashKey::new([1; 16]));
/// assert!(cache.lookup(b"", &[7; 20]).is_empty());
/// # }
/// ```
pub trait GroupHolders {
    /// One more holder.
    ///
    /// # Errors
    ///
    /// [`GroupError`], with nothing changed.
    fn retain(&self, group: PageGroup) -> Result<(), GroupError>;

    /// One holder less; whether that was the last one.
    ///
    /// # Errors
    ///
    /// [`GroupError::Stale`] and [`GroupError::WrongPool`], with nothing changed.
    fn release(&self, group: PageGroup) -> Result<bool, GroupError>;

    /// Holders of the group; 0 where the handle names none.
    fn holders(&self, group: PageGroup) -> u32;

    /// Whether others use the group beside one holder, so that nothing would come back if that one
    /// released it: it has more holders, or sequences hold its blocks. The cache evicts no such
    /// group. Those who know only of holders may leave it as it is.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    /// use paged_kv::prefix::GroupHolders;
    ///
    /// let shared = SharedPagedKv::new(1, 16, 1, 1, 1);
    /// let group = shared.acquire_group().expect("one is free");
    /// assert!(!shared.in_use(group));
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.adopt_groups(&[group], 0)?;
    /// assert!(shared.in_use(group)); // it has one holder, and its block would not come back
    /// # shared.release_group(group);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    fn in_use(&self, group: PageGroup) -> bool {
        self.holders(group) > 1
    }

    /// The [`holders`](Self::holders) of each of a few groups, into as many counts.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// use paged_kv::cache::SharedPagedKv;
    /// use paged_kv::prefix::GroupHolders;
    ///
    /// let shared = SharedPagedKv::new(1, 16, 2, 1, 1);
    /// let groups = shared.acquire_groups(2)?;
    /// shared.retain_group(groups[1]);
    /// let mut counts = [0; 2];
    /// shared.holders_each(&groups, &mut counts);
    /// assert_eq!(counts, [1, 2]);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    fn holders_each(&self, groups: &[PageGroup], counts: &mut [u32]) {
        groups.iter().zip(counts).for_each(|(group, count)| *count = self.holders(*group));
    }

    /// One more holder of each, in order, up to the first that is refused: how many got one. None has
    /// one where this panics.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[cfg(any(feature = "std", feature = "spin"))] {
    /// use paged_kv::cache::SharedPagedKv;
    /// use paged_kv::prefix::GroupHolders;
    ///
    /// let shared = SharedPagedKv::new(1, 16, 3, 1, 1);
    /// let groups = shared.acquire_groups(3)?;
    /// shared.release_group(groups[1]);
    /// assert_eq!(shared.retain_each(&groups), 1); // it stops at the second
    /// assert_eq!((shared.holders(groups[0]), shared.holders(groups[2])), (2, 1));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    fn retain_each(&self, groups: &[PageGroup]) -> usize {
        let mut held = GiveBack { holders: self, groups: [].iter().copied() };
        for (index, group) in groups.iter().enumerate() {
            if self.retain(*group).is_err() {
                break;
            }
            held.groups = groups[..=index].iter().copied();
        }
        let count = held.groups.len();
        held.groups = [].iter().copied();
        count
    }
}

/// Groups that are to be given back, one after the other, and the rest where one of them panics.
pub(super) struct GiveBack<'a, H: GroupHolders + ?Sized, I: Iterator<Item = PageGroup>> {
    pub(super) holders: &'a H,
    pub(super) groups: I,
}

impl<H: GroupHolders + ?Sized, I: Iterator<Item = PageGroup>> GiveBack<'_, H, I> {
    /// Gives all back. How many have no holder any more.
    pub(super) fn run(mut self) -> usize {
        let mut freed = 0;
        for group in self.groups.by_ref() {
            // Refused only where somebody released what was not theirs; there may be nobody to tell,
            // in the middle of unwinding, and `check_invariants` tells of the group.
            freed += usize::from(self.holders.release(group) == Ok(true));
        }
        freed
    }
}

impl<H: GroupHolders + ?Sized, I: Iterator<Item = PageGroup>> Drop for GiveBack<'_, H, I> {
    fn drop(&mut self) {
        for group in self.groups.by_ref() {
            let _gone_already = self.holders.release(group);
        }
    }
}

/// The way to whoever counts the holders: `&SharedPagedKv`, or an `Arc` of it.
///
/// Implemented for everything that can be. A cache and each of its leases keep one.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use std::sync::Arc;
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{HashKey, HoldersRef, PrefixCache};
///
/// /// Of several caches, the one that knows most of a prompt.
/// fn route<P: HoldersRef>(caches: &[PrefixCache<P>], prompt: &[u32]) -> usize {
///     (0..caches.len()).max_by_key(|&at| caches[at].peek(b"", prompt)).unwrap_or(0)
/// }
///
/// let pool = Arc::new(SharedPagedKv::new(1, 16, 1, 1, 1));
/// let cache = || PrefixCache::new(Arc::clone(&pool), 16, HashKey::new([7; 16]));
/// assert_eq!(route(&[cache()], &[1, 2, 3]), 0);
/// # }
/// ```
pub trait HoldersRef: Deref<Target: GroupHolders> + Clone {}

impl<P: Deref<Target: GroupHolders> + Clone> HoldersRef for P {}

#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
impl<E: crate::share::spec::LayerElement> GroupHolders for crate::share::shared::SharedPagedKv<E> {
    fn retain(&self, group: PageGroup) -> Result<(), GroupError> {
        self.try_retain(group)
    }

    fn release(&self, group: PageGroup) -> Result<bool, GroupError> {
        self.try_release(group)
    }

    fn holders(&self, group: PageGroup) -> u32 {
        self.group_refs(group)
    }

    fn in_use(&self, group: PageGroup) -> bool {
        self.is_group_in_use(group)
    }

    fn holders_each(&self, groups: &[PageGroup], counts: &mut [u32]) {
        self.group_refs_each(groups, counts);
    }
}

/// Everybody holds everything once.
#[cfg(test)]
pub(crate) struct Once;

#[cfg(test)]
impl GroupHolders for Once {
    fn retain(&self, _: PageGroup) -> Result<(), GroupError> {
        Ok(())
    }

    fn release(&self, _: PageGroup) -> Result<bool, GroupError> {
        Ok(true)
    }

    fn holders(&self, _: PageGroup) -> u32 {
        1
    }
}
