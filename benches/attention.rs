//! Decode and prefill over pages, at every level of this processor, and appending.
//!
//! The head shapes are those of models that people run: 32/8 of 128 (Llama 3 8B), 9/3 of 64
//! (SmolLM2 135M), 8/4 of 256 (Gemma 2 2B), 16/16 of 64 (OPT and others without grouping). The
//! blocks are in random order.
//!
//! - `decode` and `prefill`: the same call repeats, so that rows are warm and what is measured is
//!   the kernel and not the memory behind the caches.
//! - `decode-cold`: each call has rows that were last read when the caches had been filled eight
//!   times since. That is what a model does: between two reads of a layer are all the others.
//! - `append-cold`: the next position of such a sequence, and the next 64.
//!
//! After each shape, lines say how much of the processor the calls reached: in percent of READ, a
//! call that loads the same bytes and does nothing with them, and of FMA, multiply-adds alone, both
//! measured between the calls. Nanoseconds are the machine's, percentages are ours.
//!
//! Before a shape is timed its answers are compared with the oracle, at each level and block size.
//! `cargo bench --features std -- --test` does that and runs each call once.

use core::hint::black_box;
use core::time::Duration;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::batch::Inline;
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, Truth, attention};
use paged_kv::internal::workloads::Workload;
use paged_kv::{KvShape, Level};

#[path = "../examples/workload/inputs.rs"]
mod inputs;
#[path = "../examples/workload/measure.rs"]
mod measure;
#[path = "../examples/workload/problem.rs"]
#[expect(dead_code, reason = "what is stored is asked by the example")]
mod problem;
#[path = "../examples/workload/report.rs"]
#[expect(dead_code, reason = "lines of JSON are the example's")]
mod report;

use inputs::Inputs;
use measure::{Effort, measure};
use problem::{Problem, Setup};

/// Query heads, KV heads, width.
const SHAPES: [(usize, usize, usize); 4] = [(32, 8, 128), (9, 3, 64), (8, 4, 256), (16, 16, 64)];
const BLOCK_SIZES: [usize; 2] = [16, 64];

fn decode(c: &mut Criterion) {
    attend(c, "decode", Rows::Warm, 1, 1024);
}

fn decode_cold(c: &mut Criterion) {
    attend(c, "decode-cold", Rows::Cold, 1, 1024);
}

fn prefill(c: &mut Criterion) {
    attend(c, "prefill", Rows::Warm, 32, 512);
}

/// Where a call finds its rows.
#[derive(Clone, Copy, Debug)]
enum Rows {
    /// In the caches, as far as they fit.
    Warm,
    /// In memory.
    Cold,
}

impl Rows {
    /// How many copies of so many bytes calls have to go through for that.
    fn copies(self, bytes: usize) -> usize {
        match self {
            Rows::Warm => 1,
            Rows::Cold if is_test() => 2,
            Rows::Cold => (8 * last_cache()).div_ceil(bytes).max(2),
        }
    }
}

/// Whether all is to run once.
fn is_test() -> bool {
    std::env::args().any(|arg| arg == "--test")
}

/// Bytes in the largest cache. Linux says, elsewhere it is a guess on the safe side.
fn last_cache() -> usize {
    let path = "/sys/devices/system/cpu/cpu0/cache/index3/size";
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let kib = text.trim().strip_suffix('K').and_then(|kib| kib.parse::<usize>().ok());
    kib.map_or(32 << 20, |kib| kib << 10)
}

/// The last `n_q` of `len` positions.
fn attend(c: &mut Criterion, name: &str, rows: Rows, n_q: usize, len: usize) {
    for (heads, n_kv_heads, width) in SHAPES {
        let group = heads / n_kv_heads;
        let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len };
        let workload = Workload { name: "bench", batch: 1, sizes };
        let inputs = Inputs::new(&workload);
        let (q, k, v) = (inputs.q.clone(), inputs.k.clone(), inputs.v.clone());
        let truth = attention(&Case { sizes, rules: Rules::PLAIN, q, k, v });
        let group = format!("{name}/{heads}-{n_kv_heads}-d{width}");
        let mut bench = c.benchmark_group(&group);
        // Pairs of query and key that see each other: what the work is proportional to.
        let pairs = (0..n_q).map(|row| len - row).sum::<usize>() * heads;
        bench.throughput(Throughput::Elements(pairs as u64));
        let copies = rows.copies(workload.kv_numbers() * size_of::<f32>());
        let mut lines = Vec::new();
        for block_size in BLOCK_SIZES {
            let level = Level::detect();
            let setup = Setup { block_size, level, copies };
            let mut problem = Problem::<f32>::new(&workload, &inputs, setup, &Inline)
                .expect("a shape that exists");
            let mut levels = Vec::new();
            for level in Level::available() {
                problem.level = level;
                problem.call(0);
                compare(&sizes, problem.answer(), &truth, level);
                let mut copy = 0;
                let id = BenchmarkId::new(level.name(), format!("blocks-of-{block_size}"));
                bench.bench_function(id, |b| {
                    b.iter(|| {
                        copy = (copy + 1) % copies;
                        problem.call(black_box(copy));
                    });
                });
                levels.push(reached(&mut problem, &workload, level, copies));
            }
            lines.push(format!("{group}, blocks of {block_size}: {}", levels.join("; ")));
        }
        bench.finish();
        // Calls that ran once have nothing to say.
        if !is_test() {
            lines.iter().for_each(|line| println!("{line}"));
        }
    }
}

