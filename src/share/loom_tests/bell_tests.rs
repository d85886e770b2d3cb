//! The bell in every order: who waits for blocks is woken, or loom sees everybody wait.

use super::*;

/// Who sleeps is woken: otherwise the model would end with everybody waiting.
#[test]
fn a_released_group_wakes_those_who_wait() {
    every_order(3, || {
        let shared = layers(1);
        let group = shared.acquire_group().unwrap();
        let giver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || assert!(shared.release_group(group)))
        };
        assert!(shared.wait_for_groups(1, FOR_EVER));
        giver.join().unwrap();
        all_is_back(&shared, 1);
    });
}

/// Two who wait, and a sequence that ends.
#[test]
fn a_dropped_sequence_wakes_all_who_wait() {
    every_order(2, || {
        let shared = layers(1);
        let sequence = written(&shared, &[1.0]);
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || assert!(shared.wait_for_groups(1, FOR_EVER)))
        };
        let giver = thread::spawn(move || drop(sequence));
        assert!(shared.wait_for_groups(1, FOR_EVER));
        giver.join().unwrap();
        other.join().unwrap();
        all_is_back(&shared, 1);
    });
}

/// What a bare sequence gives back under a guard is told when the guard goes.
#[test]
fn a_guard_that_gave_back_wakes_those_who_wait() {
    every_order(3, || {
        let shared = layers(1);
        let mut cache = PagedKvCache::new();
        cache.push(&mut shared.write(1), &[1.0], &[1.0]).unwrap();
        let giver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut store = shared.write(1);
                cache.release(&mut store).unwrap();
            })
        };
        assert!(shared.wait_for_groups(1, FOR_EVER));
        giver.join().unwrap();
        all_is_back(&shared, 1);
    });
}

/// A request that waits for room gets it, whatever it was that stood in its way.
#[test]
fn reserve_within_gets_its_turn() {
    every_order(2, || {
        let shared = layers(1);
        let sequence = written(&shared, &[1.0]);
        let giver = thread::spawn(move || drop(sequence));
        let mut waits: Sequence = PagedSequence::new(Arc::clone(&shared));
        waits.reserve_within(1, FOR_EVER).unwrap();
        giver.join().unwrap();
        holds(&shared, waits.holders());
        drop(waits);
        all_is_back(&shared, 1);
    });
}
