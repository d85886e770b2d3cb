//! One request over every layer: steps, forks, rollbacks, and who gives what back when.

use super::*;
#[cfg(feature = "std")]
use paged_kv::KvShape;
use paged_kv::PagedStoreExhausted;
use paged_kv::cache::Holder;
#[cfg(feature = "std")]
use paged_kv::cache::{KvWindow, LayerSpec};

fn exhausted(refused: Result<(), PagedKvError>) -> (usize, usize) {
    match refused {
        Err(PagedKvError::Exhausted(PagedStoreExhausted { need, free, .. })) => (need, free),
        other => panic!("{other:?}"),
    }
}

fn free<const N: usize>(shared: &SharedPagedKv) -> [usize; N] {
    core::array::from_fn(|layer| shared.free_blocks(layer))
}

#[test]
fn a_step_is_seen_by_attention_before_it_is_committed_and_gone_when_it_is_abandoned() {
    let shared = small(2, 4);
    let mut sequence = PagedSequence::new(&shared);
    step(&mut sequence, 1.0);
    sequence.reserve(1).unwrap();
    sequence.push(0, &[2.0], &[2.0]).unwrap();
    assert_eq!((numbers(&sequence, 0), numbers(&sequence, 1)), (vec![1.0, 2.0], vec![1.0]));
    assert_eq!(sequence.len(), 1);
    let behind = PagedKvError::LayerBehind { layer: 1, need: 2, have: 1 };
    assert_eq!(sequence.commit(1), Err(behind));
    sequence.abandon();
    assert_eq!((numbers(&sequence, 0), numbers(&sequence, 1)), (vec![1.0], vec![1.0]));
    step(&mut sequence, 3.0);
    assert_eq!((numbers(&sequence, 0), numbers(&sequence, 1)), (vec![1.0, 3.0], vec![1.0, 3.0]));
}

#[test]
fn a_commit_keeps_what_was_accepted_and_takes_the_rest_back() {
    let shared = small(2, 4);
    let mut sequence = PagedSequence::new(&shared);
    step(&mut sequence, 1.0);
    sequence.reserve(4).unwrap();
    for layer in 0..2 {
        sequence.append(layer, &[2.0, 3.0, 4.0, 5.0], &[0.0; 4], 4).unwrap();
    }
    sequence.commit(2).unwrap();
    for layer in 0..2 {
        assert_eq!(numbers(&sequence, layer), [1.0, 2.0, 3.0]);
    }
    // The room of the rejected ones is there for the next.
    let before: [usize; 2] = free(&shared);
    step(&mut sequence, 6.0);
    step(&mut sequence, 7.0);
    assert_eq!(free(&shared), before);
    assert_eq!(numbers(&sequence, 1), [1.0, 2.0, 3.0, 6.0, 7.0]);
}

#[test]
fn room_is_reserved_in_all_layers_or_in_none() {
    for short in 0..3 {
        let mut blocks = [6, 6, 6];
        blocks[short] = 3;
        let shared = sized(&blocks);
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
        let before: [usize; 3] = free(&shared);
        let table: Vec<_> = (0..3).map(|l| sequence.cache(l).block_table().to_vec()).collect();
        // Nine positions are five blocks of two.
        assert_eq!(exhausted(sequence.reserve(8)), (4, 2));
        assert_eq!(free(&shared), before);
        for (layer, table) in table.iter().enumerate() {
            assert_eq!(sequence.cache(layer).block_table(), table);
        }
        sequence.reserve(5).unwrap();
        assert_eq!(shared.free_blocks(short), 0);
        assert!(shared.can_ever_fit(6) && !shared.can_ever_fit(7));
        assert_eq!(sequence.reserve(usize::MAX), Err(PagedKvError::TooLong));
        // A refusal by count, and no memory for a table that nobody can fill.
        let mut empty = PagedSequence::new(&shared);
        let (most, need) = (usize::MAX / 4, usize::MAX / 8 + 1);
        assert_eq!(empty.reserve(most + 1), Err(PagedKvError::TooLong));
        assert_eq!(exhausted(empty.reserve(most)), (need, shared.free_blocks(0)));
        let reserve = |n| PagedKvCache::new().reserve(&mut shared.write(0), n);
        assert_eq!(reserve(most + 1), Err(PagedKvError::TooLong));
        assert_eq!(exhausted(reserve(most)), (need, shared.free_blocks(0)));
    }
}

