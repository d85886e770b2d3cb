//! Operations on requests over all layers, against a model that copies everything.
//!
//! The model of a request is its committed tags, the tags written in each layer since, and the room
//! that it has a right to. Who holds which block is recounted from what the requests and the
//! handles say; how many blocks an operation may take is computed from lengths and from who else
//! names the block that is being filled, never asked of the code under test.

use alloc::vec::Vec;

use super::sequence_ops::{rows, stored};
use crate::cache::{
    Holder, KvWindow, LayerSpec, PagedSequence, PagedStoreExhausted, SharedPagedKv,
};
use crate::element::Element;
use crate::error::PagedKvError;
use crate::id::PageGroup;
use crate::shape::{KvDims, KvShape};

/// Requests the operations work on.
pub const REQUESTS: usize = 4;
const LAYERS: usize = 3;

/// How large the layers are.
#[derive(Clone, Copy, Debug)]
pub struct World {
    blocks: [usize; LAYERS],
    block_sizes: [usize; LAYERS],
    windows: [Option<KvWindow>; LAYERS],
    /// Positions that one of an operation stands for.
    unit: usize,
}

impl World {
    /// Blocks and their sizes differ, and the layer that runs out first changes with the lengths.
    pub const SMALL: World =
        World { blocks: [9, 8, 5], block_sizes: [2, 2, 3], windows: [None; LAYERS], unit: 1 };
    /// Two layers with windows, long steps, and pools in which somebody is always short.
    pub const WINDOWS: World = World {
        blocks: [17, 14, 48],
        block_sizes: [32, 48, 16],
        windows: [Some(KvWindow::last(40)), Some(KvWindow::last(100).and_first(3)), None],
        unit: 17,
    };

    /// The blocks that a layer of a sequence needs which took its last ones when it had `taken`
    /// positions: those with a tile that a query there or later sees. Position by position, which is
    /// slow and hard to get wrong.
    fn needed(&self, layer: usize, taken: usize, block: usize) -> bool {
        let Some(window) = self.windows[layer] else { return true };
        let sees = |position| position < window.first() || position + window.window() > taken;
        let tile = |tile: usize| (tile * 64..tile * 64 + 64).any(sees);
        let size = self.block_sizes[layer];
        (block * size / 64..=(block * size + size - 1) / 64).any(tile)
    }

    /// The first blocks of a layer, those that are needed.
    fn kept(&self, layer: usize, taken: usize, blocks: usize) -> Vec<usize> {
        (0..blocks).filter(|&block| self.needed(layer, taken, block)).collect()
    }
}

/// One operation. Numbers out of range are brought into range by the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Make room in every layer, or in none.
    Reserve { request: u8, n: u8 },
    /// Write rows into one layer.
    Write { request: u8, layer: u8, n: u8 },
    /// A whole step: room, rows in every layer, and as many committed as `keep` says.
    Step { request: u8, n: u8, keep: u8 },
    /// Commit so many.
    Commit { request: u8, n: u8 },
    /// Take back what is not committed.
    Abandon { request: u8 },
    /// Roll back to a length, which may be one or two more than there is.
    Truncate { request: u8, len: u8 },
    /// Drop `to` and make it a fork of `from`.
    Fork { from: u8, to: u8 },
    /// Give everything back.
    Release { request: u8 },
    /// Take groups, let `to` begin with them, and keep the handles.
    Begin { to: u8, n: u8 },
    /// Let `to` begin with rows that others wrote into groups which are held still.
    Adopt { to: u8, from: u8, len: u8 },
    /// Let go of the groups that are held for a request that began with them.
    Forget { request: u8 },
}

impl Op {
    /// Reads three bytes as an operation.
    pub fn decode([kind, a, b]: [u8; 3]) -> Op {
        let request = a;
        match kind % 16 {
            0 | 1 => Op::Reserve { request, n: b },
            2 | 3 => Op::Write { request, layer: a / 4, n: b },
            4..=6 => Op::Step { request, n: b, keep: b / 8 },
            7 => Op::Commit { request, n: b },
            8 => Op::Abandon { request },
            9 => Op::Truncate { request, len: b },
            10 | 11 => Op::Fork { from: a, to: b },
            12 => Op::Release { request },
            13 => Op::Begin { to: a, n: b },
            14 => Op::Adopt { to: a, from: a / 4, len: b },
            _ => Op::Forget { request },
        }
    }

