//! The promises of the shared layer, one test each.
//!
//! No test passes or fails by timing: threads meet at channels and barriers, and a watchdog turns
//! what would hang into a failure. Where a fault could only show itself while another thread is
//! asleep in a lock, a pause gives it the time to fall asleep; without the pause the test would
//! still pass, and see less.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::cache::{PagedKvCache, PagedKvStore, SharedPagedKv, SharedSequence};
use paged_kv::{GroupError, PageGroup, PagedKvError};
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
    shareable::<SharedSequence<Arc<SharedPagedKv>>>();
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
    drop(SharedSequence::new(&shared));
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
fn a_group_is_one_block_of_every_layer_with_one_holder() {
    let shared = small(3, 2);
    let group = shared.acquire_group().unwrap();
    assert_eq!((shared.group_refs(group), shared.free_groups()), (1, 1));
    assert_eq!(shared.group_blocks(group), [0, 0, 0]);
    let other = shared.acquire_group().unwrap();
    assert_eq!(shared.group_blocks(other), [1, 1, 1]);
    assert_eq!(shared.acquire_group(), None);
    assert!(shared.release_group(group));
    assert!(shared.release_group(other));
    assert_eq!(shared.free_groups(), 2);
}

#[test]
fn a_group_exists_in_all_layers_or_in_none() {
    for empty in 0..3 {
        let mut blocks = [4, 4, 4];
        blocks[empty] = 0;
        let shared = sized(&blocks);
        assert_eq!((shared.acquire_group(), shared.free_groups()), (None, 0));
        for (layer, blocks) in blocks.into_iter().enumerate() {
            assert_eq!(shared.free_blocks(layer), blocks);
        }
    }
}

#[test]
fn free_groups_is_bounded_by_the_layer_with_the_fewest() {
    let shared = sized(&[5, 2, 3]);
    assert_eq!(shared.free_groups(), 2);
    let mut cache = PagedKvCache::new();
    push(&shared, 1, &mut cache, 1.0);
    assert_eq!(shared.free_groups(), 1);
    let group = shared.acquire_group().unwrap();
    assert_eq!((shared.free_groups(), shared.acquire_group()), (0, None));
    shared.release(1, &mut cache).unwrap();
    assert_eq!(shared.free_groups(), 1);
    shared.release_group(group);
    assert_eq!(shared.free_groups(), 2);
}

#[test]
fn retain_keeps_pages_alive_past_the_first_release() {
    let shared = small(2, 2);
    let group = shared.acquire_group().unwrap();
    let mut first = PagedKvCache::new();
    let block = shared.group_block(group, 0).unwrap();
    first.adopt(&mut shared.write(0), &[block], 0).unwrap();
    push(&shared, 0, &mut first, 7.0);
    shared.retain_group(group);
    shared.release(0, &mut first).unwrap();
    assert!(!shared.release_group(group), "the first to finish is not the last holder");
    assert_eq!((shared.group_refs(group), shared.free_groups()), (1, 1));
    // Whoever comes next gets another block, and the second one still sees the pages.
    let other = shared.acquire_group().unwrap();
    assert_ne!(shared.group_blocks(other), shared.group_blocks(group));
    let mut second = PagedKvCache::new();
    second.adopt(&mut shared.write(0), &[block], 1).unwrap();
    assert_eq!(keys(&shared, 0, &second), [7.0]);
    assert!(shared.release_group(group));
    assert_eq!(keys(&shared, 0, &second), [7.0], "a sequence's own count keeps its block");
    assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (0, 1));
    shared.release(0, &mut second).unwrap();
    assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (1, 1));
}

#[test]
fn release_says_whether_it_was_the_last() {
    let shared = small(1, 1);
    let group = shared.acquire_group().unwrap();
    shared.retain_group(group);
    shared.retain_group(group);
    assert_eq!(shared.group_refs(group), 3);
    assert!(!shared.release_group(group));
    assert!(!shared.release_group(group));
    assert!(shared.release_group(group));
    assert_eq!(shared.group_refs(group), 0);
}

