//! One request's life, for whoever writes an engine: what is called when, what waits for what, and
//! what allocates.
//!
//! There is nothing here but text and an example that runs. What each stored type and level loses,
//! in figures, is told in [`accuracy`].
//!
//! # The pieces
//!
//! ```text
//! PrefixCache     prompts that begin alike              one, behind the engine's lock
//!     | holds page groups of
//! SharedPagedKv   a store and a lock for each layer     one, shared by all threads
//!     ^ writes into, attends over
//! PagedSequence   a block table for each layer          one for each request
//!     | its tables are read by
//! BatchPlan       what is attended, and in what parts   one a step, used for every layer
//!     | is run by
//! Executor        threads                               one, kept
//! ```
//!
//! # The life of a request
//!
//! 1. **May it come at all?** [`can_ever_fit`](crate::cache::SharedPagedKv::can_ever_fit) of its longest
//!    length: what does not fit into an empty pool is refused, and everything else may wait.
//! 2. **What is there already?** [`PrefixCache::lookup`](crate::prefix::PrefixCache::lookup) gives a lease
//!    on the page groups that hold the beginning of the prompt. Nothing of them is evicted while it is
//!    held. A prompt that is to be cached itself takes groups for its rest
//!    ([`PrefixCache::acquire_groups`](crate::prefix::PrefixCache::acquire_groups)), and
//!    [`adopt_groups`](crate::cache::PagedSequence::adopt_groups) begins a sequence with all of them: the
//!    blocks that come with rows, and then room to grow into. From there on the sequence holds the
//!    blocks, and the lease may go.
//! 3. **Room for the next step.** [`PrefixCache::reserve`](crate::prefix::PrefixCache::reserve), in all
//!    layers or in none; where the pool is short it evicts as much as is lacking of what is only cached,
//!    or nothing. (Without a cache it is [`PagedSequence::reserve`](crate::cache::PagedSequence::reserve),
//!    which is also the door for most steps: it takes no lock where there is room, and the cache is
//!    asked after a refusal.) Where that is refused too the engine chooses:
//!    [`release`](crate::cache::PagedSequence::release) the youngest request and resume it from its
//!    tokens later, or sleep
//!    ([`reserve_within`](crate::cache::PagedSequence::reserve_within)). A request that holds blocks
//!    and sleeps for more can meet another that does the same: sleep with a bound, and let one go.
//! 4. **A layer.** Project and rotate; [`append`](crate::cache::PagedSequence::append) the new rows,
//!    which takes the layer's write guard for the copy alone; then take a read guard and attend, the
//!    new positions included. Readers do not wait for each other.
//! 5. **The end of the step.** [`commit`](crate::cache::PagedSequence::commit) what was accepted, in all
//!    layers at once, or [`abandon`](crate::cache::PagedSequence::abandon) it. Of drafts that branch,
//!    [`compact`](crate::cache::PagedSequence::compact) keeps the accepted path.
//! 6. **The end of the prompt.** [`insert`](crate::prefix::PrefixCache::insert) its full blocks, for the
//!    next one, with the groups of step 2, and release those that were its own: the cache and the
//!    sequence hold what they need.
//! 7. **Elsewhere.** Between two steps a request can be [`save`](crate::cache::PagedSequence::save)d, to
//!    make room or to move it, and [`restore`](crate::cache::PagedSequence::restore)d into another
//!    sequence, here or on another machine, with the same bits. [`wire`](crate::wire) draws the bytes and
//!    says how to keep them in an object store.
//! 8. **The end.** Drop the sequence. That waits for nothing, under any guard and while unwinding.
//! 9. **A tenant leaves, or a LoRA is unloaded.**
//!    [`remove_salt`](crate::prefix::PrefixCache::remove_salt): none of its blocks is found from then on.
//!
//! A lease may end inside a block: its [`partial`](crate::prefix::Lease::partial) block holds the next
//! few positions and then another prompt's. A sequence that adopts it, with `covered` positions, copies
//! them at its first reservation, in every layer, and the copy is its own. No group holds it, so that
//! what comes behind it cannot be inserted. Who wants that more than a few positions saved lets the
//! part go ([`release_partial`](crate::prefix::Lease::release_partial)), as below.
//!
//! [`fork`](crate::cache::PagedSequence::fork) at any time between steps: several answers to one
//! prompt, or beams.
//!
//! # Layers that differ
//!
//! A model whose layers are not alike says what each is:
//! [`with_layers`](crate::cache::SharedPagedKv::with_layers) takes a
//! [`LayerSpec`](crate::cache::LayerSpec) for each, with its shape, its blocks, its window, and, for
//! [`Mixed`](crate::cache::Mixed) layers, its stored type.
//!
//! Where a layer has a window ([`KvWindow`](crate::cache::KvWindow), with or without first positions
//! that are kept), a sequence gives back what the window has passed when it next takes blocks. So the
//! blocks of a sliding layer are bounded by its window and not by the text, and
//! [`can_ever_fit`](crate::cache::SharedPagedKv::can_ever_fit) counts with that. Attention over such a
//! layer is asked for with a [`window`](crate::attention::AttentionOptions::window) (and
//! [`keep_first`](crate::attention::AttentionOptions::keep_first)) within what is kept; anything else
//! is refused and names the position that is gone. The last step can always be taken back, until the
//! next one has reserved; a [`truncate`](crate::cache::PagedSequence::truncate) past that is refused where a window would have
//! a gap. Page groups, and so cached prefixes, are a block in every layer, sliding ones too: they hold
//! their blocks as long as they live.
//!
//! In a batch, layers with windows and layers without are attended by plans of their own where blocks
//! are shared: what stands in the same blocks at the beginning is gone in a sliding layer.
//!
//! # An engine in small
//!
//! Two requests with the same beginning through two layers. What a model would compute is made up.
//!
//! ```
//! # #[cfg(not(any(feature = "std", feature = "spin")))]
//! # fn main() {}
//! # #[cfg(any(feature = "std", feature = "spin"))]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use paged_kv::GqaShape;
//! use paged_kv::attention::AttentionOptions;
//! use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows, shared_prefixes};
//! use paged_kv::cache::{PagedKvCache, PagedSequence, SharedPagedKv};
//! use paged_kv::prefix::{HashKey, PrefixCache, Priority};
//!
//! const LAYERS: usize = 2;
//! const BLOCK: usize = 16;
//! const ROW: usize = 8; // one KV head of width 8
//! const N_HEADS: usize = 4;
//!
//! /// What the model says to a token in a layer: key, value and query rows.
//! fn project(token: u32, layer: usize) -> ([f32; ROW], [f32; ROW], [f32; N_HEADS * ROW]) {
//!     let number = (token as f32 * 0.37 + layer as f32).sin();
//!     ([number; ROW], [2.0 * number; ROW], [0.5 - number; N_HEADS * ROW])
//! }
//!
//! let shared = SharedPagedKv::new(LAYERS, BLOCK, 64, 1, ROW);
//! let mut prefixes = PrefixCache::new(&shared, BLOCK, HashKey::new([7; 16]));
//! let prompts: [Vec<u32>; 2] = [(0..40).collect(), (0..37).chain([90, 91]).collect()];
//!
//! // Begin: what is cached, and groups for the rest of the prompt.
//! let mut running = Vec::new();
//! for prompt in &prompts {
//!     assert!(shared.can_ever_fit(prompt.len() + 100));
//!     let mut lease = prefixes.lookup(b"tenant", prompt);
//!     lease.release_partial();
//!     let mut groups = lease.groups().to_vec();
//!     let own = prefixes.acquire_groups(prompt.len().div_ceil(BLOCK) - groups.len())?;
//!     groups.extend(&own);
//!     let mut sequence = PagedSequence::new(&shared);
//!     sequence.adopt_groups(&groups, lease.covered())?;
//!
//!     // Prefill: all that is not there, in one step. Its queries are left out here.
//!     let rest = &prompt[lease.covered()..];
//!     prefixes.reserve(&mut sequence, rest.len())?;
//!     for layer in 0..LAYERS {
//!         let rows: Vec<_> = rest.iter().map(|token| project(*token, layer)).collect();
//!         let k: Vec<f32> = rows.iter().flat_map(|row| row.0).collect();
//!         let v: Vec<f32> = rows.iter().flat_map(|row| row.1).collect();
//!         sequence.append(layer, &k, &v, rest.len())?;
//!     }
//!     sequence.commit(rest.len())?;
//!     prefixes.insert(b"tenant", prompt, &groups, Priority::NORMAL)?;
//!     // The sequence holds the blocks now, and the cache its groups.
//!     for group in own {
//!         shared.release_group(group);
//!     }
//!     running.push(sequence);
//! }
//! assert_eq!(prefixes.stats().tokens_saved, 32); // two blocks of the second prompt
//!
//! // Decode: one plan a step, one call a layer.
//! let (mut out, mut scratch) = (Vec::new(), Vec::new());
//! for token in [7, 8, 9] {
//!     let lens = running.iter().map(|sequence| sequence.len() + 1);
//!     let rows: Vec<_> = lens.map(|len| SequenceRows { len, rows: 1 }).collect();
//!     let mut plan = None;
//!     for sequence in &mut running {
//!         prefixes.reserve(sequence, 1)?; // what is only cached goes first
//!     }
//!     for layer in 0..LAYERS {
//!         let (k, v, q) = project(token, layer);
//!         for sequence in &mut running {
//!             sequence.push(layer, &k, &v)?; // a write guard for the copy alone
//!         }
//!         let store = shared.read(layer);
//!         let caches: Vec<&PagedKvCache> = running.iter().map(|s| s.cache(layer)).collect();
//!         let plan = match &plan {
//!             Some(plan) => plan,
//!             None => {
//!                 let shape = GqaShape::new(store.shape(), N_HEADS)?;
//!                 let common = shared_prefixes(BLOCK, &caches);
//!                 plan.insert(BatchPlan::with_shared(shape, &rows, &common)?)
//!             }
//!         };
//!         out.resize(plan.out_len(), 0.0);
//!         scratch.resize(plan.scratch_len(), 0.0);
//!         let layer = BatchLayer { store: &store, sequences: &caches, q: &[q, q].concat() };
//!         let options = AttentionOptions::new();
//!         plan.attend(&layer, &options, &mut out[..], &mut scratch, &Inline)?;
//!     }
//!     for sequence in &mut running {
//!         sequence.commit(1)?;
//!     }
//! }
//!
//! drop(running);
//! let cached = prefixes.stats().cached;
//! assert_eq!((cached, shared.free_groups()), (2, 62));
//! # Ok(())
//! # }
//! ```
//!
//! # Locks
//!
//! ```text
//! 1  the layers' guards, ascending     who may touch the rows
//! 2  the layers' gates, ascending      who may take blocks
//! 3  leaves                            the group table, the bell; free lists and counts (atomics)
//!
//!    a thread that holds one asks for what stands below it, or for nothing
//! ```
//!
//! The rules for callers are two. Whoever holds a guard of a layer asks for no second one, and calls
//! nothing that takes one or a gate; whatever gives back, counts or looks may be called under any
//! guard.
//!
//! | call | guard | gate | leaf | allocates |
//! |---|---|---|---|---|
//! | `SharedPagedKv::read` | read | | | |
//! | `write` | write | its own | | |
//! | `write_all` | write, all (one for each store) | all | | the guards |
//! | `acquire_group`, `acquire_groups` | | all | group table | gates, handles; the table may grow |
//! | `retain_group`, `release_group`, `group_refs`, `group_blocks` | | | group table | `group_blocks` its answer |
//! | `free_blocks`, `free_groups`, `can_ever_fit`, `release` of a bare sequence | | | | |
//! | `wait_for_groups`, `reserve_within` while it sleeps | | | bell | |
//! | `check_invariants`, `stats` | | | group table | 5 bytes a block; a line a layer |
//! | `PagedSequence::reserve`, nothing lacking | | | | |
//! | `reserve`, blocks lacking | | of those layers | | gates; tables may grow |
//! | `reserve`, the block that is being filled is shared | then write, one layer after the other | | | as above |
//! | `push`, `append` | write | its own | | |
//! | `append_to` | the caller's | | | |
//! | `compact`, where rows move | write, one layer after the other | its own | | |
//! | `commit`, `abandon`, `truncate`, `release`, drop | | | bell, if somebody waits | |
//! | `fork` | | | | a table a layer |
//! | `adopt_groups` | | | group table | a table a layer |
//! | `PagedSequence::save` | read, for each page | | | header, a page |
//! | `PagedSequence::restore` | then write, for each page | all, while it takes blocks | bell, if it fails | tables, a page |
//! | `PrefixCache::lookup`, `insert`, `evict`, `remove_salt` | the engine's own lock | | group table | a lookup its lease; an insertion its blocks; a removal its list |
//! | `PrefixCache::reserve`, `acquire_groups` | the engine's own lock | as without it | group table | as without it; a list of what goes |
//! | drop of a `Lease` | | | group table | |
//! | attention, alone or by a plan | the caller's read guard | | | |
//! | `BatchPlan::new`, `shared_prefixes` | | | | the plan |
//!
//! A guard made inside an expression lives to the end of it: bind results with `let`, and let the guard
//! go. [`SharedPagedKv`](crate::cache::SharedPagedKv) says why the order is this one.

#[doc = include_str!("manual/accuracy.md")]
pub mod accuracy {}
