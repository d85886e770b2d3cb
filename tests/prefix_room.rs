//! Room that the prefix cache makes: what goes for a request that lacks blocks, and what never
//! does; requests that begin with a part of a cached block; salts that leave.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::attention::causal_gqa_attention_paged;
use paged_kv::cache::{
    Holder, PageGroup, PagedKvStore, PagedSequence, PagedStoreExhausted, SharedPagedKv,
};
use paged_kv::internal::numbers::Numbers;
use paged_kv::prefix::{HashKey, PrefixCache, PrefixEvent, PrefixStats, Priority, RemoveError};
use paged_kv::{Element, Int4, Int8, KvShape, PagedKvError, bf16, f16};
use std::sync::{Arc, Mutex};

const SIZE: usize = 4;
const WIDTH: usize = 8;
const LAYERS: usize = 2;
const N_HEADS: usize = 2;
const KEY: HashKey = HashKey::new(*b"sixteen of bytes");

type Cache<'a, E = f32> = PrefixCache<&'a SharedPagedKv<E>>;

fn pool<E: Element>(blocks: usize) -> SharedPagedKv<E> {
    let shape = KvShape::square(SIZE, 1, WIDTH).unwrap();
    SharedPagedKv::with_shape(LAYERS, shape, blocks).unwrap()
}

/// `n` tokens from `first` on.
fn count(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

/// What a model would make of a token at a position in a layer: as many numbers as a row has.
fn row(token: u32, position: usize, layer: usize) -> Vec<f32> {
    Numbers::new(u64::from(token) * 1000 + position as u64 * 10 + layer as u64).normals(WIDTH)
}

/// Writes the rows of `tokens` from `from` on into reserved room, in every layer.
fn prefill<E: Element>(
    sequence: &mut PagedSequence<&SharedPagedKv<E>, E>,
    tokens: &[u32],
    from: usize,
) {
    for layer in 0..LAYERS {
        for (position, &token) in tokens.iter().enumerate().skip(from) {
            let (k, v) = (row(token, position, layer), row(token, position, layer + 5));
            sequence.push(layer, &k, &v).unwrap();
        }
    }
    sequence.commit(tokens.len() - from).unwrap();
}

/// The bits of the last position's attention in every layer.
fn attend<E: Element>(sequence: &PagedSequence<&SharedPagedKv<E>, E>) -> Vec<u32> {
    let query = Numbers::new(99).normals(N_HEADS * WIDTH);
    let of = |layer| {
        let store = sequence.shared().read(layer);
        causal_gqa_attention_paged(&query, &store, sequence.cache(layer), N_HEADS).unwrap()
    };
    (0..LAYERS).flat_map(of).map(f32::to_bits).collect()
}

/// The same, of a prompt that is computed in a pool of its own.
fn alone<E: Element>(tokens: &[u32]) -> Vec<u32> {
    let shared = pool::<E>(tokens.len().div_ceil(SIZE));
    let mut sequence = PagedSequence::new(&shared);
    sequence.reserve(tokens.len()).unwrap();
    prefill(&mut sequence, tokens, 0);
    attend(&sequence)
}

/// Stores the full blocks of a prompt that nobody computes; the cache holds them alone.
fn store(cache: &mut Cache<'_>, shared: &SharedPagedKv, salt: &[u8], tokens: &[u32]) {
    let groups = cache.acquire_groups(tokens.len() / SIZE).unwrap();
    cache.insert(salt, tokens, &groups, Priority::NORMAL).unwrap();
    groups.into_iter().for_each(|group| _ = shared.release_group(group));
}

fn covered(cache: &Cache<'_>, salt: &[u8], tokens: &[u32]) -> usize {
    cache.peek(salt, &[tokens, &[u32::MAX]].concat())
}

/// Blocks asked for and those that were free.
fn lacking(error: PagedKvError) -> (usize, usize) {
    match error {
        PagedKvError::Exhausted(PagedStoreExhausted { need, free, .. }) => (need, free),
        other => panic!("{other}"),
    }
}

/// The life that the manual tells of: groups for the rest, full blocks alone taken from the cache.
/// `None` where there is no room.
fn serve<E: Element>(
    shared: &SharedPagedKv<E>,
    cache: &mut Cache<'_, E>,
    tokens: &[u32],
) -> Option<(usize, Vec<u32>)> {
    let mut lease = cache.lookup(b"", tokens);
    lease.release_partial();
    let own = cache.acquire_groups(tokens.len().div_ceil(SIZE) - lease.groups().len()).ok()?;
    let groups = [lease.groups(), &own].concat();
    let mut sequence = PagedSequence::new(shared);
    sequence.adopt_groups(&groups, lease.covered()).unwrap();
    cache.reserve(&mut sequence, tokens.len() - lease.covered()).unwrap();
    prefill(&mut sequence, tokens, lease.covered());
    let bits = attend(&sequence);
    cache.insert(b"", tokens, &groups, Priority::NORMAL).unwrap();
    own.into_iter().for_each(|group| _ = shared.release_group(group));
    Some((lease.covered(), bits))
}

#[test]
fn what_is_lacking_goes_and_no_more() {
    let shared = pool(8);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"", &count(0, 12));
    store(&mut cache, &shared, b"", &count(50, 8));
    let mut sequence = PagedSequence::new(&shared);
    // Three are free.
    cache.reserve(&mut sequence, 3 * SIZE).unwrap();
    assert_eq!((cache.stats().cached, cache.stats().evicted), (5, 0));
    cache.reserve(&mut sequence, 3 * SIZE + 1).unwrap();
    assert_eq!((cache.stats().cached, shared.free_groups()), (4, 0));
    // The end of what was used first.
    assert_eq!((covered(&cache, b"", &count(0, 12)), covered(&cache, b"", &count(50, 8))), (8, 8));
    let groups = cache.acquire_groups(3).unwrap();
    assert_eq!((groups.len(), cache.stats().cached, cache.stats().evicted), (3, 1, 4));
    cache.check_invariants([]).unwrap();
    let holders = groups.iter().map(|group| Holder::Group(*group));
    let lease = cache.lookup(b"", &count(50, 5));
    let cached = lease.groups().iter().flat_map(|group| [Holder::Group(*group); 2]);
    shared.check_invariants(sequence.holders().chain(holders).chain(cached)).unwrap();
}

