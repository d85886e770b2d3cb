//! A workload in paged memory, ready to be asked again and again.

use core::error::Error;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::limits;
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::workloads::Workload;
use paged_kv::{Element, GqaShape, KvShape, Level};

use super::inputs::Inputs;

/// How a workload is held and asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) block_size: usize,
    pub(crate) level: Level,
    /// Copies of all keys and values. With several, a call finds nothing of its own in the caches.
    pub(crate) copies: usize,
}

/// All sequences of a workload, in as many copies as wished, and the memory that calls need.
#[derive(Debug)]
pub(crate) struct Problem<'a, E: Element> {
    workload: Workload,
    inputs: &'a Inputs,
    /// What calls and reads are done with.
    pub(crate) level: Level,
    store: PagedKvStore<E>,
    /// `[copies][batch]`.
    sequences: Vec<PagedKvCache>,
    out: Vec<f32>,
    scratch: Vec<f32>,
}

impl<'a, E: Element> Problem<'a, E> {
    /// Writes all keys and values into blocks in random order.
    ///
    /// The copies are other sequences of the same store: one mapping of memory, large enough for
    /// huge pages where the system has them to give.
    pub(crate) fn new(
        workload: &Workload,
        inputs: &'a Inputs,
        setup: Setup,
    ) -> Result<Self, Box<dyn Error>> {
        let Workload { batch, sizes, .. } = *workload;
        let shape = KvShape::square(setup.block_size, sizes.n_kv_heads, sizes.k_width)?;
        let blocks = setup.copies * batch * shape.blocks_for(sizes.len);
        let mut store = PagedKvStore::with_shape(shape, blocks)?;
        shuffle(&mut store)?;
        let mut sequences = Vec::new();
        for _ in 0..setup.copies {
            let k = inputs.k.chunks(sizes.len * shape.k_row_len());
            let v = inputs.v.chunks(sizes.len * shape.v_row_len());
            for (k, v) in k.zip(v) {
                let mut sequence = PagedKvCache::new();
                sequence.append(&mut store, k, v, sizes.len)?;
                sequences.push(sequence);
            }
        }
        let shape = GqaShape::new(shape, sizes.n_heads())?;
        Ok(Problem {
            workload: *workload,
            inputs,
            level: setup.level,
            store,
            sequences,
            out: vec![0.0; batch * sizes.n_q * shape.out_row_len()],
            scratch: vec![0.0; attention_scratch_len(&shape, sizes.n_q)],
        })
    }

    /// Attends, once for each sequence. The one place where this program calls attention.
    pub(crate) fn call(&mut self, copy: usize) {
        let Problem { workload, inputs, level, store, sequences, out, scratch } = self;
        let n_heads = workload.sizes.n_heads();
        let sequences = &sequences[copy * workload.batch..][..workload.batch];
        let options = AttentionOptions::new().level(*level);
        let q = inputs.q.chunks(inputs.q.len() / workload.batch);
        let out = out.chunks_mut(inputs.q.len() / workload.batch);
        for ((sequence, q), out) in sequences.iter().zip(q).zip(out) {
            causal_gqa_attention_paged_into(q, store, sequence, n_heads, &options, out, scratch)
                .expect("a legal call");
        }
    }

    /// Reads what a call reads, and does nothing with it.
    pub(crate) fn read(&self, copy: usize) -> f32 {
        let read = |sequence| limits::read_sequence(self.level, &self.store, sequence);
        self.sequences[copy * self.workload.batch..][..self.workload.batch]
            .iter()
            .map(read)
            .fold(f32::NEG_INFINITY, f32::max)
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
fn shuffle<E: Element>(store: &mut PagedKvStore<E>) -> Result<(), Box<dyn Error>> {
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
