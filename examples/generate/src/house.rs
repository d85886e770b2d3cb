//! Who runs, who waits and who gives way, and what each does in the next step.
//!
//! ```text
//! waiting   3 4 5        in order of arrival, until there are blocks
//! running   0 1 2        each feeds a piece of its prompt or its newest token, all in one step
//! ```
//!
//! A request is let in when there are blocks for all of its tokens that are known, and one more.
//! Blocks for new tokens are taken as these come, oldest first, and where they are short
//!
//! 1. the prefix cache gives back what nobody uses, and when there is no more of that,
//! 2. the youngest who runs gives back its own. It keeps its tokens and is the first to be let in
//!    again, when it computes its prompt (what is not cached of it) and feeds its tokens once more.
//!
//! So the oldest always goes on. It fits, because a request that the whole pool could not hold is
//! not let in, and when it ends the next one is the oldest: everybody ends.
//!
//! Whoever does not fit waits in line. If a small request could slip past, a large one might wait
//! for ever. A request whose prompt begins like one that is being computed waits for that, to find
//! it instead of computing it a second time.

use std::collections::VecDeque;
use std::time::Instant;

use paged_kv::{Element, PagedKvError};

use crate::error::Error;
use crate::memory::PagedMemory;
use crate::model::{CHUNK, Logits, Model};
use crate::options::Options;
use crate::plan::{Job, Plan};
use crate::pool::{Pages, Pool};
use crate::prefixes::Prefixes;
use crate::sample::Sampler;
use crate::serve::{Account, Event};
use crate::step::{Kind, Member, Steps, piece};

/// Those who wait and those who run, both in order of arrival. Who runs came before who waits.
pub(crate) struct House<'p, 'l, E: Element> {
    model: &'p Model,
    plan: &'p Plan,
    options: &'p Options,
    end: Option<u32>,
    pool: &'p Pool<E>,
    prefixes: Option<Prefixes<'p, E>>,
    waiting: VecDeque<Request<'p>>,
    /// The last one of whom it was told that it waits.
    told_to_wait: Option<usize>,
    running: Vec<Running<'p, E>>,
    left: Left,
    listen: &'l mut dyn FnMut(Event),
}

/// What is left when all have ended.
pub(crate) struct Left {
    pub(crate) answers: Vec<Result<Vec<u32>, Error>>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) account: Account,
}

/// An answer to be given: all that is kept of it where its blocks are not.
struct Request<'p> {
    answer: usize,
    job: &'p Job,
    sampler: Sampler,
    tokens: Vec<u32>,
    /// Further answers, which begin where the prompt ends.
    forks: usize,
}

/// A request that runs.
struct Running<'p, E: Element> {
    request: Request<'p>,
    memory: PagedMemory<'p, E>,
}

/// What a request feeds in a step.
struct Fed {
    tokens: Vec<u32>,
    of_prompt: bool,
    logits: Logits,
}

impl<E: Element> Running<'_, E> {
    /// What it feeds next: of its prompt as long as there is some, then of its new tokens all that
    /// are not in its memory. That is the newest one, and more where it was preempted.
    fn next(&self) -> Fed {
        let Request { job, tokens, .. } = &self.request;
        let held = self.memory.len();
        let of_prompt = held < job.prompt.len();
        let fed = if of_prompt {
            let left = &job.prompt[held..];
            &left[..piece(left.len(), held)]
        } else {
            let left = &tokens[held - job.prompt.len()..];
            &left[..left.len().min(CHUNK)]
        };
        let last = held + fed.len() == self.request.known();
        let logits = if last { Logits::Last } else { Logits::None };
        Fed { tokens: fed.to_vec(), of_prompt, logits }
    }

    fn in_prompt(&self) -> bool {
        self.memory.len() < self.request.job.prompt.len()
    }
}

impl Request<'_> {
    /// Positions whose tokens are known.
    fn known(&self) -> usize {
        self.job.prompt.len() + self.tokens.len()
    }
}

impl<'p, 'l, E: Element> House<'p, 'l, E> {
    /// All wait.
    pub(crate) fn new(
        model: &'p Model,
        plan: &'p Plan,
        options: &'p Options,
        end: Option<u32>,
        pool: &'p Pool<E>,
        listen: &'l mut dyn FnMut(Event),
    ) -> Self {
        let waiting = plan.jobs.iter().enumerate().map(|(index, job)| {
            let sampler = sampler(options, index, 0);
            let (answer, forks) = (index * plan.fork, plan.fork - 1);
            Request { answer, job, sampler, tokens: Vec::new(), forks }
        });
        House {
            model,
            plan,
            options,
            end,
            pool,
            prefixes: options.share.then(|| Prefixes::new(pool)),
            waiting: waiting.collect(),
            told_to_wait: None,
            running: Vec::new(),
            left: Left {
                answers: (0..plan.answers()).map(|_| Ok(Vec::new())).collect(),
                first_token: None,
                account: Account::default(),
            },
            listen,
        }
    }

