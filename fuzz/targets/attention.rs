//! Any bytes are an attention call, and the answer is the oracle's within rounding, at every level,
//! wherever the rows lie.
//!
//! The bytes, in this order; missing ones are zeros:
//!
//! ```text
//!  0      options, one a bit (internal::oracle::Rules)
//!  1  2   KV heads, query heads to each
//!  3  4   width of keys, of values
//!  5      query rows
//!  6  7   positions, low byte first
//!  8  9   block size of the store, page size of the cache
//! 10      how large the query's numbers are, and what type keys and values are stored as
//! 11 ..   seed of all numbers and of the order of the blocks
//! ```
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::doors::{Answer, Held, Place, stored};
use paged_kv::internal::oracle::{Case, Rules, Sizes, Truth, attention};
use paged_kv::{AttentionError, Element, Int4, Int8, Level, bf16, f16};

/// Products that a call may cost: a millisecond or so for the oracle.
const MOST_PRODUCTS: usize = 500_000;

struct Call {
    case: Case,
    paged: Place,
    contiguous: Place,
}

impl Call {
    fn decode(bytes: &[u8]) -> Call {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let number = |at: usize, end: usize| byte(at) as usize % end;
        let mask = byte(0) & Rules::ALL;
        let mut sizes = Sizes {
            n_kv_heads: 1 + number(1, 4),
            group: 1 + number(2, 9),
            k_width: 1 + number(3, 160),
            v_width: 1 + number(4, 160),
            n_q: 1 + number(5, 40),
            len: (byte(6) as usize + (byte(7) as usize) * 256) % 1200,
        };
        let heads = sizes.n_heads() * (sizes.k_width + sizes.v_width);
        sizes.len = sizes.len.min(MOST_PRODUCTS / heads);
        sizes.n_q = sizes.n_q.min(MOST_PRODUCTS / (heads * sizes.len.max(1))).max(1);
        let seed = bytes
            .iter()
            .skip(11)
            .fold(0_u64, |seed, byte| seed.wrapping_mul(257).wrapping_add(u64::from(*byte) + 1));
        let mut case = Case::random(sizes, mask, seed);
        let size = 2_f32.powi(number(10, 10) as i32 - 5);
        for q in &mut case.q {
            *q *= size;
        }
        Call {
            case,
            paged: Place::Paged(1 + number(8, 80), seed),
            contiguous: Place::Contiguous(1 + number(9, 80)),
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let call = Call::decode(bytes);
    match bytes.get(10).copied().unwrap_or(0) / 10 % 5 {
        0 => judge::<f32>(call),
        1 => judge::<f16>(call),
        2 => judge::<bf16>(call),
        3 => judge::<Int8>(call),
        _ => judge::<Int4>(call),
    }
});

/// Asks everybody, of keys and values that are stored as `E`.
fn judge<E: Element>(Call { case, paged, contiguous }: Call) {
    let (heads, rules) = (case.sizes.n_heads(), &case.rules);
    let paged = Held::<E>::full(&case, paged);
    let contiguous = Held::<E>::full(&case, contiguous);

    let positions = rules.causal || rules.window.is_some() || rules.alibi_slopes.is_some();
    if positions && case.sizes.n_q > case.sizes.len {
        let refused =
            AttentionError::TooManyQueryRows { rows: case.sizes.n_q, len: case.sizes.len };
        for held in [paged, contiguous] {
            let got = held.ask(&case.q, heads, rules, Level::detect());
            assert_eq!(got.map(|answer| answer.bits()), Err(refused));
        }
        return;
    }

    let truth = attention(&stored::<E>(&case));
    let mut of_class: [Option<Answer>; 2] = [None, None];
    for level in Level::available() {
        let ask = |held: &Held<E>, q: &[f32]| match held.ask(q, heads, rules, level) {
            Ok(answer) => answer,
            Err(error) => panic!("{level}: {error}"),
        };
        let answer = ask(&paged, &case.q);
        compare(&case, &truth, &answer, level);
        // The same bits from a cache with other pages, for the last row alone, and at every other
        // level of the class.
        assert_eq!(answer.bits(), ask(&contiguous, &case.q).bits(), "{level}: contiguous");
        let q_row = case.q.len() / case.sizes.n_q;
        let last = ask(&paged, &case.q[case.q.len() - q_row..]);
        let tail = Answer {
            out: answer.out[answer.out.len() - last.out.len()..].to_vec(),
            lse: answer.lse[answer.lse.len() - heads..].to_vec(),
        };
        assert_eq!(tail.bits(), last.bits(), "{level}: the last row alone");
        match &of_class[usize::from(level.is_fused())] {
            Some(other) => assert_eq!(answer.bits(), other.bits(), "{level}: its class"),
            None => of_class[usize::from(level.is_fused())] = Some(answer),
        }
    }
}

/// Fails where the answer is further from the truth than rounding in `f32` explains: the bounds of
/// the suite (`tests/attention_oracle.rs`).
fn compare(case: &Case, truth: &Truth, answer: &Answer, level: Level) {
    for row in 0..truth.lse.len() {
        let rounding = 1e-6 + truth.reach[row] / 4_194_304.0;
        for column in 0..case.sizes.v_width {
            let at = row * case.sizes.v_width + column;
            let error = (f64::from(answer.out[at]) - truth.out[at]).abs();
            let bound = truth.most[row] * rounding;
            assert!(error <= bound, "{level}: row {row} is off by {error:e}, not {bound:e}");
        }
        let (have, want) = (f64::from(answer.lse[row]), truth.lse[row]);
        if want == f64::NEG_INFINITY {
            assert_eq!(have, want, "{level}: row {row} sees no key");
        } else {
            let (error, bound) = ((have - want).abs(), rounding + want.abs() / 8_388_608.0);
            assert!(error <= bound, "{level}: lse {row} is off by {error:e}, not {bound:e}");
        }
    }
}