    /// Reads a program.
    pub fn decode_all(bytes: &[u8]) -> Vec<Op> {
        bytes.chunks_exact(3).map(|op| Op::decode([op[0], op[1], op[2]])).collect()
    }
}

type Request<'a, E> = PagedSequence<&'a SharedPagedKv<E>, E>;

/// What a request should hold.
#[derive(Clone, Debug, Default)]
struct Truth {
    committed: Vec<u32>,
    /// Written in each layer since.
    written: [Vec<u32>; LAYERS],
    /// How many were committed when the layer last took blocks, and let go of those its window had
    /// passed.
    taken: [usize; LAYERS],
}

impl Truth {
    fn tags(&self, layer: usize) -> impl Iterator<Item = u32> + '_ {
        self.committed.iter().chain(&self.written[layer]).copied()
    }

    fn len(&self, layer: usize) -> usize {
        self.committed.len() + self.written[layer].len()
    }

    fn abandon(&mut self) {
        self.written = Default::default();
    }
}

/// Groups that are held, and the rows in them.
#[derive(Debug, Default)]
struct Prefix {
    groups: Vec<PageGroup>,
    tags: Vec<u32>,
}

/// The layers, the requests in them, and what they should hold.
#[derive(Debug)]
pub struct Model<'a, E: Element = f32> {
    shared: &'a SharedPagedKv<E>,
    requests: Vec<Request<'a, E>>,
    truths: Vec<Truth>,
    prefixes: Vec<Prefix>,
    next_tag: u32,
    world: World,
}

impl<'a, E: Element> Model<'a, E> {
    /// Three layers, in poison: memory nobody wrote holds what is not a number.
    pub fn layers(world: World) -> SharedPagedKv<E> {
        let spec = |layer: usize| {
            let block_size = world.block_sizes[layer];
            let dims = KvDims { block_size, n_kv_heads: 2, k_width: 3, v_width: 2 };
            let shape = KvShape::new(dims).expect("a small shape");
            let spec = LayerSpec::new(shape, world.blocks[layer]);
            world.windows[layer].map_or(spec, |window| spec.window(window))
        };
        let specs: [LayerSpec; LAYERS] = core::array::from_fn(spec);
        let shared = SharedPagedKv::<E>::with_layers(&specs).expect("small stores");
        (0..LAYERS).for_each(|layer| shared.write(layer).poison_free());
        shared
    }

    /// No request holds anything.
    pub fn new(world: World, shared: &'a SharedPagedKv<E>) -> Self {
        Model {
            world,
            shared,
            requests: (0..REQUESTS).map(|_| PagedSequence::new(shared)).collect(),
            truths: alloc::vec![Truth::default(); REQUESTS],
            prefixes: (0..REQUESTS).map(|_| Prefix::default()).collect(),
            next_tag: 1,
        }
    }

    /// Runs a program, comparing everything after each step, and then drops all.
    pub fn run(world: World, ops: &[Op]) {
        let shared = Self::layers(world);
        let mut model = Model::new(world, &shared);
        for op in ops {
            model.step(*op);
            model.check();
        }
        for request in 0..REQUESTS as u8 {
            model.step(Op::Forget { request });
        }
        drop(model);
        assert_eq!(shared.check_invariants([]), Ok(()));
        for (layer, total) in world.blocks.into_iter().enumerate() {
            assert_eq!(shared.free_blocks(layer), total);
        }
    }

