//! The layers from outside: a recount, numbers, and a picture. None of them takes a layer's lock.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;

use super::seat::Seat;
use super::shared::SharedPagedKv;
use crate::error::{InvariantReport, Miscount};
use crate::id::{BlockId, PageGroup, StoreId};
use crate::storage::report::{Recount, StoreMap, StoreStats};

/// Somebody who holds something of a [`SharedPagedKv`], as he tells it to
/// [`check_invariants`](SharedPagedKv::check_invariants).
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{Holder, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
/// let group = shared.acquire_group().expect("four are free");
/// assert!(shared.check_invariants([Holder::Group(group)]).is_ok());
/// assert!(shared.check_invariants([]).is_err());
/// shared.release_group(group);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder<'a> {
    /// A block table, of a bare sequence in one layer.
    /// [`PagedSequence::holders`](crate::cache::PagedSequence::holders) tells those of a request.
    #[non_exhaustive]
    Table {
        /// The layer.
        layer: usize,
        /// The blocks it holds there.
        blocks: &'a [BlockId],
    },
    /// One holder of a page group. Its blocks need not be told.
    Group(PageGroup),
}

impl<'a> Holder<'a> {
    /// A block table in one layer.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{Holder, PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut shared.write(1), &[0.5], &[0.5])?;
    /// shared.check_invariants([Holder::table(1, cache.block_table())])?;
    /// assert!(shared.check_invariants([Holder::table(0, cache.block_table())]).is_err());
    /// # shared.release(1, &mut cache)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn table(layer: usize, blocks: &'a [BlockId]) -> Self {
        Holder::Table { layer, blocks }
    }
}

impl<E: super::spec::LayerElement> SharedPagedKv<E> {
    /// Recounts every block of every layer and every group from those who hold some.
    ///
    /// Each table is told once, and each group once for each of its holders: an index that keeps
    /// a handle, a lease, a caller's own. Groups hold their blocks by themselves. It checks
    /// what [`PagedKvStore::check_invariants`](crate::cache::PagedKvStore::check_invariants) checks,
    /// in every layer, and that each group has as many holders as were told. It finds tables and
    /// handles that were dropped without being released.
    ///
    /// Right while nobody takes, retains or gives back.
    ///
    /// # Errors
    ///
    /// An [`InvariantReport`] of all that is wrong.
    ///
    /// # Cost
    ///
    /// Visits every block and allocates 5 bytes for each, and some for each group. Takes the group
    /// table's lock and no other, so that it is legal under any guard.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{Holder, PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?;
    /// let group = shared.acquire_group().expect("two are left");
    /// shared.check_invariants(sequence.holders().chain([Holder::Group(group)]))?;
    /// let report = shared.check_invariants(sequence.holders()).unwrap_err();
    /// assert!(report.to_string().contains("page group 0v0 has a holder count of 1, found 0"));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn check_invariants<'a>(
        &self,
        holders: impl IntoIterator<Item = Holder<'a>>,
    ) -> Result<(), InvariantReport> {
        let mut report = InvariantReport::default();
        let mut recounts: Vec<_> = self.seats().map(|seat| Recount::new(&seat.blocks)).collect();
        let mut handles = BTreeMap::<(usize, u32, u32), (PageGroup, u32)>::new();
        let key = |group: PageGroup| (group.index(), group.generation(), group.pool());
        for holder in holders {
            match holder {
                Holder::Table { layer, blocks } => {
                    match self.store_of(layer).and_then(|of| recounts.get_mut(of)) {
                        Some(recount) => blocks.iter().for_each(|&block| recount.hold(block)),
                        None => {
                            let layers = self.layer_count();
                            report.note(None, Miscount::NoLayer { layer, layers });
                        }
                    }
                }
                Holder::Group(group) => handles.entry(key(group)).or_insert((group, 0)).1 += 1,
            }
        }
        for (group, counted, blocks) in self.groups.lock().living() {
            recounts.iter_mut().zip(blocks).for_each(|(recount, &block)| recount.hold(block));
            let found = handles.remove(&key(group)).map_or(0, |(_, found)| found);
            if counted != found {
                report.note(None, Miscount::GroupHolders { group, counted, found });
            }
        }
        for (group, _) in handles.into_values() {
            report.note(None, Miscount::NoGroup { group });
        }
        for (seat, recount) in self.seats().zip(recounts) {
            recount.finish(|miscount| report.note(Some(seat.layer), miscount));
        }
        report.into_result()
    }

    /// Whether one release of the group would give no block back: it has other holders, or others
    /// hold its block in every layer.
    pub(crate) fn is_group_in_use(&self, group: PageGroup) -> bool {
        let groups = self.groups.lock();
        let blocks = groups.blocks(group).unwrap_or(&[]);
        let mut held = self.seats().zip(blocks).map(|(seat, &block)| seat.blocks.holders(block));
        groups.refs(group) > 1 || !blocks.is_empty() && held.all(|holders| holders > 1)
    }

    /// The holders of each group, into as many counts. Takes the group table's lock once.
    pub(crate) fn group_refs_each(&self, groups: &[PageGroup], counts: &mut [u32]) {
        let table = self.groups.lock();
        groups.iter().zip(counts).for_each(|(group, count)| *count = table.refs(*group));
    }

    /// The name of the first layer's store, which is no other pool's; `None` with no layers.
    pub(crate) fn first_store(&self) -> Option<StoreId> {
        self.seats().next().map(|seat| seat.store)
    }

    /// How many blocks of each layer, and how many groups, are free, held, shared. A snapshot.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?;
    /// let text = "0 groups, 2 free\n\
    ///             layers 0 to 1: 4 blocks of 16 positions: 2 free, 2 held (0 shared, 0 cached), \
    ///             2 at most";
    /// assert_eq!(shared.stats().to_string(), text);
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Cost
    ///
    /// Two allocations; visits the blocks that were ever held. Takes the group table's lock and
    /// waits for no guard.
    pub fn stats(&self) -> PoolStats {
        let of = |seat: &Seat| StoreStats::of(&seat.blocks, seat.shape, seat.bytes_per_block);
        let layers = self.seats().map(of).collect();
        let groups = self.groups.lock().living().count();
        PoolStats { layers, numbers: self.numbers(), groups, free_groups: self.free_groups() }
    }

    /// The blocks of every layer and their holders as a picture in letters, to be printed.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?;
    /// assert_eq!(shared.map().to_string(), "2 layers\nlayers 0 to 1\n       0 11..");
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Cost
    ///
    /// Visits every block and allocates at most a byte for each. Takes no lock.
    pub fn map(&self) -> PoolMap {
        let layers = self.seats().map(|seat| StoreMap::of(&seat.blocks)).collect();
        PoolMap { layers, numbers: self.numbers() }
    }

    /// The layer of each store.
    fn numbers(&self) -> Vec<usize> {
        self.seats().map(|seat| seat.layer).collect()
    }
}

