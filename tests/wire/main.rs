//! Saved sequences: the same bits elsewhere, the same bytes everywhere, and nothing at all from bytes
//! that are not whole.

mod bytes;
mod layers;
mod memory;
mod single;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{Element, GqaShape, KvDims, KvShape};

/// Sizes that no cell, group or vector divides.
fn shape(block_size: usize) -> KvShape {
    KvShape::new(KvDims { block_size, n_kv_heads: 2, k_width: 9, v_width: 7 }).unwrap()
}

/// The rows of these positions in a layer of this shape; one in eleven is all zeros.
fn rows(shape: KvShape, tag: u64, positions: core::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for position in positions {
        let mut numbers = Numbers::new(tag << 32 | position as u64);
        let size = if position % 11 == 7 { 0.0 } else { 1.0 };
        k.extend(numbers.normals(shape.k_row_len()).iter().map(|x| x * size));
        v.extend(numbers.normals(shape.v_row_len()).iter().map(|x| x * size));
    }
    (k, v)
}

/// The answer of the last `n_q` rows of a cache, as bits.
fn ask<E: Element>(
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    window: Option<KvWindow>,
    n_q: usize,
) -> Vec<u32> {
    let gqa = GqaShape::new(store.shape(), 2 * store.shape().n_kv_heads()).unwrap();
    let q = Numbers::new(3).normals(n_q * gqa.q_row_len());
    let mut options = AttentionOptions::new();
    if let Some(window) = window {
        options = options.window(window.window()).keep_first(window.first());
    }
    let mut out = vec![f32::NAN; n_q * gqa.out_row_len()];
    let mut scratch = vec![f32::NAN; attention_scratch_len(&gqa, n_q)];
    let heads = gqa.n_heads();
    causal_gqa_attention_paged_into(&q, store, cache, heads, &options, &mut out, &mut scratch)
        .unwrap();
    out.iter().map(|number| number.to_bits()).collect()
}
