//! Paged KV-cache storage and SIMD paged grouped-query attention for CPUs.
#![no_std]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod attention;
mod element;
mod error;
mod id;
mod kernel;
mod shape;
mod simd;
mod storage;

pub use element::Element;
pub use error::*;
pub use id::*;
pub use shape::*;
pub use simd::{Level, Levels};

/// caches
pub mod cache {
    pub use crate::storage::contiguous::KvCache;
    pub use crate::storage::paged::PagedKvStore;
    pub use crate::storage::sequence::PagedKvCache;
}
