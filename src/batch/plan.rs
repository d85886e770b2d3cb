//! What a batch is cut into: items, and where their states will be. Plain data.

use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::ops::Range;

use super::error::BatchError;
use super::shared::{Joint, SharedPrefix, cut_evenly, join};
use crate::attention::{Item, ItemSize, Place, few_rows};
use crate::cut;
use crate::kernel::SPLIT;
use crate::shape::GqaShape;
use crate::simd::LANES;

/// Stored numbers, of keys and values, that an item of few rows has at least, unless that is more
/// than all of its split: 2^18 are 1 MiB of `f32`, which take some 30 us to come from memory at
/// 35 GB/s. With less to do, handing an item over and merging its state would begin to show.
const ITEM_NUMBERS: usize = 1 << 18;

/// What reading a number costs, in multiply-adds: 35 GB/s are 9 G numbers of `f32` a second, 100
/// Gflop/s are 50 G multiply-adds.
const READ: u64 = 6;

/// Multiply-adds that are worth a chunk of their own: 2^19 take 10 us, a hundred times what it
/// takes a worker that is awake to begin.
const CHUNK_COST: u64 = 1 << 19;

/// Where there is more to do, chunks are larger than that, so that there are about so many of
/// them: four for each of 64 threads. Each has memory to work in, beside its states.
const MOST_CHUNKS: u64 = 256;

/// Below so many multiply-adds, 20 us, a plan is done by its caller alone: waking a sleeping worker
/// takes as long.
const INLINE_COST: u64 = 1 << 20;

/// One sequence of a batch, before anything is planned.
///
/// # Examples
///
/// ```
/// use paged_kv::batch::{BatchPlan, SequenceRows};
/// use paged_kv::{GqaShape, KvShape};
///
/// let decoding = SequenceRows { len: 1025, rows: 1 };
/// let draft_of_four = SequenceRows { len: 1029, rows: 5 };
/// let prompt_chunk = SequenceRows { len: 512, rows: 512 };
/// let shape = GqaShape::new(KvShape::square(64, 2, 8)?, 4)?;
/// let plan = BatchPlan::new(shape, &[decoding, draft_of_four, prompt_chunk])?;
/// assert_eq!((plan.rows(0), plan.rows(1), plan.rows(2)), (0..1, 1..6, 6..518));
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceRows {
    /// Positions cached when the batch is attended, those of the query rows included.
    pub len: usize,
    /// Query rows, which stand for the last of the positions: one in decode, some in the
    /// verification of a draft, many in a chunk of a prompt. May be 0.
    pub rows: usize,
}

/// How one layer of a batch is attended: who does what, and where it is put meanwhile.
///
/// Plain data, made from a shape and lengths alone. Make it once a step, when it is known how many
/// positions each sequence will have, and use it for every layer of that shape. How it cuts the
/// work never depends on threads, and changes no bit of the result.
///
/// # Examples
///
/// A step of continuous batching, one sequence that decodes and one whose prompt comes in:
///
/// ```
/// use paged_kv::GqaShape;
/// use paged_kv::attention::AttentionOptions;
/// use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows};
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(64, 16, 2, 8); // one layer: 2 KV heads of width 8
/// let (mut decoding, mut prompt) = (PagedKvCache::new(), PagedKvCache::new());
/// decoding.append(&mut store, &[0.5; 99 * 16], &[1.0; 99 * 16], 99)?;
///
/// // Once a step: one row after 99 positions, and the first 32 rows of a prompt.
/// let shape = GqaShape::new(store.shape(), 4)?;
/// let plan = BatchPlan::new(
///     shape,
///     &[SequenceRows { len: 100, rows: 1 }, SequenceRows { len: 32, rows: 32 }],
/// )?;
/// let (mut out, mut scratch) = (vec![0.0; plan.out_len()], vec![0.0; plan.scratch_len()]);
///
/// // For each layer: append, then attend. The rows of one sequence follow those of the other.
/// decoding.push(&mut store, &[0.5; 16], &[1.0; 16])?;
/// prompt.append(&mut store, &[0.5; 32 * 16], &[2.0; 32 * 16], 32)?;
/// let q = vec![0.1; plan.q_len()];
/// let layer = BatchLayer { store: &store, sequences: &[&decoding, &prompt], q: &q };
/// plan.attend(&layer, &AttentionOptions::new(), &mut out, &mut scratch, &Inline)?;
///
/// assert_eq!(plan.rows(1), 1..33);
/// let (first, second) = out.split_at(plan.rows(1).start * shape.out_row_len());
/// assert_eq!((first, second), (&[1.0; 32][..], &[2.0; 32 * 32][..]));
/// # decoding.release(&mut store)?;
/// # prompt.release(&mut store)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    pub(super) shape: GqaShape,
    pub(super) sequences: Vec<SequenceRows>,
    /// The first query row of each sequence, and behind the last one how many there are.
    pub(super) offsets: Vec<usize>,
    /// The sequences in the order of the items.
    pub(super) places: Vec<Place>,
    pub(super) joints: Vec<Joint>,
    /// Heavy ones first.
    pub(super) items: Vec<Item>,
    /// Where in the scratch each item begins.
    pub(super) starts: Vec<usize>,
    /// The first item of each chunk, and behind the last one how many there are.
    pub(super) chunks: Vec<usize>,
    pub(super) chunk_len: usize,
    pub(super) lookups: Vec<Lookup>,
    /// For each sequence, tile of query rows, and KV head: the items that leave a state for it, in
    /// the order of splits.
    pub(super) parts: Vec<u32>,
    pub(super) cost: u64,
}

