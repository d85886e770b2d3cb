//! Where the numbers live.
//!
//! Two kinds of storage with one page layout (`element::tile` draws it), so that attention has
//! one way to read both:
//!
//! - [`paged`]: one memory of equal blocks that many sequences share. A sequence ([`sequence`])
//!   is a table of block ids and a length; which blocks are free, and how many hold each, is kept
//!   by [`blocks`], which knows ids only.
//! - [`contiguous`]: a cache that owns its pages alone, optionally bounded by a [`pool`] that
//!   counts blocks and holds no memory.
//!
//! ```text
//! PagedKvCache      table [ b5, b0, b7 ], len 37
//!                           |   |   |
//! PagedKvStore      memory | b0 | b1 | ... | b5 | b6 | b7 | ...     blocks: words, free stack
//! ```
//!
//! Both stand in [`memory`]: lines of 64 bytes, allocated lazily or brought by the caller, and the
//! one file of this room with `unsafe` in it.
//!
//! A sequence may keep a window of its past. Its table then has a hole: the blocks that the window has
//! passed are gone from it, and positions keep their numbers.
//!
//! ```text
//! positions   0 .. 63 | 64 ........ 383 | 384 ........ 499      first tile, gone, window
//! table     [ b5 .. b8                    b1 .. b9 ]            hole at 4, of 20 blocks
//! ```
//!
//! [`any`] is a store whose stored type is known when the program runs, for layers that differ in it.
//! [`view`] is the one currency handed out: pages in order, and how many positions count; [`page`] gives
//! and takes blocks as bytes, for sequences that are saved. The room refuses to know what attention does with them, who waits for whom (`share`), and what
//! tokens the rows stand for (`prefix`).

#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
pub(crate) mod any;
pub(crate) mod blocks;
pub(crate) mod contiguous;
pub(crate) mod memory;
pub(crate) mod page;
pub(crate) mod paged;
#[cfg(target_has_atomic = "ptr")]
pub(crate) mod pool;
pub(crate) mod report;
pub(crate) mod rows;
pub(crate) mod sequence;
pub(crate) mod view;

/// Positions of a sequence at most: so that sums and differences of two places in it, signed ones too, are
/// numbers.
pub(crate) const MOST_POSITIONS: usize = usize::MAX / 4;

/// How long a sequence of `len` positions is with `n` more, where that can be.
pub(crate) fn grown(len: usize, n: usize) -> Option<usize> {
    len.checked_add(n).filter(|&end| end <= MOST_POSITIONS)
}

/// Whether all stores and caches are in poison mode from the beginning: in a build of the test kit with
/// `PAGED_KV_POISON` in its environment, which `.ci/poison` makes.
pub(crate) const POISON: bool =
    cfg!(feature = "internal") && option_env!("PAGED_KV_POISON").is_some();
