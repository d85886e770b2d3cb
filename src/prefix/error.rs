//! Why a prefix was not stored, not pinned or not removed.

use core::error::Error;
use core::fmt;

use crate::error::GroupError;
use crate::id::PageGroup;

/// Why blocks were not stored. Nothing was changed.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// # use paged_kv::cache::SharedPagedKv;
/// # use paged_kv::prefix::{HashKey, InsertError, PrefixCache, Priority};
/// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
/// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
/// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
/// # let groups = prefixes.acquire_groups(2)?;
/// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
/// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
/// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
/// let refused = prefixes.insert(b"tenant", &prompt, &[], Priority::NORMAL);
/// assert_eq!(refused, Err(InsertError::GroupCount { need: 2, have: 0 }));
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InsertError {
    /// Fewer groups than the tokens fill blocks.
    GroupCount {
        /// Full blocks of tokens.
        need: usize,
        /// Groups handed in.
        have: usize,
    },
    /// The cache holds this group already, for other tokens, or it was handed in twice: one block
    /// cannot hold the rows of two.
    GroupCached {
        /// The group.
        group: PageGroup,
    },
    /// The group cannot be held.
    Group(GroupError),
}

impl fmt::Display for InsertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InsertError::GroupCount { need, have } => {
                write!(f, "the tokens fill {need} blocks, got {have} page groups")
            }
            InsertError::GroupCached { group } => {
                write!(f, "page group {group} is cached already, for other tokens")
            }
            InsertError::Group(inner) => inner.fmt(f),
        }
    }
}

impl Error for InsertError {}

impl From<GroupError> for InsertError {
    fn from(inner: GroupError) -> Self {
        InsertError::Group(inner)
    }
}

/// Why a prefix was not pinned or unpinned. Nothing was changed.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// # use paged_kv::cache::SharedPagedKv;
/// # use paged_kv::prefix::{HashKey, PinError, PrefixCache, Priority};
/// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
/// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
/// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
/// # let groups = prefixes.acquire_groups(2)?;
/// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
/// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
/// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
/// let refused = prefixes.pin(b"tenant", &[1, 2, 3, 4, 9, 9, 9, 9]);
/// assert_eq!(refused, Err(PinError::NotCached { need: 2, have: 1 }));
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PinError {
    /// Fewer tokens than one block.
    TooShort {
        /// Tokens of one block.
        need: usize,
        /// Tokens handed in.
        have: usize,
    },
    /// Not every full block of the tokens is cached.
    NotCached {
        /// Full blocks of tokens.
        need: usize,
        /// Of these, from the first on, those cached.
        have: usize,
    },
    /// The pin budget does not reach.
    OverBudget {
        /// Blocks that were not pinned yet.
        need: usize,
        /// Blocks that the budget has left.
        left: usize,
    },
    /// As many pins are out as can be counted.
    TooMany,
    /// The pin is of another cache, or of a time before the cache was cleared.
    UnknownPin,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PinError::TooShort { need, have } => {
                write!(f, "a pin needs {need} tokens, one block, got {have}")
            }
            PinError::NotCached { need, have } => {
                write!(f, "{need} blocks are to be pinned, {have} of them are cached")
            }
            PinError::OverBudget { need, left } => {
                write!(f, "{need} more blocks are to be pinned, the budget has {left} left")
            }
            PinError::TooMany => f.write_str("too many pins are out"),
            PinError::UnknownPin => {
                f.write_str("the pin is of another cache, or from before it was cleared")
            }
        }
    }
}

impl Error for PinError {}

/// Why the blocks of a salt were not removed. Nothing was changed.
///
/// # Examples
///
/// ```
/// # #[cfg(any(feature = "std", feature = "spin"))] {
/// # use paged_kv::cache::SharedPagedKv;
/// # use paged_kv::prefix::{HashKey, PrefixCache, Priority, RemoveError};
/// # let shared = SharedPagedKv::new(1, 4, 8, 1, 1);
/// # let mut prefixes = PrefixCache::new(&shared, 4, HashKey::new([7; 16]));
/// # let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
/// # let groups = prefixes.acquire_groups(2)?;
/// # prefixes.insert(b"tenant", &prompt, &groups, Priority::NORMAL)?;
/// # groups.into_iter().for_each(|group| assert!(!shared.release_group(group)));
/// // Cached are the two blocks of `prompt`, 1 to 8, in a pool of 8 blocks of 4 positions.
/// prefixes.set_pin_budget(2);
/// let pin = prefixes.pin(b"tenant", &prompt)?;
/// assert_eq!(prefixes.remove_salt(b"tenant"), Err(RemoveError::Pinned { blocks: 2 }));
/// prefixes.unpin(pin)?;
/// assert_eq!(prefixes.remove_salt(b"tenant"), Ok(2));
/// # }
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoveError {
    /// Some of them are pinned. Give the pins back first.
    Pinned {
        /// How many.
        blocks: usize,
    },
}

impl fmt::Display for RemoveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemoveError::Pinned { blocks } => {
                write!(f, "{blocks} blocks of the salt are pinned")
            }
        }
    }
}

impl Error for RemoveError {}
