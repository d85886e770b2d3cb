//! Same bits however it is asked.
//!
//! Every test runs at every level and compares bits of outputs and log-sum-exps, with options on
//! and off. `Held::ask` hands out memory full of NaN between canaries and checks them, so each of
//! these is a test of dirty scratch as well. Every test runs for every stored type; for those beside
//! `f32` with a quarter of the random cases.

use paged_kv::attention::AttentionState;
use paged_kv::internal::doors::{Answer, Held, Place, answer};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes};
use paged_kv::internal::types::cases;
use paged_kv::{Element, Level, every_type};
use proptest::prelude::*;

const BLOCK_SIZES: [usize; 14] = [16, 32, 48, 64, 80, 96, 112, 128, 144, 1, 5, 33, 63, 65];

/// Most are small; some cross 64 and 512 several times, with narrow heads.
fn sizes() -> impl Strategy<Value = Sizes> {
    let short = (1usize..=3, 1usize..=16, 1usize..=80, 1usize..=80, 1usize..=40, 0usize..=150);
    let long = (1usize..=2, 1usize..=4, 1usize..=12, 1usize..=12, 1usize..=20, 400usize..=1180);
    prop_oneof![3 => short, 2 => long].prop_map(
        |(n_kv_heads, group, k_width, v_width, n_q, before)| Sizes {
            n_kv_heads,
            group,
            k_width,
            v_width,
            n_q,
            len: n_q + before,
        },
    )
}

/// No option as often as any.
fn mask() -> impl Strategy<Value = u8> {
    prop_oneof![1 => Just(0), 3 => 0..=Rules::ALL]
}

fn block_size() -> impl Strategy<Value = usize> {
    prop_oneof![proptest::sample::select(&BLOCK_SIZES[..]), 1usize..=160]
}

/// Rows `first ..` of a call.
fn last_rows(answer: &Answer, sizes: &Sizes, first: usize) -> Answer {
    Answer {
        out: answer.out[first * sizes.n_heads() * sizes.v_width..].to_vec(),
        lse: answer.lse[first * sizes.n_heads()..].to_vec(),
    }
}

/// Appends and attends chunk by chunk, as a prefill does that is cut up, and returns all rows.
fn in_chunks<E: Element>(
    case: &Case,
    place: Place,
    level: Level,
    mut next: impl FnMut() -> usize,
) -> Answer {
    let sizes = case.sizes;
    let row = sizes.n_heads() * sizes.k_width;
    let mut held = Held::<E>::empty(&sizes, place, false);
    held.append(case, 0..sizes.len - sizes.n_q);
    let mut all = Answer { out: Vec::new(), lse: Vec::new() };
    let mut done = 0;
    while done < sizes.n_q {
        let count = next().clamp(1, sizes.n_q - done);
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

fn config<E: Element>() -> ProptestConfig {
    let cases = cases::<E>(64, 4);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn paged_is_contiguous_for_any_block_table<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), own in block_size(), shared in block_size(), seed: u64)| {
        let case = Case::random(sizes, mask, seed);
        for level in Level::available() {
            let want = answer::<E>(&case, Place::Contiguous(own), level);
            let have = answer::<E>(&case, Place::Paged(shared, seed), level);
            prop_assert!(have.bits() == want.bits(), "{level}");
        }
    });
}

fn the_block_size_changes_nothing<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), seed: u64)| {
        let case = Case::random(sizes, mask, seed);
        for level in Level::available() {
            let want = answer::<E>(&case, Place::Paged(64, seed), level).bits();
            for block_size in BLOCK_SIZES {
                let have = answer::<E>(&case, Place::Paged(block_size, seed), level).bits();
                prop_assert!(have == want, "{level}, blocks of {block_size}");
            }
        }
    });
}

fn levels_of_a_class_agree<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), size in block_size(), seed: u64)| {
        let case = Case::random(sizes, mask, seed);
        let mut classes = [None, None];
        for level in Level::available() {
            let have = answer::<E>(&case, Place::Paged(size, seed), level).bits();
            let want = classes[usize::from(level.is_fused())].get_or_insert_with(|| have.clone());
            prop_assert!(have == *want, "{level}");
        }
    });
}

