//! A step of many requests: one plan of attention for all of them and for all layers.
//!
//! In a step each running request feeds a piece of its prompt or its newest token. How many
//! positions each will have is known before the first layer, and that is all a [`BatchPlan`] is
//! made of: it is made once a step. Room for them is reserved in all layers first. In each layer
//! every request's rows are appended, under one write guard, and then all are attended by one call,
//! under a read guard, on a pool of threads. Blocks that requests have in common are read once for
//! all of them.
//!
//! A request that was stopped and is resumed feeds the tokens that it had generated in one step too,
//! but each through products of its own, as they were when they were new: attention gives the same
//! bits for many rows as for one after the other, products do not (see [`model`](crate::model)).
//!
//! ```text
//! plan      request 0: 131 positions, 1 row   request 1: 64, 64 rows   request 2: 90, 1 row
//! layer 0   products | append 0 1 2 | attend 0 1 2 | products
//! layer 1   products | append 0 1 2 | attend 0 1 2 | products     the same plan
//! ```

use std::time::{Duration, Instant};

use paged_kv::attention::AttentionOptions;
use paged_kv::batch::{BatchLayer, BatchPlan, SequenceRows, ThreadPool, shared_prefixes};
use paged_kv::cache::PagedKvCache;
use paged_kv::{Element, Level};

use crate::capture::Capture;
use crate::error::Error;
use crate::memory::PagedMemory;
use crate::model::{CHUNK, Feed, Logits, Memory, Model, Rows};

/// One request in a step.
#[derive(Debug)]
pub struct Member<'m, 'p, E: Element> {
    /// Its keys and values, to which the step adds.
    pub memory: &'m mut PagedMemory<'p, E>,
    /// What it feeds.
    pub tokens: &'m [u32],
    /// Whether each token goes through products of its own, as new tokens do and those of a piece
    /// of a prompt do not.
    pub apart: bool,
    /// Which logits it asks for.
    pub logits: Logits,
}

/// What a step is for, for the account of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// At least one request feeds a piece of its prompt.
    Prompt,
    /// All feed their newest token.
    Decode,
}

/// Where the time of some steps went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// Steps.
    pub steps: usize,
    /// Rows that all requests fed.
    pub rows: usize,
    /// Of these, rows that went through products of their own.
    pub apart: usize,
    /// The whole time.
    pub whole: Duration,
    /// The part of it that is this crate's: planning, appending, attending.
    pub attention: Duration,
}

/// Makes steps: the level, the threads and the scratch of attention, and a clock.
#[derive(Debug)]
pub struct Steps {
    level: Level,
    threads: ThreadPool,
    scratch: Vec<f32>,
    capture: Option<Capture>,
    prompt: Spent,
    decode: Spent,
}

impl Steps {
    /// Attention at a level, on a number of threads, the caller's own included.
    ///
    /// # Panics
    ///
    /// If there are to be no threads, or the system has not so many.
    pub fn new(level: Level, threads: usize) -> Self {
        let (prompt, decode) = (Spent::default(), Spent::default());
        let threads = ThreadPool::new(threads);
        Steps { level, threads, scratch: Vec::new(), capture: None, prompt, decode }
    }

    /// Takes down what attention is given from here on, in steps of one request.
    pub fn capture(&mut self, capture: Capture) {
        self.capture = Some(capture);
    }

    /// The time spent on steps of a kind.
    pub fn spent(&self, kind: Kind) -> Spent {
        match kind {
            Kind::Prompt => self.prompt,
            Kind::Decode => self.decode,
        }
    }

    /// One step of all members, at least one, over one pool. Gives the logits that each asked for.
    ///
    /// # Errors
    ///
    /// As [`Model::step`], for every member; [`Error::Kv`] where the store refuses, which it does where blocks are
    /// short: who may run short reserves room before. The members' memories may then have grown in
    /// some layers and are good for nothing but to be dropped.
    pub fn step<E: Element>(
        &mut self,
        model: &Model,
        kind: Kind,
        members: &mut [Member<'_, '_, E>],
    ) -> Result<Vec<Vec<f32>>, Error> {
        let started = Instant::now();
        if members.iter().any(|member| member.tokens.is_empty()) {
            return Err(Error::Prompt("there is no token to feed".into()));
        }
        if self.capture.is_some() && members.len() > 1 {
            return Err(Error::Usage("a capture is of one request".into()));
        }
        let pieces: Vec<_> = members.iter().map(|member| member.feeds().count()).collect();
        let rows: usize = members.iter().map(|member| member.tokens.len()).sum();
        let apart =
            members.iter().filter(|member| member.apart).map(|it| it.tokens.len()).sum::<usize>();
        let feeds: Vec<_> = members.iter().flat_map(Member::feeds).collect();
        let mut batch = Batch::new(self, members)?;
        let mut parts = model.step(&feeds, &mut batch)?.into_iter();
        let attention = batch.attention;
        let spent = match kind {
            Kind::Prompt => &mut self.prompt,
            Kind::Decode => &mut self.decode,
        };
        spent.steps += 1;
        spent.rows += rows;
        spent.apart += apart;
        spent.attention += attention;
        spent.whole += started.elapsed();
        Ok(pieces.iter().map(|&pieces| joined(parts.by_ref().take(pieces))).collect())
    }

