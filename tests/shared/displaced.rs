//! Stores that are moved out of their layer.

use super::*;

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
        // Nor does a step take blocks there, which others may take under the guard they now stand behind.
        let mut sequence = PagedSequence::new(&shared);
        assert!(panic_text(|| sequence.reserve(1).unwrap()).contains("layer 0"));
        drop(sequence);
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
