//! A prefix that is found while the sequence that wrote it ends and the cache runs short, in every
//! order. Run by `.ci/loom`.

use alloc::sync::Arc;

use loom::sync::Mutex;
use loom::thread;

use super::{HashKey, PrefixCache, Priority};
use crate::internal::orders::every_order;
use crate::share::report::Holder;
use crate::share::sequence::PagedSequence;
use crate::share::shared::SharedPagedKv;

const LAYERS: usize = 2;
const PROMPT: [u32; 3] = [7, 8, 9];

type Sequence = PagedSequence<Arc<SharedPagedKv>>;

/// Writes the one block there is, of two positions.
fn fill(sequence: &mut Sequence, values: [f32; 2]) {
    (0..LAYERS).for_each(|layer| sequence.append(layer, &values, &values, 2).unwrap());
    sequence.commit(2).unwrap();
}

fn shows(sequence: &Sequence, values: [f32; 2]) {
    for layer in 0..LAYERS {
        let store = sequence.shared().read(layer);
        for (position, value) in values.into_iter().enumerate() {
            let mut found = [0.0];
            sequence.cache(layer).copy_v_row(&store, position, 0, &mut found).unwrap();
            assert_eq!(found, [value], "layer {layer}, position {position}");
        }
    }
}

/// A sequence that has written a block, and a cache, behind a lock, that holds it.
fn cached(shared: &Arc<SharedPagedKv>) -> (Sequence, Mutex<PrefixCache<Arc<SharedPagedKv>>>) {
    let group = shared.acquire_group().unwrap();
    let mut sequence = PagedSequence::new(Arc::clone(shared));
    sequence.adopt_groups(&[group], 0).unwrap();
    fill(&mut sequence, [1.0, 2.0]);
    let mut cache = PrefixCache::new(Arc::clone(shared), 2, HashKey::new([3; 16]));
    let inserted = cache.insert(b"", &PROMPT, &[group], Priority::NORMAL).unwrap();
    assert_eq!(inserted.stored, 1);
    assert!(!shared.release_group(group));
    (sequence, Mutex::new(cache))
}

/// What a lookup has found stays, and its rows do, whoever lets go of it and whatever is evicted; what
/// it has not found is another's to write.
#[test]
fn a_lookup_while_the_writer_ends_and_the_cache_is_emptied() {
    every_order(2, || {
        let shared = Arc::new(SharedPagedKv::new(LAYERS, 2, 1, 1, 1));
        let (writer, cache) = cached(&shared);
        let cache = Arc::new(cache);
        let other = {
            let (shared, cache) = (Arc::clone(&shared), Arc::clone(&cache));
            thread::spawn(move || {
                drop(writer);
                cache.lock().unwrap().evict(1);
                let mut next: Sequence = PagedSequence::new(shared);
                if next.reserve(2).is_ok() {
                    fill(&mut next, [5.0, 6.0]);
                }
            })
        };
        let lease = cache.lock().unwrap().lookup(b"", &PROMPT);
        if !lease.is_empty() {
            let mut finds: Sequence = PagedSequence::new(Arc::clone(&shared));
            finds.adopt_groups(lease.groups(), lease.covered()).unwrap();
            shows(&finds, [1.0, 2.0]);
            drop(lease);
            shows(&finds, [1.0, 2.0]);
        }
        other.join().unwrap();
        let mut cache = cache.lock().unwrap();
        cache.check_invariants([]).unwrap();
        let left = cache.stats().cached;
        assert_eq!(cache.clear(), left);
        shared.check_invariants([] as [Holder<'_>; 0]).unwrap();
        assert_eq!(shared.free_groups(), 1);
    });
}

/// Two leases of one block end at once, under nobody's lock, while the cache evicts.
#[test]
fn leases_end_while_the_cache_evicts() {
    every_order(3, || {
        let shared = Arc::new(SharedPagedKv::new(LAYERS, 2, 1, 1, 1));
        let (writer, cache) = cached(&shared);
        drop(writer);
        let leases = [(); 2].map(|()| cache.lock().unwrap().lookup(b"", &PROMPT));
        assert!(leases.iter().all(|lease| lease.covered() == 2));
        let [first, second] = leases;
        let other = thread::spawn(move || drop(first));
        drop(second);
        // Not before both have gone.
        let evicted = cache.lock().unwrap().evict(1);
        assert_eq!(evicted, shared.free_groups());
        other.join().unwrap();
        let mut cache = cache.lock().unwrap();
        assert_eq!(evicted + cache.evict(1), 1);
        assert_eq!(shared.free_groups(), 1);
    });
}
