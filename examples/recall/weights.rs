//! The weights of the circuit: signs from a hash, cosines from two operations.
//!
//! What is here is computed once, in [`Decoder::new`](super::Decoder::new), from integers and from
//! `f64` additions, multiplications and divisions, which IEEE 754 fixes to the bit. So the weights
//! are the same numbers on a server and on a microcontroller, and no table has to be shipped.

use alloc::vec;
use alloc::vec::Vec;

use super::{Config, Token};

/// The channel that is 1 for every token, from which constant vectors are read.
const ONE: usize = 0;
/// Where a token's own code begins.
const OWN: usize = 1;

fn previous_channel(config: &Config) -> usize {
    OWN + config.code_width()
}

pub(super) fn recalled_channel(config: &Config) -> usize {
    OWN + 2 * config.code_width()
}

pub(super) fn residual_width(config: &Config) -> usize {
    OWN + 3 * config.code_width()
}

pub(super) fn embed(config: &Config, token: Token, row: &mut [f32]) {
    row.fill(0.0);
    row[ONE] = 1.0;
    for (d, number) in row[OWN..OWN + config.code_width()].iter_mut().enumerate() {
        *number = code(token, d);
    }
}

/// Sign `d` of the code of `token`: bit `d % 64` of a hash of the token and of `d / 64`.
pub(crate) fn code(token: Token, d: usize) -> f32 {
    let word = mix((u64::from(token.0) << 32) | (d / 64) as u64);
    if (word >> (d % 64)) & 1 == 1 { 1.0 } else { -1.0 }
}

/// The finaliser of SplitMix64 on a Weyl step: every input bit reaches every output bit.
pub(crate) fn mix(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A matrix with at most one number in each row: row `i` is `weight` at column `column`.
///
/// All projections of this circuit have this form, so it stands for the dense matrix and costs
/// one product per output: the dense ones would take longer than attention.
#[derive(Debug)]
pub(super) struct Selection {
    rows: Vec<Pick>,
}

#[derive(Clone, Copy, Debug)]
struct Pick {
    column: usize,
    weight: f32,
}

impl Selection {
    fn new(rows: usize, pick: impl FnMut(usize) -> Pick) -> Selection {
        Selection { rows: (0..rows).map(pick).collect() }
    }

    pub(super) fn apply(&self, x: &[f32], out: &mut [f32]) {
        for (out, pick) in out.iter_mut().zip(&self.rows) {
            *out = pick.weight * x[pick.column];
        }
    }

    pub(super) fn add(&self, x: &[f32], out: &mut [f32]) {
        for (out, pick) in out.iter_mut().zip(&self.rows) {
            *out += pick.weight * x[pick.column];
        }
    }
}

/// The four projections of a layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) q: Selection,
    pub(super) k: Selection,
    pub(super) v: Selection,
    pub(super) o: Selection,
    /// The channel of the residual stream where `o` begins to add.
    pub(super) o_channel: usize,
    pub(super) rotated: bool,
}

impl Layer {
    pub(super) fn previous_token(config: &Config) -> Layer {
        let width = config.head_dim;
        let half = width / 2;
        let steps = angle_steps(config);
        Layer {
            // The constant (1, 0) of every pair, turned back by one position: RoPE then turns it
            // to the position before the query's own.
            q: Selection::new(config.n_heads * width, |i| {
                let (sin, cos) = steps[i % width % half];
                let number = if i % width < half { cos } else { -sin };
                let gain = head_gain(config, i / width) * config.previous_sharpness;
                Pick { column: ONE, weight: (gain * number) as f32 }
            }),
            k: Selection::new(config.code_width(), |i| Pick {
                column: ONE,
                weight: if i % width < half { 1.0 } else { 0.0 },
            }),
            v: Selection::new(config.code_width(), |i| Pick { column: OWN + i, weight: 1.0 }),
            o: slices_of_heads(config),
            o_channel: previous_channel(config),
            rotated: true,
        }
    }

    pub(super) fn recall(config: &Config) -> Layer {
        let width = config.head_dim;
        let group = config.n_heads / config.n_kv_heads;
        Layer {
            q: Selection::new(config.n_heads * width, |i| {
                let head = i / width;
                let gain = head_gain(config, head) * config.match_sharpness;
                Pick { column: OWN + head / group * width + i % width, weight: gain as f32 }
            }),
            k: Selection::new(config.code_width(), |i| Pick {
                column: previous_channel(config) + i,
                weight: 1.0,
            }),
            v: Selection::new(config.code_width(), |i| Pick { column: OWN + i, weight: 1.0 }),
            o: slices_of_heads(config),
            o_channel: recalled_channel(config),
            rotated: false,
        }
    }
}

/// What a query is multiplied by beside the sharpness: the square root that attention divides by,
/// and an eighth more for each head, so that two heads are never interchangeable.
fn head_gain(config: &Config, head: usize) -> f64 {
    nth_root(config.head_dim as f64, 2) * (1.0 + head as f64 / 8.0)
}