#[test]
fn nobody_writes_into_the_pages_of_a_group_that_others_hold() {
    let shared = small(1, 3);
    let group = shared.acquire_group().unwrap();
    let block = shared.group_block(group, 0).unwrap();
    let mut writer = PagedKvCache::new();
    writer.adopt(&mut shared.write(0), &[block], 0).unwrap();
    push(&shared, 0, &mut writer, 1.0);
    assert_eq!(writer.block_table(), [block], "alone with its group it writes in place");
    shared.retain_group(group);
    let mut reader = PagedKvCache::new();
    reader.adopt(&mut shared.write(0), &[block], 1).unwrap();
    push(&shared, 0, &mut writer, 2.0);
    assert_ne!(writer.block_table(), [block]);
    assert_eq!(keys(&shared, 0, &writer), [1.0, 2.0]);
    assert_eq!(keys(&shared, 0, &reader), [1.0]);
    // Also where nobody has adopted yet: a holder of the group may do so at any time.
    let mut late = PagedKvCache::new();
    shared.release(0, &mut reader).unwrap();
    late.adopt(&mut shared.write(0), &[block], 1).unwrap();
    push(&shared, 0, &mut late, 3.0);
    assert_ne!(late.block_table(), [block]);
    shared.release(0, &mut late).unwrap();
    // When the other holder has let go, it is written in place again.
    assert!(!shared.release_group(group));
    late.adopt(&mut shared.write(0), &[block], 1).unwrap();
    push(&shared, 0, &mut late, 4.0);
    assert_eq!(late.block_table(), [block]);
}

#[test]
fn a_stale_handle_names_nothing_and_frees_nothing() {
    let shared = small(2, 2);
    let stale = shared.acquire_group().unwrap();
    assert!(shared.release_group(stale));
    // The slot and the blocks have a new owner, and the old handle must not reach either.
    let owner = shared.acquire_group().unwrap();
    let text = format!("page group {stale} is stale");
    assert_eq!(shared.group_refs(stale), 0);
    assert_eq!(shared.try_retain(stale), Err(GroupError::Stale { group: stale }));
    assert_eq!(shared.try_release(stale), Err(GroupError::Stale { group: stale }));
    assert_eq!(shared.try_group_blocks(stale), Err(GroupError::Stale { group: stale }));
    assert!(shared.group_blocks(stale).is_empty());
    assert_eq!(shared.group_block(stale, 0), None);
    assert_eq!(panic_text(|| shared.retain_group(stale)), text);
    assert_eq!(panic_text(|| assert!(!shared.release_group(stale))), text);
    assert_eq!((shared.group_refs(owner), shared.free_groups()), (1, 1));
    assert_eq!(shared.group_block(owner, 9), None);
    assert!(shared.release_group(owner));
    assert_eq!(shared.free_groups(), 2);
}

#[test]
fn a_handle_of_another_pool_is_refused() {
    let (mine, yours) = (small(1, 1), small(1, 1));
    let group = yours.acquire_group().unwrap();
    let held = mine.acquire_group().unwrap();
    let wrong = GroupError::WrongPool { group };
    assert_eq!(mine.try_retain(group), Err(wrong));
    assert_eq!(mine.try_release(group), Err(wrong));
    assert_eq!((mine.group_refs(group), mine.group_refs(held)), (0, 1));
    assert!(panic_text(|| mine.retain_group(group)).contains("another pool"));
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
fn another_requests_push_between_my_push_and_my_read_changes_nothing_of_mine() {
    watched(|| {
        let shared = small(1, 8);
        let (mut mine, mut yours) = (PagedKvCache::new(), PagedKvCache::new());
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..8 {
                    barrier.wait(); // My push is done, my read has not begun.
                    push(&shared, 0, &mut yours, 100.0 + round as f32);
                    barrier.wait();
                }
            });
            for round in 0..8 {
                push(&shared, 0, &mut mine, round as f32);
                let (table, len) = (mine.block_table().to_vec(), mine.seq_len());
                barrier.wait();
                barrier.wait();
                assert_eq!((mine.block_table(), mine.seq_len()), (&table[..], len));
                let expected: Vec<f32> = (0..=round).map(|n| n as f32).collect();
                assert_eq!(keys(&shared, 0, &mine), expected);
            }
        });
        assert_eq!(yours.seq_len(), 8);
    });
}

#[test]
fn requests_at_work_on_different_layers_never_wait_for_each_other() {
    watched(|| {
        let shared = small(2, 4);
        let (done, wait) = mpsc::channel();
        thread::scope(|scope| {
            let guard = shared.write(0);
            scope.spawn(|| {
                let mut cache = PagedKvCache::new();
                push(&shared, 1, &mut cache, 1.0);
                assert_eq!(keys(&shared, 1, &cache), [1.0]);
                shared.release(1, &mut cache).unwrap();
                done.send(()).unwrap();
            });
            wait.recv().unwrap();
            drop(guard);
        });
    });
}

