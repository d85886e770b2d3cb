//! What the doors of attention refuse.

use core::error::Error;
use core::fmt;

use super::ShapeError;
use crate::id::StoreId;

/// Why attention was refused. `out`, the LSE and the caches are as they were.
///
/// # Examples
///
/// ```
/// use paged_kv::AttentionError;
/// use paged_kv::attention::causal_gqa_attention;
/// use paged_kv::cache::KvCache;
///
/// let mut cache: KvCache = KvCache::new(1, 2);
/// cache.push(&[1.0, 0.0], &[3.0, 4.0])?;
/// let refused = causal_gqa_attention(&[0.5; 3], &cache, 1).unwrap_err();
/// assert_eq!(refused, AttentionError::QueryLength { row: 2, have: 3 });
/// # Ok::<(), paged_kv::KvCacheError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum AttentionError {
    /// The head counts do not fit each other.
    Shape(ShapeError),
    /// The query is not a whole number of rows.
    QueryLength {
        /// Numbers in one query row over all heads.
        row: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// Another number of query rows than the call was said to have.
    QueryRows {
        /// Rows that were promised.
        need: usize,
        /// Rows that the query's length and the number of heads amount to.
        have: usize,
    },
    /// A query row stands for one of the last cached positions, and there are too few.
    TooManyQueryRows {
        /// Query rows handed in, or of its tree alone where no other option speaks of positions.
        rows: usize,
        /// Positions cached.
        len: usize,
    },
    /// The sequence was filled from another store.
    WrongStore {
        /// The store that holds this sequence's blocks.
        need: StoreId,
        /// The store that was handed in.
        have: StoreId,
    },
    /// A position that the call looks at was given back, because the sequence's window had passed
    /// it. Set a window, and at most the one that the sequence keeps.
    PositionFreed {
        /// The first such position.
        position: usize,
        /// The oldest position that was kept behind those that are gone.
        oldest: usize,
    },
    /// The output has the wrong length.
    OutLength {
        /// Numbers needed.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// The LSE output has the wrong length.
    LseLength {
        /// Numbers needed: query rows x query heads.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// The scratch is too short.
    ScratchLength {
        /// Numbers needed at least.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// An option with one number per query head has the wrong length.
    PerHeadLength {
        /// The option.
        what: &'static str,
        /// Query heads.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// Another number of tree masks than there are sequences.
    Trees {
        /// Sequences of the call.
        need: usize,
        /// Masks handed in.
        have: usize,
    },
    /// A tree mask has more rows than its sequence has query rows.
    TreeRows {
        /// The sequence, by its place among those handed in.
        sequence: usize,
        /// Its query rows.
        most: usize,
        /// Rows of the mask.
        have: usize,
    },
    /// A tree mask has the wrong length.
    TreeLength {
        /// Words needed.
        need: usize,
        /// Words handed in.
        have: usize,
    },
    /// A row of a tree mask does not see itself, or sees one behind it.
    TreeBit {
        /// The row.
        row: usize,
        /// The bit that is wrong: the row's own, or one behind it.
        column: usize,
    },
    /// An option has a value that no formula can use.
    BadOption {
        /// The option.
        what: &'static str,
        /// What it was set to.
        have: f32,
    },
}

impl fmt::Display for AttentionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AttentionError::Shape(inner) => inner.fmt(f),
            AttentionError::QueryLength { row, have } => {
                write!(f, "query rows are {row} numbers long, {have} is no multiple of that")
            }
            AttentionError::QueryRows { need, have } => {
                write!(f, "the query holds {have} rows of that many heads, {need} were promised")
            }
            AttentionError::TooManyQueryRows { rows, len } => {
                write!(
                    f,
                    "{rows} query rows, and only {len} positions are cached: append first, then attend"
                )
            }
            AttentionError::WrongStore { need, have } => {
                write!(f, "this sequence lives in store {need}, not in store {have}")
            }
            AttentionError::PositionFreed { position, oldest } => {
                write!(
                    f,
                    "position {position} is looked at and was given back, the oldest one kept is {oldest}"
                )
            }
            AttentionError::OutLength { need, have } => {
                write!(f, "the output needs {need} numbers, got {have}")
            }
            AttentionError::LseLength { need, have } => {
                write!(f, "the LSE output needs {need} numbers, got {have}")
            }
            AttentionError::ScratchLength { need, have } => {
                write!(f, "the scratch needs {need} numbers, got {have}")
            }
            AttentionError::PerHeadLength { what, need, have } => {
                write!(f, "{what} needs one number for each of {need} query heads, got {have}")
            }
            AttentionError::Trees { need, have } => {
                write!(f, "each of {need} sequences needs a tree mask, got {have}")
            }
            AttentionError::TreeRows { sequence, most, have } => {
                write!(
                    f,
                    "the tree of sequence {sequence} has {have} rows, and {most} query rows are there"
                )
            }
            AttentionError::TreeLength { need, have } => {
                write!(f, "the tree mask needs {need} words, got {have}")
            }
            AttentionError::TreeBit { row, column } => {
                write!(
                    f,
                    "row {row} of a tree sees itself and none behind it, which bit {column} denies"
                )
            }
            AttentionError::BadOption { what, have } => write!(f, "{what} cannot be {have:e}"),
        }
    }
}

impl Error for AttentionError {}

impl From<ShapeError> for AttentionError {
    fn from(inner: ShapeError) -> Self {
        AttentionError::Shape(inner)
    }
}
