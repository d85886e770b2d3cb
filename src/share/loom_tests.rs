//! The shared layer in every order: two threads, sometimes three, over two layers.
//!
//! Each model is small enough to be gone through: blocks of two positions of one number, one or
//! two blocks a layer. What is looked at is what a request looks at: its own rows, what it is
//! granted, what is counted when all is over; that no order ends with everybody waiting, loom sees
//! by itself. A panic under a guard is modelled as what it does to others, see `lock`: the guard goes
//! in mid-step and the sequence after it. Run by `.ci/loom`.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use loom::thread;

use super::report::Holder;
use super::sequence::PagedSequence;
use super::shared::SharedPagedKv;
use crate::error::PagedKvError;
use crate::id::PageGroup;
use crate::internal::orders::every_order;
use crate::storage::sequence::PagedKvCache;

mod bell_tests;

const LAYERS: usize = 2;
/// Longer than any model.
const FOR_EVER: Duration = Duration::MAX;

type Shared = Arc<SharedPagedKv>;
type Sequence = PagedSequence<Shared>;

fn layers(blocks: usize) -> Shared {
    Arc::new(SharedPagedKv::new(LAYERS, 2, blocks, 1, 1))
}

/// Writes one position in each layer, where there is room, and commits it.
fn write(sequence: &mut Sequence, value: f32) -> Result<(), PagedKvError> {
    for layer in 0..LAYERS {
        sequence.push(layer, &[value], &[value])?;
    }
    sequence.commit(1)
}

/// A sequence with these rows in each layer.
fn written(shared: &Shared, values: &[f32]) -> Sequence {
    let mut sequence = PagedSequence::new(Arc::clone(shared));
    sequence.reserve(values.len()).unwrap();
    values.iter().for_each(|&value| write(&mut sequence, value).unwrap());
    sequence
}

/// What attention would see of a layer, under a guard of its own.
fn seen(sequence: &Sequence, layer: usize) -> Vec<f32> {
    let store = sequence.shared().read(layer);
    let cache = sequence.cache(layer);
    let row = |position| {
        let (mut k, mut v) = ([0.0], [0.0]);
        cache.copy_k_row(&store, position, 0, &mut k).unwrap();
        cache.copy_v_row(&store, position, 0, &mut v).unwrap();
        assert_eq!(k, v, "a row is there whole or not at all");
        k[0]
    };
    (0..cache.seq_len()).map(row).collect()
}

fn shows(sequence: &Sequence, values: &[f32]) {
    (0..LAYERS).for_each(|layer| assert_eq!(seen(sequence, layer), values, "layer {layer}"));
}

/// What is counted is what these hold.
fn holds<'a>(shared: &SharedPagedKv, holders: impl IntoIterator<Item = Holder<'a>>) {
    if let Err(report) = shared.check_invariants(holders) {
        panic!("{report}");
    }
}

/// Nobody holds anything, and all can be had.
fn all_is_back(shared: &SharedPagedKv, blocks: usize) {
    holds(shared, []);
    let groups = shared.acquire_groups(blocks).unwrap();
    assert_eq!(shared.free_groups(), 0);
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
}

// --- attention, pushes and those who take blocks --------------------------------------------------

/// One who attends sees a step of another's in a layer whole or not at all, and his own rows as
/// they are.
#[test]
fn push_against_attend() {
    every_order(3, || {
        let shared = layers(2);
        let reader = written(&shared, &[1.0]);
        let mut writer: Sequence = PagedSequence::new(Arc::clone(&shared));
        writer.reserve(2).unwrap();
        let blocks = [0, 1].map(|layer| writer.cache(layer).block_table()[0]);
        let held = Arc::clone(&shared);
        let writer = thread::spawn(move || {
            for layer in 0..LAYERS {
                let mut store = held.write(layer);
                for value in [2.0, 3.0] {
                    writer.append_to(&mut store, layer, &[value], &[value], 1).unwrap();
                }
            }
            writer.commit(2).unwrap();
            writer
        });
        for (layer, block) in blocks.into_iter().enumerate() {
            let store = shared.read(layer);
            let row = |row| {
                let mut value = [0.0];
                store.read_v(block, 0, row, &mut value);
                value[0]
            };
            let first = row(0);
            // A step for the writer, were he not kept out.
            assert!(store.free_block_count() == 0);
            assert!([(0.0, 0.0), (2.0, 3.0)].contains(&(first, row(1))));
        }
        shows(&reader, &[1.0]);
        shows(&writer.join().unwrap(), &[2.0, 3.0]);
        drop(reader);
        all_is_back(&shared, 2);
    });
}

