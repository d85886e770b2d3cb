//! What the tests share: the reference, and requests by the dozen.
#![allow(dead_code, reason = "each test uses its own part of this")]

pub(crate) mod tiny;

use std::io::{Read, Seek};

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use generate::memory::PagedMemory;
use generate::model::{Logits, Model};
use generate::options::{KvType, Options};
use generate::plan::Plan;
use generate::pool::Pool;
use generate::sample::likeliest;
use generate::serve::{self, Event, Outcome};
use generate::step::{Kind, Member, Steps, piece};
use paged_kv::{Element, Level};

/// Threads of attention in every test that does not say otherwise.
pub(crate) const THREADS: usize = 2;

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
    let pool = Pool::<f32>::new(model.sizes(), block_size, blocks).unwrap();
    let mut memory = PagedMemory::new(&pool);
    let mut steps = Steps::new(Level::detect(), THREADS);
    let mut feed = prompt.to_vec();
    let mut at = 0;
    let mut tally = Tally::default();
    for _ in 0..new {
        let input = Tensor::new(feed.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let theirs = reference.forward(&input, at).unwrap();
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let ours = steps.prefill(model, &feed, &mut memory, |_| ()).unwrap();
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

/// The best token at each position behind each prompt, and how far the second is behind.
pub(crate) type Choices = Vec<Vec<(u32, f32)>>;

/// What a stored type would choose at `new` positions behind each prompt, all prompts in one batch.
///
/// Fed are the tokens of `teacher`, if there is one, and otherwise those chosen: with a teacher,
/// one difference does not hide the next.
pub(crate) fn choices<E: Element>(
    model: &Model,
    prompts: &[Vec<u32>],
    new: usize,
    teacher: Option<&Choices>,
) -> Choices {
    let need = |prompt: &Vec<u32>| (prompt.len() + new).div_ceil(64);
    let pool = Pool::<E>::new(model.sizes(), 64, prompts.iter().map(need).sum()).unwrap();
    let mut memories: Vec<_> = prompts.iter().map(|_| PagedMemory::new(&pool)).collect();
    let mut steps = Steps::new(Level::detect(), THREADS);
    let mut chosen: Choices = prompts
        .iter()
        .zip(&mut memories)
        .map(|(prompt, memory)| vec![lead(&steps.prefill(model, prompt, memory, |_| ()).unwrap())])
        .collect();
    for position in 1..new {
        let fed = teacher.unwrap_or(&chosen);
        let tokens: Vec<_> = fed.iter().map(|fed| [fed[position - 1].0]).collect();
        let mut members: Vec<_> = memories
            .iter_mut()
            .zip(&tokens)
            .map(|(memory, tokens)| Member { memory, tokens, apart: true, logits: Logits::Last })
            .collect();
        let logits = steps.step(model, Kind::Decode, &mut members).unwrap();
        chosen.iter_mut().zip(logits).for_each(|(chosen, logits)| chosen.push(lead(&logits)));
    }
    chosen
}

/// The perplexity of a text, each token after the first being guessed from all before it.
pub(crate) fn perplexity<E: Element>(model: &Model, text: &[u32], level: Level) -> f64 {
    let blocks = text.len().div_ceil(64);
    let pool = Pool::<E>::new(model.sizes(), 64, blocks).unwrap();
    let mut memory = PagedMemory::new(&pool);
    let mut steps = Steps::new(level, THREADS);
    let mut surprise = 0.0;
    while memory.len() < text.len() {
        let held = memory.len();
        let tokens = &text[held..][..piece(text.len() - held, held)];
        let member = Member { memory: &mut memory, tokens, apart: false, logits: Logits::All };
        let logits = steps.step(model, Kind::Prompt, &mut [member]).unwrap().remove(0);
        let rows = logits.chunks_exact(model.sizes().vocabulary);
        for (row, &next) in rows.zip(&text[held + 1..]) {
            let top = f64::from(row[likeliest(row) as usize]);
            let sum: f64 = row.iter().map(|&logit| (f64::from(logit) - top).exp()).sum();
            surprise += sum.ln() + top - f64::from(row[next as usize]);
        }
    }
    (surprise / (text.len() - 1) as f64).exp()
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
    told(model, prompts, level, options, &mut |_| ())
}

/// As [`serve`], with every event told.
pub(crate) fn told(
    model: &Model,
    prompts: &[Vec<u32>],
    level: Level,
    options: &Options,
    listen: &mut dyn FnMut(Event),
) -> Outcome {
    let plan = Plan::new(prompts, options, model.sizes()).unwrap();
    let steps = Steps::new(level, options.threads.unwrap_or(THREADS));
    let outcome = serve::run(model, &plan, options, steps, None, listen).unwrap();
    assert_eq!(outcome.free, plan.pool_blocks, "every block is back");
    outcome
}

/// Options for a number of requests with this many new tokens each. All blocks are recounted after
/// each step.
pub(crate) fn options(requests: usize, n: usize) -> Options {
    let mut options = Options::new("unused".into(), String::new());
    (options.requests, options.n, options.check) = (requests, n, true);
    options
}

/// What [`all_say_the_same`] has seen.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Seen {
    pub(crate) answers: usize,
    pub(crate) hits: usize,
    pub(crate) preemptions: usize,
}

/// Asserts that 1, 2 and 8 requests say the same, whether they find each other's prompts or not,
/// with as many blocks as they want and with hardly more than the longest one needs, for these
/// block sizes, and that they say what each prompt says alone.
pub(crate) fn all_say_the_same(
    model: &Model,
    prompts: &[Vec<u32>; 8],
    n: usize,
    block_sizes: &[usize],
    level: Level,
    kv_type: KvType,
) -> Seen {
    let alone: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| {
            let mut options = options(1, n);
            (options.kv_type, options.threads) = (kv_type, Some(1));
            let mut outcome = serve(model, std::slice::from_ref(prompt), level, &options);
            outcome.answers.remove(0).unwrap()
        })
        .collect();
    let mut seen = Seen::default();
    for &block_size in block_sizes {
        let longest = prompts.iter().map(Vec::len).max().unwrap();
        let tight = Some((longest + n).div_ceil(block_size) + 2);
        for (requests, share, pool_blocks) in [
            (1, true, None),
            (2, true, None),
            (2, false, None),
            (8, true, None),
            (8, false, None),
            (8, true, tight),
        ] {
            let mut options = options(requests, n);
            (options.block_size, options.share, options.kv_type) = (block_size, share, kv_type);
            options.pool_blocks = pool_blocks;
            let outcome = serve(model, prompts, level, &options);
            for (request, answer) in outcome.answers.iter().enumerate() {
                let answer = answer.as_ref().unwrap();
                assert_eq!(
                    answer,
                    &alone[request],
                    "request {request} of {requests}, blocks of {block_size}, share {share}, \
                     {pool_blocks:?}, {}",
                    kv_type.name()
                );
            }
            seen.answers += requests;
            seen.hits += outcome.account.hits;
            seen.preemptions += outcome.account.preemptions;
        }
    }
    seen
}
