//! What a request over all layers costs beside its rows, and what page groups cost those who decode.
//!
//! - `request`: room, a row, a commit, a fork of 1,000 blocks and giving those back. Then each of them
//!   in turn in the smallest pool that holds it and in one of four million blocks; the ratios are
//!   printed and asserted. `turn-of-8` and `turn-of-4-million` are all of it in a row.
//! - `beside-groups`: two threads decode while a third takes and gives back a million groups.
//!   Attention takes no part in that, so what the third costs is its share of the processor. Then
//!   under a reader who never lets go of a layer.

use core::hint::black_box;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use paged_kv::GqaShape;
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;

const LAYERS: usize = 16;
const KV_HEADS: usize = 8;
const WIDTH: usize = 128;
const ROW: usize = KV_HEADS * WIDTH;

fn request(c: &mut Criterion) {
    let mut bench = c.benchmark_group("request");
    let (k, v) = (Numbers::new(1).normals(ROW), Numbers::new(2).normals(ROW));
    let shared = SharedPagedKv::new(LAYERS, 16, 40, KV_HEADS, WIDTH);
    let mut sequence = PagedSequence::new(&shared);
    sequence.reserve(512).expect("40 blocks are 640 positions");
    bench.bench_function("push-in-one-layer", |b| {
        b.iter(|| {
            if sequence.cache(3).seq_len() == 512 {
                sequence.abandon();
            }
            sequence.push(3, black_box(&k), black_box(&v))
        });
    });
    sequence.release();
    sequence.reserve(8).expect("an empty pool");
    bench.bench_function("reserve-what-is-there", |b| b.iter(|| sequence.reserve(black_box(1))));
    bench.bench_function("reserve-a-block-of-16-layers-and-back", |b| {
        b.iter(|| {
            sequence.reserve(black_box(17)).expect("an empty pool");
            sequence.truncate(0).expect("it is empty");
        });
    });
    sequence.reserve(8).expect("an empty pool");
    bench.bench_function("commit", |b| b.iter(|| sequence.commit(black_box(0))));
    drop(sequence);
    assert_eq!(shared.free_groups(), 40);

    let wide = SharedPagedKv::new(1, 16, 1000, 1, 1);
    let mut sequence = PagedSequence::new(&wide);
    let rows = vec![1.0; 16_000];
    sequence.reserve(16_000).expect("an empty pool");
    sequence.append(0, &rows, &rows, 16_000).expect("room");
    sequence.commit(16_000).expect("written");
    bench.bench_function("fork-1000-blocks", |b| {
        b.iter_batched(|| (), |()| sequence.fork().expect("counts"), BatchSize::PerIteration);
    });
    bench.bench_function("release-1000-blocks", |b| {
        let fork = || sequence.fork().expect("counts");
        b.iter_batched_ref(fork, |fork| fork.release(), BatchSize::PerIteration);
    });
    drop(sequence);
    assert_eq!(wide.free_groups(), 1000);
    bench.finish();
}

fn pool(c: &mut Criterion) {
    // 128 bytes a block: the large pool is 512 MiB of address space, of which few are touched.
    let pools = [8, 1000, 4 << 20].map(|blocks| SharedPagedKv::new(1, 16, blocks, 1, 1));
    // All but the blocks that are needed are somebody else's.
    let mut other = PagedSequence::new(&pools[2]);
    other.reserve((pools[2].free_groups() - 1008) * 16).expect("all but these");
    let mut sequences = [0, 2].map(|pool| PagedSequence::new(&pools[pool]));
    let parents = [1, 2].map(|pool| {
        let mut parent = PagedSequence::new(&pools[pool]);
        parent.reserve(16_000).expect("so many are left");
        parent.append(0, &[1.0; 16_000], &[1.0; 16_000], 16_000).expect("room");
        parent.commit(16_000).expect("written");
        parent
    });
    let mut best = [[Duration::MAX; OPERATIONS.len()]; 2];
    // The two take turns, and the best of many rounds counts: neither a busy machine nor the order
    // decides.
    for _ in 0..3000 {
        for side in 0..2 {
            operations(&mut sequences[side], &parents[side], &mut best[side]);
        }
    }
    for (at, (name, times)) in OPERATIONS.iter().enumerate() {
        let ns = best.map(|best| best[at].as_secs_f64() * 1e9 / f64::from(*times));
        let ratio = ns[1] / ns[0];
        println!(
            "{name}: {:.1} ns in the least pool, {:.1} ns in one of four million blocks: {ratio:.2}",
            ns[0], ns[1]
        );
        assert!(ratio < 1.5, "nothing may grow with the pool");
    }
    drop(parents);
    let mut bench = c.benchmark_group("request");
    let [small, large] = &mut sequences;
    bench.bench_function("turn-of-8", |b| b.iter(|| turn(small)));
    bench.bench_function("turn-of-4-million", |b| b.iter(|| turn(large)));
    bench.finish();
    drop(other);
}

