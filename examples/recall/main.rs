//! Several requests at once over one pool of KV blocks, with answers that can be checked.
//!
//! ```text
//! cargo run --release --example recall
//! ```
//!
//! Each request reads a list of several thousand tokens behind a prefix that all share, and is
//! asked for every pair in it. The decoder ([`decoder`]) has its weights written down, so nothing
//! is downloaded, and its answers are right exactly when every row of every block is. The program
//! says how many were, and fails if one was not.

extern crate alloc;

mod decoder;
mod options;
mod pool;
mod serve;
mod task;

use core::fmt;
use core::sync::atomic::Ordering;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use decoder::{Config, Decoder};
use options::{Choice, Options};
use pool::{Holder, Pool, PoolPlan};
use serve::{Counters, Outcome, Service, Stage};
use task::{Answer, Task};

/// Pairs in the prefix that all requests share.
const SHARED_PAIRS: usize = 256;
/// Tokens that can stand for a value: a prime, so that hashes spread over all of them.
const VALUES: usize = 1021;
/// Blocks of a pool of the default size that no request needs: they show up as free in the map.
const SPARE_BLOCKS: usize = 8;

/// Not every answer was right, or not every request was served.
const WRONG: u8 = 1;
/// The options make no sense.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let options = match options::parse(std::env::args().skip(1), VALUES) {
        Ok(Choice::Run(options)) => options,
        Ok(Choice::Help) => {
            print!("{}", options::HELP);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("recall: {error}\n\n{}", options::HELP);
            return ExitCode::from(USAGE);
        }
    };
    let task = Task { shared_pairs: SHARED_PAIRS, own_pairs: options.pairs, values: VALUES };
    match run(&options, &task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(WRONG),
        Err(error) => {
            eprintln!("recall: {error}");
            ExitCode::from(USAGE)
        }
    }
}

/// Serves everything and prints what came of it: whether all was right, or why it cannot be tried.
fn run(options: &Options, task: &Task) -> Result<bool, Box<dyn core::error::Error>> {
    let decoder = Decoder::new(task.config())?;
    let plan = plan(options, task);
    let begin = Instant::now();
    let prefix = &task.list(decoder.config(), 0)[..task.prefix_len()];
    let pool = Pool::open(&decoder, plan, prefix)?;
    let need = pool.need(task.positions());
    println!(
        "Each request reads a list of keys and values and is then asked every key. All share one pool,\n\
         so a lost, stale or foreign row is a wrong answer.\n"
    );
    describe(&decoder, task, &plan, &pool);
    let counters = Counters::default();
    counters.tokens.store(pool.prefix_len(), Ordering::Relaxed);
    let service = Service {
        decoder: &decoder,
        task,
        pool: &pool,
        requests: options.requests,
        threads: options.threads,
    };
    let mut progress = Progress::new(options.requests * task.keys());
    let outcomes =
        serve::serve(service, &counters, |change| progress.watch(change, &counters, begin));
    progress.end();
    let (seconds, tokens) =
        (begin.elapsed().as_secs_f64(), counters.tokens.load(Ordering::Relaxed));

    let asked = options.requests * task.keys();
    let right = answers(&decoder, &outcomes);
    print_map(&pool.fullest());
    let shared = pool.shared_blocks();
    let lost = pool.close();
    println!(
        "blocks   in each layer: {} in the pool, {shared} shared by all requests, {need} more for \
         each, {} at once; {lost} lost at the end",
        plan.blocks, options.threads
    );
    println!(
        "speed    {tokens} tokens in {seconds:.2} s, {:.0} a second",
        tokens as f64 / seconds.max(1e-9)
    );
    match serve::digest(&outcomes) {
        Some(digest) => println!("digest   {:016x} of all logits", digest.0),
        None => println!("digest   none: not every request was served"),
    }
    println!("right    {right} of {asked}");
    Ok(right == asked && lost == 0)
}

/// The pool of the options, or one in which as many requests fit as there are threads.
fn plan(options: &Options, task: &Task) -> PoolPlan {
    let shared = task.prefix_len() / options.block_size;
    let need = task.positions().div_ceil(options.block_size) - shared;
    let blocks = options.pool_blocks.unwrap_or(shared + options.threads * need + SPARE_BLOCKS);
    PoolPlan { block_size: options.block_size, blocks, rows: serve::ROWS, level: options.level }
}

