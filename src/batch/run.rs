//! A plan at work: items on whichever threads, then answers from the states they left.

use super::error::BatchError;
use super::executor::{Executor, Inline};
use super::plan::{BatchPlan, Cell};
use crate::attention::{AttentionOptions, Job, Members, Output, Resolved, States, Task};
use crate::cut;
use crate::element::Element;
use crate::error::{AttentionError, WrongStore};
use crate::kernel::state::{Head, finish, log_sum_exp, merge};
use crate::simd::{Kernel, Level, Simd};
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;

/// Numbers that a chunk of answers is merged from at least: 2^15 take a few microseconds.
const ANSWER_NUMBERS: usize = 1 << 15;

/// As many chunks of answers as there are of items, at most.
const MOST_ANSWER_CHUNKS: usize = 256;

/// Columns of a row that are merged at once, on the stack: 1 KiB.
const STRIP: usize = 256;

/// One layer of a batch: where its keys and values are, and what is asked of them.
///
/// # Examples
///
/// ```
/// use paged_kv::GqaShape;
/// use paged_kv::attention::AttentionOptions;
/// use paged_kv::batch::{BatchError, BatchLayer, BatchPlan, Inline, SequenceRows};
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(64, 4, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[0.5; 2], &[0.5; 2])?;
/// let rows = [SequenceRows { len: 2, rows: 1 }];
/// let plan = BatchPlan::new(GqaShape::new(store.shape(), 1)?, &rows)?;
/// // The step's own position is not there yet.
/// let layer = BatchLayer { store: &store, sequences: &[&cache], q: &[0.5; 2] };
/// let refused = plan.attend(&layer, &AttentionOptions::new(), &mut [0.0; 2], &mut [], &Inline);
/// assert_eq!(refused, Err(BatchError::Length { sequence: 0, need: 2, have: 1 }));
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BatchLayer<'a, E: Element = f32> {
    /// The layer's store; of the shared layer, `&shared.read(layer)`.
    pub store: &'a PagedKvStore<E>,
    /// The sequences, as many and as long as were planned, in the same order.
    pub sequences: &'a [&'a PagedKvCache],
    /// `[rows][n_heads][k_width]`, the rows of one sequence after those of the one before.
    pub q: &'a [f32],
}