#[test]
fn rows_are_written_into_room_and_nowhere_else() {
    let shared = small(2, 4);
    let mut sequence = PagedSequence::new(&shared);
    let refused = sequence.push(0, &[1.0], &[1.0]);
    assert_eq!(refused, Err(PagedKvError::NotReserved { need: 1, have: 0 }));
    sequence.reserve(1).unwrap();
    // A block has two places.
    let refused = sequence.append(0, &[1.0; 3], &[1.0; 3], 3);
    assert_eq!(refused, Err(PagedKvError::NotReserved { need: 3, have: 2 }));
    assert_eq!(sequence.cache(0).seq_len(), 0);
    sequence.append(0, &[1.0; 2], &[1.0; 2], 2).unwrap();
    assert!(panic_text(|| sequence.push(0, &[1.0; 2], &[1.0]).unwrap()).contains("key"));
    let text = panic_text(|| sequence.push(2, &[1.0], &[1.0]).unwrap());
    assert_eq!(text, "layer 2 is out of range, there are 2");
}

#[test]
fn a_layer_is_written_in_its_own_store_alone() {
    let shared = small(2, 2);
    let mut sequence = PagedSequence::new(&shared);
    for _ in 0..2 {
        sequence.reserve(1).unwrap();
        let (need, have) = (shared.read(0).id(), shared.read(1).id());
        let refused = sequence.append_to(&mut shared.write(1), 0, &[1.0], &[1.0], 1);
        assert_eq!(refused, Err(PagedKvError::WrongStore { need, have }));
        sequence.append_to(&mut shared.write(0), 0, &[1.0], &[1.0], 1).unwrap();
        // Given back, it is empty and still belongs to its layers.
        sequence.release();
        assert_eq!((shared.free_groups(), sequence.len()), (2, 0));
    }
}

#[test]
fn a_fork_copies_nothing_and_the_next_write_one_block_of_each_layer() {
    let shared = small(3, 4);
    let mut sequence = PagedSequence::new(&shared);
    for number in [1.0, 2.0, 3.0] {
        step(&mut sequence, number);
    }
    let before: [usize; 3] = free(&shared);
    let mut child = sequence.fork().unwrap();
    assert_eq!((free(&shared), child.len()), (before, 3));
    let full = sequence.cache(0).block_table()[0];
    step(&mut child, 4.0);
    assert_eq!(free(&shared), before.map(|free| free - 1));
    step(&mut sequence, 5.0);
    // Alone with its block again, it wrote in place.
    assert_eq!(free(&shared), before.map(|free| free - 1));
    for layer in 0..3 {
        assert_eq!(numbers(&sequence, layer), [1.0, 2.0, 3.0, 5.0]);
        assert_eq!(numbers(&child, layer), [1.0, 2.0, 3.0, 4.0]);
    }
    assert_eq!(child.cache(0).block_table()[0], full);
    drop(sequence);
    assert_eq!(numbers(&child, 2), [1.0, 2.0, 3.0, 4.0]);
    drop(child);
    assert_eq!(shared.free_groups(), 4);
}

#[test]
fn a_copy_that_one_layer_has_no_block_for_is_made_in_none() {
    for short in 0..3 {
        let mut blocks = [2, 2, 2];
        blocks[short] = 1;
        let shared = sized(&blocks);
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
        let mut child = sequence.fork().unwrap();
        let before: [usize; 3] = free(&shared);
        assert_eq!(exhausted(child.reserve(1)), (1, 0));
        assert_eq!(free(&shared), before);
        for layer in 0..3 {
            assert_eq!(child.cache(layer).block_table(), sequence.cache(layer).block_table());
            // Without the copy nobody may write.
            let refused = child.push(layer, &[2.0], &[2.0]);
            assert_eq!(refused, Err(PagedKvError::NotReserved { need: 1, have: 0 }));
        }
        drop(sequence);
        step(&mut child, 2.0);
        assert_eq!(numbers(&child, short), [1.0, 2.0]);
    }
}