/// The output projection: query head `h` of a group of `m` hands on slice `h % m` of the values of
/// its KV head.
fn slices_of_heads(config: &Config) -> Selection {
    let width = config.head_dim;
    let group = config.n_heads / config.n_kv_heads;
    Selection::new(config.code_width(), |i| {
        let head = i / width * group + i % width / (width / group);
        Pick { column: head * width + i % width, weight: 1.0 }
    })
}

/// The codes of all tokens in panels of 16 tokens, `[panel][d][16]`, so that 16 logits grow in
/// registers while the table is read once, in order.
#[derive(Debug)]
pub(super) struct Unembedding {
    panels: Vec<[f32; 16]>,
    width: usize,
}

impl Unembedding {
    pub(super) fn new(config: &Config) -> Unembedding {
        let (tokens, width) = (config.vocabulary(), config.code_width());
        let mut panels = vec![[0.0; 16]; tokens.div_ceil(16) * width];
        for token in 0..tokens {
            for d in 0..width {
                panels[token / 16 * width + d][token % 16] = code(Token(token as u32), d);
            }
        }
        Unembedding { panels, width }
    }

    /// Sums of 16 signs first, then their sum: the numbers of a good answer are nearly equal, and
    /// adding one number 128 times in a row rounds the same way each time.
    pub(super) fn apply(&self, recalled: &[f32], out: &mut [f32]) {
        for (panel, out) in self.panels.chunks_exact(self.width).zip(out.chunks_mut(16)) {
            let mut sums = [0.0f32; 16];
            for (panel, recalled) in panel.chunks(16).zip(recalled.chunks(16)) {
                let mut part = [0.0f32; 16];
                for (signs, &number) in panel.iter().zip(recalled) {
                    for (part, sign) in part.iter_mut().zip(signs) {
                        *part += sign * number;
                    }
                }
                for (sum, part) in sums.iter_mut().zip(part) {
                    *sum += part;
                }
            }
            out.copy_from_slice(&sums[..out.len()]);
        }
    }
}

/// Cosines and sines of RoPE: for each position the cosines of all pairs, then the sines.
///
/// Pair `j` is channels `j` and `j + width / 2` of a head.
#[derive(Debug)]
pub(super) struct Rotation {
    table: Vec<f32>,
    width: usize,
}

impl Rotation {
    /// Turns by one step at a time in `f64`: after 10,000 steps some 1e-12 is off, and rounding
    /// to `f32` costs 6e-8 anyway.
    pub(super) fn new(config: &Config) -> Rotation {
        let width = config.head_dim;
        let mut table = vec![0.0; config.positions * width];
        for (j, (sin_step, cos_step)) in angle_steps(config).into_iter().enumerate() {
            let (mut sin, mut cos) = (0.0f64, 1.0f64);
            for row in table.chunks_exact_mut(width) {
                row[j] = cos as f32;
                row[j + width / 2] = sin as f32;
                (sin, cos) = (sin * cos_step + cos * sin_step, cos * cos_step - sin * sin_step);
            }
        }
        Rotation { table, width }
    }

    /// Turns every head in `heads` to `position`.
    pub(super) fn turn(&self, position: usize, heads: &mut [f32]) {
        let half = self.width / 2;
        let (cos, sin) = self.table[position * self.width..][..self.width].split_at(half);
        for head in heads.chunks_exact_mut(self.width) {
            let (first, second) = head.split_at_mut(half);
            for j in 0..half {
                let (x, y) = (first[j], second[j]);
                first[j] = x * cos[j] - y * sin[j];
                second[j] = x * sin[j] + y * cos[j];
            }
        }
    }
}

/// Sine and cosine of the angle that each pair of channels turns by in one position:
/// `rope_base ^ (-2 j / width)` for pair `j`.
fn angle_steps(config: &Config) -> Vec<(f64, f64)> {
    let half = config.head_dim / 2;
    let ratio = nth_root(1.0 / config.rope_base, half);
    let mut angle = 1.0;
    let mut steps = Vec::with_capacity(half);
    for _ in 0..half {
        steps.push(sin_cos(angle));
        angle *= ratio;
    }
    steps
}

/// Newton's method from above, where it falls step by step until rounding stops it. Here because
/// core has neither roots nor powers of `f64`, and libm differs from target to target.
fn nth_root(number: f64, n: usize) -> f64 {
    let mut root = if number > 1.0 { number } else { 1.0 };
    loop {
        let mut power = 1.0;
        for _ in 1..n {
            power *= root;
        }
        let next = root - (root * power - number) / (n as f64 * power);
        if next >= root {
            return root;
        }
        root = next;
    }
}

/// Taylor's series for an angle in 0..=1: the first term left out is below 1 / 25! = 6e-26.
fn sin_cos(angle: f64) -> (f64, f64) {
    let (mut sin, mut cos) = (0.0, 0.0);
    let mut term = 1.0;
    for n in 0..25 {
        match n % 4 {
            0 => cos += term,
            1 => sin += term,
            2 => cos -= term,
            _ => sin -= term,
        }
        term *= angle / (n + 1) as f64;
    }
    (sin, cos)
}
