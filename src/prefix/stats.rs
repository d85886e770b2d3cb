//! What a cache has done, and what it tells others while doing it.

use alloc::boxed::Box;
use core::fmt;

use crate::id::PageGroup;

/// Who is told of each [`PrefixEvent`].
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{HashKey, PrefixCache, PrefixSink};
///
/// let shared = SharedPagedKv::new(1, 16, 1, 1, 1);
/// let mut cache = PrefixCache::new(&shared, 16, HashKey::new([7; 16]));
/// let sink: PrefixSink = Box::new(|event| println!("{event:?}"));
/// cache.set_sink(Some(sink));
/// assert_eq!(cache.clear(), 0); // prints `Cleared`
/// # }
/// ```
pub type PrefixSink = Box<dyn FnMut(PrefixEvent<'_>) + Send + Sync>;

/// What a [`PrefixCache`](super::PrefixCache) holds and what it has done since it was made. Prints as
/// two lines.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{HashKey, PrefixCache};
///
/// let shared = SharedPagedKv::new(1, 16, 1, 1, 1);
/// let mut cache = PrefixCache::new(&shared, 16, HashKey::new([1; 16]));
/// drop(cache.lookup(b"", &[7; 20]));
/// let stats = cache.stats();
/// assert_eq!((stats.misses, stats.tokens_asked, stats.tokens_saved), (1, 20, 0));
/// println!("{stats}");
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Tokens of a block.
    pub block_size: usize,
    /// Bytes that the cache keeps for one block, beside its rows: its node and its tokens. The tables'
    /// share and the growth of vectors come on top, as [`PrefixCache`](super::PrefixCache) says.
    pub bytes_per_block: usize,
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
    /// Blocks that were evicted; those that went by `clear` and `remove_salt` are not counted.
    pub evicted: u64,
}

impl fmt::Display for PrefixStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PrefixStats { cached, pinned, salts, hits, misses, partial_hits, .. } = self;
        let PrefixStats { tokens_asked, tokens_saved, stored, evicted, .. } = self;
        writeln!(
            f,
            "{cached} blocks of {} tokens cached ({pinned} pinned) for {salts} salts, {} bytes each; \
             {stored} stored, {evicted} evicted",
            self.block_size, self.bytes_per_block
        )?;
        let percent = *tokens_saved as f64 / (*tokens_asked).max(1) as f64 * 100.0;
        write!(
            f,
            "{} lookups: {hits} hits ({partial_hits} in part), {misses} misses; {tokens_saved} of \
             {tokens_asked} tokens saved ({percent:.1} %)",
            hits + misses
        )
    }
}

/// What happened to a cached block, for those who route requests to where their prefix is.
///
/// A hash names a block and all tokens before it. It is what the cache itself looks under, and as
/// there it is a hint: two blocks may have one.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "std")] {
/// use paged_kv::cache::SharedPagedKv;
/// use paged_kv::prefix::{HashKey, PrefixCache, PrefixEvent, Priority};
/// use std::sync::mpsc;
///
/// let shared = SharedPagedKv::new(1, 16, 1, 1, 1);
/// let mut cache = PrefixCache::new(&shared, 16, HashKey::new([1; 16]));
/// let (router, events) = mpsc::channel();
/// cache.set_sink(Some(Box::new(move |event| {
///     let told = match event {
///         PrefixEvent::Stored { hash, .. } => (true, hash),
///         PrefixEvent::Removed { hash, .. } => (false, hash),
///         _ => return,
///     };
///     let _ = router.send(told);
/// })));
///
/// let group = shared.acquire_group().expect("one is free");
/// cache.insert(b"", &[7; 16], &[group], Priority::NORMAL)?;
/// shared.release_group(group);
/// cache.evict(1);
/// let (stored, removed) = (events.recv()?, events.recv()?);
/// assert_eq!((stored.0, removed), (true, (false, stored.1)));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
