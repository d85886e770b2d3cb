//! Why a sequence was not saved or not restored.

use core::convert::Infallible;
use core::error::Error;
use core::fmt;

use crate::error::{PagedKvError, ShapeError};
use crate::shape::KvDims;

/// Why a sequence was not saved, or not restored. What was to be restored into is as it was.
///
/// `X` is what the [`Sink`](super::Sink) or [`Source`](super::Source) fails with: nothing where it is
/// memory, `std::io::Error` where it is a file.
///
/// # Examples
///
/// ```
/// use paged_kv::wire::{Saved, WireError};
///
/// assert_eq!(Saved::open(&[][..]).unwrap_err(), WireError::Truncated { need: 56, have: 0 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError<X = Infallible> {
    /// The sink or the source failed.
    Stream(X),
    /// The bytes end too early.
    Truncated {
        /// Bytes from the beginning to the end of the part that is not whole.
        need: u64,
        /// Bytes there are.
        have: u64,
    },
    /// This is no saved sequence.
    Magic {
        /// What it begins with.
        have: [u8; 8],
    },
    /// It was written by another version of the format.
    Version {
        /// The version that is read here.
        need: u16,
        /// The one found.
        have: u16,
    },
    /// Its pages are laid out in another way.
    Layout {
        /// The layout that is read here.
        need: u16,
        /// The one found.
        have: u16,
    },
    /// A part is not what was written.
    Checksum {
        /// The part.
        part: Part,
        /// What its bytes add up to.
        need: u32,
        /// What it says.
        have: u32,
    },
    /// A field that follows from the others is something else.
    Field {
        /// The field.
        what: &'static str,
        /// What it has to be, or the most that it can be.
        need: u64,
        /// What it is.
        have: u64,
    },
    /// A kind of layer or a stored type that this version of the crate does not know.
    Unknown {
        /// The field.
        what: &'static str,
        /// What it is.
        have: u64,
    },
    /// A layer's shape cannot exist on this machine.
    Shape {
        /// The layer.
        layer: usize,
        /// What is wrong with it.
        error: ShapeError,
    },
    /// Another number of token ids than of positions.
    Tokens {
        /// Positions.
        need: usize,
        /// Token ids.
        have: usize,
    },
    /// Another number of layers.
    Layers {
        /// Layers that are to be restored into.
        need: usize,
        /// Layers that were saved.
        have: usize,
    },
    /// A layer reads the rows of another layer than it did.
    Owner {
        /// The layer.
        layer: usize,
        /// The layer whose rows it reads, where it is to be restored: itself, where it has its own.
        need: usize,
        /// The layer whose rows it read.
        have: usize,
    },
    /// A layer's stored type is another.
    Element {
        /// The layer.
        layer: usize,
        /// The type of the store.
        need: &'static str,
        /// The type that was saved.
        have: &'static str,
    },
    /// A layer's heads or widths are others. Block sizes may differ.
    Dims {
        /// The layer.
        layer: usize,
        /// The sizes of the store.
        need: KvDims,
        /// The sizes that were saved.
        have: KvDims,
    },
    /// The layer's window had passed positions that are to be kept.
    PositionFreed {
        /// The layer.
        layer: usize,
        /// The first position that is needed and was not saved.
        position: usize,
        /// The oldest one that was saved behind it.
        oldest: usize,
    },
    /// The store or the sequence: too few free blocks, a sequence that is not empty, another store.
    Kv(PagedKvError),
    /// The allocator refused.
    OutOfMemory {
        /// How many bytes it was asked for.
        bytes: usize,
    },
}

/// A part of a saved sequence with a checksum of its own.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::wire::{Label, Part, Saved, WireError};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[1.0; 2], &[2.0; 2])?;
/// let mut bytes = Vec::new();
/// cache.save(&store, &Label::new(), &mut bytes)?;
/// *bytes.last_mut().expect("a checksum") ^= 1; // damaged on its way
/// let refused = PagedKvCache::new().restore(&mut store, Saved::open(&bytes[..])?);
/// let Err(WireError::Checksum { part, .. }) = refused else { unreachable!() };
/// assert_eq!(part, Part::Page { layer: 0, index: 0 });
/// assert_eq!(store.free_block_count(), 3); // nothing was kept of it
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All that is said before the first page.
    Header,
    /// A page.
    Page {
        /// Its layer.
        layer: usize,
        /// Its place in the sequence, in blocks of the size it was saved with.
        index: usize,
    },
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Header => f.write_str("the header"),
            Part::Page { layer, index } => write!(f, "page {index} of layer {layer}"),
        }
    }
}

impl<X: fmt::Display> fmt::Display for WireError<X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Stream(inner) => inner.fmt(f),
            WireError::Truncated { need, have } => {
                write!(f, "the saved sequence ends after {have} bytes, {need} are needed")
            }
            WireError::Magic { have } => {
                write!(f, "this is no saved sequence, it begins with {have:02x?}")
            }
            WireError::Version { need, have } => {
                write!(f, "saved in version {have} of the format, version {need} is read here")
            }
            WireError::Layout { need, have } => {
                write!(f, "saved in page layout {have}, layout {need} is read here")
            }
            WireError::Checksum { part, need, have } => {
                write!(f, "{part} is damaged: its checksum is {need:08x}, it says {have:08x}")
            }
            WireError::Field { what, need, have } => {
                write!(f, "the field `{what}` should be {need} and is {have}")
            }
            WireError::Unknown { what, have } => write!(f, "unknown {what}: {have}"),
            WireError::Shape { layer, error } => write!(f, "layer {layer}: {error}"),
            WireError::Tokens { need, have } => {
                write!(f, "{have} token ids for {need} positions")
            }
            WireError::Layers { need, have } => {
                write!(f, "{have} layers were saved, there are {need}")
            }
            WireError::Owner { layer, need, have } => {
                write!(f, "layer {layer} read the rows of layer {have}, it reads those of {need}")
            }
            WireError::Element { layer, need, have } => {
                write!(f, "layer {layer} was saved as {have}, its store holds {need}")
            }
            WireError::Dims { layer, need, have } => {
                let of = |dims: &KvDims| (dims.n_kv_heads, dims.k_width, dims.v_width);
                let ((heads, k, v), (n_heads, n_k, n_v)) = (of(have), of(need));
                write!(f, "layer {layer} was saved with {heads} KV heads of {k} and {v}, ")?;
                write!(f, "its store has {n_heads} of {n_k} and {n_v}")
            }
            WireError::PositionFreed { layer, position, oldest } => {
                write!(f, "position {position} of layer {layer} was not saved, ")?;
                write!(f, "the oldest one behind it is {oldest}")
            }
            WireError::Kv(inner) => inner.fmt(f),
            WireError::OutOfMemory { bytes } => write!(f, "{bytes} bytes could not be allocated"),
        }
    }
}

impl<X: Error> Error for WireError<X> {}

impl<X> From<PagedKvError> for WireError<X> {
    fn from(inner: PagedKvError) -> Self {
        WireError::Kv(inner)
    }
}
