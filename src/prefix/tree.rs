//! Cached blocks in a tree: which are there, behind which, and which could go.
//!
//! ```text
//! nodes    56 bytes each: a block, or the root of a salt
//! tokens   block_size ids for each node, in the order of the nodes
//! blocks   hash of a block -> node      compared by parent and tokens
//! roots    hash of a salt -> node       compared by the salt
//! leaves   (priority, last use, node)   blocks with no child and no pin, the next to go first
//! slots    slot of a group -> node      no group is cached twice
//! ```
//!
//! A block is used no later than the one before it, because whoever uses it uses all that is before
//! it, and matters no more, because whoever stores it says so of all that is before it. So the leaves
//! alone are kept in order: a lookup moves one entry, however long the path, and a parent that comes
//! in when its last child goes comes in behind every leaf that was passed by on the way to the
//! child. (Were both used in the same instant, their ids would decide, but then no third leaf was:
//! what is used in one instant is one path.)

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::num::NonZeroU32;
use core::ops::{Bound, Index, IndexMut};

use hashbrown::HashTable;

use super::Priority;
use crate::id::PageGroup;

/// Names a node: its index, plus one, so that an `Option` of it is four bytes as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(NonZeroU32);

impl NodeId {
    /// # Panics
    ///
    /// At more nodes than there can be groups: every node but the roots holds one of its own.
    pub(super) fn new(index: usize) -> Self {
        let raw = u32::try_from(index + 1).ok().and_then(NonZeroU32::new);
        NodeId(raw.expect("fewer nodes than 2^32"))
    }

    pub(super) fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// A cached block; or, without a group and a parent, the root of a salt.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) hash: u64,
    /// When it was last used, by the cache's clock.
    pub(super) used: u64,
    pub(super) group: Option<PageGroup>,
    /// The block before; of a vacant node, the next vacant one.
    pub(super) parent: Option<NodeId>,
    /// One of the blocks behind, the topmost of `siblings`.
    pub(super) children: Option<NodeId>,
    pub(super) lower: Option<NodeId>,
    pub(super) higher: Option<NodeId>,
    /// Pins that cover it. A parent has at least those of its children.
    pub(super) pins: u32,
    pub(super) priority: Priority,
}

// What the documentation of `PrefixCache` promises.
const _: () = assert!(size_of::<Node>() <= 56);

/// An entry of the leaves, in the order in which they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Leaf {
    priority: Priority,
    used: u64,
    pub(super) node: NodeId,
}

pub(super) struct Root {
    pub(super) salt: Box<[u8]>,
    pub(super) node: NodeId,
}

pub(super) struct Tree {
    pub(super) block_size: usize,
    pub(super) nodes: Vec<Node>,
    tokens: Vec<u32>,
    vacant: Option<NodeId>,
    pub(super) blocks: HashTable<NodeId>,
    pub(super) roots: HashTable<Root>,
    pub(super) leaves: BTreeSet<Leaf>,
    slots: Vec<Option<NodeId>>,
    /// The bits of a hash that the tables see: all of them, but in tests.
    pub(super) mask: u64,
}

impl Tree {
    pub(super) fn new(block_size: usize, mask: u64) -> Self {
        Tree {
            block_size,
            nodes: Vec::new(),
            tokens: Vec::new(),
            vacant: None,
            blocks: HashTable::new(),
            roots: HashTable::new(),
            leaves: BTreeSet::new(),
            slots: Vec::new(),
            mask,
        }
    }

    pub(super) fn root(&self, hash: u64, salt: &[u8]) -> Option<NodeId> {
        self.roots.find(hash & self.mask, |root| *root.salt == *salt).map(|root| root.node)
    }

    /// The block that holds `tokens` behind `parent`. Whatever the hash says, it is these tokens
    /// behind this parent, whose own history was compared before.
    pub(super) fn child(&self, parent: NodeId, hash: u64, tokens: &[u32]) -> Option<NodeId> {
        let is_it = |id: &NodeId| self[*id].parent == Some(parent) && self.tokens(*id) == tokens;
        self.blocks.find(hash & self.mask, is_it).copied()
    }

    /// The block that has this group.
    pub(super) fn cached(&self, group: PageGroup) -> Option<NodeId> {
        let node = self.slots.get(group.index()).copied().flatten()?;
        (self[node].group == Some(group)).then_some(node)
    }