/// A causal row sees the same keys whenever it is asked for, so options may be on, all but
/// the one that shows it later keys.
fn prefill_at_once_is_prefill_in_chunks<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), size in block_size(), seed: u64)| {
        let case = Case::random(sizes, mask & !Rules::OPEN, seed);
        for level in Level::available() {
            let want = answer::<E>(&case, Place::Contiguous(size), level).bits();
            let mut numbers = Numbers::new(seed);
            let mut next = || numbers.between(1, 12);
            let have = in_chunks::<E>(&case, Place::Paged(size, seed), level, &mut next);
            prop_assert!(have.bits() == want, "{level}, in chunks");
            let have = in_chunks::<E>(&case, Place::Contiguous(size), level, || 1);
            prop_assert!(have.bits() == want, "{level}, token by token");
        }
    });
}

/// The last rows of a chunk are what they would be without the rows before them, also where
/// later keys are seen.
fn a_row_does_not_depend_on_its_chunk<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), size in block_size(), seed: u64, cut: prop::sample::Index)| {
        let case = Case::random(sizes, mask, seed);
        let held = Held::<E>::full(&case, Place::Paged(size, seed));
        let row = sizes.n_heads() * sizes.k_width;
        for level in Level::available() {
            let all = held.ask(&case.q, sizes.n_heads(), &case.rules, level).unwrap();
            for first in [cut.index(sizes.n_q), sizes.n_q - 1] {
                let part = &case.q[first * row..];
                let part = held.ask(part, sizes.n_heads(), &case.rules, level).unwrap();
                prop_assert!(part.bits() == last_rows(&all, &sizes, first).bits(), "{level}");
            }
        }
    });
}

/// A query head's result is its own: with other heads beside it or alone.
fn a_head_does_not_depend_on_its_group<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), size in block_size(), seed: u64, pick: prop::sample::Index)| {
        let case = Case::random(Sizes { n_kv_heads: 1, ..sizes }, 0, seed);
        let (sizes, head) = (case.sizes, pick.index(sizes.group));
        let one = Sizes { group: 1, ..sizes };
        let q = case.q.chunks_exact(sizes.k_width).skip(head).step_by(sizes.group);
        let alone = Case { sizes: one, q: q.flatten().copied().collect(), ..case.clone() };
        for level in Level::available() {
            let all = answer::<E>(&case, Place::Paged(size, seed), level);
            let out = all.out.chunks_exact(sizes.v_width).skip(head).step_by(sizes.group);
            let want = Answer {
                out: out.flatten().copied().collect(),
                lse: all.lse.iter().skip(head).step_by(sizes.group).copied().collect(),
            };
            let have = answer::<E>(&alone, Place::Contiguous(size), level);
            prop_assert!(have.bits() == want.bits(), "{level}, head {head}");
        }
    });
}

/// Rows that were never written, taken back, or another sequence's, are never read: with NaN
/// in all of them nothing changes.
fn stale_rows_are_not_read<E: Element>() {
    proptest!(config::<E>(), |(sizes in sizes(), mask in mask(), size in block_size(), seed: u64, more in 1usize..=70)| {
        let case = Case::random(sizes, mask, seed);
        let longer = Case::random(Sizes { len: sizes.len + more, n_q: 1, ..sizes }, 0, seed ^ 1);
        for level in Level::available() {
            let want = answer::<E>(&case, Place::Contiguous(size), level).bits();
            for place in [Place::Contiguous(size), Place::Paged(size, seed)] {
                let mut held = Held::<E>::empty(&sizes, place, true);
                held.append(&case, 0..sizes.len);
                let have = held.ask(&case.q, sizes.n_heads(), &case.rules, level).unwrap();
                prop_assert!(have.bits() == want, "{level}, {place:?}");
                // A longer sequence was here before, and its rows are still in the memory.
                let mut held = Held::<E>::empty(&longer.sizes, place, true);
                held.append(&longer, 0..longer.sizes.len);
                held.clear();
                held.append(&case, 0..sizes.len);
                let have = held.ask(&case.q, sizes.n_heads(), &case.rules, level).unwrap();
                prop_assert!(have.bits() == want, "{level}, {place:?} after another");
            }
        }
    });
}

