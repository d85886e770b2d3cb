//! Decode and prefill over pages, at every level of this processor.
//!
//! The head shapes are those of models that people run: 32/8 of 128 (Llama 3 8B), 9/3 of 64
//! (SmolLM2 135M), 8/4 of 256 (Gemma 2 2B), 16/16 of 64 (OPT and others without grouping). The
//! blocks are in random order. Rows are warm: the same call repeats, so that what is measured is
//! the kernel and not the memory behind the caches.
//!
//! Before a shape is timed its answers are compared with the oracle, at each level and block size.
//! `cargo bench --features std -- --test` does that and runs each call once.

use core::hint::black_box;
use core::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::internal::doors::{Held, Place};
use paged_kv::internal::oracle::{Case, Rules, Sizes, Truth, attention};
use paged_kv::{GqaShape, Level};

/// Query heads, KV heads, width.
const SHAPES: [(usize, usize, usize); 4] = [(32, 8, 128), (9, 3, 64), (8, 4, 256), (16, 16, 64)];
const BLOCK_SIZES: [usize; 2] = [16, 64];

fn decode(c: &mut Criterion) {
    attend(c, "decode", 1, 1024);
}

fn prefill(c: &mut Criterion) {
    attend(c, "prefill", 32, 512);
}

/// The last `n_q` of `len` positions.
fn attend(c: &mut Criterion, name: &str, n_q: usize, len: usize) {
    for (heads, n_kv_heads, width) in SHAPES {
        let group = heads / n_kv_heads;
        let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len };
        let case = Case::random(sizes, 0, 1);
        let truth = attention(&case);
        let mut bench = c.benchmark_group(format!("{name}/{heads}-{n_kv_heads}-d{width}"));
        // Pairs of query and key that see each other: what the work is proportional to.
        let pairs = (0..n_q).map(|row| len - row).sum::<usize>() * heads;
        bench.throughput(Throughput::Elements(pairs as u64));
        for block_size in BLOCK_SIZES {
            let held = Held::full(&case, Place::Paged(block_size, 7));
            for level in Level::available() {
                compare(&case, &truth, &held, level);
                one(&mut bench, &case, &held, block_size, level);
            }
        }
        bench.finish();
    }
}

fn one(
    bench: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    case: &Case,
    held: &Held,
    block_size: usize,
    level: Level,
) {
    let Held::Paged(store, cache) = held else { unreachable!("the place is a store") };
    let heads = case.sizes.n_heads();
    let shape = GqaShape::new(store.shape(), heads).expect("a shape that was attended over");
    let options = AttentionOptions::new().level(level);
    let mut out = vec![0.0; case.sizes.n_q * shape.out_row_len()];
    let mut scratch = vec![0.0; attention_scratch_len(&shape, case.sizes.n_q)];
    bench.bench_function(BenchmarkId::new(level.name(), format!("blocks-of-{block_size}")), |b| {
        b.iter(|| {
            let q = black_box(&case.q);
            let out = black_box(&mut out);
            causal_gqa_attention_paged_into(q, store, cache, heads, &options, out, &mut scratch)
        });
    });
}

/// Fails where an answer is further from the truth than rounding explains, at unit variance and
/// the default scale.
fn compare(case: &Case, truth: &Truth, held: &Held, level: Level) {
    let heads = case.sizes.n_heads();
    let answer = held.ask(&case.q, heads, &Rules::PLAIN, level).expect("a legal call");
    for (at, (have, want)) in answer.out.iter().zip(&truth.out).enumerate() {
        let bound = 2e-6 * truth.most[at / case.sizes.v_width];
        let error = (f64::from(*have) - want).abs();
        assert!(error <= bound, "{level}: number {at} is off by {error:e}, not {bound:e}");
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400));
    targets = decode, prefill
}
criterion_main!(benches);
