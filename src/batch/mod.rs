//! Who does the work, and on which threads.
//!
//! Attention falls into chunks of numbers that nobody else writes: a KV head, a stretch of
//! positions, a tile of query rows, each with its own piece of one array. This room takes such an
//! array apart and hands the pieces to whoever should fill them. It knows nothing of what is
//! computed, and it owns no threads that nobody asked for: `ThreadPool` is a value that the caller makes and drops.
//!
//! ```text
//! data     | chunk 0 | chunk 1 | chunk 2 | chunk 3 | 4 |     the last may be shorter
//! caller     work(0)             work(2)              work(4)
//! worker               work(1)             work(3)
//! ```
//!
//! Why an array of numbers and not a list of jobs. A piece is `&mut`, and two pieces cannot
//! overlap, so an executor needs no `unsafe` to be right, neither rayon's nor a caller's own; and
//! one that forgets a chunk or hands one out twice gives wrong numbers, which a test sees, and
//! never a race.
//!
//! Why in ascending order. A plan puts its heavy items first, so that what is left at the end is
//! small and the threads stop together. An executor that starts in the middle undoes that.
//! Results never depend on it.
//!
//! # What a run costs
//!
//! Two chunks on two threads, nothing in them; the best of many rounds on two shared cores of a
//! Zen 4 (`cargo bench --features rayon --bench dispatch`):
//!
//! | | nothing to do | both threads have begun |
//! |---|---|---|
//! | `Inline` | TBD | |
//! | `ThreadPool`, its worker spinning | TBD | TBD |
//! | `ThreadPool`, its worker parked | TBD | TBD |
//! | `Rayon`, called from outside, awake | TBD | TBD |
//!
//! The first column is what the caller loses if nobody comes to help, the second what it takes
//! until a second thread really is at work.

mod executor;
#[cfg(feature = "std")]
mod pool;
#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(feature = "rayon")]
pub use executor::Rayon;
pub use executor::{Executor, Inline};
#[cfg(feature = "std")]
pub use pool::ThreadPool;
