//! Prefixes that several sequences hold in the same blocks, and when that is worth something.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::error::BatchError;
use super::plan::SequenceRows;
use crate::attention::{ITEM_ROWS, few_rows};
use crate::kernel::{SPLIT, TILE};
use crate::shape::GqaShape;
use crate::storage::sequence::PagedKvCache;

/// Sequences whose first positions stand in the same blocks.
///
/// It is a promise that [`BatchPlan::attend`](super::BatchPlan::attend) checks against the block
/// tables. [`shared_prefixes`] finds it in them.
///
/// # Examples
///
/// ```
/// use paged_kv::GqaShape;
/// use paged_kv::attention::AttentionOptions;
/// use paged_kv::batch::{BatchError, BatchLayer, BatchPlan, Inline, SequenceRows, SharedPrefix};
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(64, 16, 1, 1);
/// let mut two = [PagedKvCache::new(), PagedKvCache::new()];
/// for cache in &mut two {
///     cache.append(&mut store, &[0.5; 512], &[0.5; 512], 512)?;
/// }
/// let rows = [SequenceRows { len: 512, rows: 1 }; 2];
/// let wrong = SharedPrefix { sequences: vec![0, 1], positions: 512 }; // the same rows, twice
/// let plan = BatchPlan::with_shared(GqaShape::new(store.shape(), 1)?, &rows, &[wrong])?;
/// let layer = BatchLayer { store: &store, sequences: &[&two[0], &two[1]], q: &[0.5; 2] };
/// let (options, mut scratch) = (AttentionOptions::new(), vec![0.0; plan.scratch_len()]);
/// let refused = plan.attend(&layer, &options, &mut [0.0; 2], &mut scratch, &Inline);
/// assert_eq!(refused, Err(BatchError::NotShared { sequence: 1, with: 0, block: 0 }));
/// # two.iter_mut().try_for_each(|cache| cache.release(&mut store))?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The sequences, by their place in the batch, in any order.
    pub sequences: Vec<usize>,
    /// The first positions of each of them.
    pub positions: usize,
}

/// Finds the sequences that share their first blocks, where they do so most.
///
/// Each sequence is in one prefix at most. Where some share more than others (eight requests have
/// a system prompt in common, and four of them a document), the choice is whatever saves more
/// positions: one prefix for all, or a longer one for the four and one for the rest. What stands in
/// the same blocks in one layer does so in every layer if the blocks were shared as page groups or
/// by forking all layers.
///
/// # Examples
///
/// ```
/// use paged_kv::batch::{SharedPrefix, shared_prefixes};
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(64, 8, 1, 1);
/// let mut first = PagedKvCache::new();
/// first.append(&mut store, &[0.0; 128], &[0.0; 128], 128)?;
/// let mut second = first.fork(&mut store)?;
/// second.push(&mut store, &[0.0], &[0.0])?;
/// let found = shared_prefixes(64, &[&first, &PagedKvCache::new(), &second]);
/// assert_eq!(found, [SharedPrefix { sequences: vec![0, 2], positions: 128 }]);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
///
/// # Cost
///
/// Sorts the sequences by their block tables: `log2(sequences)` comparisons for each, of the blocks
/// that two have in common. Allocates the result and some lists of indices. At worst, where each
/// sequence shares more with the next one than with any before it, the cuts take a step for each pair
/// of sequences, and the stack a frame for each sequence.
pub fn shared_prefixes(block_size: usize, sequences: &[&PagedKvCache]) -> Vec<SharedPrefix> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by(|a, b| {
        sequences[*a].block_table().cmp(sequences[*b].block_table()).then(a.cmp(b))
    });
    // What each has in common with the one before it; of any run, the least of these.
    let common: Vec<usize> = (0..order.len())
        .map(|at| match at.checked_sub(1) {
            Some(before) => in_common(block_size, sequences[order[before]], sequences[order[at]]),
            None => 0,
        })
        .collect();
    let mut found = Vec::new();
    let mut start = 0;
    for end in 1..=order.len() {
        if end == order.len() || common[end] == 0 {
            found.extend(best_cut(&order, &common, start..end).1);
            start = end;
        }
    }
    found
}

/// Positions that stand in the same blocks.
fn in_common(block_size: usize, a: &PagedKvCache, b: &PagedKvCache) -> usize {
    if a.store_id() != b.store_id() {
        return 0;
    }
    let blocks = a.blocks_in_common(b);
    blocks.saturating_mul(block_size).min(a.seq_len()).min(b.seq_len())
}

