//! What a recount of the books found wrong.

use alloc::vec::Vec;
use core::error::Error;
use core::fmt;

use crate::id::{BlockId, PageGroup};

/// The books do not agree with what those who hold something say they hold.
///
/// # Examples
///
/// ```
/// use paged_kv::Miscount;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 1);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[0.5], &[0.5])?;
/// let block = cache.block_table()[0];
/// let table_told_twice = [cache.block_table(), cache.block_table()];
/// let report = store.check_invariants(table_told_twice).unwrap_err();
/// let wrong = Miscount::Holders { block, counted: 1, found: 2 };
/// assert_eq!(report.miscounts().next(), Some((None, wrong)));
/// # cache.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Miscount {
    /// The holder count of a block is not the number of holders that name it.
    ///
    /// More counted than found is a leak: a sequence was dropped without being released.
    Holders {
        /// The block.
        block: BlockId,
        /// Its holder count.
        counted: u32,
        /// Holders that name it.
        found: u32,
    },
    /// The free list has a held block, or a block twice, or misses one.
    FreeList {
        /// Blocks counted free.
        free: usize,
        /// Different free blocks on the list.
        found: usize,
    },
    /// A holder names a block that the store does not have.
    NoBlock {
        /// The block.
        block: BlockId,
        /// Blocks there are.
        total: usize,
    },
    /// A holder speaks of a layer that is not there.
    NoLayer {
        /// The layer.
        layer: usize,
        /// Layers there are.
        layers: usize,
    },
    /// The holder count of a page group is not the number of holders that have its handle.
    ///
    /// More counted than found is a leak: a handle was dropped without being released.
    GroupHolders {
        /// The group.
        group: PageGroup,
        /// Its holder count.
        counted: u32,
        /// Holders that have the handle.
        found: u32,
    },
    /// Somebody has a handle that names no group, or one of another pool.
    NoGroup {
        /// The handle.
        group: PageGroup,
    },
}

impl fmt::Display for Miscount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Miscount::Holders { block, counted, found } => {
                write!(f, "block {block} has a holder count of {counted}, found {found}")
            }
            Miscount::FreeList { free, found } => {
                write!(f, "{free} blocks are counted free, {found} are on the free list")
            }
            Miscount::NoBlock { block, total } => {
                write!(f, "block {block} is named, and there are {total}")
            }
            Miscount::NoLayer { layer, layers } => {
                write!(f, "layer {layer} is named, and there are {layers}")
            }
            Miscount::GroupHolders { group, counted, found } => {
                write!(f, "page group {group} has a holder count of {counted}, found {found}")
            }
            Miscount::NoGroup { group } => {
                write!(f, "page group {group} is held, and names nothing")
            }
        }
    }
}

impl Error for Miscount {}

/// All that a `check_invariants` found wrong, one line each when it is printed.
///
/// It keeps the first 64 and counts the rest: where one count is wrong many may be, and a report is
/// there to be read.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 1);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[0.5], &[0.5])?;
/// assert!(store.check_invariants([cache.block_table()]).is_ok());
/// drop(cache); // not released
/// let report = store.check_invariants([]).unwrap_err();
/// assert_eq!((report.count(), report.miscounts().count()), (1, 1));
/// assert!(report.to_string().ends_with("\n  block 0 has a holder count of 1, found 0"));
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InvariantReport {
    kept: Vec<(Option<usize>, Miscount)>,
    count: usize,
}

impl InvariantReport {
    const MOST_KEPT: usize = 64;

    /// Notes one more.
    pub(crate) fn note(&mut self, layer: Option<usize>, what: Miscount) {
        self.count += 1;
        if self.kept.len() < Self::MOST_KEPT {
            self.kept.push((layer, what));
        }
    }

    /// `Ok` where nothing was noted.
    pub(crate) fn into_result(self) -> Result<(), Self> {
        if self.count == 0 { Ok(()) } else { Err(self) }
    }

    /// How much is wrong, what was not kept included.
    pub fn count(&self) -> usize {
        self.count
    }

    /// What is wrong, and in which layer where there are several.
    pub fn miscounts(&self) -> impl Iterator<Item = (Option<usize>, Miscount)> + '_ {
        self.kept.iter().copied()
    }
}

impl fmt::Display for InvariantReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "miscounts: {}", self.count)?;
        for (layer, what) in &self.kept {
            match layer {
                Some(layer) => write!(f, "\n  layer {layer}: {what}")?,
                None => write!(f, "\n  {what}")?,
            }
        }
        match self.count - self.kept.len() {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

impl Error for InvariantReport {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_report_is_read_line_by_line_and_does_not_run_on_for_ever() {
        let mut report = InvariantReport::default();
        assert_eq!(report.clone().into_result(), Ok(()));
        let block = BlockId::from_raw(3);
        report.note(Some(2), Miscount::Holders { block, counted: 2, found: 1 });
        report.note(None, Miscount::NoGroup { group: PageGroup::new(7, 3, 0) });
        let text = report.to_string();
        let lines = "miscounts: 2\n  layer 2: block 3 has a holder count of 2, found 1\n  \
                     page group 7v3 is held, and names nothing";
        assert_eq!(text, lines);
        for _ in 0..100 {
            report.note(None, Miscount::FreeList { free: 1, found: 0 });
        }
        assert_eq!((report.count(), report.miscounts().count()), (102, 64));
        assert!(report.to_string().ends_with("\n  and 38 more"));
    }
}