#[test]
fn readers_of_one_layer_read_at_the_same_time() {
    watched(|| {
        let shared = small(1, 1);
        let both_in = Barrier::new(2);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let _guard = shared.read(0);
                    both_in.wait();
                });
            }
        });
    });
}

#[test]
fn all_layers_advance_or_none_do_while_others_take_blocks() {
    watched(|| {
        let shared = sized(&[6, 4, 5]);
        thread::scope(|scope| {
            for request in 0..3 {
                let shared = &shared;
                scope.spawn(move || {
                    let mut sequence = SharedSequence::new(shared);
                    let mut advanced = 0;
                    for _ in 0..ROUNDS {
                        advanced += usize::from(advance(shared, &mut sequence, request as f32));
                        for layer in 0..3 {
                            assert_eq!(sequence.cache(layer).seq_len(), advanced);
                        }
                        if advanced == 5 {
                            sequence.release();
                            advanced = 0;
                        }
                    }
                });
            }
            let shared = &shared;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let group = shared.acquire_group();
                    let mut cache = PagedKvCache::new();
                    let _full = cache.push(&mut shared.write(round % 3), &[0.0], &[0.0]);
                    shared.release(round % 3, &mut cache).unwrap();
                    if let Some(group) = group {
                        assert_eq!(shared.group_blocks(group).len(), 3);
                        assert!(shared.release_group(group));
                    }
                }
            });
        });
        assert_eq!([0, 1, 2].map(|layer| shared.free_blocks(layer)), [6, 4, 5]);
    });
}

/// One position in every layer, or in none. The free counts are asked once, under the guards, and
/// every push after that must find its block.
fn advance(
    shared: &SharedPagedKv,
    sequence: &mut SharedSequence<&SharedPagedKv>,
    number: f32,
) -> bool {
    let mut guards = shared.write_all();
    if guards.iter().any(|store| store.free_block_count() == 0) {
        return false;
    }
    for (store, cache) in guards.iter_mut().zip(sequence.caches_mut()) {
        thread::yield_now();
        cache.push(store, &[number], &[number]).unwrap();
    }
    true
}

#[test]
fn free_blocks_is_a_snapshot_and_the_append_asks_again_under_its_guard() {
    watched(|| {
        let shared = small(1, 1);
        let seen = shared.free_blocks(0);
        let mut thief = PagedKvCache::new();
        thread::scope(|scope| {
            scope.spawn(|| push(&shared, 0, &mut thief, 1.0));
        });
        let mut mine = PagedKvCache::new();
        let refused = mine.push(&mut shared.write(0), &[2.0], &[2.0]).unwrap_err();
        assert!(matches!(refused, PagedKvError::Exhausted(e) if e.free == 0 && e.need == seen));
        assert_eq!((mine.seq_len(), keys(&shared, 0, &thief)), (0, vec![1.0]));
    });
}

#[test]
fn under_a_write_guard_nobody_else_takes_blocks_of_the_layer() {
    watched(|| {
        let shared = small(2, 4);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let groups: Vec<PageGroup> =
                        (0..3).map_while(|_| shared.acquire_group()).collect();
                    groups.iter().for_each(|group| assert!(shared.release_group(*group)));
                }
            });
            for round in 0..ROUNDS {
                let mut guard = shared.write(round % 2);
                let free = guard.free_block_count();
                thread::yield_now();
                assert!(guard.free_block_count() >= free);
                let mut cache = PagedKvCache::new();
                cache.reserve(&mut guard, 2 * free).unwrap();
                assert_eq!(cache.block_table().len(), free);
                cache.release(&mut guard).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(shared.free_groups(), 4);
    });
}

#[test]
fn taking_a_group_does_not_wait_for_readers() {
    watched(|| {
        let shared = small(2, 4);
        thread::scope(|scope| {
            let _reading = (shared.read(0), shared.read(1));
            // From another thread and from the reading one.
            scope.spawn(|| shared.acquire_group().unwrap()).join().unwrap();
            let group = shared.acquire_group().unwrap();
            shared.retain_group(group);
            shared.release_group(group);
            assert_eq!((shared.free_blocks(0), shared.free_groups()), (2, 2));
        });
    });
}