impl BatchPlan {
    /// Attends all sequences of the batch over one layer.
    ///
    /// Each row's result, bit by bit, is what
    /// [`causal_gqa_attention_paged_into`](crate::attention::causal_gqa_attention_paged_into)
    /// gives for its sequence alone with the same options, whatever else is in the batch and
    /// whoever works on it.
    ///
    /// `output` is [`out_len`](Self::out_len) numbers, `[rows][n_heads][v_width]`, and, if wanted,
    /// [`lse_len`](Self::lse_len) of log-sum-exp; `scratch` is at least
    /// [`scratch_len`](Self::scratch_len) long, and what is in it does not matter. Where there is
    /// little to do the executor is not asked ([`runs_inline`](Self::runs_inline)).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::GqaShape;
    /// use paged_kv::attention::{AttentionOptions, Output};
    /// use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows};
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 1);
    /// let (mut first, mut second) = (PagedKvCache::new(), PagedKvCache::new());
    /// first.append(&mut store, &[0.0; 2], &[1.0, 3.0], 2)?;
    /// second.append(&mut store, &[0.0; 2], &[5.0, 7.0], 2)?;
    /// let rows = [SequenceRows { len: 2, rows: 1 }, SequenceRows { len: 2, rows: 2 }];
    /// let plan = BatchPlan::new(GqaShape::new(store.shape(), 1)?, &rows)?;
    ///
    /// let (mut out, mut lse) = (vec![0.0; plan.out_len()], vec![0.0; plan.lse_len()]);
    /// let (output, options) = (Output::new(&mut out).lse(&mut lse), AttentionOptions::new());
    /// let layer = BatchLayer { store: &store, sequences: &[&first, &second], q: &[0.5; 3] };
    /// plan.attend(&layer, &options, output, &mut vec![0.0; plan.scratch_len()], &Inline)?;
    /// assert_eq!(out, [2.0, 5.0, 6.0]); // a row of the first, and two of the second
    /// assert_eq!(lse[1], 0.0); // the second's first row sees one key, whose score is 0
    /// # first.release(&mut store)?;
    /// # second.release(&mut store)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BatchError`], with which sequence, what was needed and what was there; then nothing was
    /// written.
    ///
    /// # Panics
    ///
    /// It does not; if the executor does, its panic goes on, and `out` and the LSE may be half
    /// written.
    ///
    /// # Cost
    ///
    /// Allocates nothing and takes no lock, beside what the executor does. Two or, with the LSE,
    /// three runs of the executor. Compares the block tables of sequences that share a prefix.
    pub fn attend<'o, E: Element>(
        &self,
        layer: &BatchLayer<'_, E>,
        options: &AttentionOptions<'_>,
        output: impl Into<Output<'o>>,
        scratch: &mut [f32],
        executor: &dyn Executor,
    ) -> Result<(), BatchError> {
        let (output, have) = (output.into(), scratch.len());
        let options = self.check(layer, options, &output, have)?;
        let Some(scratch) = scratch.get_mut(..self.scratch_len()) else { cut::out_of_bounds() };
        let executor = if self.runs_inline() { &Inline } else { executor };
        let (store, caches, places) = (layer.store, layer.sequences, &self.places);
        let members = Members::Batch { store, caches, places };
        let task = Task { shape: self.shape, options, q: layer.q, members };
        self.leave_states(&task, scratch, executor);
        self.answer(&task.options, scratch, output, executor);
        Ok(())
    }

    /// The first phase: every item leaves its states in the scratch.
    pub(super) fn leave_states<E: Element>(
        &self,
        task: &Task<'_, E>,
        scratch: &mut [f32],
        executor: &dyn Executor,
    ) {
        if self.items.is_empty() {
            return;
        }
        executor.for_each_chunk(scratch, self.chunk_len, &|index, chunk| {
            let (first, end) = (*cut::one(&self.chunks, index), *cut::one(&self.chunks, index + 1));
            let before = index * self.chunk_len;
            for number in first..end {
                let item = cut::one(&self.items, number);
                let start = *cut::one(&self.starts, number) - before;
                let (_, scratch) = cut::split(chunk, start);
                E::attend(&mut Job { task, item, scratch });
            }
        });
    }

    /// The second phase: every row's states are merged, in the order of positions, and written.
    pub(super) fn answer(
        &self,
        options: &Resolved<'_>,
        scratch: &[f32],
        output: Output<'_>,
        executor: &dyn Executor,
    ) {
        if self.lse_len() == 0 {
            return;
        }
        let (level, sinks) = (options.level, options.sinks);
        let cells = self.cells_in_chunk();
        let width = self.shape.kv().v_width();
        executor.for_each_chunk(output.out, cells * width, &|index, answers| {
            let first = index * cells;
            self.answer_rows(level, Answers { plan: self, scratch, sinks, first, answers });
        });
        if let Some(lse) = output.lse {
            executor.for_each_chunk(lse, cells, &|index, sums| {
                self.answer_sums(level, Sums { plan: self, scratch, first: index * cells, sums });
            });
        }
    }

    // Not generic, so that they are compiled here and not in a dependent's debug build.

    fn answer_rows(&self, level: Level, answers: Answers<'_>) {
        level.run(answers);
    }

    fn answer_sums(&self, level: Level, sums: Sums<'_>) {
        level.run(sums);
    }

    /// Rows of single heads that are answered by one call of an executor's work.
    fn cells_in_chunk(&self) -> usize {
        let cells = self.lse_len();
        let states = |(rows, lookup): (_, &super::plan::Lookup)| rows * lookup.splits;
        let rows = self.sequences.iter().map(|sequence| sequence.rows);
        let states: usize = rows.zip(&self.lookups).map(states).sum();
        let numbers = states.saturating_mul(self.shape.out_row_len());
        cells.div_ceil((numbers / ANSWER_NUMBERS).clamp(1, MOST_ANSWER_CHUNKS))
    }

    /// Merges the states of a row's columns from `column` on into `out`, those over earlier
    /// positions first: the order in which a call of one sequence closes its splits.
    #[inline(always)]
    fn merge_states<S: Simd>(
        &self,
        s: S,
        scratch: &[f32],
        cell: &Cell<'_>,
        column: usize,
        out: &mut [f32],
    ) -> Head {
        let mut head = Head::EMPTY;
        for number in cell.parts {
            let (part, numbers) = self.state(scratch, cell, *number);
            merge(s, &mut head, out, part, cut::part(numbers, column, out.len()));
        }
        head
    }

    /// The state that an item has left of a row.
    #[inline(always)]
    fn state<'s>(&self, scratch: &'s [f32], cell: &Cell<'_>, number: u32) -> (Head, &'s [f32]) {
        let number = number as usize;
        let item = cut::one(&self.items, number);
        let left = cut::from(scratch, *cut::one(&self.starts, number));
        let states = States::of(left, item.rows(&self.shape), self.shape.kv().v_width());
        let row = self.state_in(item, cell);
        (states.head(row), states.out(row))
    }

    /// Every check.
    fn check<'o, E: Element>(
        &self,
        layer: &BatchLayer<'_, E>,
        options: &AttentionOptions<'o>,
        output: &Output<'_>,
        scratch: usize,
    ) -> Result<Resolved<'o>, BatchError> {
        let (need, have) = (self.shape.kv(), layer.store.shape());
        if need != have {
            return Err(BatchError::Shape { need, have });
        }
        let options = options.resolve(&self.shape)?;
        self.check_sequences(layer, &options)?;
        self.check_shared(layer.sequences)?;
        options.check_trees(self.sequences.iter().map(|planned| planned.rows))?;
        let have = self.total_rows();
        if let Some(need) = options.query_rows
            && need != have
        {
            return Err(AttentionError::QueryRows { need, have }.into());
        }
        let (need, have) = (self.q_len(), layer.q.len());
        if need != have {
            return Err(BatchError::QueryLength { need, have });
        }
        let (need, have) = (self.out_len(), output.out.len());
        if need != have {
            return Err(AttentionError::OutLength { need, have }.into());
        }
        let need = self.lse_len();
        if let Some(lse) = &output.lse
            && lse.len() != need
        {
            return Err(AttentionError::LseLength { need, have: lse.len() }.into());
        }
        let (need, have) = (self.scratch_len(), scratch);
        if have < need {
            return Err(AttentionError::ScratchLength { need, have }.into());
        }
        Ok(options)
    }

    fn check_sequences<E: Element>(
        &self,
        layer: &BatchLayer<'_, E>,
        options: &Resolved<'_>,
    ) -> Result<(), BatchError> {
        let (need, have) = (self.sequences.len(), layer.sequences.len());
        if need != have {
            return Err(BatchError::Sequences { need, have });
        }
        for (sequence, (planned, cache)) in self.sequences.iter().zip(layer.sequences).enumerate() {
            let view = match cache.view(layer.store) {
                Ok(view) => view,
                Err(WrongStore { need, have }) => {
                    return Err(BatchError::WrongStore { sequence, need, have });
                }
            };
            let (need, have) = (planned.len, cache.seq_len());
            if need != have {
                return Err(BatchError::Length { sequence, need, have });
            }
            let (rows, len) = (planned.rows, planned.len);
            let needed = options.needed_positions(sequence, rows);
            if needed > len {
                let rows = needed;
                return Err(BatchError::TooManyQueryRows { sequence, rows, len });
            }
            if let Some(position) = options.freed_position(view.freed(), rows, len) {
                let oldest = view.freed().end;
                return Err(BatchError::PositionFreed { sequence, position, oldest });
            }
        }
        Ok(())
    }

    /// Whether the blocks that are read once for several sequences are those of all of them.
    fn check_shared(&self, caches: &[&PagedKvCache]) -> Result<(), BatchError> {
        for joint in &self.joints {
            let blocks = self.shape.kv().blocks_for(joint.positions);
            let index = |place: usize| cut::one(&self.places, place).index;
            let with = index(joint.places.start);
            let first = *cut::one(caches, with);
            for place in joint.places.clone().skip(1) {
                let sequence = index(place);
                let other = *cut::one(caches, sequence);
                let block = first.blocks_in_common(other);
                if block < blocks {
                    return Err(BatchError::NotShared { sequence, with, block });
                }
            }
        }
        Ok(())
    }
}