/// Who attends may admit a request meanwhile: it waits for no writer who waits for him.
#[test]
fn a_reader_takes_a_group_while_others_wait_to_write() {
    every_order(3, || {
        let shared = layers(2);
        let mut sequence: Sequence = PagedSequence::new(Arc::clone(&shared));
        sequence.reserve(1).unwrap();
        let writer = thread::spawn(move || write(&mut sequence, 1.0).unwrap());
        let attending = shared.read(1);
        let group = shared.acquire_group().expect("one is left");
        drop(attending);
        writer.join().unwrap();
        assert!(shared.release_group(group));
        all_is_back(&shared, 2);
    });
}

/// A bare sequence takes its block in the middle of a push: under a write guard nobody else does.
#[test]
fn a_push_that_takes_against_acquire_group() {
    every_order(3, || {
        let shared = layers(1);
        let pusher = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut cache = PagedKvCache::new();
                let mut store = shared.write(1);
                let free = store.free_block_count();
                let pushed = cache.push(&mut store, &[1.0], &[1.0]);
                // Others may give back in between.
                assert!(pushed.is_ok() || free == 0, "{free} blocks were free");
                cache.release(&mut store).unwrap();
            })
        };
        if let Some(group) = shared.acquire_group() {
            assert!(shared.release_group(group));
        }
        pusher.join().unwrap();
        all_is_back(&shared, 1);
    });
}

/// Nobody takes blocks while somebody holds all layers: what was free can be had, in all of them.
#[test]
fn write_all_against_acquire_group() {
    every_order(3, || {
        let shared = layers(1);
        let writer = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut caches = [PagedKvCache::new(), PagedKvCache::new()];
                let mut stores = shared.write_all();
                let free = stores.iter().map(|store| store.free_block_count());
                let free = free.collect::<Vec<_>>();
                assert!(free[0] == free[1], "a group is in all layers or in none: {free:?}");
                for (store, cache) in stores.iter_mut().zip(&mut caches) {
                    assert_eq!(cache.reserve(store, 1).is_ok(), free[0] == 1);
                }
                for (store, cache) in stores.iter_mut().zip(&mut caches) {
                    cache.release(store).unwrap();
                }
            })
        };
        let group = shared.acquire_group();
        writer.join().unwrap();
        if let Some(group) = group {
            assert!(shared.release_group(group));
        }
        all_is_back(&shared, 1);
    });
}

/// While `write_all` waits for a reader of layer 1, that reader takes a group: nobody waits for
/// himself through the other. A third comes in between with a push.
#[test]
fn write_all_waits_for_a_reader_who_takes_a_group() {
    every_order(2, || {
        let shared = layers(2);
        let mut sequence: Sequence = PagedSequence::new(Arc::clone(&shared));
        sequence.reserve(1).unwrap();
        let all = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || assert_eq!(shared.write_all().len(), LAYERS))
        };
        let pusher = thread::spawn(move || {
            sequence.push(0, &[1.0], &[1.0]).unwrap();
        });
        let attending = shared.read(1);
        let group = shared.acquire_group().expect("one is left");
        drop(attending);
        assert!(shared.release_group(group));
        all.join().unwrap();
        pusher.join().unwrap();
        all_is_back(&shared, 2);
    });
}

// --- groups ---------------------------------------------------------------------------------------

/// One retains while the other releases what may be the last count: he is refused, or holds it.
#[test]
fn retain_against_the_last_release() {
    every_order(4, || {
        let shared = layers(1);
        let group = shared.acquire_group().unwrap();
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.try_retain(group).is_ok_and(|()| {
                    assert_eq!(shared.group_blocks(group).len(), LAYERS);
                    shared.release_group(group)
                })
            })
        };
        let here = shared.release_group(group);
        let there = other.join().unwrap();
        assert!(here != there, "its blocks go back exactly once");
        assert_eq!(shared.group_refs(group), 0);
        all_is_back(&shared, 1);
    });
}

/// One retains and one releases a group whose block a sequence grows in: what is left on the block
/// says whether the group ever had several holders, whichever of the two came first.
fn what_is_left_on_a_block(holders: u32) {
    every_order(3, move || {
        let shared = layers(1);
        let group = shared.acquire_group().unwrap();
        let mut sequence: Sequence = PagedSequence::new(Arc::clone(&shared));
        sequence.adopt_groups(&[group], 0).unwrap();
        (1..holders).for_each(|_| shared.retain_group(group));
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.release_group(group))
        };
        let retained = shared.try_retain(group).is_ok();
        let last = other.join().unwrap();
        assert!(retained != last, "who comes after the last release is refused");
        assert_eq!(shared.group_refs(group), if last { 0 } else { holders });
        assert_eq!(write(&mut sequence, 1.0).is_ok(), last, "others would see it");
        let left = if last { 0 } else { holders };
        let groups = (0..left).map(|_| Holder::Group(group));
        holds(&shared, sequence.holders().chain(groups));
        (0..left).for_each(|index| assert_eq!(shared.release_group(group), index + 1 == left));
        drop(sequence);
        all_is_back(&shared, 1);
    });
}

