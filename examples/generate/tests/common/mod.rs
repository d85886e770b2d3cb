//! What the tests share: the reference, and requests by the dozen.
#![allow(dead_code, reason = "each test uses its own part of this")]

pub(crate) mod tiny;

use std::io::{Read, Seek};

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use generate::memory::PagedMemory;
use generate::model::Model;
use generate::options::Options;
use generate::plan::Plan;
use generate::pool::Pool;
use generate::sample::likeliest;
use generate::serve::{self, Outcome};
use paged_kv::Level;

/// Where two logits of the reference are nearer than this, rounding may decide between them.
pub(crate) const TIE: f32 = 1e-3;

/// candle's own Llama over the same file.
pub(crate) fn reference<R: Read + Seek>(mut file: R) -> ModelWeights {
    let content = Content::read(&mut file).unwrap();
    ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap()
}

/// What a comparison found.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) compared: usize,
    pub(crate) differing: usize,
    pub(crate) largest: f32,
    pub(crate) tokens: Vec<u32>,
}

/// Feeds one prompt and then the reference's own tokens to both, and compares every position.
///
/// Our prompt goes in by chunks and the reference's at once, so that this is also a test of the
/// chunks. The reference's token is fed whatever ours was: one difference does not hide the next.
pub(crate) fn compare(
    model: &Model,
    reference: &mut ModelWeights,
    prompt: &[u32],
    new: usize,
    block_size: usize,
) -> Tally {
    let blocks = (prompt.len() + new).div_ceil(block_size);
    let pool = Pool::new(model.sizes(), block_size, blocks).unwrap();
    let pages = pool.acquire(blocks, |_| ()).unwrap();
    let mut memory = PagedMemory::new(&pool, None, pages, Level::detect()).unwrap();
    let mut feed = prompt.to_vec();
    let mut at = 0;
    let mut tally = Tally::default();
    for _ in 0..new {
        let input = Tensor::new(feed.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let theirs = reference.forward(&input, at).unwrap();
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ours = model.prefill(&feed, &mut memory, |_| ()).unwrap();
        at += feed.len();
        let apart = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
        tally.largest = tally.largest.max(apart.fold(0.0, f32::max));
        tally.compared += 1;
        let (best, ahead) = lead(&theirs);
        if likeliest(&ours) != best {
            tally.differing += 1;
            println!("another token at position {at}, where the reference's lead is {ahead:e}");
            assert!(ahead <= TIE, "a clear choice of the reference was not ours");
        }
        tally.tokens.push(best);
        feed = vec![best];
    }
    tally
}

/// The best token and how far the second is behind.
fn lead(logits: &[f32]) -> (u32, f32) {
    let best = likeliest(logits);
    let others = logits.iter().enumerate().filter(|&(token, _)| token != best as usize);
    let second = others.fold(f32::NEG_INFINITY, |second, (_, &logit)| second.max(logit));
    (best, logits[best as usize] - second)
}

/// Runs requests over some prompts, to the last token or to none.
pub(crate) fn serve(
    model: &Model,
    prompts: &[Vec<u32>],
    level: Level,
    options: &Options,
) -> Outcome {
    let plan = Plan::new(prompts, options, model.sizes()).unwrap();
    let outcome = serve::run(model, &plan, options, level, None, &mut |_| ()).unwrap();
    assert_eq!(outcome.free, plan.pool_blocks, "every block is back");
    outcome
}

/// Options for a number of requests with this many new tokens each.
pub(crate) fn options(requests: usize, n: usize) -> Options {
    let mut options = Options::new("unused".into(), String::new());
    (options.requests, options.n) = (requests, n);
    options
}

/// Asserts that 1, 2 and 8 requests say the same, with and without a shared prefix, for these
/// block sizes, and that they say what each prompt says alone. Gives the number of answers.
pub(crate) fn all_say_the_same(
    model: &Model,
    prompts: &[Vec<u32>; 8],
    n: usize,
    block_sizes: &[usize],
    level: Level,
) -> usize {
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut outcome = serve(model, std::slice::from_ref(prompt), level, &options(1, n));
            outcome.answers.remove(0).unwrap()
        })
        .collect();
    let mut answers = 0;
    for &block_size in block_sizes {
        for (requests, share) in [(1, true), (2, true), (2, false), (8, true), (8, false)] {
            let mut options = options(requests, n);
            (options.block_size, options.share) = (block_size, share);
            let outcome = serve(model, prompts, level, &options);
            for (request, answer) in outcome.answers.iter().enumerate() {
                let answer = answer.as_ref().unwrap();
                assert_eq!(
                    answer, &alone[request],
                    "request {request} of {requests}, blocks of {block_size}, share {share}"
                );
                answers += 1;
            }
        }
    }
    answers
}