    /// Runs one operation and compares its result.
    pub fn step(&mut self, op: Op) {
        let at = |request: u8| request as usize % REQUESTS;
        let unit = self.world.unit;
        match op {
            Op::Reserve { request, n } => drop(self.reserve(at(request), n as usize % 9 * unit)),
            Op::Write { request, layer, n } => {
                let first = self.truths[at(request)].written[layer as usize % LAYERS].len();
                self.write(at(request), layer as usize % LAYERS, first, n as usize % 5 * unit);
            }
            Op::Step { request, n, keep } => {
                let (request, n) = (at(request), n as usize % 5 * unit + 1);
                self.abandon(request);
                if self.reserve(request, n) {
                    (0..LAYERS).for_each(|layer| self.write(request, layer, 0, n));
                    self.commit(request, n.min(keep as usize % 8 * unit));
                }
            }
            Op::Commit { request, n } => self.commit(at(request), n as usize % 4 * unit),
            Op::Abandon { request } => self.abandon(at(request)),
            Op::Truncate { request, len } => self.truncate(at(request), len as usize * unit),
            Op::Fork { from, to } if at(from) != at(to) => {
                self.step(Op::Forget { request: to });
                self.requests[at(to)] = self.requests[at(from)].fork().expect("counts have room");
                self.truths[at(to)] = self.truths[at(from)].clone();
                self.truths[at(to)].abandon();
            }
            Op::Fork { .. } => {}
            Op::Release { request } => {
                self.requests[at(request)].release();
                self.truths[at(request)] = Truth::default();
            }
            Op::Begin { to, n } => self.begin(at(to), n as usize % 4),
            Op::Adopt { to, from, len } => self.adopt(at(to), at(from), len as usize * unit),
            Op::Forget { request } => {
                let prefix = core::mem::take(&mut self.prefixes[at(request)]);
                for group in prefix.groups {
                    assert!(self.shared.release_group(group), "the model is the one holder");
                }
            }
        }
    }

    /// Drops a request's blocks without giving them back: what the check must notice.
    pub fn forget(&mut self, request: usize) {
        let lost = core::mem::replace(&mut self.requests[request], PagedSequence::new(self.shared));
        core::mem::forget(lost);
        self.truths[request] = Truth::default();
    }

    /// Compares all that can be observed.
    pub fn check(&self) {
        let tables = self.requests.iter().flat_map(PagedSequence::holders);
        let handles = self.prefixes.iter().flat_map(|prefix| &prefix.groups);
        let holders = tables.chain(handles.map(|&group| Holder::Group(group)));
        assert_eq!(self.shared.check_invariants(holders), Ok(()));
        for (request, truth) in self.requests.iter().zip(&self.truths) {
            assert_eq!(request.len(), truth.committed.len());
            for layer in 0..LAYERS {
                self.check_rows(request, truth, layer);
            }
        }
    }

    fn check_rows(&self, request: &Request<'a, E>, truth: &Truth, layer: usize) {
        let (store, cache) = (self.shared.read(layer), request.cache(layer));
        assert_eq!(cache.seq_len(), truth.len(layer), "layer {layer}");
        let (held, freed) = (cache.block_table().len(), cache.freed_blocks());
        let have: Vec<_> = (0..held + freed.len()).filter(|block| !freed.contains(block)).collect();
        assert_eq!(have, self.world.kept(layer, truth.taken[layer], held + freed.len()));
        for (position, tag) in truth.tags(layer).enumerate() {
            let (mut k, mut v) = ([0.0; 3], [0.0; 2]);
            let block = position / self.world.block_sizes[layer];
            if !self.world.needed(layer, truth.taken[layer], block) {
                let got = cache.copy_k_row(&store, position, 1, &mut k);
                assert!(matches!(got, Err(PagedKvError::PositionFreed { .. })), "{got:?}");
                continue;
            }
            assert_eq!(cache.copy_k_row(&store, position, 1, &mut k), Ok(()));
            assert_eq!(cache.copy_v_row(&store, position, 1, &mut v), Ok(()));
            let (k_all, v_all) = stored::<E>(tag * LAYERS as u32 + layer as u32);
            let expected = ([k_all[3], k_all[4], k_all[5]], [v_all[2], v_all[3]]);
            assert_eq!((k, v), expected, "layer {layer}, position {position}");
        }
    }

    /// Blocks of a request in a layer, those among them that its window has passed.
    fn blocks(&self, request: usize, layer: usize) -> usize {
        let cache = self.requests[request].cache(layer);
        cache.block_table().len() + cache.freed_blocks().len()
    }

    /// Whether others name the `index`-th block of a request, a prefix's group among them.
    fn others(&self, request: usize, layer: usize, index: usize) -> bool {
        let taken = self.truths[request].taken[layer];
        let entry = self.world.kept(layer, taken, index).len();
        let block = self.requests[request].cache(layer).block_table()[entry];
        let named = self.requests.iter().enumerate().any(|(other, sequence)| {
            other != request && sequence.cache(layer).block_table().contains(&block)
        });
        let mut groups = self.prefixes.iter().flat_map(|prefix| &prefix.groups);
        named || groups.any(|&group| self.shared.group_block(group, layer) == Some(block))
    }