    /// Feeds one request's tokens, at least one, in pieces that end at multiples of [`CHUNK`], and
    /// gives the logits after the last one. `progress` is told the positions held after each piece.
    ///
    /// # Errors
    ///
    /// As [`Steps::step`].
    pub fn prefill<E: Element>(
        &mut self,
        model: &Model,
        tokens: &[u32],
        memory: &mut PagedMemory<'_, E>,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        let mut left = tokens;
        loop {
            let (tokens, rest) = left.split_at(piece(left.len(), memory.len()));
            let logits = if rest.is_empty() { Logits::Last } else { Logits::None };
            let member = Member { memory: &mut *memory, tokens, apart: false, logits };
            let mut logits = self.step(model, Kind::Prompt, &mut [member])?;
            progress(memory.len());
            if rest.is_empty() {
                return Ok(logits.remove(0));
            }
            left = rest;
        }
    }
}

impl<'m, E: Element> Member<'m, '_, E> {
    /// What it feeds, as the model sees it: rows of one feed go through products together.
    fn feeds(&self) -> impl Iterator<Item = Feed<'m>> + use<'m, E> {
        let (tokens, start, logits) = (self.tokens, self.memory.len(), self.logits);
        let rows = if self.apart { 1 } else { tokens.len() };
        tokens.chunks(rows).enumerate().map(move |(at, feed)| {
            let last = (at + 1) * rows == tokens.len();
            let logits = if logits == Logits::Last && !last { Logits::None } else { logits };
            Feed { tokens: feed, start: start + at * rows, logits }
        })
    }
}

/// The logits of one member's feeds, of which most have none.
fn joined(mut parts: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let first = parts.find(|part| !part.is_empty()).unwrap_or_default();
    parts.fold(first, |mut all, part| {
        all.extend(part);
        all
    })
}

/// How many of the tokens that are left of a prompt are fed in the next step, after `held`
/// positions.
pub fn piece(left: usize, held: usize) -> usize {
    left.min(CHUNK - held % CHUNK)
}

/// The members' memories as the model sees them, for one step.
struct Batch<'b, 'm, 'p, E: Element> {
    members: &'b mut [Member<'m, 'p, E>],
    plan: BatchPlan,
    options: AttentionOptions<'static>,
    threads: &'b ThreadPool,
    scratch: &'b mut [f32],
    /// With the first position of the step.
    capture: Option<(&'b mut Capture, usize)>,
    attention: Duration,
}

impl<'b, 'm, 'p, E: Element> Batch<'b, 'm, 'p, E> {
    fn new(steps: &'b mut Steps, members: &'b mut [Member<'m, 'p, E>]) -> Result<Self, Error> {
        let started = Instant::now();
        let pool = members.first().expect("a step has members").memory.pool();
        for Member { memory, tokens, .. } in members.iter_mut() {
            memory.reserve(tokens.len()).map_err(Error::kv)?;
        }
        let first = members.first().expect("a step has members").memory.len();
        let sequences: Vec<_> = members
            .iter()
            .map(|Member { memory, tokens, .. }| {
                let rows = tokens.len();
                SequenceRows { len: memory.len() + rows, rows }
            })
            .collect();
        // Blocks are shared in all layers or in none, so one layer's tables say it for all.
        let caches: Vec<_> = members.iter().map(|member| member.memory.cache(0)).collect();
        let shared = shared_prefixes(pool.block_size(), &caches);
        let plan = BatchPlan::with_shared(pool.shape(), &sequences, &shared).map_err(Error::kv)?;
        if steps.scratch.len() < plan.scratch_len() {
            steps.scratch.resize(plan.scratch_len(), 0.0);
        }
        Ok(Batch {
            members,
            plan,
            options: AttentionOptions::new().level(steps.level),
            threads: &steps.threads,
            scratch: &mut steps.scratch,
            capture: steps.capture.as_mut().map(|capture| (capture, first)),
            attention: started.elapsed(),
        })
    }
}

impl<E: Element> Memory for Batch<'_, '_, '_, E> {
    /// A layer's write guard is held for the appends alone; attention then reads. Nothing can break
    /// in between: the blocks that a request writes are its own.
    fn attend(&mut self, layer: usize, rows: Rows<'_>, out: &mut [f32]) -> Result<(), Error> {
        if let Some((capture, first)) = &mut self.capture {
            capture.record(layer, *first, rows)?;
        }
        let started = Instant::now();
        let kv = self.plan.shape().kv();
        let (k_row, v_row) = (kv.k_row_len(), kv.v_row_len());
        let shared = self.members.first().expect("a step has members").memory.pool().shared();
        let mut store = shared.write(layer);
        for (index, member) in self.members.iter_mut().enumerate() {
            let own = self.plan.rows(index);
            let (k, v) = (
                &rows.k[own.start * k_row..own.end * k_row],
                &rows.v[own.start * v_row..own.end * v_row],
            );
            member.memory.append(&mut store, layer, k, v, own.len())?;
        }
        drop(store);
        let caches: Vec<&PagedKvCache> =
            self.members.iter().map(|member| member.memory.cache(layer)).collect();
        let store = shared.read(layer);
        let layer = BatchLayer { store: &store, sequences: &caches, q: rows.q };
        self.plan
            .attend(&layer, &self.options, out, self.scratch, self.threads)
            .map_err(Error::kv)?;
        self.attention += started.elapsed();
        Ok(())
    }
}
