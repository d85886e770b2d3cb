//! The blocks behind one parent, ordered by their tokens, so that the one that agrees longest with
//! a given row of tokens is found without asking all of them.
//!
//! In an ordered row the longest agreement stands next to the place where the tokens would go, and
//! both neighbours lie on the way there. The order is kept as a treap: a search tree by tokens that
//! is also a heap by hash. A tree whose heap is random is as deep as its logarithm in expectation,
//! and the hashes are random to everybody who does not know the key: tenants who choose their
//! tokens cannot make it deep. A list, tried first, lets one tenant who sends 10^5 different
//! prompts make every other lookup behind the same parent walk over all of them.

use alloc::vec::Vec;

use super::tree::{NodeId, Tree};

/// Where a link of the treap stands.
#[derive(Clone, Copy)]
enum Place {
    /// Its top, in the parent.
    Top(NodeId),
    Lower(NodeId),
    Higher(NodeId),
}

impl Tree {
    /// The block behind `parent` that agrees with `tokens` longest, and in how many from the first
    /// on; `None` where none agrees in the first. `tokens` are one block at most.
    pub(super) fn closest(&self, parent: NodeId, tokens: &[u32]) -> Option<(NodeId, usize)> {
        let (mut best, mut most) = (None, 0);
        let mut at = self[parent].children;
        while let Some(node) = at {
            let have = self.tokens(node);
            let agree = have.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            if agree > most {
                (best, most) = (Some(node), agree);
            }
            let Some(next) = tokens.get(agree) else { break };
            at = if *next < have[agree] { self[node].lower } else { self[node].higher };
        }
        best.map(|node| (node, most))
    }

    /// Puts a node, which has tokens that none of the others has, among those behind `parent`.
    pub(super) fn add_sibling(&mut self, parent: NodeId, new: NodeId) {
        let mut place = Place::Top(parent);
        while let Some(at) = self.link(place)
            && self.is_above(at, new)
        {
            place = self.towards(new, at);
        }
        // What was there goes below, split by the tokens of the new one.
        let mut rest = self.link(place);
        self.set_link(place, Some(new));
        let (mut low, mut high) = (Place::Lower(new), Place::Higher(new));
        while let Some(at) = rest {
            let (into, next) = match self.towards(new, at) {
                further @ Place::Higher(_) => (&mut low, further),
                further => (&mut high, further),
            };
            let into = core::mem::replace(into, next);
            self.set_link(into, Some(at));
            rest = self.link(next);
        }
        self.set_link(low, None);
        self.set_link(high, None);
    }

    /// Takes a node out from among those behind `parent`.
    pub(super) fn remove_sibling(&mut self, parent: NodeId, node: NodeId) {
        let mut place = Place::Top(parent);
        while let Some(at) = self.link(place)
            && at != node
        {
            place = self.towards(node, at);
        }
        debug_assert_eq!(self.link(place), Some(node), "a block is among its siblings");
        // Those below it move up, the higher hash first.
        let (mut low, mut high) = (self[node].lower, self[node].higher);
        while let (Some(a), Some(b)) = (low, high) {
            if self.is_above(a, b) {
                self.set_link(place, low);
                place = Place::Higher(a);
                low = self.link(place);
            } else {
                self.set_link(place, high);
                place = Place::Lower(b);
                high = self.link(place);
            }
        }
        self.set_link(place, low.or(high));
    }

    /// Those behind `parent` into `out`, in order.
    ///
    /// For checking: it stops where there are more of them than nodes.
    pub(super) fn siblings(&self, parent: NodeId, out: &mut Vec<NodeId>) {
        out.clear();
        let (mut above, mut at) = (Vec::new(), self[parent].children);
        while at.is_some() || !above.is_empty() {
            if above.len() + out.len() > self.nodes.len() {
                return;
            }
            while let Some(node) = at.filter(|_| above.len() <= self.nodes.len()) {
                above.push(node);
                at = self[node].lower;
            }
            if let Some(node) = above.pop() {
                out.push(node);
                at = self[node].higher;
            }
        }
    }

