//! Page groups and their handles.

use super::*;

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
    // When one of the two has let go, the other may be the one that keeps the rows.
    assert!(!shared.release_group(group));
    late.adopt(&mut shared.write(0), &[block], 0).unwrap();
    push(&shared, 0, &mut late, 4.0);
    assert_ne!(late.block_table(), [block]);
}

/// Who filled a group hands it over, as to a prefix cache, and lets go of it: a rollback into its own
/// rows is no licence to write others there.
#[test]
fn a_group_that_was_handed_over_is_not_written_by_who_filled_it() {
    let shared = small(2, 3);
    let group = shared.acquire_group().unwrap();
    let mut author = PagedSequence::new(&shared);
    author.adopt_groups(&[group], 0).unwrap();
    (1..3).for_each(|number| step(&mut author, number as f32));
    shared.retain_group(group);
    assert!(!shared.release_group(group), "the other one has it");
    author.truncate(1).unwrap();
    step(&mut author, 9.0);
    assert_eq!(numbers(&author, 1), [1.0, 9.0]);
    let mut finds = PagedSequence::new(&shared);
    finds.adopt_groups(&[group], 2).unwrap();
    assert_eq!(numbers(&finds, 0), [1.0, 2.0]);
    assert_eq!(numbers(&finds, 1), [1.0, 2.0]);
}

/// A cache of prefixes is the one holder of its groups, and need not be asked twice: who adopts
/// rows does not write beside them while a group holds them.
#[test]
fn a_prefix_is_not_written_by_who_adopts_a_part_of_it() {
    let shared = small(1, 4);
    let group = shared.acquire_group().unwrap();
    let block = shared.group_block(group, 0).unwrap();
    let mut writer = PagedKvCache::new();
    writer.adopt(&mut shared.write(0), &[block], 0).unwrap();
    for number in [1.0, 2.0] {
        push(&shared, 0, &mut writer, number);
    }
    shared.release(0, &mut writer).unwrap();

    let mut part = PagedKvCache::new();
    part.adopt(&mut shared.write(0), &[block], 1).unwrap();
    let mut child = part.fork(&mut shared.write(0)).unwrap();
    push(&shared, 0, &mut part, 9.0);
    assert_eq!(keys(&shared, 0, &part), [1.0, 9.0]);
    // The fork is the only table left, and the rows are still not its own.
    push(&shared, 0, &mut child, 8.0);
    assert_eq!(keys(&shared, 0, &child), [1.0, 8.0]);
    // A rollback into the prefix is no licence either.
    let mut whole = PagedKvCache::new();
    whole.adopt(&mut shared.write(0), &[block], 2).unwrap();
    whole.truncate(&mut shared.write(0), 1).unwrap();
    push(&shared, 0, &mut whole, 7.0);
    assert_eq!(keys(&shared, 0, &whole), [1.0, 7.0]);

    let mut all = PagedKvCache::new();
    all.adopt(&mut shared.write(0), &[block], 2).unwrap();
    assert_eq!(keys(&shared, 0, &all), [1.0, 2.0]);
}

/// Whether a block is shared is asked once for each write. Asked twice, a group retained in
/// between used up the copy that another block had been counted for.
#[test]
fn a_group_retained_in_the_middle_of_a_write_costs_nobody_his_rows() {
    watched(|| {
        let shared = small(1, 8);
        let group = shared.acquire_group().unwrap();
        let room = shared.group_block(group, 0).unwrap();
        let mut other = PagedKvCache::new();
        push(&shared, 0, &mut other, 7.0);
        let theirs = other.block_table()[0];
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    shared.retain_group(group);
                    assert!(!shared.release_group(group));
                }
            });
            for _ in 0..20 * ROUNDS {
                let mut store = shared.write(0);
                let mut writer = PagedKvCache::new();
                writer.adopt(&mut store, &[room, theirs], 0).unwrap();
                let n = store.block_size() + 1;
                let row = vec![9.0; n];
                writer.append(&mut store, &row, &row, n).unwrap();
                let mut kept = [0.0];
                other.copy_k_row(&store, 0, 0, &mut kept).unwrap();
                writer.release(&mut store).unwrap();
                if kept != [7.0] {
                    done.store(true, Ordering::Relaxed);
                }
                assert_eq!(kept, [7.0]);
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn a_stale_handle_names_nothing_and_frees_nothing() {
    let shared = small(2, 2);
    let stale = shared.acquire_group().unwrap();
    assert!(shared.release_group(stale));
    // The slot and the blocks have a new owner, and the old handle must not reach either.
    let owner = shared.acquire_group().unwrap();
    let text = format!("page group {stale} is stale, its last holder has released it");
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