#[test]
fn where_it_would_not_be_enough_nothing_goes() {
    let shared = pool(8);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"a", &[count(0, 8), count(20, 4)].concat());
    store(&mut cache, &shared, b"b", &count(50, 8));
    store(&mut cache, &shared, b"a", &[count(0, 8), count(30, 4)].concat());
    let mut other = PagedSequence::new(&shared);
    other.reserve(2 * SIZE).unwrap();
    assert_eq!((shared.free_groups(), cache.stats().evicted), (0, 0));
    let told = Arc::new(Mutex::new(0));
    let listener = Arc::clone(&told);
    cache.set_sink(Some(Box::new(move |_| *listener.lock().unwrap() += 1)));
    // The path through 20 is held, so that 30 and both of the other salt may go.
    let lease = cache.lookup(b"a", &[count(0, 8), count(20, 5)].concat());
    assert_eq!((lease.covered(), cache.evictable()), (12, 3));
    let before = (cache.stats(), format!("{:?}", shared.stats()));
    let mut sequence = PagedSequence::new(&shared);
    for _ in 0..3 {
        assert_eq!(lacking(cache.reserve(&mut sequence, 4 * SIZE).unwrap_err()), (4, 0));
        assert_eq!(lacking(cache.acquire_groups(4).unwrap_err().into()), (4, 0));
        assert_eq!((cache.stats(), format!("{:?}", shared.stats())), before);
        cache.check_invariants([lease.groups()]).unwrap();
    }
    assert!(!cache.try_evict(4) && !cache.try_evict(usize::MAX));
    assert_eq!(cache.stats(), before.0);
    assert_eq!(cache.acquire_groups(usize::MAX).unwrap_err().need, usize::MAX);
    assert_eq!(*told.lock().unwrap(), 0);
    // And the order in which they go is what it was.
    let b = count(50, 8);
    let at = |cache: &Cache<'_>| {
        (covered(cache, b"b", &b), covered(cache, b"a", &[count(0, 8), count(30, 4)].concat()))
    };
    let mut seen = Vec::new();
    for blocks in 1..=3 {
        cache.reserve(&mut sequence, blocks * SIZE).unwrap();
        seen.push(at(&cache));
    }
    assert_eq!(seen, [(4, 12), (0, 12), (0, 8)]);
    assert_eq!((*told.lock().unwrap(), cache.stats().salts), (3, 1));
    assert!(lease.groups().iter().all(|group| shared.group_refs(*group) == 2));
    cache.check_invariants([lease.groups()]).unwrap();
}