    /// Which way `node` stands from `at`.
    fn towards(&self, node: NodeId, at: NodeId) -> Place {
        if self.tokens(node) < self.tokens(at) { Place::Lower(at) } else { Place::Higher(at) }
    }

    fn is_above(&self, a: NodeId, b: NodeId) -> bool {
        (self[a].hash, a) > (self[b].hash, b)
    }

    fn link(&self, place: Place) -> Option<NodeId> {
        match place {
            Place::Top(node) => self[node].children,
            Place::Lower(node) => self[node].lower,
            Place::Higher(node) => self[node].higher,
        }
    }

    fn set_link(&mut self, place: Place, to: Option<NodeId>) {
        match place {
            Place::Top(node) => self[node].children = to,
            Place::Lower(node) => self[node].lower = to,
            Place::Higher(node) => self[node].higher = to,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Priority;
    use super::*;
    use crate::id::PageGroup;

    const SIZE: usize = 3;

    /// Numbers that look random and are the same in every run.
    fn random(state: &mut u64) -> u64 {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) ^ (*state << 31)
    }

    fn depth(tree: &Tree, at: Option<NodeId>) -> usize {
        at.map_or(0, |node| 1 + depth(tree, tree[node].lower).max(depth(tree, tree[node].higher)))
    }

    /// Ascending tokens, which would be a list in a tree that is not balanced.
    #[test]
    fn neither_order_nor_number_of_prompts_makes_a_lookup_slow() {
        let mut tree = Tree::new(SIZE, u64::MAX);
        let root = tree.add_root(0, b"");
        let mut state = 1;
        for index in 0..10_000 {
            let (tokens, group) = ([index / 100, index % 100, 0], PageGroup::new(index, 0, 0));
            tree.add_block(root, random(&mut state), &tokens, group, 0, Priority::NORMAL);
        }
        let depth = depth(&tree, tree[root].children);
        assert!(depth < 50, "10,000 blocks are {depth} deep, log2 of them is 13.3");
        for (tokens, agree) in [([42, 17, 0], 3), ([42, 17, 9], 2), ([42, 100, 0], 1)] {
            let (node, positions) = tree.closest(root, &tokens).expect("there is one");
            assert_eq!((positions, tree.tokens(node)[0]), (agree, 42));
        }
        assert_eq!(tree.closest(root, &[100, 0, 0]), None);
    }

    #[test]
    fn the_closest_is_the_one_that_all_together_would_name() {
        let mut tree = Tree::new(SIZE, u64::MAX);
        let root = tree.add_root(0, b"");
        let (mut state, mut there) = (1, Vec::new());
        for index in 0..4_000_u32 {
            let mut tokens = || [0; SIZE].map(|_| (random(&mut state) % 5) as u32);
            let (new, query) = (tokens(), tokens());
            match there.iter().position(|(have, _)| *have == new) {
                Some(at) => {
                    let (_, node) = there.swap_remove(at);
                    assert_eq!(tree.remove_block(node), root);
                }
                None => {
                    let (hash, group) = (random(&mut state), PageGroup::new(index, 0, 0));
                    let node = tree.add_block(root, hash, &new, group, 0, Priority::NORMAL);
                    there.push((new, node));
                }
            }
            for len in 0..=SIZE {
                let agree = |tokens: &[u32; SIZE]| {
                    tokens.iter().zip(&query[..len]).take_while(|(a, b)| a == b).count()
                };
                let most = there.iter().map(|(tokens, _)| agree(tokens)).max().unwrap_or(0);
                let found = tree.closest(root, &query[..len]);
                assert_eq!(found.map_or(0, |(_, positions)| positions), most);
            }
            let mut order = Vec::new();
            tree.siblings(root, &mut order);
            assert_eq!(order.len(), there.len());
            assert!(order.is_sorted_by_key(|node| tree.tokens(*node)));
        }
    }
}