#[test]
fn a_block_that_the_others_let_go_of_while_its_copy_waited_is_not_copied() {
    watched(|| {
        let shared = small(1, 4);
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
        let mut child = sequence.fork().unwrap();
        let tail = child.cache(0).block_table().to_vec();
        thread::scope(|scope| {
            let reading = shared.read(0);
            let reserving = scope.spawn(|| child.reserve(1).unwrap());
            // Its block for the copy is taken; the copy itself waits for the reader.
            while shared.free_blocks(0) == 3 {
                thread::yield_now();
            }
            drop(sequence);
            drop(reading);
            reserving.join().unwrap();
        });
        assert_eq!((child.cache(0).block_table(), free(&shared)), (&tail[..], [3]));
    });
}

#[test]
fn a_fork_in_the_middle_of_a_step_has_what_was_committed() {
    let shared = small(1, 4);
    let mut sequence = PagedSequence::new(&shared);
    assert!(sequence.is_empty());
    step(&mut sequence, 1.0);
    assert!(!sequence.is_empty());
    sequence.reserve(2).unwrap();
    sequence.push(0, &[2.0], &[2.0]).unwrap();
    let child = sequence.fork().unwrap();
    // A path is refused in a block that is the child's as well, though this one would move no row.
    let refused = sequence.compact(&[0]);
    assert_eq!(refused, Err(PagedKvError::NotReserved { need: 1, have: 0 }));
    assert_eq!(numbers(&child, 0), [1.0]);
    sequence.abandon();
    // The room has become the child's as well.
    let refused = sequence.push(0, &[3.0], &[3.0]);
    assert_eq!(refused, Err(PagedKvError::NotReserved { need: 1, have: 0 }));
    step(&mut sequence, 3.0);
    assert_eq!((numbers(&sequence, 0), numbers(&child, 0)), (vec![1.0, 3.0], vec![1.0]));
}

