//! Attention by its formula, in double precision, one position after the other.
//!
//! It calls nothing of the crate: no kernel, no page, no option type. What it says is what the
//! documentation of `AttentionOptions` says, line by line.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::numbers::Numbers;
use super::real;

/// The sizes of one attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Query heads that share one of them.
    pub group: usize,
    /// Numbers in a key row.
    pub k_width: usize,
    /// Numbers in a value row.
    pub v_width: usize,
    /// Query rows, which stand for the last positions.
    pub n_q: usize,
    /// Positions.
    pub len: usize,
}

impl Sizes {
    /// Query heads.
    pub fn n_heads(&self) -> usize {
        self.n_kv_heads * self.group
    }
}

/// Every option of an attention call, as plain values.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// 1 / sqrt(k_width) where there is none.
    pub scale: Option<f32>,
    /// The bound of scores.
    pub soft_cap: Option<f32>,
    /// One ALiBi slope a query head.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Positions seen up to the query, its own included.
    pub window: Option<usize>,
    /// Positions at the beginning that are seen beside a window.
    pub keep_first: Option<usize>,
    /// One learned logit a query head.
    pub sinks: Option<Vec<f32>>,
    /// Whether later keys are hidden.
    pub causal: bool,
    /// The only positions seen.
    pub positions: Option<Range<usize>>,
    /// The last query rows are a tree: the parent of each, a row of the tree before it, or `None`.
    pub tree: Vec<Option<usize>>,
}

impl Rules {
    /// Plain causal attention.
    pub const PLAIN: Rules = Rules {
        scale: None,
        soft_cap: None,
        alibi_slopes: None,
        window: None,
        keep_first: None,
        sinks: None,
        causal: true,
        positions: None,
        tree: Vec::new(),
    };
    /// [`Rules::some`]: a scale.
    pub const SCALE: u8 = 1;
    /// [`Rules::some`]: a soft cap.
    pub const CAP: u8 = 2;
    /// [`Rules::some`]: slopes.
    pub const ALIBI: u8 = 4;
    /// [`Rules::some`]: a window.
    pub const WINDOW: u8 = 8;
    /// [`Rules::some`]: sinks.
    pub const SINKS: u8 = 16;
    /// [`Rules::some`]: later keys are seen.
    pub const OPEN: u8 = 32;
    /// [`Rules::some`]: a range of positions.
    pub const PART: u8 = 64;
    /// [`Rules::some`]: first positions, with a window.
    pub const FIRST: u8 = 128;
    /// [`Rules::some`]: all of them.
    pub const ALL: u8 = 255;

    /// The options whose bits are set, with random values that are exact in `f32`.
    pub fn some(mask: u8, sizes: &Sizes, numbers: &mut Numbers) -> Rules {
        let has = |bit: u8| mask & bit != 0;
        // Drawn whether used or not, so that one option on does not change another's value.
        let scale = numbers.pick(&[0.0625, 0.25, 0.5, 1.0, -0.25]);
        let cap = numbers.pick(&[0.5, 5.0, 30.0, 50.0]);
        let slopes = (0..sizes.n_heads()).map(|_| 1.0 / (2 << numbers.below(8)) as f32).collect();
        let window = numbers.between(1, sizes.len + 3);
        let sinks = (0..sizes.n_heads()).map(|_| 2.0 * numbers.normal()).collect();
        let first = numbers.between(0, sizes.len);
        let last = numbers.between(first, sizes.len + 2);
        // Of a stream of its own, which leaves what is drawn after the rules as it was.
        let kept = numbers.clone().between(1, sizes.len / 2 + 1);
        Rules {
            scale: has(Self::SCALE).then_some(scale),
            soft_cap: has(Self::CAP).then_some(cap),
            alibi_slopes: has(Self::ALIBI).then_some(slopes),
            window: has(Self::WINDOW | Self::FIRST).then_some(window),
            keep_first: has(Self::FIRST).then_some(kept),
            sinks: has(Self::SINKS).then_some(sinks),
            causal: !has(Self::OPEN),
            positions: has(Self::PART).then_some(first..last),
            tree: Vec::new(),
        }
    }
}

/// One attention call: sizes, options and inputs.
#[derive(Clone, Debug)]
pub struct Case {
    /// How much of everything.
    pub sizes: Sizes,
    /// The options.
    pub rules: Rules,
    /// `[n_q][n_heads][k_width]`.
    pub q: Vec<f32>,
    /// `[len][n_kv_heads][k_width]`.
    pub k: Vec<f32>,
    /// `[len][n_kv_heads][v_width]`.
    pub v: Vec<f32>,
}

impl Case {
    /// Inputs of variance one, and the options whose bits are set.
    pub fn random(sizes: Sizes, mask: u8, seed: u64) -> Case {
        let mut numbers = Numbers::new(seed);
        let rules = Rules::some(mask, &sizes, &mut numbers);
        Case {
            sizes,
            rules,
            q: numbers.normals(sizes.n_q * sizes.n_heads() * sizes.k_width),
            k: numbers.normals(sizes.len * sizes.n_kv_heads * sizes.k_width),
            v: numbers.normals(sizes.len * sizes.n_kv_heads * sizes.v_width),
        }
    }