    /// What is kept for one block, beside its entries in tables.
    pub(super) fn bytes_per_block(&self) -> usize {
        size_of::<Node>() + self.block_size * size_of::<u32>()
    }

    pub(super) fn tokens(&self, node: NodeId) -> &[u32] {
        &self.tokens[node.index() * self.block_size..][..self.block_size]
    }

    /// Whether it could be evicted, for all that the tree knows.
    pub(super) fn is_leaf(&self, node: NodeId) -> bool {
        let node = &self[node];
        node.group.is_some() && node.children.is_none() && node.pins == 0
    }

    pub(super) fn leaf(&self, node: NodeId) -> Leaf {
        Leaf { priority: self[node].priority, used: self[node].used, node }
    }

    /// The next leaf to go, of all or of those behind `after`.
    pub(super) fn next_leaf(&self, after: Option<Leaf>) -> Option<Leaf> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.leaves.range((from, Bound::Unbounded)).next().copied()
    }

    pub(super) fn add_root(&mut self, hash: u64, salt: &[u8]) -> NodeId {
        let node = self.add(Node::new(hash), None);
        let Tree { roots, nodes, mask, .. } = self;
        let root = Root { salt: salt.into(), node };
        roots.insert_unique(hash & *mask, root, |root| nodes[root.node.index()].hash & *mask);
        node
    }

    /// Enters a block behind another one or behind a root.
    pub(super) fn add_block(
        &mut self,
        parent: NodeId,
        hash: u64,
        tokens: &[u32],
        group: PageGroup,
        used: u64,
        priority: Priority,
    ) -> NodeId {
        if self.is_leaf(parent) {
            self.leaves.remove(&self.leaf(parent));
        }
        let block =
            Node { used, group: Some(group), parent: Some(parent), priority, ..Node::new(hash) };
        let node = self.add(block, Some(tokens));
        self.add_sibling(parent, node);
        let Tree { blocks, nodes, mask, .. } = self;
        blocks.insert_unique(hash & *mask, node, |id| nodes[id.index()].hash & *mask);
        self.leaves.insert(self.leaf(node));
        let slot = group.index();
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = Some(node);
        node
    }

    /// Takes out a block that has no child and no pin, and gives what was before it, to be looked
    /// at: a block that may be a leaf now, or a root that may be empty.
    pub(super) fn remove_block(&mut self, node: NodeId) -> NodeId {
        debug_assert!(self.is_leaf(node), "children go before parents");
        let (hash, parent) = (self[node].hash, self[node].parent.expect("a block has a parent"));
        self.leaves.remove(&self.leaf(node));
        self.remove_sibling(parent, node);
        if let Ok(entry) = self.blocks.find_entry(hash & self.mask, |id| *id == node) {
            entry.remove();
        }
        if let Some(slot) = self[node].group.and_then(|group| self.slots.get_mut(group.index()))
            && *slot == Some(node)
        {
            *slot = None;
        }
        self.vacate(node);
        if self.is_leaf(parent) {
            self.leaves.insert(self.leaf(parent));
        }
        parent
    }

    /// Takes out a root that has no block; leaves every other node alone, and one that is gone.
    pub(super) fn remove_if_empty_root(&mut self, node: NodeId) {
        if self[node].group.is_some() || self[node].children.is_some() {
            return;
        }
        let hash = self[node].hash & self.mask;
        if let Ok(entry) = self.roots.find_entry(hash, |root| root.node == node) {
            entry.remove();
            self.vacate(node);
        }
    }

    /// Notes the use of a block and of all before it, and that they matter this much at least.
    pub(super) fn touch(&mut self, end: NodeId, used: u64, priority: Option<Priority>) {
        let leaf = self.is_leaf(end);
        if leaf {
            self.leaves.remove(&self.leaf(end));
        }
        self.for_path(end, |node| {
            node.used = used;
            node.priority = node.priority.max(priority.unwrap_or(node.priority));
        });
        if leaf {
            self.leaves.insert(self.leaf(end));
        }
    }

    /// Pins a block and all before it.
    pub(super) fn pin(&mut self, end: NodeId) {
        self.leaves.remove(&self.leaf(end));
        self.for_path(end, |node| node.pins += 1);
    }

    /// Takes back one pin of this very end. How many blocks are no longer pinned.
    pub(super) fn unpin(&mut self, end: NodeId) -> usize {
        let mut free = 0;
        self.for_path(end, |node| {
            node.pins -= 1;
            free += usize::from(node.pins == 0);
        });
        if self.is_leaf(end) {
            self.leaves.insert(self.leaf(end));
        }
        free
    }

    /// A block and those before it, from the last to the first.
    pub(super) fn path(&self, end: NodeId) -> impl Iterator<Item = NodeId> {
        let up = core::iter::successors(Some(end), |node| self[*node].parent);
        up.take_while(|node| self[*node].group.is_some())
    }

    fn for_path(&mut self, end: NodeId, mut change: impl FnMut(&mut Node)) {
        let mut at = Some(end);
        while let Some(node) = at.map(|id| &mut self.nodes[id.index()])
            && node.group.is_some()
        {
            change(node);
            at = node.parent;
        }
    }

    fn add(&mut self, node: Node, tokens: Option<&[u32]>) -> NodeId {
        let id = match self.vacant {
            Some(id) => {
                self.vacant = self[id].parent;
                self[id] = node;
                id
            }
            None => {
                let id = NodeId::new(self.nodes.len());
                self.nodes.push(node);
                self.tokens.resize(self.nodes.len() * self.block_size, 0);
                id
            }
        };
        if let Some(tokens) = tokens {
            self.tokens[id.index() * self.block_size..][..self.block_size].copy_from_slice(tokens);
        }
        id
    }

    fn vacate(&mut self, id: NodeId) {
        self[id] = Node { parent: self.vacant, ..Node::new(0) };
        self.vacant = Some(id);
    }
}

