//! Operations on page groups and on sequences that live in them, against a model.
//!
//! Every layer has its own number of blocks, and one stays smallest, so that groups fail for one
//! layer's sake. Handles are kept after their group is gone and used again on purpose.

use alloc::vec::Vec;

use super::sequence_ops::{rows, stored};
use crate::cache::{PagedKvCache, PagedKvStore, SharedPagedKv};
use crate::element::Element;
use crate::error::{GroupError, PagedKvError};
use crate::id::{BlockId, PageGroup};
use crate::shape::{KvDims, KvShape};

/// Sequences the operations work on.
pub const SEQUENCES: usize = 3;
const LAYERS: usize = 3;
const BLOCKS: [usize; LAYERS] = [7, 5, 6];
const BLOCK_SIZE: usize = 2;

/// One operation. Numbers out of range are brought into range by the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Take a group.
    Acquire,
    /// One more holder of a living group.
    Retain { group: u8 },
    /// One holder less of a living group.
    Release { group: u8 },
    /// Use a handle whose group is gone, in every way.
    Stale { group: u8 },
    /// Let an empty sequence adopt a living group's blocks, as room or as `len` positions of
    /// whoever wrote them.
    Adopt { seq: u8, group: u8, like: u8 },
    /// Write one position in every layer, or in none.
    Push { seq: u8 },
    /// Give a sequence back in every layer.
    ReleaseSequence { seq: u8 },
    /// Use a handle of another pool.
    WrongPool,
}

impl Op {
    /// Reads three bytes as an operation.
    pub fn decode([kind, a, b]: [u8; 3]) -> Op {
        match kind % 14 {
            0 | 1 => Op::Acquire,
            2 => Op::Retain { group: a },
            3 | 4 => Op::Release { group: a },
            5 => Op::Stale { group: a },
            6 | 7 => Op::Adopt { seq: a, group: b, like: a / 16 },
            8..=11 => Op::Push { seq: a },
            12 => Op::ReleaseSequence { seq: a },
            _ => Op::WrongPool,
        }
    }

    /// Reads a program.
    pub fn decode_all(bytes: &[u8]) -> Vec<Op> {
        bytes.chunks_exact(3).map(|op| Op::decode([op[0], op[1], op[2]])).collect()
    }
}

/// A group as the model knows it.
#[derive(Debug)]
struct Living {
    handle: PageGroup,
    refs: u32,
    /// Whether it ever had more than one holder.
    shared: bool,
    blocks: Vec<BlockId>,
}

/// A sequence as the model knows it: one cache a layer, and the tags of its positions.
#[derive(Debug, Default)]
struct Sequence {
    caches: Vec<PagedKvCache>,
    tags: Vec<u32>,
    /// Whether its first block came with rows: a prefix, and no room to grow into.
    filled: bool,
}

/// The layers, their groups and sequences, and what they should hold.
#[derive(Debug)]
pub struct Model<E: Element = f32> {
    shared: SharedPagedKv<E>,
    elsewhere: SharedPagedKv<E>,
    living: Vec<Living>,
    gone: Vec<PageGroup>,
    sequences: Vec<Sequence>,
    next_tag: u32,
}

impl<E: Element> Default for Model<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: Element> Model<E> {
    /// Three layers of 7, 5 and 6 blocks of two positions.
    pub fn new() -> Self {
        let dims = KvDims { block_size: BLOCK_SIZE, n_kv_heads: 2, k_width: 3, v_width: 2 };
        let shape = KvShape::new(dims).expect("a small shape");
        let open = |blocks| PagedKvStore::with_shape(shape, blocks).expect("a small store");
        let sequence = || Sequence {
            caches: (0..LAYERS).map(|_| PagedKvCache::new()).collect(),
            tags: Vec::new(),
            filled: false,
        };
        Model {
            shared: SharedPagedKv::from_stores(BLOCKS.map(open).into()),
            elsewhere: SharedPagedKv::from_stores(BLOCKS.map(open).into()),
            living: Vec::new(),
            gone: Vec::new(),
            sequences: (0..SEQUENCES).map(|_| sequence()).collect(),
            next_tag: 1,
        }
    }

