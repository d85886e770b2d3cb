//! Those who are measured, each behind the same three questions.
//!
//! What is timed is one call over a whole workload: all heads, all sequences. Keys and values are
//! there already, in whatever layout the peer likes best.

mod ours;

#[cfg(feature = "candle")]
mod candle;
#[cfg(feature = "ggml")]
mod ggml;
#[cfg(any(feature = "ferrox", feature = "frink"))]
mod seed;

use core::error::Error;

use paged_kv::Level;
use paged_kv::internal::workloads::Workload;

use crate::inputs::Inputs;
use crate::problem::Workers;

/// Us.
pub(crate) const OURS: &str = "paged-kv";

pub(crate) const NAMES: [&str; 10] = [
    OURS,
    "ggml-fa",
    "ggml-fa-hm",
    "ggml-mm",
    "ferrox",
    "ferrox-paged",
    "frink",
    "frink-paged",
    "candle-flash",
    "candle-mm",
];

/// A workload, prepared.
pub(crate) trait Peer: Send {
    /// Attends once, over the keys and values of this copy.
    fn call(&mut self, copy: usize);

    /// What the last call of copy 0 gave: `[batch][n_q][n_heads][v_width]`.
    fn answer(&mut self) -> Vec<f32>;

    /// Bytes of keys and values in one copy, as they are stored.
    fn kv_bytes(&self) -> f64;

    /// Keys and values as they are stored, where that is not what the type's name says.
    fn stored(&self) -> Option<(Vec<f32>, Vec<f32>)> {
        None
    }

    /// Whether it divides its work on rayon's threads.
    fn wants_rayon(&self) -> bool {
        true
    }
}

/// What to prepare.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) workload: &'a Workload,
    pub(crate) inputs: &'a Inputs,
    pub(crate) dtype: &'a str,
    pub(crate) copies: usize,
    pub(crate) threads: usize,
    /// For us alone.
    pub(crate) level: Level,
    /// For us alone.
    pub(crate) block_size: usize,
    /// Our threads.
    pub(crate) workers: Workers<'a>,
}

/// Prepares one peer, or says why not.
pub(crate) fn prepare<'a>(
    name: &str,
    task: &Task<'a>,
) -> Result<Box<dyn Peer + 'a>, Box<dyn Error>> {
    match name {
        OURS => ours::prepare(task),
        #[cfg(feature = "ggml")]
        "ggml-fa" => ggml::prepare(task, ggml::Graph::Flash),
        #[cfg(feature = "ggml")]
        "ggml-fa-hm" => ggml::prepare(task, ggml::Graph::FlashHeadMajor),
        #[cfg(feature = "ggml")]
        "ggml-mm" => ggml::prepare(task, ggml::Graph::Products),
        #[cfg(feature = "ferrox")]
        "ferrox" => seed::ferrox::contiguous(task),
        #[cfg(feature = "ferrox")]
        "ferrox-paged" => seed::ferrox::paged(task),
        #[cfg(feature = "frink")]
        "frink" => seed::frink::contiguous(task),
        #[cfg(feature = "frink")]
        "frink-paged" => seed::frink::paged(task),
        #[cfg(feature = "candle")]
        "candle-flash" => candle::prepare(task, true),
        #[cfg(feature = "candle")]
        "candle-mm" => candle::prepare(task, false),
        _ => Err("it is not built in".into()),
    }
}
