//! Why a batch was refused.

use core::error::Error;
use core::fmt;

use crate::error::AttentionError;
use crate::id::StoreId;
use crate::shape::{KvDims, KvShape};

/// Why a batch was not planned, or not attended: then `out`, the LSE and the scratch are as they
/// were.
///
/// Sequences are named by their place among those that were handed in, from 0.
///
/// # Examples
///
/// ```
/// use paged_kv::batch::{BatchError, BatchPlan, SequenceRows, SharedPrefix};
/// use paged_kv::{GqaShape, KvShape};
///
/// let shape = GqaShape::new(KvShape::square(64, 1, 8)?, 1)?;
/// let shared = SharedPrefix { sequences: vec![0, 1], positions: 64 };
/// let one = [SequenceRows { len: 100, rows: 1 }];
/// let refused = BatchPlan::with_shared(shape, &one, &[shared]).unwrap_err();
/// assert_eq!(refused, BatchError::NoSequence { sequence: 1, sequences: 1 });
/// # Ok::<(), paged_kv::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum BatchError {
    /// Numbers of the batch together, or of one sequence, that no memory can hold.
    TooLarge {
        /// What there is too much of.
        what: &'static str,
    },
    /// A shared prefix names a sequence that the batch does not have.
    NoSequence {
        /// The sequence named.
        sequence: usize,
        /// Sequences there are.
        sequences: usize,
    },
    /// A sequence is named twice, in one shared prefix or in two.
    SharedTwice {
        /// The sequence.
        sequence: usize,
    },
    /// A shared prefix is longer than a sequence that is said to have it.
    SharedTooLong {
        /// The sequence.
        sequence: usize,
        /// Positions of the prefix.
        positions: usize,
        /// Positions of the sequence.
        len: usize,
    },
    /// The store has another shape than the plan was made for.
    Shape {
        /// What the plan was made for.
        need: KvShape,
        /// The store's.
        have: KvShape,
    },
    /// Another number of sequences than the plan was made for.
    Sequences {
        /// What the plan was made for.
        need: usize,
        /// Sequences handed in.
        have: usize,
    },
    /// A sequence has another length than the plan was made for.
    Length {
        /// The sequence.
        sequence: usize,
        /// What the plan was made for.
        need: usize,
        /// Positions it has.
        have: usize,
    },
    /// A sequence was filled from another store.
    WrongStore {
        /// The sequence.
        sequence: usize,
        /// The store that holds its blocks.
        need: StoreId,
        /// The store that was handed in.
        have: StoreId,
    },
    /// A position that the call looks at was given back, because the sequence's window had passed
    /// it. Set a window, and at most the one that the sequence keeps.
    PositionFreed {
        /// The sequence.
        sequence: usize,
        /// The first such position.
        position: usize,
        /// The oldest position that was kept behind those that are gone.
        oldest: usize,
    },
    /// A query row stands for one of the sequence's last positions, and there are too few.
    TooManyQueryRows {
        /// The sequence.
        sequence: usize,
        /// Query rows it was planned with, or of its tree alone where no other option speaks of positions.
        rows: usize,
        /// Positions it has.
        len: usize,
    },
    /// The plan counts on a shared prefix, and the block tables differ in it.
    NotShared {
        /// The sequence.
        sequence: usize,
        /// The one that it should share blocks with.
        with: usize,
        /// The first block that is not the same in both, or that a window has passed.
        block: usize,
    },
    /// The query has the wrong length.
    QueryLength {
        /// Numbers needed.
        need: usize,
        /// Numbers handed in.
        have: usize,
    },
    /// What is refused to a single sequence, too: an option, or the length of an output or of the
    /// scratch.
    Attention(AttentionError),
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BatchError::TooLarge { what } => {
                write!(f, "{what}: there are more numbers than memory can hold")
            }
            BatchError::NoSequence { sequence, sequences } => write!(
                f,
                "a shared prefix names sequence {sequence} of a batch that has {sequences}"
            ),
            BatchError::SharedTwice { sequence } => {
                write!(f, "shared prefixes name sequence {sequence} twice")
            }
            BatchError::SharedTooLong { sequence, positions, len } => write!(
                f,
                "sequence {sequence} has {len} positions and cannot share {positions} of them"
            ),
            BatchError::Shape { need, have } => {
                let KvDims { block_size, n_kv_heads, k_width, v_width } = need.dims();
                write!(f, "the plan is for blocks of {block_size} and {n_kv_heads} KV heads of ")?;
                let KvDims { block_size: size, n_kv_heads: heads, k_width: k, v_width: v } =
                    have.dims();
                write!(
                    f,
                    "{k_width} and {v_width}, the store has blocks of {size} and {heads} of "
                )?;
                write!(f, "{k} and {v}")
            }
            BatchError::Sequences { need, have } => {
                write!(f, "the plan is for {need} sequences, got {have}")
            }
            BatchError::Length { sequence, need, have } => {
                write!(f, "the plan is for {need} positions of sequence {sequence}, it has {have}")
            }
            BatchError::WrongStore { sequence, need, have } => {
                write!(f, "sequence {sequence} lives in store {need}, not in store {have}")
            }
            BatchError::PositionFreed { sequence, position, oldest } => write!(
                f,
                "position {position} of sequence {sequence} is looked at and was given back, the \
                 oldest one kept is {oldest}"
            ),
            BatchError::TooManyQueryRows { sequence, rows, len } => write!(
                f,
                "sequence {sequence} has {rows} query rows, and only {len} positions are cached"
            ),
            BatchError::NotShared { sequence, with, block } => write!(
                f,
                "sequences {with} and {sequence} do not share entry {block} of their block tables"
            ),
            BatchError::QueryLength { need, have } => {
                write!(f, "the query needs {need} numbers, got {have}")
            }
            BatchError::Attention(inner) => inner.fmt(f),
        }
    }
}

impl Error for BatchError {}

impl From<AttentionError> for BatchError {
    fn from(inner: AttentionError) -> Self {
        BatchError::Attention(inner)
    }
}
