//! A decoder that recalls, with weights that are written down instead of trained.
//!
//! # Why such a decoder
//!
//! A KV cache is right when the model above it can not tell. A test with random rows shows that
//! the arithmetic is right; it does not show that the right rows were there. This decoder turns
//! rows into answers: it reads a list of pairs, `key value key value ...`, is then asked a key and
//! has to name the value that followed it. A row that was lost, that is stale, or that belongs to
//! another request is a wrong answer, and the logits beside it are a digest of every sum on the
//! way.
//!
//! # The circuit
//!
//! Two layers are enough (a trained model finds the same pair, the induction heads):
//!
//! 1. *Previous token.* The query is one constant vector, turned by RoPE to the position before
//!    its own; the key is one constant vector, turned to its position. Their product is a sum of
//!    cosines of (distance - 1), highest at a distance of exactly 1. The value is the token's
//!    code, so each position learns the code of the token before it.
//! 2. *Match.* The query is the code of the token at hand, the key is the code that layer 1 put
//!    beside each position, the value is the token's code. The position after an earlier sight of
//!    the token wins, and its code goes to the logits. This layer is not rotated: what is sought
//!    is the same however far back it stands, so its scores must not know the distance. (Models
//!    that leave RoPE out of some of their layers do it for the same reason.)
//!
//! # The residual stream
//!
//! ```text
//! channel   0      1 .. 1+W        1+W .. 1+2W      1+2W .. 1+3W
//!           one    own code        previous code    recalled code
//!           1.0    the embedding   layer 1 adds     layer 2 adds     W = KV heads x head width
//! ```
//!
//! A code is W signs, +1 or -1, drawn from an integer hash of the token. KV head `g` carries the
//! signs `g * width ..` of it. The query heads of a group see the same keys with different
//! sharpness, and each hands on its own slice of the value, so that no head's fault can hide
//! behind another's. Nothing is normalised: the codes have one length already.
//!
//! # The sharpness
//!
//! Too sharp, and each softmax picks one row with weight 1: the answers are right and the logits
//! are whole numbers that no slip of an exponential would change. Too soft, and thousands of
//! unrelated rows outvote the right one. [`Config`] stands between: some percent of the weight
//! leaks to rows that do not match, so every row leaves a trace in the logits' bits, and the right
//! answer still leads by a wide margin. `tests/recall.rs` measures both.
//!
//! # The same bits everywhere
//!
//! Outside attention there is no sum whose order or fusing could matter: every projection takes
//! one product per output, rotations are built in `f64` from additions and multiplications alone
//! (no libm), and the unembedding only adds and subtracts, since the codes are signs. So two runs
//! differ only where their attention differs.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

// The path is spelt out because tests take this file in by a path of their own.
#[path = "weights.rs"]
mod weights;

#[allow(unused_imports, reason = "the example has no use for single signs, its test has")]
pub(crate) use weights::code;
pub(crate) use weights::mix;
use weights::{Layer, Rotation, Unembedding, embed, recalled_channel, residual_width};

/// A token, as an index into the vocabulary: the beginning, then the keys, then the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token(pub(crate) u32);

/// The token every list begins with.
///
/// Position 0 has no position before it, so layer 1 can only find itself there. A token that is
/// never asked makes that harmless.
pub(crate) const BEGIN: Token = Token(0);

/// The sizes of a decoder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Config {
    /// Query heads.
    pub(crate) n_heads: usize,
    /// KV heads.
    pub(crate) n_kv_heads: usize,
    /// Numbers in one row of one head.
    pub(crate) head_dim: usize,
    /// Slowest turn of RoPE: the last pair of channels turns by about `1 / rope_base` a position.
    pub(crate) rope_base: f64,
    /// Tokens that can stand for a key.
    pub(crate) keys: usize,
    /// Tokens that can stand for a value.
    pub(crate) values: usize,
    /// Longest list, questions included.
    pub(crate) positions: usize,
    /// What layer 1 multiplies its sum of cosines by before the softmax.
    ///
    /// At width 64 and base 10,000 the neighbours of the right position lose by 1.08 of 32.
    pub(crate) previous_sharpness: f64,
    /// What layer 2 multiplies a product of two codes by before the softmax.
    pub(crate) match_sharpness: f64,
}

/// Why a [`Config`] cannot be a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConfigError {
    /// This size must be at least 1.
    Zero(&'static str),
    /// The query heads do not divide over the KV heads.
    Heads,
    /// A head is not made of pairs, or its values do not divide over its group.
    Width,
    /// The base or a sharpness is not a number above 1, or above 0.
    Number(&'static str),
    /// The tables would not fit an index.
    TooLarge,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Zero(what) => write!(f, "{what} must be at least 1"),
            ConfigError::Heads => f.write_str("the query heads do not divide over the KV heads"),
            ConfigError::Width => {
                f.write_str("the head width must be even and divide over the heads of a group")
            }
            ConfigError::Number(what) => write!(f, "{what} is out of range"),
            ConfigError::TooLarge => f.write_str("the decoder's tables do not fit an index"),
        }
    }
}

