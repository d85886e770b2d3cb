//! A workload in paged memory, ready to be asked again and again.

use core::error::Error;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{BatchLayer, BatchPlan, Executor, SequenceRows};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::limits;
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::workloads::Workload;
use paged_kv::{Element, GqaShape, KvShape, Level};

use super::inputs::Inputs;

/// Sequences in a workload at most: their references stand on the stack during a call.
const MOST_BATCH: usize = 8;

/// Shares of a read by several threads at most.
const MOST_SHARES: usize = 1024;

/// How a workload is held and asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) block_size: usize,
    pub(crate) level: Level,
    /// Copies of all keys and values. With several, a call finds nothing of its own in the caches.
    pub(crate) copies: usize,
}

/// Who does the work of a problem.
pub(crate) type Workers<'a> = &'a (dyn Executor + Sync);

/// All sequences of a workload, in as many copies as wished, and the memory that calls need.
pub(crate) struct Problem<'a, E: Element> {
    workload: Workload,
    inputs: &'a Inputs,
    /// What calls and reads are done with.
    pub(crate) level: Level,
    workers: Workers<'a>,
    store: PagedKvStore<E>,
    /// `[copies][batch]`.
    sequences: Vec<PagedKvCache>,
    /// None for one sequence on one thread, which has a door of its own.
    plan: Option<BatchPlan>,
    out: Vec<f32>,
    scratch: Vec<f32>,
}

impl<'a, E: Element> Problem<'a, E> {
    /// Writes all keys and values into blocks in random order, and makes the plan of a batch.
    ///
    /// The copies are other sequences of the same store: one mapping of memory, large enough for
    /// huge pages where the system has them to give.
    pub(crate) fn new(
        workload: &Workload,
        inputs: &'a Inputs,
        setup: Setup,
        workers: Workers<'a>,
    ) -> Result<Self, Box<dyn Error>> {
        let Workload { batch, sizes, .. } = *workload;
        if !(1..=MOST_BATCH).contains(&batch) {
            return Err(format!("{batch} sequences, not 1 to {MOST_BATCH}").into());
        }
        let shape = KvShape::square(setup.block_size, sizes.n_kv_heads, sizes.k_width)?;
        let blocks = setup.copies * batch * shape.blocks_for(sizes.len);
        let mut store = PagedKvStore::with_shape(shape, blocks)?;
        shuffle(&mut store)?;
        let mut sequences = Vec::new();
        for _ in 0..setup.copies {
            let k = inputs.k.chunks(sizes.len * shape.k_row_len());
            let v = inputs.v.chunks(sizes.len * shape.v_row_len());
            for (k, v) in k.zip(v).take(batch) {
                let mut sequence = PagedKvCache::new();
                sequence.append(&mut store, k, v, sizes.len)?;
                sequences.push(sequence);
            }
        }
        let shape = GqaShape::new(shape, sizes.n_heads())?;
        let rows = vec![SequenceRows { len: sizes.len, rows: sizes.n_q }; batch];
        let plan = if batch > 1 || workers.threads() > 1 {
            Some(BatchPlan::new(shape, &rows)?)
        } else {
            None
        };
        let scratch_len = match &plan {
            Some(plan) => plan.scratch_len(),
            None => attention_scratch_len(&shape, sizes.n_q),
        };
        Ok(Problem {
            workload: *workload,
            inputs,
            level: setup.level,
            workers,
            store,
            sequences,
            plan,
            out: vec![0.0; batch * sizes.n_q * shape.out_row_len()],
            scratch: vec![0.0; scratch_len],
        })
    }

