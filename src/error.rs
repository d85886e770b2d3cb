//! What can go wrong, as values.
//!
//! Running out of blocks is an operating condition of a server, so it is an error that says what
//! was needed and what was there, and never a panic. A mistake of the calling code that the type
//! system could not stop (a row of the wrong length, a store of another shape) is an error too. The
//! short doors (`push`, `append`, `new`) panic at rows and shapes that are wrong in the code and
//! not in the data, before anything is changed, and have a `try_` twin that does not. Every
//! operation that returns one of these has changed nothing.
//!
//! An error that carries another one is that error under another name: it prints the same text
//! and has no `source`, so that a chain does not say it twice.

mod attention;
mod report;
#[cfg(test)]
mod tests;

use core::error::Error;
use core::fmt;

pub use attention::AttentionError;
pub use report::{InvariantReport, Miscount};

use crate::id::{BlockId, PageGroup, StoreId};

/// A pool-backed [`KvCache`](crate::cache::KvCache) needed another block and its
/// [`KvBlockPool`](crate::cache::KvBlockPool) had none free.
///
/// Caches built without a pool never return it.
///
/// # Examples
///
/// ```
/// # #[cfg(target_has_atomic = "ptr")] {
/// use paged_kv::cache::{KvBlockPool, KvCache};
/// use std::sync::Arc;
///
/// let pool = Arc::new(KvBlockPool::new(16, 2)); // two blocks of 16 positions
/// let mut cache: KvCache = KvCache::with_pool(1, 2, &pool)?;
/// let short = cache.append(&[0.5; 66], &[0.5; 66], 33).unwrap_err();
/// assert_eq!(short.need - short.free, 1);
/// assert_eq!(cache.seq_len(), 0);
/// # }
/// # Ok::<(), paged_kv::KvPoolExhausted>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvPoolExhausted {
    /// Blocks the operation would have had to take.
    pub need: usize,
    /// Blocks that were free when it asked.
    pub free: usize,
}

impl fmt::Display for KvPoolExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KV pool exhausted: {} blocks needed, {} free", self.need, self.free)
    }
}

impl Error for KvPoolExhausted {}

/// A [`PagedKvCache`](crate::cache::PagedKvCache) needed more blocks than its
/// [`PagedKvStore`](crate::cache::PagedKvStore) had free.
///
/// # Examples
///
/// ```
/// use paged_kv::PagedKvError;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 1, 1, 2); // one block of 16 positions
/// let mut cache = PagedKvCache::new();
/// let refused = cache.append(&mut store, &[0.5; 34], &[0.5; 34], 17);
/// let Err(PagedKvError::Exhausted(short)) = refused else { unreachable!() };
/// assert_eq!((short.need, short.free), (2, 1));
/// assert_eq!((cache.seq_len(), store.free_block_count()), (0, 1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PagedStoreExhausted {
    /// Blocks the operation would have had to take.
    pub need: usize,
    /// Blocks that were free when it asked.
    pub free: usize,
}

impl fmt::Display for PagedStoreExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "paged KV store exhausted: {} blocks needed, {} free", self.need, self.free)
    }
}

impl Error for PagedStoreExhausted {}

/// Which row of a position an error speaks of.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::KvCache;
/// use paged_kv::{KvCacheError, Side};
///
/// let mut cache = KvCache::new(1, 2);
/// let refused = cache.try_push(&[0.5; 2], &[0.5; 3]).unwrap_err();
/// let KvCacheError::RowLength { side, .. } = refused else { unreachable!() };
/// assert_eq!((side, side.to_string()), (Side::Value, "value".into()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The key row.
    Key,
    /// The value row.
    Value,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Key => "key",
            Side::Value => "value",
        })
    }
}

