//! The books, recounted.

use alloc::vec::Vec;
use core::error::Error;
use core::fmt;

use super::cache::PrefixCache;
use super::holders::{GroupHolders, HoldersRef};
use super::tree::{Node, NodeId};
use crate::id::PageGroup;

/// One thing that is wrong with a [`PrefixCache`].
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// # use paged_kv::cache::SharedPagedKv;
/// # use paged_kv::prefix::{HashKey, PrefixCache, PrefixFault, Priority};
/// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
/// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
/// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
/// # let groups = prefixes.acquire_groups(2)?;
/// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
/// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
/// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
/// let lease = prefixes.lookup(b"tenant", &prompt[..5]);
/// let group = lease.groups()[0];
/// let report = prefixes.check_invariants([]).unwrap_err();
/// assert_eq!(report.faults(), [PrefixFault::Holders { group, counted: 2, found: 1 }]);
/// # drop(lease);
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefixFault {
    /// The pool counts another number of holders than name the group.
    ///
    /// More counted than found is a leak, or a holder that was not handed in; fewer is a release
    /// of what was not one's own, after which the pages are somebody else's.
    Holders {
        /// The group.
        group: PageGroup,
        /// Holders that the pool counts.
        counted: u32,
        /// The cache, and those that were handed in.
        found: u32,
    },
    /// The block's tokens and history do not lead to it.
    Lost {
        /// Its group.
        group: PageGroup,
    },
    /// The group is not known to be cached, or for another block.
    Unlisted {
        /// The group.
        group: PageGroup,
    },
    /// The block was used after the one before it, matters more, or is pinned more often.
    AheadOfParent {
        /// Its group.
        group: PageGroup,
    },
    /// The block is among those that may go, and may not, or stands there with another use.
    Leaf {
        /// Its group.
        group: PageGroup,
    },
    /// The block does not stand behind its neighbour in the order of tokens.
    Order {
        /// Its group.
        group: PageGroup,
    },
    /// Different numbers of blocks in the table and in the tree, or of blocks that may go.
    Count {
        /// What is counted.
        what: &'static str,
        /// How many there should be.
        need: usize,
        /// How many there are.
        have: usize,
    },
}

impl fmt::Display for PrefixFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PrefixFault::Holders { group, counted, found } => {
                write!(f, "page group {group} has a holder count of {counted}, found {found}")
            }
            PrefixFault::Lost { group } => {
                write!(f, "the block in page group {group} is not found by its tokens")
            }
            PrefixFault::Unlisted { group } => {
                write!(f, "page group {group} is cached and not listed for its block")
            }
            PrefixFault::AheadOfParent { group } => {
                write!(f, "the block in page group {group} counts for more than the one before it")
            }
            PrefixFault::Leaf { group } => {
                write!(f, "the block in page group {group} is listed as one to go, wrongly")
            }
            PrefixFault::Order { group } => {
                write!(f, "the block in page group {group} is out of order among its siblings")
            }
            PrefixFault::Count { what, need, have } => {
                write!(f, "there should be {need} {what}, there are {have}")
            }
        }
    }
}

/// Everything that is wrong with a [`PrefixCache`], a line each.
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
/// let forgotten = prefixes.lookup(b"tenant", &prompt);
/// let report = prefixes.check_invariants([]).unwrap_err();
/// assert_eq!((report.faults().len(), report.to_string().lines().count()), (2, 2));
/// # drop(forgotten);
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixReport {
    faults: Vec<PrefixFault>,
}

impl PrefixReport {
    /// The faults; there is one at least.
    pub fn faults(&self) -> &[PrefixFault] {
        &self.faults
    }
}

impl fmt::Display for PrefixReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl Error for PrefixReport {}

/// Groups that the pool is asked about at a time.
const MOST: usize = 64;

