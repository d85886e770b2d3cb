//! Any bytes are a saved sequence, or an error that has changed nothing.
//!
//! The first byte chooses the stored type, the block size of the pool, its window, and whether the checksums
//! of the rest are made right first, so that what stands behind them is looked at too. What is
//! restored is saved again, restored from that, and saved once more: the same bytes. It is attended, and
//! appended to.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{
    KvWindow, LayerSpec, Mixed, PagedKvCache, PagedKvStore, PagedSequence, SharedPagedKv,
};
use paged_kv::internal::saved_bytes::reseal;
use paged_kv::wire::{Label, Saved};
use paged_kv::{Element, GqaShape, Int4, Int8, KvDims, KvShape, bf16, f16};

const BLOCKS: usize = 24;

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, rest)) = bytes.split_first() else { return };
    let mut file = rest.to_vec();
    if kind & 128 == 0 {
        reseal(&mut file);
    }
    let block_size = [2, 3, 16][usize::from(kind) / 8 % 3];
    let window = (kind & 64 != 0).then(|| KvWindow::last(3));
    match kind % 8 {
        0 | 5 => judge::<f32>(&file, block_size, window),
        1 | 6 => judge::<f16>(&file, block_size, window),
        2 | 7 => judge::<bf16>(&file, block_size, window),
        3 => judge::<Int8>(&file, block_size, window),
        _ => judge::<Int4>(&file, block_size, window),
    }
});

fn judge<E: Element>(file: &[u8], block_size: usize, window: Option<KvWindow>) {
    let dims = KvDims { block_size, n_kv_heads: 1, k_width: 3, v_width: 2 };
    let shape = KvShape::new(dims).unwrap();
    alone::<E>(file, shape, window);
    layers::<E>(file, shape, window);
}

fn blank(window: Option<KvWindow>) -> PagedKvCache {
    window.map_or_else(PagedKvCache::new, PagedKvCache::with_window)
}

fn alone<E: Element>(file: &[u8], shape: KvShape, window: Option<KvWindow>) {
    let mut store = PagedKvStore::<E>::with_shape(shape, BLOCKS).unwrap();
    store.poison_free();
    let mut cache = blank(window);
    let Ok(saved) = Saved::open(file) else { return };
    let (tokens, salt) = (saved.tokens().to_vec(), saved.salt().to_vec());
    let label = Label::new().tokens(&tokens).salt(&salt);
    if cache.restore(&mut store, saved).is_err() {
        assert!(cache.is_empty() && cache.block_table().is_empty());
        assert_eq!(store.check_invariants([]), Ok(()));
        return;
    }
    assert_eq!(store.check_invariants([cache.block_table()]), Ok(()));

    let mut once = Vec::new();
    cache.save(&store, &label, &mut once).unwrap();
    let (mut other, mut twice) =
        (PagedKvStore::<E>::with_shape(shape, BLOCKS).unwrap(), Vec::new());
    let mut back = blank(window);
    back.restore(&mut other, Saved::open(&once[..]).unwrap()).unwrap();
    back.save(&other, &label, &mut twice).unwrap();
    assert_eq!(once, twice);

    let _ = cache.push(&mut store, &[1.0; 3], &[1.0; 2]);
    let gqa = GqaShape::new(shape, 2).unwrap();
    let mut options = AttentionOptions::new();
    if window.is_some() {
        options = options.window(3);
    }
    if !cache.is_empty() {
        let (mut out, mut scratch) = ([0.0; 4], vec![0.0; attention_scratch_len(&gqa, 1)]);
        let q = [0.5; 6];
        causal_gqa_attention_paged_into(&q, &store, &cache, 2, &options, &mut out, &mut scratch)
            .unwrap();
    }
    cache.release(&mut store).unwrap();
    assert_eq!(store.check_invariants([]), Ok(()));
}

fn layers<E: Element>(file: &[u8], shape: KvShape, window: Option<KvWindow>) {
    let spec = LayerSpec::new(shape, BLOCKS).element::<E>();
    let spec = window.map_or(spec, |window| spec.window(window));
    let shared = SharedPagedKv::<Mixed>::with_layers(&[spec, spec, LayerSpec::same_as(0)]).unwrap();
    let mut sequence = PagedSequence::new(&shared);
    let Ok(saved) = Saved::open(file) else { return };
    if sequence.restore(saved).is_err() {
        assert!(sequence.is_empty());
        assert_eq!(shared.check_invariants([]), Ok(()));
        return;
    }
    assert_eq!(shared.check_invariants(sequence.holders()), Ok(()));
    let mut bytes = Vec::new();
    sequence.save(&Label::new(), &mut bytes).unwrap();
    drop(sequence);
    assert_eq!(shared.check_invariants([]), Ok(()));
}