    /// Attends, all sequences at once. The one place where this program calls attention.
    pub(crate) fn call(&mut self, copy: usize) {
        let Problem { workload, inputs, level, workers, store, sequences, plan, out, scratch } =
            self;
        let n_heads = workload.sizes.n_heads();
        let sequences = &sequences[copy * workload.batch..][..workload.batch];
        let options = AttentionOptions::new().level(*level);
        let Some(plan) = plan else {
            let sequence = &sequences[0];
            let (q, out) = (&inputs.q, &mut out[..]);
            causal_gqa_attention_paged_into(q, store, sequence, n_heads, &options, out, scratch)
                .expect("a legal call");
            return;
        };
        let mut members = [&sequences[0]; MOST_BATCH];
        members.iter_mut().zip(sequences).for_each(|(member, sequence)| *member = sequence);
        let sequences = &members[..workload.batch];
        let layer = BatchLayer { store, sequences, q: &inputs.q };
        plan.attend(&layer, &options, &mut out[..], scratch, *workers).expect("as planned");
    }

    /// Reads what a call reads, with the same threads, and does nothing with it.
    pub(crate) fn read(&self, copy: usize) -> f32 {
        let Problem { level, store, .. } = self;
        let sequences = &self.sequences[copy * self.workload.batch..][..self.workload.batch];
        let larger = f32::max;
        if self.workers.threads() == 1 {
            let read = |sequence| limits::read_sequence(*level, store, sequence);
            return sequences.iter().map(read).fold(f32::NEG_INFINITY, larger);
        }
        // Eight shares for each thread: who is slower reads fewer.
        let blocks = store.shape().blocks_for(self.workload.sizes.len);
        let shares = (8 * self.workers.threads()).min(blocks).min(MOST_SHARES);
        let mut most = [f32::NEG_INFINITY; MOST_SHARES];
        self.workers.for_each_chunk(&mut most[..shares], 1, &|share, most| {
            let blocks = share * blocks / shares..(share + 1) * blocks / shares;
            let read = |sequence| limits::read_blocks(*level, store, sequence, blocks.clone());
            most[0] = sequences.iter().map(read).fold(f32::NEG_INFINITY, larger);
        });
        most.into_iter().fold(f32::NEG_INFINITY, larger)
    }

    /// Who does the work.
    pub(crate) fn workers(&self) -> Workers<'a> {
        self.workers
    }

    /// What the last call wrote: `[batch][n_q][n_heads][v_width]`.
    pub(crate) fn answer(&self) -> &[f32] {
        &self.out
    }

    /// Bytes of keys and values in one copy, as they are stored.
    pub(crate) fn kv_bytes(&self) -> f64 {
        let shape = self.store.shape();
        let block = shape.block_size() * (shape.k_row_len() + shape.v_row_len());
        self.workload.kv_numbers() as f64 * self.store.bytes_per_block() as f64 / block as f64
    }

    /// All keys and values as the store gives them back, in the order of the inputs.
    pub(crate) fn stored(&self) -> (Vec<f32>, Vec<f32>) {
        let sizes = self.workload.sizes;
        let (mut k, mut v) = (self.inputs.k.clone(), self.inputs.v.clone());
        let rows = k.chunks_mut(sizes.k_width).zip(v.chunks_mut(sizes.v_width));
        let places = self.sequences.iter().flat_map(|sequence| {
            (0..sizes.len * sizes.n_kv_heads)
                .map(move |row| (sequence, row / sizes.n_kv_heads, row % sizes.n_kv_heads))
        });
        for ((k, v), (sequence, position, head)) in rows.zip(places) {
            sequence.copy_k_row(&self.store, position, head, k).expect("a row that was written");
            sequence.copy_v_row(&self.store, position, head, v).expect("a row that was written");
        }
        (k, v)
    }
}

/// Brings the free blocks into random order: others take one each and give them back.
pub(crate) fn shuffle<E: Element>(store: &mut PagedKvStore<E>) -> Result<(), Box<dyn Error>> {
    let mut others: Vec<_> = (0..store.total_blocks()).map(|_| PagedKvCache::new()).collect();
    for other in &mut others {
        other.reserve(store, 1)?;
    }
    Numbers::new(7).shuffle(&mut others);
    for other in &mut others {
        other.release(store)?;
    }
    Ok(())
}
