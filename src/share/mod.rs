//! Who may touch these bytes when: one store a layer, shared by many requests.
//!
//! A store *is* the memory, so sharing it needs an answer that a pool, which only counts, never
//! needed. Attention takes `&PagedKvStore` and only a push takes `&mut`: many readers and one
//! short writer, which is a readers-writer lock, and one for each layer, so that two requests
//! meet only where both write the same layer at the same instant.
//!
//! # Locks, and their order
//!
//! ```text
//! 1  the layers' RwLocks, ascending     who may touch the rows
//! 2  the layers' gates, ascending       who may take blocks
//! 3  leaves                             the group table; free lists and counts (atomics)
//! ```
//!
//! Every RwLock comes before the first gate, and nothing is waited for while a leaf is held. What
//! each call takes stands in the [`manual`](crate::manual), for those who call it.
//!
//! Why gates. Taking a block must be something that one party does at a time; `write_all`
//! promises that nobody takes blocks in between; and admitting a request (`acquire_group`) must
//! not wait for the readers of a long prompt. An RwLock alone gives the first two and fails the
//! third: the gate is the part of it that is about *blocks*, and readers never come near it. Why
//! all RwLocks first: a `write_all` that held gate 0 while it waited for a reader of layer 1
//! would make every `acquire_group` wait for that reader too.
//!
//! What it costs: `acquire_group` holds the gates below while it waits at one whose layer is being
//! written, so a writer of a lower layer may wait for a write of a higher one, never longer than
//! that write. Attention is not held up by it: readers pass gates by.
//!
//! Why a reservation takes gates and no RwLock. Room is blocks, and blocks are the gates' affair:
//! a step that crosses a block boundary does not wait for the reader of a long prompt. Rows are
//! touched only where a fork's block is copied, and that is done after the blocks are held, one
//! layer at a time, so that no layer is kept from others while this thread waits for the next.
//! All layers or none is decided before, under the gates; a copy cannot fail.
//!
//! Why leaves. A sequence ends where its request ends, under another layer's guard or in the
//! middle of unwinding. Giving back must not wait for anything that its own thread may hold.
//!
//! # Checked in every order
//!
//! `loom_tests.rs` (and below it) goes through every order in which two or three threads can step over two layers,
//! with a bound on needless interruptions: a push against attention, and against those who take
//! blocks; `write_all` against `acquire_group`, with a reader who admits a request; one group
//! retained and released by two; sequences that end while others are admitted, make room or wait;
//! forks that are written at once; a group that is retained while its sequence grows; a request that
//! fails under a write guard, against each of these; the bell. `storage` has the free list alone,
//! `prefix` a lookup while the writer ends and the cache is emptied. `.ci/loom` runs them.
//!
//! What they cannot show: that the rows are touched under the lock alone (the compiler does), poison
//! ([`lock`] says how it is modelled), the spinning locks, and an order that needs more interruptions
//! than the bound allows. ThreadSanitizer looks for the first (`.ci/tsan`); for the rest `tests/stress`
//! lets eight threads do all of it at once, for as long as one likes, and compares every answer.
//!
//! # The files
//!
//! [`lock`] is the one file that knows whose locks these are, and [`wait`] has the bell at which
//! those sleep who wait for blocks; [`groups`] keeps the handles; [`seat`] is a layer's store as it is
//! known without its lock; [`shared`] is where the order above is carried out, and nowhere else; [`spec`]
//! says what the layers are, where they differ. On top of it stand [`room`] (many blocks, all or none),
//! [`sequence`] (a request over all layers), [`saved`] (a request as bytes, and back) and [`report`] (recounts, numbers, pictures).

pub(crate) mod groups;
pub(crate) mod guard;
pub(crate) mod lock;
pub(crate) mod report;
pub(crate) mod room;
mod saved;
mod seat;
pub(crate) mod sequence;
pub(crate) mod shared;
pub(crate) mod spec;
mod wait;

#[cfg(all(test, loom))]
mod loom_tests;
