//! Paged KV-cache storage and SIMD paged grouped-query attention for CPUs.
#![no_std]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod attention_stub {}
mod element;
mod error;
mod id;
mod kernel;
mod shape;
mod simd;
mod storage;

pub use error::*;
pub use id::*;
pub use shape::*;
