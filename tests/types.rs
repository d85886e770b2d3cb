//! What becomes of numbers that are stored, for every type: how far they are from what they were,
//! who else is touched when they are written, and that every door of the caches takes every type.
#![expect(clippy::std_instead_of_alloc, reason = "a test runs on std")]

use paged_kv::cache::{KvBlockPool, KvCache, PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::types::{has_scales, some_of, storing_error};
use paged_kv::{Element, KvDims, KvShape, every_type};
use proptest::prelude::*;
use std::sync::Arc;

fn shape(block_size: usize, n_kv_heads: usize, k_width: usize, v_width: usize) -> KvShape {
    KvShape::new(KvDims { block_size, n_kv_heads, k_width, v_width }).unwrap()
}

/// The key and value row of a position, all heads.
type Rows = (Vec<f32>, Vec<f32>);

fn random_rows(shape: KvShape, n: usize, numbers: &mut Numbers) -> Rows {
    (numbers.normals(n * shape.k_row_len()), numbers.normals(n * shape.v_row_len()))
}

fn read_paged<E: Element>(store: &PagedKvStore<E>, cache: &PagedKvCache, position: usize) -> Rows {
    let shape = store.shape();
    let (mut k, mut v) = (vec![f32::NAN; shape.k_row_len()], vec![f32::NAN; shape.v_row_len()]);
    for (head, row) in k.chunks_exact_mut(shape.k_width()).enumerate() {
        cache.copy_k_row(store, position, head, row).unwrap();
    }
    for (head, row) in v.chunks_exact_mut(shape.v_width()).enumerate() {
        cache.copy_v_row(store, position, head, row).unwrap();
    }
    (k, v)
}

fn read<E: Element>(cache: &KvCache<E>, position: usize) -> Rows {
    let shape = cache.shape();
    let (mut k, mut v) = (vec![f32::NAN; shape.k_row_len()], vec![f32::NAN; shape.v_row_len()]);
    for (head, row) in k.chunks_exact_mut(shape.k_width()).enumerate() {
        cache.copy_k_row(position, head, row).unwrap();
    }
    for (head, row) in v.chunks_exact_mut(shape.v_width()).enumerate() {
        cache.copy_v_row(position, head, row).unwrap();
    }
    (k, v)
}

/// Any float that is one, small ones as likely as large ones.
fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(|bits| {
        let number = f32::from_bits(bits);
        if number.is_finite() { number } else { f32::from_bits(bits & 0x807f_ffff) }
    })
}

/// Rows of ordinary numbers, of one size or of sizes far apart, and rows of anything.
fn any_row() -> impl Strategy<Value = Vec<f32>> {
    let size = prop_oneof![Just(1.0_f32), Just(1e-3), Just(100.0), Just(1e4)];
    let normal = (1_usize..=200, any::<u64>(), size).prop_map(|(width, seed, size)| {
        let mut row = Numbers::new(seed).normals(width);
        row.iter_mut().for_each(|x| *x *= size);
        row
    });
    prop_oneof![normal, proptest::collection::vec(finite(), 1..200)]
}

/// The largest error of storing a number that the type's documentation allows.
fn allowed<E: Element>(number: f32, group: &[f32]) -> f64 {
    let size = |x: f32| f64::from(x.abs());
    let most = group.iter().copied().map(size).fold(0.0, f64::max);
    match E::NAME {
        // Half of the smallest denormal number, or infinity: see below.
        "f16" => (size(number) * storing_error::<E>()).max(2.0_f64.powi(-25)),
        "bf16" => (size(number) * storing_error::<E>()).max(2.0_f64.powi(-134)),
        // Groups that are stored as zeros.
        "int8" if most < 1.5e-36 => most,
        "int4" if most < 8.3e-38 => most,
        _ => most * storing_error::<E>(),
    }
}

/// Numbers that have none of this size become infinite.
fn overflows<E: Element>(number: f32) -> bool {
    match E::NAME {
        "f16" => number.abs() >= 65_520.0,
        "bf16" => number.abs() >= f32::from_bits(0x7f7f_8000),
        _ => false,
    }
}