    /// The key row of a position and KV head.
    pub fn key(&self, position: usize, kv_head: usize) -> &[f32] {
        row(&self.k, position * self.sizes.n_kv_heads + kv_head, self.sizes.k_width)
    }

    /// The value row of a position and KV head.
    pub fn value(&self, position: usize, kv_head: usize) -> &[f32] {
        row(&self.v, position * self.sizes.n_kv_heads + kv_head, self.sizes.v_width)
    }

    /// The position that a query row stands for; negative where there are more rows than positions.
    pub fn position(&self, query: usize) -> i64 {
        self.sizes.len as i64 - self.sizes.n_q as i64 + query as i64
    }

    /// How far a position is from the one that a query row stands for.
    fn distance(&self, query: usize, key: usize) -> f64 {
        (self.position(query) - key as i64).unsigned_abs() as f64
    }

    /// Whether a query row sees a position.
    pub fn sees(&self, query: usize, key: usize) -> bool {
        let (rules, position, key_at) = (&self.rules, self.position(query), key as i64);
        let in_window = match rules.window {
            Some(window) => {
                key_at + window as i64 > position || rules.keep_first.is_some_and(|n| key < n)
            }
            None => true,
        };
        let in_part = rules.positions.as_ref().is_none_or(|part| part.contains(&key));
        (!rules.causal || key_at <= position) && in_window && in_part && self.descends(query, key)
    }

    /// Whether a position is before the tree, or an ancestor of the query row in it, or its own.
    fn descends(&self, query: usize, key: usize) -> bool {
        let tree = &self.rules.tree;
        let Some(mut row) = (query + tree.len()).checked_sub(self.sizes.n_q) else { return true };
        let Some(key) = (key + tree.len()).checked_sub(self.sizes.len) else { return true };
        while row != key {
            match tree[row] {
                Some(parent) => row = parent,
                None => return false,
            }
        }
        true
    }
}

fn row(numbers: &[f32], index: usize, width: usize) -> &[f32] {
    &numbers[index * width..][..width]
}

/// What the formula gives, and what its accuracy can be measured by.
#[derive(Clone, Debug)]
pub struct Truth {
    /// `[n_q][n_heads][v_width]`.
    pub out: Vec<f64>,
    /// `[n_q][n_heads]`, sinks left out.
    pub lse: Vec<f64>,
    /// For each of those rows, the largest sum of sizes that a score is made of:
    /// `|scale| x max_j sum_i |q_i k_ji|` over the keys it sees, and the bias of the key that
    /// scores most. (The bias of a key far behind that one may be large, but its weight is not.)
    pub reach: Vec<f64>,
    /// For each of those rows, the largest `|v|` it sees.
    pub most: Vec<f64>,
}

impl Truth {
    /// How far from [`out`](Self::out) the numbers of a row may be, by what rounding in `f32` can
    /// do: `2e-6 x max |v|` where nothing can lengthen a score of inputs of variance one, else
    /// `max |v| x (1e-6 + 2^-22 x reach)`.
    pub fn out_bound(&self, rules: &Rules, row: usize) -> f64 {
        let plain =
            rules.scale.is_none() && rules.soft_cap.is_none() && rules.alibi_slopes.is_none();
        self.most[row] * if plain { 2e-6 } else { self.rounding(row) }
    }

    /// How far from [`lse`](Self::lse) that of a row may be: the logarithm is rounded to `f32` at
    /// the end.
    pub fn lse_bound(&self, row: usize) -> f64 {
        self.rounding(row) + self.lse[row].abs() / 8_388_608.0
    }

    fn rounding(&self, row: usize) -> f64 {
        1e-6 + self.reach[row] / 4_194_304.0
    }
}

/// The answer to a case.
pub fn attention(case: &Case) -> Truth {
    let sizes = case.sizes;
    let rows = sizes.n_q * sizes.n_heads();
    let mut truth = Truth {
        out: vec![0.0; rows * sizes.v_width],
        lse: vec![f64::NEG_INFINITY; rows],
        reach: vec![0.0; rows],
        most: vec![0.0; rows],
    };
    for index in 0..rows {
        let (query, head) = (index / sizes.n_heads(), index % sizes.n_heads());
        let out = &mut truth.out[index * sizes.v_width..][..sizes.v_width];
        let (lse, reach, most) = one_row(case, query, head, out);
        (truth.lse[index], truth.reach[index], truth.most[index]) = (lse, reach, most);
    }
    truth
}

