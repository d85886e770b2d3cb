//! What goes wrong around the crate, at every point where it can: no block is free, no memory is to
//! be had, what the caller handed in panics. Afterwards all is as it was before.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

mod heap;
mod holders;
mod panics;
mod refused;
mod world;
