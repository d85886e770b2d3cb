//! Drafts that branch: query rows that are a tree of tokens see their ancestors and nobody else.

use paged_kv::attention::{
    AttentionOptions, TreeMask, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{BatchLayer, BatchPlan, Inline, SequenceRows, shared_prefixes};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::doors::{Answer, Held, Place, answer, stored};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, attention};
use paged_kv::internal::types::cases;
use paged_kv::{AttentionError, Element, GqaShape, KvShape, Level, every_type};
use proptest::prelude::*;

/// A tree in which a row follows one of the rows a little before it, or the text.
fn random_tree(rows: usize, numbers: &mut Numbers) -> Vec<Option<usize>> {
    let parent = |row: usize| {
        let back = numbers.between(0, 4);
        (back > 0).then(|| row.checked_sub(back)).flatten()
    };
    (0..rows).map(parent).collect()
}

fn chain(rows: usize) -> Vec<Option<usize>> {
    (0..rows).map(|row| row.checked_sub(1)).collect()
}

fn assert_near<E: Element>(case: &Case, have: &Answer, about: &str) {
    let truth = attention(&stored::<E>(case));
    let width = case.sizes.v_width;
    for (index, (have, want)) in have.out.iter().zip(&truth.out).enumerate() {
        let off = (f64::from(*have) - want).abs();
        let bound = truth.out_bound(&case.rules, index / width);
        assert!(off <= bound, "{about}: number {index}: {have}, not {want} within {bound:e}");
    }
    for (row, (have, want)) in have.lse.iter().zip(&truth.lse).enumerate() {
        let off = (f64::from(*have) - want).abs();
        let same = f64::from(*have) == *want;
        assert!(same || off <= truth.lse_bound(row), "{about}: LSE {have}, not {want}");
    }
}

fn rows_see_their_ancestors_alone<E: Element>() {
    let config = ProptestConfig::with_cases(cases::<E>(60, 4));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let cases =
        (1usize..3, 1usize..5, 1usize..40, 1usize..90, 0usize..3, any::<u8>(), any::<u64>());
    let tried = runner.run(&cases, |(heads, group, width, rows, before, mask, seed)| {
        let mut numbers = Numbers::new(seed);
        let before = [0, numbers.between(0, 64), numbers.between(0, 1100)][before];
        let n_q = rows + numbers.between(0, before.min(6));
        let len = before + rows;
        let sizes =
            Sizes { n_kv_heads: heads, group, k_width: width, v_width: width + 3, n_q, len };
        let mut case = Case::random(sizes, mask & !Rules::SCALE, seed);
        case.rules.tree = random_tree(rows, &mut numbers);
        for level in Level::available() {
            for place in [Place::Contiguous(64), Place::Paged(16, seed), Place::Paged(7, seed)] {
                let have = answer::<E>(&case, place, level);
                assert_near::<E>(&case, &have, &format!("{level}, {place:?}, {sizes:?}"));
            }
        }
        Ok(())
    });
    if let Err(error) = tried {
        panic!("{error}");
    }
}

fn a_chain_is_a_text_bit_by_bit<E: Element>() {
    for (rows, len) in [(1, 1), (5, 70), (64, 64), (70, 200), (9, 1030)] {
        let sizes =
            Sizes { n_kv_heads: 2, group: 3, k_width: 24, v_width: 20, n_q: rows.min(len), len };
        let case = Case::random(sizes, 0, 5);
        let mut tree = case.clone();
        tree.rules.tree = chain(rows);
        for level in Level::available() {
            let (text, tree) = (
                answer::<E>(&case, Place::Paged(16, 3), level),
                answer::<E>(&tree, Place::Paged(16, 3), level),
            );
            assert_eq!(text.bits(), tree.bits(), "{level}, {rows} of {len}");
        }
    }
}

/// Bits are the same for every level of a class, every block size, and however the rows are asked.
fn the_same_bits_however_asked<E: Element>() {
    let sizes = Sizes { n_kv_heads: 2, group: 4, k_width: 33, v_width: 18, n_q: 40, len: 600 };
    let mut case = Case::random(sizes, 0, 8);
    case.rules.tree = random_tree(40, &mut Numbers::new(9));
    for fused in [false, true] {
        let mut first: Option<Vec<u32>> = None;
        for level in Level::available().filter(|level| level.is_fused() == fused) {
            for place in [Place::Contiguous(64), Place::Paged(16, 1), Place::Paged(5, 2)] {
                let bits = answer::<E>(&case, place, level).bits();
                match &first {
                    Some(first) => assert_eq!(*first, bits, "{level}, {place:?}"),
                    None => first = Some(bits),
                }
            }
        }
    }
}

/// 0 x inf and 0 x NaN are not 0: what a row does not see never meets its weights.
fn what_is_not_seen_may_be_anything<E: Element>() {
    let sizes = Sizes { n_kv_heads: 1, group: 2, k_width: 8, v_width: 8, n_q: 6, len: 70 };
    // Two branches of three: the second sees nothing of the first.
    let mut case = Case::random(sizes, 0, 3);
    case.rules.tree = vec![None, Some(0), Some(1), None, Some(3), Some(4)];
    let clean = case.clone();
    for bad in [f32::NAN, f32::INFINITY] {
        case.v[64 * 8..67 * 8].fill(bad);
        case.k[64 * 8..67 * 8].fill(bad);
        for level in Level::available() {
            let (clean, have) = (
                answer::<E>(&clean, Place::Paged(16, 4), level),
                answer::<E>(&case, Place::Paged(16, 4), level),
            );
            let half = 3 * 2 * 8;
            assert!(have.out[..half].iter().all(|number| !number.is_finite()), "{level}");
            assert_eq!(have.out[half..], clean.out[half..], "{level}");
        }
    }
}

