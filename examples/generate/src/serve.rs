//! Requests by turns over one store: who runs, and what each does in the next step.
//!
//! ```text
//! waiting   3 4 5        in order of arrival, until there are blocks
//! running   0 1 2        each feeds a piece of its prompt or its newest token, all in one step
//! ```
//!
//! Whoever does not fit waits in line. If a small request could slip past, a large one might wait
//! for ever. Everything is told as an [`Event`] when it happens.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use paged_kv::{Element, Int4, Int8, bf16, f16};

use crate::error::Error;
use crate::memory::PagedMemory;
use crate::model::{Logits, Model};
use crate::options::{KvType, Options};
use crate::plan::{Job, Plan};
use crate::pool::{Pages, Pool};
use crate::sample::Sampler;
use crate::step::{Kind, Member, Spent, Steps, piece};

/// Something that happened to a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The common prefix has this many of its positions.
    Prefix {
        /// Positions in the store.
        done: usize,
        /// Positions there will be.
        of: usize,
    },
    /// A request waits in line.
    Waits {
        /// Which.
        request: usize,
        /// Blocks of its own that it needs, in each layer.
        need: usize,
        /// Blocks that are free.
        free: usize,
    },
    /// A request's prompt has this many of its positions, adopted ones included.
    Prefill {
        /// Which.
        request: usize,
        /// Positions in the store.
        done: usize,
        /// Positions there will be.
        of: usize,
    },
    /// A request has its next token.
    Token {
        /// Which.
        request: usize,
        /// The token.
        token: u32,
    },
    /// A request has ended, one way or the other, and its blocks are back.
    Ended {
        /// Which.
        request: usize,
    },
}

/// What became of the requests.
#[derive(Debug)]
pub struct Outcome {
    /// New tokens of each request, or why there are none.
    pub answers: Vec<Result<Vec<u32>, Error>>,
    /// From the start of the prefix to the end of the last request.
    pub elapsed: Duration,
    /// From the first new token of anybody to the end.
    pub generating: Duration,
    /// Steps in which prompts came in, the common prefix's included.
    pub prompt: Spent,
    /// Steps of new tokens alone.
    pub decode: Spent,
    /// Bytes of keys and values that a position takes, over all layers.
    pub bytes_per_token: usize,
    /// The most blocks held at once, in each layer.
    pub peak: usize,
    /// Blocks handed out over the run, in each layer.
    pub handed_out: usize,
    /// Blocks that no request and no prefix holds at the end: all of them, or something leaked.
    pub free: usize,
}

/// Runs all requests of a plan to their end, by the steps of `steps`.
/// `end` is the token that ends a text early.
///
/// # Errors
///
/// What stops everybody: a store that cannot be opened, a step that fails. What stops one request
/// is in [`Outcome::answers`].
pub fn run(
    model: &Model,
    plan: &Plan,
    options: &Options,
    steps: Steps,
    end: Option<u32>,
    listen: &mut dyn FnMut(Event),
) -> Result<Outcome, Error> {
    match options.kv_type {
        KvType::F32 => run_as::<f32>(model, plan, options, steps, end, listen),
        KvType::F16 => run_as::<f16>(model, plan, options, steps, end, listen),
        KvType::Bf16 => run_as::<bf16>(model, plan, options, steps, end, listen),
        KvType::Int8 => run_as::<Int8>(model, plan, options, steps, end, listen),
        KvType::Int4 => run_as::<Int4>(model, plan, options, steps, end, listen),
    }
}

fn run_as<E: Element>(
    model: &Model,
    plan: &Plan,
    options: &Options,
    mut steps: Steps,
    end: Option<u32>,
    listen: &mut dyn FnMut(Event),
) -> Result<Outcome, Error> {
    let started = Instant::now();
    let pool = Pool::<E>::new(model.sizes(), options.block_size, plan.pool_blocks)?;
    let prefix = match plan.jobs.first() {
        Some(job) if plan.prefix > 0 && plan.refusal_of_all().is_none() => {
            Some(prefill_prefix(model, &pool, plan, &job.prompt, &mut steps, listen)?)
        }
        _ => None,
    };
    let mut house = House {
        model,
        plan,
        options,
        end,
        pool: &pool,
        prefix,
        waiting: (0..plan.jobs.len()).collect(),
        told_to_wait: None,
        running: Vec::new(),
        answers: plan.jobs.iter().map(|_| Ok(Vec::new())).collect(),
        first_token: None,
        listen,
    };
    house.admit()?;
    while !house.running.is_empty() {
        house.step(&mut steps)?;
        house.admit()?;
    }
    assert!(
        house.waiting.is_empty(),
        "with nobody running there is room for whoever is not refused"
    );
    let House { answers, first_token, prefix, .. } = house;
    drop(prefix);
    Ok(Outcome {
        answers,
        elapsed: started.elapsed(),
        generating: first_token.map_or(Duration::ZERO, |first| first.elapsed()),
        prompt: steps.spent(Kind::Prompt),
        decode: steps.spent(Kind::Decode),
        bytes_per_token: pool.bytes_per_token(),
        peak: pool.peak(),
        handed_out: pool.handed_out(),
        free: pool.shared().free_groups(),
    })
}