#[test]
fn write_all_waiting_behind_a_reader_does_not_hold_up_a_group() {
    watched(|| {
        let shared = small(2, 4);
        thread::scope(|scope| {
            let reading = shared.read(1);
            let (asking, wait) = mpsc::channel();
            let shared = &shared;
            scope.spawn(move || {
                asking.send(()).unwrap();
                drop(shared.write_all());
            });
            wait.recv().unwrap();
            pause();
            let group = shared.acquire_group().unwrap();
            assert!(shared.release_group(group));
            drop(reading);
        });
    });
}

#[test]
fn threads_that_take_every_layer_get_through() {
    watched(|| {
        let shared = small(3, 4);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..ROUNDS).for_each(|_| assert_eq!(shared.write_all().len(), 3)));
            }
            scope.spawn(|| {
                for round in 0..ROUNDS {
                    drop(shared.read(round % 3));
                    drop(shared.write(2 - round % 3));
                    if let Some(group) = shared.acquire_group() {
                        shared.release_group(group);
                    }
                }
            });
        });
    });
}

#[test]
fn a_writer_gets_through_a_crowd_of_readers() {
    watched(|| {
        let shared = small(1, 2);
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let store = shared.read(0);
                        assert_eq!(store.total_blocks(), 2);
                        thread::yield_now();
                    }
                });
            }
            for _ in 0..200 {
                drop(shared.write(0));
            }
            stop.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn groups_and_sequences_are_given_back_under_a_write_guard() {
    watched(|| {
        let shared = small(2, 4);
        let mut sequence = SharedSequence::new(&shared);
        for layer in 0..2 {
            push(&shared, layer, sequence.cache_mut(layer), 1.0);
        }
        let group = shared.acquire_group().unwrap();
        let guard = shared.write(0);
        shared.retain_group(group);
        assert!(!shared.release_group(group));
        assert_eq!((shared.group_refs(group), shared.group_blocks(group).len()), (1, 2));
        assert!(shared.release_group(group));
        drop(sequence);
        assert_eq!((guard.free_block_count(), shared.free_blocks(0)), (4, 4));
        assert_eq!((shared.free_blocks(1), shared.free_groups()), (4, 4));
    });
}

#[test]
fn groups_and_sequences_are_given_back_while_unwinding() {
    struct Holds<'a>(&'a SharedPagedKv, PageGroup);
    impl Drop for Holds<'_> {
        fn drop(&mut self) {
            assert!(self.0.release_group(self.1));
        }
    }
    watched(|| {
        let shared = Arc::new(small(2, 4));
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let group = shared.acquire_group().unwrap();
            let mut sequence = SharedSequence::new(Arc::clone(&shared));
            push(&shared, 1, sequence.cache_mut(1), 1.0);
            // Dropped in the reverse order: the group and the sequence under the guards.
            let _guards = shared.write_all();
            let _sequence = sequence;
            let _group = Holds(&shared, group);
            panic!("a forward failed");
        }));
        assert!(unwound.is_err());
        assert_eq!((shared.free_groups(), shared.free_blocks(1)), (4, 4));
        drop(shared.write_all());
        assert!(shared.acquire_group().is_some());
    });
}

#[test]
fn a_panic_under_a_guard_does_not_end_the_others() {
    watched(|| {
        let shared = small(2, 4);
        let mut cache = PagedKvCache::new();
        push(&shared, 0, &mut cache, 1.0);
        thread::scope(|scope| {
            let poison = scope.spawn(|| {
                let mut guards = shared.write_all();
                let mut lost = PagedKvCache::new();
                lost.push(&mut guards[0], &[9.0], &[9.0]).unwrap();
                lost.release(&mut guards[0]).unwrap();
                panic!("a forward failed");
            });
            assert!(poison.join().is_err());
        });
        push(&shared, 0, &mut cache, 2.0);
        assert_eq!(keys(&shared, 0, &cache), [1.0, 2.0]);
        let group = shared.acquire_group().unwrap();
        assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (2, 3));
        assert!(shared.release_group(group));
    });
}

#[test]
fn counts_are_right_under_a_guard_of_ones_own() {
    watched(|| {
        let shared = small(1, 4);
        let reading = shared.read(0);
        let group = shared.acquire_group().unwrap();
        assert_eq!((reading.free_block_count(), shared.free_blocks(0)), (3, 3));
        assert!(shared.release_group(group));
        assert_eq!((reading.free_block_count(), shared.free_blocks(0)), (4, 4));
        drop(reading);
        let mut writing = shared.write(0);
        let mut cache = PagedKvCache::new();
        cache.push(&mut writing, &[1.0], &[1.0]).unwrap();
        assert_eq!((writing.free_block_count(), shared.free_blocks(0)), (3, 3));
        cache.release(&mut writing).unwrap();
        assert_eq!((writing.free_block_count(), shared.free_blocks(0)), (4, 4));
    });
}

