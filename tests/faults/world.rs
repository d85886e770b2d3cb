//! Layers with requests, prefixes and bare sequences in them, in which things can go wrong.

use std::sync::Arc;

use paged_kv::cache::{
    Holder, KvWindow, LayerSpec, PagedKvCache, PagedSequence, PagedStoreExhausted, SharedPagedKv,
};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::snapshot::Snapshot;
use paged_kv::prefix::{HashKey, PrefixCache, Priority};
use paged_kv::wire::{Label, WireError};
use paged_kv::{Element, KvDims, KvShape, PageGroup, PagedKvError};

pub(crate) const LAYERS: usize = 3;
/// Positions of a block in each layer.
pub(crate) const SIZE: usize = 16;
pub(crate) const BLOCKS: usize = 24;
pub(crate) const SALT: &[u8] = b"salt";

pub(crate) type Pool<E> = Arc<SharedPagedKv<E>>;
pub(crate) type Sequence<E> = PagedSequence<Pool<E>, E>;

/// A pool and those who hold something of it.
pub(crate) struct World<E: Element> {
    pub(crate) pool: Pool<E>,
    /// 0 and 1 are two in the same blocks, the last of which is half full; 2 is empty; 3 is long, and
    /// a window has passed some of its blocks in layer 1.
    pub(crate) requests: Vec<Sequence<E>>,
    /// Held by the world, with rows in the first two.
    pub(crate) groups: Vec<PageGroup>,
    /// In layer 0, not shared by any request: 0 and 1 are two in the same blocks, 2 is empty.
    pub(crate) bare: Vec<PagedKvCache>,
    pub(crate) prefixes: PrefixCache<Pool<E>>,
    /// What it was given; some may be gone.
    pub(crate) cached: Vec<PageGroup>,
    /// Request 0 and bare sequence 0, saved.
    pub(crate) saved: [Vec<u8>; 2],
}

/// What can be seen of a world.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sight {
    pub(crate) stores: Vec<Snapshot>,
    /// Lengths, tables, windows, and which store each belongs to.
    sequences: Vec<String>,
    groups: (usize, Vec<u32>),
    prefixes: String,
}

impl Sight {
    /// Compares part by part: what is printed of a whole world nobody reads.
    #[track_caller]
    pub(crate) fn must_be(&self, other: &Sight, what: core::fmt::Arguments<'_>) {
        assert_eq!(self.sequences, other.sequences, "{what}");
        assert_eq!(self.groups, other.groups, "{what}");
        assert_eq!(self.prefixes, other.prefixes, "{what}");
        for (layer, (one, other)) in self.stores.iter().zip(&other.stores).enumerate() {
            assert_eq!(one.difference(other), None, "{what}, layer {layer}");
        }
    }

    pub(crate) fn unordered(mut self) -> Self {
        self.stores = self.stores.into_iter().map(Snapshot::unordered).collect();
        self
    }
}

/// Rows of `n` positions from `first` on.
pub(crate) fn rows(seed: u64, first: usize, n: usize) -> (Vec<f32>, Vec<f32>) {
    let row = |at: usize| Numbers::new(seed << 32 | at as u64).normals(10);
    let rows = (first..first + n).map(row);
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for row in rows {
        k.extend_from_slice(&row[..6]);
        v.extend_from_slice(&row[6..]);
    }
    (k, v)
}

/// Writes `n` positions into every layer, into room that is there.
pub(crate) fn write<E: Element>(request: &mut Sequence<E>, seed: u64, n: usize) {
    for layer in 0..LAYERS {
        let (k, v) = rows(seed + layer as u64, request.cache(layer).seq_len(), n);
        request.append(layer, &k, &v, n).unwrap();
    }
}

/// A prompt of two blocks.
pub(crate) fn tokens(first: u32) -> Vec<u32> {
    (first..first + 2 * SIZE as u32).collect()
}

pub(crate) fn shape() -> KvShape {
    KvShape::new(KvDims { block_size: SIZE, n_kv_heads: 2, k_width: 3, v_width: 2 }).unwrap()
}

impl<E: Element> World<E> {
    /// With few blocks left.
    pub(crate) fn new() -> Self {
        Self::with(BLOCKS)
    }