impl Node {
    fn new(hash: u64) -> Self {
        Node {
            hash,
            used: 0,
            group: None,
            parent: None,
            children: None,
            lower: None,
            higher: None,
            pins: 0,
            priority: Priority::LOWEST,
        }
    }
}

impl Index<NodeId> for Tree {
    type Output = Node;

    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }
}

impl IndexMut<NodeId> for Tree {
    fn index_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enters chains of blocks, so many together, each in a group of its own.
    fn chains(block_size: usize, chains: usize, of: usize) -> Tree {
        let mut tree = Tree::new(block_size, u64::MAX);
        let root = tree.add_root(0, b"");
        for chain in 0..chains {
            let mut end = root;
            for at in 0..of {
                let index = (chain * of + at) as u32;
                // Odd, so that it is a permutation.
                let hash = u64::from(index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let (tokens, group) = (alloc::vec![index; block_size], PageGroup::new(index, 0, 0));
                end = tree.add_block(end, hash, &tokens, group, index.into(), Priority::NORMAL);
            }
        }
        tree
    }

    #[test]
    fn a_block_takes_the_memory_that_the_documentation_says() {
        for block_size in [16, 64] {
            // Before and after vectors and tables grow.
            for blocks in [4_000, 4_097, 7_000, 7_200, 10_000, 16_400] {
                let tree = chains(block_size, blocks / 100, 100);
                let blocks = blocks / 100 * 100;
                let bytes = tree.nodes.capacity() * size_of::<Node>()
                    + tree.tokens.capacity() * size_of::<u32>()
                    + tree.blocks.allocation_size()
                    + tree.slots.capacity() * size_of::<Option<NodeId>>();
                let one = 56 + 4 * block_size;
                assert_eq!(tree.bytes_per_block(), one);
                assert!(bytes >= blocks * (one + 6), "{blocks} blocks take {bytes} bytes");
                assert!(bytes <= blocks * (2 * one + 12 + 8), "{blocks} blocks take {bytes} bytes");
            }
        }
        assert!(size_of::<Leaf>() <= 24);
    }

    #[test]
    fn what_is_taken_out_makes_room_for_what_comes() {
        let mut tree = chains(2, 1, 50);
        for round in 0..1000 {
            let leaf = tree.next_leaf(None).expect("one is there").node;
            let group = tree[leaf].group.expect("a block");
            let parent = tree.remove_block(leaf);
            assert_eq!((tree.cached(group), tree.leaves.len()), (None, 1));
            let node = tree.add_block(parent, round, &[9, 9], group, round, Priority::NORMAL);
            assert_eq!(
                (tree.cached(group), tree.child(parent, round, &[9, 9])),
                (Some(node), Some(node))
            );
        }
        assert_eq!((tree.nodes.len(), tree.blocks.len()), (51, 50));
    }
}