    /// Lets in whoever is first in line, as long as there are blocks. Whether anybody runs.
    pub(crate) fn admit(&mut self) -> Result<bool, Error> {
        while let Some(request) = self.waiting.pop_front() {
            // Looked at before it runs: in a step it would be everybody's error.
            if self.refusal(request.job).is_some() {
                for answer in request.answer..=request.answer + request.forks {
                    let refusal = self.refusal(request.job).map_or(Ok(Vec::new()), Err);
                    self.end(answer, refusal);
                }
                continue;
            }
            match self.enter(&request)? {
                Some(memory) => self.running.push(Running { request, memory }),
                None => {
                    self.waiting.push_front(request);
                    break;
                }
            }
        }
        let empty = self.running.is_empty();
        assert!(!empty || self.waiting.is_empty(), "nobody runs, so there is room for the first");
        Ok(!empty)
    }

    fn refusal(&self, job: &Job) -> Option<Error> {
        let never = self.pool.refusal(job.positions);
        never.or_else(|| self.model.check(&job.prompt, 0).err())
    }

    /// The memory of a request that is let in, or `None` where it has to wait.
    fn enter(&mut self, request: &Request<'p>) -> Result<Option<PagedMemory<'p, E>>, Error> {
        let (answer, prompt) = (request.answer, &request.job.prompt);
        if let Some(first) = self.to_follow(prompt) {
            self.tell_of_wait(answer, Event::Follows { answer, first });
            return Ok(None);
        }
        let found = match &mut self.prefixes {
            Some(prefixes) => prefixes.find(prompt),
            None => Pages::none(self.pool),
        };
        // With room for no more than is known, it might be the first to give way again.
        let positions = request.job.positions.min(request.known() + 1);
        let blocks = found.groups().len();
        let need = positions.div_ceil(self.pool.block_size()) - blocks;
        let own = match &mut self.prefixes {
            Some(prefixes) => prefixes.acquire(need),
            None => self.pool.acquire(need),
        };
        let Some(own) = own else {
            let free = self.pool.shared().free_groups();
            self.tell_of_wait(answer, Event::Waits { answer, need, free });
            return Ok(None);
        };
        let account = &mut self.left.account;
        account.admissions += 1;
        account.hits += usize::from(blocks > 0);
        account.tokens_saved += blocks * self.pool.block_size();
        PagedMemory::begin(found, own).map(Some)
    }

    /// Who computes more of this prompt than is to be found of it now.
    fn to_follow(&self, prompt: &[u32]) -> Option<usize> {
        let prefixes = self.prefixes.as_ref()?;
        let found = prefixes.peek(prompt);
        let more = |it: &&Running<'_, E>| {
            it.in_prompt() && prefixes.in_common(&it.request.job.prompt, prompt) > found
        };
        self.running.iter().find(more).map(|it| it.request.answer)
    }

    /// Who waits behind the first one is told of when it has become the first.
    fn tell_of_wait(&mut self, answer: usize, event: Event) {
        if self.told_to_wait.replace(answer) != Some(answer) {
            (self.listen)(event);
        }
    }

    /// One step of all who run.
    pub(crate) fn step(&mut self, steps: &mut Steps) -> Result<(), Error> {
        self.make_room()?;
        let fed: Vec<Fed> = self.running.iter().map(Running::next).collect();
        let new = |fed: &Fed| !fed.of_prompt && fed.tokens.len() == 1;
        let kind = if fed.iter().all(new) { Kind::Decode } else { Kind::Prompt };
        let mut members: Vec<_> = self
            .running
            .iter_mut()
            .zip(&fed)
            .map(|(Running { memory, .. }, fed)| {
                let Fed { tokens, of_prompt, logits } = fed;
                Member { memory, tokens, apart: !of_prompt, logits: *logits }
            })
            .collect();
        if members.is_empty() {
            return Ok(());
        }
        let logits = steps.step(self.model, kind, &mut members)?;
        let running = std::mem::take(&mut self.running);
        for ((mut running, fed), logits) in running.into_iter().zip(&fed).zip(logits) {
            if fed.of_prompt {
                self.prompt_went_on(&mut running)?;
            }
            if logits.is_empty() {
                self.running.push(running);
                continue;
            }
            let forks = self.fork(&mut running)?;
            for running in [running].into_iter().chain(forks) {
                self.take(running, &logits);
            }
        }
        if self.options.check { self.check() } else { Ok(()) }
    }

