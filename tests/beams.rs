//! Beam search by forks: every beam gives the bits of a sequence that shares nothing, and after
//! each step there are as many blocks as there are different ones.
#![allow(clippy::std_instead_of_alloc, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

use std::collections::BTreeSet;

use paged_kv::attention::{causal_gqa_attention, causal_gqa_attention_paged};
use paged_kv::cache::{KvCache, PagedKvStore, PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::types::is_f32;
use paged_kv::{Element, KvDims, KvShape, every_type};

const BEAMS: usize = 4;
const LAYERS: usize = 2;
const BLOCK: usize = 4;
const HEADS: usize = 4;

/// What a beam would be if it shared nothing: its tags, and a contiguous cache for each layer.
struct Alone<E: Element> {
    tags: Vec<u64>,
    layers: Vec<KvCache<E>>,
}

impl<E: Element> Alone<E> {
    /// Written from the first tag on.
    fn of(tags: &[u64], shape: KvShape) -> Self {
        let layers = (0..LAYERS).map(|_| KvCache::with_shape(shape)).collect();
        let mut alone = Alone { tags: Vec::new(), layers };
        tags.iter().for_each(|&tag| alone.push(tag));
        alone
    }

    fn push(&mut self, tag: u64) {
        self.tags.push(tag);
        for (layer, cache) in self.layers.iter_mut().enumerate() {
            let (k, v) = rows(tag, layer);
            cache.push(&k, &v).expect("no pool bounds it");
        }
    }
}

fn shape() -> KvShape {
    KvShape::new(KvDims { block_size: BLOCK, n_kv_heads: 2, k_width: 6, v_width: 5 }).unwrap()
}

fn rows(tag: u64, layer: usize) -> (Vec<f32>, Vec<f32>) {
    let mut numbers = Numbers::new(tag * LAYERS as u64 + layer as u64);
    (numbers.normals(2 * 6), numbers.normals(2 * 5))
}

fn query(tag: u64, layer: usize) -> Vec<f32> {
    Numbers::new(!(tag * LAYERS as u64 + layer as u64)).normals(HEADS * 6)
}

/// Blocks that differ: two beams have the same block if its last row is the same row.
fn different_blocks<E: Element>(alone: &[Alone<E>]) -> usize {
    let of_beam = |beam: &Alone<E>| -> Vec<(usize, u64)> {
        beam.tags.chunks(BLOCK).map(|block| *block.last().unwrap()).enumerate().collect()
    };
    alone.iter().flat_map(of_beam).collect::<BTreeSet<_>>().len()
}

fn four_beams_are_four_sequences<E: Element>() {
    let steps = if is_f32::<E>() { 200 } else { 40 };
    // What four sequences of their own would need, and not a block more.
    let blocks = BEAMS * (steps as usize + 1).div_ceil(BLOCK);
    let stores = (0..LAYERS).map(|_| {
        let mut store = PagedKvStore::<E>::with_shape(shape(), blocks).unwrap();
        store.poison_free();
        store
    });
    let shared = SharedPagedKv::from_stores(stores.collect());
    let mut beams: Vec<_> = (0..BEAMS).map(|_| PagedSequence::new(&shared)).collect();
    let mut alone: Vec<_> = (0..BEAMS).map(|_| Alone::<E>::of(&[], shape())).collect();
    let mut chance = Numbers::new(4);
    let mut copies = 0;
    for step in 0..steps {
        // In two steps of three somebody goes on from somebody else, or all from one.
        if step % 3 != 0 {
            let pick = |_| (chance.normal().abs() * 3.0) as usize % BEAMS;
            let parents: [usize; BEAMS] = core::array::from_fn(pick);
            let free = shared.free_groups();
            beams = parents.iter().map(|&parent| beams[parent].fork().unwrap()).collect();
            assert!(shared.free_groups() >= free, "a fork takes no block");
            copies += usize::from(step % BLOCK as u64 != 0);
            alone = parents.iter().map(|&p| Alone::of(&alone[p].tags, shape())).collect();
        }
        let tags: [u64; BEAMS] = core::array::from_fn(|beam| 1 + step * BEAMS as u64 + beam as u64);
        alone.iter_mut().zip(tags).for_each(|(alone, tag)| alone.push(tag));
        // All rooms first and the rows of a layer under one guard, as a batch does it; or one beam
        // after the other.
        if step % 2 == 0 {
            beams.iter_mut().for_each(|beam| beam.reserve(1).unwrap());
            for layer in 0..LAYERS {
                let mut store = shared.write(layer);
                for (beam, tag) in beams.iter_mut().zip(tags) {
                    let (k, v) = rows(tag, layer);
                    beam.append_to(&mut store, layer, &k, &v, 1).unwrap();
                }
            }
        } else {
            for (beam, tag) in beams.iter_mut().zip(tags) {
                beam.reserve(1).unwrap();
                for layer in 0..LAYERS {
                    let (k, v) = rows(tag, layer);
                    beam.push(layer, &k, &v).unwrap();
                }
            }
        }
        for layer in 0..LAYERS {
            let store = shared.read(layer);
            for ((beam, alone), tag) in beams.iter().zip(&alone).zip(tags) {
                let q = query(tag, layer);
                let have = causal_gqa_attention_paged(&q, &store, beam.cache(layer), HEADS);
                let want = causal_gqa_attention(&q, &alone.layers[layer], HEADS);
                let bits = |out: Vec<f32>| out.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(have.unwrap()), bits(want.unwrap()), "step {step}, layer {layer}");
            }
        }
        beams.iter_mut().for_each(|beam| beam.commit(1).unwrap());
        for layer in 0..LAYERS {
            let held = blocks - shared.free_blocks(layer);
            assert_eq!(held, different_blocks(&alone), "step {step}");
        }
        shared.check_invariants(beams.iter().flat_map(PagedSequence::holders)).unwrap();
    }
    assert!(copies > 10, "blocks that are being filled were shared {copies} times");
    drop(beams);
    assert_eq!(shared.free_groups(), blocks);
}

every_type! { four_beams_are_four_sequences }