    /// Blocks that each layer has to take for `n` more positions.
    fn lack(&self, request: usize, n: usize) -> [usize; LAYERS] {
        core::array::from_fn(|layer| {
            let (truth, size) = (&self.truths[request], self.world.block_sizes[layer]);
            let (len, end) = (truth.len(layer), truth.committed.len() + n);
            if end <= len {
                return 0;
            }
            let have = self.blocks(request, layer);
            let mut room = len.div_ceil(size)..have.min(end.div_ceil(size));
            let keep = room.find(|&index| self.others(request, layer, index)).unwrap_or(have);
            let copy = len % size != 0 && self.others(request, layer, len / size);
            end.div_ceil(size).saturating_sub(keep) + usize::from(copy)
        })
    }

    /// Blocks that become free where each layer lets go of what its window has passed.
    fn gains(&self, request: usize) -> [usize; LAYERS] {
        core::array::from_fn(|layer| {
            let truth = &self.truths[request];
            let kept = self.world.kept(layer, truth.taken[layer], self.blocks(request, layer));
            let passed = kept.into_iter().filter(|&index| {
                !self.world.needed(layer, truth.committed.len(), index)
                    && !self.others(request, layer, index)
            });
            passed.count()
        })
    }

    fn reserve(&mut self, request: usize, n: usize) -> bool {
        let (lack, gains) = (self.lack(request, n), self.gains(request));
        let need: [usize; LAYERS] =
            core::array::from_fn(|layer| lack[layer].saturating_sub(gains[layer]));
        let free: [usize; LAYERS] = core::array::from_fn(|layer| self.shared.free_blocks(layer));
        let short = (0..LAYERS).find(|&layer| need[layer] > free[layer]);
        let before: Vec<_> = (0..LAYERS)
            .map(|layer| self.requests[request].cache(layer).block_table().to_vec())
            .collect();
        let got = self.requests[request].reserve(n);
        match short {
            Some(layer) => {
                let (need, free) = (need[layer], free[layer]);
                assert_eq!(got, Err(PagedStoreExhausted { need, free }.into()));
                for (layer, before) in before.iter().enumerate() {
                    assert_eq!(self.requests[request].cache(layer).block_table(), before);
                }
            }
            None => {
                assert_eq!(got, Ok(()));
                let truth = &mut self.truths[request];
                for (layer, _) in lack.iter().enumerate().filter(|(_, lack)| **lack > 0) {
                    truth.taken[layer] = truth.taken[layer].max(truth.committed.len());
                }
                assert_eq!(self.lack(request, n), [0; LAYERS], "what was reserved is there");
            }
        }
        short.is_none()
    }

    /// Positions of a layer that can be written.
    fn room(&self, request: usize, layer: usize) -> usize {
        let (len, size) = (self.truths[request].len(layer), self.world.block_sizes[layer]);
        let first = len / size;
        let blocks = self.blocks(request, layer);
        let ours = (first..blocks).take_while(|&index| !self.others(request, layer, index));
        ((first + ours.count()) * size).saturating_sub(len)
    }

    /// Writes `n` positions of a step whose first `written` this layer has. Every layer writes the
    /// same tag at the same position.
    fn write(&mut self, request: usize, layer: usize, written: usize, n: usize) {
        let room = self.room(request, layer);
        let tags: Vec<u32> = (written..written + n).map(|at| self.tag(request, at)).collect();
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for tag in &tags {
            let (k_row, v_row) = rows(tag * LAYERS as u32 + layer as u32);
            k.extend_from_slice(&k_row);
            v.extend_from_slice(&v_row);
        }
        let got = self.requests[request].append(layer, &k, &v, n);
        if n <= room {
            assert_eq!(got, Ok(()));
            self.truths[request].written[layer].extend(tags);
        } else {
            assert_eq!(got, Err(PagedKvError::NotReserved { need: n, have: room }));
        }
    }

    /// The tag of the step's `at`-th position: the one that another layer has there, or a new one.
    fn tag(&mut self, request: usize, at: usize) -> u32 {
        let written = &self.truths[request].written;
        written.iter().find_map(|tags| tags.get(at)).copied().unwrap_or_else(|| {
            self.next_tag += 1;
            self.next_tag
        })
    }

