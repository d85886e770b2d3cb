//! The inputs of a workload: normal numbers that an index determines, the same in every language.
//!
//! `z = mix(seed * 0x100000001B3 + tag * 0xD1B54A32D192ED03 + (i + 1) * 0x9E3779B97F4A7C15)`, where
//! `mix` is that of splitmix64; the halves of `z` become `u1` in (0, 1] and `u2` in [0, 1), and
//! `sqrt(-2 ln u1) cos(2 pi u2)` in `f64` is rounded to `f32` (Box and Muller 1958). The logarithm
//! is the platform's, so the last bit of a number here and there is, too.

use std::thread;

use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::workloads::{SEED, Workload};

/// Query, key and value rows, as `f32`.
#[derive(Debug)]
pub(crate) struct Inputs {
    /// `[batch][n_q][n_heads][k_width]`.
    pub(crate) q: Vec<f32>,
    /// `[batch][len][n_kv_heads][k_width]`.
    pub(crate) k: Vec<f32>,
    /// `[batch][len][n_kv_heads][v_width]`.
    pub(crate) v: Vec<f32>,
}

impl Inputs {
    pub(crate) fn new(workload: &Workload) -> Inputs {
        let heads = workload.batch * workload.sizes.len * workload.sizes.n_kv_heads;
        Inputs {
            q: normals(1, workload.q_numbers()),
            k: normals(2, heads * workload.sizes.k_width),
            v: normals(3, heads * workload.sizes.v_width),
        }
    }
}

fn normals(tag: u64, n: usize) -> Vec<f32> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let share = n.div_ceil(threads).max(1);
    let mut numbers = vec![0.0; n];
    thread::scope(|scope| {
        for (index, part) in numbers.chunks_mut(share).enumerate() {
            scope.spawn(move || fill(tag, index * share, part));
        }
    });
    numbers
}

/// Writes the numbers `first ..`.
fn fill(tag: u64, first: usize, part: &mut [f32]) {
    let stream = SEED
        .wrapping_mul(0x0000_0100_0000_01b3)
        .wrapping_add(tag.wrapping_mul(0xd1b5_4a32_d192_ed03));
    // The stream of a seed adds this to it before each number.
    let mut bits = Numbers::new(stream.wrapping_add((first as u64).wrapping_mul(GOLDEN)));
    for number in part {
        *number = normal(bits.bits());
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn normal(bits: u64) -> f32 {
    let u1 = ((bits >> 32) + 1) as f64 / 4_294_967_296.0;
    let u2 = (bits & 0xffff_ffff) as f64 / 4_294_967_296.0;
    ((-2.0 * u1.ln()).sqrt() * (2.0 * core::f64::consts::PI * u2).cos()) as f32
}
