//! The prefix cache: against its model, and its promises, one test each.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::GroupError;
use paged_kv::attention::causal_gqa_attention_paged;
use paged_kv::cache::{PageGroup, PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::prefix_ops::{Model, Op, World};
use paged_kv::internal::types::some_of;
use paged_kv::prefix::{
    GroupHolders, HashKey, InsertError, Lease, PinError, PrefixCache, PrefixEvent, PrefixFault,
    Priority,
};
use proptest::collection::vec;
use proptest::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;

/// Programs in which some kinds of operation may be missing altogether: a run without evictions
/// fills the pool, one without ends holds what it finds.
fn programs() -> impl Strategy<Value = Vec<Op>> {
    let ops = vec(any::<[u8; 4]>(), 0..80);
    (any::<u32>(), any::<u32>(), ops).prop_map(|(a, b, mut ops)| {
        ops.retain(|op| (a & b) >> (op[0] % 32) & 1 == 0);
        ops.into_iter().map(Op::decode).collect()
    })
}

fn worlds() -> impl Strategy<Value = World> {
    (1..5_usize, 0..14_usize, prop_oneof![Just(0), Just(1), Just(64)])
        .prop_map(|(block_size, groups, hash_bits)| World { block_size, groups, hash_bits })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: some_of(2000),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_found_is_what_a_list_of_prefixes_finds(world in worlds(), ops in programs()) {
        Model::run(world, &ops);
    }
}

/// The same smoke run everywhere, whatever proptest draws.
#[test]
fn a_fixed_run_reaches_every_operation() {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    for (block_size, groups) in [(1, 9), (2, 5), (3, 12), (4, 3), (2, 30)] {
        for hash_bits in [1, 64] {
            let bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(4 * 1500).collect();
            Model::run(World { block_size, groups, hash_bits }, &Op::decode_all(&bytes));
        }
    }
}

/// The canary: a model that is told the wrong thing must notice, or all of the above proves
/// nothing.
#[test]
fn the_model_notices_a_count_that_somebody_else_released() {
    let mut model = Model::new(World { block_size: 1, groups: 4, hash_bits: 64 });
    // Serve, two tokens; then the request ends.
    model.step(Op::decode([5, 2, 0, 0]));
    model.step(Op::decode([18, 0, 0, 0]));
    model.check();
    model.steal();
    assert!(catch_unwind(AssertUnwindSafe(|| model.check())).is_err());
}

const SIZE: usize = 4;
const KEY: HashKey = HashKey::new(*b"sixteen of bytes");

/// One layer of blocks of four positions, one head of width 2.
fn pool(groups: usize) -> SharedPagedKv {
    SharedPagedKv::new(1, SIZE, groups, 1, 2)
}

fn acquire(shared: &SharedPagedKv, n: usize) -> Vec<PageGroup> {
    (0..n).map(|_| shared.acquire_group().expect("there is room")).collect()
}

fn release(shared: &SharedPagedKv, groups: &[PageGroup]) {
    for &group in groups {
        shared.release_group(group);
    }
}

/// A pool's cache, for prompts whose requests are done.
struct Kit<'a> {
    shared: &'a SharedPagedKv,
    cache: PrefixCache<&'a SharedPagedKv>,
}

impl<'a> Kit<'a> {
    fn new(shared: &'a SharedPagedKv) -> Self {
        Kit { shared, cache: PrefixCache::new(shared, SIZE, KEY) }
    }

    fn with_hash_bits(shared: &'a SharedPagedKv, bits: u32) -> Self {
        Kit { shared, cache: PrefixCache::with_hash_bits(shared, SIZE, KEY, bits) }
    }

    /// Stores the full blocks of a prompt. The cache is the only holder of those that were not
    /// known.
    fn store(&mut self, salt: &[u8], tokens: &[u32]) -> Vec<PageGroup> {
        self.store_as(salt, tokens, Priority::NORMAL)
    }

