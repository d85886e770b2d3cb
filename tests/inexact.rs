//! The levels that round queries and weights: asked for by name, and right within what they say.
//!
//! A processor that lacks them has nothing to test here, and the tests say so aloud.

use paged_kv::internal::doors::{Answer, Held, Place, answer, stored};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, attention};
use paged_kv::{Element, Int4, Int8, Level, bf16, f16};

fn inexact() -> Vec<Level> {
    let levels: Vec<Level> =
        [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten().collect();
    if levels.len() < 2 {
        eprintln!("NOT TESTED: this processor has {} of the 2 inexact levels", levels.len());
    }
    levels
}

/// What the exact level next to them gives.
fn exact() -> Level {
    Level::from_name("avx512").expect("the inexact levels are AVX-512")
}

fn sizes(numbers: &mut Numbers) -> Sizes {
    let n_q = numbers.between(1, 30);
    Sizes {
        n_kv_heads: numbers.between(1, 3),
        group: numbers.between(1, 9),
        k_width: numbers.between(1, 130),
        v_width: numbers.between(1, 130),
        n_q,
        len: n_q + numbers.between(0, 700),
    }
}

#[test]
fn nobody_gets_them_unasked() {
    for level in inexact() {
        assert_ne!(Level::detect(), level);
        assert!(Level::available().all(|other| other != level));
        assert_eq!(Level::from_name(level.name()), Some(level));
    }
}

/// What they have no dot product for is done as by AVX-512, to the bit.
#[test]
fn other_types_and_odd_blocks_keep_their_bits() {
    fn same<E: Element>(case: &Case, block_size: usize, level: Level) {
        let place = Place::Paged(block_size, 3);
        let want = answer::<E>(case, place, exact()).bits();
        assert_eq!(answer::<E>(case, place, level).bits(), want, "{} at {level}", E::NAME);
    }
    let mut numbers = Numbers::new(1);
    for level in inexact() {
        for seed in 0..12 {
            let case = Case::random(sizes(&mut numbers), Rules::ALL * (seed % 2) as u8, seed);
            same::<f32>(&case, 64, level);
            same::<f16>(&case, 64, level);
            same::<bf16>(&case, 63, level);
            if level.name() == "avx512-vnni" {
                same::<bf16>(&case, 64, level);
                same::<Int4>(&case, 64, level);
            } else {
                same::<Int8>(&case, 33, level);
                same::<Int4>(&case, 5, level);
            }
        }
    }
}

/// Sums of bytes could overflow, and are not made.
#[test]
fn keys_too_wide_for_bytes_keep_their_bits() {
    let sizes = Sizes { n_kv_heads: 1, group: 2, k_width: 66_312, v_width: 3, n_q: 1, len: 5 };
    let case = Case::random(sizes, 0, 1);
    for level in inexact().into_iter().filter(|level| level.name() == "avx512-vnni") {
        let want = answer::<Int8>(&case, Place::Paged(2, 3), exact()).bits();
        assert_eq!(answer::<Int8>(&case, Place::Paged(2, 3), level).bits(), want);
    }
}

fn in_chunks<E: Element>(case: &Case, place: Place, level: Level, numbers: &mut Numbers) -> Answer {
    let sizes = case.sizes;
    let row = sizes.n_heads() * sizes.k_width;
    let mut held = Held::<E>::empty(&sizes, place, true);
    held.append(case, 0..sizes.len - sizes.n_q);
    let mut all = Answer { out: Vec::new(), lse: Vec::new() };
    let mut done = 0;
    while done < sizes.n_q {
        let count = numbers.between(1, 20).min(sizes.n_q - done);
        let before = sizes.len - sizes.n_q + done;
        held.append(case, before..before + count);
        let q = &case.q[done * row..(done + count) * row];
        let part = held.ask(q, sizes.n_heads(), &case.rules, level).expect("the case is legal");
        all.out.extend(part.out);
        all.lse.extend(part.lse);
        done += count;
    }
    all
}

/// The promise of bits holds inside each of them, too, for blocks of even sizes: paged or not, any
/// block table, at once or in chunks, over memory that is NaN where nothing was written.
#[test]
fn bits_do_not_depend_on_how_it_is_asked() {
    fn same<E: Element>(case: &Case, level: Level, numbers: &mut Numbers) {
        let want = answer::<E>(case, Place::Contiguous(64), level).bits();
        for block_size in [2, 6, 16, 64, 80, 144] {
            let place = Place::Paged(block_size, block_size as u64);
            let what = format!("{} at {level}, blocks of {block_size}", E::NAME);
            assert!(answer::<E>(case, place, level).bits() == want, "{what}");
            // A row that is not causal sees what comes after its chunk.
            if case.rules.causal {
                let chunks = in_chunks::<E>(case, place, level, numbers).bits();
                assert!(chunks == want, "{what}, in chunks: {:?}", case.sizes);
            }
        }
    }
    let mut numbers = Numbers::new(2);
    for level in inexact() {
        for seed in 0..20 {
            let mask =
                if seed % 3 == 0 { 0 } else { numbers.below(usize::from(Rules::ALL) + 1) as u8 };
            let case = Case::random(sizes(&mut numbers), mask, seed);
            same::<bf16>(&case, level, &mut numbers);
            same::<Int8>(&case, level, &mut numbers);
            same::<Int4>(&case, level, &mut numbers);
        }
    }
}

/// How far an answer is from the truth over the stored numbers, relative to the largest value that
/// a row sees. The bounds are the ones that the documentation of the levels gives.
#[test]
fn errors_are_what_they_say() {
    fn worst<E: Element>(level: Level) -> f64 {
        let mut numbers = Numbers::new(7);
        let mut worst = 0.0f64;
        for seed in 0..40 {
            let case = Case::random(sizes(&mut numbers), 0, seed);
            let truth = attention(&stored::<E>(&case));
            let have = answer::<E>(&case, Place::Paged(64, 1), level);
            let width = case.sizes.v_width;
            for (at, (have, want)) in have.out.iter().zip(&truth.out).enumerate() {
                worst = worst.max((f64::from(*have) - want).abs() / truth.most[at / width]);
            }
        }
        println!("{} at {level}: {worst:.2e} of the largest value", E::NAME);
        worst
    }
    for level in inexact() {
        if level.name() == "avx512-bf16" {
            assert!(worst::<bf16>(level) < 1e-2);
            assert!(worst::<Int8>(level) < 1e-2);
            assert!(worst::<Int4>(level) < 1e-2);
        } else {
            assert!(worst::<Int8>(level) < 3e-2);
        }
    }
}
