//! The program as a person meets it: exit codes and words.

mod common;

use std::path::Path;
use std::process::{Command, Output};

use candle_core::quantized::gguf_file::Value;
use common::tiny::{self, Tiny};
use paged_kv::Level;

fn generate(model: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    command.arg("--model").arg(model).args(args).output().unwrap()
}

/// Asserts that a run ends with this code and these words, and says nothing on stdout.
#[track_caller]
fn fails(output: &Output, code: i32, words: &str) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.contains(words), "{words:?} is not in: {error}");
    assert!(!error.contains("panicked"), "{error}");
    assert!(output.stdout.is_empty());
}

#[test]
fn one_request_speaks() {
    let model = Tiny::new().file("one.gguf");
    let output = generate(&model, &["--prompt", "the sea", "--n", "8", "--threads", "1"]);
    let progress = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{progress}");
    for words in ["prompt: 5 of 5", "tokens per second", "peak 1 of 1", "1 free at the end"] {
        assert!(progress.contains(words), "{words:?} is not in: {progress}");
    }
    let again = generate(&model, &["--prompt", "the sea", "--n", "8", "--quiet"]);
    assert!(again.stderr.is_empty());
    assert_eq!(again.stdout, output.stdout);
}

#[test]
fn eight_requests_speak_one_after_the_other() {
    let model = Tiny::new().file("eight.gguf");
    let prompt = "the sea ".repeat(30);
    let args = ["--prompt", &prompt, "--n", "8", "--requests", "8", "--block-size", "16"];
    let output = generate(&model, &args);
    let (text, progress) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{progress}");
    // 180 tokens: 128 of them are whole chunks.
    for words in [
        "in the cache: 7 of 8, 896 tokens saved; 0 blocks evicted, 0 preemptions",
        "request 1 waits: request 0 computes what both begin with",
    ] {
        assert!(progress.contains(words), "{words:?} is not in: {progress}");
    }
    let mut answers = Vec::new();
    for request in 0..8 {
        let head = format!("--- request {request}\n");
        let (_, answer) = text.split_once(&head).expect("every request has its head line");
        answers.push(answer.split("--- request").next().unwrap().trim_end());
    }
    assert!(answers.iter().all(|answer| answer == &answers[0]), "{text}");
}

#[test]
fn continuations_of_one_prompt_give_way_to_each_other() {
    let model = Tiny::new().file("fork.gguf");
    let prompt = "the sea ".repeat(30);
    let args = ["--prompt", &prompt, "--n", "40", "--fork", "3", "--temperature", "1", "--check"];
    let roomy = generate(&model, &[&args[..], &["--block-size=16"]].concat());
    let tight = generate(&model, &[&args[..], &["--block-size=16", "--pool-blocks=15"]].concat());
    let progress = String::from_utf8_lossy(&roomy.stderr);
    assert!(progress.contains("0 of 1, 0 tokens saved; 0 blocks evicted, 0 preemptions"));
    let progress = String::from_utf8_lossy(&tight.stderr);
    assert!(tight.status.success(), "{progress}");
    assert!(progress.contains("request 0, continuation 2 gives its 1"), "{progress}");
    assert!(progress.contains("peak 15 of 15; 15 free at the end"), "{progress}");
    let [roomy, tight] = [&roomy, &tight].map(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        let mut answers: Vec<_> = text.split("--- request 0, ").map(str::to_owned).collect();
        answers.sort();
        answers
    });
    assert_eq!(roomy.len(), 1 + 3);
    assert_eq!(roomy, tight);
    assert!(roomy[1][15..] != roomy[2][15..] && roomy[2][15..] != roomy[3][15..]);
}

#[test]
fn wrong_files_are_named() {
    let prompt = ["--prompt", "the"];
    fails(&generate(Path::new("no-such.gguf"), &prompt), 1, "no-such.gguf: No such file");
    fails(&generate(Path::new(env!("CARGO_TARGET_TMPDIR")), &prompt), 1, "directory");
    let text = tiny::file("text.txt", b"Once upon a time there was a file of another kind.");
    fails(&generate(&text, &prompt), 1, "not a whole GGUF file");
    fails(&generate(&tiny::file("empty.gguf", b""), &prompt), 1, "not a whole GGUF file");
}

#[test]
fn files_cut_short_are_named() {
    let whole = Tiny::new().bytes();
    for part in 1..24 {
        let bytes = &whole[..whole.len() * part / 24];
        let path = tiny::file("cut.gguf", bytes);
        let output = generate(&path, &["--prompt", "the"]);
        fails(&output, 1, "cut.gguf: ");
    }
    let path = tiny::file("cut.gguf", &whole[..whole.len() - 40]);
    fails(&generate(&path, &["--prompt", "the"]), 1, "remaining in file");
}

