//! What attention costs in a dependent's debug build.
//!
//! Whoever works on an inference engine builds it without optimisation, to step through it, and
//! asks for fast kernels alone:
//!
//! ```toml
//! [profile.dev.package.paged-kv]
//! opt-level = 3
//! ```
//!
//! That reaches what is compiled *in* paged-kv. A generic function is not: it is compiled in the
//! crate that says which type it wants, with that crate's optimisation, and a kernel compiled so
//! runs a hundred times slower. The stores are generic over the stored number, so every kernel is
//! behind a method of `Element` that is not: it is compiled once for each type in its own file,
//! and a dependent only calls it. What stays generic are the doors, a few dozen instructions a
//! call: checks of lengths, and the view of the pages.
//!
//! A debug build also checks for overflow and keeps its debug assertions, in paged-kv as anywhere.
//! That costs up to 1.4 times the release build's time (measured: 1.41 for decode, 1.40 for append);
//! `overflow-checks = false` and `debug-assertions = false` beside `opt-level` take it away.
//!
//! This program is such a dependent. It prints the best time of many rounds, one line for each kind
//! of call; the script `run` beside it builds it all three ways and compares. The short call at the
//! end shows what the doors themselves cost; nobody promises anything about it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_into,
    causal_gqa_attention_paged_into,
};
use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::{GqaShape, KvShape, ShapeError};

const BLOCK: usize = 64;

/// A layer's heads and how much of a sequence is cached.
struct Case {
    heads: usize,
    kv_heads: usize,
    width: usize,
    len: usize,
}

const LONG: Case = Case { heads: 32, kv_heads: 8, width: 128, len: 1024 };
const SHORT: Case = Case { heads: 8, kv_heads: 4, width: 8, len: 16 };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("decode-paged {}", decode_paged(&LONG, 1)?);
    println!("decode-contiguous {}", decode_contiguous(&LONG)?);
    println!("prefill-16 {}", decode_paged(&LONG, 16)?);
    println!("append-64 {}", append(&LONG)?);
    println!("short-call {}", decode_paged(&SHORT, 1)?);
    Ok(())
}

type Nanoseconds = Result<u128, Box<dyn std::error::Error>>;

fn decode_paged(case: &Case, n_q: usize) -> Nanoseconds {
    let mut store = PagedKvStore::new(BLOCK, 64, case.kv_heads, case.width);
    let mut cache = PagedKvCache::new();
    let rows = numbers(case.len * case.kv_heads * case.width);
    cache.append(&mut store, &rows, &rows, case.len)?;
    let [q, mut out, mut scratch] = call(case, n_q)?;
    let options = AttentionOptions::new();
    let mut result = Ok(());
    let best = best_of(|| {
        let q = black_box(&q);
        result = causal_gqa_attention_paged_into(
            q,
            &store,
            &cache,
            case.heads,
            &options,
            &mut out,
            &mut scratch,
        );
    });
    result?;
    Ok(best)
}

fn decode_contiguous(case: &Case) -> Nanoseconds {
    let mut cache = KvCache::new(case.kv_heads, case.width);
    let rows = numbers(case.len * case.kv_heads * case.width);
    cache.append(&rows, &rows, case.len)?;
    let [q, mut out, mut scratch] = call(case, 1)?;
    let options = AttentionOptions::new();
    let mut result = Ok(());
    let best = best_of(|| {
        let q = black_box(&q);
        result = causal_gqa_attention_into(q, &cache, case.heads, &options, &mut out, &mut scratch);
    });
    result?;
    Ok(best)
}

fn append(case: &Case) -> Nanoseconds {
    let mut store = PagedKvStore::new(BLOCK, 8, case.kv_heads, case.width);
    let mut cache = PagedKvCache::new();
    let rows = numbers(64 * case.kv_heads * case.width);
    let mut result = Ok(());
    let best = best_of(|| {
        result = cache
            .append(&mut store, black_box(&rows), black_box(&rows), 64)
            .and_then(|()| cache.truncate(&mut store, 0));
    });
    result?;
    Ok(best)
}

/// Query, output and scratch of one call.
fn call(case: &Case, n_q: usize) -> Result<[Vec<f32>; 3], ShapeError> {
    let shape = GqaShape::new(KvShape::square(BLOCK, case.kv_heads, case.width)?, case.heads)?;
    let scratch = vec![0.0; attention_scratch_len(&shape, n_q)];
    Ok([numbers(n_q * shape.q_row_len()), vec![0.0; n_q * shape.out_row_len()], scratch])
}

/// The shortest of many rounds: what the processor can do when nobody disturbs it.
///
/// A round is 50 us or one call, whichever is longer: enough for reading the clock not to count,
/// and short enough to fit between two interruptions of a busy machine.
fn best_of(mut call: impl FnMut()) -> u128 {
    call();
    let start = Instant::now();
    call();
    let calls = (50_000 / start.elapsed().as_nanos().max(1)).clamp(1, 1000) as u32;
    let end = Instant::now() + Duration::from_millis(700);
    let mut best = Duration::MAX;
    while Instant::now() < end {
        let start = Instant::now();
        for _ in 0..calls {
            call();
        }
        best = best.min(start.elapsed());
    }
    best.as_nanos() / u128::from(calls)
}

/// Numbers between -0.5 and 0.5.
fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|index| (index * 37 % 101) as f32 / 101.0 - 0.5).collect()
}
