//! Operations on the sequences of one tiny store, against a model that copies everything.
//!
//! The model of a sequence is the list of its positions' tags; a tag fixes every number of the
//! position's rows, and no two positions written have the same. So a row that another sequence
//! wrote is told from the right one wherever it turns up; what the stored type makes of the numbers
//! is asked of a cache that holds nothing else. The model of the store is recounted from all block
//! tables after every operation.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::numbers::Numbers;
use crate::cache::{KvCache, PagedKvCache, PagedKvStore};
use crate::element::Element;
use crate::error::{PagedKvError, PagedStoreExhausted, Side};
use crate::id::BlockId;
use crate::shape::{KvDims, KvShape};

/// Sequences the operations work on.
pub const SEQUENCES: usize = 4;

/// One operation. Numbers out of range are brought into range by the model, so that any bytes are
/// a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Write one position.
    Push { seq: u8 },
    /// Write several.
    Append { seq: u8, n: u8 },
    /// Make room for several.
    Reserve { seq: u8, n: u8 },
    /// Roll back to a length, which may be one or two more than there is.
    Truncate { seq: u8, len: u8 },
    /// Release `to` and make it a fork of `from`.
    Fork { from: u8, to: u8 },
    /// Release.
    Release { seq: u8 },
    /// Let `to` adopt the first blocks of `from`; refused where `to` is not empty.
    Adopt { from: u8, to: u8, len: u8 },
    /// Adopt a table that is wrong in one of several ways.
    AdoptBad { to: u8, how: u8 },
    /// Use a sequence with another store, in one of several ways.
    WrongStore { seq: u8, how: u8 },
    /// Push a row of the wrong length.
    WrongRow { seq: u8 },
}

impl Op {
    /// Reads three bytes as an operation.
    pub fn decode([kind, a, b]: [u8; 3]) -> Op {
        let (seq, n) = (a, b);
        match kind % 16 {
            0..=3 => Op::Push { seq },
            4 | 5 => Op::Append { seq, n },
            6 => Op::Reserve { seq, n },
            7 | 8 => Op::Truncate { seq, len: n },
            9 | 10 => Op::Fork { from: a, to: b },
            11 => Op::Release { seq },
            12 => Op::Adopt { from: a, to: a / 16, len: b },
            13 => Op::AdoptBad { to: a, how: b },
            14 => Op::WrongStore { seq, how: n },
            _ => Op::WrongRow { seq },
        }
    }

    /// Reads a program.
    pub fn decode_all(bytes: &[u8]) -> Vec<Op> {
        bytes.chunks_exact(3).map(|op| Op::decode([op[0], op[1], op[2]])).collect()
    }
}

/// What a store is opened with.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Positions in one block.
    pub block_size: usize,
    /// Blocks in the store.
    pub total_blocks: usize,
    /// Whether memory nobody wrote holds what is not a number.
    pub poison: bool,
}

/// The store, its sequences, and what they should hold.
#[derive(Debug)]
pub struct Model<E: Element = f32> {
    store: PagedKvStore<E>,
    other: PagedKvStore<E>,
    caches: Vec<PagedKvCache>,
    tags: Vec<Vec<u32>>,
    /// What the rows of each tag are when they are read back.
    stored: Vec<Rows>,
}

impl<E: Element> Model<E> {
    /// Two heads, keys of 3 and values of 2 numbers: no two sizes are the same.
    pub fn new(world: World) -> Self {
        let dims = KvDims { block_size: world.block_size, n_kv_heads: 2, k_width: 3, v_width: 2 };
        let shape = KvShape::new(dims).expect("a small shape");
        let open = |blocks| PagedKvStore::with_shape(shape, blocks).expect("a small store");
        let (mut store, other) = (open(world.total_blocks), open(world.total_blocks));
        if world.poison {
            store.poison_free();
        }
        Model {
            store,
            other,
            caches: (0..SEQUENCES).map(|_| PagedKvCache::new()).collect(),
            tags: alloc::vec![Vec::new(); SEQUENCES],
            stored: Vec::new(),
        }
    }

