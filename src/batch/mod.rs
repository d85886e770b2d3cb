//! A batch over one layer: what it is cut into, who does the work, and on which threads.
//!
//! Two questions that know nothing of each other. *What* is done is a [`BatchPlan`]: plain data,
//! made from a shape and from lengths, the same for every layer of a step and for any number of
//! threads. *Who* does it is an [`Executor`]: it takes an array apart and hands the pieces to
//! whoever should fill them, and knows nothing of what is computed. Nobody owns threads that were
//! not asked for: `ThreadPool` is a value that the caller makes and drops.
//!
//! # Examples
//!
//! A prompt that comes in and two answers to another one, over one layer:
//!
//! ```
//! use paged_kv::GqaShape;
//! use paged_kv::attention::AttentionOptions;
//! use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows, shared_prefixes};
//! use paged_kv::cache::{PagedKvCache, PagedKvStore};
//!
//! let mut store = PagedKvStore::new(64, 16, 1, 2);
//! let (mut prompt, mut answer) = (PagedKvCache::new(), PagedKvCache::new());
//! prompt.append(&mut store, &[0.5; 3 * 2], &[1.0; 3 * 2], 3)?;
//! answer.append(&mut store, &[0.5; 100 * 2], &[2.0; 100 * 2], 100)?;
//! let mut other = answer.fork(&mut store)?;
//! other.push(&mut store, &[0.5; 2], &[2.0; 2])?;
//!
//! // Once a step: what is attended, by lengths and rows, and what is shared.
//! let sequences = [&prompt, &answer, &other];
//! let rows = [(3, 3), (100, 1), (101, 1)].map(|(len, rows)| SequenceRows { len, rows });
//! let shape = GqaShape::new(store.shape(), 1)?;
//! let plan = BatchPlan::with_shared(shape, &rows, &shared_prefixes(64, &sequences))?;
//!
//! // For each layer: its rows of queries, one sequence after the other.
//! let (mut out, mut scratch) = (vec![0.0; plan.out_len()], vec![0.0; plan.scratch_len()]);
//! let layer = BatchLayer { store: &store, sequences: &sequences, q: &[0.5; 5 * 2] };
//! plan.attend(&layer, &AttentionOptions::new(), &mut out, &mut scratch, &Inline)?;
//! assert_eq!(out, [[1.0; 2], [1.0; 2], [1.0; 2], [2.0; 2], [2.0; 2]].concat());
//! # prompt.release(&mut store)?;
//! # answer.release(&mut store)?;
//! # other.release(&mut store)?;
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
//! # The plan
//!
//! A sequence with few query rows (decode, the verification of a draft) is cut along its positions,
//! 512 at a time, and along KV heads; one with many (a chunk of a prompt) along its rows and KV
//! heads. Each such *item* leaves one state for each of its rows: maximum, denominator and output
//! so far.
//!
//! ```text
//! phase 1  items, heavy ones first, each in its own piece of the scratch
//!            sequence 0, 1100 positions, 1 row     [0..512) [512..1024) [1024..1100)   x heads
//!            sequence 1, 700 positions, 50 rows    rows 0..24, 24..48, 48..50          x heads
//! phase 2  rows of the output, each in its own piece: the states of a row, in the order of its
//!          positions, become one, and that one is divided and written
//! phase 3  the log-sum-exp in the same way, if it was asked for
//! ```
//!
//! Why two phases. Items of one row would write to the same place, and who is first would depend on
//! the threads. So they write states, and a row's states are merged by one thread, in the order in
//! which a call of that sequence alone merges them: after each 512 positions, counted from 0. That
//! is why the bits are those of each sequence alone, whoever works, in whatever order and with
//! whatever beside it.
//!
//! How it is cut depends on lengths and shapes, never on threads: a plan that was right for two
//! threads has enough parts for sixty. What a window or a range of positions hides is not known to
//! it; items over hidden positions are done at once, and only the order by weight suffers. A batch
//! of less than some 20 us is done by its caller, whoever the executor is
//! ([`BatchPlan::runs_inline`]).
//!
//! # Memory
//!
//! An item needs memory to work in as well, some 20 to 60 thousand numbers, and more of it than
//! its states take in decode. So light items are packed into chunks of the scratch, one behind the
//! other: each item works behind the states that those before it have left. A chunk is closed when
//! it is worth 10 us, or a 256th of all work where that is more, or when its items would not fit
//! into twice what the largest item needs:
//!
//! ```text
//! scratch_len   chunks x (numbers of the fullest chunk)
//!               <= 257 x 2 L + 2 S + 2 L
//! L             what the largest item needs
//!               rows x (2 x (v_width + 2) + 1.5 x k_width + 2) + 64 x (k_width + v_width) + ~ 3000
//! S             states: query rows x heads x (v_width + 2), once for every 512 positions of a
//!               sequence with few rows, once for one with many
//! ```
//!
//! For 8 sequences of 4096 positions (32 query heads over 8 of width 128) that is 22 MiB, of which
//! stored `f32` touch a quarter, and one layer's keys and values are 256 MiB. One scratch serves
//! all layers.
//!
//! # When sharing pays
//!
//! Sequences that hold their first positions in the same blocks ([`SharedPrefix`]) can be attended
//! together over those: pages are read once, and the rows of all sequences fill the register tile.
//! The plan does so where it is never slower, and leaves the rest out:
//!
//! - among sequences with few query rows, and the same number of them: a prompt's rows fill the
//!   tile by themselves;
//! - over whole splits of 512 positions, always;
//! - in the split in which the prefix ends, over its whole tiles of 64, where the positions that
//!   are not read again (the joint ones, for each sequence but one) are at least as many as those
//!   that the sequences have of their own in that split;
//! - in crowds of at most 96 rows for each KV head, which keeps their states in the cache.
//!
//! # Executors
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

mod error;
mod executor;
mod plan;
#[cfg(feature = "std")]
mod pool;
mod run;
mod shared;
#[cfg(all(test, not(loom)))]
mod tests;

pub use error::BatchError;
#[cfg(feature = "rayon")]
pub use executor::Rayon;
pub use executor::{Executor, Inline};
pub use plan::{BatchPlan, SequenceRows};
#[cfg(feature = "std")]
pub use pool::ThreadPool;
pub use run::BatchLayer;
pub use shared::{SharedPrefix, shared_prefixes};