    fn store_as(&mut self, salt: &[u8], tokens: &[u32], priority: Priority) -> Vec<PageGroup> {
        let groups = acquire(self.shared, tokens.len() / SIZE);
        self.cache.insert(salt, tokens, &groups, priority).expect("fresh groups");
        release(self.shared, &groups);
        groups
    }

    /// Positions that a lookup covers, with one token more to be computed.
    fn covered(&self, salt: &[u8], tokens: &[u32]) -> usize {
        let longer: Vec<u32> = tokens.iter().copied().chain([u32::MAX]).collect();
        self.cache.peek(salt, &longer)
    }

    fn check(&self, leases: &[&Lease<&SharedPagedKv>]) {
        if let Err(report) = self.cache.check_invariants(leases.iter().map(|lease| lease.groups()))
        {
            panic!("{report}");
        }
    }
}

/// `n` tokens from `first` on.
fn count(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

#[test]
fn a_collision_is_a_miss_or_a_second_entry_and_never_a_hit() {
    let shared = pool(64);
    for bits in [0, 1] {
        let mut cache = PrefixCache::with_hash_bits(&shared, SIZE, KEY, bits);
        let mut stored = Vec::new();
        for prompt in 0..20 {
            let tokens = count(prompt * 100, 9);
            assert!(cache.lookup(b"", &tokens).is_empty(), "prompt {prompt}");
            let groups = acquire(&shared, 2);
            cache.insert(b"", &tokens, &groups, Priority::NORMAL).unwrap();
            release(&shared, &groups);
            stored.push((tokens, groups));
        }
        for (tokens, groups) in &stored {
            assert_eq!(cache.lookup(b"", tokens).groups(), groups);
            assert!(cache.lookup(b"another", tokens).is_empty());
        }
    }
    assert_eq!(shared.free_groups(), 64);
}

/// Whether the hash tells histories apart, or tells nothing.
#[test]
fn a_block_is_found_behind_its_own_history_alone() {
    for bits in [64, 1, 0] {
        let shared = pool(8);
        let mut kit = Kit::with_hash_bits(&shared, bits);
        kit.store(b"", &[1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]);
        // The same last block behind another first one, behind fewer, and alone.
        assert_eq!(kit.covered(b"", &[2, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]), 0);
        assert_eq!(kit.covered(b"", &[1, 1, 1, 1, 9, 9, 9, 9]), 4);
        assert_eq!(kit.covered(b"", &[5, 5, 5, 5]), 0);
        assert_eq!(kit.covered(b"", &[1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9]), 12);
        kit.check(&[]);
    }
}

#[test]
fn a_salt_sees_nothing_of_another() {
    for bits in [64, 1, 0] {
        let shared = pool(8);
        let mut kit = Kit::with_hash_bits(&shared, bits);
        kit.store(b"tenant 1", &count(0, 8));
        assert_eq!(kit.covered(b"tenant 1", &count(0, 8)), 8);
        for other in [&b"tenant 2"[..], b"tenant", b"tenant 1\0", b"", b"tenant 11"] {
            assert_eq!(kit.covered(other, &count(0, 8)), 0);
        }
        kit.store(b"", &count(0, 4));
        assert_eq!((kit.covered(b"", &count(0, 8)), kit.cache.stats().salts), (4, 2));
        kit.check(&[]);
    }
}

#[test]
fn hashes_cannot_be_foreseen_without_the_key() {
    let shared = pool(8);
    let hashes = |key| {
        let told = Arc::new(Mutex::new(Vec::new()));
        let mut cache = PrefixCache::new(&shared, SIZE, key);
        let listener = Arc::clone(&told);
        cache.set_sink(Some(Box::new(move |event| {
            if let PrefixEvent::Stored { hash, parent, .. } = event {
                listener.lock().unwrap().push((parent, hash));
            }
        })));
        let groups = acquire(&shared, 2);
        cache.insert(b"", &count(0, 8), &groups, Priority::NORMAL).unwrap();
        release(&shared, &groups);
        drop(cache);
        told.lock().unwrap().clone()
    };
    let (one, again) = (hashes(KEY), hashes(KEY));
    let other = hashes(HashKey::new(*b"sixteen of bytez"));
    assert_eq!(one, again, "processes of one key can compare");
    assert_eq!(one[0].1, one[1].0, "the hash chains");
    assert!(one.iter().zip(&other).all(|(a, b)| a.0 != b.0 && a.1 != b.1));
}

#[test]
fn an_evicted_block_is_not_found_again() {
    let shared = pool(3);
    let mut kit = Kit::new(&shared);
    let prompt = count(0, 12);
    let groups = kit.store(b"", &prompt);
    assert_eq!((shared.free_groups(), kit.cache.evictable()), (0, 3));
    assert_eq!(kit.cache.evict(2), 2);
    assert_eq!((shared.free_groups(), kit.covered(b"", &prompt)), (2, 4));
    assert_eq!((shared.group_refs(groups[1]), shared.group_refs(groups[2])), (0, 0));
    kit.check(&[]);
    // Its slot is another's: a block of other tokens, and not found under the old ones.
    kit.store(b"", &count(50, 8));
    assert_eq!(kit.covered(b"", &prompt), 4);
    assert_eq!(kit.covered(b"", &count(50, 8)), 8);
    assert_eq!(kit.cache.evict(usize::MAX), 3);
    assert_eq!(kit.cache.stats().salts, 0);
    kit.check(&[]);
}

#[test]
fn children_go_before_parents_and_the_longest_unused_first() {
    let shared = pool(6);
    let mut kit = Kit::new(&shared);
    let (a, b) = ([count(0, 8), count(20, 4)].concat(), [count(0, 4), count(30, 8)].concat());
    kit.store(b"", &a);
    kit.store(b"", &b);
    // a: 0.. 4.. 20..  b: 0.. 30.. 34..; a was used last.
    drop(kit.cache.lookup(b"", &[&a[..], &[9]].concat()));
    let mut seen = Vec::new();
    while kit.cache.evict(1) == 1 {
        seen.push((kit.covered(b"", &a), kit.covered(b"", &b)));
        kit.check(&[]);
    }
    assert_eq!(seen, [(12, 8), (12, 4), (8, 4), (4, 4), (0, 0)]);
    assert_eq!(shared.free_groups(), 6);
}

#[test]
fn a_lower_priority_goes_first_however_lately_it_was_used() {
    let shared = pool(6);
    let mut kit = Kit::new(&shared);
    kit.store_as(b"", &count(0, 8), Priority::HIGHEST);
    kit.store_as(b"", &count(20, 8), Priority::LOWEST);
    kit.store_as(b"", &count(40, 8), Priority::NORMAL);
    drop(kit.cache.lookup(b"", &count(20, 9)));
    let mut seen = Vec::new();
    while kit.cache.evict(1) == 1 {
        seen.push([0, 20, 40].map(|first| kit.covered(b"", &count(first, 8))));
    }
    let order = [[8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0], [0, 0, 0]];
    assert_eq!(seen, order);
}

/// Otherwise a block that matters would hold up one that does not, and go with it.
#[test]
fn what_is_before_a_block_matters_as_much() {
    let shared = pool(5);
    let mut kit = Kit::new(&shared);
    kit.store_as(b"", &count(0, 4), Priority::LOWEST);
    kit.store_as(b"", &count(20, 8), Priority::NORMAL);
    let groups = acquire(&shared, 2);
    kit.cache.insert(b"", &count(0, 8), &groups, Priority::HIGHEST).unwrap();
    release(&shared, &groups);
    kit.check(&[]);
    assert_eq!(kit.cache.evict(2), 2);
    assert_eq!((kit.covered(b"", &count(0, 8)), kit.covered(b"", &count(20, 8))), (8, 0));
}

#[test]
fn what_is_held_is_passed_by() {
    let shared = pool(4);
    let mut kit = Kit::new(&shared);
    kit.store(b"", &count(50, 4));
    kit.store(b"", &count(0, 12));
    let lease = kit.cache.lookup(b"", &count(50, 5));
    drop(kit.cache.lookup(b"", &count(0, 13)));
    // The held one is the first in line.
    assert_eq!(kit.cache.evict(2), 2);
    assert_eq!((kit.covered(b"", &count(0, 12)), kit.covered(b"", &count(50, 4))), (4, 4));
    assert_eq!(kit.cache.evict(2), 1);
    kit.check(&[&lease]);
}

#[test]
fn a_group_is_cached_once() {
    let shared = pool(4);
    let mut kit = Kit::new(&shared);
    let groups = acquire(&shared, 2);
    let twice = [groups[0], groups[0]];
    let refused = kit.cache.insert(b"", &count(0, 8), &twice, Priority::NORMAL);
    assert_eq!(refused, Err(InsertError::GroupCached { group: groups[0] }));
    assert_eq!((kit.cache.stats().cached, kit.cache.stats().salts), (0, 0));
    assert_eq!(shared.group_refs(groups[0]), 1, "what was begun is undone");
    kit.cache.insert(b"", &count(0, 8), &groups, Priority::NORMAL).unwrap();
    for (salt, first) in [(&b"other"[..], 0), (b"", 70)] {
        let refused = kit.cache.insert(salt, &count(first, 8), &groups, Priority::NORMAL);
        assert_eq!(refused, Err(InsertError::GroupCached { group: groups[0] }));
    }
    release(&shared, &groups);
    assert_eq!((kit.cache.evictable(), kit.cache.evict(usize::MAX)), (2, 2));
    assert_eq!(shared.free_groups(), 4);
}

#[test]
fn the_last_token_is_never_covered() {
    let shared = pool(8);
    let mut kit = Kit::new(&shared);
    let prompt = count(0, 3 * SIZE as u32);
    let groups = kit.store(b"", &prompt);
    for len in 0..=prompt.len() {
        let lease = kit.cache.lookup(b"", &prompt[..len]);
        assert_eq!(lease.covered(), len.saturating_sub(1), "of {len} tokens");
        assert_eq!(lease.groups(), &groups[..len.saturating_sub(1).div_ceil(SIZE)]);
        assert_eq!(lease.partial().map_or(0, |part| part.positions), lease.covered() % SIZE);
        kit.check(&[&lease]);
    }
    // One more than a whole number of blocks.
    let lease = kit.cache.lookup(b"", &count(0, 13));
    assert_eq!((lease.covered(), lease.partial()), (12, None));
}

#[test]
fn a_part_of_a_block_is_the_longest_there_is() {
    let shared = pool(8);
    let mut kit = Kit::new(&shared);
    kit.store(b"", &[7, 7, 7, 7, 1, 2, 3, 4]);
    kit.store(b"", &[7, 7, 7, 7, 1, 2, 9, 9]);
    kit.store(b"", &[7, 7, 7, 7, 1, 0, 0, 0]);
    for (rest, positions) in [
        (&[1, 2, 3, 0, 0][..], 3),
        (&[1, 2, 9, 0], 3),
        (&[1, 2, 5], 2),
        (&[1, 2, 3], 2),
        (&[1, 5, 3, 4, 4], 1),
        (&[0, 2, 3, 4], 0),
        (&[1], 0),
    ] {
        let tokens = [&[7; 4], rest].concat();
        let lease = kit.cache.lookup(b"", &tokens);
        assert_eq!(lease.covered(), 4 + positions, "{rest:?}");
        assert_eq!(lease.full_groups().len(), 1);
    }
}

#[test]
fn what_a_lease_holds_is_not_evicted() {
    let shared = pool(4);
    let mut kit = Kit::new(&shared);
    let groups = kit.store(b"", &count(0, 16));
    let mut lease = kit.cache.lookup(b"", &count(0, 10));
    assert_eq!((lease.covered(), lease.groups()), (9, &groups[..3]));
    // Between the lookup and the use, others ask for all they can get.
    assert_eq!((kit.cache.evictable(), kit.cache.evict(100)), (1, 1));
    assert!(lease.groups().iter().all(|group| shared.group_refs(*group) == 2));
    lease.release_partial();
    assert_eq!((kit.cache.evictable(), kit.cache.evict(100)), (1, 1));
    kit.check(&[&lease]);
    // Even when the cache forgets everything, or goes.
    kit.cache.clear();
    assert_eq!(kit.covered(b"", &count(0, 16)), 0);
    drop(kit.cache);
    assert_eq!((shared.free_groups(), shared.group_refs(groups[1])), (2, 1));
    let handed = lease.into_groups();
    assert_eq!(shared.free_groups(), 2);
    release(&shared, &handed);
    assert_eq!(shared.free_groups(), 4);
}

/// Whoever counts holders has `in_use` by default.
#[test]
fn a_group_is_in_use_where_there_is_more_than_one_holder() {
    struct Counted(Vec<PageGroup>);
    impl GroupHolders for Counted {
        fn retain(&self, group: PageGroup) -> Result<(), GroupError> {
            Err(GroupError::Stale { group })
        }
        fn release(&self, group: PageGroup) -> Result<bool, GroupError> {
            Err(GroupError::Stale { group })
        }
        fn holders(&self, group: PageGroup) -> u32 {
            self.0.iter().position(|&other| other == group).map_or(9, |holders| holders as u32)
        }
    }
    let groups = acquire(&pool(4), 4);
    let counted = Counted(groups.clone());
    let in_use: Vec<_> = groups.into_iter().map(|group| counted.in_use(group)).collect();
    assert_eq!(in_use, [false, false, true, true]);
}

#[test]
fn what_a_cache_was_made_with_it_tells() {
    assert_eq!(
        (Priority::new(200).get(), Priority::default().get()),
        (200, Priority::NORMAL.get())
    );
    let shared = pool(2);
    let mut kit = Kit::new(&shared);
    kit.store(b"", &count(0, 4));
    kit.cache.set_pin_budget(7);
    assert_eq!((kit.cache.block_size(), kit.cache.pin_budget()), (SIZE, 7));
    let stats = kit.cache.stats();
    let text = format!("PrefixCache {{ block_size: 4, pin_budget: 7, stats: {stats:?}, .. }}");
    assert_eq!(format!("{:?}", kit.cache), text);
    let lease = kit.cache.lookup(b"", &count(0, 5));
    let groups = lease.groups();
    assert_eq!(format!("{lease:?}"), format!("Lease {{ groups: {groups:?}, covered: 4 }}"));
}

#[test]
fn a_group_that_a_sequence_retained_is_not_evicted() {
    let shared = pool(2);
    let mut kit = Kit::new(&shared);
    let groups = kit.store(b"", &count(0, 8));
    shared.retain_group(groups[0]);
    assert_eq!((kit.cache.evictable(), kit.cache.evict(2)), (1, 1));
    release(&shared, &groups[..1]);
    assert_eq!((kit.cache.evictable(), kit.cache.evict(2)), (1, 1));
}

#[test]
fn the_same_prompt_three_times_in_a_full_pool_gives_the_same_bits() {
    let shared = pool(4);
    let mut cache = PrefixCache::new(&shared, SIZE, KEY);
    let mut numbers = Numbers::new(5);
    let (prompt, other) = (count(0, 14), count(100, 15));
    let rows: Vec<Vec<f32>> = (0..200).map(|_| numbers.normals(2)).collect();
    let query = numbers.normals(2 * 4);
    let mut serve = |tokens: &[u32]| {
        let lease = cache.lookup(b"", tokens);
        let mut groups = lease.full_groups().to_vec();
        let found = groups.len();
        while groups.len() < tokens.len().div_ceil(SIZE) {
            match shared.acquire_group() {
                Some(group) => groups.push(group),
                // The only group left may be that of the part, which is not needed then.
                None if cache.evict(1) == 0 => return None,
                None => {}
            }
        }
        let mut sequence = PagedSequence::new(&shared);
        let rest = &tokens[found * SIZE..];
        sequence.adopt_groups(&groups, found * SIZE).unwrap();
        sequence.reserve(rest.len()).unwrap();
        for &token in rest {
            let row = &rows[token as usize];
            sequence.push(0, row, row).unwrap();
        }
        sequence.commit(rest.len()).unwrap();
        let paged = sequence.cache(0);
        let out = causal_gqa_attention_paged(&query, &shared.read(0), paged, 4).unwrap();
        cache.insert(b"", tokens, &groups, Priority::NORMAL).unwrap();
        release(&shared, &groups[found..]);
        Some((found, out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()))
    };
    let (found, first) = serve(&prompt).unwrap();
    assert_eq!(found, 0);
    let (found, second) = serve(&prompt).unwrap();
    assert_eq!((found, &second), (3, &first));
    // Another prompt takes all four groups; then the first comes back to a pool full of its blocks.
    assert_eq!(serve(&other).unwrap().0, 0);
    let (found, third) = serve(&prompt).unwrap();
    assert_eq!((found, &third), (0, &first));
    let (found, fourth) = serve(&prompt).unwrap();
    assert_eq!((found, &fourth), (3, &first));
    assert_eq!(shared.free_groups() + cache.stats().cached, 4);
}

#[test]
fn a_pin_holds_its_path_within_the_budget() {
    let shared = pool(8);
    let mut kit = Kit::new(&shared);
    let (long, short) = (count(0, 13), count(0, 8));
    kit.store(b"", &long);
    let refused = kit.cache.pin(b"", &long);
    assert_eq!(refused, Err(PinError::OverBudget { need: 3, left: 0 }));
    kit.cache.set_pin_budget(3);
    assert_eq!(kit.cache.pin(b"", &[0, 1]), Err(PinError::TooShort { need: 4, have: 2 }));
    let refused = kit.cache.pin(b"", &count(0, 17));
    assert_eq!(refused, Err(PinError::NotCached { need: 4, have: 3 }));
    let first = kit.cache.pin(b"", &long).unwrap();
    let second = kit.cache.pin(b"", &short).unwrap();
    assert_eq!((kit.cache.stats().pinned, kit.cache.evictable(), kit.cache.evict(9)), (3, 0, 0));
    kit.store(b"", &count(60, 4));
    let refused = kit.cache.pin(b"", &count(60, 4));
    assert_eq!(refused, Err(PinError::OverBudget { need: 1, left: 0 }));
    assert_eq!(kit.cache.unpin(first), Ok(1));
    assert_eq!((kit.cache.stats().pinned, kit.cache.evict(9)), (2, 2));
    kit.check(&[]);
    // A pin of another cache, and one from before a clear.
    let mut other = Kit::new(&shared);
    other.cache.set_pin_budget(1);
    other.store(b"", &count(0, 4));
    let foreign = other.cache.pin(b"", &count(0, 4)).unwrap();
    assert_eq!(kit.cache.unpin(foreign), Err(PinError::UnknownPin));
    kit.cache.clear();
    assert_eq!(kit.cache.unpin(second), Err(PinError::UnknownPin));
    assert_eq!(kit.cache.stats().pinned, 0);
    drop((kit, other));
    assert_eq!(shared.free_groups(), 8);
}

#[test]
fn an_insertion_that_is_refused_changes_nothing() {
    let shared = pool(6);
    let mut kit = Kit::new(&shared);
    kit.store(b"", &count(0, 4));
    let groups = acquire(&shared, 3);
    let before = kit.cache.stats();
    let refused = kit.cache.insert(b"", &count(0, 17), &groups, Priority::HIGHEST);
    assert_eq!(refused, Err(InsertError::GroupCount { need: 4, have: 3 }));
    let stale = groups[2];
    release(&shared, &[stale]);
    for salt in [&b""[..], b"new"] {
        let refused = kit.cache.insert(salt, &count(0, 12), &groups, Priority::HIGHEST);
        assert_eq!(refused, Err(InsertError::Group(GroupError::Stale { group: stale })));
        assert_eq!(kit.cache.stats(), before);
        assert!(groups[..2].iter().all(|group| shared.group_refs(*group) == 1));
        kit.check(&[]);
    }
    release(&shared, &groups[..2]);
    assert_eq!((kit.cache.evict(9), shared.free_groups()), (1, 6));
}

#[test]
fn events_tell_parents_first_and_removals_children_first() {
    let shared = pool(8);
    let mut kit = Kit::new(&shared);
    let told = Arc::new(Mutex::new(Vec::new()));
    let listener = Arc::clone(&told);
    kit.cache.set_sink(Some(Box::new(move |event| {
        listener.lock().unwrap().push(match event {
            PrefixEvent::Stored { salt, tokens, group, .. } => {
                format!("+{salt:?}{tokens:?}{group}")
            }
            PrefixEvent::Removed { group, .. } => format!("-{group}"),
            PrefixEvent::Cleared => "cleared".to_string(),
            other => format!("{other:?}"),
        });
    })));
    kit.store(b"A", &count(0, 8));
    kit.store(b"A", &[count(0, 4), count(9, 4)].concat());
    kit.cache.evict(1);
    kit.cache.clear();
    let told = told.lock().unwrap();
    let expected = ["+[65][0, 1, 2, 3]0v0", "+[65][4, 5, 6, 7]1v0", "+[65][9, 10, 11, 12]3v0"];
    assert_eq!(*told, [&expected[..], &["-1v0", "cleared"]].concat());
}

/// Whoever is told may count on it: a router that sends a request elsewhere, or one that takes the
/// blocks that went. So each event comes behind what it tells of and before what is done next.
#[test]
fn what_events_tell_of_has_happened() {
    let shared = Arc::new(pool(4));
    let mut cache = PrefixCache::new(Arc::clone(&shared), SIZE, KEY);
    let told = Arc::new(Mutex::new(String::new()));
    let (listener, layers) = (Arc::clone(&told), Arc::clone(&shared));
    cache.set_sink(Some(Box::new(move |event| {
        let (what, refs) = match event {
            PrefixEvent::Stored { group, .. } => ("stored", layers.group_refs(group)),
            PrefixEvent::Removed { group, .. } => ("removed", layers.group_refs(group)),
            PrefixEvent::Cleared => ("cleared", 0),
            _ => ("", 0),
        };
        let line = format!("{what}, {refs} hold it, {} free\n", layers.free_groups());
        listener.lock().unwrap().push_str(&line);
    })));
    let store = |cache: &mut PrefixCache<_>| {
        let groups = acquire(&shared, 2);
        cache.insert(b"", &count(0, 8), &groups, Priority::NORMAL).unwrap();
        release(&shared, &groups);
    };
    store(&mut cache);
    assert_eq!(cache.clear(), 2);
    store(&mut cache);
    assert_eq!((cache.evict(1), cache.clear()), (1, 1));
    store(&mut cache);
    assert_eq!(cache.remove_salt(b""), Ok(2));
    let stored = "stored, 2 hold it, 2 free\nstored, 2 hold it, 2 free\n";
    let removed = "removed, 0 hold it, ";
    let expected = [
        &format!("{stored}cleared, 0 hold it, 4 free\n"),
        &format!("{stored}{removed}3 free\ncleared, 0 hold it, 4 free\n"),
        &format!("{stored}{removed}4 free\n{removed}4 free\n"),
    ];
    assert_eq!(*told.lock().unwrap(), expected.map(String::as_str).concat());
}

#[test]
fn a_count_that_was_stolen_ends_the_hit_and_is_reported() {
    let shared = pool(4);
    let mut kit = Kit::new(&shared);
    let groups = kit.store(b"", &count(0, 12));
    assert_eq!(kit.cache.evictable(), 3);
    assert!(shared.release_group(groups[1]), "not ours to release");
    assert_eq!(kit.cache.evictable(), 2);
    assert_eq!(groups.iter().map(|&group| shared.holders(group)).collect::<Vec<_>>(), [1, 0, 1]);
    let lease = kit.cache.lookup(b"", &count(0, 13));
    assert_eq!(lease.groups(), &groups[..1], "the group may be anybody's by now");
    let report = kit.cache.check_invariants([lease.groups()]).unwrap_err();
    let fault = PrefixFault::Holders { group: groups[1], counted: 0, found: 1 };
    assert_eq!(report.faults(), [fault]);
    assert_eq!(report.to_string(), "page group 1v0 has a holder count of 0, found 1");
    // A holder that was not handed in is a leak as far as anybody can tell.
    let report = kit.cache.check_invariants([]).unwrap_err();
    assert!(report.to_string().contains("page group 0v0 has a holder count of 2, found 1"));
    drop(lease);
    // The slot is somebody else's; evicting the block leaves it alone.
    let other = acquire(&shared, 1);
    assert_eq!(kit.cache.evict(9), 2);
    assert_eq!((shared.group_refs(other[0]), shared.free_groups()), (1, 3));
}

#[test]
fn a_lease_ends_under_any_lock_and_while_unwinding() {
    let shared = Arc::new(pool(4));
    let cache = Mutex::new(PrefixCache::new(Arc::clone(&shared), SIZE, KEY));
    let groups = acquire(&shared, 1);
    cache.lock().unwrap().insert(b"", &count(0, 4), &groups, Priority::NORMAL).unwrap();
    release(&shared, &groups);
    let lookup = || cache.lock().unwrap().lookup(b"", &count(0, 5));
    let lease = lookup();
    {
        let _cache = cache.lock().unwrap();
        let _guards = shared.write_all();
        drop(lease);
    }
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let lease = lookup();
        let _guards = shared.write_all();
        assert!(lease.is_empty(), "a forward failed");
    }));
    assert!(unwound.is_err());
    assert_eq!(shared.group_refs(groups[0]), 1);
    // Looking up and evicting under a writer's guard as well.
    let _guard = shared.write(0);
    drop(lookup());
    assert_eq!(cache.lock().unwrap().evict(1), 1);
}

