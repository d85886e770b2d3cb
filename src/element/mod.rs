//! What a stored number is, and where it stands in a page.
//!
//! This room knows two things. [`tile`] draws the page: which of a block's bytes belong to which
//! position, KV head and column. The [`Element`] trait says what one stored number is; there is
//! one file for each type ([`float`] holds `f32`). The room refuses to know about block tables,
//! free lists and locks (`storage`), and about softmax (`kernel`).
//!
//! # Adding a type
//!
//! One file here: the stored form, its conversion to and from `f32`, and the entry methods that
//! compile the kernels for it. The entry methods are not generic on purpose: what is generic is
//! compiled in the crate that uses it, with *that* crate's optimisation level, and an inference
//! engine's debug build would then run attention a hundred times slower. They are the one place
//! where this room looks at a room behind it (`attention::Job`).

pub(crate) mod float;
pub(crate) mod tile;

use crate::attention::Job;
use crate::simd::{Level, Simd};
use tile::Layout;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
}

/// A type that keys and values can be stored as. Sealed: the implementors are this crate's.
pub trait Element: sealed::Sealed + Copy + core::fmt::Debug + Send + Sync + 'static {
    /// One number as it lies in memory.
    #[doc(hidden)]
    type Stored: bytemuck::Pod + PartialEq + core::fmt::Debug + Send + Sync;

    /// The name used in reports: `f32`.
    const NAME: &'static str;

    /// What freed and unwritten memory is filled with when a test asks for poison: never a number.
    #[doc(hidden)]
    const POISON: Self::Stored;

    /// Stores a number.
    #[doc(hidden)]
    fn encode(number: f32) -> Self::Stored;

    /// Reads a stored number.
    #[doc(hidden)]
    fn decode(stored: Self::Stored) -> f32;

    /// Reads up to sixteen neighbouring numbers as a vector, zeros behind them.
    #[doc(hidden)]
    fn load<S: Simd>(s: S, cells: &[Self::Stored]) -> S::F32;

    /// Writes rows `[n][n_kv_heads][k_width]` and `[n][n_kv_heads][v_width]` to the positions
    /// `first ..` of a block.
    #[doc(hidden)]
    fn write(layout: &Layout<Self>, block: &mut [Self::Stored], first: usize, k: &[f32], v: &[f32]);

    /// Runs attention over pages of this type at `level`.
    #[doc(hidden)]
    fn attend(level: Level, job: &mut Job<'_, Self>);
}
