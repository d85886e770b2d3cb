//! Options, edges and refusals: the faults that users of such systems really hit, one test each.
//!
//! Numbers are small and mostly worked out by hand or by brute force; wide shapes and random
//! options are the business of `attention_oracle` and `attention_bits`. Every test runs at every
//! level and for every stored type; what is expected is worked out from what was stored.

use core::ops::Range;
use paged_kv::attention::AttentionState;
use paged_kv::internal::doors::{Answer, Held, Place, answer, stored};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, attention};
use paged_kv::internal::types::{has_scales, is_f32};
use paged_kv::{Element, Level, every_type};

const PAGED: Place = Place::Paged(16, 7);

fn sizes(n_kv_heads: usize, group: usize, width: usize, n_q: usize, len: usize) -> Sizes {
    Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len }
}

fn ask<E: Element>(held: &Held<E>, case: &Case, level: Level) -> Answer {
    held.ask(&case.q, case.sizes.n_heads(), &case.rules, level).expect("the case is legal")
}

fn row(answer: &Answer, sizes: &Sizes, row: usize) -> Vec<f32> {
    answer.out[row * sizes.v_width..][..sizes.v_width].to_vec()
}

/// Every number against the oracle, within `bound`.
fn check<E: Element>(case: &Case, have: &Answer, bound: f64, about: &str) {
    let want = attention(&stored::<E>(case));
    for (have, want) in have.out.iter().zip(&want.out).chain(have.lse.iter().zip(&want.lse)) {
        let same = f64::from(*have) == *want;
        assert!(same || (f64::from(*have) - want).abs() <= bound, "{about}: {have} is not {want}");
    }
}

/// Rows whose bits differ between two answers.
fn rows_that_differ(a: &Answer, b: &Answer, sizes: &Sizes) -> Vec<usize> {
    let rows = 0..a.lse.len();
    let bits = |x: &Answer, r| {
        let out = row(x, sizes, r);
        Answer { out, lse: vec![x.lse[r]] }.bits()
    };
    rows.filter(|r| bits(a, *r) != bits(b, *r)).collect()
}

/// Query `q . k` is `score` for every key of value `score`, at scale 1.
fn case_of_scores(scores: &[f32], n_q: usize) -> Case {
    let sizes = sizes(1, 1, 1, n_q, scores.len());
    let rules = Rules { scale: Some(1.0), ..Rules::PLAIN };
    let v = (1..=scores.len()).map(|j| j as f32).collect();
    Case { sizes, rules, q: vec![1.0; n_q], k: scores.to_vec(), v }
}

// 1. A finite number used as "minus infinity" swallows real scores below it.

fn scores_near_minus_a_million_count<E: Element>() {
    for magnitude in [1e6, 1e30] {
        let scores: Vec<f32> = (0..100).map(|j| -magnitude - (j % 3) as f32 * 0.5).collect();
        let mut case = case_of_scores(&scores, 70);
        if !is_f32::<E>() {
            // Not every type has keys of this size, and none the small differences.
            case.k.fill(-1.0);
            case.q.fill(magnitude);
        }
        for level in Level::available() {
            let have = answer::<E>(&case, PAGED, level);
            let want = attention(&stored::<E>(&case));
            for r in 0..70 {
                // One step of f32 at 1e6 x log2(e) is 0.125: weights are only roughly right.
                let off = (f64::from(have.out[r]) / want.out[r] - 1.0).abs();
                assert!(off < 0.1, "{level}: row {r}: {} is not {}", have.out[r], want.out[r]);
                assert!((f64::from(have.lse[r]) / want.lse[r] - 1.0).abs() < 1e-5, "{level}");
            }
        }
    }
}

/// Masked keys are not counted either when every visible score is far below what a mask writes.
fn masked_keys_stay_masked_under_very_low_scores<E: Element>() {
    let (key, query) = if is_f32::<E>() { (-1e6, 1.0) } else { (-1.0, 1e6) };
    let scores: Vec<f32> = (0..90).map(|j| if j < 40 { 0.0 } else { key }).collect();
    let mut case = case_of_scores(&scores, 1);
    case.q.fill(query);
    case.rules.window = Some(50);
    for level in Level::available() {
        let have = answer::<E>(&case, PAGED, level).out[0];
        assert!((have - 65.5).abs() < 1e-3, "{level}: {have}");
    }
}

