//! A batch by one plan against its sequences one after the other, and shared prefixes against the
//! same blocks read again for each sequence.
//!
//! Decode of one row each. `cold` batches are larger than the caches and are read from memory; the
//! others stay in the last cache. Executors: the caller alone, and a pool of two. Every result is
//! compared by its bits with that of each sequence alone before it is timed;
//! `cargo bench --features std --bench batch -- --test` does that and runs each call once.

use core::hint::black_box;
use core::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{
    BatchLayer, BatchPlan, Executor, Inline, SequenceRows, ThreadPool, shared_prefixes,
};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{GqaShape, KvShape};

struct World {
    shape: GqaShape,
    store: PagedKvStore,
    caches: Vec<PagedKvCache>,
    q: Vec<f32>,
}

/// Query heads, KV heads, width.
type Heads = (usize, usize, usize);

impl World {
    /// So many sequences of `shared` positions in the same blocks and `own` behind them.
    fn new((n_heads, n_kv_heads, width): Heads, count: usize, shared: usize, own: usize) -> World {
        let kv = KvShape::square(64, n_kv_heads, width).expect("a shape");
        let shape = GqaShape::new(kv, n_heads).expect("heads divide");
        let blocks = kv.blocks_for(shared) + count * (kv.blocks_for(own) + 1);
        let mut store = PagedKvStore::with_shape(kv, blocks).expect("there is memory");
        let mut numbers = Numbers::new(1);
        // Rows repeat, which changes no time; drawing them all would take longer than the bench.
        let rows = numbers.normals(64 * kv.k_row_len());
        let append = |store: &mut PagedKvStore, cache: &mut PagedKvCache, mut n: usize| {
            while n > 0 {
                let some = n.min(64);
                let rows = &rows[..some * kv.k_row_len()];
                cache.append(store, rows, rows, some).expect("there is room");
                n -= some;
            }
        };
        let mut prefix = PagedKvCache::new();
        append(&mut store, &mut prefix, shared);
        let mut caches: Vec<_> =
            (0..count).map(|_| prefix.fork(&mut store).expect("few holders")).collect();
        for cache in &mut caches {
            append(&mut store, cache, own);
        }
        let q = numbers.normals(count * shape.q_row_len());
        World { shape, store, caches, q }
    }

    fn plan(&self, sharing: bool) -> BatchPlan {
        let rows = |cache: &PagedKvCache| SequenceRows { len: cache.seq_len(), rows: 1 };
        let sequences: Vec<_> = self.caches.iter().map(rows).collect();
        let caches: Vec<_> = self.caches.iter().collect();
        let shared = if sharing { shared_prefixes(64, &caches) } else { Vec::new() };
        BatchPlan::with_shared(self.shape, &sequences, &shared).expect("it is not large")
    }

    /// One after the other, by the door for one sequence.
    fn alone(&self, out: &mut [f32], scratch: &mut [f32]) {
        let options = AttentionOptions::new();
        let heads = self.shape.n_heads();
        let q = self.q.chunks_exact(self.shape.q_row_len());
        let out = out.chunks_exact_mut(self.shape.out_row_len());
        for ((cache, q), out) in self.caches.iter().zip(q).zip(out) {
            causal_gqa_attention_paged_into(q, &self.store, cache, heads, &options, out, scratch)
                .expect("a legal call");
        }
    }
}

fn compare(c: &mut Criterion, name: &str, world: &World, sharing: bool) {
    let pool = ThreadPool::new(2);
    let executors: [(&str, &dyn Executor); 2] = [("1-thread", &Inline), ("2-threads", &pool)];
    let mut bench = c.benchmark_group(format!("batch/{name}"));
    let sequences: Vec<_> = world.caches.iter().collect();
    let layer = BatchLayer { store: &world.store, sequences: &sequences, q: &world.q };
    let options = AttentionOptions::new();
    let mut want = vec![0.0; world.caches.len() * world.shape.out_row_len()];
    let mut scratch = vec![0.0; attention_scratch_len(&world.shape, 1)];
    world.alone(&mut want, &mut scratch);
    let mut out = want.clone();
    bench.bench_function("alone/1-thread", |b| {
        b.iter(|| world.alone(black_box(&mut out), &mut scratch));
    });
    let plans = [("apart", world.plan(false)), ("shared", world.plan(true))];
    for (kind, plan) in &plans[..1 + usize::from(sharing)] {
        let mut scratch = vec![0.0; plan.scratch_len()];
        for (threads, executor) in executors {
            let mut attend = || {
                let out = black_box(&mut out[..]);
                plan.attend(&layer, &options, out, &mut scratch, executor).expect("as planned");
            };
            attend();
            bench.bench_function(format!("{kind}/{threads}"), |b| b.iter(&mut attend));
            assert_eq!(out, want, "{kind}, {threads}");
        }
    }
    bench.finish();
}

const G4: Heads = (32, 8, 128);
const G1: Heads = (16, 16, 64);

fn decode(c: &mut Criterion) {
    compare(c, "32-8-d128/8x4096-cold", &World::new(G4, 8, 0, 4096), false);
    compare(c, "32-8-d128/8x256", &World::new(G4, 8, 0, 256), false);
}

/// Down to where nothing should be lost: two sequences, and a prefix that ends inside a split.
fn prefixes(c: &mut Criterion) {
    for (heads, name) in [(G4, "32-8-d128"), (G1, "16-16-d64")] {
        for (count, shared, own) in [
            (8, 4096, 64),
            (8, 2048, 64),
            (2, 2048, 64),
            (8, 448, 64),
            (8, 320, 192),
            (2, 512, 512),
        ] {
            let world = World::new(heads, count, shared, own);
            compare(c, &format!("{name}/{count}x{shared}+{own}"), &world, true);
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = decode, prefixes
}
criterion_main!(benches);