    /// Runs a program, comparing everything after each step, and then releases all.
    pub fn run(world: World, ops: &[Op]) {
        let mut model = Self::new(world);
        for op in ops {
            model.step(*op);
            model.check();
        }
        for seq in 0..SEQUENCES {
            model.step(Op::Release { seq: seq as u8 });
            model.check();
        }
        assert_eq!(model.store.free_block_count(), model.store.total_blocks());
    }

    /// Runs one operation and compares its result.
    pub fn step(&mut self, op: Op) {
        let at = |seq: u8| seq as usize % SEQUENCES;
        match op {
            Op::Push { seq } => self.append(at(seq), 1),
            Op::Append { seq, n } => self.append(at(seq), n as usize % 12),
            Op::Reserve { seq, n } => self.reserve(at(seq), n as usize % 12),
            Op::Truncate { seq, len } => self.truncate(at(seq), len as usize),
            Op::Fork { from, to } => self.fork(at(from), at(to)),
            Op::Release { seq } => {
                let seq = at(seq);
                assert_eq!(self.caches[seq].release(&mut self.store), Ok(()));
                assert_eq!(self.caches[seq].store_id(), None);
                self.tags[seq].clear();
            }
            Op::Adopt { from, to, len } => self.adopt(at(from), at(to), len as usize),
            Op::AdoptBad { to, how } => self.adopt_bad(at(to), how),
            Op::WrongStore { seq, how } => self.wrong_store(at(seq), how),
            Op::WrongRow { seq } => self.wrong_row(at(seq)),
        }
    }

    /// Drops a sequence without releasing it: what the check must notice.
    pub fn forget(&mut self, seq: usize) {
        self.caches[seq] = PagedKvCache::new();
        self.tags[seq].clear();
    }

    /// Compares all that can be observed.
    pub fn check(&self) {
        let mut holders = BTreeMap::<BlockId, u32>::new();
        for block in self.caches.iter().flat_map(|cache| cache.block_table()) {
            *holders.entry(*block).or_default() += 1;
        }
        let total = self.store.total_blocks();
        assert_eq!(self.store.free_block_count(), total - holders.len());
        for block in (0..total).filter_map(BlockId::new) {
            let expected = holders.get(&block).copied().unwrap_or(0);
            assert_eq!(self.store.holders(block), expected, "block {block}");
        }
        let tables = self.caches.iter().map(PagedKvCache::block_table);
        assert_eq!(self.store.check_invariants(tables), Ok(()));
        assert_eq!(self.other.free_block_count(), total, "the other store is never touched");
        for (cache, tags) in self.caches.iter().zip(&self.tags) {
            self.check_rows(cache, tags);
        }
    }

    fn check_rows(&self, cache: &PagedKvCache, tags: &[u32]) {
        assert_eq!(cache.seq_len(), tags.len());
        assert_eq!(cache.is_empty(), tags.is_empty());
        assert!(cache.block_table().len() >= self.store.shape().blocks_for(tags.len()));
        for (position, &tag) in tags.iter().enumerate() {
            for head in 0..2 {
                let (mut k, mut v) = ([0.0; 3], [0.0; 2]);
                assert_eq!(cache.copy_k_row(&self.store, position, head, &mut k), Ok(()));
                assert_eq!(cache.copy_v_row(&self.store, position, head, &mut v), Ok(()));
                let (k_all, v_all) = self.stored[tag as usize];
                assert_eq!(k, k_all[head * 3..][..3], "keys of position {position}");
                assert_eq!(v, v_all[head * 2..][..2], "values of position {position}");
            }
        }
        let mut row = [0.5; 3];
        let past = PagedKvError::PositionOutOfRange { position: tags.len(), len: tags.len() };
        assert_eq!(cache.copy_k_row(&self.store, tags.len(), 0, &mut row), Err(past));
        assert_eq!(row, [0.5; 3]);
    }