impl core::error::Error for ConfigError {}

impl Config {
    /// Layers of the circuit.
    pub(crate) const N_LAYERS: usize = 2;

    /// Four query heads over two KV heads of 64, for lists of `positions` tokens.
    ///
    /// The sharpness was chosen by trial, in `f64`, with 4,609 tokens and 58 questions. In each line
    /// the faintest right answer, as a part of a whole code, and the best wrong one:
    ///
    /// ```text
    /// previous  match   right   wrong
    ///   2.5     0.2     0.946   0.361
    ///   4       0.2     0.977   0.368
    ///   8       0.2     0.981   0.370    taken
    ///  24       0.2     0.981   0.370
    ///   8       0.12    0.490   0.214
    ///   8       0.15    0.815   0.313
    ///   8       0.3     0.9997  0.375
    ///   8       1.0     1       0.375    whole numbers: nothing leaks, nothing can be told
    /// ```
    ///
    /// More tokens leak more. With more questions the faintest answer is 0.976 at 4,609 tokens,
    /// 0.963 at 8,705 and 0.88 at 16,897.
    pub(crate) fn wide(keys: usize, values: usize, positions: usize) -> Config {
        Config {
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 64,
            rope_base: 10_000.0,
            keys,
            values,
            positions,
            previous_sharpness: 8.0,
            match_sharpness: 0.2,
        }
    }

    /// Signs in a token's code.
    pub(crate) fn code_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Tokens, the beginning included.
    pub(crate) fn vocabulary(&self) -> usize {
        1 + self.keys + self.values
    }

    /// The token of key `index`.
    pub(crate) fn key(&self, index: usize) -> Token {
        assert!(index < self.keys, "there are {} keys", self.keys);
        Token((1 + index) as u32)
    }

    /// The token of value `index`.
    pub(crate) fn value(&self, index: usize) -> Token {
        assert!(index < self.values, "there are {} values", self.values);
        Token((1 + self.keys + index) as u32)
    }

    /// The token in words.
    pub(crate) fn name(&self, token: Token) -> alloc::string::String {
        match (token.0 as usize).checked_sub(1) {
            None => "beginning".into(),
            Some(key) if key < self.keys => alloc::format!("key {key}"),
            Some(index) => alloc::format!("value {}", index - self.keys),
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        for (size, what) in [
            (self.n_heads, "n_heads"),
            (self.n_kv_heads, "n_kv_heads"),
            (self.head_dim, "head_dim"),
            (self.keys, "keys"),
            (self.values, "values"),
            (self.positions, "positions"),
        ] {
            if size == 0 {
                return Err(ConfigError::Zero(what));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(ConfigError::Heads);
        }
        let group = self.n_heads / self.n_kv_heads;
        if !self.head_dim.is_multiple_of(2) || !self.head_dim.is_multiple_of(group) {
            return Err(ConfigError::Width);
        }
        for (number, least, what) in [
            (self.rope_base, 1.0, "rope_base"),
            (self.previous_sharpness, 0.0, "previous_sharpness"),
            (self.match_sharpness, 0.0, "match_sharpness"),
        ] {
            if !(number > least && number < 1e6) {
                return Err(ConfigError::Number(what));
            }
        }
        let vocabulary = self.keys.checked_add(self.values).and_then(|n| n.checked_add(1));
        let heads = self.n_heads.checked_mul(self.head_dim).filter(|&n| n < (1 << 24));
        let (Some(vocabulary), Some(heads)) = (vocabulary, heads) else {
            return Err(ConfigError::TooLarge);
        };
        let most = (isize::MAX as usize / 64).min(u32::MAX as usize);
        let fits = |rows: usize| rows.checked_mul(heads).is_some_and(|n| n <= most);
        if fits(vocabulary) && fits(self.positions) { Ok(()) } else { Err(ConfigError::TooLarge) }
    }
}

/// Where the decoder keeps its keys and values, and who attends over them.
///
/// The decoder knows nothing of blocks, pools or locks, so one decoder serves contiguous caches,
/// paged ones, shared layers, and an oracle that computes in `f64`.
pub(crate) trait Memory {
    /// What can go wrong.
    type Error;

    /// Positions held. Between two calls of the decoder every layer holds as many.
    fn len(&self) -> usize;

    /// Appends `n` positions to `layer`: `k` and `v` are `[n][n_kv_heads][head_dim]`.
    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], n: usize) -> Result<(), Self::Error>;

    /// Causal attention of the last positions of `layer`: `q` and `out` are
    /// `[n][n_heads][head_dim]`, scores are scaled by `1 / sqrt(head_dim)`.
    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), Self::Error>;

    /// Forgets what lies past the first `len` positions, in every layer.
    fn truncate(&mut self, len: usize) -> Result<(), Self::Error>;
}

/// Why a step was not taken. The memory holds as many positions as before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepError<E> {
    /// The list would grow past the positions the decoder was built for.
    TooLong {
        /// Positions needed.
        need: usize,
        /// Positions there are.
        have: usize,
    },
    /// A token outside the vocabulary.
    Unknown(Token),
    /// The memory refused.
    Memory(E),
}

