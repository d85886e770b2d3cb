//! The calls of attention that this crate is measured by, under the names that it shares with the
//! implementations it is measured against.
//!
//! The head shapes are those of models that people run: `L8B` is Llama 3 8B, `SMOL` SmolLM2 135M,
//! `GEM` Gemma 2 2B, and `MHA` OPT 1.3B halved, for models without grouping. `benches/peers` holds
//! the same table as JSON for those who speak other languages; `tests/workloads.rs` compares.

use super::limits;
use super::oracle::Sizes;

/// The seed of every input.
pub const SEED: u64 = 20_251_129;

/// One call of attention, over one sequence or several of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// What the reports call it.
    pub name: &'static str,
    /// Sequences.
    pub batch: usize,
    /// What each of them is.
    pub sizes: Sizes,
}

impl Workload {
    /// The workload of this name.
    pub fn named(name: &str) -> Option<Workload> {
        WORKLOADS.into_iter().find(|workload| workload.name == name)
    }

    /// See [`limits::causal_flops`].
    pub fn flops(&self) -> f64 {
        self.batch as f64 * limits::causal_flops(&self.sizes)
    }

    /// Numbers in the keys and values of all sequences.
    pub fn kv_numbers(&self) -> usize {
        self.batch * limits::kv_numbers(&self.sizes)
    }

    /// Numbers in the query rows of all sequences.
    pub fn q_numbers(&self) -> usize {
        self.batch * self.sizes.n_q * self.sizes.n_heads() * self.sizes.k_width
    }
}

/// Query heads, KV heads, width.
type Heads = (usize, usize, usize);

const L8B: Heads = (32, 8, 128);
const SMOL: Heads = (9, 3, 64);
const GEM: Heads = (8, 4, 256);
const MHA: Heads = (16, 16, 64);

const fn one(name: &'static str, heads: Heads, n_q: usize, len: usize) -> Workload {
    let (n_heads, n_kv_heads, width) = heads;
    let group = n_heads / n_kv_heads;
    let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len };
    Workload { name, batch: 1, sizes }
}

const fn eight(name: &'static str, heads: Heads, n_q: usize, len: usize) -> Workload {
    Workload { batch: 8, ..one(name, heads, n_q, len) }
}

/// All of them.
pub const WORKLOADS: [Workload; 17] = [
    one("decode-L8B-512", L8B, 1, 512),
    one("decode-L8B-4096", L8B, 1, 4096),
    one("decode-L8B-32768", L8B, 1, 32768),
    one("decode-SMOL-4096", SMOL, 1, 4096),
    one("decode-GEM-4096", GEM, 1, 4096),
    one("decode-MHA-4096", MHA, 1, 4096),
    eight("decode-L8B-b8-4096", L8B, 1, 4096),
    one("prefill-L8B-512", L8B, 512, 512),
    one("prefill-L8B-2048", L8B, 2048, 2048),
    one("chunk-L8B-512+4096", L8B, 512, 4608),
    one("prefill-SMOL-512", SMOL, 512, 512),
    one("prefill-SMOL-2048", SMOL, 2048, 2048),
    one("chunk-SMOL-512+4096", SMOL, 512, 4608),
    one("prefill-GEM-512", GEM, 512, 512),
    one("prefill-MHA-512", MHA, 512, 512),
    one("tiny-decode-SMOL-32", SMOL, 1, 32),
    one("tiny-decode-SMOL-256", SMOL, 1, 256),
];