// 2. Rows that see nothing.

fn rows_that_see_nothing_are_zero_and_their_neighbours_untouched<E: Element>() {
    let sizes = sizes(2, 2, 8, 6, 100);
    for (mask, part) in [(0, 98..200), (Rules::SINKS, 98..98), (Rules::CAP, 500..900)] {
        let mut case = Case::random(sizes, mask | Rules::ALIBI, 3);
        case.rules.positions = Some(part.clone());
        for level in Level::available() {
            let have = answer::<E>(&case, PAGED, level);
            for r in 0..24 {
                let sees = (0..100).any(|key| case.sees(r / 4, key));
                let zero = have.out[r * 8..][..8].iter().all(|x| x.to_bits() == 0);
                assert_eq!(zero, !sees, "{level}: {part:?}, row {r}");
                assert_eq!(have.lse[r] == f32::NEG_INFINITY, !sees, "{level}: {part:?}, row {r}");
            }
            check::<E>(&case, &have, 1e-5, "neighbours");
        }
    }
}

fn an_empty_sequence_gives_zeros<E: Element>() {
    let sizes = sizes(2, 3, 8, 4, 0);
    for mask in [Rules::OPEN, Rules::OPEN | Rules::SINKS | Rules::CAP | Rules::SCALE] {
        let case = Case::random(sizes, mask, 5);
        for level in Level::available() {
            for place in [Place::Contiguous(64), PAGED] {
                let have = answer::<E>(&case, place, level);
                assert!(have.out.iter().all(|x| x.to_bits() == 0), "{level}");
                assert!(have.lse.iter().all(|x| *x == f32::NEG_INFINITY), "{level}");
            }
        }
    }
}

/// Cross-attention: more query rows than positions, all of which see everything.
fn more_rows_than_positions_may_ask_where_no_position_matters<E: Element>() {
    for (n_q, len) in [(5, 3), (130, 1), (40, 17)] {
        for mask in [Rules::OPEN, Rules::OPEN | Rules::SINKS | Rules::CAP | Rules::PART] {
            let case = Case::random(sizes(2, 2, 12, n_q, len), mask, 5);
            for level in Level::available() {
                check::<E>(&case, &answer::<E>(&case, PAGED, level), 4e-6, "cross");
            }
        }
    }
}

/// Zero query rows are legal and write nothing.
fn no_query_rows_are_legal<E: Element>() {
    let case = Case::random(sizes(2, 2, 8, 0, 20), 0, 5);
    for level in Level::available() {
        for place in [Place::Contiguous(64), PAGED] {
            assert_eq!(answer::<E>(&case, place, level), Answer { out: vec![], lse: vec![] });
        }
    }
}

// 3. States and merging.

/// A state over keys `part`, made by pushing scores.
fn pushed<'a>(out: &'a mut [f32], case: &Case, part: Range<usize>) -> AttentionState<'a> {
    let mut state = AttentionState::empty(out);
    for key in part {
        state.push(case.k[key], case.value(key, 0));
    }
    state
}

fn state_bits(state: &AttentionState<'_>) -> Vec<u32> {
    let numbers = [state.max(), state.denom(), state.lse()];
    numbers.iter().chain(state.out()).map(|x| x.to_bits()).collect()
}

#[test]
fn empty_states_are_neutral_by_bits() {
    let case = Case::random(sizes(1, 1, 1, 1, 9), 0, 1);
    for level in Level::available() {
        let (mut a, mut b, mut c) = ([9.0; 1], [9.0; 1], [9.0; 1]);
        let full = pushed(&mut a, &case, 0..9).with_level(level);
        let mut left = AttentionState::empty(&mut b).with_level(level);
        left.merge(&full);
        assert_eq!(state_bits(&left), state_bits(&full), "{level}: merge(empty, x)");
        let none = AttentionState::empty(&mut c).with_level(level);
        left.merge(&none);
        assert_eq!(state_bits(&left), state_bits(&full), "{level}: merge(x, empty)");
        let mut d = [9.0; 1];
        let mut both = AttentionState::empty(&mut d).with_level(level);
        both.merge(&none);
        assert!(both.is_empty() && both.lse() == f32::NEG_INFINITY, "{level}");
        assert_eq!((both.max(), both.denom()), (f32::NEG_INFINITY, 0.0), "{level}");
        let mut answer = [f32::NAN];
        for sink in [None, Some(3.0)] {
            assert_eq!(both.finish(sink, &mut answer), f32::NEG_INFINITY, "{level}");
            assert_eq!(answer[0].to_bits(), 0, "{level}");
        }
        both.push(f32::NEG_INFINITY, &[5.0]);
        assert!(both.is_empty(), "{level}: a score of -inf is no key");
        let mut e = [7.0; 1];
        assert!(AttentionState::from_output(&mut e, f32::NEG_INFINITY).is_empty());
        assert_eq!(e, [0.0]);
    }
}