#[test]
fn models_that_cannot_be_run_are_refused() {
    let text = |text: &str| Value::String(text.to_owned());
    for (key, value, words) in [
        ("general.architecture", text("mamba"), "architecture mamba"),
        ("tokenizer.ggml.model", text("bert"), "tokenizer bert"),
        ("tokenizer.ggml.pre", text("qwen2"), "qwen2"),
        ("llama.rope.scaling.type", text("yarn"), "rotary scaling yarn"),
        ("llama.rope.dimension_count", Value::U32(4), "rope.dimension_count 4"),
        ("llama.attention.head_count_kv", Value::U32(3), "do not divide"),
        ("llama.attention.head_count", Value::U32(0), "do not divide"),
        ("llama.block_count", Value::U32(3), "blk.2.attn_q.weight is missing"),
        ("llama.block_count", Value::U32(0), "no layer"),
        ("llama.block_count", text("two"), "llama.block_count is no count"),
        ("llama.feed_forward_length", Value::U32(48), "[48, 32] is needed"),
        ("general.alignment", Value::U32(0), "contradicts itself"),
    ] {
        let mut model = Tiny::new();
        model.set(key, value);
        let path = model.file("unsupported.gguf");
        let output = generate(&path, &["--prompt", "the"]);
        if key == "general.alignment" {
            // The parser's own panic comes first on stderr; ours has the last word.
            assert_eq!(output.status.code(), Some(1));
            assert!(String::from_utf8_lossy(&output.stderr).contains(words));
        } else {
            fails(&output, 1, words);
        }
    }
}

#[test]
fn parts_that_are_missing_or_unknown_are_named() {
    let mut model = Tiny::new();
    model.without("blk.1.ffn_up.weight");
    let path = model.file("missing.gguf");
    fails(&generate(&path, &["--prompt", "the"]), 1, "blk.1.ffn_up.weight is missing");
    let mut model = Tiny::new();
    model.tensor("blk.0.attn_q.bias", &[32]);
    let path = model.file("unknown.gguf");
    fails(&generate(&path, &["--prompt", "the"]), 1, "blk.0.attn_q.bias is no part");
}

#[test]
fn prompts_that_cannot_be_used_are_refused() {
    let model = Tiny::new().file("prompts.gguf");
    fails(&generate(&model, &["--prompt", ""]), 1, "the prompt is empty");
    let long = "x".repeat(500);
    fails(&generate(&model, &["--prompt", &long]), 1, "exceed the 512 positions of the model");
    let args = ["--prompt", &long[..100], "--n", "10", "--block-size", "16", "--pool-blocks", "3"];
    fails(&generate(&model, &args), 1, "need 7 blocks and the pool has 3");
}

#[test]
fn one_refused_request_is_a_failure_of_the_run() {
    let model = Tiny::new().file("refused.gguf");
    let long = "x".repeat(100);
    let args = ["--prompt", &long, "--prompt", "the", "--requests", "2", "--n", "4"];
    let output = generate(&model, &[&args[..], &["--block-size=16", "--pool-blocks=3"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("request 0: 104 positions"), "{error}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("--- request 1"));
}

#[test]
fn mistakes_on_the_line_are_code_2() {
    let model = Tiny::new().file("line.gguf");
    fails(&generate(&model, &[]), 2, "--prompt is missing");
    fails(&generate(&model, &["--prompt", "the", "--level", "abacus"]), 2, "scalar");
    fails(&generate(&model, &["--prompt", "the", "--fork", "0"]), 2, "--fork must be at least 1");
    fails(&generate(&model, &["--prompt", "the", "--n", "many"]), 2, "--n needs a number");
    fails(&generate(&model, &["--prompt", "the", "--kv-type", "f8"]), 2, "int8");
    let help = generate(&model, &["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("--model"));
}

#[test]
fn every_level_can_be_asked_for() {
    let model = Tiny::new().file("levels.gguf");
    let inexact = [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten();
    for level in Level::available().chain(inexact) {
        for kv_type in ["f32", "bf16", "int8"] {
            let args = ["--prompt", "the", "--n", "4", "--level", level.name()];
            let output = generate(&model, &[&args[..], &["--kv-type", kv_type]].concat());
            let progress = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{progress}");
            let words = format!("attention by {} over {kv_type}", level.name());
            assert!(progress.contains(&words), "{progress}");
        }
    }
}

#[test]
fn every_type_can_be_asked_for_and_says_what_it_takes() {
    let model = Tiny::new().file("types-line.gguf");
    // Two layers, keys and values of 2 heads of 8: 64 numbers a token.
    for (kv_type, bytes) in [("f32", 256), ("f16", 128), ("bf16", 128), ("int8", 96), ("int4", 64)]
    {
        let args = ["--prompt", "the sea", "--n", "4", "--threads", "2", "--kv-type", kv_type];
        let output = generate(&model, &args);
        let progress = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{progress}");
        for words in [
            &format!("keys and values: {bytes} bytes per token"),
            "steps of prompts: 1 of 5 positions",
            "steps of new tokens alone: 3 of 3 positions",
            "% in attention",
        ] {
            assert!(progress.contains(words), "{words:?} is not in: {progress}");
        }
    }
}
