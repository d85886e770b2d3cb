//! Attention for one sequence: the public doors.
//!
//! The room brings pages (`KvView`) and arithmetic (`kernel`) together. It refuses to know who
//! owns the pages or who else reads them: a read guard of the shared layer derefs to a store, and
//! a store is all it needs.
//!
//! There are two doors with the plain formula, for contiguous and for paged caches, and their
//! `_into` twins, which take [`AttentionOptions`], write to the caller's memory and allocate
//! nothing. Behind them is one walk over page tiles (`walk`). A new option is a field of
//! [`AttentionOptions`], never a new function.
//!
//! ```
//! use paged_kv::attention::causal_gqa_attention_paged;
//! use paged_kv::cache::{PagedKvCache, PagedKvStore};
//!
//! let mut store = PagedKvStore::new(16, 4, 1, 2);
//! let mut cache = PagedKvCache::new();
//! cache.append(&mut store, &[0.0; 4], &[1.0, 3.0, 3.0, 5.0], 2)?;
//! // Equal keys weigh the same: one query head gets the mean of both positions.
//! assert_eq!(causal_gqa_attention_paged(&[0.5; 2], &store, &cache, 1)?, [2.0, 4.0]);
//! # cache.release(&mut store)?;
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```

mod arithmetic;
mod options;
mod output;
mod queries;
mod run;
mod scratch;
mod state;
mod task;
mod tree;

use alloc::vec;
use alloc::vec::Vec;

pub use options::AttentionOptions;
pub(crate) use options::Resolved;
pub use output::Output;
pub(crate) use run::Job;
use scratch::Finish;
pub(crate) use scratch::States;
pub use state::AttentionState;
pub use task::attention_scratch_len;
use task::scratch_needed;
pub(crate) use task::{ITEM_ROWS, Item, ItemSize, Member, Members, Place, Task, few_rows};
pub use tree::TreeMask;

use crate::element::Element;
use crate::error::AttentionError;
use crate::shape::GqaShape;
use crate::storage::contiguous::KvCache;
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;
use crate::storage::view::KvView;

/// Causal grouped-query attention over a contiguous cache.
///
/// `q` is `[n_q, n_heads, k_width]`; its rows stand for the *last* `n_q` positions of the cache
/// (append first, then attend), so one row is decode and many are prefill. Query head `h` reads
/// KV head `h / (n_heads / n_kv_heads)`. The scale is `1 / sqrt(k_width)`. The result is
/// `[n_q, n_heads, v_width]`.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::causal_gqa_attention;
/// use paged_kv::cache::KvCache;
///
/// let mut cache: KvCache = KvCache::new(1, 2);
/// cache.push(&[1.0, 0.0], &[3.0, 4.0])?;
/// // Two query heads share the KV head; with one position each gets its value.
/// let out = causal_gqa_attention(&[0.5, 0.5, -1.0, 2.0], &cache, 2)?;
/// assert_eq!(out, [3.0, 4.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`AttentionError`], with what was needed and what was there.
///
/// # Cost
///
/// Allocates the result and a scratch; the `_into` twin does neither.
pub fn causal_gqa_attention<E: Element>(
    q: &[f32],
    cache: &KvCache<E>,
    n_heads: usize,
) -> Result<Vec<f32>, AttentionError> {
    attend_vec(q, cache.view(), n_heads)
}

/// [`causal_gqa_attention`] with options, into the caller's memory.
///
/// `output` is anything that [`Output`] can be made from, such as `&mut Vec<f32>` (in a loop,
/// `&mut *out`), and exactly `[n_q, n_heads, v_width]` long. `scratch` is at least
/// [`attention_scratch_len`] long; what is in it does not matter.
///
/// How many rows `q` holds follows from its length and `n_heads`. An `n_heads` that is wrong and
/// still divides it is a mistake that nobody can see, unless
/// [`AttentionOptions::query_rows`] says how many there should be.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::{AttentionOptions, attention_scratch_len, causal_gqa_attention_into};
/// use paged_kv::cache::KvCache;
/// use paged_kv::{GqaShape, KvShape};
///
/// let shape = GqaShape::new(KvShape::square(64, 1, 2)?, 2)?;
/// let mut cache = KvCache::<f32>::with_shape(shape.kv());
/// cache.push(&[1.0, 0.0], &[3.0, 4.0])?;
/// // Once, before the loop over tokens and layers:
/// let mut out = vec![0.0; shape.out_row_len()];
/// let mut scratch = vec![0.0; attention_scratch_len(&shape, 1)];
/// let options = AttentionOptions::new().soft_cap(30.0);
///
/// let q = [0.5, 0.5, -1.0, 2.0];
/// causal_gqa_attention_into(&q, &cache, 2, &options, &mut out, &mut scratch)?;
/// assert_eq!(out, [3.0, 4.0, 3.0, 4.0]);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`AttentionError`], with what was needed and what was there; then nothing was written.
///
/// # Cost
///
/// Allocates nothing, takes no lock, does not panic.
pub fn causal_gqa_attention_into<'o, E: Element>(
    q: &[f32],
    cache: &KvCache<E>,
    n_heads: usize,
    options: &AttentionOptions<'_>,
    output: impl Into<Output<'o>>,
    scratch: &mut [f32],
) -> Result<(), AttentionError> {
    attend(q, cache.view(), n_heads, options, output.into(), scratch)
}

/// Causal grouped-query attention over a sequence in a shared store, read through its block table.
///
/// Shapes, scale and meaning are those of [`causal_gqa_attention`], and so are the bits of the
/// result, for any block table.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::causal_gqa_attention_paged;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 2);
/// let mut sequence = PagedKvCache::new();
/// sequence.push(&mut store, &[1.0, 0.0], &[3.0, 4.0])?;
/// let out = causal_gqa_attention_paged(&[0.5, 0.5], &store, &sequence, 1)?;
/// assert_eq!(out, [3.0, 4.0]);
/// sequence.release(&mut store)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`AttentionError`], with what was needed and what was there.
///
/// # Cost
///
/// Allocates the result and a scratch; the `_into` twin does neither. No page is copied.
pub fn causal_gqa_attention_paged<E: Element>(
    q: &[f32],
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    n_heads: usize,
) -> Result<Vec<f32>, AttentionError> {
    attend_vec(q, cache.view(store)?, n_heads)
}

/// [`causal_gqa_attention_paged`] with options, into the caller's memory; see
/// [`causal_gqa_attention_into`].
///
/// # Examples
///
/// ```
/// use paged_kv::attention::{
///     AttentionOptions, Output, attention_scratch_len, causal_gqa_attention_paged_into,
/// };
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::GqaShape;
///
/// let mut store = PagedKvStore::new(16, 4, 2, 8);
/// let mut sequence = PagedKvCache::new();
/// sequence.append(&mut store, &[0.5; 3 * 16], &[2.0; 3 * 16], 3)?;
///
/// // Once: four query heads over the store's two, for up to 32 rows a call.
/// let shape = GqaShape::new(store.shape(), 4)?;
/// let mut scratch = vec![0.0; attention_scratch_len(&shape, 32)];
///
/// // Each call: two query rows, which stand for the last two positions.
/// let (mut out, mut lse) = (vec![0.0; 2 * shape.out_row_len()], vec![0.0; 2 * 4]);
/// let options = AttentionOptions::new().window(2).soft_cap(50.0).query_rows(2);
/// let output = Output::new(&mut out).lse(&mut lse);
/// let q = vec![0.1; 2 * shape.q_row_len()];
/// causal_gqa_attention_paged_into(&q, &store, &sequence, 4, &options, output, &mut scratch)?;
/// assert_eq!(out, [2.0; 2 * 4 * 8]);
/// # sequence.release(&mut store)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Of the shared layer, hand in `&shared.read(layer)`.
///
/// # Errors
///
/// [`AttentionError`], with what was needed and what was there; then nothing was written.
///
/// # Cost
///
/// Allocates nothing, takes no lock, does not panic. No page is copied.
pub fn causal_gqa_attention_paged_into<'o, E: Element>(
    q: &[f32],
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    n_heads: usize,
    options: &AttentionOptions<'_>,
    output: impl Into<Output<'o>>,
    scratch: &mut [f32],
) -> Result<(), AttentionError> {
    attend(q, cache.view(store)?, n_heads, options, output.into(), scratch)
}