    /// Runs a program, comparing everything after each step, and then gives all back.
    pub fn run(ops: &[Op]) {
        let mut model = Self::new();
        for op in ops {
            model.step(*op);
            model.check();
        }
        for seq in 0..SEQUENCES {
            model.step(Op::ReleaseSequence { seq: seq as u8 });
        }
        while !model.living.is_empty() {
            model.step(Op::Release { group: 0 });
            model.check();
        }
        for (layer, total) in BLOCKS.into_iter().enumerate() {
            assert_eq!(model.shared.free_blocks(layer), total);
        }
    }

    /// Runs one operation and compares its result.
    pub fn step(&mut self, op: Op) {
        let at = |seq: u8| seq as usize % SEQUENCES;
        match op {
            Op::Acquire => self.acquire(),
            Op::Retain { group } => {
                if let Some(index) = self.pick(group) {
                    self.shared.retain_group(self.living[index].handle);
                    self.living[index].refs += 1;
                    self.living[index].shared = true;
                }
            }
            Op::Release { group } => {
                if let Some(index) = self.pick(group) {
                    self.living[index].refs -= 1;
                    let last = self.living[index].refs == 0;
                    assert_eq!(self.shared.release_group(self.living[index].handle), last);
                    if last {
                        self.gone.push(self.living.remove(index).handle);
                    }
                }
            }
            Op::Stale { group } => {
                if !self.gone.is_empty() {
                    let group = self.gone[group as usize % self.gone.len()];
                    self.refused(group, GroupError::Stale { group });
                }
            }
            Op::WrongPool => {
                let group = self.elsewhere.acquire_group().expect("nobody else takes there");
                self.refused(group, GroupError::WrongPool { group });
                assert!(self.elsewhere.release_group(group));
            }
            Op::Adopt { seq, group, like } => self.adopt(at(seq), group, at(like)),
            Op::Push { seq } => self.push(at(seq)),
            Op::ReleaseSequence { seq } => {
                let sequence = &mut self.sequences[at(seq)];
                for (layer, cache) in sequence.caches.iter_mut().enumerate() {
                    assert_eq!(self.shared.release(layer, cache), Ok(()));
                }
                sequence.tags.clear();
                sequence.filled = false;
            }
        }
    }

    /// Compares all that can be observed.
    pub fn check(&self) {
        let mut fewest = usize::MAX;
        for layer in 0..LAYERS {
            let store = self.shared.read(layer);
            let tables = self.sequences.iter().map(|seq| seq.caches[layer].block_table());
            let groups = self.living.iter().map(|group| &group.blocks[layer..=layer]);
            assert_eq!(store.check_invariants(tables.chain(groups)), Ok(()), "layer {layer}");
            assert_eq!(self.shared.free_blocks(layer), store.free_block_count());
            fewest = fewest.min(store.free_block_count());
            for sequence in &self.sequences {
                let cache = &sequence.caches[layer];
                assert_eq!(cache.seq_len(), sequence.tags.len());
                for (position, &tag) in sequence.tags.iter().enumerate() {
                    let (mut k, mut v) = ([0.0; 3], [0.0; 2]);
                    assert_eq!(cache.copy_k_row(&store, position, 1, &mut k), Ok(()));
                    assert_eq!(cache.copy_v_row(&store, position, 1, &mut v), Ok(()));
                    let (k_all, v_all) = stored::<E>(tag * LAYERS as u32 + layer as u32);
                    assert_eq!((k, v), ([k_all[3], k_all[4], k_all[5]], [v_all[2], v_all[3]]));
                }
            }
        }
        assert_eq!(self.shared.free_groups(), fewest);
        for group in &self.living {
            assert_eq!(self.shared.group_refs(group.handle), group.refs);
            assert_eq!(self.shared.try_group_blocks(group.handle).as_ref(), Ok(&group.blocks));
        }
        for &group in &self.gone {
            assert_eq!(self.shared.group_refs(group), 0, "{group} is gone");
        }
    }

    fn pick(&self, group: u8) -> Option<usize> {
        (!self.living.is_empty()).then(|| group as usize % self.living.len())
    }

