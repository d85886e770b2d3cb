//! The real model, token for token: against candle's own quantized Llama, against itself in
//! company, and stored narrowly against stored as f32.
//!
//! Ignored unless asked for, since it needs the file. In release: candle is slow without.
//!
//! ```text
//! PAGED_KV_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf CANDLE_DEQUANTIZE_ALL=1 \
//!     cargo test --release -p generate --test proof -- --ignored --nocapture --test-threads 1
//! ```

mod common;

use std::fs::File;
use std::path::PathBuf;

use common::{Choices, all_say_the_same, choices, compare, options, perplexity, reference, serve};
use generate::gguf::Gguf;
use generate::model::Model;
use generate::options::KvType;
use generate::sample::Sampler;
use generate::tokenizer::Vocabulary;
use paged_kv::{Element, Int4, Int8, Level, bf16, f16};

/// New tokens compared for each prompt.
const NEW: usize = 64;

const LICENCE: &str = include_str!("../../../LICENSE-APACHE");

fn model_path() -> PathBuf {
    std::env::var_os("PAGED_KV_MODEL").expect("PAGED_KV_MODEL names the model file").into()
}

fn load() -> (Vocabulary, Model) {
    let mut file = Gguf::open(&model_path()).unwrap();
    let vocabulary = Vocabulary::new(&file).unwrap();
    (vocabulary, Model::load(&mut file, 2).unwrap())
}

/// Ten prompts of 5 to 600 tokens: speech, prose, a list, code and a licence.
fn prompts(vocabulary: &Vocabulary) -> Vec<Vec<u32>> {
    let code = include_str!("proof/code.txt");
    let chat = "<|im_start|>user\nWhat does a librarian do all day?<|im_end|>\n\
                <|im_start|>assistant\n";
    let list = "Numbers and their squares: 1 1, 2 4, 3 9, 4 16, 5 25, 6 36, 7 49, 8";
    let tale = "The ferry left at dawn. On the deck stood a baker, a judge and a boy with a \
                cage, and none of them had paid. The captain, who had seen worse, looked at the \
                cage and asked";
    [
        ("The capital of France is", 5),
        ("Once upon a time, in a house by the sea,", 12),
        (chat, 17),
        (list, 40),
        (tale, 43),
        (code, 100),
        (LICENCE, 150),
        (code, 257),
        (LICENCE, 400),
        (LICENCE, 600),
    ]
    .iter()
    .map(|&(text, len)| {
        let mut tokens = vocabulary.encode(text).unwrap();
        tokens.truncate(len);
        assert!(tokens.len() + 1 >= len, "{text:?} has {} tokens", tokens.len());
        tokens
    })
    .collect()
}

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn tokens_equal_those_of_the_reference() {
    assert_eq!(
        std::env::var("CANDLE_DEQUANTIZE_ALL").as_deref(),
        Ok("1"),
        "the reference must multiply in f32 too: set CANDLE_DEQUANTIZE_ALL=1"
    );
    let (vocabulary, model) = load();
    let mut reference = reference(File::open(model_path()).unwrap());
    let (mut largest, mut differing, mut compared) = (0.0f32, 0, 0);
    let prompts = prompts(&vocabulary);
    let mut theirs = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let block_size = [16, 32, 64][index % 3];
        let tally = compare(&model, &mut reference, prompt, NEW, block_size);
        println!(
            "{:3} tokens, blocks of {block_size}: logits at most {:e} apart, {} of {} tokens \
             differ; {:?}",
            prompt.len(),
            tally.largest,
            tally.differing,
            tally.compared,
            vocabulary.decode(&tally.tokens[..12]).unwrap()
        );
        largest = largest.max(tally.largest);
        differing += tally.differing;
        compared += tally.compared;
        theirs.push(tally.tokens);
    }
    println!("{compared} positions, {differing} differ, logits at most {largest:e} apart");
    assert_eq!(compared, 10 * NEW);
    if differing > 0 {
        println!("a tie went the other way, so texts that run free may part and are not compared");
        return;
    }
    // The same tokens again, now chosen freely and in company.
    for (threads, batch) in [(1, 8), (2, 1), (2, 2), (2, 8)] {
        for (prompts, theirs) in prompts.chunks(batch).zip(theirs.chunks(batch)) {
            let mut options = options(prompts.len(), NEW);
            options.threads = Some(threads);
            let outcome = serve(&model, prompts, Level::detect(), &options);
            for (ours, theirs) in outcome.answers.iter().zip(theirs) {
                assert_eq!(ours.as_ref().unwrap(), theirs, "{threads} threads, {batch} at once");
            }
        }
        println!("{} tokens with {threads} threads, {batch} requests at once", 10 * NEW);
    }
}

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn tokens_do_not_depend_on_company() {
    let (vocabulary, model) = load();
    let mut common = vocabulary.encode(LICENCE).unwrap();
    common.truncate(150);
    let prompts: [Vec<u32>; 8] = [
        " What does this mean for a baker?",
        " In other words,",
        "\n\nSummary:\n",
        " 1 2 3 4 5",
        " fn main() {",
        " The judge disagreed, because",
        " a",
        " Once upon a time, in a house by the sea, somebody read all of this aloud and",
    ]
    .map(|end| [&common[..], &vocabulary.encode(end).unwrap()].concat());
    for (kv_type, block_sizes) in [(KvType::F32, &[16, 32, 64][..]), (KvType::Int8, &[32])] {
        let level = Level::detect();
        let seen = all_say_the_same(&model, &prompts, 16, block_sizes, level, kv_type);
        println!("{}, answers of 16 tokens, all as each prompt alone: {seen:?}", kv_type.name());
        assert_eq!(seen.answers, block_sizes.len() * (1 + 2 + 2 + 8 + 8 + 8));
        assert!(seen.hits > 0 && (seen.preemptions > 0 || kv_type != KvType::F32), "{seen:?}");
    }
}

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn continuations_are_as_if_each_were_alone() {
    let (vocabulary, model) = load();
    let mut prompt = vocabulary.encode(LICENCE).unwrap();
    prompt.truncate(150);
    let mut options = options(1, 40);
    (options.temperature, options.seed, options.block_size) = (0.8, 3, 16);
    let prompt = [prompt];
    let alone: Vec<_> = (0..4)
        .map(|continuation| {
            let mut options = options.clone();
            options.seed = Sampler::seed_of(3, continuation);
            serve(&model, &prompt, Level::detect(), &options).answers.remove(0).unwrap()
        })
        .collect();
    options.fork = 4;
    // 9 full blocks of the prompt and 3 more for each answer; then hardly more than one needs.
    for pool_blocks in [21, 14] {
        options.pool_blocks = Some(pool_blocks);
        let forked = serve(&model, &prompt, Level::detect(), &options);
        let answers: Vec<_> = forked.answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers, alone);
        assert_eq!(forked.account.preemptions > 0, pool_blocks < 21);
        println!("4 continuations in {pool_blocks} blocks: {:?}", forked.account);
    }
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[2] != alone[3]);
}