    /// Blocks that making room for `n` more positions has to take: the missing ones, and one for
    /// each that others hold too.
    fn need(&self, seq: usize, n: usize) -> usize {
        if n == 0 {
            return 0;
        }
        let (cache, shape) = (&self.caches[seq], self.store.shape());
        let (first, last) =
            (cache.seq_len() / shape.block_size(), shape.blocks_for(cache.seq_len() + n));
        let named = |block: &BlockId| {
            self.caches.iter().filter(|cache| cache.block_table().contains(block)).count()
        };
        let table = cache.block_table();
        (first..last).filter(|&index| table.get(index).is_none_or(|b| named(b) > 1)).count()
    }

    fn expect_room(&self, seq: usize, n: usize) -> Result<(), PagedKvError> {
        let (need, free) = (self.need(seq, n), self.store.free_block_count());
        if need > free { Err(PagedStoreExhausted { need, free }.into()) } else { Ok(()) }
    }

    fn append(&mut self, seq: usize, n: usize) {
        let expected = self.expect_room(seq, n);
        let tags: Vec<u32> = (self.stored.len() as u32..).take(n).collect();
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for &tag in &tags {
            let (k_row, v_row) = rows(tag);
            self.stored.push(stored::<E>(tag));
            k.extend_from_slice(&k_row);
            v.extend_from_slice(&v_row);
        }
        let before = self.caches[seq].block_table().to_vec();
        let got = if n == 1 {
            self.caches[seq].push(&mut self.store, &k, &v)
        } else {
            self.caches[seq].append(&mut self.store, &k, &v, n)
        };
        assert_eq!(got, expected);
        match got {
            Ok(()) => self.tags[seq].extend(tags),
            Err(_) => assert_eq!(self.caches[seq].block_table(), before, "all or nothing"),
        }
    }

    fn reserve(&mut self, seq: usize, n: usize) {
        let expected = self.expect_room(seq, n);
        let before = self.caches[seq].block_table().to_vec();
        let got = self.caches[seq].reserve(&mut self.store, n);
        assert_eq!(got, expected);
        if got.is_ok() {
            assert_eq!(self.need(seq, n), 0, "what was reserved is there");
        } else {
            assert_eq!(self.caches[seq].block_table(), before, "all or nothing");
        }
    }

    fn truncate(&mut self, seq: usize, len: usize) {
        let have = self.tags[seq].len();
        let len = len % (have + 3);
        let before = self.caches[seq].block_table().to_vec();
        let got = self.caches[seq].truncate(&mut self.store, len);
        if len > have {
            assert_eq!(got, Err(PagedKvError::PositionOutOfRange { position: len, len: have }));
            assert_eq!(self.caches[seq].block_table(), before);
            return;
        }
        assert_eq!(got, Ok(()));
        assert_eq!(self.caches[seq].block_table(), &before[..self.store.shape().blocks_for(len)]);
        self.tags[seq].truncate(len);
    }

    fn fork(&mut self, from: usize, to: usize) {
        if from == to {
            return;
        }
        self.step(Op::Release { seq: to as u8 });
        let free = self.store.free_block_count();
        self.caches[to] = self.caches[from].fork(&mut self.store).expect("counts are not full");
        self.tags[to] = self.tags[from].clone();
        assert_eq!(self.store.free_block_count(), free, "a fork takes no block");
    }

    fn adopt(&mut self, from: usize, to: usize, len: usize) {
        let blocks = self.caches[from].block_table().to_vec();
        let len = len % (self.tags[from].len() + 1);
        let got = self.caches[to].adopt(&mut self.store, &blocks, len);
        let target = &self.caches[to];
        if from == to || !self.tags[to].is_empty() {
            // A sequence that held blocks before, reserved ones perhaps, is refused.
            if self.tags[to].is_empty() && blocks.is_empty() {
                assert_eq!(got, Ok(()));
            } else {
                assert!(matches!(got, Err(PagedKvError::NotEmpty { .. })), "{got:?}");
            }
            return;
        }
        match got {
            Ok(()) => {
                assert_eq!(target.block_table(), blocks);
                self.tags[to] = self.tags[from][..len].to_vec();
            }
            Err(refused) => {
                let blocks = target.block_table().len();
                assert_eq!(refused, PagedKvError::NotEmpty { len: 0, blocks });
                assert_ne!(blocks, 0);
            }
        }
    }