impl<P: HoldersRef> PrefixCache<P> {
    /// Recounts everything.
    ///
    /// `others` are the groups of everybody who holds any beside the cache: of each lease its
    /// [`groups`](super::Lease::groups), of each sequence those that it acquired or retained.
    /// Groups that are not cached may be among them and are not looked at.
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
    /// prefixes.check_invariants([lease.groups()])?;
    /// assert!(prefixes.check_invariants([]).is_err()); // somebody holds groups and was not told
    /// # drop(lease);
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// All that is wrong.
    ///
    /// # Cost
    ///
    /// Linear in what is cached: each block is hashed, looked for in the table and asked about at the
    /// pool once, in the order of memory. 54 ns a block of 16 on a Zen 4, of 125,000 (`benches/prefix`),
    /// of which the hash is a third: a thousand blocks between two steps are 54 us. Four bytes for each
    /// block meanwhile.
    pub fn check_invariants<'a>(
        &self,
        others: impl IntoIterator<Item = &'a [PageGroup]>,
    ) -> Result<(), PrefixReport> {
        let tree = &self.tree;
        let (mut faults, mut tally) = (Vec::new(), Tally::default());
        let mut found = alloc::vec![1_u32; tree.nodes.len()];
        for node in others.into_iter().flatten().filter_map(|group| tree.cached(*group)) {
            found[node.index()] = found[node.index()].saturating_add(1);
        }
        let mut siblings = Vec::new();
        for root in &tree.roots {
            let blocks = self.check_behind(root.node, &mut siblings, &mut faults);
            tally.reached += blocks;
            tally.empty += usize::from(blocks == 0);
        }
        // In the order of memory, a few at a time: in that of the table, each would be a miss of the
        // processor's cache, and nobody waits long for the pool's group table.
        for first in (0..tree.nodes.len()).step_by(MOST) {
            let some = first..tree.nodes.len().min(first + MOST);
            for node in some.clone().map(NodeId::new) {
                if let Some(group) = tree[node].group {
                    self.check_block(node, group, &mut tally, &mut faults);
                    tally.reached += self.check_behind(node, &mut siblings, &mut faults);
                }
            }
            self.check_holders(&tree.nodes[some.clone()], &found[some], &mut faults);
        }
        self.check_leaves(&mut faults);
        count("blocks in the table", tally.blocks, tree.blocks.len(), &mut faults);
        count("pinned blocks", tally.pinned, self.pinned, &mut faults);
        count("blocks that may go", tally.leaves, tree.leaves.len(), &mut faults);
        count("blocks in the tree", tree.blocks.len(), tally.reached, &mut faults);
        count("salts without blocks", 0, tally.empty, &mut faults);
        if faults.is_empty() { Ok(()) } else { Err(PrefixReport { faults }) }
    }

    fn check_block(
        &self,
        node: NodeId,
        group: PageGroup,
        tally: &mut Tally,
        faults: &mut Vec<PrefixFault>,
    ) {
        let tree = &self.tree;
        let block = &tree[node];
        // That no other block has the same parent and tokens is seen from the order of siblings, so
        // that here the node alone is looked for.
        let found = block.parent.is_some_and(|parent| {
            self.key.block(tree[parent].hash, tree.tokens(node)) == block.hash
                && tree.blocks.find(block.hash & tree.mask, |other| *other == node).is_some()
        });
        if !found {
            faults.push(PrefixFault::Lost { group });
        }
        if tree.cached(group) != Some(node) {
            faults.push(PrefixFault::Unlisted { group });
        }
        let parent = block.parent.map(|parent| &tree[parent]);
        let parent = parent.filter(|parent| parent.group.is_some());
        if parent.is_some_and(|parent| {
            block.used > parent.used || block.priority > parent.priority || block.pins > parent.pins
        }) {
            faults.push(PrefixFault::AheadOfParent { group });
        }
        tally.blocks += 1;
        tally.pinned += usize::from(block.pins > 0);
        tally.leaves += usize::from(tree.is_leaf(node));
    }

    /// Blocks behind this one: each once, in the order of tokens. (That its parent leads to a salt is
    /// seen from its hash, which holds all that is before.) How many.
    fn check_behind(
        &self,
        parent: NodeId,
        siblings: &mut Vec<NodeId>,
        faults: &mut Vec<PrefixFault>,
    ) -> usize {
        let tree = &self.tree;
        let Some(top) = tree[parent].children else { return 0 };
        if tree[top].lower.is_none() && tree[top].higher.is_none() {
            siblings.clear();
            siblings.push(top); // as nearly always
        } else {
            tree.siblings(parent, siblings);
        }
        for (at, &node) in siblings.iter().enumerate() {
            let ordered = at == 0 || tree.tokens(siblings[at - 1]) < tree.tokens(node);
            if let (Some(group), false) =
                (tree[node].group, ordered && tree[node].parent == Some(parent))
            {
                faults.push(PrefixFault::Order { group });
            }
        }
        siblings.len()
    }

    /// Every entry of the leaves is what its block says.
    fn check_leaves(&self, faults: &mut Vec<PrefixFault>) {
        let tree = &self.tree;
        for leaf in &tree.leaves {
            if let Some(group) = tree[leaf.node].group
                && !(tree.is_leaf(leaf.node) && tree.leaf(leaf.node) == *leaf)
            {
                faults.push(PrefixFault::Leaf { group });
            }
        }
    }

    /// At most [`MOST`] nodes, and how many holders each has to have.
    fn check_holders(&self, nodes: &[Node], found: &[u32], faults: &mut Vec<PrefixFault>) {
        let mut groups = [PageGroup::new(0, 0, 0); MOST];
        let mut blocks = 0;
        for (cell, group) in groups.iter_mut().zip(nodes.iter().filter_map(|node| node.group)) {
            *cell = group;
            blocks += 1;
        }
        let mut counts = [0; MOST];
        self.holders.holders_each(&groups[..blocks], &mut counts[..blocks]);
        let found = nodes.iter().zip(found).filter(|(node, _)| node.group.is_some());
        for ((&group, &counted), (_, &found)) in groups.iter().zip(&counts).zip(found) {
            if counted != found {
                faults.push(PrefixFault::Holders { group, counted, found });
            }
        }
    }
}