/// How much of the processor's limits calls reach, in words.
fn reached(
    problem: &mut Problem<'_, f32>,
    workload: &Workload,
    level: Level,
    copies: usize,
) -> String {
    let (seconds, rounds) = if is_test() { (0.0, 1) } else { (0.1, 4) };
    let found = measure(problem, level, Effort { seconds, rounds, copies });
    // Among cold calls the shortest are those that were lucky.
    let (call, read) = if copies > 1 {
        (found.calls.fast(), found.reads.fast())
    } else {
        (found.calls.least(), found.reads.least())
    };
    let fma = workload.flops() / found.fma;
    format!("{level} {:.0} % of READ, {:.0} % of FMA", 100.0 * read / call, 100.0 * fma / call)
}

/// Fails where an answer is further from the truth than rounding explains, at unit variance and
/// the default scale.
fn compare(sizes: &Sizes, answer: &[f32], truth: &Truth, level: Level) {
    for (at, (have, want)) in answer.iter().zip(&truth.out).enumerate() {
        let bound = 2e-6 * truth.most[at / sizes.v_width];
        let error = (f64::from(*have) - want).abs();
        assert!(error <= bound, "{level}: number {at} is off by {error:e}, not {bound:e}");
    }
}

/// Positions that the sequences which are appended to have.
const LEN: usize = 1024;
/// Positions in a chunk.
const CHUNK: usize = 64;

fn append_cold(c: &mut Criterion) {
    for (heads, n_kv_heads, width) in SHAPES {
        let mut bench = c.benchmark_group(format!("append-cold/{heads}-{n_kv_heads}-d{width}"));
        for block_size in BLOCK_SIZES {
            let shape = KvShape::square(block_size, n_kv_heads, width).expect("a shape");
            let mut layer = Layer::new(shape);
            for n in [1, CHUNK] {
                bench.throughput(Throughput::Elements(n as u64));
                let id =
                    BenchmarkId::new(format!("positions-{n}"), format!("blocks-of-{block_size}"));
                bench.bench_function(id, |b| {
                    b.iter_custom(|rounds| (0..rounds).map(|_| layer.append(n)).sum());
                });
            }
        }
        bench.finish();
    }
}

/// Sequences of [`LEN`] positions and a few, as many as fill the caches eight times.
struct Layer {
    store: PagedKvStore,
    sequences: Vec<PagedKvCache>,
    next: usize,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Layer {
    fn new(shape: KvShape) -> Layer {
        let bytes = LEN * (shape.k_row_len() + shape.v_row_len()) * size_of::<f32>();
        let count = Rows::Cold.copies(bytes);
        let blocks = count * shape.blocks_for(LEN + CHUNK);
        let mut store = PagedKvStore::with_shape(shape, blocks).expect("a quarter of a gibibyte");
        let k = Numbers::new(1).normals(LEN * shape.k_row_len());
        let v = Numbers::new(2).normals(LEN * shape.v_row_len());
        let mut sequences = Vec::new();
        for _ in 0..count {
            let mut sequence = PagedKvCache::new();
            sequence.append(&mut store, &k, &v, LEN).expect("room for all");
            sequences.push(sequence);
        }
        Layer { store, sequences, next: 0, k, v }
    }

    /// Appends to the next sequence, and takes back from it what was appended in the last turn if
    /// that was a chunk's worth. The time is that of appending.
    fn append(&mut self, n: usize) -> Duration {
        let Layer { store, sequences, next, k, v } = self;
        let shape = store.shape();
        let (k, v) = (&k[..n * shape.k_row_len()], &v[..n * shape.v_row_len()]);
        *next = (*next + 1) % sequences.len();
        let sequence = &mut sequences[*next];
        if sequence.seq_len() + n > LEN + CHUNK {
            sequence.truncate(store, LEN).expect("its own store");
        }
        let begin = Instant::now();
        sequence.append(store, black_box(k), black_box(v), n).expect("room for all");
        begin.elapsed()
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = decode, decode_cold, prefill, append_cold
}
criterion_main!(benches);