#[test]
fn stores_exchanged_under_two_guards_are_noticed_and_nothing_else_is_lost() {
    watched(|| {
        let shared = small(3, 4);
        let group = shared.acquire_group().unwrap();
        let mut cache = PagedKvCache::new();
        push(&shared, 0, &mut cache, 1.0);
        let mut guards = shared.write_all();
        let (first, second) = guards.split_at_mut(1);
        std::mem::swap(&mut *first[0], &mut *second[0]);
        drop(guards);
        for layer in 0..2 {
            let text =
                format!("the store of layer {layer} was moved out of it under a write guard");
            assert_eq!(panic_text(|| drop(shared.read(layer))), text);
            assert_eq!(panic_text(|| drop(shared.write(layer))), text);
        }
        assert!(panic_text(|| drop(shared.write_all())).contains("layer 0"));
        drop(shared.write(2));
        assert_eq!((shared.acquire_group(), shared.free_groups()), (None, 0));
        // What was taken goes back to where it came from.
        shared.retain_group(group);
        assert!(!shared.release_group(group));
        assert_eq!(shared.group_refs(group), 1);
        assert_eq!([0, 1, 2].map(|layer| shared.free_blocks(layer)), [2, 3, 3]);
        assert!(shared.release_group(group));
        shared.release(0, &mut cache).unwrap();
        assert_eq!([0, 1, 2].map(|layer| shared.free_blocks(layer)), [4, 4, 4]);
    });
}

#[test]
fn a_store_replaced_under_its_guard_is_noticed_and_lives_on() {
    watched(|| {
        let shared = small(1, 4);
        let mut cache = PagedKvCache::new();
        push(&shared, 0, &mut cache, 1.0);
        let new = PagedKvStore::new(2, 4, 1, 1);
        let mut old = std::mem::replace(&mut *shared.write(0), new);
        assert!(panic_text(|| drop(shared.read(0))).contains("was moved"));
        assert_eq!((old.free_block_count(), shared.free_blocks(0)), (3, 3));
        cache.push(&mut old, &[2.0], &[2.0]).unwrap();
        cache.release(&mut old).unwrap();
        assert_eq!(shared.free_blocks(0), 4);
    });
}

#[test]
fn stores_exchanged_and_exchanged_back_are_as_they_were() {
    watched(|| {
        let shared = small(2, 4);
        let mut guards = shared.write_all();
        for _ in 0..2 {
            let (first, second) = guards.split_at_mut(1);
            std::mem::swap(&mut *first[0], &mut *second[0]);
        }
        drop(guards);
        assert_eq!(shared.free_groups(), 4);
        assert!(shared.acquire_group().is_some());
        drop((shared.read(0), shared.read(1)));
        drop(shared.write_all());
    });
}

#[cfg(all(feature = "std", debug_assertions))]
#[test]
fn taking_a_group_under_ones_own_write_guard_panics_and_leaves_nothing_locked() {
    watched(|| {
        let shared = small(2, 4);
        let guard = shared.write(1);
        let text = panic_text(|| assert_eq!(shared.acquire_group(), None));
        assert!(text.contains("under its own write guard"), "{text}");
        drop(guard);
        assert_eq!(shared.free_groups(), 4);
        let group = shared.acquire_group().unwrap();
        assert!(shared.release_group(group));
        drop(shared.write_all());
    });
}

#[test]
fn many_threads_take_and_retain_and_release_groups_and_lose_none() {
    watched(|| {
        let shared = sized(&[4, 3, 5]);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..2 * ROUNDS {
                        let Some(group) = shared.acquire_group() else { continue };
                        let blocks = shared.try_group_blocks(group).unwrap();
                        shared.retain_group(group);
                        let mut cache = PagedKvCache::new();
                        cache.adopt(&mut shared.write(1), &[blocks[1]], 0).unwrap();
                        assert!(!shared.release_group(group));
                        assert!(shared.release_group(group));
                        assert_eq!(shared.group_refs(group), 0);
                        shared.release(1, &mut cache).unwrap();
                    }
                });
            }
        });
        assert_eq!([0, 1, 2].map(|layer| shared.free_blocks(layer)), [4, 3, 5]);
        for layer in 0..3 {
            assert_eq!(shared.read(layer).check_invariants([]), Ok(()));
        }
    });
}
