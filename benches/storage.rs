//! What rows, blocks and page groups cost.
//!
//! - `push` and `append`: one position, and 512 of them, into blocks of 16 and 64; 8 KV heads of
//!   128 in `f32`.
//! - `groups`: taking and giving back page groups alone, under a reader's guard and on two threads.
//!   Neither may wait for readers.
//! - `pool`: decode over eight blocks, in a store of eight and in one of a million. Only the context
//!   may count, so the ratio of the two is also asserted.
//!
//! Each is checked before it is timed: rows are read back, counts are counted, decode is compared
//! with the oracle.

use core::hint::black_box;
use core::time::Duration;
use std::thread;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::GqaShape;
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedKvCache, PagedKvStore, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Sizes, attention};

const BLOCK_SIZES: [usize; 2] = [16, 64];
const KV_HEADS: usize = 8;
const WIDTH: usize = 128;
const ROW: usize = KV_HEADS * WIDTH;

fn push(c: &mut Criterion) {
    let mut bench = c.benchmark_group("push");
    let (k, v) = (Numbers::new(1).normals(ROW), Numbers::new(2).normals(ROW));
    for block_size in BLOCK_SIZES {
        let (mut store, mut cache) = open(block_size);
        cache.push(&mut store, &k, &v).expect("room");
        check_rows(&store, &cache, &k, &v);
        bench.throughput(Throughput::Elements(1));
        bench.bench_function(BenchmarkId::from_parameter(block_size), |b| {
            b.iter(|| {
                if cache.seq_len() == 512 {
                    cache.truncate(&mut store, 0).expect("its own store");
                }
                cache.push(&mut store, black_box(&k), black_box(&v))
            });
        });
    }
    bench.finish();
}

fn append(c: &mut Criterion) {
    let mut bench = c.benchmark_group("append-512");
    let (k, v) = (Numbers::new(1).normals(512 * ROW), Numbers::new(2).normals(512 * ROW));
    for block_size in BLOCK_SIZES {
        let (mut store, mut cache) = open(block_size);
        cache.append(&mut store, &k, &v, 512).expect("room");
        check_rows(&store, &cache, &k, &v);
        bench.throughput(Throughput::Elements(512));
        bench.bench_function(BenchmarkId::from_parameter(block_size), |b| {
            b.iter(|| {
                cache.truncate(&mut store, 0).expect("its own store");
                cache.append(&mut store, black_box(&k), black_box(&v), 512)
            });
        });
    }
    bench.finish();
}

/// A store for 512 positions, and an empty sequence.
fn open(block_size: usize) -> (PagedKvStore, PagedKvCache) {
    (PagedKvStore::new(block_size, 512 / block_size, KV_HEADS, WIDTH), PagedKvCache::new())
}

fn check_rows(store: &PagedKvStore, cache: &PagedKvCache, k: &[f32], v: &[f32]) {
    let mut row = [0.0; WIDTH];
    for position in 0..cache.seq_len() {
        for head in 0..KV_HEADS {
            let at = position * ROW + head * WIDTH;
            cache.copy_k_row(store, position, head, &mut row).expect("a row");
            assert_eq!(row, k[at..at + WIDTH]);
            cache.copy_v_row(store, position, head, &mut row).expect("a row");
            assert_eq!(row, v[at..at + WIDTH]);
        }
    }
}

fn groups(c: &mut Criterion) {
    let mut bench = c.benchmark_group("groups");
    // As many layers as a small model has.
    let shared = SharedPagedKv::new(16, 16, 64, 1, 16);
    turn_over(&shared, 100);
    assert_eq!(shared.free_groups(), 64);
    bench.bench_function("alone", |b| b.iter(|| turn_over(&shared, 1)));
    let reader = shared.read(7);
    bench.bench_function("under-a-reader", |b| b.iter(|| turn_over(&shared, 1)));
    drop(reader);
    bench.bench_function("two-threads", |b| {
        b.iter_custom(|rounds| {
            let start = Instant::now();
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| turn_over(&shared, rounds));
                }
            });
            start.elapsed()
        });
    });
    assert_eq!(shared.free_groups(), 64);
    bench.finish();
}

/// A group comes, gets a second holder, and goes.
fn turn_over(shared: &SharedPagedKv, rounds: u64) {
    for _ in 0..rounds {
        let group = shared.acquire_group().expect("64 are enough for two");
        shared.retain_group(group);
        assert!(!shared.release_group(group));
        assert!(shared.release_group(group));
    }
}

fn pool(c: &mut Criterion) {
    // 2 KiB a block: the large store is 2 GiB of address space, of which eight blocks are touched.
    let sizes = Sizes { n_kv_heads: 1, group: 4, k_width: 16, v_width: 16, n_q: 1, len: 128 };
    let case = Case::random(sizes, 0, 3);
    let mut small = Pool::new(&case, 8);
    let mut large = Pool::new(&case, 1 << 20);
    for pool in [&mut small, &mut large] {
        pool.decode();
        let truth = attention(&case);
        for (at, (have, want)) in pool.out.iter().zip(&truth.out).enumerate() {
            let error = (f64::from(*have) - want).abs();
            assert!(error <= 2e-6 * truth.most[at / 16], "number {at} is off by {error:e}");
        }
    }

    // The two take turns, and the best of many rounds counts, so that neither a busy machine nor
    // the order decides.
    let (mut few, mut many) = (Duration::MAX, Duration::MAX);
    for _ in 0..500 {
        for (pool, best) in [(&mut small, &mut few), (&mut large, &mut many)] {
            let start = Instant::now();
            for _ in 0..16 {
                pool.decode();
            }
            *best = (*best).min(start.elapsed());
        }
    }
    let ratio = many.as_secs_f64() / few.as_secs_f64();
    println!("decode in a pool of a million blocks takes {ratio:.2} times that of eight");
    assert!(ratio < 1.5, "decode must not grow with the pool: {few:?} against {many:?}");

    let mut bench = c.benchmark_group("pool");
    bench.bench_function("of-8", |b| b.iter(|| small.decode()));
    bench.bench_function("of-a-million", |b| b.iter(|| large.decode()));
    bench.finish();
}

/// A sequence in the last blocks of a store, whose other blocks are held by somebody else.
struct Pool<'a> {
    case: &'a Case,
    store: PagedKvStore,
    cache: PagedKvCache,
    out: Vec<f32>,
    scratch: Vec<f32>,
}

impl<'a> Pool<'a> {
    fn new(case: &'a Case, blocks: usize) -> Self {
        let mut store = PagedKvStore::new(16, blocks, 1, 16);
        let mut other = PagedKvCache::new();
        other.reserve(&mut store, (blocks - 8) * 16).expect("all but eight");
        let mut cache = PagedKvCache::new();
        cache.append(&mut store, &case.k, &case.v, case.sizes.len).expect("eight blocks");
        assert_eq!(store.free_block_count(), 0);
        let shape = GqaShape::new(store.shape(), case.sizes.n_heads()).expect("a shape");
        let scratch = vec![0.0; attention_scratch_len(&shape, 1)];
        Pool { case, store, cache, out: vec![0.0; shape.out_row_len()], scratch }
    }

    fn decode(&mut self) {
        causal_gqa_attention_paged_into(
            black_box(&self.case.q),
            &self.store,
            &self.cache,
            self.case.sizes.n_heads(),
            &AttentionOptions::new(),
            &mut self.out,
            &mut self.scratch,
        )
        .expect("a legal call");
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = push, append, groups, pool
}
criterion_main!(benches);