#[test]
fn a_rollback_gives_back_what_is_not_covered_any_more() {
    let shared = small(2, 6);
    let mut sequence = PagedSequence::new(&shared);
    (0..7).for_each(|number| step(&mut sequence, number as f32));
    sequence.reserve(5).unwrap();
    let child = sequence.fork().unwrap();
    assert_eq!(free(&shared), [0, 0]);
    let refused = sequence.truncate(8);
    assert_eq!(refused, Err(PagedKvError::PositionOutOfRange { position: 8, len: 7 }));
    // The reserved ones go, those that the child has stay.
    sequence.truncate(4).unwrap();
    assert_eq!(free(&shared), [2, 2]);
    sequence.truncate(3).unwrap();
    step(&mut sequence, 9.0);
    assert_eq!(numbers(&sequence, 1), [0.0, 1.0, 2.0, 9.0]);
    assert_eq!(numbers(&child, 1), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    drop(child);
    sequence.truncate(0).unwrap();
    assert_eq!(free(&shared), [6, 6]);
}

#[test]
fn a_prefix_is_adopted_in_all_layers_or_in_none() {
    let shared = small(2, 6);
    let groups = shared.acquire_groups(2).unwrap();
    let mut writer = PagedSequence::new(&shared);
    writer.adopt_groups(&groups, 0).unwrap();
    (1..=3).for_each(|number| step(&mut writer, number as f32));
    assert_eq!(free(&shared), [4, 4]);
    drop(writer);
    assert_eq!(free(&shared), [4, 4]);

    let mut reader = PagedSequence::new(&shared);
    let gone = shared.acquire_group().unwrap();
    assert!(shared.release_group(gone));
    let stale = reader.adopt_groups(&[groups[0], gone], 3);
    assert_eq!(stale, Err(PagedKvError::Group(GroupError::Stale { group: gone })));
    let few = reader.adopt_groups(&groups[..1], 3);
    assert_eq!(few, Err(PagedKvError::BlockCount { need: 2, have: 1 }));
    reader.reserve(1).unwrap();
    let room = reader.adopt_groups(&groups, 3);
    assert_eq!(room, Err(PagedKvError::NotEmpty { len: 0, blocks: 2 }));
    reader.release();
    let twice = reader.adopt_groups(&[groups[1], groups[1]], 3);
    assert!(matches!(twice, Err(PagedKvError::BlockTwice { .. })));
    assert!(reader.cache(0).block_table().is_empty() && reader.cache(1).block_table().is_empty());
    shared.check_invariants(groups.iter().map(|&group| Holder::Group(group))).unwrap();

    reader.adopt_groups(&groups, 3).unwrap();
    assert!(matches!(reader.adopt_groups(&groups, 3), Err(PagedKvError::NotEmpty { .. })));
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    assert_eq!(numbers(&reader, 1), [1.0, 2.0, 3.0]);
    drop(reader);
    assert_eq!(free(&shared), [6, 6]);
}

/// An index is the one holder of its groups, and whoever adopts rows does not write beside them.
#[test]
fn a_prefix_that_ends_inside_of_a_block_is_copied_by_who_goes_on_from_it() {
    let shared = small(2, 4);
    let groups = shared.acquire_groups(1).unwrap();
    let mut writer = PagedSequence::new(&shared);
    writer.adopt_groups(&groups, 0).unwrap();
    step(&mut writer, 1.0);
    drop(writer);
    let mut one = PagedSequence::new(&shared);
    one.adopt_groups(&groups, 1).unwrap();
    step(&mut one, 2.0);
    let mut two = PagedSequence::new(&shared);
    two.adopt_groups(&groups, 1).unwrap();
    step(&mut two, 3.0);
    assert_eq!((numbers(&one, 0), numbers(&two, 0)), (vec![1.0, 2.0], vec![1.0, 3.0]));
    assert_eq!(free(&shared), [1, 1]);
    drop((one, two));
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
}

#[test]
fn groups_are_taken_all_or_none() {
    let shared = sized(&[5, 3, 4]);
    let refused = shared.acquire_groups(4).unwrap_err();
    assert_eq!((refused.need, refused.free, free(&shared)), (4, 3, [5, 3, 4]));
    assert_eq!(shared.acquire_groups(0), Ok(Vec::new()));
    let groups = shared.acquire_groups(3).unwrap();
    assert_eq!(free(&shared), [2, 0, 1]);
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
}

#[test]
fn a_reservation_does_not_wait_for_readers_and_giving_back_for_nobody() {
    watched(|| {
        let shared = small(2, 8);
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
        thread::scope(|scope| {
            // Both layers are read for ever.
            let _reading = (shared.read(0), shared.read(1));
            let working = scope.spawn(|| {
                sequence.reserve(6).unwrap();
                let child = sequence.fork().unwrap();
                sequence.abandon();
                sequence.truncate(1).unwrap();
                drop(child);
                sequence.reserve(6).unwrap();
                for _ in 0..ROUNDS {
                    let groups = shared.acquire_groups(3).unwrap();
                    let mut other = PagedSequence::new(&shared);
                    other.adopt_groups(&groups, 5).unwrap();
                    groups.iter().for_each(|&group| shared.retain_group(group));
                    drop(other);
                    groups.iter().for_each(|&group| assert!(!shared.release_group(group)));
                    groups.iter().for_each(|&group| assert!(shared.release_group(group)));
                }
                shared.check_invariants(sequence.holders()).unwrap();
            });
            working.join().unwrap();
        });
        // Under write guards of all layers as well.
        let guards = shared.write_all();
        let child = sequence.fork().unwrap();
        drop(sequence);
        drop(child);
        assert!(guards.iter().all(|store| store.free_block_count() == 8));
    });
}

#[cfg(all(feature = "std", debug_assertions))]
#[test]
fn a_reservation_under_ones_own_write_guard_panics_and_takes_nothing() {
    watched(|| {
        let shared = small(2, 4);
        let mut sequence = PagedSequence::new(&shared);
        let guard = shared.write(1);
        let text = panic_text(|| sequence.reserve(1).unwrap());
        assert!(text.starts_with("`reserve` under"), "{text}");
        drop(guard);
        assert_eq!(free(&shared), [4, 4]);
        step(&mut sequence, 1.0);
    });
}

#[test]
fn a_step_into_a_layer_that_was_moved_panics_and_loses_no_block() {
    watched(|| {
        let shared = small(2, 4);
        let mut sequence = PagedSequence::new(&shared);
        step(&mut sequence, 1.0);
        let mut child = sequence.fork().unwrap();
        let mut old = std::mem::replace(&mut *shared.write(1), PagedKvStore::new(2, 4, 1, 1));
        assert!(panic_text(|| child.reserve(1).unwrap()).contains("layer 1"));
        let holders = child.holders().chain(sequence.holders());
        shared.check_invariants(holders).unwrap();
        assert!(panic_text(|| child.reserve(1).unwrap()).contains("layer 1"));
        drop((child, sequence));
        assert_eq!((free(&shared), old.free_block_count()), ([4, 4], 4));
        old.poison_free();
    });
}

/// Parent and child reserve, copy and write at the same time on two threads, a third takes groups:
/// nobody ends up with half, and nobody sees the other's rows.
#[test]
fn forks_on_other_threads_see_what_was_committed_and_nothing_else() {
    watched(|| {
        let shared = sized(&[9, 7, 8]);
        let (children, born) = mpsc::channel::<PagedSequence<&SharedPagedKv>>();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let (shared, stop) = (&shared, &stop);
            scope.spawn(move || {
                for mut child in born {
                    go_on(&mut child, 100.0);
                }
            });
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(groups) = shared.acquire_groups(2) {
                        groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
                    }
                    thread::yield_now();
                }
            });
            for round in 0..ROUNDS {
                let mut sequence = PagedSequence::new(shared);
                (0..1 + round % 3).for_each(|_| go_on(&mut sequence, 10.0));
                children.send(sequence.fork().unwrap()).unwrap();
                go_on(&mut sequence, 50.0);
            }
            drop(children);
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(free(&shared), [9, 7, 8]);
        shared.check_invariants([]).unwrap();
    });
}

