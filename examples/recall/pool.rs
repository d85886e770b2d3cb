//! One pool of blocks, many requests: who may come in, who holds what, and how it is given back.
//!
//! # Admission is a promise, not a look
//!
//! Free blocks are a snapshot: two requests can both see the last one. And blocks taken ahead are
//! given back by the first rollback. So a request is let in by arithmetic: it says how many blocks
//! it can ever hold in a layer, and waits until that many are promised to nobody else. After that
//! no append of it can fail, however the requests interleave, and nobody dies half-way.
//!
//! # Giving back is a drop
//!
//! What a request holds hangs on its [`Lease`]: a sequence over all layers, shares in the prefix,
//! the promise. They go back when it is dropped, and a panic drops it too. A worker that dies must
//! not make the pool smaller.

use core::fmt;
use std::sync::{Condvar, Mutex, MutexGuard};

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{PagedSequence, SharedPagedKv};
use paged_kv::{
    AttentionError, BlockId, GqaShape, KvShape, Level, PageGroup, PagedKvError, ShapeError,
};

use crate::decoder::{Config, Decoder, Memory, StepError, Token, Workspace};

/// The sizes of a pool and how attention over it is computed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolPlan {
    /// Positions in one block.
    pub(crate) block_size: usize,
    /// Blocks in each layer.
    pub(crate) blocks: usize,
    /// Most rows that are attended at once.
    pub(crate) rows: usize,
    /// The instruction set.
    pub(crate) level: Level,
}

/// The layers, the shared prefix in them, and the promises made to requests.
#[derive(Debug)]
pub(crate) struct Pool {
    layers: SharedPagedKv,
    gqa: GqaShape,
    plan: PoolPlan,
    prefix: Prefix,
    unpromised: Mutex<usize>,
    returned: Condvar,
    ledger: Mutex<Ledger>,
}

/// The full blocks of the prefix: a group for each, which holds it in every layer.
#[derive(Debug, Default)]
struct Prefix {
    groups: Vec<PageGroup>,
    len: usize,
}

/// What the pool answers when it has no place, now or ever.
#[derive(Debug)]
pub(crate) enum PoolError {
    /// The layers cannot be had.
    Shape(ShapeError),
    /// The prefix alone needs more blocks than there are.
    Prefix {
        /// Blocks needed in each layer.
        need: usize,
        /// Blocks there are.
        have: usize,
    },
    /// A request that would not fit an empty pool.
    NeverFits {
        /// Blocks needed in each layer beside the prefix.
        need: usize,
        /// Blocks there are beside the prefix.
        have: usize,
    },
    /// The prefix could not be read.
    Step(StepError<MemoryError>),
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PoolError::Shape(error) => error.fmt(f),
            PoolError::Prefix { need, have } => {
                write!(f, "the shared prefix needs {need} blocks, the pool has {have}")
            }
            PoolError::NeverFits { need, have } => write!(
                f,
                "it needs {need} blocks beside the shared prefix, and there are {have}, \
                 taken or not"
            ),
            PoolError::Step(error) => write!(f, "the prefix could not be read: {error}"),
        }
    }
}

impl core::error::Error for PoolError {}

