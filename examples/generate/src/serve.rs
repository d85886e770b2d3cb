//! Requests by turns over one store, told as events.
//!
//! Who runs and who waits is decided in `house`. Everything is told as an [`Event`]
//! when it happens, and added up in an [`Outcome`].

use std::time::{Duration, Instant};

use paged_kv::{Element, Int4, Int8, bf16, f16};

use crate::error::Error;
use crate::house::House;
use crate::model::Model;
use crate::options::{KvType, Options};
use crate::plan::Plan;
use crate::pool::Pool;
use crate::step::{Kind, Spent, Steps};

/// Something that happened to an answer.
///
/// Answers are counted through: those to one request stand together, and until its prompt is
/// computed the first of them stands for all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// It waits in line for blocks.
    Waits {
        /// Which.
        answer: usize,
        /// Blocks that it needs before it starts, in each layer.
        need: usize,
        /// Blocks that are free.
        free: usize,
    },
    /// It waits in line for another one's prompt, which begins alike and is being computed.
    Follows {
        /// Which.
        answer: usize,
        /// The other one.
        first: usize,
    },
    /// Its prompt has this many of its positions, found ones included.
    Prefill {
        /// Which.
        answer: usize,
        /// Positions in the store.
        done: usize,
        /// Positions there will be.
        of: usize,
    },
    /// It has its next token.
    Token {
        /// Which.
        answer: usize,
        /// The token.
        token: u32,
    },
    /// Blocks were short. It gave its own back, keeps its tokens and is first in line.
    Preempted {
        /// Which.
        answer: usize,
        /// Positions that it gave back.
        positions: usize,
    },
    /// It has ended, one way or the other, and its blocks are back.
    Ended {
        /// Which.
        answer: usize,
    },
}

/// What became of the requests.
#[derive(Debug)]
pub struct Outcome {
    /// New tokens of each answer, or why there are none.
    pub answers: Vec<Result<Vec<u32>, Error>>,
    /// From the start of the first prompt to the end of the last answer.
    pub elapsed: Duration,
    /// From the first new token of anybody to the end.
    pub generating: Duration,
    /// Steps in which prompts came in, or answers that had been preempted.
    pub prompt: Spent,
    /// Steps of new tokens alone.
    pub decode: Spent,
    /// Bytes of keys and values that a position takes, over all layers.
    pub bytes_per_token: usize,
    /// What was found and evicted, and who had to give way.
    pub account: Account,
    /// The most blocks held at once, in each layer, cached ones included.
    pub peak: usize,
    /// Blocks handed out over the run, in each layer.
    pub handed_out: usize,
    /// Blocks that nobody holds at the end, when the cache is gone too: all of them, or something
    /// leaked.
    pub free: usize,
}

/// How requests got on with each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Times that somebody was let in, those who came back included.
    pub admissions: usize,
    /// Of these, times that the prompt's beginning was found.
    pub hits: usize,
    /// Positions that were found and not computed again.
    pub tokens_saved: usize,
    /// Blocks of each layer that the cache gave back because they were short.
    pub evictions: u64,
    /// Times that somebody was preempted.
    pub preemptions: usize,
}

/// Runs all requests of a plan to their end, by the steps of `steps`.
/// `end` is the token that ends a text early.
///
/// # Errors
///
/// What stops everybody: a store that cannot be opened, a step that fails, a recount that is asked
/// for and finds something wrong. What stops one request is in [`Outcome::answers`].
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
    let mut house = House::new(model, plan, options, end, &pool, listen);
    while house.admit()? {
        house.step(&mut steps)?;
    }
    let left = house.leave();
    Ok(Outcome {
        answers: left.answers,
        elapsed: started.elapsed(),
        generating: left.first_token.map_or(Duration::ZERO, |first| first.elapsed()),
        prompt: steps.spent(Kind::Prompt),
        decode: steps.spent(Kind::Decode),
        bytes_per_token: pool.bytes_per_token(),
        account: left.account,
        peak: pool.peak(),
        handed_out: pool.handed_out(),
        free: pool.shared().free_groups(),
    })
}
