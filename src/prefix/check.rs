//! The books, recounted.

use alloc::vec::Vec;
use core::error::Error;
use core::fmt;

use super::cache::PrefixCache;
use super::holders::{GroupHolders, HoldersRef};
use super::tree::NodeId;
use crate::id::PageGroup;

/// One thing that is wrong with a [`PrefixCache`].
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
    /// The block is among those that may go, and may not, or the other way round.
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
                write!(f, "page group {group} is counted for {counted} holders, {found} name it")
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
                write!(
                    f,
                    "the block in page group {group} may be evicted and is not listed, or not"
                )
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

impl<P: HoldersRef> PrefixCache<P> {
    /// Recounts everything.
    ///
    /// `others` are the groups of everybody who holds any beside the cache: of each lease its
    /// [`groups`](super::Lease::groups), of each sequence those that it acquired or retained.
    /// Groups that are not cached may be among them and are not looked at.
    ///
    /// # Errors
    ///
    /// All that is wrong.
    ///
    /// # Cost
    ///
    /// Linear in what is cached: each block is hashed, looked up and asked about at the pool once.
    /// Four bytes for every group of the pool meanwhile.
    pub fn check_invariants<'a>(
        &self,
        others: impl IntoIterator<Item = &'a [PageGroup]>,
    ) -> Result<(), PrefixReport> {
        let mut faults = Vec::new();
        self.check_blocks(&mut faults);
        self.check_order(&mut faults);
        self.check_holders(others, &mut faults);
        if faults.is_empty() { Ok(()) } else { Err(PrefixReport { faults }) }
    }

    fn check_blocks(&self, faults: &mut Vec<PrefixFault>) {
        let tree = &self.tree;
        let (mut blocks, mut pinned, mut leaves) = (0, 0, 0);
        for (node, group) in self.cached_groups() {
            let block = &tree[node];
            let found = block.parent.and_then(|parent| {
                let hash = self.key.block(tree[parent].hash, tree.tokens(node));
                tree.child(parent, hash, tree.tokens(node)).filter(|_| hash == block.hash)
            });
            if found != Some(node) {
                faults.push(PrefixFault::Lost { group });
            }
            if tree.cached(group) != Some(node) {
                faults.push(PrefixFault::Unlisted { group });
            }
            let parent = block.parent.map(|parent| &tree[parent]);
            let parent = parent.filter(|parent| parent.group.is_some());
            if parent.is_some_and(|parent| {
                block.used > parent.used
                    || block.priority > parent.priority
                    || block.pins > parent.pins
            }) {
                faults.push(PrefixFault::AheadOfParent { group });
            }
            if tree.is_leaf(node) != tree.leaves.contains(&tree.leaf(node)) {
                faults.push(PrefixFault::Leaf { group });
            }
            blocks += 1;
            pinned += usize::from(block.pins > 0);
            leaves += usize::from(tree.is_leaf(node));
        }
        count("blocks in the table", blocks, tree.blocks.len(), faults);
        count("pinned blocks", pinned, self.pinned, faults);
        count("blocks that may go", leaves, tree.leaves.len(), faults);
    }

    /// Walks down from the roots: every block is reached, once, and siblings are in order.
    fn check_order(&self, faults: &mut Vec<PrefixFault>) {
        let tree = &self.tree;
        let (mut parents, mut siblings) = (Vec::new(), Vec::new());
        parents.extend(tree.roots.iter().map(|root| root.node));
        let (mut reached, mut empty) = (0, 0);
        while let Some(parent) = parents.pop() {
            tree.siblings(parent, &mut siblings);
            empty += usize::from(siblings.is_empty() && tree[parent].group.is_none());
            for (at, &node) in siblings.iter().enumerate() {
                let ordered = at == 0 || tree.tokens(siblings[at - 1]) < tree.tokens(node);
                if let (Some(group), false) =
                    (tree[node].group, ordered && tree[node].parent == Some(parent))
                {
                    faults.push(PrefixFault::Order { group });
                }
            }
            reached += siblings.len();
            if reached > tree.blocks.len() {
                break; // or a loop would be walked for ever
            }
            parents.append(&mut siblings);
        }
        count("blocks in the tree", tree.blocks.len(), reached, faults);
        count("salts without blocks", 0, empty, faults);
    }

    fn check_holders<'a>(
        &self,
        others: impl IntoIterator<Item = &'a [PageGroup]>,
        faults: &mut Vec<PrefixFault>,
    ) {
        let mut found = alloc::vec![1_u32; self.tree.nodes.len()];
        for node in others.into_iter().flatten().filter_map(|group| self.tree.cached(*group)) {
            found[node.index()] = found[node.index()].saturating_add(1);
        }
        for (node, group) in self.cached_groups() {
            let (counted, found) = (self.holders.holders(group), found[node.index()]);
            if counted != found {
                faults.push(PrefixFault::Holders { group, counted, found });
            }
        }
    }

    fn cached_groups(&self) -> impl Iterator<Item = (NodeId, PageGroup)> {
        // In the order of memory: in that of the table, each would be a miss of the cache.
        let nodes = self.tree.nodes.iter().enumerate();
        nodes.filter_map(|(index, node)| Some((NodeId::new(index), node.group?)))
    }
}

fn count(what: &'static str, need: usize, have: usize, faults: &mut Vec<PrefixFault>) {
    if need != have {
        faults.push(PrefixFault::Count { what, need, have });
    }
}