/// The kernel that writes rows.
struct Answers<'a> {
    plan: &'a BatchPlan,
    scratch: &'a [f32],
    sinks: Option<&'a [f32]>,
    /// The first row of a head, as they stand in the output.
    first: usize,
    answers: &'a mut [f32],
}

impl Kernel for Answers<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Answers { plan, scratch, sinks, first, answers } = self;
        let mut strip = [0.0; STRIP];
        let rows = answers.chunks_exact_mut(plan.shape.kv().v_width());
        for (index, answer) in (first..).zip(rows) {
            let cell = plan.cell(index);
            let sink = sinks.map(|sinks| *cut::one(sinks, cell.query_head));
            // Most rows of prompts: there is nothing to merge, and no need of a copy.
            if let [number] = *cell.parts {
                let (head, out) = plan.state(scratch, &cell, number);
                finish(s, head, out, sink, answer);
                continue;
            }
            for (column, answer) in (0..).step_by(STRIP).zip(answer.chunks_mut(STRIP)) {
                let out = cut::part_mut(&mut strip, 0, answer.len());
                let head = plan.merge_states(s, scratch, &cell, column, out);
                finish(s, head, out, sink, answer);
            }
        }
    }
}

/// The kernel that writes log-sum-exps.
struct Sums<'a> {
    plan: &'a BatchPlan,
    scratch: &'a [f32],
    first: usize,
    sums: &'a mut [f32],
}

impl Kernel for Sums<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Sums { plan, scratch, first, sums } = self;
        for (index, sum) in (first..).zip(sums) {
            let cell = plan.cell(index);
            *sum = log_sum_exp(plan.merge_states(s, scratch, &cell, 0, &mut []));
        }
    }
}

#[cfg(test)]
mod tests;
