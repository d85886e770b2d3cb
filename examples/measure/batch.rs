//! Eight sequences that decode, with and without a prefix in common: one after the other, by one
//! plan, and by one that reads the prefix once.

use core::error::Error;
use core::hint::black_box;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows, ThreadPool, shared_prefixes};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::limits;
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::Sizes;
use paged_kv::internal::workloads::Workload;
use paged_kv::{Element, GqaShape, Int4, Int8, KvShape, Level, bf16, f16};

use super::case::{Case, Heads, Rows, Spec};
use super::cores;
use super::measure::seconds;
use super::options::Options;
use super::problem::{Workers, shuffle};
use super::subject::{Ask, Subject};

const COUNT: usize = 8;
const BLOCK_SIZE: usize = 64;

/// `shared` positions in the same blocks, and `own` behind them.
pub(crate) fn case<'a>(
    heads: Heads,
    shared: usize,
    own: usize,
    pool: &'a ThreadPool,
    options: &Options,
) -> Result<Case<'a>, Box<dyn Error>> {
    let (n_heads, n_kv_heads, width) = heads;
    let group = n_heads / n_kv_heads;
    let len = shared + own;
    let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q: 1, len };
    let workload = Workload { name: "batch", batch: COUNT, sizes };
    let kind = "batch";
    let spec = Spec { kind, workload, heads, block_size: BLOCK_SIZE, rows: Rows::Warm };
    let mut subjects: Vec<Box<dyn Subject + 'a>> = Vec::new();
    for dtype in ["f32", "f16", "bf16", "int8", "int4"] {
        if options.wants_type(dtype) {
            subjects.push(match dtype {
                "f16" => Box::new(Batch::<f16>::new(&spec, shared, pool)?),
                "bf16" => Box::new(Batch::<bf16>::new(&spec, shared, pool)?),
                "int8" => Box::new(Batch::<Int8>::new(&spec, shared, pool)?),
                "int4" => Box::new(Batch::<Int4>::new(&spec, shared, pool)?),
                _ => Box::new(Batch::<f32>::new(&spec, shared, pool)?),
            });
        }
    }
    Ok(Case::of(spec, subjects, |dtype| options.levels(dtype, false)))
}

struct Batch<'a, E: Element> {
    shape: GqaShape,
    store: PagedKvStore<E>,
    sequences: Vec<PagedKvCache>,
    shared: usize,
    flops: f64,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Vec<f32>,
    /// Where sequences are looked at by themselves, and together.
    plans: [BatchPlan; 2],
    pool: &'a ThreadPool,
}

impl<'a, E: Element> Batch<'a, E> {
    fn new(spec: &Spec, shared: usize, pool: &'a ThreadPool) -> Result<Self, Box<dyn Error>> {
        let (n_heads, n_kv_heads, width) = spec.heads;
        let own = spec.workload.sizes.len - shared;
        let kv = KvShape::square(BLOCK_SIZE, n_kv_heads, width)?;
        let shape = GqaShape::new(kv, n_heads)?;
        let blocks = kv.blocks_for(shared) + COUNT * (kv.blocks_for(own) + 1);
        let mut store = PagedKvStore::with_shape(kv, blocks)?;
        shuffle(&mut store)?;
        let mut numbers = Numbers::new(1);
        let rows = numbers.normals(BLOCK_SIZE * kv.k_row_len());
        let append = |store: &mut PagedKvStore<E>, sequence: &mut PagedKvCache, n: usize| {
            (0..n / BLOCK_SIZE).try_for_each(|_| sequence.append(store, &rows, &rows, BLOCK_SIZE))
        };
        let mut prefix = PagedKvCache::new();
        append(&mut store, &mut prefix, shared)?;
        let mut sequences = Vec::new();
        for _ in 0..COUNT {
            let mut sequence = prefix.fork(&mut store)?;
            append(&mut store, &mut sequence, own)?;
            sequences.push(sequence);
        }
        let each = vec![SequenceRows { len: shared + own, rows: 1 }; COUNT];
        let members: Vec<_> = sequences.iter().collect();
        let plans = [
            BatchPlan::new(shape, &each)?,
            BatchPlan::with_shared(shape, &each, &shared_prefixes(BLOCK_SIZE, &members))?,
        ];
        let most = plans.iter().map(BatchPlan::scratch_len).max().unwrap_or(0);
        Ok(Batch {
            shape,
            store,
            sequences,
            shared,
            flops: spec.workload.flops(),
            q: numbers.normals(COUNT * shape.q_row_len()),
            out: vec![0.0; COUNT * shape.out_row_len()],
            scratch: vec![0.0; most.max(attention_scratch_len(&shape, 1))],
            plans,
            pool,
        })
    }