/// Evicting what a sequence still reads gives no block back: it would be lost for nothing.
#[test]
fn blocks_that_a_sequence_reads_stay_cached() {
    let shared = pool(5);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"", &count(0, 12));
    let mut reader = PagedSequence::new(&shared);
    {
        let lease = cache.lookup(b"", &count(0, 9));
        reader.adopt_groups(lease.groups(), lease.covered()).unwrap();
    }
    // The lease has gone; the sequence holds two blocks of the three.
    assert_eq!((cache.evictable(), cache.evict(1)), (1, 1));
    assert_eq!((cache.evictable(), cache.evict(9)), (0, 0));
    let mut other = PagedSequence::new(&shared);
    assert_eq!(lacking(cache.reserve(&mut other, 4 * SIZE).unwrap_err()), (4, 3));
    assert_eq!(cache.stats().cached, 2);
    drop(reader);
    cache.reserve(&mut other, 4 * SIZE).unwrap();
    assert_eq!((cache.stats().cached, shared.free_groups()), (1, 0));
}

#[test]
fn a_sequence_of_another_pool_takes_nothing() {
    let (shared, elsewhere) = (pool(2), pool(1));
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"", &count(0, 8));
    let mut sequence = PagedSequence::new(&elsewhere);
    let refused = cache.reserve(&mut sequence, 2 * SIZE);
    let (need, have) = (elsewhere.read(0).id(), shared.read(0).id());
    assert_eq!(refused, Err(PagedKvError::WrongStore { need, have }));
    assert_eq!((cache.stats().cached, elsewhere.free_groups()), (2, 1));
}

/// Layers of different sizes run short one after the other.
#[test]
fn room_is_made_for_each_layer_that_lacks_some() {
    let stores = [6, 5, 9].map(|blocks| PagedKvStore::new(SIZE, blocks, 1, 1));
    let shared = SharedPagedKv::from_stores(stores.into());
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"", &count(0, 16));
    let mut sequence = PagedSequence::new(&shared);
    cache.reserve(&mut sequence, 4 * SIZE).unwrap();
    assert_eq!((cache.stats().cached, shared.free_groups()), (1, 0));
    assert!(cache.reserve(&mut sequence, 7 * SIZE).is_err());
    assert_eq!(sequence.cache(2).block_table().len(), 4);
}

#[test]
fn a_small_pool_serves_many_prompts_with_the_bits_that_each_has_alone() {
    let shared = pool::<f32>(7);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    let mut saved = 0;
    for round in 0..60_u32 {
        // Few beginnings, few ends; up to five blocks.
        let tokens =
            [count(round % 3 * 100, 8 + round % 4), count(round % 5 * 1000, round % 9 + 1)];
        let tokens = tokens.concat();
        let (found, bits) = serve(&shared, &mut cache, &tokens).expect("seven are enough");
        assert_eq!(bits, alone::<f32>(&tokens), "round {round}");
        saved += found;
        cache.check_invariants([]).unwrap();
        assert_eq!(shared.free_groups() + cache.stats().cached, 7);
    }
    let stats = cache.stats();
    assert!(saved > 50 && stats.evicted > 50, "{saved} saved, {} evicted", stats.evicted);
}