    /// Room for the next step of everybody who then still runs.
    fn make_room(&mut self) -> Result<(), Error> {
        let mut at = 0;
        while let Some(running) = self.running.get_mut(at) {
            let n = running.next().tokens.len();
            let short = match running.memory.reserve(n) {
                Ok(()) => {
                    at += 1;
                    continue;
                }
                Err(PagedKvError::Exhausted(short)) => short.need.saturating_sub(short.free),
                Err(refused) => return Err(Error::kv(refused)),
            };
            if self.prefixes.as_mut().is_none_or(|it| it.evict(short) == 0) {
                self.preempt();
            }
        }
        Ok(())
    }

    /// The youngest gives its blocks back and is the first in line.
    fn preempt(&mut self) {
        let Running { request, memory } = self.running.pop().expect("somebody asked for room");
        let (answer, positions) = (request.answer, memory.len());
        drop(memory);
        self.left.account.preemptions += 1;
        self.waiting.push_front(request);
        (self.listen)(Event::Preempted { answer, positions });
    }

    /// Tells of a prompt, and stores it when it is complete.
    fn prompt_went_on(&mut self, running: &mut Running<'p, E>) -> Result<(), Error> {
        let Running { request, memory } = running;
        let (done, of) = (memory.len(), request.job.prompt.len());
        (self.listen)(Event::Prefill { answer: request.answer, done, of });
        if done == of {
            let stored = match &mut self.prefixes {
                Some(prefixes) => prefixes.insert(&request.job.prompt, memory.pages())?,
                None => 0,
            };
            memory.keep_groups(stored);
        }
        Ok(())
    }

    /// The further answers to a request whose first token is due.
    fn fork(&self, running: &mut Running<'p, E>) -> Result<Vec<Running<'p, E>>, Error> {
        let Running { request, memory } = running;
        let forks = std::mem::take(&mut request.forks);
        let index = request.answer / self.plan.fork;
        let fork = |continuation| {
            let request = Request {
                answer: request.answer + continuation,
                job: request.job,
                sampler: sampler(self.options, index, continuation),
                tokens: Vec::new(),
                forks: 0,
            };
            Ok(Running { request, memory: memory.fork()? })
        };
        (1..=forks).map(fork).collect()
    }

    /// Picks a request's next token. It runs on, or that was all.
    fn take(&mut self, mut running: Running<'p, E>, logits: &[f32]) {
        let request = &mut running.request;
        let token = request.sampler.pick(logits);
        let mut all = Some(token) == self.end;
        if !all {
            request.tokens.push(token);
            self.left.first_token.get_or_insert_with(Instant::now);
            (self.listen)(Event::Token { answer: request.answer, token });
            all = request.tokens.len() == self.options.n;
        }
        if all {
            let Running { request, memory } = running;
            drop(memory);
            self.end(request.answer, Ok(request.tokens));
        } else {
            self.running.push(running);
        }
    }

    fn end(&mut self, answer: usize, tokens: Result<Vec<u32>, Error>) {
        self.left.answers[answer] = tokens;
        (self.listen)(Event::Ended { answer });
    }

    /// Recounts every block, every group and the cache from those who run.
    fn check(&self) -> Result<(), Error> {
        let waiting = self.waiting.iter().map(|request| request.answer);
        let in_order = self.running.iter().map(|it| it.request.answer).chain(waiting);
        assert!(in_order.is_sorted(), "who runs came before who waits");
        let holders = self.running.iter().flat_map(|it| it.memory.holders());
        match &self.prefixes {
            Some(prefixes) => {
                prefixes.check(self.running.iter().map(|it| it.memory.pages()), holders)
            }
            None => self.pool.shared().check_invariants(holders).map_err(Error::kv),
        }
    }

    /// What is left when all have ended. The cache goes.
    pub(crate) fn leave(mut self) -> Left {
        let evictions = self.prefixes.as_ref().map_or(0, Prefixes::evicted);
        self.left.account.evictions = evictions;
        self.left
    }
}

/// The sampler of a continuation of a request.
fn sampler(options: &Options, request: usize, continuation: usize) -> Sampler {
    let seed = options.seed.wrapping_add(request as u64);
    Sampler::new(options.temperature, Sampler::seed_of(seed, continuation))
}