    fn acquire(&mut self) {
        let expected = self.shared.free_groups() > 0;
        let free: Vec<_> = (0..LAYERS).map(|layer| self.shared.free_blocks(layer)).collect();
        let got = self.shared.acquire_group();
        assert_eq!(got.is_some(), expected);
        for (layer, free) in free.into_iter().enumerate() {
            assert_eq!(self.shared.free_blocks(layer), free - usize::from(expected));
        }
        if let Some(handle) = got {
            assert!(!self.gone.contains(&handle), "a handle is never handed out twice");
            let blocks = self.shared.try_group_blocks(handle).expect("just taken");
            for (layer, block) in blocks.iter().enumerate() {
                assert_eq!(self.shared.group_block(handle, layer), Some(*block));
            }
            self.living.push(Living { handle, refs: 1, shared: false, blocks });
        }
    }

    fn refused(&self, group: PageGroup, error: GroupError) {
        assert_eq!(self.shared.group_refs(group), 0);
        assert_eq!(self.shared.try_retain(group), Err(error));
        assert_eq!(self.shared.try_release(group), Err(error));
        assert_eq!(self.shared.try_group_blocks(group), Err(error));
        assert!(self.shared.group_blocks(group).is_empty());
        assert_eq!(self.shared.group_block(group, 0), None);
    }

    /// Adopts a group's blocks with as many positions as the sequence `like` wrote into exactly
    /// that group's blocks, which may be none.
    fn adopt(&mut self, seq: usize, group: u8, like: usize) {
        let Some(index) = self.pick(group) else { return };
        let blocks = self.living[index].blocks.clone();
        if self.sequences[seq].caches.iter().any(|cache| !cache.block_table().is_empty()) {
            return;
        }
        let source = &self.sequences[like];
        let wrote = (0..LAYERS)
            .all(|layer| source.caches[layer].block_table().first() == Some(&blocks[layer]));
        let len = if wrote { source.tags.len().min(BLOCK_SIZE) } else { 0 };
        let tags = source.tags[..len].to_vec();
        for (layer, block) in blocks.into_iter().enumerate() {
            let cache = &mut self.sequences[seq].caches[layer];
            assert_eq!(cache.adopt(&mut self.shared.write(layer), &[block], len), Ok(()));
        }
        self.sequences[seq].tags = tags;
        self.sequences[seq].filled = len > 0;
    }

    /// Blocks that the next position needs in one layer.
    fn need(&self, seq: usize, layer: usize) -> usize {
        let cache = &self.sequences[seq].caches[layer];
        let Some(block) = cache.block_table().get(cache.seq_len() / BLOCK_SIZE) else { return 1 };
        let others = self.sequences.iter().enumerate().any(|(index, other)| {
            index != seq && other.caches[layer].block_table().contains(block)
        });
        let group = self.living.iter().find(|group| group.blocks[layer] == *block);
        let prefix = self.sequences[seq].filled;
        usize::from(others || group.is_some_and(|group| group.shared || prefix))
    }

    fn push(&mut self, seq: usize) {
        let need: Vec<_> = (0..LAYERS).map(|layer| self.need(seq, layer)).collect();
        let mut guards = self.shared.write_all();
        let fits = guards.iter().zip(&need).all(|(store, need)| store.free_block_count() >= *need);
        let tag = self.next_tag;
        self.next_tag += 1;
        let sequence = &mut self.sequences[seq];
        // All layers advance or none do: room in every layer first, then the rows.
        let layers = || 0..LAYERS;
        let mut room = Ok(());
        for layer in layers() {
            let (k, v) = rows(tag * LAYERS as u32 + layer as u32);
            if fits {
                room = sequence.caches[layer].push(&mut guards[layer], &k, &v);
                assert_eq!(room, Ok(()));
            } else if guards[layer].free_block_count() < need[layer] {
                room = sequence.caches[layer].push(&mut guards[layer], &k, &v);
                assert!(matches!(room, Err(PagedKvError::Exhausted(e)) if e.need == need[layer]));
            }
        }
        assert_eq!(room.is_ok(), fits);
        if fits {
            sequence.tags.push(tag);
        }
    }
}