/// A hit that ends inside a cached block: its rows are copied by the first reservation.
fn a_part_of_a_block_is_copied<E: Element>() {
    let cached = count(0, 14);
    for agree in 1..=12_usize {
        let shared = pool::<E>(9);
        let mut cache = Cache::<E>::new(&shared, SIZE, KEY);
        let (_, first) = serve(&shared, &mut cache, &cached).unwrap();
        assert_eq!(first, alone::<E>(&cached));
        let prompt = [&cached[..agree], &[70, 71, 72, 73, 74]].concat();
        let mut lease = cache.lookup(b"", &prompt);
        assert_eq!(lease.covered(), agree);
        let mut sequence = PagedSequence::new(&shared);
        sequence.adopt_groups(lease.groups(), agree).unwrap();
        cache.reserve(&mut sequence, prompt.len() - agree).unwrap();
        let last = lease.groups().len() - 1;
        for layer in 0..LAYERS {
            let theirs = shared.group_block(lease.groups()[last], layer).unwrap();
            let copied = sequence.cache(layer).block_table()[last] != theirs;
            assert_eq!(copied, !agree.is_multiple_of(SIZE), "{agree} positions");
        }
        // Copied: the cached block may go, and here the cache needs it no more.
        lease.release_partial();
        prefill(&mut sequence, &prompt, agree);
        assert_eq!(attend(&sequence), alone::<E>(&prompt), "{agree} positions");
        // What was cached has not been written to.
        let (found, again) = serve(&shared, &mut cache, &cached).unwrap();
        assert_eq!((found, again), (12, first), "{agree} positions");
        cache.check_invariants([lease.groups()]).unwrap();
    }
}

#[test]
fn a_hit_inside_a_block_gives_the_bits_that_the_prompt_has_alone() {
    a_part_of_a_block_is_copied::<f32>();
    a_part_of_a_block_is_copied::<f16>();
    a_part_of_a_block_is_copied::<bf16>();
    a_part_of_a_block_is_copied::<Int8>();
    a_part_of_a_block_is_copied::<Int4>();
}

#[test]
fn a_salt_goes_as_a_whole_and_no_other_with_it() {
    let shared = pool(12);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    let prompts = [count(0, 8), [count(0, 4), count(40, 8)].concat(), count(60, 4)];
    for prompt in &prompts {
        store(&mut cache, &shared, b"leaves", prompt);
        store(&mut cache, &shared, b"stays", prompt);
    }
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&told);
    cache.set_sink(Some(Box::new(move |event| {
        if let PrefixEvent::Removed { group, .. } = event {
            listener.lock().unwrap().push(group);
        }
    })));
    assert_eq!((shared.free_groups(), cache.stats().cached), (2, 10));
    let lease = cache.lookup(b"leaves", &count(0, 9));
    assert_eq!(lease.covered(), 8);
    assert_eq!(cache.remove_salt(b"nobody's"), Ok(0));
    // Three of its five go back, a lease holds the others.
    assert_eq!(cache.remove_salt(b"leaves"), Ok(3));
    assert_eq!((shared.free_groups(), cache.stats().cached, cache.stats().salts), (5, 5, 1));
    for prompt in &prompts {
        assert_eq!(covered(&cache, b"leaves", prompt), 0);
        assert_eq!(covered(&cache, b"stays", prompt), prompt.len());
    }
    assert!(lease.groups().iter().all(|group| shared.group_refs(*group) == 1));
    // Children were told of before parents.
    cache.set_sink(None);
    let told = told.lock().unwrap();
    let place = |group: &PageGroup| told.iter().position(|other| other == group).unwrap();
    assert_eq!(told.len(), 5);
    assert!(place(&lease.groups()[1]) < place(&lease.groups()[0]));
    cache.check_invariants([]).unwrap();
    drop(lease);
    assert_eq!(shared.free_groups(), 7);
    // The salt may come again, to nodes that were others'.
    store(&mut cache, &shared, b"leaves", &count(0, 12));
    assert_eq!((covered(&cache, b"leaves", &count(0, 12)), cache.evict(99)), (12, 8));
    assert_eq!((shared.free_groups(), cache.stats().salts), (12, 0));
}

#[test]
fn a_salt_with_a_pin_is_not_removed() {
    let shared = pool(6);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"a", &count(0, 12));
    store(&mut cache, &shared, b"a", &count(30, 4));
    cache.set_pin_budget(2);
    let pin = cache.pin(b"a", &count(0, 8)).unwrap();
    let before = cache.stats();
    let refused = cache.remove_salt(b"a").unwrap_err();
    assert_eq!(refused, RemoveError::Pinned { blocks: 2 });
    assert_eq!(refused.to_string(), "2 blocks of the salt are pinned");
    assert_eq!(cache.stats(), before);
    assert_eq!(cache.unpin(pin), Ok(2));
    assert_eq!((cache.remove_salt(b"a"), shared.free_groups()), (Ok(4), 6));
}