/// Why a step over the pool was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum MemoryError {
    /// By the storage.
    Storage(PagedKvError),
    /// By attention.
    Attention(AttentionError),
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemoryError::Storage(error) => error.fmt(f),
            MemoryError::Attention(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for MemoryError {}

impl From<PagedKvError> for MemoryError {
    fn from(error: PagedKvError) -> MemoryError {
        MemoryError::Storage(error)
    }
}

impl Pool {
    /// Opens the layers and reads the full blocks of `prefix` into page groups, once.
    pub(crate) fn open(
        decoder: &Decoder,
        plan: PoolPlan,
        prefix: &[Token],
    ) -> Result<Pool, PoolError> {
        let config = decoder.config();
        let shape = KvShape::square(plan.block_size, config.n_kv_heads, config.head_dim)
            .map_err(PoolError::Shape)?;
        let gqa = GqaShape::new(shape, config.n_heads).map_err(PoolError::Shape)?;
        let layers = SharedPagedKv::with_shape(Config::N_LAYERS, shape, plan.blocks)
            .map_err(PoolError::Shape)?;
        let full = prefix.len() / plan.block_size;
        let Some(left) = plan.blocks.checked_sub(full) else {
            return Err(PoolError::Prefix { need: full, have: plan.blocks });
        };
        let mut pool = Pool {
            layers,
            gqa,
            plan,
            prefix: Prefix::default(),
            unpromised: Mutex::new(left),
            returned: Condvar::new(),
            ledger: Mutex::new(Ledger::new(plan.blocks)),
        };
        pool.read_prefix(decoder, &prefix[..full * plan.block_size])?;
        Ok(pool)
    }

    /// Fills one group after the other, then lets go of the sequence that filled them: the groups
    /// keep the blocks.
    fn read_prefix(&mut self, decoder: &Decoder, tokens: &[Token]) -> Result<(), PoolError> {
        let full = tokens.len() / self.plan.block_size;
        for _ in 0..full {
            let group = self.layers.acquire_group().expect("an empty pool has a block for each");
            self.prefix.groups.push(group);
        }
        let mut lease = self.lease(None);
        lease.adopt(0).map_err(|error| PoolError::Step(StepError::Memory(error)))?;
        let mut work = Workspace::new(decoder.config(), self.plan.rows);
        decoder.forward(&mut lease, tokens, &mut work).map_err(PoolError::Step)?;
        let table = lease.table().to_vec();
        drop(lease);
        lock(&self.ledger).hold(None, &table);
        self.prefix.len = tokens.len();
        Ok(())
    }

    /// Blocks that a list of `positions` needs beside the shared ones.
    pub(crate) fn need(&self, positions: usize) -> usize {
        self.gqa.kv().blocks_for(positions) - self.prefix.groups.len()
    }

    /// Lets `request` in as soon as `positions` of it can not fail for want of a block.
    ///
    /// `waiting` is called once if that is not so at once.
    pub(crate) fn admit(
        &self,
        request: usize,
        positions: usize,
        waiting: impl FnOnce(),
    ) -> Result<Lease<'_>, PoolError> {
        let need = self.need(positions);
        let have = self.plan.blocks - self.prefix.groups.len();
        if need > have {
            return Err(PoolError::NeverFits { need, have });
        }
        let mut unpromised = lock(&self.unpromised);
        if *unpromised < need {
            waiting();
        }
        while *unpromised < need {
            unpromised = self.returned.wait(unpromised).unwrap_or_else(|dead| dead.into_inner());
        }
        *unpromised -= need;
        drop(unpromised);
        let mut lease = self.lease(Some(request));
        lease.promised = need;
        for &group in &self.prefix.groups {
            self.layers.retain_group(group);
            lease.retained += 1;
        }
        lease.adopt(self.prefix.len).map_err(|error| PoolError::Step(StepError::Memory(error)))?;
        Ok(lease)
    }

    /// Positions every request begins with.
    pub(crate) fn prefix_len(&self) -> usize {
        self.prefix.len
    }

    /// Blocks of one layer that all requests share.
    pub(crate) fn shared_blocks(&self) -> usize {
        self.prefix.groups.len()
    }

    /// Free blocks of the layer that has fewest.
    pub(crate) fn free_blocks(&self) -> usize {
        (0..Config::N_LAYERS).map(|layer| self.layers.free_blocks(layer)).min().unwrap_or(0)
    }

    /// Who held which block of layer 0 when most of them were held.
    pub(crate) fn fullest(&self) -> Vec<Holder> {
        lock(&self.ledger).fullest.clone()
    }

    /// Lets go of the prefix. Returns how many blocks of a layer did not come back: none, if all
    /// is well.
    pub(crate) fn close(self) -> usize {
        for &group in &self.prefix.groups {
            self.layers.release_group(group);
        }
        self.plan.blocks - self.free_blocks()
    }

    fn lease(&self, request: Option<usize>) -> Lease<'_> {
        Lease {
            pool: self,
            request,
            sequence: PagedSequence::new(&self.layers),
            scratch: vec![0.0; attention_scratch_len(&self.gqa, self.plan.rows)],
            promised: 0,
            retained: 0,
        }
    }
}