/// A shape that cannot exist, or whose memory cannot be had.
///
/// # Examples
///
/// ```
/// use paged_kv::{KvShape, ShapeError};
///
/// assert_eq!(KvShape::square(16, 0, 128), Err(ShapeError::Zero { what: "n_kv_heads" }));
/// assert_eq!(KvShape::square(usize::MAX, 2, 128), Err(ShapeError::Overflow));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeError {
    /// This size must be at least 1.
    Zero {
        /// The name of the size.
        what: &'static str,
    },
    /// This size is larger than what an index of this crate can name.
    TooLarge {
        /// The name of the size.
        what: &'static str,
        /// The size that was asked for.
        have: usize,
        /// The largest one there can be.
        most: usize,
    },
    /// The bytes of the whole do not fit `isize::MAX`.
    Overflow,
    /// Query heads cannot be shared out evenly over KV heads.
    HeadsNotDivisible {
        /// Query heads asked for.
        n_heads: usize,
        /// KV heads they should divide by.
        n_kv_heads: usize,
    },
    /// The allocator refused.
    OutOfMemory {
        /// How many bytes it was asked for.
        bytes: usize,
    },
    /// The memory that the caller brought does not hold these blocks.
    MemoryTooSmall {
        /// Blocks that were to fit: one, where no number was asked for.
        blocks: usize,
        /// Bytes that hold them at whatever address they begin.
        need: usize,
        /// Bytes handed in.
        have: usize,
    },
}

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ShapeError::Zero { what } => write!(f, "{what} must be at least 1"),
            ShapeError::TooLarge { what, have, most } => {
                write!(f, "{what} is {have}, the most is {most}")
            }
            ShapeError::Overflow => {
                f.write_str("the bytes of this shape exceed what one allocation can hold")
            }
            ShapeError::HeadsNotDivisible { n_heads, n_kv_heads } => {
                write!(f, "{n_heads} query heads cannot be divided over {n_kv_heads} KV heads")
            }
            ShapeError::OutOfMemory { bytes } => write!(f, "{bytes} bytes could not be allocated"),
            ShapeError::MemoryTooSmall { blocks, need, have } => {
                write!(f, "{blocks} blocks need {need} bytes of memory, got {have}")
            }
        }
    }
}

impl Error for ShapeError {}

/// A sequence and a store that do not belong together, on its way into the error of a door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongStore {
    pub(crate) need: StoreId,
    pub(crate) have: StoreId,
}

impl From<WrongStore> for PagedKvError {
    fn from(WrongStore { need, have }: WrongStore) -> Self {
        PagedKvError::WrongStore { need, have }
    }
}

impl From<WrongStore> for AttentionError {
    fn from(WrongStore { need, have }: WrongStore) -> Self {
        AttentionError::WrongStore { need, have }
    }
}

