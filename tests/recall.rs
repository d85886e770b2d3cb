//! The decoder of `examples/recall` over every kind of memory.
//!
//! Answers say that the right rows were there; logits say that the arithmetic over them was right.
//! The oracle attends in `f64`, one exponential per key, and shares no line with the crate.

extern crate alloc;

#[path = "../examples/recall/decoder.rs"]
mod decoder;
#[path = "../examples/recall/task.rs"]
mod task;

use core::convert::Infallible;

use decoder::{Config, Decoder, Memory, Token, code};
use task::{Answer, Desk, Digest, Task, ask};

/// Rows as they came, attention in `f64`.
struct Oracle {
    config: Config,
    keys: [Vec<f32>; Config::N_LAYERS],
    values: [Vec<f32>; Config::N_LAYERS],
    len: usize,
}

impl Oracle {
    fn new(config: &Config) -> Oracle {
        Oracle { config: *config, keys: Default::default(), values: Default::default(), len: 0 }
    }

    /// One query row of one head over the first `len` positions of KV head `kv_head`.
    fn attend_row(&self, layer: usize, kv_head: usize, len: usize, q: &[f32], out: &mut [f32]) {
        let width = self.config.head_dim;
        let row = |rows: &'_ [f32], position: usize| -> core::ops::Range<usize> {
            let begin = (position * self.config.n_kv_heads + kv_head) * width;
            debug_assert!(begin + width <= rows.len());
            begin..begin + width
        };
        let (keys, values) = (&self.keys[layer], &self.values[layer]);
        let mut scores: Vec<f64> = (0..len)
            .map(|position| {
                let key = &keys[row(keys, position)];
                let product: f64 =
                    q.iter().zip(key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                product / (width as f64).sqrt()
            })
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut denominator = 0.0;
        for score in &mut scores {
            *score = (*score - most).exp();
            denominator += *score;
        }
        let mut sums = vec![0.0f64; width];
        for (position, weight) in scores.iter().enumerate() {
            let value = &values[row(values, position)];
            for (sum, &number) in sums.iter_mut().zip(value) {
                *sum += weight * f64::from(number);
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = (sum / denominator) as f32;
        }
    }
}

impl Memory for Oracle {
    type Error = Infallible;

    fn len(&self) -> usize {
        self.len
    }

    fn append(&mut self, layer: usize, k: &[f32], v: &[f32], _: usize) -> Result<(), Infallible> {
        self.keys[layer].extend_from_slice(k);
        self.values[layer].extend_from_slice(v);
        self.len = self.keys[Config::N_LAYERS - 1].len() / self.config.code_width();
        Ok(())
    }

    fn attend(&mut self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<(), Infallible> {
        let Config { n_heads, n_kv_heads, head_dim, .. } = self.config;
        let row_len = n_heads * head_dim;
        let n_q = q.len() / row_len;
        let held = self.keys[layer].len() / self.config.code_width();
        for i in 0..n_q {
            for head in 0..n_heads {
                let at = i * row_len + head * head_dim;
                let kv_head = head / (n_heads / n_kv_heads);
                let len = held - n_q + i + 1;
                let q = &q[at..at + head_dim];
                self.attend_row(layer, kv_head, len, q, &mut out[at..at + head_dim]);
            }
        }
        Ok(())
    }

    fn truncate(&mut self, len: usize) -> Result<(), Infallible> {
        for rows in self.keys.iter_mut().chain(&mut self.values) {
            rows.truncate(len * self.config.code_width());
        }
        self.len = len;
        Ok(())
    }
}

/// What one request said: every logit of every question, and the answers.
struct Run {
    logits: Vec<f32>,
    answers: Vec<Answer>,
}

impl Run {
    fn digest(&self) -> Digest {
        let mut digest = Digest::EMPTY;
        digest.numbers(&self.logits);
        digest
    }

    fn assert_all_right(&self, who: &str) {
        for answer in &self.answers {
            assert!(answer.is_right(), "{who}: {answer:?}");
        }
    }

    fn least_weight(&self) -> f32 {
        self.answers.iter().map(|answer| answer.weight).fold(f32::INFINITY, f32::min)
    }

    fn best_runner_up(&self) -> f32 {
        self.answers.iter().map(|answer| answer.runner_up).fold(0.0, f32::max)
    }
}

/// Reads the list of `request` in chunks of `rows` and asks every `every`-th question.
fn run<M: Memory>(
    decoder: &Decoder,
    task: &Task,
    request: usize,
    rows: usize,
    every: usize,
    memory: &mut M,
) -> Run
where
    M::Error: core::fmt::Debug,
{
    let mut desk = Desk::new(decoder.config(), rows);
    let list = task.list(decoder.config(), request);
    decoder.forward(memory, &list, &mut desk.work).unwrap();
    let mut run = Run { logits: Vec::new(), answers: Vec::new() };
    for index in (0..task.keys()).step_by(every) {
        run.answers.push(ask(decoder, task, request, index, memory, &mut desk).unwrap());
        run.logits.extend_from_slice(&desk.logits);
        assert_eq!(memory.len(), list.len(), "a question leaves nothing behind");
    }
    run
}

const SMALL: Task = Task { shared_pairs: 60, own_pairs: 240, values: 97 };

#[test]
fn the_circuit_recalls_in_f64() {
    let decoder = Decoder::new(SMALL.config()).unwrap();
    let run = run(&decoder, &SMALL, 1, 64, 1, &mut Oracle::new(decoder.config()));
    println!(
        "{} tokens: least weight {}, best runner-up {}, digest {:016x}",
        SMALL.list_len(),
        run.least_weight(),
        run.best_runner_up(),
        run.digest().0
    );
    run.assert_all_right("oracle");
}

/// The margins that the sizes of the example rest on, at their full length.
#[test]
#[ignore = "half a minute of f64; run it when a size or a sharpness changes"]
fn the_margins_hold_at_full_length() {
    for own_pairs in [2048, 4096] {
        let task = Task { shared_pairs: 256, own_pairs, values: 1021 };
        let decoder = Decoder::new(task.config()).unwrap();
        let run = run(&decoder, &task, 3, 256, 7, &mut Oracle::new(decoder.config()));
        println!(
            "{} tokens: least weight {}, best runner-up {}",
            task.list_len(),
            run.least_weight(),
            run.best_runner_up(),
        );
        run.assert_all_right("oracle");
    }
}

/// A pair of codes that agree by chance must not be taken for a match in any head.
#[test]
fn the_codes_are_well_separated() {
    let config = Task { shared_pairs: 256, own_pairs: 2048, values: 1021 }.config();
    let width = config.head_dim;
    let words: Vec<Vec<u64>> = (0..config.vocabulary() as u32)
        .map(|token| {
            (0..config.n_kv_heads)
                .map(|head| {
                    (0..width).fold(0, |word, d| {
                        let sign = code(Token(token), head * width + d);
                        word << 1 | u64::from(sign > 0.0)
                    })
                })
                .collect()
        })
        .collect();
    let (mut worst_head, mut worst_code) = (0, 0);
    for (i, a) in words.iter().enumerate() {
        for b in &words[..i] {
            let product = |a: u64, b: u64| width as i32 - 2 * (a ^ b).count_ones() as i32;
            let products = a.iter().zip(b).map(|(&a, &b)| product(a, b));
            worst_head = worst_head.max(products.clone().max().unwrap());
            worst_code = worst_code.max(products.sum());
        }
    }
    println!("worst product of two codes: {worst_head} of {width} in a head, {worst_code} of 128");
    assert!(worst_head <= 48 && worst_code <= 72);
}
