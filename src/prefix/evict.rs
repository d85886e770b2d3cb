//! What goes: so many blocks, the least useful first; a salt's; or all.

use alloc::vec::Vec;

use super::Priority;
use super::cache::PrefixCache;
use super::error::RemoveError;
use super::holders::{GroupHolders, HoldersRef};
use super::stats::PrefixEvent;
use super::tree::{Leaf, NodeId, Tree};
use crate::id::PageGroup;

/// A block that was taken out of the tree and is not released yet.
struct Gone {
    node: NodeId,
    parent: NodeId,
    hash: u64,
    group: PageGroup,
    used: u64,
    priority: Priority,
}

impl<P: HoldersRef> PrefixCache<P> {
    /// Evicts until `n` groups have gone back to the pool, or nothing is left that may go. How
    /// many have.
    ///
    /// Children go before parents; of those that may go now, the ones of the lowest priority
    /// first, and of these the one whose last use is longest ago. Nothing goes that is pinned, nor
    /// what anybody [uses](GroupHolders::in_use) beside the cache: a lease, or a sequence that
    /// retained the group or adopted its blocks, which would not come back.
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
    /// assert_eq!(prefixes.evict(1), 1); // the second block: without it the first is still found
    /// assert_eq!((prefixes.peek(b"tenant", &prompt), shared.free_groups()), (4, 7));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Cost
    ///
    /// For each block the logarithm of the blocks without children, and one question to the pool
    /// for each end of a path that is held: at most as many as there are leases and sequences.
    pub fn evict(&mut self, n: usize) -> usize {
        let (mut freed, mut passed) = (0, None);
        while freed < n
            && let Some((gone, released)) = self.evict_next(&mut passed)
        {
            freed += usize::from(released);
            self.tell_removed(&gone);
        }
        freed
    }

    /// As [`evict`](Self::evict), all or none: where fewer than `n` blocks may go, nothing goes, and
    /// it is as if nobody had asked. Whether they went.
    ///
    /// `PrefixCache::reserve` and `acquire_groups` do this for a `SharedPagedKv`. It is for those who
    /// reserve otherwise.
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
    /// assert!(!prefixes.try_evict(3)); // there are two
    /// assert_eq!(prefixes.stats().cached, 2);
    /// assert!(prefixes.try_evict(2));
    /// assert_eq!((prefixes.stats().cached, shared.free_groups()), (0, 8));
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Cost
    ///
    /// As `evict`, and a list of what goes. A refusal costs as much as what could have gone.
    pub fn try_evict(&mut self, n: usize) -> bool {
        let holders = &*self.holders;
        let mut taken = Taken::new(&mut self.tree);
        let mut passed = None;
        // Nothing that is pinned goes, so that most hopeless calls look at nothing.
        while n <= taken.tree.blocks.len() + taken.out.len() - self.pinned && taken.out.len() < n {
            match take_next(taken.tree, holders, &mut passed) {
                Some(gone) => taken.out.push(gone),
                None => break,
            }
        }
        if taken.out.len() < n {
            return false;
        }
        while let Some(group) = taken.next_back() {
            self.counts.evicted += 1;
            let _freed = holders.release(group);
        }
        taken.end().iter().for_each(|gone| self.tell_removed(gone));
        true
    }

    /// Lets all blocks of a salt go, because its tenant leaves or its weights are unloaded: none of
    /// them is found from then on, and what leases and sequences hold stays theirs until they let
    /// go. Returns how many groups went back to the pool.
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
    /// assert_eq!(prefixes.remove_salt(b"another tenant")?, 0);
    /// assert_eq!(prefixes.remove_salt(b"tenant")?, 2);
    /// assert_eq!(prefixes.peek(b"tenant", &prompt), 0);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`RemoveError::Pinned`] where some of the blocks are pinned; nothing has changed then. (Were
    /// those left behind, rows of weights that are gone could be found for the next owner of the
    /// salt.)
    ///
    /// # Cost
    ///
    /// For each block the logarithm of the blocks without children, whatever else is cached. Lists
    /// of the blocks.
    pub fn remove_salt(&mut self, salt: &[u8]) -> Result<usize, RemoveError> {
        let Some(root) = self.tree.root(self.key.root(salt), salt) else { return Ok(0) };
        // Parents first; a block that has been listed is expanded when its turn comes.
        let (mut nodes, mut siblings, mut at) = (Vec::new(), Vec::new(), 0);
        self.tree.siblings(root, &mut nodes);
        while let Some(&node) = nodes.get(at) {
            self.tree.siblings(node, &mut siblings);
            nodes.append(&mut siblings);
            at += 1;
        }
        let pinned = nodes.iter().filter(|node| self.tree[**node].pins > 0).count();
        if pinned > 0 {
            return Err(RemoveError::Pinned { blocks: pinned });
        }
        let holders = &*self.holders;
        let mut taken = Taken::new(&mut self.tree);
        for node in nodes.into_iter().rev() {
            let gone = take_out(taken.tree, node);
            taken.out.push(gone);
        }
        let mut freed = 0;
        while let Some(group) = taken.next_back() {
            freed += usize::from(holders.release(group) == Ok(true));
        }
        taken.end().iter().for_each(|gone| self.tell_removed(gone));
        Ok(freed)
    }

