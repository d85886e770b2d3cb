//! Who waits for whom, and who does not.

use super::*;

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
                    let mut caches = [(); 3].map(|()| PagedKvCache::new());
                    let mut advanced = 0;
                    for round in 1..=ROUNDS {
                        advanced += usize::from(advance(shared, &mut caches, request as f32));
                        assert!(caches.iter().all(|cache| cache.seq_len() == advanced));
                        if advanced == 5 || round == ROUNDS {
                            for (layer, cache) in caches.iter_mut().enumerate() {
                                shared.release(layer, cache).unwrap();
                            }
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
fn advance(shared: &SharedPagedKv, caches: &mut [PagedKvCache; 3], number: f32) -> bool {
    let mut guards = shared.write_all();
    if guards.iter().any(|store| store.free_block_count() == 0) {
        return false;
    }
    for (store, cache) in guards.iter_mut().zip(caches) {
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
        let (go, rounds) = mpsc::channel();
        let (done, wait) = mpsc::channel();
        thread::scope(|scope| {
            let thief = &shared;
            scope.spawn(move || {
                for () in rounds {
                    let groups: Vec<_> = (0..3).map_while(|_| thief.acquire_group()).collect();
                    done.send(groups).unwrap();
                }
            });
            for round in 0..ROUNDS / 4 {
                let mut guard = shared.write(round % 2);
                let free = guard.free_block_count();
                assert_eq!(free, 4);
                go.send(()).unwrap();
                // The thief is at the gate now, or on its way to it; at times it gets there.
                if round < 2 {
                    pause();
                }
                assert_eq!(guard.free_block_count(), free);
                let mut cache = PagedKvCache::new();
                cache.reserve(&mut guard, 2 * free).unwrap();
                assert_eq!(cache.block_table().len(), free);
                cache.release(&mut guard).unwrap();
                drop(guard);
                let groups = wait.recv().unwrap();
                assert_eq!(groups.len(), 3);
                groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
            }
            drop(go);
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
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
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
            let mut sequence = PagedSequence::new(Arc::clone(&shared));
            sequence.reserve(3).unwrap();
            sequence.push(1, &[1.0], &[1.0]).unwrap();
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

#[cfg(all(feature = "std", debug_assertions))]
#[test]
fn taking_a_group_under_ones_own_write_guard_panics_and_leaves_nothing_locked() {
    watched(|| {
        let shared = small(2, 4);
        let guard = shared.write(1);
        let text = panic_text(|| assert_eq!(shared.acquire_group(), None));
        assert!(text.contains("`acquire_group` under"), "{text}");
        assert!(text.contains("own write guard of layer 1"), "{text}");
        // The same for a second guard of the layer, which a `match` head keeps alive by accident.
        for (call, text) in [
            ("`read`", panic_text(|| drop(shared.read(1)))),
            ("`write`", panic_text(|| drop(shared.write(1)))),
            ("`write_all`", panic_text(|| drop(shared.write_all()))),
        ] {
            assert!(text.starts_with(call), "{text}");
        }
        drop(shared.read(0));
        drop(guard);
        assert_eq!(shared.free_groups(), 4);
        let group = shared.acquire_group().unwrap();
        assert!(shared.release_group(group));
        drop(shared.write_all());
    });
}