/// Three positions more if there is room in all layers, and none if not; what was there stays.
fn go_on(sequence: &mut PagedSequence<&SharedPagedKv>, number: f32) {
    let mut expected = numbers(sequence, 0);
    if sequence.reserve(3).is_ok() {
        let rows = [0.0, 1.0, 2.0].map(|more| number + more);
        (0..3).for_each(|layer| sequence.append(layer, &rows, &rows, 3).unwrap());
        sequence.commit(3).unwrap();
        expected.extend(rows);
    }
    (0..3).for_each(|layer| assert_eq!(numbers(sequence, layer), expected));
}

/// Three requests fit; eight want in. Nobody holds a part of what another waits for, so that all
/// get through, and nobody is asked for more patience than the bound.
#[cfg(feature = "std")]
#[test]
fn eight_threads_on_a_pool_that_holds_three_requests_all_finish() {
    watched(|| {
        const LEN: usize = 8;
        let shared = small(2, 3 * LEN / 2);
        let served = std::sync::atomic::AtomicUsize::new(0);
        thread::scope(|scope| {
            for request in 0..8 {
                let (shared, served) = (&shared, &served);
                scope.spawn(move || {
                    for round in 0..ROUNDS / 8 {
                        let mut sequence = PagedSequence::new(shared);
                        sequence.reserve_within(LEN, Duration::from_secs(90)).unwrap();
                        let first = (8 * round + request) as f32;
                        for position in 0..LEN {
                            for layer in 0..2 {
                                let number = [first + position as f32];
                                sequence.push(layer, &number, &number).unwrap();
                            }
                            sequence.commit(1).unwrap();
                        }
                        let expected: Vec<f32> = (0..LEN).map(|at| first + at as f32).collect();
                        assert_eq!(numbers(&sequence, round % 2), expected);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(served.into_inner(), 8 * (ROUNDS / 8));
        assert_eq!(shared.free_groups(), 3 * LEN / 2);
    });
}

/// Who waits is woken by every way of giving back.
#[cfg(feature = "std")]
#[test]
fn whoever_waits_is_woken_by_each_way_of_giving_back() {
    watched(|| {
        let shared = small(2, 2);
        for way in 0..6 {
            let (mut sequence, mut cache) = (PagedSequence::new(&shared), PagedKvCache::new());
            let mut groups = Vec::new();
            match way {
                0 | 1 => sequence.reserve(4).unwrap(),
                2 => groups = shared.acquire_groups(2).unwrap(),
                _ => cache.reserve(&mut shared.write(1), 4).unwrap(),
            }
            assert!(!shared.wait_for_groups(1, Duration::from_millis(1)));
            let (shared, waiting) = (&shared, &Barrier::new(2));
            thread::scope(|scope| {
                let waits = scope.spawn(move || {
                    waiting.wait();
                    let mut sequence = PagedSequence::new(shared);
                    // Far longer than the watchdog is patient.
                    sequence.reserve_within(4, Duration::from_secs(1000)).unwrap();
                });
                waiting.wait();
                pause();
                match way {
                    0 => sequence.truncate(0).unwrap(),
                    1 => drop(sequence),
                    2 => groups.into_iter().for_each(|group| assert!(shared.release_group(group))),
                    3 => shared.release(1, &mut cache).unwrap(),
                    4 => cache.release(&mut shared.write(1)).unwrap(),
                    _ => cache.truncate(&mut shared.write(1), 0).unwrap(),
                }
                waits.join().unwrap();
            });
        }
        assert!(!shared.wait_for_groups(3, Duration::from_secs(1000)), "there are two");
        let mut large = PagedSequence::new(&shared);
        assert_eq!(exhausted(large.reserve_within(5, Duration::from_secs(1000))), (3, 2));
    });
}

#[test]
fn what_is_printed_takes_no_lock_and_says_who_holds_what() {
    let shared = small(2, 4);
    let mut sequence = PagedSequence::new(&shared);
    step(&mut sequence, 1.0);
    let store = format!("{:?}", *shared.read(1));
    assert!(store.contains("3 of 4 free"), "{store}");
    assert_eq!(format!("{:?}", shared.read(1)), store);
    let guard = shared.write(1);
    assert_eq!(format!("{guard:?}"), store);
    assert_eq!(format!("{shared:?}"), "[3 of 4 free, 3 of 4 free]");
    let text = format!("{sequence:?}");
    let caches = format!("[{:?}, {:?}]", sequence.cache(0), sequence.cache(1));
    assert_eq!(text, format!("PagedSequence {{ len: 1, layers: {caches} }}"));
    let map = shared.map();
    assert_eq!(format!("{map:?}"), map.to_string());
    assert!(map.to_string().starts_with("2 layers\n"), "{map}");
}

#[test]
fn numbers_and_pictures_say_who_holds_what() {
    let shared = sized(&[6, 6, 5]);
    let mut sequence = PagedSequence::new(&shared);
    (0..3).for_each(|number| step(&mut sequence, number as f32));
    let child = sequence.fork().unwrap();
    let group = shared.acquire_group().unwrap();
    sequence.reserve(2).unwrap();
    let stats = shared.stats();
    assert_eq!((stats.groups, stats.free_groups), (1, 0));
    let of_first = stats.layers[0];
    assert_eq!((of_first.free, of_first.held, of_first.shared, of_first.cached), (1, 5, 1, 1));
    let text = "1 groups, 0 free\n\
        layers 0 to 1: 6 blocks of 2 positions: 1 free, 5 held (1 shared, 1 cached), 5 at most\n\
        layer 2: 5 blocks of 2 positions: 0 free, 5 held (1 shared, 1 cached), 5 at most";
    assert_eq!(stats.to_string(), text);
    let map = "3 layers\nlayers 0 to 1\n       0 21c11.\nlayer 2\n       0 21c11";
    assert_eq!(shared.map().to_string(), map);
    let own = sequence.stats();
    assert_eq!((own.len, own.blocks, own.shared, own.waste), (3, 9, 3, 9));
    assert_eq!(child.stats().to_string(), "3 positions in 6 blocks (3 shared), 3 places unused");
    drop(child);
    assert!(shared.release_group(group));
}

#[test]
fn a_recount_finds_what_was_forgotten_and_what_was_made_up() {
    let shared = small(2, 4);
    let mut sequence = PagedSequence::new(&shared);
    step(&mut sequence, 1.0);
    let group = shared.acquire_group().unwrap();
    shared.retain_group(group);
    let both = [Holder::Group(group), Holder::Group(group)];
    shared.check_invariants(sequence.holders().chain(both)).unwrap();
    let forgotten = shared.check_invariants(both).unwrap_err();
    let text = "miscounts: 2\n  layer 0: block 0 has a holder count of 1, found 0\n  \
                layer 1: block 0 has a holder count of 1, found 0";
    assert_eq!(forgotten.to_string(), text);
    let one = shared.check_invariants(sequence.holders().chain([Holder::Group(group)]));
    let text = "miscounts: 1\n  page group 0v0 has a holder count of 2, found 1";
    assert_eq!(one.unwrap_err().to_string(), text);
    let nowhere = Holder::table(7, sequence.cache(0).block_table());
    let report = shared.check_invariants(sequence.holders().chain(both).chain([nowhere]));
    assert!(report.unwrap_err().to_string().contains("layer 7 is named, and there are 2"));
    assert!(!shared.release_group(group));
    assert!(shared.release_group(group));
    let stale = shared.check_invariants(sequence.holders().chain([Holder::Group(group)]));
    assert!(stale.unwrap_err().to_string().contains("page group 0v0 is held, and names nothing"));
}

/// A step that takes one block and gives back what its window has passed is a way of giving back.
#[cfg(feature = "std")]
#[test]
fn whoever_waits_is_woken_by_a_window_that_moves() {
    watched(|| {
        let shape = KvShape::square(64, 1, 1).unwrap();
        let spec = LayerSpec::new(shape, 20).window(KvWindow::last(64));
        let shared = SharedPagedKv::<f32>::with_layers(&[spec]).unwrap();
        let mut sequence = PagedSequence::new(&shared);
        sequence.reserve(1280).unwrap();
        sequence.append(0, &[1.0; 1280], &[1.0; 1280], 1280).unwrap();
        sequence.commit(1280).unwrap();
        assert_eq!(shared.free_blocks(0), 0);
        let (shared, waiting) = (&shared, &Barrier::new(2));
        thread::scope(|scope| {
            let waits = scope.spawn(move || {
                waiting.wait();
                let mut other = PagedSequence::new(shared);
                // Far longer than the watchdog is patient.
                other.reserve_within(640, Duration::from_secs(1000)).unwrap();
            });
            waiting.wait();
            pause();
            sequence.reserve(1).unwrap();
            waits.join().unwrap();
        });
        // As much at once as there never is, though it would fit position by position.
        assert!(shared.can_ever_fit(1281));
        let step = PagedSequence::new(shared).reserve_within(1281, Duration::from_secs(1000));
        assert_eq!(exhausted(step).0, 21);
    });
}

/// A way to layers that leads to others from one day to the next.
#[derive(Clone)]
struct Turning<'a>(&'a [SharedPagedKv; 2], &'a AtomicBool);

impl Deref for Turning<'_> {
    type Target = SharedPagedKv;

    fn deref(&self) -> &SharedPagedKv {
        &self.0[usize::from(self.1.load(Ordering::Relaxed))]
    }
}

#[test]
fn a_fork_into_other_layers_is_refused_and_counts_nothing() {
    let (both, turned) = ([small(2, 4), small(2, 1)], AtomicBool::new(false));
    let mut sequence = PagedSequence::new(Turning(&both, &turned));
    (0..5).for_each(|number| step(&mut sequence, number as f32));
    assert_eq!(sequence.stats().blocks, 6);
    turned.store(true, Ordering::Relaxed);
    assert!(matches!(sequence.fork(), Err(PagedKvError::WrongStore { .. })));
    assert_eq!(sequence.stats().blocks, 0);
    turned.store(false, Ordering::Relaxed);
    assert_eq!((free(&both[0]), free(&both[1])), ([1, 1], [1, 1]));
    drop(sequence.fork().unwrap());
    drop(sequence);
    assert_eq!(free(&both[0]), [4, 4]);
}