/// Borders that random sizes may miss: one position before, at and behind each.
fn the_borders_of_tiles_and_splits<E: Element>() {
    for len in [63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 1200] {
        for n_q in [1, 2, 9] {
            let sizes = Sizes { n_kv_heads: 1, group: 3, k_width: 5, v_width: 18, n_q, len };
            for mask in [0, Rules::ALL & !Rules::OPEN, Rules::WINDOW, Rules::PART] {
                let case = Case::random(sizes, mask, len as u64);
                for level in Level::available() {
                    let want = answer::<E>(&case, Place::Contiguous(64), level).bits();
                    for size in [1, 16, 33, 144] {
                        let have = in_chunks::<E>(&case, Place::Paged(size, 9), level, || 2);
                        assert!(have.bits() == want, "{level}, {sizes:?}, {mask:#b}, {size}");
                    }
                }
            }
        }
    }
}

/// A window moves the first key with each row; states are merged at the same positions all the
/// same. The rows of a chunk begin on both sides of a tile's border here, and see more than one
/// split.
fn a_window_does_not_move_the_splits<E: Element>() {
    for window in [513, 556, 620, 684, 748, 812, 1004] {
        for (n_q, group) in [(9, 1), (9, 3), (40, 3)] {
            let sizes = Sizes { n_kv_heads: 1, group, k_width: 3, v_width: 5, n_q, len: 1200 };
            let mut case = Case::random(sizes, 0, 5);
            case.rules.window = Some(window);
            for level in Level::available() {
                let want = answer::<E>(&case, Place::Contiguous(64), level).bits();
                let have = in_chunks::<E>(&case, Place::Paged(48, 9), level, || 1);
                assert!(have.bits() == want, "{level}, {sizes:?}, window {window}");
            }
        }
    }
}

every_type! {
    paged_is_contiguous_for_any_block_table,
    the_block_size_changes_nothing,
    levels_of_a_class_agree,
    prefill_at_once_is_prefill_in_chunks,
    a_row_does_not_depend_on_its_chunk,
    a_head_does_not_depend_on_its_group,
    stale_rows_are_not_read,
    the_borders_of_tiles_and_splits,
    a_window_does_not_move_the_splits,
}

/// States pushed, merged and finished give the same bits at every level of a class.
#[test]
fn states_of_a_class_agree() {
    for seed in 0..200 {
        let mut classes = [None, None];
        for level in Level::available() {
            let mut numbers = Numbers::new(seed);
            let width = numbers.between(1, 40);
            let (mut a, mut b) = (vec![0.0; width], vec![0.0; width]);
            let mut state = AttentionState::empty(&mut a).with_level(level);
            for _ in 0..numbers.below(4) {
                let mut part = AttentionState::empty(&mut b).with_level(level);
                for _ in 0..numbers.below(6) {
                    let score = 10.0 * numbers.normal();
                    part.push(score, &numbers.normals(width));
                }
                state.merge(&part);
            }
            let sink = (numbers.below(2) == 0).then(|| numbers.normal());
            let mut out = vec![f32::NAN; width];
            let lse = state.finish(sink, &mut out);
            let have = Answer { out, lse: vec![lse, state.lse(), state.max(), state.denom()] };
            let have = have.bits();
            let want = classes[usize::from(level.is_fused())].get_or_insert_with(|| have.clone());
            assert!(have == *want, "{level}, seed {seed}");
        }
    }
}

/// A level that this machine has and that does not run here would be a test that says nothing.
#[test]
fn every_level_of_this_machine_runs() {
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(unused_mut, reason = "there are no others elsewhere")
    )]
    let mut want = vec!["scalar", "portable"];
    #[cfg(target_arch = "x86_64")]
    {
        use std::is_x86_feature_detected as has;
        if has!("avx2") && has!("fma") {
            want.push("avx2");
            if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                want.push("avx512");
            }
        }
    }
    let have: Vec<_> = Level::available().map(Level::name).collect();
    assert_eq!(have, want);
    println!("levels compared: {have:?}");
    assert_eq!(Some(Level::detect()), Level::available().last());
    for level in Level::available() {
        assert_eq!(Level::from_name(level.name()), Some(level));
    }
}
