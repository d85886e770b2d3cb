//! Who needs what, before anything runs: plain numbers, nothing taken.

use crate::error::Error;
use crate::model::Sizes;
use crate::options::Options;

/// What each request will do and how many blocks it can need.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The requests.
    pub jobs: Vec<Job>,
    /// Continuations of each request, and so answers to it. At least one.
    pub fork: usize,
    /// Blocks in each layer.
    pub pool_blocks: usize,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Positions that one answer can need, the prompt's included.
    pub positions: usize,
    /// Blocks for those, in each layer.
    pub blocks: usize,
}

impl Plan {
    /// Plans requests that take turns over these prompts.
    ///
    /// # Errors
    ///
    /// [`Error::Prompt`] for a prompt that is empty or, with its new tokens, beyond the model's
    /// context.
    pub fn new(prompts: &[Vec<u32>], options: &Options, sizes: &Sizes) -> Result<Self, Error> {
        let block_size = options.block_size;
        for prompt in prompts {
            if prompt.is_empty() {
                return Err(Error::Prompt("the prompt is empty".into()));
            }
            if prompt.len().saturating_add(options.n) > sizes.context {
                return Err(Error::Prompt(format!(
                    "{} prompt tokens and {} new ones exceed the {} positions of the model",
                    prompt.len(),
                    options.n,
                    sizes.context
                )));
            }
        }
        let jobs: Vec<Job> = (0..options.requests)
            .map(|request| {
                let prompt = prompts[request % prompts.len()].clone();
                let positions = prompt.len() + options.n;
                Job { prompt, positions, blocks: positions.div_ceil(block_size) }
            })
            .collect();
        let fork = options.fork;
        let all = jobs.iter().map(|job| job.blocks_of_all(fork, block_size)).sum();
        Ok(Plan { jobs, fork, pool_blocks: options.pool_blocks.unwrap_or(all) })
    }

    /// Answers there will be: those to one request stand together.
    pub fn answers(&self) -> usize {
        self.jobs.len() * self.fork
    }

    /// What an answer is called.
    pub fn name(&self, answer: usize) -> String {
        match self.fork {
            1 => format!("request {answer}"),
            fork => format!("request {}, continuation {}", answer / fork, answer % fork),
        }
    }

    /// Why no request can ever run, if so.
    pub fn refusal_of_all(&self) -> Option<Error> {
        let mut refusals = self.jobs.iter().map(|job| self.refusal(job));
        let first = refusals.next().flatten()?;
        refusals.all(|refusal| refusal.is_some()).then_some(first)
    }

    /// Why this request can never run, if so: one answer alone is more than the pool.
    pub fn refusal(&self, job: &Job) -> Option<Error> {
        (job.blocks > self.pool_blocks).then_some(Error::NeverFits {
            positions: job.positions,
            need: job.blocks,
            have: self.pool_blocks,
        })
    }
}

impl Job {
    /// Blocks for all continuations at once, which have the full blocks of the prompt in common.
    fn blocks_of_all(&self, fork: usize, block_size: usize) -> usize {
        let common = self.prompt.len() / block_size;
        common + fork * (self.blocks - common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes() -> Sizes {
        Sizes {
            layers: 1,
            width: 8,
            inner: 8,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            vocabulary: 1000,
            context: 1000,
            rope_base: 1e4,
            epsilon: 1e-5,
        }
    }

    fn options(requests: usize, block_size: usize) -> Options {
        let mut options = Options::new("m".into(), String::new());
        (options.requests, options.block_size, options.n) = (requests, block_size, 10);
        options
    }

    #[test]
    fn the_default_pool_is_what_all_can_need_at_once() {
        // 220 positions in blocks of 16, 64 and 1000.
        for (block_size, blocks) in [(16, 14), (64, 4), (1000, 1), (usize::MAX, 1)] {
            let plan = Plan::new(&[vec![1; 210]], &options(3, block_size), &sizes()).unwrap();
            assert!(plan.jobs.iter().all(|job| (job.positions, job.blocks) == (220, blocks)));
            assert_eq!((plan.answers(), plan.pool_blocks), (3, 3 * blocks));
        }
    }

    #[test]
    fn continuations_have_the_full_blocks_of_the_prompt_in_common() {
        let mut forked = options(2, 16);
        forked.fork = 5;
        // 13 of 14 blocks hold nothing but the prompt.
        let plan = Plan::new(&[vec![1; 210]], &forked, &sizes()).unwrap();
        assert_eq!((plan.answers(), plan.pool_blocks), (10, 2 * (13 + 5)));
        assert_eq!(plan.name(7), "request 1, continuation 2");
        assert_eq!(Plan::new(&[vec![1]], &options(9, 1), &sizes()).unwrap().name(7), "request 7");
    }

    #[test]
    fn what_cannot_run_is_said_before() {
        let too_long = [vec![1; 991]];
        let error = Plan::new(&too_long, &options(1, 16), &sizes()).unwrap_err();
        assert!(error.to_string().contains("1000 positions"), "{error}");
        let mut small = options(2, 16);
        small.pool_blocks = Some(13);
        let plan = Plan::new(&[vec![1; 210]], &small, &sizes()).unwrap();
        let refusal = plan.refusal_of_all().unwrap();
        assert!(matches!(refusal, Error::NeverFits { positions: 220, need: 14, have: 13 }));
        small.pool_blocks = Some(14);
        let plan = Plan::new(&[vec![1; 210]], &small, &sizes()).unwrap();
        assert!(plan.refusal(&plan.jobs[0]).is_none());
        small.pool_blocks = Some(13);
        // One that fits is enough for the others to be asked for.
        let plan = Plan::new(&[vec![1; 210], vec![1; 9]], &small, &sizes()).unwrap();
        assert!(plan.refusal(&plan.jobs[0]).is_some() && plan.refusal_of_all().is_none());
    }
}
