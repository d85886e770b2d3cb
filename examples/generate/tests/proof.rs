//! The real model, token for token: against candle's own quantized Llama, and against itself in
//! company.
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

use common::{all_say_the_same, compare, reference};
use generate::gguf::Gguf;
use generate::model::Model;
use generate::tokenizer::Vocabulary;
use paged_kv::Level;

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
    for (index, prompt) in prompts(&vocabulary).iter().enumerate() {
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
    }
    println!("{compared} positions, {differing} differ, logits at most {largest:e} apart");
    assert_eq!(compared, 10 * NEW);
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
    let answers = all_say_the_same(&model, &prompts, 16, &[16, 32, 64], Level::detect());
    println!("{answers} answers of 16 tokens, all as each prompt alone");
    assert_eq!(answers, 3 * (1 + 2 + 2 + 8 + 8));
}