/// Why a sequence could not be changed or read. Nothing was changed.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::{PagedKvError, Side};
///
/// let mut store = PagedKvStore::new(16, 1, 1, 2);
/// let mut cache = PagedKvCache::new();
/// let refused = cache.try_push(&mut store, &[0.5; 3], &[0.5; 2]);
/// assert_eq!(refused, Err(PagedKvError::RowLength { side: Side::Key, need: 2, have: 3 }));
/// assert_eq!(refused.unwrap_err().to_string(), "key rows need 2 numbers, got 3");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PagedKvError {
    /// The store had too few free blocks.
    Exhausted(PagedStoreExhausted),
    /// The sequence was filled from another store.
    WrongStore {
        /// The store that holds this sequence's blocks.
        need: StoreId,
        /// The store that was handed in.
        have: StoreId,
    },
    /// Rows of the wrong length.
    RowLength {
        /// Which of the two arguments.
        side: Side,
        /// Numbers needed, over all rows.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// A block id that this store does not have.
    BlockOutOfRange {
        /// The id.
        block: BlockId,
        /// Blocks in the store.
        total: usize,
    },
    /// A block that nobody holds, so that its content is nobody's promise.
    BlockFree {
        /// The id.
        block: BlockId,
    },
    /// The number of blocks handed in does not cover the positions they should hold.
    BlockCount {
        /// Blocks needed for that many positions.
        need: usize,
        /// Blocks handed in.
        have: usize,
    },
    /// The same block was named twice; a table that did so would overwrite its own rows.
    BlockTwice {
        /// The id.
        block: BlockId,
    },
    /// The block already has as many holders as can be counted.
    TooManyHolders {
        /// The id.
        block: BlockId,
    },
    /// The sequence must be empty and hold no block for this, and is not.
    NotEmpty {
        /// Positions it holds.
        len: usize,
        /// Blocks it holds.
        blocks: usize,
    },
    /// A position that the sequence does not hold.
    PositionOutOfRange {
        /// The position asked for.
        position: usize,
        /// Positions it holds.
        len: usize,
    },
    /// A position that is needed and was given back, because the sequence's window had passed it.
    PositionFreed {
        /// The first position needed.
        position: usize,
        /// The oldest position that was kept behind those that are gone.
        oldest: usize,
    },
    /// A KV head that the shape does not have.
    HeadOutOfRange {
        /// The head asked for.
        head: usize,
        /// Heads there are.
        n_kv_heads: usize,
    },
    /// More positions than an index can count.
    TooLong,
    /// A sequence over all layers writes into room that was reserved in all of them, and these
    /// positions have none. `reserve` first.
    NotReserved {
        /// Positions to be written.
        need: usize,
        /// Positions for which the layer has room that nobody else holds.
        have: usize,
    },
    /// A layer has fewer positions than are to be committed in all of them.
    LayerBehind {
        /// The layer.
        layer: usize,
        /// Positions that it should have.
        need: usize,
        /// Positions written in it.
        have: usize,
    },
    /// The layer reads the rows of another and has none of its own to write.
    LayerReads {
        /// The layer.
        layer: usize,
        /// The layer whose rows it reads.
        owner: usize,
    },
    /// A path through drafts does not ascend.
    PathOrder {
        /// The entry that is not above the one before it.
        index: usize,
    },
    /// The handle of a page group was refused.
    Group(GroupError),
}

impl fmt::Display for PagedKvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PagedKvError::Exhausted(inner) => inner.fmt(f),
            PagedKvError::WrongStore { need, have } => {
                write!(f, "this sequence lives in store {need}, not in store {have}")
            }
            PagedKvError::RowLength { side, need, have } => {
                write!(f, "{side} rows need {need} numbers, got {have}")
            }
            PagedKvError::BlockOutOfRange { block, total } => {
                write!(f, "block {block} is out of range, the store has {total}")
            }
            PagedKvError::BlockFree { block } => write!(f, "block {block} is free"),
            PagedKvError::BlockCount { need, have } => {
                write!(f, "{need} blocks are needed for that many positions, got {have}")
            }
            PagedKvError::BlockTwice { block } => write!(f, "block {block} is named twice"),
            PagedKvError::TooManyHolders { block } => {
                write!(f, "block {block} has too many holders")
            }
            PagedKvError::NotEmpty { len, blocks } => {
                write!(f, "the sequence must be empty, it holds {len} positions in {blocks} blocks")
            }
            PagedKvError::PositionOutOfRange { position, len } => {
                write!(f, "position {position} is out of range, the sequence holds {len}")
            }
            PagedKvError::PositionFreed { position, oldest } => {
                write!(f, "position {position} was given back, the oldest one kept is {oldest}")
            }
            PagedKvError::HeadOutOfRange { head, n_kv_heads } => {
                write!(f, "KV head {head} is out of range, there are {n_kv_heads}")
            }
            PagedKvError::TooLong => f.write_str("more positions than an index can count"),
            PagedKvError::NotReserved { need, have } => {
                write!(f, "{need} positions are to be written, room is reserved for {have}")
            }
            PagedKvError::LayerBehind { layer, need, have } => {
                write!(f, "layer {layer} has {have} positions, {need} are to be committed")
            }
            PagedKvError::LayerReads { layer, owner } => {
                write!(f, "layer {layer} reads the rows of layer {owner} and has none of its own")
            }
            PagedKvError::PathOrder { index } => {
                write!(f, "entry {index} of the path is not above the one before it")
            }
            PagedKvError::Group(inner) => inner.fmt(f),
        }
    }
}

