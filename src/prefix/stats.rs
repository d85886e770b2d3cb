//! What a cache has done, and what it tells others while doing it.

use alloc::boxed::Box;

use crate::id::PageGroup;

/// Who is told of each [`PrefixEvent`].
pub type PrefixSink = Box<dyn FnMut(PrefixEvent<'_>) + Send + Sync>;

/// What a [`PrefixCache`](super::PrefixCache) holds and what it has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Blocks that are cached now.
    pub cached: usize,
    /// Of these, blocks that are pinned.
    pub pinned: usize,
    /// Salts that have blocks now.
    pub salts: usize,
    /// Lookups that covered one position or more.
    pub hits: u64,
    /// Lookups that covered none.
    pub misses: u64,
    /// Hits that end inside a block.
    pub partial_hits: u64,
    /// Tokens that lookups came with.
    pub tokens_asked: u64,
    /// Tokens that leases covered, which nobody had to compute again.
    pub tokens_saved: u64,
    /// Blocks that were stored.
    pub stored: u64,
    /// Blocks that were evicted; those that went by `clear` are not counted.
    pub evicted: u64,
}

/// What happened to a cached block, for those who route requests to where their prefix is.
///
/// A hash names a block and all tokens before it. It is what the cache itself looks under, and as
/// there it is a hint: two blocks may have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PrefixEvent<'a> {
    /// A block was stored. Blocks are told of after those they stand behind.
    Stored {
        /// The salt it was stored under.
        salt: &'a [u8],
        /// The hash of the block before; of the salt, where this is the first.
        parent: u64,
        /// The block's own hash.
        hash: u64,
        /// Its tokens, as many as a block has positions.
        tokens: &'a [u32],
        /// Where its rows are.
        group: PageGroup,
    },
    /// A block was evicted. Blocks are told of before those they stand behind.
    Removed {
        /// The block's hash.
        hash: u64,
        /// Where its rows were.
        group: PageGroup,
    },
    /// Every block went, without being told of singly.
    Cleared,
}