/// Where the states of a sequence's rows are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lookup {
    /// Its place in the order of the items.
    pub(super) place: usize,
    /// The first of its entries in `parts`.
    pub(super) first: usize,
    /// Query rows in an item.
    pub(super) rows: usize,
    /// Items that a row has, one after the other along the positions.
    pub(super) splits: usize,
}

/// One query row of one head, and where it is to be found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'p> {
    pub(super) query_head: usize,
    head: usize,
    /// Counted in its sequence.
    row: usize,
    place: usize,
    pub(super) parts: &'p [u32],
}

impl BatchPlan {
    /// Plans a batch whose sequences share nothing, or whose sharing shall not be looked at.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{BatchPlan, SequenceRows};
    /// use paged_kv::{GqaShape, KvShape};
    ///
    /// let shape = GqaShape::new(KvShape::square(64, 2, 8)?, 4)?;
    /// let rows = [SequenceRows { len: 100, rows: 1 }, SequenceRows { len: 32, rows: 32 }];
    /// let plan = BatchPlan::new(shape, &rows)?;
    /// assert_eq!((plan.sequences(), plan.shape()), (&rows[..], shape));
    /// assert_eq!((plan.total_rows(), plan.rows(1)), (33, 1..33));
    /// assert_eq!((plan.q_len(), plan.out_len(), plan.lse_len()), (33 * 32, 33 * 32, 33 * 4));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BatchError::TooLarge`].
    pub fn new(shape: GqaShape, sequences: &[SequenceRows]) -> Result<Self, BatchError> {
        Self::with_shared(shape, sequences, &[])
    }

    /// Plans a batch in which some sequences have prefixes in common, as
    /// [`shared_prefixes`](super::shared_prefixes) finds them: those are read once for all of their
    /// sequences. Prefixes by which nothing is gained are taken and left out.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{BatchPlan, SequenceRows, SharedPrefix};
    /// use paged_kv::{GqaShape, KvShape};
    ///
    /// let shape = GqaShape::new(KvShape::square(64, 2, 8)?, 4)?;
    /// let rows = [SequenceRows { len: 1100, rows: 1 }; 4];
    /// let alone = BatchPlan::new(shape, &rows)?;
    /// let long = SharedPrefix { sequences: vec![0, 1, 2, 3], positions: 1024 };
    /// assert_ne!(BatchPlan::with_shared(shape, &rows, &[long])?, alone);
    /// // Sixteen positions are not worth it.
    /// let short = SharedPrefix { sequences: vec![0, 1], positions: 16 };
    /// assert_eq!(BatchPlan::with_shared(shape, &rows, &[short])?, alone);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BatchError::TooLarge`]; [`BatchError::NoSequence`], [`BatchError::SharedTwice`] and
    /// [`BatchError::SharedTooLong`] for prefixes that cannot be.
    ///
    /// # Cost
    ///
    /// Allocates; proportional to the number of items, which is about the positions of all
    /// sequences by 512, times KV heads. A plan serves all layers of a step.
    pub fn with_shared(
        shape: GqaShape,
        sequences: &[SequenceRows],
        shared: &[SharedPrefix],
    ) -> Result<Self, BatchError> {
        let offsets = offsets(&shape, sequences)?;
        let (order, joints) = join(&shape, sequences, shared)?;
        let place = |index: usize| {
            let (first, n_q) = (offsets[index], sequences[index].rows);
            Place { index, first, n_q }
        };
        let mut plan = BatchPlan {
            shape,
            sequences: sequences.to_vec(),
            places: order.into_iter().map(place).collect(),
            offsets,
            joints,
            items: Vec::new(),
            starts: Vec::new(),
            chunks: vec![0],
            chunk_len: 0,
            lookups: Vec::new(),
            parts: Vec::new(),
            cost: 0,
        };
        plan.cut_into_items();
        plan.pack()?;
        plan.index_items()?;
        Ok(plan)
    }