/// Any partition, empty parts included, merged from the left, from the right or as a tree.
#[test]
fn any_partition_merges_to_the_whole() {
    let mut numbers = Numbers::new(8);
    for turn in 0..60 {
        let len = numbers.between(1, 60);
        let mut case = Case::random(sizes(1, 1, 4, 1, len), 0, turn);
        // The keys are the scores themselves here; far apart in every third case.
        case.k = numbers.normals(len);
        if turn % 3 == 0 {
            case.k.iter_mut().for_each(|score| *score *= 40.0);
        }
        let mut cuts: Vec<_> = (0..numbers.between(0, 9)).map(|_| numbers.below(len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        for level in Level::available() {
            let mut whole_out = [0.0; 4];
            let whole = pushed(&mut whole_out, &case, 0..len).with_level(level);
            let mut want = [0.0; 4];
            let want_lse = whole.finish(None, &mut want);
            let close = |state: &AttentionState<'_>, how: &str| {
                let mut have = [0.0; 4];
                let lse = state.finish(None, &mut have);
                assert!((lse - want_lse).abs() <= 2e-6 * want_lse.abs().max(1.0), "{level}: {how}");
                for (have, want) in have.iter().zip(want) {
                    assert!((have - want).abs() < 4e-6, "{level}: {how}: {have} is not {want}");
                }
            };
            let mut left_out = [0.0; 4];
            let mut left = AttentionState::empty(&mut left_out).with_level(level);
            let mut right_memory = vec![[0.0f32; 4]; cuts.len()];
            let mut right: Option<AttentionState<'_>> = None;
            for (pair, memory) in cuts.windows(2).zip(&mut right_memory) {
                let mut part_out = [0.0; 4];
                left.merge(&pushed(&mut part_out, &case, pair[0]..pair[1]).with_level(level));
                // From the right: each part takes in all that came before it.
                let mut part = pushed(memory, &case, pair[0]..pair[1]).with_level(level);
                if let Some(before) = &right {
                    part.merge(before);
                }
                right = Some(part);
            }
            close(&left, "from the left");
            close(&right.expect("there is a part"), "from the right");
        }
    }
}

/// The door for parts: positions split anywhere, merged, are the whole; the sink comes in once,
/// at the end.
fn parts_by_position_merge_to_the_whole<E: Element>() {
    let mut numbers = Numbers::new(4);
    for (turn, mask) in [0, Rules::CAP, Rules::ALIBI, Rules::WINDOW, Rules::SCALE | Rules::SINKS]
        .into_iter()
        .cycle()
        .enumerate()
        .take(20)
    {
        let sizes = sizes(2, 2, 16, 3, numbers.between(3, 700));
        let case = Case::random(sizes, mask, turn as u64);
        let mut cuts = [0, numbers.below(sizes.len), numbers.below(sizes.len), sizes.len + 5];
        cuts.sort_unstable();
        let held = Held::<E>::full(&case, PAGED);
        for level in Level::available() {
            let whole = ask(&held, &case, level);
            let parts: Vec<Answer> = cuts
                .windows(2)
                .map(|pair| {
                    let mut part = case.clone();
                    part.rules.sinks = None;
                    part.rules.positions = Some(pair[0]..pair[1]);
                    ask(&held, &part, level)
                })
                .collect();
            for r in 0..whole.lse.len() {
                let mut out = [0.0; 16];
                let mut state = AttentionState::empty(&mut out).with_level(level);
                for part in &parts {
                    let mut part_out = row(part, &sizes, r);
                    state.merge(&AttentionState::from_output(&mut part_out, part.lse[r]));
                }
                let mut have = [0.0; 16];
                let sink = case.rules.sinks.as_ref().map(|sinks| sinks[r % 4]);
                let lse = state.finish(sink, &mut have);
                assert!((lse - whole.lse[r]).abs() <= 1e-5, "{level}: row {r}");
                for (have, want) in have.iter().zip(row(&whole, &sizes, r)) {
                    assert!((have - want).abs() < 1e-5, "{level}: row {r}: {have} is not {want}");
                }
            }
        }
    }
}

// 4. Infinities, and a NaN that must not vanish.

fn infinite_scores_share_everything_evenly<E: Element>() {
    let inf = f32::INFINITY;
    for at in [[0, 3], [3, 90], [64, 65], [2, 599]] {
        let mut scores: Vec<f32> = (0..600).map(|j| (j % 5) as f32).collect();
        scores[at[0]] = inf;
        scores[at[1]] = inf;
        let case = case_of_scores(&scores, 1);
        let want = (at[0] + at[1] + 2) as f32 / 2.0;
        for level in Level::available() {
            for sinks in [None, Some(vec![3.0])] {
                let mut case = case.clone();
                case.rules.sinks = sinks;
                let have = answer::<E>(&case, PAGED, level);
                if has_scales::<E>() {
                    // A row that is not finite has no scale.
                    assert!(have.out[0].is_nan() && have.lse[0].is_nan(), "{level}: {at:?}");
                } else {
                    assert_eq!((have.out[0], have.lse[0]), (want, inf), "{level}: {at:?}");
                }
            }
        }
    }
}

/// Scores of -inf are keys without weight, also where they come first, and where there is nothing
/// else.
fn minus_infinite_scores_have_no_weight<E: Element>() {
    let ninf = f32::NEG_INFINITY;
    for count in [1, 16, 64, 65, 128, 512, 520] {
        let mut scores = vec![ninf; count];
        scores.extend([0.0, 0.0]);
        let case = case_of_scores(&scores, 3);
        let v = stored::<E>(&case).v;
        for level in Level::available() {
            let have = answer::<E>(&case, PAGED, level);
            if has_scales::<E>() {
                // A row that is not finite has no scale.
                assert!(have.out.iter().chain(&have.lse).all(|x| x.is_nan()), "{level}: {count}");
                continue;
            }
            assert_eq!((have.out[0], have.lse[0]), (0.0, ninf), "{level}: {count}");
            assert_eq!((have.out[1], have.lse[1]), (v[count], 0.0), "{level}: {count}");
            assert_eq!(have.out[2], (v[count] + v[count + 1]) / 2.0, "{level}: {count}");
        }
    }
}

fn a_sink_of_any_size_is_a_limit<E: Element>() {
    let mut case = case_of_scores(&[1.0, 1.0], 1);
    for (sink, want) in [(f32::NEG_INFINITY, 1.5), (f32::INFINITY, 0.0), (1e30, 0.0), (-1e30, 1.5)]
    {
        case.rules.sinks = Some(vec![sink]);
        for level in Level::available() {
            let have = answer::<E>(&case, PAGED, level);
            let off = if has_scales::<E>() { 1e-6 } else { 0.0 };
            assert!((have.out[0] - want).abs() <= off, "{level}: {sink}");
            assert!((have.lse[0] - (1.0 + 2.0f32.ln())).abs() < 1e-6, "{level}: {sink}");
        }
    }
}

/// A NaN in a query, key or value shows in exactly the rows that see it; all others keep their
/// bits. The rows are one chunk, so the bad position is a future one for some of them.
fn not_a_number_shows_where_it_is_seen_and_nowhere_else<E: Element>() {
    let sizes = sizes(2, 2, 20, 30, 150);
    for (mask, what) in [0, Rules::CAP, Rules::ALIBI, Rules::SINKS]
        .into_iter()
        .flat_map(|mask| ["q", "k", "v", "v inf"].map(|what| (mask, what)))
    {
        let mut clean = Case::random(sizes, mask, 9);
        clean.rules.window = Some(40);
        for at in [0, 100, 119, 120, 121, 127, 128, 135, 149] {
            let mut bad = clean.clone();
            // Head 1 of the two; query row 4 of the thirty.
            match what {
                "q" => bad.q[(4 * 4 + 3) * 20 + 7] = f32::NAN,
                "k" => bad.k[(at * 2 + 1) * 20 + 7] = f32::NAN,
                "v" => bad.v[(at * 2 + 1) * 20 + 7] = f32::NAN,
                _ => bad.v[(at * 2 + 1) * 20 + 7] = f32::INFINITY,
            }
            let sees = |r: &usize| match what {
                "q" => *r == 4 * 4 + 3,
                _ => r % 4 >= 2 && clean.sees(r / 4, at),
            };
            let rows: Vec<usize> = (0..120).filter(sees).collect();
            for level in Level::available() {
                let want = answer::<E>(&clean, PAGED, level);
                let have = answer::<E>(&bad, PAGED, level);
                let about = format!("{level}: {what} at {at}, options {mask:#b}");
                assert_eq!(rows_that_differ(&want, &have, &sizes), rows, "{about}");
                for r in &rows {
                    let out = row(&have, &sizes, *r);
                    match what {
                        // All of the row has the scale of the bad number.
                        _ if has_scales::<E>() => {
                            assert!(out.iter().all(|x| x.is_nan()), "{about}");
                        }
                        "v" => assert!(out[7].is_nan() && !out[6].is_nan(), "{about}"),
                        "v inf" => assert!(!out[7].is_finite() && out[6].is_finite(), "{about}"),
                        _ => assert!(out.iter().all(|x| x.is_nan()), "{about}"),
                    }
                    assert_eq!(have.lse[*r].is_nan(), !what.starts_with('v'), "{about}");
                }
            }
        }
    }
}

/// A NaN goes through merges and splits.
fn not_a_number_survives_every_border<E: Element>() {
    for len in [1, 2, 64, 65, 512, 513, 1100] {
        for at in [0, len / 2, len - 1] {
            let mut scores = vec![1.0; len];
            scores[at] = f32::NAN;
            let case = case_of_scores(&scores, 1);
            for level in Level::available() {
                let have = answer::<E>(&case, PAGED, level);
                assert!(have.out[0].is_nan() && have.lse[0].is_nan(), "{level}: {at} of {len}");
            }
        }
    }
    for level in Level::available() {
        let (mut a, mut b) = ([0.0; 1], [0.0; 1]);
        let mut state = AttentionState::empty(&mut a).with_level(level);
        state.push(f32::NAN, &[1.0]);
        let other = pushed(&mut b, &case_of_scores(&[1.0, 2.0], 1), 0..2);
        state.merge(&other);
        let mut answer = [0.0];
        assert!(state.finish(None, &mut answer).is_nan() && answer[0].is_nan(), "{level}");
    }
}

// 6. The soft cap comes before the mask.

fn a_huge_masked_score_does_not_come_back_through_the_cap<E: Element>() {
    let mut scores = vec![0.0; 80];
    scores[10] = 1e8;
    scores[79] = 1e8;
    let mut case = case_of_scores(&scores, 2);
    case.rules.soft_cap = Some(5.0);
    case.rules.window = Some(60);
    for level in Level::available() {
        let have = answer::<E>(&case, PAGED, level);
        check::<E>(&case, &have, 1e-4, "capped");
        // The first row sees sixty zeros: were the huge one there, its weight would be e^5.
        assert!((have.out[0] - 49.5).abs() < 1e-4, "{level}: {}", have.out[0]);
        let e = 5.0f32.exp();
        let want = ((20..79).map(|j| j as f32 + 1.0).sum::<f32>() + e * 80.0) / (59.0 + e);
        assert!((have.out[1] - want).abs() < 1e-3, "{level}: {} {want}", have.out[1]);
    }
}

// 7. Windows.

/// Every query length, context and window up to three tiles, in steps around each border, and all
/// of them up to 24.
fn every_window_against_brute_force<E: Element>() {
    let borders = [1, 2, 15, 16, 17, 48, 63, 64, 65, 66, 100, 127, 128, 129, 191, 192];
    let mut shapes = Vec::new();
    for len in 1..=24 {
        for n_q in 1..=len {
            shapes.extend((1..=len + 1).map(|window| (n_q, len, window)));
        }
    }
    for len in borders {
        for n_q in borders.into_iter().filter(|n_q| *n_q <= len) {
            shapes.extend(borders.map(|window| (n_q, len, window)));
        }
    }
    let all = Case::random(sizes(1, 1, 2, 192, 192), 0, 6);
    // Types beside `f32` take every fifth.
    let step = if is_f32::<E>() { 1 } else { 5 };
    for (turn, (n_q, len, window)) in shapes.into_iter().enumerate().step_by(step) {
        let sizes = Sizes { n_q, len, ..all.sizes };
        let part = |rows: &[f32], n: usize| rows[..n * 2].to_vec();
        let keep_first = (turn % 3 == 0).then_some(turn / 3 % (len + 2));
        let causal = turn % 4 != 0;
        let rules = Rules { window: Some(window), keep_first, causal, ..Rules::PLAIN };
        let (q, k, v) = (part(&all.q, n_q), part(&all.k, len), part(&all.v, len));
        let case = Case { sizes, rules, q, k, v };
        let held = Held::<E>::full(&case, Place::Paged([16, 5, 64][turn % 3], 1));
        for level in Level::available() {
            let have = ask(&held, &case, level);
            check::<E>(
                &case,
                &have,
                4e-6,
                &format!("{level}: n_q {n_q}, len {len}, window {window}"),
            );
            if window == 1 && case.rules.causal && keep_first.is_none() {
                let v = stored::<E>(&case).v;
                let want: Vec<u32> = v[(len - n_q) * 2..].iter().map(|x| x.to_bits()).collect();
                assert_eq!(
                    have.bits()[..2 * n_q],
                    want,
                    "{level}: window 1 is the row's own value"
                );
            }
        }
    }
}

// 8. Sinks.

/// With all scores 0 and a sink of 0, `n` keys share `n / (n + 1)`: a sink counted twice, or once
/// for each split of 512, or not at all where the window left the first split empty, shows at once.
fn a_sink_counts_once<E: Element>() {
    for len in [1, 64, 511, 512, 513, 1024, 1025, 1100] {
        for window in [None, Some(1), Some(30), Some(520)] {
            let mut case = case_of_scores(&vec![0.0; len], 1);
            case.v = vec![1.0; len];
            case.rules.window = window;
            case.rules.sinks = Some(vec![0.0]);
            let n = window.unwrap_or(len).min(len) as f32;
            for level in Level::available() {
                let have = answer::<E>(&case, PAGED, level);
                let about = format!("{level}: {len} {window:?}");
                assert!((have.out[0] - n / (n + 1.0)).abs() < 1e-6, "{about}: {}", have.out[0]);
                assert!((have.lse[0] - n.ln()).abs() < 1e-5, "{about}: sinks stay out");
            }
        }
    }
}

fn a_sink_is_not_scaled_capped_or_biased<E: Element>() {
    for (scale, cap, slope) in [(0.001, None, None), (1.0, Some(0.5), None), (1.0, None, Some(2.0))]
    {
        let mut case = case_of_scores(&[0.0], 1);
        case.rules.scale = Some(scale);
        case.rules.soft_cap = cap;
        case.rules.alibi_slopes = slope.map(|slope| vec![slope]);
        case.rules.sinks = Some(vec![3.0]);
        for level in Level::available() {
            let want = 1.0 / (1.0 + 3.0f32.exp());
            assert!((answer::<E>(&case, PAGED, level).out[0] - want).abs() < 1e-7, "{level}");
        }
    }
}

fn each_head_has_its_own_sink_and_slope<E: Element>() {
    for mask in [Rules::SINKS, Rules::ALIBI] {
        let sizes = sizes(2, 3, 8, 2, 40);
        let mut case = Case::random(sizes, mask, 2);
        let per_head: Vec<f32> = (0..6).map(|head| head as f32 * 0.25).collect();
        match mask {
            Rules::SINKS => case.rules.sinks = Some(per_head),
            _ => case.rules.alibi_slopes = Some(per_head),
        }
        for level in Level::available() {
            check::<E>(&case, &answer::<E>(&case, PAGED, level), 2e-6, "per head");
        }
    }
}

// 9. An option that is accepted and never reached.

/// With every set of options on, taking any one of them away changes bits: at every level,
/// contiguous and paged, for decode and prefill, below and above a split.
fn every_option_is_reached_beside_every_other<E: Element>() {
    for (n_q, len, place) in
        [(1, 60, PAGED), (1, 600, Place::Contiguous(64)), (20, 90, PAGED), (20, 560, PAGED)]
    {
        let sizes = sizes(1, 2, 6, n_q, len);
        let full = Case::random(sizes, Rules::ALL, 11);
        for level in Level::available() {
            let with = |mask: u8| {
                let has = |bit: u8| mask & bit != 0;
                let mut case = full.clone();
                // Values that leave something to see for each of the others.
                case.rules = Rules {
                    scale: has(Rules::SCALE).then_some(0.75),
                    soft_cap: has(Rules::CAP).then_some(0.8),
                    alibi_slopes: has(Rules::ALIBI).then(|| vec![0.0078125, 0.015625]),
                    window: has(Rules::WINDOW).then_some(30),
                    keep_first: has(Rules::FIRST).then_some(5),
                    sinks: has(Rules::SINKS).then(|| vec![0.5, -0.5]),
                    causal: !has(Rules::OPEN),
                    positions: has(Rules::PART).then_some(2..len - 1),
                    tree: Vec::new(),
                };
                answer::<E>(&case, place, level).bits()
            };
            let all: Vec<Vec<u32>> = (0..=Rules::ALL).map(with).collect();
            for mask in 0..=Rules::ALL {
                for bit in (0..8).map(|bit| 1 << bit).filter(|bit| mask & bit != 0) {
                    // The last row sees all keys in any case, and the window may hide what the
                    // range of positions would: two that meet in another row.
                    // First positions are seen beside a window, and without one anyway.
                    let invisible = n_q == 1 && bit == Rules::OPEN
                        || bit == Rules::FIRST && mask & Rules::WINDOW == 0;
                    let same = all[usize::from(mask)] == all[usize::from(mask & !bit)];
                    assert_eq!(same, invisible, "{level}: {bit:#b} of {mask:#b} at {len}");
                }
            }
        }
    }
}

/// ALiBi is by distance from the query's own position, to both sides.
fn slopes_are_by_distance<E: Element>() {
    let mut case = Case::random(sizes(1, 2, 4, 7, 70), Rules::ALIBI | Rules::OPEN, 1);
    case.rules.alibi_slopes = Some(vec![0.5, -0.125]);
    for level in Level::available() {
        check::<E>(&case, &answer::<E>(&case, PAGED, level), 1e-5, "slopes");
    }
}

/// A cap far above all scores is nearly no cap, and a tiny one makes all weights equal.
fn the_cap_has_both_limits<E: Element>() {
    let mut case = Case::random(sizes(1, 1, 16, 1, 50), 0, 1);
    for level in Level::available() {
        case.rules.soft_cap = Some(1e6);
        let capped = answer::<E>(&case, PAGED, level);
        check::<E>(&Case { rules: Rules::PLAIN, ..case.clone() }, &capped, 1e-5, "no cap");
        case.rules.soft_cap = Some(1e-6);
        let flat = answer::<E>(&case, PAGED, level);
        let mean = stored::<E>(&case).v.chunks_exact(16).map(|row| row[3]).sum::<f32>() / 50.0;
        assert!((flat.out[3] - mean).abs() < 1e-5, "{level}");
    }
}

every_type! {
    scores_near_minus_a_million_count,
    masked_keys_stay_masked_under_very_low_scores,
    rows_that_see_nothing_are_zero_and_their_neighbours_untouched,
    an_empty_sequence_gives_zeros,
    more_rows_than_positions_may_ask_where_no_position_matters,
    no_query_rows_are_legal,
    parts_by_position_merge_to_the_whole,
    infinite_scores_share_everything_evenly,
    minus_infinite_scores_have_no_weight,
    a_sink_of_any_size_is_a_limit,
    not_a_number_shows_where_it_is_seen_and_nowhere_else,
    not_a_number_survives_every_border,
    a_huge_masked_score_does_not_come_back_through_the_cap,
    every_window_against_brute_force,
    a_sink_counts_once,
    a_sink_is_not_scaled_capped_or_biased,
    each_head_has_its_own_sink_and_slope,
    every_option_is_reached_beside_every_other,
    slopes_are_by_distance,
    the_cap_has_both_limits,
}