    /// Lets every block go, pinned or held: what leases hold stays theirs, and is no longer found.
    /// For when cached rows are worth nothing any more, as after a change of the model's weights.
    ///
    /// Every [`Pin`](super::Pin) is void from then on. Returns how many groups went back to the
    /// pool.
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
    /// assert_eq!(prefixes.clear(), 0); // both groups are the lease's still
    /// assert_eq!((prefixes.stats().cached, shared.free_groups()), (0, 6));
    /// drop(lease);
    /// assert_eq!(shared.free_groups(), 8);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn clear(&mut self) -> usize {
        let freed = self.forget();
        self.tell(PrefixEvent::Cleared);
        freed
    }

    /// How many groups [`evict`](Self::evict) could give back at most now.
    ///
    /// For admission control: a request fits that needs no more than this and what is free. Asks
    /// the pool about every cached block, so ask when little is free.
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
    /// assert_eq!(shared.free_groups() + prefixes.evictable(), 8);
    /// let lease = prefixes.lookup(b"tenant", &prompt[..5]); // uses the first block
    /// assert_eq!(shared.free_groups() + prefixes.evictable(), 7);
    /// # drop(lease);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn evictable(&self) -> usize {
        let mut stays = alloc::vec![false; self.tree.nodes.len()];
        for &end in &self.tree.blocks {
            let block = &self.tree[end];
            let used = block.group.is_some_and(|group| self.holders.in_use(group));
            // And so does all that is before it, which somebody else may have been at already.
            for node in self.tree.path(end).take_while(|_| used || block.pins > 0) {
                if core::mem::replace(&mut stays[node.index()], true) {
                    break;
                }
            }
        }
        let goes = |node: &&NodeId| !stays[node.index()] && self.holders_of(**node) == 1;
        self.tree.blocks.iter().filter(goes).count()
    }

    /// Evicts the next block that may go, and says whether its group went back to the pool.
    fn evict_next(&mut self, passed: &mut Option<Leaf>) -> Option<(Gone, bool)> {
        let holders = &*self.holders;
        let gone = take_next(&mut self.tree, holders, passed)?;
        self.tree.remove_if_empty_root(gone.parent);
        self.counts.evicted += 1;
        let released = holders.release(gone.group) == Ok(true);
        Some((gone, released))
    }

    fn tell_removed(&mut self, gone: &Gone) {
        self.tell(PrefixEvent::Removed { hash: gone.hash, group: gone.group });
    }

    fn holders_of(&self, node: NodeId) -> u32 {
        self.tree[node].group.map_or(0, |group| self.holders.holders(group))
    }
}

/// Takes the next block out that may go. Everything up to `passed` is in use; what becomes a leaf
/// comes behind it, see `tree`.
fn take_next<H>(tree: &mut Tree, holders: &H, passed: &mut Option<Leaf>) -> Option<Gone>
where
    H: GroupHolders + ?Sized,
{
    loop {
        let leaf = tree.next_leaf(*passed)?;
        let group = tree[leaf.node].group.expect("a leaf is a block");
        if !holders.in_use(group) {
            return Some(take_out(tree, leaf.node));
        }
        *passed = Some(leaf);
    }
}

fn take_out(tree: &mut Tree, node: NodeId) -> Gone {
    let block = &tree[node];
    let (hash, used, priority) = (block.hash, block.used, block.priority);
    let group = block.group.expect("a block has a group");
    let parent = tree.remove_block(node);
    Gone { node, parent, hash, group, used, priority }
}

/// Blocks that were taken out, children first. Those that are not given back stand in the tree again
/// when this is dropped: none goes, or [`GroupHolders`] panicked in the middle.
struct Taken<'a> {
    tree: &'a mut Tree,
    out: Vec<Gone>,
    given_back: usize,
}

impl<'a> Taken<'a> {
    fn new(tree: &'a mut Tree) -> Self {
        Taken { tree, out: Vec::new(), given_back: 0 }
    }

    /// The next group to give back, which counts as given back from here on.
    fn next_back(&mut self) -> Option<PageGroup> {
        let gone = self.out.get(self.given_back)?;
        self.given_back += 1;
        Some(gone.group)
    }

    /// What has gone.
    fn end(mut self) -> Vec<Gone> {
        self.settle()
    }

    fn settle(&mut self) -> Vec<Gone> {
        let stays = self.out.split_off(core::mem::take(&mut self.given_back));
        // Undoes what took these out, one after the other: each gets the node that it had.
        let mut tokens = Vec::new();
        for Gone { node, parent, hash, group, used, priority } in stays.into_iter().rev() {
            tokens.clear();
            tokens.extend_from_slice(self.tree.tokens(node));
            let again = self.tree.add_block(parent, hash, &tokens, group, used, priority);
            debug_assert_eq!(again, node, "the last node given up is the first taken");
        }
        self.out.iter().for_each(|gone| self.tree.remove_if_empty_root(gone.parent));
        core::mem::take(&mut self.out)
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}
