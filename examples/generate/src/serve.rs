//! Requests on threads over one store.
//!
//! Each request is a thread of its own with a memory of its own; what they share is the store, the
//! weights and the threads of the products. The caller's thread only listens: every step is told
//! to it as an [`Event`], so that printing is never in the way of computing.

use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use paged_kv::Level;

use crate::error::Error;
use crate::memory::PagedMemory;
use crate::model::{Memory, Model};
use crate::options::Options;
use crate::plan::{Job, Plan};
use crate::pool::{Pages, Pool};
use crate::sample::Sampler;

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
    /// The most blocks held at once, in each layer.
    pub peak: usize,
    /// Blocks handed out over the run, in each layer.
    pub handed_out: usize,
    /// Blocks that no request and no prefix holds at the end: all of them, or something leaked.
    pub free: usize,
}

/// What every request needs to know.
#[derive(Clone, Copy)]
struct Context<'p> {
    model: &'p Model,
    pool: &'p Pool,
    prefix: Option<&'p Pages<'p>>,
    options: &'p Options,
    level: Level,
    end: Option<u32>,
}

/// Runs all requests of a plan to their end. `end` is the token that ends a text early.
///
/// # Errors
///
/// What stops everybody: a store that cannot be opened, a prefix that cannot be computed. What
/// stops one request is in [`Outcome::answers`].
pub fn run(
    model: &Model,
    plan: &Plan,
    options: &Options,
    level: Level,
    end: Option<u32>,
    listen: &mut dyn FnMut(Event),
) -> Result<Outcome, Error> {
    let started = Instant::now();
    let pool = Pool::new(model.sizes(), options.block_size, plan.pool_blocks)?;
    let prefix = match plan.jobs.first() {
        Some(job) if plan.prefix > 0 && plan.refusal_of_all().is_none() => {
            Some(prefill_prefix(model, &pool, plan, &job.prompt, level, listen)?)
        }
        _ => None,
    };
    let context = Context { model, pool: &pool, prefix: prefix.as_ref(), options, level, end };
    let mut first_token = None;
    let answers = thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let threads: Vec<_> = plan
            .jobs
            .iter()
            .enumerate()
            .map(|(request, job)| {
                let tell = tell.clone();
                let refusal = plan.refusal(job);
                scope.spawn(move || {
                    let _ended = Ended { request, tell: &tell };
                    refusal.map_or_else(|| answer(context, request, job, &tell), Err)
                })
            })
            .collect();
        drop(tell);
        for event in told {
            if matches!(event, Event::Token { .. }) {
                first_token.get_or_insert_with(Instant::now);
            }
            listen(event);
        }
        let join = |(request, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
            thread.join().unwrap_or(Err(Error::Panicked { request }))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    drop(prefix);
    Ok(Outcome {
        answers,
        elapsed: started.elapsed(),
        generating: first_token.map_or(Duration::ZERO, |first| first.elapsed()),
        peak: pool.peak(),
        handed_out: pool.handed_out(),
        free: pool.shared().free_groups(),
    })
}

/// Computes the common prefix into pages of its own, which outlive the sequence that filled them.
fn prefill_prefix<'p>(
    model: &Model,
    pool: &'p Pool,
    plan: &Plan,
    prompt: &[u32],
    level: Level,
    listen: &mut dyn FnMut(Event),
) -> Result<Pages<'p>, Error> {
    let pages = pool.acquire(plan.prefix_blocks, |_| ())?;
    let mut memory = PagedMemory::new(pool, None, pages, level)?;
    let of = plan.prefix;
    model.prefill(&prompt[..of], &mut memory, |done| listen(Event::Prefix { done, of }))?;
    Ok(memory.into_pages())
}

/// One request from its place in line to its last token.
fn answer(
    context: Context<'_>,
    request: usize,
    job: &Job,
    tell: &Sender<Event>,
) -> Result<Vec<u32>, Error> {
    // Nobody listens any more if the listener has panicked; the request still ends in order.
    let tell = |event| _ = tell.send(event);
    let Context { model, pool, options, .. } = context;
    let need = job.own_blocks;
    let own = pool.acquire(need, |free| tell(Event::Waits { request, need, free }))?;
    let mut memory = PagedMemory::new(pool, context.prefix.map(Pages::share), own, context.level)?;
    let mut sampler = Sampler::new(options.temperature, options.seed.wrapping_add(request as u64));
    let left = &job.prompt[memory.len()..];
    let of = job.prompt.len();
    let mut logits =
        model.prefill(left, &mut memory, |done| tell(Event::Prefill { request, done, of }))?;
    let mut tokens = Vec::with_capacity(options.n);
    loop {
        let token = sampler.pick(&logits);
        if Some(token) == context.end {
            return Ok(tokens);
        }
        tokens.push(token);
        tell(Event::Token { request, token });
        if tokens.len() == options.n {
            return Ok(tokens);
        }
        logits = model.forward(&[token], &mut memory)?;
    }
}

/// Tells the end of a request even if it ends by a panic.
struct Ended<'a> {
    request: usize,
    tell: &'a Sender<Event>,
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        _ = self.tell.send(Event::Ended { request: self.request });
    }
}
