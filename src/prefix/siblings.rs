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