#[test]
fn what_a_groups_only_holder_leaves_on_its_block() {
    what_is_left_on_a_block(1);
}

#[test]
fn what_two_holders_leave_on_a_block() {
    what_is_left_on_a_block(2);
}

/// A handle is used late: it never names the group that has its slot and its block now.
#[test]
fn a_late_release_frees_nobody_elses() {
    every_order(3, || {
        let shared = layers(1);
        let group = shared.acquire_group().unwrap();
        let late = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.try_release(group).is_ok())
        };
        let first = shared.try_release(group).is_ok();
        let next = shared.acquire_group();
        let late = late.join().unwrap();
        assert!(first != late, "one count, one release");
        if let Some(next) = next {
            assert_eq!(shared.group_refs(next), 1);
            assert!(shared.release_group(next));
        }
        all_is_back(&shared, 1);
    });
}

// --- giving back ----------------------------------------------------------------------------------

/// A sequence goes while another request is admitted, which gets all layers or none.
#[test]
fn a_drop_during_acquire_group() {
    every_order(3, || {
        let shared = layers(1);
        let sequence = written(&shared, &[1.0]);
        let giver = thread::spawn(move || drop(sequence));
        let group = shared.acquire_group();
        giver.join().unwrap();
        let group = group.or_else(|| shared.acquire_group()).expect("all was given back");
        holds(&shared, [Holder::Group(group)]);
        assert!(shared.release_group(group));
        all_is_back(&shared, 1);
    });
}

/// The same while another makes room, with a block to be copied whose other holder it is that goes.
#[test]
fn a_drop_during_reserve() {
    every_order(3, || {
        let shared = layers(2);
        let mut stays = written(&shared, &[1.0]);
        let goes = stays.fork().unwrap();
        let giver = thread::spawn(move || drop(goes));
        stays.reserve(3).unwrap_or_else(|refused| {
            // The copy and the next block are more than there is while the fork lives.
            assert!(matches!(refused, PagedKvError::Exhausted(_)), "{refused}");
            assert_eq!(stays.stats().blocks, LAYERS);
        });
        giver.join().unwrap();
        stays.reserve(3).unwrap();
        write(&mut stays, 2.0).unwrap();
        shows(&stays, &[1.0, 2.0]);
        holds(&shared, stays.holders());
        drop(stays);
        all_is_back(&shared, 2);
    });
}

/// A request is admitted while another makes room, where there is room for one.
#[test]
fn acquire_group_against_reserve() {
    every_order(3, || {
        let shared = layers(1);
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.acquire_group())
        };
        let mut sequence: Sequence = PagedSequence::new(Arc::clone(&shared));
        let reserved = sequence.reserve(1).is_ok();
        let group = other.join().unwrap();
        assert!(reserved != group.is_some());
        holds(&shared, sequence.holders().chain(group.map(Holder::Group)));
        drop(sequence);
        assert!(group.is_none_or(|group| shared.release_group(group)));
        all_is_back(&shared, 1);
    });
}

/// Two want what is enough for one: one gets it, in all layers.
#[test]
fn two_make_room_where_there_is_room_for_one() {
    every_order(3, || {
        let shared = layers(1);
        let wants = |shared: Shared| {
            move || {
                let mut sequence = PagedSequence::new(shared);
                sequence.reserve(1).is_ok().then_some(sequence)
            }
        };
        let other = thread::spawn(wants(Arc::clone(&shared)));
        let here = wants(Arc::clone(&shared))();
        let there = other.join().unwrap();
        assert!(here.is_some() != there.is_some());
        holds(&shared, here.iter().chain(&there).flat_map(PagedSequence::holders));
        drop((here, there));
        all_is_back(&shared, 1);
    });
}

// --- sharing --------------------------------------------------------------------------------------

/// Two forks go on at once, from a block that is half filled.
#[test]
fn two_forks_write_at_once() {
    every_order(2, || {
        // Each may take one for a copy before it finds that the other has gone.
        let shared = layers(3);
        let mut parent = written(&shared, &[1.0]);
        let mut child = parent.fork().unwrap();
        let other = thread::spawn(move || {
            child.reserve(1).unwrap();
            write(&mut child, 3.0).unwrap();
            child
        });
        parent.reserve(1).unwrap();
        write(&mut parent, 2.0).unwrap();
        let child = other.join().unwrap();
        shows(&parent, &[1.0, 2.0]);
        shows(&child, &[1.0, 3.0]);
        holds(&shared, parent.holders().chain(child.holders()));
        drop((parent, child));
        all_is_back(&shared, 3);
    });
}

