//! Names of things: blocks, stores, page groups.
//!
//! A number that names something is a type of its own here, so that a block id cannot be passed
//! where a position is meant. Ids are 32 bits inside (a block table of a million positions in
//! blocks of 16 is 256 KiB, not 512), and sizes computed from them are `usize`.

use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};

/// One physical block of a [`PagedKvStore`](crate::cache::PagedKvStore).
///
/// # Examples
///
/// ```
/// use paged_kv::BlockId;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 8, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.append(&mut store, &[0.5; 34], &[0.5; 34], 17)?; // two blocks
/// let [first, second] = cache.block_table() else { unreachable!() };
/// assert_ne!(first, second);
/// assert!(first.index() < store.total_blocks());
/// assert_eq!(BlockId::new(first.index()), Some(*first));
/// # cache.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

impl BlockId {
    /// How many blocks one store can have: ids `0 ..= u32::MAX - 1`.
    pub const MOST: usize = u32::MAX as usize;

    /// The block with this index, or `None` where no store can have that many.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::BlockId;
    ///
    /// assert_eq!(BlockId::new(7).map(BlockId::index), Some(7));
    /// assert_eq!(BlockId::new(BlockId::MOST), None);
    /// ```
    pub const fn new(index: usize) -> Option<Self> {
        if index < Self::MOST { Some(BlockId(index as u32)) } else { None }
    }

    /// Its index in the store, from 0.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) const fn from_raw(raw: u32) -> Self {
        BlockId(raw)
    }

    pub(crate) const fn raw(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b{}", self.0)
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which store a sequence's blocks live in.
///
/// Every store that is opened gets the next number, so that a block table can never be read
/// against another store of the same shape. Numbers repeat after 2^32 stores.
///
/// # Examples
///
/// ```
/// use paged_kv::PagedKvError;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 8, 1, 2);
/// let mut other = PagedKvStore::new(16, 8, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[0.5; 2], &[0.5; 2])?;
/// let refused = PagedKvError::WrongStore { need: store.id(), have: other.id() };
/// assert_eq!(cache.push(&mut other, &[0.5; 2], &[0.5; 2]), Err(refused));
/// # cache.release(&mut store)?;
/// # Ok::<(), PagedKvError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StoreId(u32);

impl StoreId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        StoreId(next(&NEXT))
    }
}

impl fmt::Debug for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A handle to one block in every layer of a `SharedPagedKv`.
///
/// A handle expires: it carries the generation of the slot it names, and `Debug` prints both, as
/// `7v3`. Once the last holder has released the group the handle never names anything again, not
/// even when its slot is handed out anew: without that, a late release would free the new
/// owner's pages, which shows up as another conversation's tokens rather than as a crash.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// use paged_kv::GroupError;
/// use paged_kv::cache::SharedPagedKv;
///
/// let shared = SharedPagedKv::new(2, 16, 8, 1, 2);
/// let group = shared.acquire_group().expect("eight are free");
/// shared.release_group(group);
/// assert_eq!(shared.try_release(group), Err(GroupError::Stale { group }));
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageGroup {
    index: u32,
    generation: u32,
    pool: u32,
}

#[cfg_attr(
    not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
    expect(dead_code, reason = "only the shared layer gives handles out")
)]
impl PageGroup {
    pub(crate) const fn new(index: u32, generation: u32, pool: u32) -> Self {
        PageGroup { index, generation, pool }
    }

    pub(crate) fn fresh_pool() -> u32 {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        next(&NEXT)
    }

    pub(crate) const fn index(self) -> usize {
        self.index as usize
    }

    pub(crate) const fn generation(self) -> u32 {
        self.generation
    }

    pub(crate) const fn pool(self) -> u32 {
        self.pool
    }
}

impl fmt::Debug for PageGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}v{}", self.index, self.generation)
    }
}

impl fmt::Display for PageGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Which prefix cache a pin is of, and between which two clears of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheEra(u32);

impl CacheEra {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        CacheEra(next(&NEXT))
    }
}

/// The counter's next value. `Relaxed` is enough: the number must differ, nothing is published
/// by it.
#[cfg(target_has_atomic = "32")]
fn next(counter: &AtomicU32) -> u32 {
    counter.fetch_add(1, Ordering::Relaxed)
}

/// A processor without compare-and-swap has one core; two interrupts that open a store at the
/// same instant are the one case in which a number could be given out twice.
#[cfg(not(target_has_atomic = "32"))]
fn next(counter: &AtomicU32) -> u32 {
    let now = counter.load(Ordering::Relaxed);
    counter.store(now.wrapping_add(1), Ordering::Relaxed);
    now
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn handles_print_index_and_generation() {
        assert_eq!(format!("{:?}", PageGroup::new(7, 3, 0)), "7v3");
        assert_eq!(format!("{}", PageGroup::new(7, 3, 0)), "7v3");
    }

    #[test]
    fn block_ids_stop_before_the_sentinel() {
        assert_eq!(BlockId::new(5).map(BlockId::index), Some(5));
        assert!(BlockId::new(BlockId::MOST - 1).is_some());
        assert_eq!(BlockId::new(BlockId::MOST), None);
    }

    #[test]
    fn stores_are_told_apart() {
        assert_ne!(StoreId::fresh(), StoreId::fresh());
    }
}