fn attend_vec<E: Element>(
    q: &[f32],
    view: KvView<'_, E>,
    n_heads: usize,
) -> Result<Vec<f32>, AttentionError> {
    let shape = GqaShape::new(view.layout().shape(), n_heads)?;
    let n_q = query_rows(&shape, q)?;
    let options = AttentionOptions::new();
    check_positions(&options.resolve(&shape)?, n_q, view.len())?;
    if n_q == 0 {
        return Ok(Vec::new());
    }
    let mut out = vec![0.0; n_q.saturating_mul(shape.out_row_len())];
    let mut scratch = vec![0.0; attention_scratch_len(&shape, n_q)];
    attend(q, view, n_heads, &options, Output::new(&mut out), &mut scratch)?;
    Ok(out)
}

fn query_rows(shape: &GqaShape, q: &[f32]) -> Result<usize, AttentionError> {
    let row = shape.q_row_len();
    if q.len().is_multiple_of(row) {
        Ok(q.len() / row)
    } else {
        Err(AttentionError::QueryLength { row, have: q.len() })
    }
}

/// Whether each query row has a position of its own, where an option speaks of it.
fn check_positions(options: &Resolved<'_>, rows: usize, len: usize) -> Result<(), AttentionError> {
    let rows = options.needed_positions(0, rows);
    if rows > len {
        return Err(AttentionError::TooManyQueryRows { rows, len });
    }
    Ok(())
}