/// What the blocks add up to.
#[derive(Default)]
struct Tally {
    blocks: usize,
    pinned: usize,
    leaves: usize,
    /// Blocks that stand behind another one or behind a salt.
    reached: usize,
    /// Salts that nothing stands behind.
    empty: usize,
}

fn count(what: &'static str, need: usize, have: usize, faults: &mut Vec<PrefixFault>) {
    if need != have {
        faults.push(PrefixFault::Count { what, need, have });
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HashKey, Once, Priority};
    use super::*;
    use alloc::format;

    /// A path of three blocks, the last of three siblings, and what a change of its books brings up.
    fn faults(change: impl FnOnce(&mut PrefixCache<&Once>, NodeId)) -> alloc::string::String {
        let mut cache = PrefixCache::new(&Once, 2, HashKey::new([7; 16]));
        for (at, last) in [[5, 5], [6, 6], [7, 7]].into_iter().enumerate() {
            let tokens = [&[1, 2, 3, 4][..], &last].concat();
            let group = |block| PageGroup::new(block + 2 * u32::from(block == 2) * at as u32, 0, 0);
            cache.insert(b"", &tokens, &[0, 1, 2].map(group), Priority::NORMAL).unwrap();
        }
        assert_eq!(cache.check_invariants([]), Ok(()));
        let node = cache.tree.cached(PageGroup::new(6, 0, 0)).unwrap();
        change(&mut cache, node);
        cache.check_invariants([]).map_or_else(|report| format!("{report}"), |()| "none".into())
    }

    #[test]
    fn whatever_is_changed_is_seen() {
        let tree = |change: fn(&mut super::super::tree::Tree, NodeId)| {
            faults(move |cache, node| change(&mut cache.tree, node))
        };
        let lost = "the block in page group 6v0 is not found by its tokens";
        assert_eq!(tree(|tree, node| tree[node].hash ^= 1).lines().next(), Some(lost));
        let all = tree(|tree, _| tree.blocks.clear());
        let lines: alloc::vec::Vec<_> = all.lines().collect();
        let counted = "there should be 5 blocks in the table, there are 0";
        assert!(lines.len() == 7 && lines.contains(&lost) && lines.contains(&counted), "{all}");
        let ahead = "the block in page group 6v0 counts for more than the one before it";
        assert!(tree(|tree, node| tree[node].used += 1).contains(ahead));
        assert!(tree(|tree, node| tree[node].pins += 1).contains(ahead));
        assert!(tree(|tree, node| tree[node].priority = Priority::HIGHEST).contains(ahead));
        let listed = "the block in page group 6v0 is listed as one to go, wrongly";
        assert!(tree(|tree, node| tree[node].used -= 1).contains(listed));
        assert_eq!(
            tree(|tree, _| tree.leaves.clear()),
            "there should be 3 blocks that may go, there are 0"
        );
        let order = "is out of order among its siblings";
        let swapped = |tree: &mut super::super::tree::Tree, node: NodeId| {
            let top = tree[tree[node].parent.unwrap()].children.unwrap();
            let block = &mut tree[top];
            core::mem::swap(&mut block.lower, &mut block.higher);
        };
        assert!(tree(swapped).contains(order));
        // A block that is there twice is found behind itself.
        let twice = |tree: &mut super::super::tree::Tree, node: NodeId| {
            let (parent, hash, used) =
                (tree[node].parent.unwrap(), tree[node].hash, tree[node].used);
            let tokens = tree.tokens(node).to_vec();
            let group = PageGroup::new(9, 0, 0);
            tree.add_block(parent, hash, &tokens, group, used, Priority::NORMAL);
        };
        assert!(tree(twice).contains(order));
        let ring = |tree: &mut super::super::tree::Tree, node: NodeId| {
            let top = tree[tree[node].parent.unwrap()].children.unwrap();
            (tree[top].lower, tree[top].higher) = (Some(top), Some(top));
        };
        assert!(tree(ring).contains("there should be 5 blocks in the tree, there are "));
        let cut = |tree: &mut super::super::tree::Tree, node: NodeId| {
            let parent = tree[node].parent.unwrap();
            tree.remove_sibling(parent, node);
        };
        assert_eq!(tree(cut), "there should be 5 blocks in the tree, there are 4");
        let moved = faults(|cache, node| cache.tree[node].group = Some(PageGroup::new(3, 0, 0)));
        assert_eq!(moved, "page group 3v0 is cached and not listed for its block");
        assert_eq!(
            tree(|tree, _| _ = tree.add_root(1, b"nobody's")),
            "there should be 0 salts without blocks, there are 1"
        );
        assert_eq!(
            faults(|cache, _| cache.pinned = 1),
            "there should be 0 pinned blocks, there are 1"
        );
    }
}