    /// The shape that it was made for.
    pub fn shape(&self) -> GqaShape {
        self.shape
    }

    /// The sequences that it was made for.
    pub fn sequences(&self) -> &[SequenceRows] {
        &self.sequences
    }

    /// The query rows of a sequence, counted over the batch: row `r` begins at `r * q_row_len` in
    /// the query, at `r * out_row_len` in the output and at `r * n_heads` in the LSE.
    ///
    /// # Panics
    ///
    /// If there is no such sequence.
    #[track_caller]
    pub fn rows(&self, sequence: usize) -> Range<usize> {
        self.offsets[sequence]..self.offsets[sequence + 1]
    }

    /// Query rows of all sequences.
    pub fn total_rows(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Numbers in the query.
    pub fn q_len(&self) -> usize {
        self.total_rows() * self.shape.q_row_len()
    }

    /// Numbers in the output.
    pub fn out_len(&self) -> usize {
        self.total_rows() * self.shape.out_row_len()
    }

    /// Numbers in the LSE output.
    pub fn lse_len(&self) -> usize {
        self.total_rows() * self.shape.n_heads()
    }

    /// Numbers of scratch that it needs, for any stored type at any level; the formula is in the
    /// [module's documentation](super#memory).
    pub fn scratch_len(&self) -> usize {
        (self.chunks.len() - 1) * self.chunk_len
    }

    /// Whether there is so little to do that the caller does it alone, whoever the executor is:
    /// below some 20 us.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::batch::{BatchPlan, SequenceRows};
    /// use paged_kv::{GqaShape, KvShape};
    ///
    /// let shape = GqaShape::new(KvShape::square(64, 2, 64)?, 8)?;
    /// let decode = |len| BatchPlan::new(shape, &[SequenceRows { len, rows: 1 }]);
    /// assert!(decode(100)?.runs_inline() && !decode(100_000)?.runs_inline());
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn runs_inline(&self) -> bool {
        self.cost < INLINE_COST
    }

    /// The query row and head with this place in the LSE.
    #[inline(always)]
    pub(super) fn cell(&self, index: usize) -> Cell<'_> {
        let (row, query_head) = (index / self.shape.n_heads(), index % self.shape.n_heads());
        let sequence = self.offsets.partition_point(|first| *first <= row) - 1;
        let Lookup { place, first, rows, splits } = *cut::one(&self.lookups, sequence);
        let row = row - *cut::one(&self.offsets, sequence);
        let head = query_head / self.shape.group();
        let first = first + (row / rows * self.shape.kv().n_kv_heads() + head) * splits;
        let parts = cut::part(&self.parts, first, splits);
        Cell { query_head, head, row, place, parts }
    }

    /// Where a cell's state stands among those that an item leaves.
    #[inline(always)]
    pub(super) fn state_in(&self, item: &Item, cell: &Cell<'_>) -> usize {
        let group = self.shape.group();
        let head = cell.head - item.heads.start;
        let row =
            (cell.place - item.sequences.start) * item.rows.len() + cell.row - item.rows.start;
        head * item.rows_per_head(&self.shape) + row * group + cell.query_head % group
    }

    fn len_of(&self, place: usize) -> usize {
        self.sequences[self.places[place].index].len
    }

    fn cut_into_items(&mut self) {
        let mut alone_from = vec![0; self.places.len()];
        for joint in self.joints.clone() {
            alone_from[joint.places.clone()].fill(joint.end());
            self.cut_joint(&joint);
        }
        for (place, from) in alone_from.into_iter().enumerate() {
            match self.places[place].n_q {
                0 => {}
                n_q if few_rows(&self.shape, n_q) => self.cut_by_positions(place, from),
                _ => self.cut_by_rows(place),
            }
        }
    }