    fn alone(&mut self, level: Level) {
        let Batch { shape, store, sequences, q, out, scratch, .. } = self;
        let options = AttentionOptions::new().level(level);
        let q = q.chunks_exact(shape.q_row_len());
        let out = out.chunks_exact_mut(shape.out_row_len());
        for ((sequence, q), out) in sequences.iter().zip(q).zip(out) {
            let heads = shape.n_heads();
            causal_gqa_attention_paged_into(q, store, sequence, heads, &options, out, scratch)
                .expect("a legal call");
        }
    }

    fn together(&mut self, level: Level, plan: usize, threads: usize) {
        let Batch { store, sequences, q, out, scratch, plans, pool, .. } = self;
        let options = AttentionOptions::new().level(level);
        let members: [&PagedKvCache; COUNT] = core::array::from_fn(|index| &sequences[index]);
        let layer = BatchLayer { store, sequences: &members, q };
        let workers: Workers<'_> = if threads > 1 { *pool } else { &Inline };
        plans[plan].attend(&layer, &options, &mut out[..], scratch, workers).expect("as planned");
    }

    /// Every block once, however many hold it.
    fn read(&self, level: Level) -> f32 {
        let shared = self.shape.kv().blocks_for(self.shared);
        let blocks = self.store.shape().blocks_for(self.sequences[0].seq_len());
        let mut most = f32::NEG_INFINITY;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let first = if index == 0 { 0 } else { shared };
            most = most.max(limits::read_blocks(level, &self.store, sequence, first..blocks));
        }
        most
    }
}

impl<E: Element> Subject for Batch<'_, E> {
    fn dtype(&self) -> &'static str {
        E::NAME
    }

    fn ways(&self) -> &'static [(&'static str, usize)] {
        if self.shared == 0 {
            &[("alone", 1), ("plan", 1), ("plan", 2)]
        } else {
            &[("alone", 1), ("plan", 1), ("shared", 1), ("plan", 2), ("shared", 2)]
        }
    }

    fn positions(&self) -> usize {
        COUNT * self.sequences[0].seq_len()
    }

    fn flops(&self) -> f64 {
        self.flops
    }

    fn bytes(&self) -> Option<f64> {
        let own = self.sequences[0].seq_len() - self.shared;
        let blocks = (self.shared + COUNT * own) / BLOCK_SIZE;
        Some((blocks * self.store.bytes_per_block()) as f64)
    }

    fn copies(&self) -> usize {
        1
    }

    fn time(&mut self, ask: Ask, _: usize, again: usize) -> f64 {
        let Ask::Call { level, way } = ask else {
            let Ask::Read(level) = ask else { unreachable!("there are two") };
            let read = |most: f32, _| most.max(self.read(black_box(level)));
            return seconds(|| (0..again).fold(0.0, read)) / again as f64;
        };
        let (way, threads) = self.ways()[way];
        let held = (threads > 1).then(cores::held);
        let all = seconds(|| {
            for _ in 0..again {
                match way {
                    "alone" => self.alone(level),
                    "plan" => self.together(level, 0, threads),
                    _ => self.together(level, 1, threads),
                }
            }
        });
        drop(held);
        all / again as f64
    }
}
