//! The model: weights out of the file, and one step for any number of requests and tokens.
//!
//! It knows nothing of blocks: keys and values go to a [`Memory`], which answers with attention,
//! one call a layer for all requests of the step. The products are each request's own, see below;
//! different requests' are done at the same time on the model's threads.
//! Products are candle's, in f32, on weights dequantised once when the file is loaded (candle's
//! own Q4_1 product is scalar and took 265 ms a token on the model this was written with).
//!
//! # Chunks
//!
//! Tokens of a request must not depend on who prefilled its prompt, and a product of one row and
//! a product of sixty-four run through different kernels, which round differently (measured: 880
//! of the 960 numbers of the first product, by their last bits; from five rows on all agree, which
//! nobody has promised; the number of threads never mattered). So a prompt is cut at absolute
//! positions, every [`CHUNK`], and an adopted prefix always ends at such a cut: a position then
//! meets the same number of rows in every product whether its neighbours were prefilled by its own
//! request or by another. New tokens go one by one, and the rows of two requests never meet in a
//! product. A product whose rows do not know of each other would allow more, and be our own and
//! slower than candle's. Attention has no such trouble: there, all rows go together.

use candle_core::{Device, Tensor};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::error::Error;
use crate::gguf::Gguf;

/// Where a prompt is cut, in positions. A multiple of every common block size, so that page
/// groups end where chunks end.
pub const CHUNK: usize = 64;

/// Keys and values of the requests of a step, and attention over them.
pub trait Memory {
    /// Appends each request's rows to a layer and attends with the queries of the same positions.
    ///
    /// # Errors
    ///
    /// Whatever the memory refuses.
    fn attend(&mut self, layer: usize, rows: Rows<'_>, out: &mut [f32]) -> Result<(), Error>;
}

/// What one layer hands to attention, row by row, those of one request after those of another.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Queries, `[rows, n_heads, head_dim]`; so is the output.
    pub q: &'a [f32],
    /// Keys, `[rows, n_kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values, `[rows, n_kv_heads, head_dim]`.
    pub v: &'a [f32],
}

/// What one request feeds in a step.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    /// At least one token.
    pub tokens: &'a [u32],
    /// The position of the first.
    pub start: usize,
    /// Which logits are asked for.
    pub logits: Logits,
}

/// The rows of a feed whose logits are asked for. The head is the largest matrix of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: a piece of a prompt that goes on.
    None,
    /// The last one's, to pick a token.
    Last,
    /// Every one's, to judge a text.
    All,
}

/// The sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Layers.
    pub layers: usize,
    /// Numbers in an embedding.
    pub width: usize,
    /// Numbers between the two halves of a feed-forward layer.
    pub inner: usize,
    /// Query heads.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Numbers in a head.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// Positions the model was trained on.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// Added to a mean square before its root is taken.
    pub epsilon: f32,
}

/// A matrix `[out, in]` that rows are multiplied with.
#[derive(Debug)]
struct Matrix(Tensor);

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    /// Query, key and value rows below each other: one product instead of three.
    qkv: Matrix,
    output: Matrix,
    feed_norm: Vec<f32>,
    /// Gate and up rows below each other.
    gate_up: Matrix,
    down: Matrix,
}

/// A Llama.
#[derive(Debug)]
pub struct Model {
    sizes: Sizes,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Matrix,
    pool: ThreadPool,
}