    fn adopt_bad(&mut self, to: usize, how: u8) {
        if !self.caches[to].block_table().is_empty() {
            return;
        }
        let total = self.store.total_blocks();
        let held: Vec<BlockId> =
            self.caches.iter().flat_map(|cache| cache.block_table()).copied().collect();
        let free = (0..total).filter_map(BlockId::new).find(|b| self.store.holders(*b) == 0);
        let outside = BlockId::new(total).expect("a small id");
        let mut blocks: Vec<BlockId> = held.first().copied().into_iter().collect();
        let (bad, len) = match how % 4 {
            0 => (Some(outside), 0),
            1 => (free, 0),
            2 => (blocks.first().copied(), 0),
            _ => (None, (blocks.len() + 1) * self.store.block_size()),
        };
        let expected = match (how % 4, bad) {
            (3, _) => PagedKvError::BlockCount { need: blocks.len() + 1, have: blocks.len() },
            (_, None) => return,
            (0, Some(block)) => PagedKvError::BlockOutOfRange { block, total },
            (1, Some(block)) => PagedKvError::BlockFree { block },
            (_, Some(block)) => PagedKvError::BlockTwice { block },
        };
        blocks.extend(bad);
        assert_eq!(self.caches[to].adopt(&mut self.store, &blocks, len), Err(expected));
        assert!(self.caches[to].block_table().is_empty());
    }

    fn wrong_store(&mut self, seq: usize, how: u8) {
        let cache = &mut self.caches[seq];
        let Some(need) = cache.store_id() else { return };
        let refused = Err(PagedKvError::WrongStore { need, have: self.other.id() });
        let (k, v) = rows(0);
        let other = &mut self.other;
        let got = match how % 8 {
            0 => cache.push(other, &k, &v),
            1 => cache.try_push(other, &k, &v),
            2 => cache.reserve(other, 1),
            3 => cache.truncate(other, 0),
            4 => cache.fork(other).map(drop),
            5 => cache.release(other),
            6 => cache.copy_v_row(other, 0, 0, &mut [0.0; 2]),
            _ => cache.adopt(other, &[], 0),
        };
        assert_eq!(got, refused);
    }

    fn wrong_row(&mut self, seq: usize) {
        let (k, v) = rows(0);
        let got = self.caches[seq].try_push(&mut self.store, &k[1..], &v);
        assert_eq!(got, Err(PagedKvError::RowLength { side: Side::Key, need: 6, have: 5 }));
        let got = self.caches[seq].try_append(&mut self.store, &k, &v, 2);
        assert_eq!(got, Err(PagedKvError::RowLength { side: Side::Key, need: 12, have: 6 }));
    }
}

/// Keys `[2][3]` and values `[2][2]` of a position.
pub type Rows = ([f32; 6], [f32; 4]);

/// The rows that a tag stands for.
pub fn rows(tag: u32) -> Rows {
    let mut numbers = Numbers::new(u64::from(tag));
    let mut number = |_| numbers.normal();
    (core::array::from_fn(&mut number), core::array::from_fn(&mut number))
}

/// What they are when they are read back.
pub fn stored<E: Element>(tag: u32) -> Rows {
    let dims = KvDims { block_size: 1, n_kv_heads: 2, k_width: 3, v_width: 2 };
    let mut cache = KvCache::<E>::with_shape(KvShape::new(dims).expect("a small shape"));
    let (mut k, mut v) = rows(tag);
    cache.push(&k, &v).expect("no pool bounds it");
    for head in 0..2 {
        cache.copy_k_row(0, head, &mut k[head * 3..][..3]).expect("it was written");
        cache.copy_v_row(0, head, &mut v[head * 2..][..2]).expect("it was written");
    }
    (k, v)
}