/// What one request holds. Dropping it gives everything back.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    pool: &'a Pool,
    request: Option<usize>,
    sequence: PagedSequence<&'a SharedPagedKv>,
    scratch: Vec<f32>,
    promised: usize,
    retained: usize,
}

impl Lease<'_> {
    /// Tells the pool's map which blocks this request holds by now.
    pub(crate) fn report(&self) {
        let shared = self.pool.shared_blocks();
        lock(&self.pool.ledger).hold(self.request, &self.table()[shared..]);
    }

    /// Its blocks in layer 0.
    pub(crate) fn table(&self) -> &[BlockId] {
        self.sequence.cache(0).block_table()
    }

    /// Begins with the blocks of the prefix, of which `len` positions are filled.
    fn adopt(&mut self, len: usize) -> Result<(), MemoryError> {
        Ok(self.sequence.adopt_groups(&self.pool.prefix.groups, len)?)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let pool = self.pool;
        if self.request.is_some() {
            lock(&pool.ledger).release(self.request);
        }
        self.sequence.release();
        for &group in &pool.prefix.groups[..self.retained] {
            pool.layers.release_group(group);
        }
        // The blocks first, then the promise: whoever is let in by it finds them.
        *lock(&pool.unpromised) += self.promised;
        pool.returned.notify_all();
    }
}

impl Memory for Lease<'_> {
    type Error = MemoryError;

    fn len(&self) -> usize {
        self.sequence.len()
    }

    /// A step begins with room in every layer and ends when the last one has its rows. Each is
    /// written under its own write guard: attention of others waits for no more than that.
    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], n: usize) -> Result<(), MemoryError> {
        if layer == 0 {
            self.sequence.reserve(n)?;
        }
        self.sequence.append(layer, k, v, n)?;
        if layer == Config::N_LAYERS - 1 {
            self.sequence.commit(n)?;
        }
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), MemoryError> {
        let pool = self.pool;
        let options = AttentionOptions::new().level(pool.plan.level);
        let (cache, scratch) = (self.sequence.cache(layer), &mut self.scratch);
        let store = pool.layers.read(layer);
        causal_gqa_attention_paged_into(
            q,
            &store,
            cache,
            pool.gqa.n_heads(),
            &options,
            out,
            scratch,
        )
        .map_err(MemoryError::Attention)
    }

    fn truncate(&mut self, len: usize) -> Result<(), MemoryError> {
        // A step that failed in the middle is not that long yet.
        Ok(self.sequence.truncate(len.min(self.sequence.len()))?)
    }
}

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Nobody.
    Free,
    /// Everybody, through the prefix.
    Shared,
    /// One request.
    Request(usize),
}

/// The holder of every block of layer 0, now and at the fullest moment so far.
#[derive(Debug)]
struct Ledger {
    now: Vec<Holder>,
    fullest: Vec<Holder>,
    most: usize,
}

impl Ledger {
    fn new(blocks: usize) -> Ledger {
        Ledger { now: vec![Holder::Free; blocks], fullest: vec![Holder::Free; blocks], most: 0 }
    }

    fn hold(&mut self, request: Option<usize>, table: &[BlockId]) {
        for block in table {
            self.now[block.index()] = request.map_or(Holder::Shared, Holder::Request);
        }
        let held = self.now.iter().filter(|&&holder| holder != Holder::Free).count();
        if held >= self.most {
            self.most = held;
            self.fullest.clone_from(&self.now);
        }
    }

    fn release(&mut self, request: Option<usize>) {
        for holder in &mut self.now {
            if request.is_some_and(|request| *holder == Holder::Request(request)) {
                *holder = Holder::Free;
            }
        }
    }
}

/// A lock that a dead worker left behind guards numbers that are right all the same: none of these
/// is changed in two steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|dead| dead.into_inner())
}
