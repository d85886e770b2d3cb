//! Paged KV-cache storage and SIMD paged grouped-query attention for CPUs.
#![no_std]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod attention;
mod element;
mod error;
mod id;
#[cfg(feature = "internal")]
#[doc(hidden)]
pub mod internal;
mod kernel;
mod shape;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
mod share;
mod simd;
mod storage;

/// KV memory: blocks in a shared store, caches of one sequence, and what bounds them.
pub mod cache {
    pub use crate::error::{KvPoolExhausted, PagedStoreExhausted};
    pub use crate::id::PageGroup;
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::guard::{RwLockReadGuard, RwLockWriteGuard};
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::sequence::SharedSequence;
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::shared::SharedPagedKv;
    pub use crate::storage::contiguous::KvCache;
    pub use crate::storage::paged::PagedKvStore;
    #[cfg(target_has_atomic = "ptr")]
    pub use crate::storage::pool::KvBlockPool;
    pub use crate::storage::sequence::PagedKvCache;
}

pub use element::Element;
pub use error::*;
pub use id::*;
pub use shape::*;
pub use simd::{Level, Levels};