/// Where the two best logits of f32 lie nearer than this, f16 may decide between them.
const NEAR: f32 = 2e-2;

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn f16_chooses_as_f32() {
    let (vocabulary, model) = load();
    let prompts = prompts(&vocabulary);
    let wide = choices::<f32>(&model, &prompts, NEW, None);
    let leads = differences::<f16>(&model, &prompts, &wide);
    println!("f16's exceptions: {leads:?}");
    assert!(leads.len() <= 8, "{leads:?}");
    assert!(leads.iter().all(|&lead| lead <= NEAR), "a clear choice of f32 was not f16's");
    // Without a bound: what the others choose depends on the model more than on this crate.
    differences::<bf16>(&model, &prompts, &wide);
    differences::<Int8>(&model, &prompts, &wide);
    differences::<Int4>(&model, &prompts, &wide);
}

/// The leads of f32 at those positions where another type, fed the same tokens, chooses another
/// one.
fn differences<E: Element>(model: &Model, prompts: &[Vec<u32>], wide: &Choices) -> Vec<f32> {
    let narrow = choices::<E>(model, prompts, NEW, Some(wide));
    let pairs: Vec<_> = narrow.iter().flatten().zip(wide.iter().flatten()).collect();
    assert_eq!(pairs.len(), 10 * NEW);
    let differing = pairs.iter().filter(|(narrow, wide)| narrow.0 != wide.0);
    let mut leads: Vec<f32> = differing.map(|&(_, &(_, lead))| lead).collect();
    leads.sort_by(f32::total_cmp);
    // A type that was not really stored would agree in everything.
    assert!(pairs.iter().any(|(narrow, wide)| narrow.1 != wide.1), "{} is f32", E::NAME);
    println!(
        "{}: {} of {} tokens are not those of f32, whose leads there are at most {:.4}",
        E::NAME,
        leads.len(),
        pairs.len(),
        leads.last().unwrap_or(&0.0)
    );
    leads
}

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn perplexity_by_stored_type() {
    let (vocabulary, model) = load();
    let text = vocabulary.encode(include_str!("proof/text.txt")).unwrap();
    let level = Level::detect();
    let wide = perplexity::<f32>(&model, &text, level);
    println!("f32: perplexity {wide:.4} over {} tokens", text.len());
    let off = |name: &str, narrow: f64| {
        let off = narrow / wide - 1.0;
        println!("{name}: perplexity {narrow:.4}, {:+.3} %", 100.0 * off);
        off.abs()
    };
    let half = off("f16", perplexity::<f16>(&model, &text, level));
    off("bf16", perplexity::<bf16>(&model, &text, level));
    let bytes = off("int8", perplexity::<Int8>(&model, &text, level));
    off("int4", perplexity::<Int4>(&model, &text, level));
    for level in [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten() {
        off(&format!("bf16 by {level}"), perplexity::<bf16>(&model, &text, level));
        off(&format!("int8 by {level}"), perplexity::<Int8>(&model, &text, level));
    }
    assert!(half < 1e-3 && bytes < 1e-2);
}