/// What one sequence holds, over all layers. Prints as one line.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedSequence, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
/// let mut sequence = PagedSequence::new(&shared);
/// sequence.reserve(3)?;
/// let stats = sequence.stats();
/// assert_eq!((stats.len, stats.blocks, stats.waste), (0, 2, 32));
/// println!("{stats}");
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceStats {
    /// Positions committed.
    pub len: usize,
    /// Blocks in its tables, the layers added up.
    pub blocks: usize,
    /// Of those, blocks that others hold as well.
    pub shared: usize,
    /// Positions in its blocks that hold none of its rows, the layers added up: the rest of the
    /// block that is being filled, and reserved room.
    pub waste: usize,
}

impl fmt::Display for SequenceStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SequenceStats { len, blocks, shared, waste } = self;
        write!(f, "{len} positions in {blocks} blocks ({shared} shared), {waste} places unused")
    }
}

/// How the blocks of all layers are used. Prints a line for each kind of layer.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::SharedPagedKv;
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
/// let group = shared.acquire_group().expect("four are free");
/// let stats = shared.stats();
/// assert_eq!((stats.groups, stats.free_groups, stats.layers[1].cached), (1, 3, 1));
/// println!("{stats}\n{}", shared.map());
/// shared.release_group(group);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Each layer that has a store of its own.
    pub layers: Vec<StoreStats>,
    numbers: Vec<usize>,
    /// Page groups that have a holder.
    pub groups: usize,
    /// Page groups that could be taken.
    pub free_groups: usize,
}

impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} groups, {} free", self.groups, self.free_groups)?;
        by_layers(f, &self.layers, &self.numbers, ": ")
    }
}

/// The blocks of all layers as a picture: [`StoreMap`] says what the letters are. Layers that look
/// alike are printed once.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 1);
/// let group = shared.acquire_group().expect("four are free");
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut shared.write(0), &[0.5], &[0.5])?;
/// // The group has a block in both layers, the sequence in one of them.
/// let picture = "2 layers\nlayer 0\n       0 c1..\nlayer 1\n       0 c...";
/// assert_eq!(shared.map().to_string(), picture);
/// # shared.release(0, &mut cache)?;
/// # shared.release_group(group);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PoolMap {
    layers: Vec<StoreMap>,
    numbers: Vec<usize>,
}

impl fmt::Display for PoolMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers", self.layers.len())?;
        by_layers(f, &self.layers, &self.numbers, "\n")
    }
}

impl fmt::Debug for PoolMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A line for each run of equal layers.
fn by_layers<T: fmt::Display + PartialEq>(
    f: &mut fmt::Formatter<'_>,
    layers: &[T],
    numbers: &[usize],
    between: &str,
) -> fmt::Result {
    let mut first = 0;
    for run in layers.chunk_by(PartialEq::eq) {
        let (from, to) = (numbers[first], numbers[first + run.len() - 1]);
        match run.len() {
            1 => write!(f, "\nlayer {from}{between}{}", run[0])?,
            _ => write!(f, "\nlayers {from} to {to}{between}{}", run[0])?,
        }
        first += run.len();
    }
    Ok(())
}
