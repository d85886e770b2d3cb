//! Whoever counts the holders of page groups for a prefix cache panics, or the way to him does, at
//! each of its calls in turn. The books stay whole, and what was held is held or given back.

use std::sync::Arc;

use paged_kv::cache::{PagedSequence, SharedPagedKv};
use paged_kv::prefix::{GroupHolders, HashKey, HoldersRef, Lease, PrefixCache, Priority};
use paged_kv::{GroupError, PageGroup};

use super::panics::{Fuse, Way, at_every_call};

const SIZE: usize = 4;
const GROUPS: usize = 16;

/// Panics before it has taken a holder, and after it has let one go.
struct Counter {
    pool: Arc<SharedPagedKv>,
    fuse: Fuse,
}

impl GroupHolders for Counter {
    fn retain(&self, group: PageGroup) -> Result<(), GroupError> {
        self.fuse.call();
        self.pool.try_retain(group)
    }

    fn release(&self, group: PageGroup) -> Result<bool, GroupError> {
        let released = self.pool.try_release(group);
        self.fuse.call();
        released
    }

    fn holders(&self, group: PageGroup) -> u32 {
        self.fuse.call();
        self.pool.group_refs(group)
    }
}

/// A cache of seven blocks, and those who hold some of its groups.
struct Scene<P: HoldersRef> {
    pool: Arc<SharedPagedKv>,
    /// Five blocks of `a`, which may go: three in a row, and two more behind the first. Two of `b`.
    cache: Option<PrefixCache<P>>,
    /// Both blocks of `b`, the second in part.
    leases: Vec<Lease<P>>,
    /// Held by the scene: nothing is in them.
    own: Vec<PageGroup>,
    /// All that there ever were, one of them stale.
    all: Vec<PageGroup>,
}