/// Cuts a run of sequences, each of which shares something with its neighbours, into prefixes.
/// Returns how many positions need not be read again, and the prefixes.
fn best_cut(order: &[usize], common: &[usize], run: Range<usize>) -> (usize, Vec<SharedPrefix>) {
    let Some(least) = common[run.start + 1..run.end].iter().copied().min() else {
        return (0, Vec::new());
    };
    // Cut where neighbours share no more than all do. Each part then has a longer prefix of its
    // own, or goes together with others over the least, whichever saves more.
    let (mut saved, mut found) = (0, Vec::new());
    let (mut together, mut start) = (Vec::new(), run.start);
    for end in run.start + 1..=run.end {
        if end < run.end && common[end] != least {
            continue;
        }
        let (own, prefixes) = best_cut(order, common, start..end);
        if least.saturating_mul(end - start) >= own {
            together.push((start..end, own, prefixes));
        } else {
            saved += own;
            found.extend(prefixes);
        }
        start = end;
    }
    if together.len() == 1 {
        let (_, own, prefixes) = together.remove(0);
        saved += own;
        found.extend(prefixes);
    }
    if !together.is_empty() {
        let parts = together.into_iter().flat_map(|(part, ..)| &order[part]);
        let mut sequences: Vec<usize> = parts.copied().collect();
        sequences.sort_unstable();
        saved += least.saturating_mul(sequences.len() - 1);
        found.push(SharedPrefix { sequences, positions: least });
    }
    (saved, found)
}

/// Sequences of a plan that are attended together over the positions that they share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Joint {
    /// In the order of the plan.
    pub(super) places: Range<usize>,
    /// A multiple of [`TILE`].
    pub(super) positions: usize,
}

impl Joint {
    /// The position from which on each of the sequences has items of its own.
    pub(super) fn end(&self) -> usize {
        self.positions.next_multiple_of(SPLIT)
    }
}

/// The order of the plan, and who is attended together in it.
pub(super) fn join(
    shape: &GqaShape,
    sequences: &[SequenceRows],
    shared: &[SharedPrefix],
) -> Result<(Vec<usize>, Vec<Joint>), BatchError> {
    let mut named = vec![false; sequences.len()];
    let mut joined = vec![false; sequences.len()];
    let (mut order, mut joints) = (Vec::with_capacity(sequences.len()), Vec::new());
    for prefix in shared {
        check(prefix, sequences, &mut named)?;
        let few = |place: &usize| {
            let rows = sequences[*place].rows;
            rows > 0 && few_rows(shape, rows)
        };
        let mut members: Vec<usize> = prefix.sequences.iter().copied().filter(few).collect();
        members.sort_by_key(|place| (sequences[*place].rows, *place));
        let same_rows = |a: &usize, b: &usize| sequences[*a].rows == sequences[*b].rows;
        for members in members.chunk_by(same_rows) {
            let most = ITEM_ROWS / (sequences[members[0]].rows * shape.group());
            let count = members.len().div_ceil(most.max(1));
            for part in 0..count {
                let part = cut_evenly(members.len(), count, part);
                let part = &members[part];
                let positions = worth_joining(sequences, part, prefix.positions);
                if positions > 0 {
                    joints.push(Joint { places: order.len()..order.len() + part.len(), positions });
                    order.extend_from_slice(part);
                    part.iter().for_each(|place| joined[*place] = true);
                }
            }
        }
    }
    order.extend((0..sequences.len()).filter(|place| !joined[*place]));
    Ok((order, joints))
}

/// Part `index` of `count` parts of `len` things.
pub(super) fn cut_evenly(len: usize, count: usize, index: usize) -> Range<usize> {
    let border = |index: usize| (len as u128 * index as u128 / count as u128) as usize;
    border(index)..border(index + 1)
}

fn check(
    prefix: &SharedPrefix,
    sequences: &[SequenceRows],
    named: &mut [bool],
) -> Result<(), BatchError> {
    for &sequence in &prefix.sequences {
        let Some(named) = named.get_mut(sequence) else {
            return Err(BatchError::NoSequence { sequence, sequences: sequences.len() });
        };
        if core::mem::replace(named, true) {
            return Err(BatchError::SharedTwice { sequence });
        }
        let (positions, len) = (prefix.positions, sequences[sequence].len);
        if positions > len {
            return Err(BatchError::SharedTooLong { sequence, positions, len });
        }
    }
    Ok(())
}

/// How many of the shared positions are attended together: whole tiles, and 0 where nothing is
/// gained.
///
/// Over whole splits there is never a loss: the pages are read once instead of once for each
/// sequence, and the rows of all of them fill the register tile. In the split in which the prefix
/// ends, the item goes on over the sequences' own positions, tile by tile for one sequence after
/// the other, which is not the order of memory. That pays where the positions that are not read
/// again are as many as those own ones; elsewhere the prefix is taken to end a split earlier.
/// (Measured where they were 1.5 times as many: 0.7 of the time each alone took with one row for
/// each KV head, 0.95 with four.)
fn worth_joining(sequences: &[SequenceRows], members: &[usize], positions: usize) -> usize {
    if members.len() < 2 {
        return 0;
    }
    let positions = positions / TILE * TILE;
    let whole = positions / SPLIT * SPLIT;
    let saved = (positions - whole) * (members.len() - 1);
    let own = |place: &usize| sequences[*place].len.min(whole + SPLIT) - positions;
    let own: usize = members.iter().map(own).sum();
    if saved >= own { positions } else { whole }
}
