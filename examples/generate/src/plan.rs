//! Who needs what, before anything runs: plain numbers, nothing taken.

use crate::error::Error;
use crate::model::{CHUNK, Sizes};
use crate::options::Options;

/// What each request will do and how many blocks it can need.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Positions at the start that all requests share, prefilled once. 0 where nothing is shared.
    pub prefix: usize,
    /// Blocks of the prefix, in each layer.
    pub prefix_blocks: usize,
    /// The requests.
    pub jobs: Vec<Job>,
    /// Blocks in each layer.
    pub pool_blocks: usize,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The whole prompt, prefix included.
    pub prompt: Vec<u32>,
    /// Positions it can need, prefix included.
    pub positions: usize,
    /// Blocks of its own, in each layer.
    pub own_blocks: usize,
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
        let used = &prompts[..options.requests.min(prompts.len())];
        let share = options.share && options.requests > 1;
        let prefix = if share { common_prefix(used, block_size) } else { 0 };
        let prefix_blocks = prefix / block_size;
        let jobs: Vec<Job> = (0..options.requests)
            .map(|request| {
                let prompt = used[request % used.len()].clone();
                let positions = prompt.len() + options.n;
                let own_blocks = positions.div_ceil(block_size) - prefix_blocks;
                Job { prompt, positions, own_blocks }
            })
            .collect();
        let all = jobs.iter().map(|job| job.own_blocks).sum::<usize>() + prefix_blocks;
        Ok(Plan { prefix, prefix_blocks, jobs, pool_blocks: options.pool_blocks.unwrap_or(all) })
    }

    /// Why no request can ever run, if so.
    pub fn refusal_of_all(&self) -> Option<Error> {
        let mut refusals = self.jobs.iter().map(|job| self.refusal(job));
        let first = refusals.next().flatten()?;
        refusals.all(|refusal| refusal.is_some()).then_some(first)
    }

    /// Why this request can never run, if so.
    pub fn refusal(&self, job: &Job) -> Option<Error> {
        // The prefix counts: it is held as long as anybody runs.
        let need = job.own_blocks + self.prefix_blocks;
        (need > self.pool_blocks).then_some(Error::NeverFits {
            positions: job.positions,
            need,
            have: self.pool_blocks,
        })
    }
}

/// How many positions all prompts have in common that can be prefilled once.
///
/// Whole blocks, because a block is adopted whole, and whole chunks, because the products of a
/// chunk must not be cut in two (see [`model`](crate::model)). One token of every prompt is left
/// out of it: somebody has to compute its logits.
fn common_prefix(prompts: &[Vec<u32>], block_size: usize) -> usize {
    let Some((first, others)) = prompts.split_first() else {
        return 0;
    };
    let common = others.iter().fold(first.len(), |common, other| {
        first.iter().zip(other).take(common).take_while(|(a, b)| a == b).count()
    });
    let shortest = prompts.iter().map(Vec::len).min().unwrap_or(0);
    let common = common.min(shortest.saturating_sub(1));
    let step = CHUNK / gcd(CHUNK, block_size);
    // A step so large that it overflows is larger than any prompt.
    step.checked_mul(block_size).map_or(0, |step| common - common % step)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
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

    /// 200 common tokens, then 10 of its own.
    fn prompt(last: u32) -> Vec<u32> {
        (0..200).chain([last; 10]).collect()
    }

    #[test]
    fn prefixes_are_whole_blocks_and_whole_chunks() {
        let prompts = [prompt(300), prompt(301)];
        for (block_size, prefix) in [(16, 192), (64, 192), (48, 192), (128, 128), (100, 0)] {
            let plan = Plan::new(&prompts, &options(2, block_size), &sizes()).unwrap();
            assert_eq!(plan.prefix, prefix, "block size {block_size}");
            let own = 220usize.div_ceil(block_size) - prefix / block_size;
            assert!(plan.jobs.iter().all(|job| job.own_blocks == own));
            assert_eq!(plan.pool_blocks, 2 * own + prefix / block_size);
        }
        assert_eq!(Plan::new(&prompts, &options(2, usize::MAX), &sizes()).unwrap().prefix, 0);
    }

    #[test]
    fn a_token_is_left_to_compute() {
        let prompts = [(0..128).collect::<Vec<u32>>()];
        assert_eq!(Plan::new(&prompts, &options(3, 16), &sizes()).unwrap().prefix, 64);
    }

    #[test]
    fn alone_or_unwilling_nobody_shares() {
        let prompts = [prompt(300)];
        assert_eq!(Plan::new(&prompts, &options(1, 16), &sizes()).unwrap().prefix, 0);
        let mut unwilling = options(4, 16);
        unwilling.share = false;
        assert_eq!(Plan::new(&prompts, &unwilling, &sizes()).unwrap().prefix, 0);
    }

    #[test]
    fn prompts_that_no_request_takes_do_not_count() {
        let prompts = [prompt(300), prompt(301), vec![7]];
        assert_eq!(Plan::new(&prompts, &options(2, 64), &sizes()).unwrap().prefix, 192);
    }

    #[test]
    fn what_cannot_run_is_said_before() {
        let too_long = [vec![1; 991]];
        let error = Plan::new(&too_long, &options(1, 16), &sizes()).unwrap_err();
        assert!(error.to_string().contains("1000 positions"), "{error}");
        let mut small = options(2, 16);
        small.pool_blocks = Some(13);
        let plan = Plan::new(&[prompt(300)], &small, &sizes()).unwrap();
        let refusal = plan.refusal(&plan.jobs[0]).unwrap();
        assert!(matches!(refusal, Error::NeverFits { positions: 220, need: 14, have: 13 }));
        small.pool_blocks = Some(14);
        let plan = Plan::new(&[prompt(300)], &small, &sizes()).unwrap();
        assert!(plan.refusal(&plan.jobs[0]).is_none());
    }
}