impl Sizes {
    /// The sizes that the file's metadata state.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for another architecture, [`Error::File`] where a size is missing.
    pub fn new(file: &Gguf) -> Result<Self, Error> {
        match file.text("general.architecture") {
            Some("llama") => (),
            other => {
                let name = other.unwrap_or("none");
                return Err(Error::Unsupported(format!(
                    "architecture {name}, only llama is known"
                )));
            }
        }
        let width = file.count("llama.embedding_length")?;
        let n_heads = file.count("llama.attention.head_count")?;
        let n_kv_heads = file.count_or_none("llama.attention.head_count_kv")?.unwrap_or(n_heads);
        if n_heads == 0 || n_kv_heads == 0 || width % n_heads != 0 || n_heads % n_kv_heads != 0 {
            return Err(file.wrong(format!(
                "{width} numbers, {n_heads} query heads and {n_kv_heads} KV heads do not divide"
            )));
        }
        let head_dim = width / n_heads;
        for key in ["rope.dimension_count", "attention.key_length", "attention.value_length"] {
            match file.count_or_none(&format!("llama.{key}"))? {
                Some(other) if other != head_dim => {
                    return Err(Error::Unsupported(format!("{key} {other}, heads are {head_dim}")));
                }
                _ => (),
            }
        }
        if head_dim % 2 != 0 {
            return Err(file.wrong(format!("heads of {head_dim} numbers cannot be rotated")));
        }
        if let Some(kind) = file.text("llama.rope.scaling.type").filter(|&kind| kind != "none") {
            return Err(Error::Unsupported(format!("rotary scaling {kind}")));
        }
        let layers = file.count("llama.block_count")?;
        if layers == 0 {
            return Err(file.wrong("the model has no layer".into()));
        }
        Ok(Sizes {
            layers,
            width,
            inner: file.count("llama.feed_forward_length")?,
            n_heads,
            n_kv_heads,
            head_dim,
            vocabulary: file.texts("tokenizer.ggml.tokens")?.len(),
            context: file.count("llama.context_length")?,
            rope_base: file.float_or_none("llama.rope.freq_base")?.unwrap_or(10_000.0),
            epsilon: file.float("llama.attention.layer_norm_rms_epsilon")?,
        })
    }

    /// Numbers in the key (or value) row of a position.
    pub fn kv_row(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}

impl Model {
    /// Loads all weights, dequantised, and opens `threads` threads for the products.
    ///
    /// # Errors
    ///
    /// [`Error::File`] for a tensor that is missing or cut off, [`Error::Unsupported`] for a part
    /// that a plain Llama does not have.
    pub fn load(file: &mut Gguf, threads: usize) -> Result<Self, Error> {
        let sizes = Sizes::new(file)?;
        let table = [sizes.vocabulary, sizes.width];
        let embedding = file.take("token_embd.weight", &table)?;
        let layers = (0..sizes.layers)
            .map(|layer| Layer::load(file, &sizes, layer))
            .collect::<Result<Vec<_>, _>>()?;
        let norm = vector(file, "output_norm.weight", sizes.width)?;
        // Small models use the embedding a second time, turned round.
        let head = if file.has("output.weight") {
            file.take("output.weight", &table)?
        } else {
            embedding.clone()
        };
        if let Some(name) = file.left().first() {
            return Err(Error::Unsupported(format!("tensor {name} is no part of a plain Llama")));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|thread| format!("product {thread}"))
            .build()
            .map_err(|error| Error::Usage(format!("--threads {threads}: {error}")))?;
        Ok(Model { sizes, embedding, layers, norm, head: Matrix(head), pool })
    }

