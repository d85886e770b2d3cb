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
/// let cache = PrefixCache::new(&layers, 16, HashKey::new([1; 16]));
/// # drop(cache);
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
    fn in_use(&self, group: PageGroup) -> bool {
        self.holders(group) > 1
    }

    /// The [`holders`](Self::holders) of each of a few groups, into as many counts.
    fn holders_each(&self, groups: &[PageGroup], counts: &mut [u32]) {
        groups.iter().zip(counts).for_each(|(group, count)| *count = self.holders(*group));
    }

    /// One more holder of each, in order, up to the first that is refused: how many got one.
    fn retain_each(&self, groups: &[PageGroup]) -> usize {
        groups.iter().take_while(|group| self.retain(**group).is_ok()).count()
    }
}

/// The way to whoever counts the holders: `&SharedPagedKv`, or an `Arc` of it.
///
/// Implemented for everything that can be. A cache and each of its leases keep one.
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