    /// The shared positions of some sequences, and what follows up to the end of a split.
    fn cut_joint(&mut self, joint: &Joint) {
        let rows = 0..self.places[joint.places.start].n_q;
        let longest = joint.places.clone().map(|place| self.len_of(place)).max().unwrap_or(0);
        for start in (0..joint.positions).step_by(SPLIT) {
            let positions = start..longest.min(start + SPLIT);
            // Two sequences keep the runs of one, so that pages are read in the order of memory.
            for heads in self.head_runs(positions.len(), joint.places.len() / 2) {
                let (sequences, rows) = (joint.places.clone(), rows.clone());
                let (positions, joint) = (positions.clone(), joint.positions);
                self.items.push(Item { sequences, heads, rows, positions, joint });
            }
        }
    }

    /// One sequence with few query rows, from a position on: an item for each split and some heads.
    fn cut_by_positions(&mut self, place: usize, from: usize) {
        let (len, rows) = (self.len_of(place), self.places[place].n_q);
        // A sequence without positions still needs a state that says so.
        for start in (from..len.max(usize::from(from == 0))).step_by(SPLIT) {
            let positions = start..len.min(start + SPLIT);
            for heads in self.head_runs(positions.len(), 1) {
                let (positions, sequences) = (positions.clone(), place..place + 1);
                self.items.push(Item { sequences, heads, rows: 0..rows, positions, joint: 0 });
            }
        }
    }

    /// One sequence with many query rows: one KV head and some rows for each item, over all
    /// positions.
    fn cut_by_rows(&mut self, place: usize) {
        let (len, n_q) = (self.len_of(place), self.places[place].n_q);
        let size = ItemSize::new(&self.shape, n_q);
        for head in 0..self.shape.kv().n_kv_heads() {
            for row in (0..n_q).step_by(size.rows) {
                self.items.push(Item {
                    sequences: place..place + 1,
                    heads: head..head + 1,
                    rows: row..n_q.min(row + size.rows),
                    positions: 0..len,
                    joint: 0,
                });
            }
        }
    }

    /// KV heads in runs, each of at least [`ITEM_NUMBERS`] numbers if so many sequences read them.
    fn head_runs(
        &self,
        positions: usize,
        sequences: usize,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let kv = self.shape.kv();
        let heads = kv.n_kv_heads();
        let head = (kv.k_width() + kv.v_width()).saturating_mul(positions);
        let numbers = head.saturating_mul(heads).saturating_mul(sequences);
        let count = (numbers / ITEM_NUMBERS).clamp(1, heads);
        (0..count).map(move |index| cut_evenly(heads, count, index))
    }

    /// What an item costs, in multiply-adds, if rows see what is not behind them.
    fn cost_of(&self, item: &Item) -> u64 {
        let kv = self.shape.kv();
        let (mut read, mut products) = (0, 0);
        let rows = (item.rows.len() * self.shape.group()) as u64;
        for place in item.sequences.clone() {
            let behind_last = self.places[place].n_q - item.rows.end;
            let seen = self.len_of(place).saturating_sub(behind_last).min(item.positions.end);
            let seen = seen.saturating_sub(item.positions.start) as u64;
            let again = if place == item.sequences.start { 0 } else { item.joint };
            let again = again.saturating_sub(item.positions.start) as u64;
            read += seen.saturating_sub(again);
            products = u64::saturating_add(products, seen.saturating_mul(rows));
        }
        let numbers = (kv.k_width() + kv.v_width()).saturating_mul(item.heads.len()) as u64;
        products.saturating_add(read.saturating_mul(READ)).saturating_mul(numbers)
    }

    /// Puts the heavy items first and packs light ones together.
    fn pack(&mut self) -> Result<(), BatchError> {
        let mut items: Vec<(u64, Item)> = core::mem::take(&mut self.items)
            .into_iter()
            .map(|item| (self.cost_of(&item), item))
            .collect();
        items.sort_by_key(|(cost, _)| Reverse(*cost));
        let add = |sum: u64, (cost, _): &(u64, Item)| sum.saturating_add(*cost);
        self.cost = items.iter().fold(0, add);
        let enough = CHUNK_COST.max(self.cost.div_ceil(MOST_CHUNKS));
        let largest = items.iter().map(|(_, item)| item.scratch_len(&self.shape)).max();
        let room = largest.unwrap_or(0).saturating_mul(2);
        let (mut in_chunk, mut places) = (0, Vec::with_capacity(items.len()));
        let (mut used, mut chunk) = (0, 0);
        for (index, (cost, item)) in items.iter().enumerate() {
            let need = item.scratch_len(&self.shape);
            if index > 0 && (in_chunk >= enough || need.saturating_add(used) > room) {
                self.chunks.push(index);
                (in_chunk, used, chunk) = (0, 0, chunk + 1);
            }
            places.push((chunk, used));
            self.chunk_len = self.chunk_len.max(need.saturating_add(used));
            used += item.states_len(&self.shape);
            in_chunk += cost;
        }
        if !items.is_empty() {
            self.chunks.push(items.len());
        }
        self.items = items.into_iter().map(|(_, item)| item).collect();
        self.chunk_len = self.chunk_len.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
        fits("scratch", (self.chunks.len() - 1).checked_mul(self.chunk_len))?;
        let start = |(chunk, used)| chunk * self.chunk_len + used;
        self.starts = places.into_iter().map(start).collect();
        Ok(())
    }