/// Every check, then the walk.
fn attend<E: Element>(
    q: &[f32],
    view: KvView<'_, E>,
    n_heads: usize,
    options: &AttentionOptions<'_>,
    output: Output<'_>,
    scratch: &mut [f32],
) -> Result<(), AttentionError> {
    let shape = GqaShape::new(view.layout().shape(), n_heads)?;
    let n_q = query_rows(&shape, q)?;
    let options = options.resolve(&shape)?;
    if let Some(need) = options.query_rows
        && need != n_q
    {
        return Err(AttentionError::QueryRows { need, have: n_q });
    }
    check_positions(&options, n_q, view.len())?;
    if let Some(position) = options.freed_position(view.freed(), n_q, view.len()) {
        return Err(AttentionError::PositionFreed { position, oldest: view.freed().end });
    }
    options.check_trees([n_q].into_iter())?;
    let need = n_q.saturating_mul(shape.out_row_len());
    if output.out.len() != need {
        return Err(AttentionError::OutLength { need, have: output.out.len() });
    }
    if let Some(lse) = &output.lse
        && lse.len() != n_q * n_heads
    {
        return Err(AttentionError::LseLength { need: n_q * n_heads, have: lse.len() });
    }
    let need = scratch_needed(&shape, n_q);
    if scratch.len() < need {
        return Err(AttentionError::ScratchLength { need, have: scratch.len() });
    }
    let members = Members::One(Member { view, first: 0, n_q, index: 0 });
    let task = Task { shape, options, q, members };
    every_item(&task, n_q, output, scratch);
    Ok(())
}

/// Cuts a call of one sequence into items and does one after the other.
fn every_item<E: Element>(
    task: &Task<'_, E>,
    n_q: usize,
    mut output: Output<'_>,
    scratch: &mut [f32],
) {
    let size = ItemSize::new(&task.shape, n_q);
    let (n_kv_heads, len) = (task.shape.kv().n_kv_heads(), task.member(0).view.len());
    for row in (0..n_q).step_by(size.rows) {
        // Heads inside: the rows of a query stand side by side, and so do their pages.
        for head in (0..n_kv_heads).step_by(size.heads) {
            let item = Item {
                sequences: 0..1,
                heads: head..head + size.heads,
                rows: row..n_q.min(row + size.rows),
                positions: 0..len,
                joint: 0,
            };
            E::attend(&mut Job { task, item: &item, scratch });
            let output = &mut output;
            task.options.level.run(Finish { task, item: &item, scratch, output });
        }
    }
}
