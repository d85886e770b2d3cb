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
//! Two chunks on two threads (`cargo bench --features rayon --bench dispatch`; the best of several
//! runs of it on two cores of a Zen 4 that others kept busy all the while):
//!
//! | | chunks are empty | both have begun |
//! |---|---|---|
//! | `Inline` | 5 ns | |
//! | `ThreadPool`, its worker spinning | 16 ns | 0.17 us |
//! | `ThreadPool`, its worker asleep | 2.2 us | 22 us |
//! | `Rayon`, from inside its pool | 70 ns | 0.5 us |
//! | `Rayon`, from outside, awake | 10 us | 16 us |
//! | `Rayon`, from outside, asleep | 17 us | 29 us |
//!
//! The first column is what a run costs a caller whom nobody helps in time, the second how long it
//! takes until a second thread really is at work. Where the system puts both threads on one core,
//! there is no help at all, and the second column is the length of its turns; pin the workers
//! where that matters.

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