    /// Notes for each row which items leave a state for it.
    fn index_items(&mut self) -> Result<(), BatchError> {
        let n_kv_heads = self.shape.kv().n_kv_heads();
        let nobody = Lookup { place: 0, first: 0, rows: 1, splits: 0 };
        self.lookups = vec![nobody; self.places.len()];
        let mut first = 0_usize;
        for (place, Place { index, n_q, .. }) in self.places.iter().enumerate() {
            let (rows, splits) = rows_and_splits(&self.shape, *n_q, self.len_of(place));
            self.lookups[*index] = Lookup { place, first, rows, splits };
            let entries = n_q.div_ceil(rows).saturating_mul(n_kv_heads).saturating_mul(splits);
            first = first.saturating_add(entries);
        }
        if self.items.len() > u32::MAX as usize || first > isize::MAX as usize / 4 {
            return Err(BatchError::TooLarge { what: "items" });
        }
        self.parts = vec![u32::MAX; first];
        for (number, item) in self.items.iter().enumerate() {
            for place in item.sequences.clone() {
                let Lookup { first, rows, splits, .. } = self.lookups[self.places[place].index];
                let split = if splits > 1 { item.positions.start / SPLIT } else { 0 };
                for head in item.heads.clone() {
                    let tile = item.rows.start / rows * n_kv_heads + head;
                    let part = &mut self.parts[first + tile * splits + split];
                    debug_assert_eq!(*part, u32::MAX, "each state has one item");
                    *part = number as u32;
                }
            }
        }
        debug_assert!(!self.parts.contains(&u32::MAX), "each state has an item");
        Ok(())
    }
}

/// Items of a plan at most: those of a thousand sequences of a million positions and 32 heads, which are
/// some gigabytes; less where memory is small.
const MOST_ITEMS: usize = if usize::BITS >= 64 { 1 << 26 } else { 1 << 18 };

/// The first row of each sequence, and how many there are, where all arrays can be had.
fn offsets(shape: &GqaShape, sequences: &[SequenceRows]) -> Result<Vec<usize>, BatchError> {
    let kv = shape.kv();
    let mut offsets = Vec::with_capacity(sequences.len() + 1);
    let mut total = 0_usize;
    offsets.push(0);
    let mut items = 0_usize;
    for sequence in sequences {
        fits("positions", sequence.len.checked_mul(kv.k_row_len().max(kv.v_row_len())))?;
        let row = shape.q_row_len().max(shape.out_row_len());
        let rows = total.checked_add(sequence.rows);
        fits("query rows", rows.and_then(|rows| rows.checked_mul(row)))?;
        total += sequence.rows;
        offsets.push(total);
        // As many as there can be, before the first is made: a length may be anybody's claim.
        let (rows, splits) = rows_and_splits(shape, sequence.rows, sequence.len);
        let pieces = sequence.rows.div_ceil(rows).saturating_mul(splits);
        items = items.saturating_add(pieces.saturating_mul(kv.n_kv_heads()));
        if items > MOST_ITEMS {
            return Err(BatchError::TooLarge { what: "items" });
        }
    }
    Ok(offsets)
}

/// Of a sequence, the query rows in an item and the splits of its positions.
fn rows_and_splits(shape: &GqaShape, n_q: usize, len: usize) -> (usize, usize) {
    if few_rows(shape, n_q) {
        (n_q.max(1), len.div_ceil(SPLIT).max(1))
    } else {
        (ItemSize::new(shape, n_q).rows, 1)
    }
}

/// Whether so many numbers are less than all bytes.
fn fits(what: &'static str, numbers: Option<usize>) -> Result<(), BatchError> {
    match numbers {
        Some(numbers) if numbers <= isize::MAX as usize / 8 => Ok(()),
        _ => Err(BatchError::TooLarge { what }),
    }
}

#[cfg(test)]
mod tests;