    /// The sizes.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// Feeds the tokens of some requests and gives, for each, the logits that it asked for, row
    /// after row.
    ///
    /// # Errors
    ///
    /// As [`Model::check`], for any of them; whatever the memory refuses.
    pub fn step(
        &self,
        feeds: &[Feed<'_>],
        memory: &mut dyn Memory,
    ) -> Result<Vec<Vec<f32>>, Error> {
        let Sizes { width, head_dim, n_heads, epsilon, .. } = self.sizes;
        for feed in feeds {
            self.check(feed.tokens, feed.start)?;
        }
        let embed = |feed: &Feed<'_>| -> Result<_, Error> {
            let ids = Tensor::new(feed.tokens, &Device::Cpu)?;
            let x = self.embedding.index_select(&ids, 0)?.flatten_all()?.to_vec1::<f32>()?;
            Ok((x, Angles::new(&self.sizes, feed.start, feed.tokens.len())))
        };
        let (mut xs, angles): (Vec<_>, Vec<_>) =
            feeds.iter().map(embed).collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let rows: usize = feeds.iter().map(|feed| feed.tokens.len()).sum();
        let q_row = n_heads * head_dim;
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let mut out = vec![0.0; rows * q_row];
        for (index, layer) in self.layers.iter().enumerate() {
            let product = |(x, angles): (&Vec<f32>, &Angles)| {
                let normed = normed(x, &layer.attention_norm, epsilon);
                Ok(self.split(&layer.qkv.times(&normed, width)?, angles))
            };
            let products: Vec<_> = self.pool.install(|| {
                xs.par_iter().zip(&angles).map(product).collect::<Result<_, Error>>()
            })?;
            q.clear();
            k.clear();
            v.clear();
            for product in products {
                q.extend(product.0);
                k.extend(product.1);
                v.extend(product.2);
            }
            memory.attend(index, Rows { q: &q, k: &k, v: &v }, &mut out)?;
            let mut left = &out[..];
            let mut heads = Vec::with_capacity(feeds.len());
            for feed in feeds {
                let (own, rest) = left.split_at(feed.tokens.len() * q_row);
                heads.push(own);
                left = rest;
            }
            self.pool.install(|| {
                let pairs = xs.par_iter_mut().zip(heads);
                pairs.try_for_each(|(x, heads)| layer.after_attention(x, heads, &self.sizes))
            })?;
        }
        self.pool.install(|| {
            let pairs = xs.par_iter().zip(feeds);
            pairs.map(|(x, feed)| self.logits(x, feed.logits)).collect()
        })
    }

    /// Whether tokens can be fed from a position on.
    ///
    /// # Errors
    ///
    /// [`Error::Prompt`] for no token, one beyond the vocabulary or a position beyond the context.
    pub fn check(&self, tokens: &[u32], start: usize) -> Result<(), Error> {
        let Sizes { vocabulary, context, .. } = self.sizes;
        if tokens.is_empty() {
            return Err(Error::Prompt("there is no token to feed".into()));
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Prompt(format!("token {token} is beyond the vocabulary")));
        }
        if start + tokens.len() > context {
            return Err(Error::Prompt(format!("the model has room for {context} positions")));
        }
        Ok(())
    }

    /// Cuts the product of each row into its query, key and value, the first two rotated.
    fn split(&self, qkv: &[f32], angles: &Angles) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let q_row = self.sizes.n_heads * self.sizes.head_dim;
        let kv_row = self.sizes.kv_row();
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for row in qkv.chunks_exact(q_row + 2 * kv_row) {
            q.extend_from_slice(&row[..q_row]);
            k.extend_from_slice(&row[q_row..][..kv_row]);
            v.extend_from_slice(&row[q_row + kv_row..]);
        }
        angles.rotate(&mut q, q_row);
        angles.rotate(&mut k, kv_row);
        (q, k, v)
    }

    /// The logits of some of these rows.
    fn logits(&self, rows: &[f32], which: Logits) -> Result<Vec<f32>, Error> {
        let width = self.sizes.width;
        let from = match which {
            Logits::None => return Ok(Vec::new()),
            Logits::Last => rows.len() - width,
            Logits::All => 0,
        };
        self.head.times(&normed(&rows[from..], &self.norm, self.sizes.epsilon), width)
    }
}