fn tokens(range: core::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

impl<P: HoldersRef> Scene<P> {
    fn new(pool: Arc<SharedPagedKv>, holders: P) -> Self {
        let mut cache = PrefixCache::new(holders, SIZE, HashKey::new([5; 16]));
        cache.set_pin_budget(1);
        let mut all = Vec::new();
        for (salt, tokens) in [
            (b"a", tokens(0..12)),
            (b"a", [tokens(0..4), tokens(20..28)].concat()),
            (b"b", tokens(50..58)),
        ] {
            let groups = pool.acquire_groups(tokens.len() / SIZE).unwrap();
            cache.insert(salt, &tokens, &groups, Priority::NORMAL).unwrap();
            groups.iter().for_each(|group| _ = pool.release_group(*group));
            all.extend(groups);
        }
        let lease = cache.lookup(b"b", &tokens(50..57));
        assert_eq!((lease.covered(), lease.groups().len()), (6, 2));
        let own = pool.acquire_groups(4).unwrap();
        let stale = pool.acquire_group().unwrap();
        pool.release_group(stale);
        all.extend(own.iter().copied().chain([stale]));
        let scene = Scene { pool, cache: Some(cache), leases: vec![lease], own, all };
        scene.check("at first");
        scene
    }

    fn cache(&mut self) -> &mut PrefixCache<P> {
        self.cache.as_mut().unwrap()
    }

    fn cached(&self) -> usize {
        self.cache.as_ref().map_or(0, |cache| cache.stats().cached)
    }

    /// How many holders the pool counts.
    fn counted(&self) -> usize {
        self.all.iter().map(|group| self.pool.group_refs(*group) as usize).sum()
    }

    /// Every group is counted for those who have it, and no other.
    fn check(&self, what: &str) {
        let held = || self.leases.iter().map(Lease::groups).chain([&self.own[..]]);
        if let Some(cache) = &self.cache
            && let Err(report) = cache.check_invariants(held())
        {
            panic!("{what}: {report}");
        }
        let held: usize = held().map(<[PageGroup]>::len).sum();
        assert_eq!(self.counted(), self.cached() + held, "{what}: holders");
        drop(self.pool.write(0));
    }

    /// All is let go but what is cached, the cache goes on, and then it goes, too.
    fn end(mut self, what: &str) {
        self.leases.clear();
        self.own.drain(..).for_each(|group| _ = self.pool.release_group(group));
        self.check(what);
        if let Some(cache) = &mut self.cache {
            let prompt = [tokens(70..74), tokens(80..84)].concat();
            let groups = self.pool.acquire_groups(2).unwrap();
            cache.insert(b"a", &prompt, &groups, Priority::LOWEST).unwrap();
            assert_eq!(cache.lookup(b"a", &prompt).covered(), 7, "{what}");
            groups.iter().for_each(|group| assert!(!self.pool.release_group(*group)));
            assert_eq!((cache.evict(2), cache.peek(b"a", &prompt)), (2, 0), "{what}");
        }
        self.check(what);
        drop(self.cache);
        assert_eq!(self.pool.free_groups(), GROUPS, "{what}");
    }
}

/// What is done, and how often at least it follows the way and asks for holders.
type Operation<P> = (&'static str, (usize, usize), fn(&mut Scene<P>));

fn operations<P: HoldersRef>() -> Vec<Operation<P>> {
    vec![
        ("lookup", (2, 3), |scene| {
            let lease = scene.cache().lookup(b"a", &tokens(0..13));
            assert_eq!(lease.covered(), 12);
            scene.leases.push(lease);
        }),
        ("a lookup that misses", (1, 0), |scene| {
            let lease = scene.cache().lookup(b"a", &[9; 9]);
            scene.leases.push(lease);
        }),
        ("insert", (1, 3), |scene| {
            let groups = scene.own.clone();
            let prompt = [tokens(0..4), tokens(30..42)].concat();
            let inserted = scene.cache().insert(b"a", &prompt, &groups, Priority::HIGHEST);
            assert_eq!(inserted.unwrap().stored, 3);
        }),
        ("insert under a new salt", (1, 3), |scene| {
            let groups = scene.own.clone();
            let prompt = tokens(60..72);
            let inserted = scene.cache().insert(b"c", &prompt, &groups, Priority::HIGHEST);
            assert_eq!(inserted.unwrap().stored, 3);
        }),
        ("an insertion that is refused", (1, 5), |scene| {
            let stale = scene.all.last().copied().unwrap();
            let groups = [scene.own[0], scene.own[1], stale];
            let refused = scene.cache().insert(b"c", &tokens(60..72), &groups, Priority::NORMAL);
            assert_eq!(refused, Err(GroupError::Stale { group: stale }.into()));
        }),
        ("evict", (1, 8), |scene| assert_eq!(scene.cache().evict(4), 4)),
        ("try_evict", (1, 8), |scene| assert!(scene.cache().try_evict(4))),
        ("try_evict of too many", (1, 6), |scene| assert!(!scene.cache().try_evict(6))),
        ("remove_salt", (1, 5), |scene| assert_eq!(scene.cache().remove_salt(b"a"), Ok(5))),
        ("remove_salt of what is leased", (1, 2), |scene| {
            assert_eq!(scene.cache().remove_salt(b"b"), Ok(0));
        }),
        ("clear", (1, 7), |scene| {
            let pin = scene.cache().pin(b"a", &tokens(0..4)).unwrap();
            assert_eq!(scene.cache().clear(), 5);
            assert!(scene.cache().unpin(pin).is_err());
        }),
        ("evictable", (1, 7), |scene| assert_eq!(scene.cache().evictable(), 5)),
        ("release_partial", (1, 1), |scene| scene.leases[0].release_partial()),
        ("into_groups", (0, 0), |scene| {
            let groups = scene.leases.pop().unwrap().into_groups();
            scene.own.extend(groups);
        }),
    ]
}

fn run<P: HoldersRef>(
    (name, least, run): Operation<P>,
    least_of: fn((usize, usize)) -> usize,
    holders: fn(Arc<SharedPagedKv>, Fuse) -> P,
) {
    at_every_call(name, least_of(least), |fuse, nth| {
        let what = format!("{name}, call {nth}");
        let pool = Arc::new(SharedPagedKv::new(1, SIZE, GROUPS, 1, 1));
        let mut scene = Scene::new(Arc::clone(&pool), holders(pool, fuse.clone()));
        let burnt = fuse.burns(nth, || run(&mut scene));
        scene.check(&what);
        scene.end(&what);
        burnt
    });
}

fn way(pool: Arc<SharedPagedKv>, fuse: Fuse) -> Way {
    Way { pool, fuse }
}

fn counter(pool: Arc<SharedPagedKv>, fuse: Fuse) -> Arc<Counter> {
    Arc::new(Counter { pool, fuse })
}

#[test]
fn the_way_to_the_holders_may_panic() {
    let mut operations = operations::<Way>();
    operations.extend::<[Operation<Way>; 2]>([
        ("reserve", (2, 0), |scene| {
            let mut sequence = PagedSequence::new(Arc::clone(&scene.pool));
            let n = (scene.pool.free_groups() + 3) * SIZE;
            scene.cache().reserve(&mut sequence, n).unwrap();
        }),
        ("acquire_groups", (3, 0), |scene| {
            let n = scene.pool.free_groups() + 3;
            let groups = scene.cache().acquire_groups(n).unwrap();
            scene.all.extend(&groups);
            scene.own.extend(groups);
        }),
    ]);
    for operation in operations {
        run(operation, |(ways, _)| ways, way);
    }
}

/// The cache and its leases may take a call that gives a holder back for done, and one that takes one
/// for not done.
#[test]
fn who_counts_the_holders_may_panic() {
    let mut operations = operations::<Arc<Counter>>();
    operations.extend::<[Operation<Arc<Counter>>; 2]>([
        ("the end of a lease", (0, 2), |scene| scene.leases.clear()),
        ("the end of a cache", (0, 7), |scene| scene.cache = None),
    ]);
    for operation in operations {
        run(operation, |(_, calls)| calls, counter);
    }
}

/// The one loss that there is: in a drop there is no other way.
#[test]
fn what_ends_without_a_way_stays_held() {
    let operations: [Operation<Way>; 2] = [
        ("lease", (1, 0), |scene| scene.leases.clear()),
        ("cache", (1, 0), |scene| scene.cache = None),
    ];
    for (name, _, end) in operations {
        let pool = Arc::new(SharedPagedKv::new(1, SIZE, GROUPS, 1, 1));
        let fuse = Fuse::default();
        let mut scene = Scene::new(Arc::clone(&pool), way(pool, fuse.clone()));
        let counted = scene.counted();
        assert!(fuse.burns(1, || end(&mut scene)));
        assert_eq!(scene.counted(), counted, "{name}");
    }
}
