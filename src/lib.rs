//! Paged KV-cache storage and SIMD paged grouped-query attention for CPUs.
//!
//! A transformer that decodes keeps the key and value rows of every past position, per layer. This
//! crate stores them in fixed-size *blocks* of one memory per layer, finds a sequence's blocks
//! through its *block table*, and computes attention straight through that table.
//!
//! ```
//! use paged_kv::attention::causal_gqa_attention_paged;
//! use paged_kv::cache::{PagedKvCache, PagedKvStore};
//!
//! let mut store = PagedKvStore::new(64, 256, 8, 128); // block size, blocks, KV heads, width
//! let mut sequence = PagedKvCache::new();
//! sequence.push(&mut store, &[0.5; 8 * 128], &[2.0; 8 * 128])?;
//! let out = causal_gqa_attention_paged(&[0.1; 32 * 128], &store, &sequence, 32)?;
//! assert_eq!(out, [2.0; 32 * 128]);
//! sequence.release(&mut store)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which type do I want?
//!
//! - [`KvCache`](cache::KvCache): one sequence with memory of its own, which grows page by page.
//!   [`with_pool`](cache::KvCache::with_pool) bounds many of them by one
//!   [`KvBlockPool`](cache::KvBlockPool), whose free count is the signal for admission control.
//! - [`PagedKvStore`](cache::PagedKvStore) and [`PagedKvCache`](cache::PagedKvCache): one layer's
//!   memory and the sequences in it. Sequences fork without copying, roll back, and adopt blocks
//!   that others filled; a block that others hold is copied before it is written.
//!   [`from_memory`](cache::PagedKvStore::from_memory) opens a store in a buffer of the caller's.
//! - [`SharedPagedKv`](cache::SharedPagedKv): a store per layer behind a lock per layer, for
//!   requests on many threads. A [`PageGroup`] is one block in every layer with
//!   a count of holders: the unit in which prefixes are shared. A
//!   [`PagedSequence`](cache::PagedSequence) is one request over all layers: room in all of them or
//!   in none, steps that are committed or abandoned, forks that copy nothing; dropping it gives
//!   its blocks back. Features `std` or `spin`.
//! - [`PrefixCache`](prefix::PrefixCache): which page groups hold the beginning of a prompt already,
//!   found by its tokens, held by a lease while they are used, and evicted when the pool runs short.
//! - [`wire`]: a sequence saved as bytes, checksummed, and restored elsewhere with the same bits.
//! - To attend: [`causal_gqa_attention`](attention::causal_gqa_attention) and
//!   [`causal_gqa_attention_paged`](attention::causal_gqa_attention_paged), and their `_into`
//!   twins with [`AttentionOptions`](attention::AttentionOptions), which allocate nothing. Row `i`
//!   of `n` query rows stands for position `seq_len - n + i`. Keys are stored as they are handed
//!   in: rotary or other position encodings are applied before.
//!
//! - To attend many sequences at once: a [`BatchPlan`](batch::BatchPlan), made once a step from
//!   lengths alone and used for every layer, and an [`Executor`](batch::Executor), who has the
//!   threads. Decode, draft verification and chunks of prompts go together; prefixes held in
//!   the same blocks are read once.
//!
//! A cache (`KvCache`, `PagedKvCache`) is one sequence in one layer.
//!
//! Keys and values are stored as `f32` unless the type says otherwise: `PagedKvStore<E>`,
//! `KvCache<E>` and `SharedPagedKv<E>` take [`f16`](struct@f16), [`bf16`], [`Int8`] and [`Int4`] as
//! well, opened with `with_shape`. What they hold and what that costs is told at [`Element`], what it
//! does to results in [`manual::accuracy`]. Rows go in and come back as `f32`.
//!
//! The [`manual`] walks through one request's life, with an engine in small, and says which call takes
//! which lock.
//!
//! # The page
//!
//! ```text
//! store      | block 0 | block 1 | block 2 | ...
//! block      | tile of KV head 0 | tile of KV head 1 | ...   each on a 64-byte line
//! tile       | keys, transposed: panels of 64 positions | values: panels of 64 columns |
//! sequence   block table [2, 0, 5], length 150: position 130 is row 2 of block 5 (at 64 a block)
//! ```
//!
//! Keys are transposed so that a vector register holds sixteen positions and a dot product is one
//! chain of multiply-adds; a tile's panels are as wide as the kernel's register tile, so that
//! attention reads every line in address order. Nothing is padded inside a tile.
//!
//! # The same bits
//!
//! For one level, the result of a query row depends on the query, the keys and values it sees and
//! the options, and on nothing else: not on the block table, the block size, contiguous or paged
//! storage, how many rows are asked at once, what else is in the batch, or how many threads work.
//! Levels form two classes, with fused multiply-add and without ([`Level::is_fused`]), and inside
//! a class all give the same bits; those that round queries ([`Level::avx512_bf16`],
//! [`Level::avx512_vnni`]) are in no class, and only had on request. Payloads of NaNs are nobody's
//! promise.
//!
//! # Levels
//!
//! The fastest [`Level`] of the processor is found when the program runs, without std too. Another
//! one is handed in with [`AttentionOptions::level`](attention::AttentionOptions::level).
//!
//! ```
//! use paged_kv::Level;
//!
//! // What a command line says, or the fastest one.
//! let asked = Level::from_name("portable").unwrap_or_else(Level::detect);
//! assert_eq!((asked, asked.name()), (Level::PORTABLE, "portable"));
//!
//! // Those that give the same bits as it does.
//! let mut alike = Level::available().filter(|level| level.is_fused() == asked.is_fused());
//! assert!(alike.any(|level| level == asked));
//!
//! // Those that round queries are asked for by name, and are not there on every processor.
//! for level in [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten() {
//!     assert!(Level::available().all(|exact| exact != level));
//! }
//! ```
//!
//! # The rooms
//!
//! ```text
//! error, id, shape    facts, names and sizes, checked once
//! simd                sixteen lanes at a time, and which processor has what: the room of unsafe
//! element             what a stored number is, and where it stands in a page
//! kernel              scores, softmax, values, states: arithmetic only
//! storage             blocks, stores, sequences, contiguous caches
//! wire                sequences as bytes, to other machines and slower tiers
//! attention           the doors: pages and arithmetic meet
//! batch               many sequences at once: what is done, and who does it on which threads
//! share               locks, page groups, the shared layer
//! prefix              prompts that begin alike: token ids and page groups, never numbers
//! ```
//!
//! A room uses those above it; `storage` and `kernel` do not know each other, and `element` looks
//! ahead once, for the entry that attention is called through. `cut` beside them takes parts of
//! slices and fails in one cold place; `atomic` has the atomics, or a model checker's.
#![no_std]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod atomic;
pub mod attention;
pub mod batch;
mod cut;
mod element;
mod error;
mod id;
#[cfg(feature = "internal")]
#[doc(hidden)]
pub mod internal;
mod kernel;
pub mod manual;
pub mod prefix;
mod shape;
#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
mod share;
mod simd;
mod storage;
pub mod wire;