/// Rows of several sequences with trees of their own, one without, and a prefix in common.
fn a_batch_gives_each_sequence_its_own<E: Element>() {
    let (width, heads, n_heads) = (16, 2, 8);
    let shape = KvShape::square(16, heads, width).unwrap();
    let gqa = GqaShape::new(shape, n_heads).unwrap();
    let mut numbers = Numbers::new(11);
    let mut store = PagedKvStore::<E>::with_shape(shape, 200).unwrap();
    let mut prefix = PagedKvCache::new();
    let rows = numbers.normals(128 * heads * width);
    prefix.append(&mut store, &rows, &rows, 128).unwrap();
    let mut sequences = Vec::new();
    for more in [5, 40, 3, 70] {
        let mut sequence = prefix.fork(&mut store).unwrap();
        let rows = numbers.normals(more * heads * width);
        sequence.append(&mut store, &rows, &rows, more).unwrap();
        sequences.push(sequence);
    }
    let trees = [random_tree(5, &mut numbers), random_tree(33, &mut numbers), vec![], chain(70)];
    let n_q = [5, 40, 1, 70];
    let mut words: Vec<Vec<u64>> = trees
        .iter()
        .map(|tree| vec![0; tree.len() * TreeMask::words_for_row(tree.len())])
        .collect();
    let masks: Vec<TreeMask<'_>> = trees
        .iter()
        .zip(&mut words)
        .map(|(tree, words)| TreeMask::from_parents(tree, words).unwrap())
        .collect();
    let q = numbers.normals(n_q.iter().sum::<usize>() * n_heads * width);
    let planned: Vec<SequenceRows> = sequences
        .iter()
        .zip(n_q)
        .map(|(sequence, rows)| SequenceRows { len: sequence.seq_len(), rows })
        .collect();
    let caches: Vec<&PagedKvCache> = sequences.iter().collect();
    let shared = shared_prefixes(16, &caches);
    let plan = BatchPlan::with_shared(gqa, &planned, &shared).unwrap();
    let mut out = vec![0.0; plan.out_len()];
    let mut scratch = vec![f32::NAN; plan.scratch_len()];
    let options = AttentionOptions::new().trees(&masks);
    let layer = BatchLayer { store: &store, sequences: &caches, q: &q };
    plan.attend(&layer, &options, &mut out[..], &mut scratch, &Inline).unwrap();
    let mut first = 0;
    for (index, rows) in n_q.into_iter().enumerate() {
        let part = first * n_heads * width..(first + rows) * n_heads * width;
        let mut alone = vec![0.0; part.len()];
        let mut scratch = vec![0.0; attention_scratch_len(&gqa, rows)];
        let mask = [masks[index]];
        let options = AttentionOptions::new().trees(&mask);
        let (q, cache) = (&q[part.clone()], &sequences[index]);
        causal_gqa_attention_paged_into(
            q,
            &store,
            cache,
            n_heads,
            &options,
            &mut alone[..],
            &mut scratch,
        )
        .unwrap();
        assert_eq!(alone, out[part], "sequence {index}");
        first += rows;
    }
    let two = AttentionOptions::new().trees(&masks[..2]);
    let refused = plan.attend(&layer, &two, &mut out[..], &mut scratch, &Inline);
    assert_eq!(refused, Err(AttentionError::Trees { need: 4, have: 2 }.into()));
}

every_type! {
    rows_see_their_ancestors_alone,
    a_chain_is_a_text_bit_by_bit,
    the_same_bits_however_asked,
    what_is_not_seen_may_be_anything,
    a_batch_gives_each_sequence_its_own,
}

#[test]
fn masks_that_are_no_tree_are_refused() {
    let wrong = |rows, words: &[u64]| TreeMask::new(rows, words).unwrap_err();
    assert_eq!(wrong(2, &[1]), AttentionError::TreeLength { need: 2, have: 1 });
    assert_eq!(wrong(0, &[1]), AttentionError::TreeLength { need: 0, have: 1 });
    // A row that does not see itself, one that sees the next, one that sees what is not there.
    assert_eq!(wrong(2, &[1, 1]), AttentionError::TreeBit { row: 1, column: 1 });
    assert_eq!(wrong(2, &[3, 2]), AttentionError::TreeBit { row: 0, column: 1 });
    assert_eq!(wrong(2, &[1, 2 | 1 << 63]), AttentionError::TreeBit { row: 1, column: 63 });
    let mut words = vec![0; 65 * 2];
    (0..65).for_each(|row| words[row * 2 + row / 64] = 1 << (row % 64));
    assert!(TreeMask::new(65, &words).is_ok());
    words[3 * 2 + 1] = 2;
    assert_eq!(wrong(65, &words), AttentionError::TreeBit { row: 3, column: 65 });

    let mut words = [7; 2];
    let refused = TreeMask::from_parents(&[None, Some(1)], &mut words);
    assert_eq!(refused, Err(AttentionError::TreeBit { row: 1, column: 1 }));
    assert_eq!(words, [7; 2], "nothing is written");
}

#[test]
fn a_tree_has_no_more_rows_than_the_query() {
    let sizes = Sizes { n_kv_heads: 1, group: 1, k_width: 4, v_width: 4, n_q: 2, len: 9 };
    let mut case = Case::random(sizes, 0, 1);
    case.rules.tree = chain(3);
    let held = Held::<f32>::full(&case, Place::Contiguous(16));
    let refused = held.ask(&case.q, 1, &case.rules, Level::detect());
    assert_eq!(refused, Err(AttentionError::TreeRows { sequence: 0, most: 2, have: 3 }));
}
