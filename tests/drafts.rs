//! Speculative decoding: drafts that branch are verified in one call, and the accepted path stays.

#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::attention::{
    AttentionOptions, TreeMask, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{Element, GqaShape, KvShape, PagedKvError, every_type};

const HEADS: usize = 2;
const N_HEADS: usize = 6;
const WIDTH: usize = 36;
const LAYERS: usize = 2;

type Sequence<'s, E> = PagedSequence<&'s SharedPagedKv<E>, E>;

/// The key and value rows of some tokens in one layer.
fn rows(tokens: &[usize], layer: usize) -> (Vec<f32>, Vec<f32>) {
    let row = |token: usize, side: u64| {
        Numbers::new(token as u64 * 10 + layer as u64 * 2 + side).normals(HEADS * WIDTH)
    };
    (
        tokens.iter().flat_map(|token| row(*token, 0)).collect(),
        tokens.iter().flat_map(|token| row(*token, 1)).collect(),
    )
}

fn write<E: Element>(sequence: &mut Sequence<'_, E>, tokens: &[usize]) {
    sequence.reserve(tokens.len()).unwrap();
    for layer in 0..LAYERS {
        let (k, v) = rows(tokens, layer);
        sequence.append(layer, &k, &v, tokens.len()).unwrap();
    }
}

/// The answer to the last `n_q` rows in one layer, as bits.
fn ask<E: Element>(
    sequence: &Sequence<'_, E>,
    layer: usize,
    n_q: usize,
    tree: TreeMask<'_>,
) -> Vec<u32> {
    let q = Numbers::new(99).normals(n_q * N_HEADS * WIDTH);
    let store = sequence.shared().read(layer);
    let shape = GqaShape::new(store.shape(), N_HEADS).unwrap();
    let mut out = vec![0.0; q.len()];
    let mut scratch = vec![0.0; attention_scratch_len(&shape, n_q)];
    let trees = [tree];
    let options = AttentionOptions::new().trees(&trees);
    let cache = sequence.cache(layer);
    causal_gqa_attention_paged_into(
        &q,
        &store,
        cache,
        N_HEADS,
        &options,
        &mut out[..],
        &mut scratch,
    )
    .unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

/// What is kept is what straight decoding of the accepted tokens would have left, bit by bit, whatever
/// was verified before and comes behind.
fn a_path_through_drafts_is_a_text<E: Element>() {
    // The drafts 1000.. are a tree; each path goes from its root down.
    let parents = [None, Some(0), Some(1), Some(0), Some(3), Some(3), None, Some(6)];
    let paths: [&[usize]; 6] = [&[], &[0], &[0, 1, 2], &[0, 3, 5], &[6, 7], &[6]];
    let text: Vec<usize> = (0..27).collect();
    for block_size in [16, 5, 64] {
        let shape = KvShape::square(block_size, HEADS, WIDTH).unwrap();
        let shared = SharedPagedKv::<E>::with_shape(LAYERS, shape, 40).unwrap();
        for path in paths {
            let mut words = [0; 8];
            let tree = TreeMask::from_parents(&parents, &mut words).unwrap();
            let mut drafted = Sequence::new(&shared);
            let mut straight = Sequence::new(&shared);
            for sequence in [&mut drafted, &mut straight] {
                write(sequence, &text);
                sequence.commit(text.len()).unwrap();
            }
            let drafts: Vec<usize> = (1000..1008).collect();
            write(&mut drafted, &drafts);
            let verified = ask(&drafted, 1, drafts.len(), tree);
            assert_eq!(verified.len(), drafts.len() * N_HEADS * WIDTH);
            drafted.compact(path).unwrap();

            let accepted: Vec<usize> = path.iter().map(|row| 1000 + row).collect();
            write(&mut straight, &accepted);
            straight.commit(accepted.len()).unwrap();
            for step in 0..3 {
                assert_eq!(drafted.len(), straight.len());
                for layer in 0..LAYERS {
                    let [a, b] = [&drafted, &straight].map(|s| ask(s, layer, 4, TreeMask::NONE));
                    assert_eq!(a, b, "blocks of {block_size}, {path:?}, layer {layer}, {step}");
                }
                for sequence in [&mut drafted, &mut straight] {
                    write(sequence, &[2000 + step]);
                    sequence.commit(1).unwrap();
                }
            }
            let held = drafted.holders().chain(straight.holders());
            shared.check_invariants(held).unwrap();
        }
        assert_eq!(shared.free_groups(), 40);
    }
}

every_type! { a_path_through_drafts_is_a_text }

#[test]
fn a_path_that_cannot_be_kept_changes_nothing() {
    let shape = KvShape::square(4, HEADS, WIDTH).unwrap();
    let shared = SharedPagedKv::<f32>::with_shape(LAYERS, shape, 8).unwrap();
    let mut sequence = Sequence::new(&shared);
    write(&mut sequence, &[0, 1, 2]);
    sequence.commit(3).unwrap();
    write(&mut sequence, &[5, 6, 7]);
    let before = ask(&sequence, 0, 3, TreeMask::NONE);
    assert_eq!(sequence.compact(&[1, 1]), Err(PagedKvError::PathOrder { index: 1 }));
    assert_eq!(sequence.compact(&[0, 2, 1]), Err(PagedKvError::PathOrder { index: 2 }));
    let behind = PagedKvError::LayerBehind { layer: 0, need: 7, have: 6 };
    assert_eq!(sequence.compact(&[1, 3]), Err(behind));
    assert_eq!(sequence.compact(&[usize::MAX]), Err(PagedKvError::TooLong));
    assert_eq!(ask(&sequence, 0, 3, TreeMask::NONE), before);
    assert_eq!(sequence.len(), 3);
    sequence.compact(&[2]).unwrap();
    assert_eq!(sequence.len(), 4);
}