impl<E: fmt::Display> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepError::TooLong { need, have } => {
                write!(f, "{need} positions are needed, the decoder has {have}")
            }
            StepError::Unknown(token) => write!(f, "token {} is not in the vocabulary", token.0),
            StepError::Memory(error) => error.fmt(f),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for StepError<E> {}

/// Decoder weights. Built once, shared by reference between all requests.
#[derive(Debug)]
pub(crate) struct Decoder {
    config: Config,
    layers: [Layer; Config::N_LAYERS],
    rotation: Rotation,
    unembedding: Unembedding,
}

impl Decoder {
    /// Builds the weights.
    pub(crate) fn new(config: Config) -> Result<Decoder, ConfigError> {
        config.check()?;
        Ok(Decoder {
            config,
            layers: [Layer::previous_token(&config), Layer::recall(&config)],
            rotation: Rotation::new(&config),
            unembedding: Unembedding::new(&config),
        })
    }

    /// The sizes it was built with.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Reads `tokens`, in chunks of as many rows as `work` has.
    ///
    /// On an error the memory is cut back to what it held, so that a list is never half read.
    pub(crate) fn forward<M: Memory>(
        &self,
        memory: &mut M,
        tokens: &[Token],
        work: &mut Workspace,
    ) -> Result<(), StepError<M::Error>> {
        let start = memory.len();
        let need = start.saturating_add(tokens.len());
        if need > self.config.positions {
            return Err(StepError::TooLong { need, have: self.config.positions });
        }
        let known = self.config.vocabulary();
        if let Some(&token) = tokens.iter().find(|token| token.0 as usize >= known) {
            return Err(StepError::Unknown(token));
        }
        let mut position = start;
        for chunk in tokens.chunks(work.rows) {
            if let Err(error) = self.step(memory, chunk, position, work) {
                // The first error is the one that tells; a second one here would say the same.
                let _ = memory.truncate(start);
                return Err(StepError::Memory(error));
            }
            position += chunk.len();
        }
        Ok(())
    }

    /// The logits after the last token read with `work`: one number per token.
    pub(crate) fn logits(&self, work: &Workspace, out: &mut [f32]) {
        assert_eq!(out.len(), self.config.vocabulary(), "one logit per token");
        let width = self.config.code_width();
        let row = work.last * residual_width(&self.config);
        let recalled = row + recalled_channel(&self.config);
        self.unembedding.apply(&work.residual[recalled..recalled + width], out);
    }

    /// Embed, then twice attention and residual, for one chunk.
    fn step<M: Memory>(
        &self,
        memory: &mut M,
        tokens: &[Token],
        position: usize,
        work: &mut Workspace,
    ) -> Result<(), M::Error> {
        let config = &self.config;
        let n = tokens.len();
        let stream = residual_width(config);
        let q_row = config.n_heads * config.head_dim;
        let kv_row = config.code_width();
        let residual = &mut work.residual[..n * stream];
        for (row, &token) in residual.chunks_exact_mut(stream).zip(tokens) {
            embed(config, token, row);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let q = &mut work.q[..n * q_row];
            let k = &mut work.k[..n * kv_row];
            let v = &mut work.v[..n * kv_row];
            let heads = &mut work.heads[..n * q_row];
            for (i, row) in residual.chunks_exact(stream).enumerate() {
                let q = &mut q[i * q_row..][..q_row];
                let k = &mut k[i * kv_row..][..kv_row];
                layer.q.apply(row, q);
                layer.k.apply(row, k);
                layer.v.apply(row, &mut v[i * kv_row..][..kv_row]);
                if layer.rotated {
                    self.rotation.turn(position + i, q);
                    self.rotation.turn(position + i, k);
                }
            }
            memory.append(index, k, v, n)?;
            memory.attend(index, q, heads)?;
            for (row, heads) in residual.chunks_exact_mut(stream).zip(heads.chunks_exact(q_row)) {
                layer.o.add(heads, &mut row[layer.o_channel..]);
            }
        }
        work.last = n - 1;
        Ok(())
    }
}

/// The buffers of one request: as many rows of activations as a chunk has tokens.
#[derive(Debug)]
pub(crate) struct Workspace {
    rows: usize,
    last: usize,
    residual: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    heads: Vec<f32>,
}

impl Workspace {
    /// Buffers for chunks of `rows` tokens.
    pub(crate) fn new(config: &Config, rows: usize) -> Workspace {
        assert!(rows > 0, "a chunk has at least one row");
        let q_row = config.n_heads * config.head_dim;
        let kv_row = config.code_width();
        Workspace {
            rows,
            last: 0,
            residual: vec![0.0; rows * residual_width(config)],
            q: vec![0.0; rows * q_row],
            k: vec![0.0; rows * kv_row],
            v: vec![0.0; rows * kv_row],
            heads: vec![0.0; rows * q_row],
        }
    }
}