    pub(crate) fn with(blocks: usize) -> Self {
        let spec = LayerSpec::new(shape(), blocks);
        let specs = [spec, spec.window(KvWindow::last(20)), spec];
        let pool: Pool<E> = Arc::new(SharedPagedKv::with_layers(&specs).unwrap());
        (0..LAYERS).for_each(|layer| pool.write(layer).poison_free());
        let new = || PagedSequence::new(Pool::clone(&pool));
        let mut requests = vec![new()];
        let step = |request: &mut Sequence<E>, n| {
            request.reserve(n).unwrap();
            write(request, 1, n);
            request.commit(n).unwrap();
        };
        step(&mut requests[0], SIZE + 5);
        requests.push(requests[0].fork().unwrap());
        requests.extend([new(), new()]);
        (0..6).for_each(|_| step(&mut requests[3], SIZE));
        let groups = pool.acquire_groups(3).unwrap();
        let mut author = new();
        author.adopt_groups(&groups, 0).unwrap();
        step(&mut author, 2 * SIZE);
        drop(author);
        let mut prefixes = PrefixCache::new(Pool::clone(&pool), SIZE, HashKey::new([3; 16]));
        let mut cached = Vec::new();
        for first in [100, 200] {
            let own = pool.acquire_groups(2).unwrap();
            prefixes.insert(SALT, &tokens(first), &own, Priority::NORMAL).unwrap();
            cached.extend_from_slice(&own);
            own.into_iter().for_each(|group| assert!(!pool.release_group(group)));
        }
        let mut bare = vec![PagedKvCache::new()];
        let (k, v) = rows(9, 0, SIZE + 3);
        bare[0].append(&mut pool.write(0), &k, &v, SIZE + 3).unwrap();
        let twin = bare[0].fork(&mut pool.write(0)).unwrap();
        bare.extend([twin, PagedKvCache::new()]);
        let mut saved = [Vec::new(), Vec::new()];
        requests[0].save(&Label::new(), &mut saved[0]).unwrap();
        bare[0].save(&pool.read(0), &Label::new(), &mut saved[1]).unwrap();
        World { pool, requests, groups, bare, prefixes, cached, saved }
    }

    pub(crate) fn see(&self) -> Sight {
        let prefixes: Vec<usize> = [100, 200].map(|first| self.covered(first)).to_vec();
        let sequences = self.requests.iter().map(|request| format!("{request:?}"));
        let bare = self.bare.iter().map(|cache| format!("{cache:?}"));
        Sight {
            stores: (0..LAYERS).map(|layer| Snapshot::of(&self.pool.read(layer))).collect(),
            sequences: sequences.chain(bare).collect(),
            groups: (
                self.pool.stats().groups,
                self.groups.iter().map(|group| self.pool.group_refs(*group)).collect(),
            ),
            prefixes: format!("{prefixes:?} {:?}", self.prefixes.stats()),
        }
    }

    fn covered(&self, first: u32) -> usize {
        self.prefixes.peek(SALT, &[&tokens(first)[..], &[0]].concat())
    }

    /// Everything is counted as it is held, by these and by `others`.
    pub(crate) fn check<'a>(&'a self, others: impl IntoIterator<Item = Holder<'a>>) {
        self.prefixes.check_invariants([&self.groups[..]]).unwrap();
        let requests = self.requests.iter().flat_map(PagedSequence::holders);
        let bare = self.bare.iter().map(|cache| Holder::table(0, cache.block_table()));
        let groups = self.groups.iter().map(|group| Holder::Group(*group));
        let cached = self.cached.iter().filter(|group| self.pool.group_refs(**group) > 0);
        let cached = cached.map(|group| Holder::Group(*group));
        let all = requests.chain(bare).chain(others).chain(groups).chain(cached);
        self.pool.check_invariants(all).unwrap();
    }

    /// All let go, and every block comes back.
    pub(crate) fn end(mut self) {
        self.check([]);
        for cache in &mut self.bare {
            self.pool.release(0, cache).unwrap();
        }
        self.requests.clear();
        self.groups.iter().for_each(|group| _ = self.pool.release_group(*group));
        let cached = self.prefixes.stats().cached;
        assert_eq!(self.prefixes.evict(usize::MAX), cached, "what nobody uses can go");
        self.pool.check_invariants([]).unwrap();
        assert_eq!(self.pool.free_groups(), self.pool.read(0).total_blocks());
    }
}

/// What a step came to: whether there was room.
pub(crate) trait HadRoom {
    fn had_room(self) -> bool;
}

impl HadRoom for bool {
    fn had_room(self) -> bool {
        self
    }
}

impl<T> HadRoom for Result<T, PagedKvError> {
    fn had_room(self) -> bool {
        match self {
            Ok(_) => true,
            Err(PagedKvError::Exhausted(_)) => false,
            Err(other) => panic!("{other}"),
        }
    }
}

impl<T> HadRoom for Result<T, PagedStoreExhausted> {
    fn had_room(self) -> bool {
        self.is_ok()
    }
}

impl<T> HadRoom for Result<T, WireError<core::convert::Infallible>> {
    fn had_room(self) -> bool {
        match self {
            Ok(_) => true,
            Err(WireError::Kv(PagedKvError::Exhausted(_))) => false,
            Err(other) => panic!("{other}"),
        }
    }
}