/// One forks and looks, and lets the fork go, while another that shares its block writes on.
#[test]
fn a_fork_against_a_write() {
    every_order(2, || {
        let shared = layers(2);
        let parent = written(&shared, &[1.0]);
        let mut child = parent.fork().unwrap();
        let other = thread::spawn(move || {
            child.reserve(1).unwrap();
            write(&mut child, 3.0).unwrap();
            child
        });
        let second = parent.fork().unwrap();
        drop(parent);
        shows(&second, &[1.0]);
        let child = other.join().unwrap();
        shows(&second, &[1.0]);
        shows(&child, &[1.0, 3.0]);
        drop((second, child));
        all_is_back(&shared, 2);
    });
}

/// A sequence grows in its group's block. Once somebody else has retained the group, what he sees of
/// the block does not change any more.
#[test]
fn a_retained_group_is_not_written() {
    every_order(3, || {
        let shared = layers(1);
        let group = shared.acquire_group().unwrap();
        let mut grows: Sequence = PagedSequence::new(Arc::clone(&shared));
        grows.adopt_groups(&[group], 0).unwrap();
        let grows = thread::spawn(move || {
            // Refused from the moment on at which it is somebody else's as well.
            let refused = write(&mut grows, 5.0);
            assert!(matches!(refused, Ok(()) | Err(PagedKvError::NotReserved { .. })));
            grows
        });
        shared.retain_group(group);
        // As a prefix cache holds it: without a table.
        let first_row = |layer| {
            let block = shared.group_block(group, layer).unwrap();
            let mut value = [0.0];
            shared.read(layer).read_v(block, 0, 0, &mut value);
            value[0]
        };
        let before = [0, 1].map(first_row);
        let mut looks: Sequence = PagedSequence::new(Arc::clone(&shared));
        looks.adopt_groups(&[group], 1).unwrap();
        assert_eq!([0, 1].map(|layer| seen(&looks, layer)[0]), before);
        let grows = grows.join().unwrap();
        assert_eq!([0, 1].map(first_row), before);
        drop((grows, looks));
        assert!(!shared.release_group(group) && shared.release_group(group));
        all_is_back(&shared, 1);
    });
}

// --- a panic under a guard ------------------------------------------------------------------------

/// A request that grows in its group's block, and has one more, fails in the second layer of a step,
/// under its write guard, while `others` goes on. What unwinding drops is dropped, in its order; see
/// `lock` for what that leaves out.
fn against_a_panic(others: fn(&Shared, PageGroup)) {
    every_order(2, move || {
        let shared = layers(3);
        let group = shared.acquire_group().unwrap();
        let mut fails: Sequence = PagedSequence::new(Arc::clone(&shared));
        fails.adopt_groups(&[group], 0).unwrap();
        fails.reserve(3).unwrap();
        let fails = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                // Refused once somebody else has retained the group.
                let _written = fails.push(0, &[1.0], &[1.0]);
                let mut store = shared.write(1);
                let _written = fails.append_to(&mut store, 1, &[1.0], &[1.0], 1);
                drop(store);
                drop(fails);
            })
        };
        others(&shared, group);
        fails.join().unwrap();
        holds(&shared, [Holder::Group(group)]);
        assert!(shared.release_group(group));
        all_is_back(&shared, 3);
    });
}

#[test]
fn a_panic_during_a_step_of_another() {
    against_a_panic(|shared, _| shows(&written(shared, &[2.0]), &[2.0]));
}

#[test]
fn a_panic_during_acquire_and_release() {
    against_a_panic(|shared, _| {
        let group = shared.acquire_group().expect("one is left");
        assert!(shared.release_group(group));
    });
}

#[test]
fn a_panic_during_retain_and_release() {
    against_a_panic(|shared, group| {
        shared.retain_group(group);
        assert!(!shared.release_group(group));
    });
}

#[test]
fn a_panic_during_write_all() {
    against_a_panic(|shared, _| {
        let stores = shared.write_all();
        let free = stores.iter().map(|store| store.free_block_count()).collect::<Vec<_>>();
        // The other gives back layer by layer, which he may at any time.
        assert!(free.iter().all(|free| [1, 2].contains(free)), "{free:?}");
    });
}

#[test]
fn a_panic_gives_back_what_another_waits_for() {
    against_a_panic(|shared, _| assert!(shared.wait_for_groups(2, FOR_EVER)));
}
