//! The promises of the shared layer, one test each.
//!
//! No test passes or fails by timing: threads meet at channels and barriers, and a watchdog turns
//! what would hang into a failure. Where a fault could only show itself while another thread is
//! asleep in a lock, a pause gives it the time to fall asleep; without the pause the test would
//! still pass, and see less.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

mod displaced;
mod groups;
mod locks;
mod sequences;

use core::ops::Deref;
use paged_kv::cache::{PagedKvCache, PagedKvStore, PagedSequence, SharedPagedKv};
use paged_kv::{GroupError, PageGroup, PagedKvError, ShapeError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

/// Runs the test on a thread of its own, and fails where it would hang.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, wait) = mpsc::channel();
    let thread = thread::spawn(move || {
        test();
        done.send(()).unwrap();
    });
    match wait.recv_timeout(Duration::from_secs(100)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        _ => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// Spinning threads that outnumber the processors get little done in a time slice.
const ROUNDS: usize = if cfg!(feature = "std") { 2000 } else { 300 };

/// Time for another thread to fall asleep in a lock.
fn pause() {
    thread::sleep(Duration::from_millis(60));
}

/// `n_layers` layers of `blocks` blocks of two positions, one head of width 1.
fn small(n_layers: usize, blocks: usize) -> SharedPagedKv {
    SharedPagedKv::new(n_layers, 2, blocks, 1, 1)
}

/// Layers with so many blocks each.
fn sized(blocks: &[usize]) -> SharedPagedKv {
    let stores = blocks.iter().map(|blocks| PagedKvStore::new(2, *blocks, 1, 1));
    SharedPagedKv::from_stores(stores.collect())
}

fn push(shared: &SharedPagedKv, layer: usize, cache: &mut PagedKvCache, number: f32) {
    cache.push(&mut shared.write(layer), &[number], &[-number]).unwrap();
}

fn keys(shared: &SharedPagedKv, layer: usize, cache: &PagedKvCache) -> Vec<f32> {
    let store = shared.read(layer);
    let mut row = [0.0];
    (0..cache.seq_len())
        .map(|position| {
            cache.copy_k_row(&store, position, 0, &mut row).unwrap();
            row[0]
        })
        .collect()
}

/// One position with this number in every layer, from room to commit.
fn step<P: Deref<Target = SharedPagedKv>>(sequence: &mut PagedSequence<P>, number: f32) {
    sequence.reserve(1).unwrap();
    for layer in 0..sequence.shared().layer_count() {
        sequence.push(layer, &[number], &[-number]).unwrap();
    }
    sequence.commit(1).unwrap();
}

/// The numbers of a sequence in one layer.
fn numbers<P: Deref<Target = SharedPagedKv>>(
    sequence: &PagedSequence<P>,
    layer: usize,
) -> Vec<f32> {
    keys(sequence.shared(), layer, sequence.cache(layer))
}

fn panic_text(f: impl FnOnce()) -> String {
    match catch_unwind(AssertUnwindSafe(f)).unwrap_err().downcast::<String>() {
        Ok(text) => *text,
        Err(other) => other.downcast::<&str>().unwrap().to_string(),
    }
}

#[test]
fn the_shared_layer_can_be_shared() {
    fn shareable<T: Send + Sync>() {}
    shareable::<SharedPagedKv>();
    shareable::<PagedSequence<Arc<SharedPagedKv>>>();
    fn sync<T: Sync>() {}
    sync::<paged_kv::cache::RwLockReadGuard<'_, PagedKvStore>>();
    sync::<paged_kv::cache::RwLockWriteGuard<'_, PagedKvStore>>();
}

#[test]
fn new_opens_one_store_per_layer() {
    let shared = SharedPagedKv::new(3, 16, 5, 2, 8);
    assert_eq!(shared.layer_count(), 3);
    for layer in 0..3 {
        assert_eq!(shared.free_blocks(layer), 5);
        let store = shared.read(layer);
        assert_eq!((store.block_size(), store.total_blocks()), (16, 5));
        assert_eq!((store.shape().n_kv_heads(), store.shape().k_width()), (2, 8));
    }
    assert!(SharedPagedKv::try_new(3, 0, 5, 2, 8).is_err());
    let many = SharedPagedKv::try_new(usize::MAX, 16, 0, 1, 1).map(drop);
    assert!(matches!(many, Err(ShapeError::OutOfMemory { .. })), "{many:?}");
    assert!(panic_text(|| drop(SharedPagedKv::new(3, 16, 5, 0, 8))).contains("n_kv_heads"));
    let text = panic_text(|| drop(shared.read(3)));
    assert_eq!(text, "layer 3 is out of range, there are 3");
}

#[test]
fn with_no_layers_there_is_nothing_to_take() {
    let shared = small(0, 4);
    assert_eq!((shared.layer_count(), shared.free_groups()), (0, 0));
    assert_eq!(shared.acquire_group(), None);
    assert!(shared.write_all().is_empty());
    let mut sequence = PagedSequence::new(&shared);
    sequence.reserve(3).unwrap();
    sequence.commit(3).unwrap();
    assert_eq!((sequence.len(), shared.can_ever_fit(9)), (3, true));
    assert_eq!(shared.acquire_groups(1).unwrap_err().free, 0);
}

#[test]
fn stores_that_the_caller_built_keep_what_is_in_them() {
    let mut store = PagedKvStore::new(2, 3, 1, 1);
    let mut cache = PagedKvCache::new();
    cache.push(&mut store, &[5.0], &[5.0]).unwrap();
    let shared = SharedPagedKv::from_stores(vec![store]);
    assert_eq!((shared.free_blocks(0), keys(&shared, 0, &cache)), (2, vec![5.0]));
    shared.release(0, &mut cache).unwrap();
    assert_eq!(shared.free_blocks(0), 3);
}

#[test]
fn a_sequence_of_another_store_is_refused_and_nothing_is_lost() {
    let shared = small(2, 2);
    let mut cache = PagedKvCache::new();
    push(&shared, 0, &mut cache, 1.0);
    let refused = cache.push(&mut shared.write(1), &[1.0], &[1.0]);
    assert!(matches!(refused, Err(PagedKvError::WrongStore { .. })));
    assert!(matches!(shared.release(1, &mut cache), Err(PagedKvError::WrongStore { .. })));
    assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (1, 2));
    assert_eq!(keys(&shared, 0, &cache), [1.0]);
    shared.release(0, &mut cache).unwrap();
    assert_eq!(shared.free_blocks(0), 2);
}

#[test]
fn what_was_given_back_without_the_store_is_poisoned_when_it_is_taken() {
    let shared = small(1, 1);
    shared.write(0).poison_free();
    let mut cache = PagedKvCache::new();
    push(&shared, 0, &mut cache, 1.0);
    push(&shared, 0, &mut cache, 2.0);
    shared.release(0, &mut cache).unwrap();
    push(&shared, 0, &mut cache, 3.0);
    let mut window = PagedKvCache::new();
    window.adopt(&mut shared.write(0), cache.block_table(), 2).unwrap();
    let keys = keys(&shared, 0, &window);
    assert_eq!(keys[0], 3.0);
    assert!(keys[1].is_nan(), "the last owner's row shines through: {keys:?}");
}
