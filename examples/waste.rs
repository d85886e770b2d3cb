//! How much of the memory that requests hold has no row in it: in blocks, in one vector for each
//! request, and where each is given the longest it may become.
//!
//! ```text
//! cargo run --release --example waste
//! ```
//!
//! 64 requests run at a time; each step adds a position to each, and who is done makes room for the
//! next. Lengths are log-normal: prompts of 161 tokens on average and answers of 338, which are the
//! averages that the paper on paged attention (Kwon and others, SOSP 2023, figure 11) gives for
//! ShareGPT's conversations; the spread, sigma 1 of the logarithm, is ours. So the medians are 98
//! and 205. Both are cut off at 1,024. That is short as conversations go, and what a block wastes
//! does not depend on how long its request is: longer ones waste less of what they hold.
//!
//! What blocks waste is what `PagedSequence::stats` says. A vector starts as long as the prompt and
//! doubles when it is full, as `Vec` does.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "it runs on std")]

use paged_kv::cache::{PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;

const REQUESTS: usize = 64;
const MEANS: [f32; 2] = [161.0, 338.0];
const SIGMA: f32 = 1.0;
/// Of a prompt, and of an answer.
const LONGEST: usize = 1024;
/// After so many, those who began together are gone.
const WARM_UP: usize = 2000;

fn main() {
    let [prompt, answer] = MEANS.map(|mean| mean / (SIGMA * SIGMA / 2.0).exp());
    println!(
        "{REQUESTS} requests at a time; medians: {prompt:.0} tokens of prompt, {answer:.0} of \
         answer; sigma {SIGMA}"
    );
    for block_size in [16, 32, 64] {
        let held = measure(block_size, 10_000);
        println!(
            "blocks of {block_size}: {:.0} positions held in {:.1} blocks, {:.0} of them unused: {:.2} %",
            held.rows + held.blocks,
            (held.rows + held.blocks) / block_size as f64,
            held.blocks,
            held.percent(held.blocks)
        );
        if block_size == 64 {
            println!("a vector each, doubled: {:.1} %", held.percent(held.vectors));
            println!("the longest reserved: {:.1} %", held.percent(held.longest));
        }
    }
}

/// Positions with a row, and positions without one in each way to hold them: averages over all steps.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) rows: f64,
    pub(crate) blocks: f64,
    pub(crate) vectors: f64,
    pub(crate) longest: f64,
}

impl Held {
    /// How much of what is held is `unused`.
    pub(crate) fn percent(&self, unused: f64) -> f64 {
        unused / (unused + self.rows) * 100.0
    }
}

struct Request<'a> {
    sequence: PagedSequence<&'a SharedPagedKv>,
    vector: Vec<u8>,
    /// Where it ends.
    len: usize,
}

/// A length, by the standard normal number that it is drawn with.
fn length(mean: f32, normal: f32) -> usize {
    let median = mean / (SIGMA * SIGMA / 2.0).exp();
    ((median * (SIGMA * normal).exp()).round() as usize).clamp(1, LONGEST)
}

fn begin<'a>(shared: &'a SharedPagedKv, numbers: &mut Numbers) -> Request<'a> {
    let normals = numbers.normals(2);
    let (prompt, answer) = (length(MEANS[0], normals[0]), length(MEANS[1], normals[1]));
    let mut sequence = PagedSequence::new(shared);
    write(&mut sequence, prompt);
    Request { sequence, vector: vec![0; prompt], len: prompt + answer }
}

fn write(sequence: &mut PagedSequence<&SharedPagedKv>, n: usize) {
    sequence.reserve(n).expect("the pool holds the longest of all");
    sequence.append(0, &vec![1.0; n], &vec![1.0; n], n).expect("room");
    sequence.commit(n).expect("written");
}

/// Runs so many steps after the warm-up.
pub(crate) fn measure(block_size: usize, steps: usize) -> Held {
    let shared = SharedPagedKv::new(1, block_size, REQUESTS * 2 * LONGEST / block_size, 1, 1);
    let mut numbers = Numbers::new(11);
    let mut running: Vec<_> = (0..REQUESTS).map(|_| begin(&shared, &mut numbers)).collect();
    let mut held = Held::default();
    for step in 0..WARM_UP + steps {
        for request in &mut running {
            if request.vector.len() == request.len {
                request.sequence.release();
                *request = begin(&shared, &mut numbers);
            }
            write(&mut request.sequence, 1);
            request.vector.push(0);
        }
        if step < WARM_UP {
            continue;
        }
        let mut unused = 0;
        for Request { sequence, vector, .. } in &running {
            let stats = sequence.stats();
            unused += stats.waste;
            held.rows += stats.len as f64 / steps as f64;
            held.vectors += (vector.capacity() - vector.len()) as f64 / steps as f64;
            held.longest += (2 * LONGEST - stats.len) as f64 / steps as f64;
        }
        held.blocks += unused as f64 / steps as f64;
        if step % 1000 == 0 {
            // The pool's own count says the same.
            let rows: usize = running.iter().map(|request| request.sequence.len()).sum();
            assert_eq!(shared.stats().layers[0].held * block_size, rows + unused);
        }
    }
    held
}