/// Two threads that reserve through one cache, in a pool that holds one of them beside what is
/// cached.
#[test]
fn many_reserve_through_one_cache() {
    let shared = Arc::new(pool::<f32>(8));
    let cache = Mutex::new(PrefixCache::new(Arc::clone(&shared), SIZE, KEY));
    std::thread::scope(|scope| {
        for id in 0..3_u32 {
            let (shared, cache) = (&shared, &cache);
            scope.spawn(move || {
                for round in 0..200_u32 {
                    let prompt = [count(round % 4 * 10, 8), count(100 + id, 3)].concat();
                    let (mut sequence, lease) = loop {
                        let mut cache = cache.lock().unwrap();
                        let mut lease = cache.lookup(b"", &prompt);
                        lease.release_partial();
                        let mut sequence = PagedSequence::new(Arc::clone(shared));
                        sequence.adopt_groups(lease.groups(), lease.covered()).unwrap();
                        let rest = prompt.len() - lease.covered();
                        match cache.reserve(&mut sequence, rest) {
                            Ok(()) => break (sequence, lease),
                            // Three hold at most three each, of eight: somebody is at work.
                            Err(PagedKvError::Exhausted(_)) => {}
                            Err(other) => panic!("{other}"),
                        }
                        drop((sequence, lease, cache));
                        std::thread::yield_now();
                    };
                    for layer in 0..LAYERS {
                        let rest = prompt.iter().enumerate().skip(lease.covered());
                        for (position, &token) in rest {
                            let row = row(token, position, layer);
                            sequence.push(layer, &row, &row).unwrap();
                        }
                    }
                    sequence.commit(prompt.len() - lease.covered()).unwrap();
                    drop(sequence);
                    let mut cache = cache.lock().unwrap();
                    if lease.is_empty()
                        && let Ok(groups) = cache.acquire_groups(2)
                    {
                        cache.insert(b"", &prompt, &groups, Priority::NORMAL).unwrap();
                        groups.into_iter().for_each(|group| _ = shared.release_group(group));
                    }
                }
            });
        }
    });
    let mut cache = cache.into_inner().unwrap();
    cache.check_invariants([]).unwrap();
    assert!(cache.stats().hits > 0 && cache.stats().evicted > 0);
    cache.evict(usize::MAX);
    assert_eq!(shared.free_groups(), 8);
}

#[test]
fn stats_say_what_was_done_and_print_as_two_lines() {
    let shared = pool(6);
    let mut cache = Cache::new(&shared, SIZE, KEY);
    store(&mut cache, &shared, b"a", &count(0, 12));
    store(&mut cache, &shared, b"b", &count(0, 8));
    cache.set_pin_budget(1);
    let pin = cache.pin(b"a", &count(0, 4)).unwrap();
    for (salt, tokens, found) in
        [(b"a", count(0, 13), 12), (b"a", count(0, 11), 10), (b"b", count(2, 6), 0)]
    {
        assert_eq!(cache.lookup(salt, &tokens).covered(), found);
    }
    let groups = cache.acquire_groups(2).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.cached, stats.pinned, stats.salts), (4, 1, 2));
    assert_eq!((stats.tokens_asked, stats.tokens_saved), (30, 22));
    assert_eq!((stats.block_size, stats.bytes_per_block), (4, 56 + 4 * 4));
    let lines = "4 blocks of 4 tokens cached (1 pinned) for 2 salts, 72 bytes each; 5 stored, 1 \
                 evicted\n3 lookups: 2 hits (1 in part), 1 misses; 22 of 30 tokens saved (73.3 %)";
    assert_eq!(stats.to_string(), lines);
    let none = "0 blocks of 0 tokens cached (0 pinned) for 0 salts, 0 bytes each; 0 stored, 0 \
                evicted\n0 lookups: 0 hits (0 in part), 0 misses; 0 of 0 tokens saved (0.0 %)";
    assert_eq!(PrefixStats::default().to_string(), none);
    groups.into_iter().for_each(|group| _ = shared.release_group(group));
    cache.unpin(pin).unwrap();
}