fn stored_numbers_are_near<E: Element>() {
    let config =
        ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(some_of(2000)) };
    let worst = core::cell::Cell::new(0.0_f64);
    proptest!(config, |(row in any_row())| {
        let mut cache = KvCache::<E>::with_shape(shape(3, 1, row.len(), row.len()));
        cache.push(&row, &row).unwrap();
        let (k, v) = read(&cache, 0);
        prop_assert_eq!(&k, &v, "a key is stored like a value");
        for (at, (have, number)) in k.iter().zip(&row).enumerate() {
            if overflows::<E>(*number) {
                prop_assert_eq!(*have, f32::INFINITY.copysign(*number));
                continue;
            }
            let group = match E::META_GROUP {
                0 => &row[at..=at],
                usize::MAX => &row[..],
                len => &row[at / len * len..row.len().min(at / len * len + len)],
            };
            let (error, allowed) = (f64::from(*have) - f64::from(*number), allowed::<E>(*number, group));
            prop_assert!(error.abs() <= allowed, "{} {number} is {have}, off by {error:e}", E::NAME);
            if *number != 0.0 && allowed > 1e-30 {
                let part = error.abs() / (allowed / storing_error::<E>().max(f64::MIN_POSITIVE));
                worst.set(worst.get().max(part));
            }
        }
    });
    let (worst, allowed) = (worst.get(), storing_error::<E>());
    println!("{}: off by {worst:.6} of the largest number, allowed {allowed:.6}", E::NAME);
}

/// What was stored once is stored again as it is: reading a row back and writing it somewhere else
/// loses nothing more.
fn what_was_stored_is_stored_exactly<E: Element>() {
    let mut numbers = Numbers::new(3);
    for width in 1..=140 {
        let mut once = KvCache::<E>::with_shape(shape(4, 1, width, width));
        let (k, v) = random_rows(once.shape(), 1, &mut numbers);
        once.push(&k, &v).unwrap();
        let mut twice = KvCache::<E>::with_shape(once.shape());
        let (k, v) = read(&once, 0);
        twice.push(&k, &v).unwrap();
        let (k_again, v_again) = read(&twice, 0);
        for (a, b) in k.iter().chain(&v).zip(k_again.iter().chain(&v_again)) {
            // A scale is a quotient and rounded; the whole number is the same.
            let off = if has_scales::<E>() { 2e-7 * b.abs() } else { 0.0 };
            assert!((a - b).abs() <= off, "{} {width}: {a} {b}", E::NAME);
        }
    }
}

/// One row, however it is held, is the same numbers.
fn rows_are_the_same_wherever_they_are<E: Element>() {
    let mut numbers = Numbers::new(1);
    for (k_width, v_width, n_kv_heads) in
        [(1, 1, 1), (7, 9, 2), (33, 64, 1), (64, 31, 3), (130, 65, 1)]
    {
        let all = random_rows(shape(1, n_kv_heads, k_width, v_width), 40, &mut numbers);
        let mut want: Option<Vec<Rows>> = None;
        for block_size in [1, 2, 3, 16, 17, 64, 80] {
            let shape = shape(block_size, n_kv_heads, k_width, v_width);
            let mut cache = KvCache::<E>::with_shape(shape);
            cache.append(&all.0, &all.1, 40).unwrap();
            let mut store = PagedKvStore::<E>::with_shape(shape, 60).unwrap();
            let mut paged = PagedKvCache::new();
            // One by one, then in two chunks, so that cells are written in parts.
            let row = |at: usize, n: usize| {
                let (k, v) = (shape.k_row_len(), shape.v_row_len());
                (&all.0[at * k..(at + n) * k], &all.1[at * v..(at + n) * v])
            };
            for at in 0..5 {
                let (k, v) = row(at, 1);
                paged.push(&mut store, k, v).unwrap();
            }
            for (at, n) in [(5, 12), (17, 23)] {
                let (k, v) = row(at, n);
                paged.append(&mut store, k, v, n).unwrap();
            }
            let have: Vec<Rows> = (0..40).map(|at| read(&cache, at)).collect();
            let from_store: Vec<Rows> = (0..40).map(|at| read_paged(&store, &paged, at)).collect();
            assert_eq!(have, from_store, "{} blocks of {block_size}", E::NAME);
            let copy = cache.try_clone().unwrap();
            assert_eq!(have, (0..40).map(|at| read(&copy, at)).collect::<Vec<_>>());
            assert_eq!(have, *want.get_or_insert_with(|| have.clone()), "{}", E::NAME);
        }
    }
}