impl Layer {
    fn load(file: &mut Gguf, sizes: &Sizes, layer: usize) -> Result<Self, Error> {
        let Sizes { width, inner, n_heads, head_dim, .. } = *sizes;
        let (q_row, kv_row) = (n_heads * head_dim, sizes.kv_row());
        let mut take = |part: &str, rows: usize, columns: usize| {
            file.take(&format!("blk.{layer}.{part}.weight"), &[rows, columns])
        };
        let (q, k) = (take("attn_q", q_row, width)?, take("attn_k", kv_row, width)?);
        let v = take("attn_v", kv_row, width)?;
        let output = take("attn_output", width, q_row)?;
        let (gate, up) = (take("ffn_gate", inner, width)?, take("ffn_up", inner, width)?);
        let down = take("ffn_down", width, inner)?;
        Ok(Layer {
            attention_norm: vector(file, &format!("blk.{layer}.attn_norm.weight"), width)?,
            qkv: Matrix(Tensor::cat(&[&q, &k, &v], 0)?),
            output: Matrix(output),
            feed_norm: vector(file, &format!("blk.{layer}.ffn_norm.weight"), width)?,
            gate_up: Matrix(Tensor::cat(&[&gate, &up], 0)?),
            down: Matrix(down),
        })
    }

    /// Everything behind attention: its output matrix and the feed-forward half.
    fn after_attention(&self, x: &mut [f32], heads: &[f32], sizes: &Sizes) -> Result<(), Error> {
        add(x, &self.output.times(heads, sizes.n_heads * sizes.head_dim)?);
        let gate_up =
            self.gate_up.times(&normed(x, &self.feed_norm, sizes.epsilon), sizes.width)?;
        let mut inner = Vec::with_capacity(gate_up.len() / 2);
        for row in gate_up.chunks_exact(2 * sizes.inner) {
            let (gate, up) = row.split_at(sizes.inner);
            inner.extend(gate.iter().zip(up).map(|(&gate, &up)| gate / (1.0 + (-gate).exp()) * up));
        }
        add(x, &self.down.times(&inner, sizes.inner)?);
        Ok(())
    }
}

impl Matrix {
    /// The product of every row, `columns` numbers long, with every row of the matrix.
    fn times(&self, rows: &[f32], columns: usize) -> Result<Vec<f32>, Error> {
        let rows = Tensor::from_slice(rows, (rows.len() / columns, columns), &Device::Cpu)?;
        Ok(rows.matmul(&self.0.t()?)?.flatten_all()?.to_vec1()?)
    }
}

/// The rotary angles of some positions.
struct Angles {
    half: usize,
    sin_cos: Vec<(f32, f32)>,
}

impl Angles {
    fn new(sizes: &Sizes, start: usize, count: usize) -> Self {
        let width = sizes.head_dim as f32;
        let half = sizes.head_dim / 2;
        let speed = |pair: usize| 1.0 / sizes.rope_base.powf((2 * pair) as f32 / width);
        let sin_cos = (start..start + count)
            .flat_map(|position| {
                (0..half).map(move |pair| (position as f32 * speed(pair)).sin_cos())
            })
            .collect();
        Angles { half, sin_cos }
    }

    /// Turns neighbours, `2i` with `2i + 1`: in a GGUF of this architecture the rows of the query
    /// and key matrices are already sorted for that, where the original turns `i` with
    /// `i + head_dim / 2`. The other way round the model still talks, and makes no sense.
    fn rotate(&self, rows: &mut [f32], row_len: usize) {
        for (row, angles) in
            rows.chunks_exact_mut(row_len).zip(self.sin_cos.chunks_exact(self.half))
        {
            for head in row.chunks_exact_mut(2 * self.half) {
                for (pair, &(sin, cos)) in head.chunks_exact_mut(2).zip(angles) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * cos - b * sin;
                    pair[1] = a * sin + b * cos;
                }
            }
        }
    }
}

fn vector(file: &mut Gguf, name: &str, len: usize) -> Result<Vec<f32>, Error> {
    Ok(file.take(name, &[len])?.to_vec1()?)
}

/// Every row divided by its root mean square, times a weight.
fn normed(rows: &[f32], weight: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows.len());
    for row in rows.chunks_exact(weight.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean + epsilon).sqrt();
        out.extend(row.iter().zip(weight).map(|(x, w)| x * scale * w));
    }
    out
}

fn add(x: &mut [f32], more: &[f32]) {
    for (x, more) in x.iter_mut().zip(more) {
        *x += more;
    }
}