/// KV memory: blocks in a shared store, caches of one sequence, and what bounds them.
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 8, 1, 2); // blocks of 16, 8 of them, 1 KV head of width 2
/// let mut prompt = PagedKvCache::new();
/// prompt.append(&mut store, &[0.5; 40], &[0.5; 40], 20)?;
/// let mut answer = prompt.fork(&mut store)?; // copies nothing
/// answer.push(&mut store, &[1.0; 2], &[1.0; 2])?; // copies the block that is written
/// assert_eq!(store.free_block_count(), 8 - 3);
/// prompt.release(&mut store)?;
/// answer.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
pub mod cache {
    pub use crate::error::{KvPoolExhausted, PagedStoreExhausted};
    pub use crate::id::PageGroup;
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::guard::{RwLockReadGuard, RwLockWriteGuard};
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::report::{Holder, PoolMap, PoolStats, SequenceStats};
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::sequence::PagedSequence;
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::shared::SharedPagedKv;
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::share::spec::{LayerElement, LayerError, LayerSpec, Mixed};
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub use crate::storage::any::AnyPagedKvStore;
    pub use crate::storage::contiguous::KvCache;
    pub use crate::storage::memory::{RefusedMemory, StoreMemory};
    pub use crate::storage::paged::PagedKvStore;
    #[cfg(target_has_atomic = "ptr")]
    pub use crate::storage::pool::KvBlockPool;
    pub use crate::storage::report::{StoreMap, StoreStats};
    pub use crate::storage::sequence::PagedKvCache;
    pub use crate::storage::sequence::window::KvWindow;
}

pub use element::{Element, Int4, Int8};
pub use error::{
    AttentionError, GroupError, InvariantReport, KvCacheError, KvPoolExhausted, Miscount,
    PagedKvError, PagedStoreExhausted, ShapeError, Side,
};
/// The half-width floats that can be stored, as the crate `half` defines them.
pub use half::{bf16, f16};
pub use id::{BlockId, PageGroup, StoreId};
pub use shape::{GqaShape, KvDims, KvShape};
pub use simd::{Level, Levels};

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
