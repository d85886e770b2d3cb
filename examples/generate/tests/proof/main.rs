//! The real model, token for token against candle's own quantized Llama.
//!
//! Ignored unless asked for, since it needs the file:
//!
//! ```text
//! PAGED_KV_MODEL=SmolLM2-135M-Instruct.Q4_1.gguf CANDLE_DEQUANTIZE_ALL=1 \
//!     cargo test --release -p generate --test proof -- --ignored --nocapture
//! ```

mod naive;

use std::fs::File;
use std::path::PathBuf;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use generate::gguf::Gguf;
use generate::model::Model;
use generate::sample::likeliest;
use generate::tokenizer::Vocabulary;

/// New tokens compared for each prompt.
const NEW: usize = 64;
/// Where two logits of the reference are nearer than this, rounding may decide between them.
const TIE: f32 = 1e-3;

/// Prompts of 5 to 600 tokens: speech, prose, a list, code and a licence.
fn prompts(vocabulary: &Vocabulary) -> Vec<Vec<u32>> {
    let licence = include_str!("../../../../LICENSE-APACHE");
    let code = include_str!("../../src/model.rs");
    let chat = "<|im_start|>user\nWhat does a librarian do all day?<|im_end|>\n\
                <|im_start|>assistant\n";
    let list = "Numbers and their squares: 1 1, 2 4, 3 9, 4 16, 5 25, 6 36, 7 49, 8";
    let tale = "The ferry left at dawn. On the deck stood a baker, a judge and a boy with a \
                cage, and none of them had paid. The captain, who had seen worse, looked at the \
                cage and asked";
    [
        ("The capital of France is", 5),
        ("Once upon a time, in a house by the sea,", 11),
        (chat, 18),
        (list, 40),
        (tale, 44),
        (code, 100),
        (licence, 150),
        (code, 257),
        (licence, 400),
        (licence, 600),
    ]
    .iter()
    .map(|&(text, most)| {
        let mut tokens = vocabulary.encode(text).unwrap();
        tokens.truncate(most);
        tokens
    })
    .collect()
}

fn model_path() -> PathBuf {
    std::env::var_os("PAGED_KV_MODEL").expect("PAGED_KV_MODEL names the model file").into()
}

/// The best logit and how far the second is behind.
fn lead(logits: &[f32]) -> (u32, f32) {
    let best = likeliest(logits);
    let second = logits
        .iter()
        .enumerate()
        .filter(|&(token, _)| token != best as usize)
        .fold(f32::NEG_INFINITY, |second, (_, &logit)| second.max(logit));
    (best, logits[best as usize] - second)
}

#[test]
#[ignore = "needs the model named by PAGED_KV_MODEL"]
fn tokens_equal_those_of_the_reference() {
    assert_eq!(
        std::env::var("CANDLE_DEQUANTIZE_ALL").as_deref(),
        Ok("1"),
        "the reference must multiply in f32 too: set CANDLE_DEQUANTIZE_ALL=1"
    );
    let path = model_path();
    let mut file = Gguf::open(&path).unwrap();
    let vocabulary = Vocabulary::new(&file).unwrap();
    let model = Model::load(&mut file, 2).unwrap();
    let mut raw = File::open(&path).unwrap();
    let content = Content::read(&mut raw).unwrap();
    let mut reference = ModelWeights::from_gguf(content, &mut raw, &Device::Cpu).unwrap();
    let (mut largest, mut differing, mut compared) = (0.0f32, 0, 0);
    for tokens in prompts(&vocabulary) {
        let mut memory = naive::Naive::new(model.sizes());
        let mut feed = tokens.clone();
        let mut at = 0;
        let (mut text, mut worst) = (Vec::new(), 0.0f32);
        for _ in 0..NEW {
            let input = Tensor::new(feed.as_slice(), &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            let theirs = reference.forward(&input, at).unwrap();
            let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let ours = model.prefill(&feed, &mut memory, |_| ()).unwrap();
            at += feed.len();
            let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
            worst = worst.max(difference.fold(0.0, f32::max));
            let (best, ahead) = lead(&theirs);
            compared += 1;
            if likeliest(&ours) != best {
                differing += 1;
                println!("token differs at position {at}, the reference's lead is {ahead:e}");
                assert!(ahead <= TIE, "a clear choice of the reference was not ours");
            }
            text.push(best);
            feed = vec![best];
        }
        println!(
            "{:4} tokens: largest logit difference {worst:e}; {:?}",
            tokens.len(),
            vocabulary.decode(&text[..16]).unwrap()
        );
        largest = largest.max(worst);
    }
    println!("{compared} positions, {differing} differing, largest logit difference {largest:e}");
    assert_eq!(compared, 10 * NEW);
}