fn describe(decoder: &Decoder, task: &Task, plan: &PoolPlan, pool: &Pool) {
    let config = decoder.config();
    println!(
        "decoder  {} layers, {} query heads over {} KV heads of {}, {} tokens; level {}",
        Config::N_LAYERS,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        config.vocabulary(),
        plan.level.name(),
    );
    let numbers = 2 * Config::N_LAYERS * config.code_width() * plan.blocks * plan.block_size;
    println!(
        "pool     {} blocks of {} positions in each layer, {} MiB; {} hold the shared prefix",
        plan.blocks,
        plan.block_size,
        numbers * size_of::<f32>() / (1 << 20),
        pool.shared_blocks(),
    );
    println!(
        "lists    {} tokens, {} of them shared; every key of a list is asked",
        task.list_len(),
        pool.prefix_len(),
    );
}

/// Prints what each request said; returns how many answers were right.
fn answers(decoder: &Decoder, outcomes: &[Result<Outcome, String>]) -> usize {
    let mut all = 0;
    for (request, outcome) in outcomes.iter().enumerate() {
        let name = letter(request);
        match outcome {
            Err(error) => println!("request {name}: not served: {error}"),
            Ok(outcome) => {
                all += outcome.right;
                println!(
                    "request {name}: {} of {} right, the faintest with {:.3} of full weight",
                    outcome.right, outcome.asked, outcome.least_weight
                );
                for answer in &outcome.shown {
                    println!("    {}", Shown { answer, config: decoder.config() });
                }
            }
        }
    }
    all
}

/// An answer in words.
struct Shown<'a> {
    answer: &'a Answer,
    config: &'a Config,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Answer { key, expected, said, weight, runner_up } = *self.answer;
        let name = |token| self.config.name(token);
        write!(f, "{} -> {}, weight {weight:.3}, next {runner_up:.3}", name(key), name(said))?;
        if said != expected {
            write!(f, "  WRONG, it is {}", name(expected))?;
        } else if !self.answer.is_right() {
            write!(f, "  TOO FAINT")?;
        }
        Ok(())
    }
}

/// Characters in a row of the map, and rows at most.
const MAP_WIDTH: usize = 64;
const MAP_ROWS: usize = 16;

/// One character for each block, or for as many as it takes to keep the map small.
fn print_map(holders: &[Holder]) {
    let scale = holders.len().div_ceil(MAP_WIDTH * MAP_ROWS).max(1);
    println!("layer 0 of the pool at its fullest, one character for {scale} block(s):");
    let marks: Vec<char> = holders.chunks(scale).map(mark).collect();
    for (row, marks) in marks.chunks(MAP_WIDTH).enumerate() {
        let line: String = marks.iter().collect();
        println!("  {:>6}  {line}", row * MAP_WIDTH * scale);
    }
    println!("          # shared prefix   a, b, .. requests   . free");
}

/// The holder that most of these blocks have.
fn mark(blocks: &[Holder]) -> char {
    let count = |holder: Holder| blocks.iter().filter(|&&other| other == holder).count();
    match blocks.iter().copied().max_by_key(|&holder| count(holder)) {
        None | Some(Holder::Free) => '.',
        Some(Holder::Shared) => '#',
        Some(Holder::Request(request)) => letter(request),
    }
}

/// The letter of a request; after `Z` they begin again.
fn letter(request: usize) -> char {
    let letters = ('a'..='z').chain('A'..='Z');
    letters.cycle().nth(request).unwrap_or('?')
}

/// One line on stderr that is rewritten on a terminal, and now and then a new one elsewhere.
struct Progress {
    questions: usize,
    rewrites: bool,
    printed: Option<Instant>,
}

impl Progress {
    fn new(questions: usize) -> Progress {
        Progress { questions, rewrites: std::io::stderr().is_terminal(), printed: None }
    }

    fn watch(&mut self, change: Option<(usize, &Stage)>, counters: &Counters, begin: Instant) {
        if let Some((request, stage)) = change {
            let words = match stage {
                Stage::Waiting => "waits for blocks",
                Stage::Reading => "reads its list",
                Stage::Asking => "is asked",
                Stage::Done(outcome) if outcome.is_ok() => "is done",
                Stage::Done(_) => "was not served",
            };
            let clear = if self.rewrites { "\r\x1b[K" } else { "" };
            eprintln!("{clear}request {} {words}", letter(request));
        }
        let pause = if self.rewrites { 0.2 } else { 2.0 };
        if self.printed.is_some_and(|last| last.elapsed().as_secs_f64() < pause) {
            return;
        }
        self.printed = Some(Instant::now());
        let tokens = counters.tokens.load(Ordering::Relaxed);
        let line = format!(
            "{tokens} tokens, {} of {} answers, {:.0} tokens a second",
            counters.answers.load(Ordering::Relaxed),
            self.questions,
            tokens as f64 / begin.elapsed().as_secs_f64().max(1e-9),
        );
        if self.rewrites {
            eprint!("\r\x1b[K{line}");
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }

    fn end(&self) {
        if self.rewrites {
            eprint!("\r\x1b[K");
        }
    }
}