/// What `operations` measures, and how often it does each.
const OPERATIONS: [(&str, u32); 7] = [
    ("reserve 3 blocks", 16),
    ("push", 16 * 40),
    ("commit", 16),
    ("release 3 blocks", 16),
    ("fork 1,000 blocks", 1),
    ("release 1,000 blocks", 1),
    ("the clock, which is in each of these once", 16),
];

/// Each operation's time, where it is less than it was.
fn operations(
    sequence: &mut PagedSequence<&SharedPagedKv>,
    parent: &PagedSequence<&SharedPagedKv>,
    best: &mut [Duration; OPERATIONS.len()],
) {
    let mut times = [Duration::ZERO; OPERATIONS.len()];
    let mut begun = Instant::now();
    let mut lap = |at: usize| {
        let now = Instant::now();
        times[at] += now - begun;
        begun = now;
    };
    for _ in 0..16 {
        sequence.reserve(40).expect("three blocks");
        lap(0);
        for _ in 0..40 {
            sequence.push(0, &[1.0], &[2.0]).expect("room");
        }
        lap(1);
        sequence.commit(40).expect("written");
        lap(2);
        sequence.truncate(0).expect("shorter");
        lap(3);
    }
    let mut fork = parent.fork().expect("counts");
    lap(4);
    fork.release();
    lap(5);
    (0..16).for_each(|_| lap(6));
    best.iter_mut().zip(times).for_each(|(best, time)| *best = time.min(*best));
}

/// Room, rows, commit, fork, a copy for the fork, and all of it back.
fn turn(sequence: &mut PagedSequence<&SharedPagedKv>) {
    sequence.reserve(40).expect("three blocks");
    sequence.append(0, &[1.0; 40], &[2.0; 40], 40).expect("room");
    sequence.commit(40).expect("written");
    let mut fork = sequence.fork().expect("counts");
    fork.reserve(1).expect("one block");
    fork.push(0, &[3.0], &[4.0]).expect("room");
    fork.commit(1).expect("written");
    drop(fork);
    sequence.truncate(0).expect("shorter");
}

fn beside_groups(_: &mut Criterion) {
    const GROUPS: u64 = 1_000_000;
    let shared = SharedPagedKv::new(4, 16, 256, 2, 64);
    let alone = beside(&shared, || thread::sleep(Duration::from_secs(1)));
    let mut took = 0.0;
    let beside = beside(&shared, || took = turn_over(&shared, GROUPS));
    println!(
        "two threads decode {alone:.0} steps a second alone and {beside:.0} beside a third that \
         takes and gives back a million groups at {took:.0} ns each"
    );
    let reader = shared.read(2);
    let took = turn_over(&shared, GROUPS);
    println!("under a reader who never lets go: {took:.0} ns each");
    drop(reader);
    assert_eq!(shared.free_groups(), 256);
}

/// A group comes, gets a second holder, and goes, so many times: nanoseconds for each.
fn turn_over(shared: &SharedPagedKv, rounds: u64) -> f64 {
    let begun = Instant::now();
    for _ in 0..rounds {
        let group = shared.acquire_group().expect("256 are enough for three");
        shared.retain_group(group);
        assert!(!shared.release_group(group));
        assert!(shared.release_group(group));
    }
    begun.elapsed().as_nanos() as f64 / rounds as f64
}

/// Steps that two threads decode in a second while this thread does something else.
fn beside(shared: &SharedPagedKv, something: impl FnOnce()) -> f64 {
    let (stop, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| decode(shared, &stop, &steps));
        }
        let begun = Instant::now();
        something();
        let rate = steps.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        rate
    })
}

fn decode(shared: &SharedPagedKv, stop: &AtomicBool, steps: &AtomicU64) {
    let row = vec![0.5; 2 * 64];
    let gqa = GqaShape::new(shared.read(0).shape(), 8).expect("a shape");
    let (mut out, q) = (vec![0.0; gqa.out_row_len()], vec![0.1; gqa.q_row_len()]);
    let mut scratch = vec![0.0; attention_scratch_len(&gqa, 1)];
    let options = AttentionOptions::new();
    let mut sequence = PagedSequence::new(shared);
    while !stop.load(Ordering::Relaxed) {
        if sequence.len() == 1024 {
            sequence.truncate(512).expect("shorter");
        }
        sequence.reserve(1).expect("two sequences are half of the pool");
        for layer in 0..4 {
            sequence.push(layer, &row, &row).expect("room");
            let (store, cache) = (shared.read(layer), sequence.cache(layer));
            let (out, scratch) = (&mut out, &mut scratch);
            causal_gqa_attention_paged_into(&q, &store, cache, 8, &options, out, scratch)
                .expect("a legal call");
        }
        sequence.commit(1).expect("written");
        steps.fetch_add(1, Ordering::Relaxed);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    targets = request, pool, beside_groups
}
criterion_main!(benches);