/// Positions share cells, and sequences share blocks: a write to one position of a shared block of
/// odd size is the writer's alone, and its neighbours in the same cells stay what they were.
fn a_write_leaves_its_neighbours_alone<E: Element>() {
    let mut numbers = Numbers::new(2);
    for block_size in [1, 2, 3, 5, 7, 33] {
        for len in 1..=2 * block_size {
            let shape = shape(block_size, 2, 5, 35);
            let mut store = PagedKvStore::<E>::with_shape(shape, 12).unwrap();
            store.poison_free();
            let mut first = PagedKvCache::new();
            let (k, v) = random_rows(shape, len, &mut numbers);
            first.append(&mut store, &k, &v, len).unwrap();
            let rows = |store: &PagedKvStore<E>, cache: &PagedKvCache| -> Vec<Rows> {
                (0..cache.seq_len()).map(|at| read_paged(store, cache, at)).collect()
            };
            let before = rows(&store, &first);
            let mut second = first.fork(&mut store).unwrap();
            second.truncate(&mut store, len - 1).unwrap();
            let (k, v) = random_rows(shape, 1, &mut numbers);
            second.push(&mut store, &k, &v).unwrap();
            assert_eq!(rows(&store, &first), before, "{} {block_size} {len}", E::NAME);
            let forked = rows(&store, &second);
            assert_eq!(forked[..len - 1], before[..len - 1], "{} {block_size} {len}", E::NAME);
            assert_ne!(forked[len - 1], before[len - 1]);
            // In a block of its own a sequence writes over what it took back, beside the rest.
            first.release(&mut store).unwrap();
            second.truncate(&mut store, len - 1).unwrap();
            second.push(&mut store, &k, &v).unwrap();
            assert_eq!(rows(&store, &second), forked, "{} {block_size} {len}", E::NAME);
        }
    }
}

fn rows_nobody_wrote_are_not_numbers_in_poison_mode<E: Element>() {
    let shape = shape(3, 1, 5, 3);
    let mut store = PagedKvStore::<E>::with_shape(shape, 3).unwrap();
    let (k, v) = random_rows(shape, 3, &mut Numbers::new(1));
    let mut held = PagedKvCache::new();
    held.append(&mut store, &k, &v, 3).unwrap();
    let stored = read_paged(&store, &held, 2);
    store.poison_free();
    assert_eq!(read_paged(&store, &held, 2), stored, "what is held stays");
    let mut cache = PagedKvCache::new();
    cache.append(&mut store, &k, &v, 3).unwrap();
    let before = read_paged(&store, &cache, 0);
    let blocks = cache.block_table().to_vec();
    cache.truncate(&mut store, 1).unwrap();
    // A second table over the same block is a window on what lies past the first one's end.
    let mut window = PagedKvCache::new();
    window.adopt(&mut store, &blocks, 3).unwrap();
    assert_eq!(read_paged(&store, &window, 0), before);
    for at in 1..3 {
        let (k, v) = read_paged(&store, &window, at);
        assert!(k.iter().chain(&v).all(|x| x.is_nan()), "{}: {k:?} {v:?}", E::NAME);
    }
    window.release(&mut store).unwrap();
    cache.release(&mut store).unwrap();
    // A block that nobody has written since it was given back.
    let mut empty = PagedKvCache::new();
    empty.reserve(&mut store, 3).unwrap();
    let blocks = empty.block_table().to_vec();
    window.adopt(&mut store, &blocks, 3).unwrap();
    for at in 0..3 {
        let (k, v) = read_paged(&store, &window, at);
        assert!(k.iter().chain(&v).all(|x| x.is_nan()), "{}: {k:?} {v:?}", E::NAME);
    }
}