    fn commit(&mut self, request: usize, n: usize) {
        let truth = &mut self.truths[request];
        let need = truth.committed.len() + n;
        let behind = (0..LAYERS).find(|&layer| truth.written[layer].len() < n);
        let got = self.requests[request].commit(n);
        match behind {
            Some(layer) => {
                let have = truth.len(layer);
                assert_eq!(got, Err(PagedKvError::LayerBehind { layer, need, have }));
            }
            None => {
                assert_eq!(got, Ok(()));
                truth.committed.extend_from_slice(&truth.written[0][..n]);
                truth.abandon();
            }
        }
    }

    fn abandon(&mut self, request: usize) {
        self.requests[request].abandon();
        self.truths[request].abandon();
    }

    fn truncate(&mut self, request: usize, len: usize) {
        let have = self.truths[request].committed.len();
        let len = len % (have + 3);
        let got = self.requests[request].truncate(len);
        if len > have {
            assert_eq!(got, Err(PagedKvError::PositionOutOfRange { position: len, len: have }));
            return;
        }
        let gone = (0..LAYERS).any(|layer| {
            let (size, taken) = (self.world.block_sizes[layer], self.truths[request].taken[layer]);
            let needed = self.world.kept(layer, len, len.div_ceil(size));
            needed.into_iter().any(|block| !self.world.needed(layer, taken, block))
        });
        if gone {
            assert!(matches!(got, Err(PagedKvError::PositionFreed { .. })), "{got:?}");
            return;
        }
        assert_eq!(got, Ok(()));
        let truth = &mut self.truths[request];
        truth.committed.truncate(len);
        truth.abandon();
        truth.taken = truth.taken.map(|taken| taken.min(len));
        for (layer, size) in self.world.block_sizes.into_iter().enumerate() {
            let blocks = self.blocks(request, layer);
            assert_eq!(blocks, len.div_ceil(size), "no block more than is needed");
        }
    }

    fn is_unused(&self, request: usize) -> bool {
        (0..LAYERS).all(|layer| self.requests[request].cache(layer).block_table().is_empty())
    }

    /// A request fills groups of its own and goes; the groups stay, as a prefix.
    fn begin(&mut self, to: usize, n: usize) {
        if !self.is_unused(to) || !self.prefixes[to].groups.is_empty() {
            return;
        }
        let free = self.shared.free_groups();
        let groups = match self.shared.acquire_groups(n) {
            Ok(groups) => groups,
            Err(refused) => {
                assert_eq!(refused, PagedStoreExhausted { need: n, free });
                return;
            }
        };
        assert!(n <= free);
        assert_eq!(self.requests[to].adopt_groups(&groups, 0), Ok(()));
        // As many places as each layer has in a block. The model does not know the groups yet, and so takes their
        // blocks for the request's own, which is what room is.
        let len = self.in_group() * groups.len();
        assert_eq!(self.lack(to, len), [0; LAYERS]);
        assert!(self.reserve(to, len));
        (0..LAYERS).for_each(|layer| self.write(to, layer, 0, len));
        self.commit(to, len);
        let tags = self.truths[to].committed.clone();
        self.step(Op::Release { request: to as u8 });
        self.prefixes[to] = Prefix { groups, tags };
    }

    /// Places of a group that every layer has.
    fn in_group(&self) -> usize {
        self.world.block_sizes.into_iter().min().unwrap_or(1)
    }

    fn adopt(&mut self, to: usize, from: usize, len: usize) {
        let prefix = &self.prefixes[from];
        let len = len % (prefix.tags.len() + 1);
        let blocks: usize =
            (0..LAYERS).map(|layer| self.requests[to].cache(layer).block_table().len()).sum();
        // No more groups than have rows: a block of three holds more than a group is filled with.
        let groups = &prefix.groups[..len.div_ceil(self.in_group())];
        let got = self.requests[to].adopt_groups(groups, len);
        if blocks > 0 {
            let have = self.truths[to].committed.len();
            assert_eq!(got, Err(PagedKvError::NotEmpty { len: have, blocks }));
            return;
        }
        assert_eq!(got, Ok(()));
        self.truths[to].committed = prefix.tags[..len].to_vec();
        self.truths[to].taken = [len; LAYERS];
    }
}
