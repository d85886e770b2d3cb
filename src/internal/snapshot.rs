//! All that a store holds, to be compared with what it held before.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::cache::PagedKvStore;
use crate::element::Element;
use crate::id::BlockId;

/// A store as it was: who holds which block, what is in those that are held, and which block is
/// taken next. What is in free blocks is nobody's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// For each block its holders, and whether a page group, with how many holders, is among them.
    holders: Vec<u32>,
    /// The free blocks, the next one first.
    free: Vec<u32>,
    /// Every word of the blocks that are held.
    pages: Vec<(BlockId, Vec<u64>)>,
}

impl Snapshot {
    /// Of a store that nobody is changing.
    pub fn of<E: Element>(store: &PagedKvStore<E>) -> Self {
        let (holders, free) = store.blocks().state();
        let blocks = (0..holders.len() as u32).map(BlockId::from_raw);
        let held = blocks.filter(|block| store.holders(*block) > 0);
        let pages = held.map(|block| (block, store.words(block).to_vec())).collect();
        Snapshot { holders, free, pages }
    }

    /// What differs, in words.
    pub fn difference(&self, other: &Snapshot) -> Option<String> {
        if self.holders != other.holders {
            return Some(format!("holders {:?} and {:?}", self.holders, other.holders));
        }
        if self.free != other.free {
            return Some(format!("free blocks {:?} and {:?}", self.free, other.free));
        }
        let mut pairs = self.pages.iter().zip(&other.pages);
        let pair = pairs.find(|(one, other)| one != other)?;
        Some(format!("what is in block {:?}", pair.0.0))
    }

    /// Without the order of the free blocks. What takes blocks one by one and gives them back again
    /// leaves the last one that came back on top, which changes where rows will stand and no bit of
    /// any answer.
    #[must_use]
    pub fn unordered(mut self) -> Self {
        self.free.sort_unstable();
        self
    }
}