impl Error for PagedKvError {}

impl From<PagedStoreExhausted> for PagedKvError {
    fn from(inner: PagedStoreExhausted) -> Self {
        PagedKvError::Exhausted(inner)
    }
}

impl From<GroupError> for PagedKvError {
    fn from(inner: GroupError) -> Self {
        PagedKvError::Group(inner)
    }
}

/// Why a contiguous cache could not be changed or read. Nothing was changed.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::KvCache;
/// use paged_kv::{KvCacheError, Side};
///
/// let mut cache: KvCache = KvCache::new(1, 2);
/// let refused = cache.try_push(&[0.5; 2], &[0.5; 1]);
/// assert_eq!(refused, Err(KvCacheError::RowLength { side: Side::Value, need: 2, have: 1 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvCacheError {
    /// The pool had too few free blocks.
    Exhausted(KvPoolExhausted),
    /// The shape cannot exist, or memory for another page could not be had.
    Shape(ShapeError),
    /// Rows of the wrong length.
    RowLength {
        /// Which of the two arguments.
        side: Side,
        /// Numbers needed, over all rows.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// A position that the cache does not hold.
    PositionOutOfRange {
        /// The position asked for.
        position: usize,
        /// Positions it holds.
        len: usize,
    },
    /// A KV head that the shape does not have.
    HeadOutOfRange {
        /// The head asked for.
        head: usize,
        /// Heads there are.
        n_kv_heads: usize,
    },
    /// More positions than an index can count.
    TooLong,
}

impl fmt::Display for KvCacheError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvCacheError::Exhausted(inner) => inner.fmt(f),
            KvCacheError::Shape(inner) => inner.fmt(f),
            KvCacheError::RowLength { side, need, have } => {
                write!(f, "{side} rows need {need} numbers, got {have}")
            }
            KvCacheError::PositionOutOfRange { position, len } => {
                write!(f, "position {position} is out of range, the cache holds {len}")
            }
            KvCacheError::HeadOutOfRange { head, n_kv_heads } => {
                write!(f, "KV head {head} is out of range, there are {n_kv_heads}")
            }
            KvCacheError::TooLong => f.write_str("more positions than an index can count"),
        }
    }
}

impl Error for KvCacheError {}

impl From<KvPoolExhausted> for KvCacheError {
    fn from(inner: KvPoolExhausted) -> Self {
        KvCacheError::Exhausted(inner)
    }
}

impl From<ShapeError> for KvCacheError {
    fn from(inner: ShapeError) -> Self {
        KvCacheError::Shape(inner)
    }
}

/// Why a page group handle was refused. Nothing was changed.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::GroupError;
/// use paged_kv::cache::SharedPagedKv;
///
/// let (shared, other) = (SharedPagedKv::new(1, 16, 1, 1, 1), SharedPagedKv::new(1, 16, 1, 1, 1));
/// let group = shared.acquire_group().expect("one is free");
/// assert_eq!(other.try_retain(group), Err(GroupError::WrongPool { group }));
/// shared.release_group(group);
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupError {
    /// The group that this handle named has been released by its last holder.
    Stale {
        /// The handle.
        group: PageGroup,
    },
    /// The handle was given out by another `SharedPagedKv`.
    WrongPool {
        /// The handle.
        group: PageGroup,
    },
    /// The group already has as many holders as can be counted.
    TooManyHolders {
        /// The handle.
        group: PageGroup,
    },
}

impl fmt::Display for GroupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupError::Stale { group } => {
                write!(f, "page group {group} is stale, its last holder has released it")
            }
            GroupError::WrongPool { group } => {
                write!(f, "page group {group} belongs to another pool")
            }
            GroupError::TooManyHolders { group } => {
                write!(f, "page group {group} has too many holders")
            }
        }
    }
}

impl Error for GroupError {}