/// The bytes that are said to be needed are what a store takes, and every way to open one works.
fn every_door_takes_every_type<E: Element>() {
    for (block_size, heads, k_width, v_width) in
        [(1, 1, 1, 1), (5, 2, 7, 9), (16, 2, 33, 64), (64, 1, 128, 128)]
    {
        let shape = shape(block_size, heads, k_width, v_width);
        let store = PagedKvStore::<E>::with_shape(shape, 3).unwrap();
        let needed = PagedKvStore::<E>::memory_needed(shape, 3).unwrap();
        assert_eq!(needed, 3 * store.bytes_per_block() + 64 + 63);
        let mut brought = PagedKvStore::<E>::from_memory(shape, vec![0xff; needed]).unwrap();
        assert_eq!(brought.total_blocks(), 3);
        assert!(
            PagedKvStore::<E>::from_memory(shape, vec![0; store.bytes_per_block() + 63]).is_err()
        );
        let pool = Arc::new(KvBlockPool::new(block_size, 3));
        let mut pooled = KvCache::<E>::with_shape_in_pool(shape, &pool).unwrap();
        let mut paged = PagedKvCache::new();
        let n = 3 * block_size;
        let (k, v) = random_rows(shape, n, &mut Numbers::new(9));
        pooled.append(&k, &v, n).unwrap();
        paged.append(&mut brought, &k, &v, n).unwrap();
        for at in 0..n {
            assert_eq!(read(&pooled, at), read_paged(&brought, &paged, at), "{}", E::NAME);
        }
        assert!(pooled.push(&k[..shape.k_row_len()], &v[..shape.v_row_len()]).is_err());
    }
}

/// Sequences of the shared layer, forked and adopted over page groups.
#[cfg(feature = "std")]
fn the_shared_layer_takes_every_type<E: Element>() {
    use paged_kv::cache::SharedPagedKv;
    let shape = shape(5, 2, 7, 34);
    let shared = SharedPagedKv::<E>::with_shape(2, shape, 4).unwrap();
    let group = shared.acquire_group().unwrap();
    let (k, v) = random_rows(shape, 5, &mut Numbers::new(4));
    for layer in 0..2 {
        let mut guard = shared.write(layer);
        let (mut cache, block) = (PagedKvCache::new(), shared.group_block(group, layer).unwrap());
        cache.adopt(&mut guard, &[block], 0).unwrap();
        cache.append(&mut guard, &k, &v, 5).unwrap();
        let mut reader = PagedKvCache::new();
        reader.adopt(&mut guard, &[block], 3).unwrap();
        reader.push(&mut guard, &k[..shape.k_row_len()], &v[..shape.v_row_len()]).unwrap();
        for at in 0..3 {
            assert_eq!(read_paged(&guard, &reader, at), read_paged(&guard, &cache, at));
        }
        assert_eq!(read_paged(&guard, &reader, 3), read_paged(&guard, &cache, 0));
        assert_ne!(read_paged(&guard, &reader, 3), read_paged(&guard, &cache, 3));
        reader.release(&mut guard).unwrap();
        cache.release(&mut guard).unwrap();
    }
    assert!(shared.release_group(group));
}

every_type! {
    stored_numbers_are_near,
    what_was_stored_is_stored_exactly,
    rows_are_the_same_wherever_they_are,
    a_write_leaves_its_neighbours_alone,
    rows_nobody_wrote_are_not_numbers_in_poison_mode,
    every_door_takes_every_type,
}

#[cfg(feature = "std")]
mod shared {
    use super::the_shared_layer_takes_every_type;
    paged_kv::every_type! { the_shared_layer_takes_every_type }
}

#[cfg(any(feature = "std", feature = "spin"))]
mod of_any_type {
    use super::shape;
    use paged_kv::cache::{AnyPagedKvStore, PagedKvStore};
    use paged_kv::{Element, Int4, Int8, bf16, f16};

    /// A store whose type is chosen while a program runs is had back as what it is, and as nothing
    /// else.
    fn a_store_of_any_type_is_one_of_this<E: Element>() {
        fn is<E: Element, T: Element>(store: &mut AnyPagedKvStore) -> bool {
            let same = E::NAME == T::NAME;
            assert_eq!(store.as_store::<T>().is_some(), same, "{} as {}", E::NAME, T::NAME);
            assert_eq!(store.as_store_mut::<T>().is_some(), same, "{} as {}", E::NAME, T::NAME);
            same
        }
        let store = PagedKvStore::<E>::with_shape(shape(4, 1, 8, 8), 3).unwrap();
        let (id, text) = (store.id(), format!("{store:?}"));
        let mut any = AnyPagedKvStore::from(store);
        assert_eq!(format!("{any:?}"), text);
        let found = [
            is::<E, f32>(&mut any),
            is::<E, f16>(&mut any),
            is::<E, bf16>(&mut any),
            is::<E, Int8>(&mut any),
            is::<E, Int4>(&mut any),
        ];
        assert_eq!(found.into_iter().filter(|&found| found).count(), 1);
        assert_eq!(any.as_store_mut::<E>().unwrap().id(), id);
    }

    paged_kv::every_type! { a_store_of_any_type_is_one_of_this }
}