#[test]
fn threads_share_a_cache_behind_a_lock() {
    const GROUPS: usize = 12;
    let shared = Arc::new(pool(GROUPS));
    let cache = Mutex::new(PrefixCache::new(Arc::clone(&shared), SIZE, KEY));
    thread::scope(|scope| {
        for id in 0..4_u32 {
            let (shared, cache) = (&shared, &cache);
            scope.spawn(move || {
                for round in 0..300_u32 {
                    let prompt = [count(0, 4), count(round % 3 * 10, 4), count(id, 2)].concat();
                    let mut lease = cache.lock().unwrap().lookup(b"", &prompt);
                    lease.release_partial();
                    let mut own = Vec::new();
                    while lease.groups().len() + own.len() < 3 {
                        match shared.acquire_group() {
                            Some(group) => own.push(group),
                            None if cache.lock().unwrap().evict(1) > 0 => {}
                            // Four requests hold at most three each: somebody is between two steps.
                            None => thread::yield_now(),
                        }
                    }
                    let groups = [lease.groups(), &own].concat();
                    let mut cache = cache.lock().unwrap();
                    cache.insert(b"", &prompt, &groups, Priority::NORMAL).unwrap();
                    drop(cache);
                    release(shared, &own);
                }
            });
        }
    });
    let mut cache = cache.into_inner().unwrap();
    assert_eq!(cache.check_invariants([]), Ok(()));
    assert_eq!(cache.stats().hits + cache.stats().misses, 1200);
    cache.evict(usize::MAX);
    assert_eq!((shared.free_groups(), cache.stats().cached), (GROUPS, 0));
}

#[test]
fn the_cache_can_be_shared() {
    fn shareable<T: Send + Sync>() {}
    shareable::<PrefixCache<Arc<SharedPagedKv>>>();
    shareable::<Lease<Arc<SharedPagedKv>>>();
    let holders: &dyn GroupHolders = &pool(1);
    assert_eq!(PrefixCache::new(holders, 1, KEY).evict(1), 0, "a wrapper of any kind will do");
}