/// Computes the common prefix into pages of its own, which outlive the sequence that filled them.
fn prefill_prefix<'p, E: Element>(
    model: &Model,
    pool: &'p Pool<E>,
    plan: &Plan,
    prompt: &[u32],
    steps: &mut Steps,
    listen: &mut dyn FnMut(Event),
) -> Result<Pages<'p, E>, Error> {
    let pages = pool.acquire(plan.prefix_blocks)?.expect("a new pool is free");
    let mut memory = PagedMemory::new(pool, None, pages)?;
    let of = plan.prefix;
    let tell = |done| listen(Event::Prefix { done, of });
    steps.prefill(model, &prompt[..of], &mut memory, tell)?;
    Ok(memory.into_pages())
}

/// Those who wait and those who run.
struct House<'p, 'l, E: Element> {
    model: &'p Model,
    plan: &'p Plan,
    options: &'p Options,
    end: Option<u32>,
    pool: &'p Pool<E>,
    prefix: Option<Pages<'p, E>>,
    waiting: VecDeque<usize>,
    /// The last one of whom it was told that it waits.
    told_to_wait: Option<usize>,
    running: Vec<Request<'p, E>>,
    answers: Vec<Result<Vec<u32>, Error>>,
    first_token: Option<Instant>,
    listen: &'l mut dyn FnMut(Event),
}

/// A request that runs.
struct Request<'p, E: Element> {
    number: usize,
    job: &'p Job,
    memory: PagedMemory<'p, E>,
    sampler: Sampler,
    tokens: Vec<u32>,
}

impl<E: Element> Request<'_, E> {
    /// What it feeds in the next step: of its prompt as long as there is some, then its newest
    /// token.
    fn next(&self) -> &[u32] {
        let held = self.memory.len();
        match self.job.prompt.get(held..) {
            Some(left) if !left.is_empty() => &left[..piece(left.len(), held)],
            _ => &self.tokens[self.tokens.len() - 1..],
        }
    }

    /// Whether the next step is one of its prompt.
    fn in_prompt(&self) -> bool {
        self.memory.len() < self.job.prompt.len()
    }
}

impl<'p, E: Element> House<'p, '_, E> {
    /// Lets in whoever is first in line, as long as there are blocks.
    fn admit(&mut self) -> Result<(), Error> {
        while let Some(&number) = self.waiting.front() {
            let job = &self.plan.jobs[number];
            // Looked at before it runs: in a step it would be everybody's error.
            let refusal =
                self.plan.refusal(job).map_or_else(|| self.model.check(&job.prompt, 0), Err);
            if let Err(refusal) = refusal {
                self.waiting.pop_front();
                self.end(number, Err(refusal));
                continue;
            }
            let need = job.own_blocks;
            let Some(own) = self.pool.acquire(need)? else {
                // Who waits behind the first one is told when it has become the first.
                if self.told_to_wait.replace(number) != Some(number) {
                    let free = self.pool.shared().free_groups();
                    (self.listen)(Event::Waits { request: number, need, free });
                }
                return Ok(());
            };
            self.waiting.pop_front();
            let memory = PagedMemory::new(self.pool, self.prefix.as_ref().map(Pages::share), own)?;
            let seed = self.options.seed.wrapping_add(number as u64);
            let sampler = Sampler::new(self.options.temperature, seed);
            let tokens = Vec::with_capacity(self.options.n);
            self.running.push(Request { number, job, memory, sampler, tokens });
        }
        Ok(())
    }

    /// One step of all who run.
    fn step(&mut self, steps: &mut Steps) -> Result<(), Error> {
        let in_prompt: Vec<bool> = self.running.iter().map(Request::in_prompt).collect();
        let kind = if in_prompt.contains(&true) { Kind::Prompt } else { Kind::Decode };
        let fed: Vec<Vec<u32>> = self.running.iter().map(|it| it.next().to_vec()).collect();
        let mut members: Vec<_> = self
            .running
            .iter_mut()
            .zip(&fed)
            .map(|(Request { memory, job, .. }, tokens)| {
                let last = memory.len() + tokens.len() >= job.prompt.len();
                let logits = if last { Logits::Last } else { Logits::None };
                Member { memory, tokens, logits }
            })
            .collect();
        let logits = steps.step(self.model, kind, &mut members)?;
        let mut still = Vec::with_capacity(self.running.len());
        let running = std::mem::take(&mut self.running);
        for ((mut request, logits), in_prompt) in running.into_iter().zip(logits).zip(in_prompt) {
            if in_prompt {
                let (done, of) = (request.memory.len(), request.job.prompt.len());
                (self.listen)(Event::Prefill { request: request.number, done, of });
            }
            if !logits.is_empty() && self.take(&mut request, &logits) {
                let Request { number, memory, tokens, .. } = request;
                drop(memory);
                self.end(number, Ok(tokens));
            } else {
                still.push(request);
            }
        }
        self.running = still;
        Ok(())
    }

    /// Picks a request's next token. Whether that was all.
    fn take(&mut self, request: &mut Request<'_, E>, logits: &[f32]) -> bool {
        let token = request.sampler.pick(logits);
        if Some(token) == self.end {
            return true;
        }
        request.tokens.push(token);
        self.first_token.get_or_insert_with(Instant::now);
        (self.listen)(Event::Token { request: request.number, token });
        request.tokens.len() == self.options.n
    }

    fn end(&mut self, number: usize, answer: Result<Vec<u32>, Error>) {
        self.answers[number] = answer;
        (self.listen)(Event::Ended { request: number });
    }
}
