//! A Llama of two layers with weights by chance, written as a GGUF: small enough to run
//! everywhere, and wrong in every way a test wishes.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

const LAYERS: usize = 2;
const WIDTH: usize = 32;
const INNER: usize = 64;
const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const KV_ROW: usize = N_KV_HEADS * HEAD_DIM;
/// The bytes, two merges, and three control tokens.
const VOCABULARY: usize = 256 + 2 + 3;

/// A GGUF to be written.
pub(crate) struct Tiny {
    pub(crate) metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
    state: u64,
}

impl Tiny {
    pub(crate) fn new() -> Self {
        let mut tiny = Tiny { metadata: metadata(), tensors: BTreeMap::new(), state: 1 };
        tiny.tensor("token_embd.weight", &[VOCABULARY, WIDTH]);
        tiny.tensor("output_norm.weight", &[WIDTH]);
        for layer in 0..LAYERS {
            for (part, shape) in [
                ("attn_norm", &[WIDTH][..]),
                ("attn_q", &[WIDTH, WIDTH]),
                ("attn_k", &[KV_ROW, WIDTH]),
                ("attn_v", &[KV_ROW, WIDTH]),
                ("attn_output", &[WIDTH, WIDTH]),
                ("ffn_norm", &[WIDTH]),
                ("ffn_gate", &[INNER, WIDTH]),
                ("ffn_up", &[INNER, WIDTH]),
                ("ffn_down", &[WIDTH, INNER]),
            ] {
                tiny.tensor(&format!("blk.{layer}.{part}.weight"), shape);
            }
        }
        tiny
    }

    /// Adds a tensor of numbers by chance. Norms are near 1 and matrices wide enough that every
    /// token matters.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) {
        let norm = shape.len() == 1;
        let numbers: Vec<f32> = (0..shape.iter().product::<usize>())
            .map(|_| if norm { 1.0 + 0.1 * self.chance() } else { 0.6 * self.chance() })
            .collect();
        let tensor = Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, GgmlDType::F32).unwrap();
        self.tensors.insert(name.to_owned(), tensor);
    }

    pub(crate) fn without(&mut self, tensor: &str) {
        self.tensors.remove(tensor).expect("it was there");
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(key.to_owned(), value);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut file = Cursor::new(Vec::new());
        let metadata: Vec<_> = self.metadata.iter().map(|(key, it)| (key.as_str(), it)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, it)| (name.as_str(), it)).collect();
        gguf_file::write(&mut file, &metadata, &tensors).unwrap();
        file.into_inner()
    }

    /// Writes it into the directory that cargo keeps for tests.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        file(name, &self.bytes())
    }

    /// -1.0 .. 1.0
    fn chance(&mut self) -> f32 {
        self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Writes a file into the directory that cargo keeps for tests.
pub(crate) fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn metadata() -> BTreeMap<String, Value> {
    let text = |text: &str| Value::String(text.to_owned());
    let texts = |texts: &[String]| Value::Array(texts.iter().map(|it| text(it)).collect());
    let mut tokens = byte_alphabet();
    tokens.extend(["th", "the", "<|end|>", "<|a|>", "<|b|>"].map(str::to_owned));
    let kinds = (0..VOCABULARY).map(|id| Value::I32(if id < 258 { 1 } else { 3 })).collect();
    [
        ("general.architecture", text("llama")),
        ("llama.block_count", Value::U32(LAYERS as u32)),
        ("llama.context_length", Value::U32(512)),
        ("llama.embedding_length", Value::U32(WIDTH as u32)),
        ("llama.feed_forward_length", Value::U32(INNER as u32)),
        ("llama.attention.head_count", Value::U32(N_HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(N_KV_HEADS as u32)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.rope.dimension_count", Value::U32(HEAD_DIM as u32)),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("smollm")),
        ("tokenizer.ggml.tokens", texts(&tokens)),
        ("tokenizer.ggml.merges", texts(&["t h".to_owned(), "th e".to_owned()])),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.eos_token_id", Value::U32(258)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// The 256 characters that stand for bytes: printable ones for themselves, the others for
/// characters from U+0100 on, in order.
fn byte_alphabet() -> Vec<String> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut other = 0x100;
    (0..=255u8)
        .map(|byte| {
            if printable(byte) {
                return char::from(byte).to_string();
            }
            other += 1;
            char::from_u32(other - 1).unwrap().to_string()
        })
        .collect()
}