fn one_row(case: &Case, query: usize, head: usize, out: &mut [f64]) -> (f64, f64, f64) {
    let (sizes, rules) = (case.sizes, &case.rules);
    let kv_head = head / sizes.group;
    let q = row(&case.q, query * sizes.n_heads() + head, sizes.k_width);
    let scale = match rules.scale {
        Some(scale) => f64::from(scale),
        None => 1.0 / real::sqrt(sizes.k_width as f64),
    };
    let (mut reach, mut most) = (0.0f64, 0.0f64);
    let mut scores = Vec::new();
    for position in (0..sizes.len).filter(|position| case.sees(query, *position)) {
        let (mut dot, mut size) = (0.0, 0.0);
        for (a, b) in q.iter().zip(case.key(position, kv_head)) {
            dot += f64::from(*a) * f64::from(*b);
            size += (f64::from(*a) * f64::from(*b)).abs();
        }
        reach = reach.max(size * scale.abs());
        for number in case.value(position, kv_head) {
            most = most.max(f64::from(number.abs()));
        }
        let mut score = scale * dot;
        if let Some(cap) = rules.soft_cap {
            score = f64::from(cap) * real::tanh(score / f64::from(cap));
        }
        if let Some(slopes) = &rules.alibi_slopes {
            score -= f64::from(slopes[head]) * case.distance(query, position);
        }
        scores.push((position, score));
    }
    let Some(max) = scores.iter().map(|(_, score)| *score).reduce(f64::max) else {
        return (f64::NEG_INFINITY, reach, most);
    };
    let mut denom = 0.0;
    for (position, score) in &scores {
        if let Some(slopes) = &rules.alibi_slopes
            && *score == max
        {
            reach += f64::from(slopes[head].abs()) * case.distance(query, *position);
        }
        let weight = real::exp(score - max);
        denom += weight;
        for (sum, number) in out.iter_mut().zip(case.value(*position, kv_head)) {
            *sum += weight * f64::from(*number);
        }
    }
    // A sink far above every score makes the quotient 0, as it should.
    let sink = rules.sinks.as_ref().map_or(0.0, |sinks| real::exp(f64::from(sinks[head]) - max));
    for sum in out.iter_mut() {
        *sum /= denom + sink;
    }
    (max + real::ln(denom), reach, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_keys(rules: Rules) -> Truth {
        let sizes = Sizes { n_kv_heads: 1, group: 1, k_width: 1, v_width: 2, n_q: 1, len: 2 };
        let (q, k) = (vec![2.0], vec![1.0, 3.0]);
        attention(&Case { sizes, rules, q, k, v: vec![1.0, 0.0, 0.0, 1.0] })
    }

    /// Worked by hand: scores 2 and 6, and what each option makes of them.
    #[test]
    fn two_keys_by_hand() {
        let close = |truth: Truth, weights: [f64; 2], lse: f64| {
            let near = |a: f64, b: f64| (a - b).abs() < 1e-14;
            assert!(near(truth.out[0], weights[0]) && near(truth.out[1], weights[1]), "{truth:?}");
            assert!(near(truth.lse[0], lse), "{truth:?}");
        };
        let softmax = |a: f64, b: f64| {
            let sum = a.exp() + b.exp();
            ([a.exp() / sum, b.exp() / sum], sum.ln())
        };
        let plain = Rules::PLAIN;
        let (weights, lse) = softmax(2.0, 6.0);
        close(two_keys(plain.clone()), weights, lse);
        let sinks = Rules { sinks: Some(vec![lse as f32]), ..plain.clone() };
        let half = (f64::from(lse as f32) - lse).exp();
        close(two_keys(sinks), weights.map(|weight| weight / (1.0 + half)), lse);
        let (weights, lse) = softmax(1.0, 3.0);
        close(two_keys(Rules { scale: Some(0.5), ..plain.clone() }), weights, lse);
        let (weights, lse) = softmax(4.0 * 0.5f64.tanh(), 4.0 * 1.5f64.tanh());
        close(two_keys(Rules { soft_cap: Some(4.0), ..plain.clone() }), weights, lse);
        let (weights, lse) = softmax(2.0 - 0.25, 6.0);
        close(two_keys(Rules { alibi_slopes: Some(vec![0.25]), ..plain.clone() }), weights, lse);
        close(two_keys(Rules { window: Some(1), ..plain.clone() }), [0.0, 1.0], 6.0);
        close(two_keys(Rules { positions: Some(0..1), ..plain.clone() }), [1.0, 0.0], 2.0);
        let nothing = two_keys(Rules { positions: Some(2..9), ..plain });
        assert_eq!((nothing.out, nothing.lse[0]), (vec![0.0; 2], f64::NEG_INFINITY));
    }

    #[test]
    fn the_mask_is_as_drawn() {
        let sizes = Sizes { n_kv_heads: 1, group: 1, k_width: 1, v_width: 1, n_q: 2, len: 4 };
        let mut case = Case::random(sizes, 0, 1);
        let seen = |case: &Case| -> Vec<Vec<usize>> {
            (0..2).map(|q| (0..4).filter(|k| case.sees(q, *k)).collect()).collect()
        };
        assert_eq!(seen(&case), [vec![0, 1, 2], vec![0, 1, 2, 3]]);
        case.rules.window = Some(2);
        assert_eq!(seen(&case), [vec![1, 2], vec![2, 3]]);
        case.rules.causal = false;
        assert_eq!(seen(&case), [vec![1, 2, 3], vec![2, 3]]);
        case.rules.positions = Some(0..3);
        assert_eq!(seen(&case), [vec![1, 2], vec![2]]);
    }
}
