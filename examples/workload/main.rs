//! Attention on the workloads that the README's tables are about, next to what the processor could
//! do at most.
//!
//! ```text
//! cargo run --release --example workload -- --workload decode-L8B-4096
//! cargo run --release --example workload -- --workload all --rotate 16 --json
//! cargo run --release --example workload -- --workload decode-L8B-b8-4096 --dtype all --threads 2
//! ```
//!
//! Names, inputs, counting and output are those of the harnesses in `benches/peers`, which measure
//! other implementations, so that lines of both can stand in one table. Blocks are in random order.
//! The answers are compared with double precision before anything is timed.
//!
//! One sequence on one thread goes through the door for one sequence. Everything else is one call
//! of a [`BatchPlan`](paged_kv::batch::BatchPlan), made before anything is timed, whose workers
//! stand on a core each.
//!
//! Two figures are ours alone. `READ` is a call that loads the same bytes from the same blocks on
//! as many threads and does nothing with them; `FMA` is the rate of multiply-adds of `f32` alone.
//! Decode cannot be faster than the one or the other, prefill not than the second, except at the
//! levels that multiply something narrower than `f32`. Those are not exact and only measured on
//! request.

mod cores;
mod inputs;
mod listed;
mod measure;
mod options;
mod problem;
mod report;
mod truth;

use core::error::Error;
use std::process::ExitCode;

use paged_kv::batch::{Inline, ThreadPool};
use paged_kv::internal::workloads::{WORKLOADS, Workload};
use paged_kv::{Element, Int4, Int8, Level, bf16, f16};

use inputs::Inputs;
use measure::{Effort, measure};
use options::{Choice, Options};
use problem::{Problem, Setup, Workers};
use report::{Distance, Limits, Record};
use truth::Truth;

/// An answer is not right, or the file is not the table.
const WRONG: u8 = 1;
/// The options make no sense.
const USAGE: u8 = 2;

/// From the truth over the rows as they are stored. Inputs have unit variance; what `f32` loses
/// over the longest of these sums is a tenth of it.
const MOST_ERROR: Distance = Distance(1e-5);

/// The same, where factors are rounded to bf16 or bytes before they are multiplied: 2^-8 of the
/// largest value, and among millions of normal numbers that is 5.5.
const MOST_ROUNDED_ERROR: Distance = Distance(5.5 / 256.0);

fn main() -> ExitCode {
    let outcome = match options::parse(std::env::args().skip(1)) {
        Ok(Choice::Run(options)) => run(&options),
        Ok(Choice::List) => {
            list();
            Ok(true)
        }
        Ok(Choice::Check(path)) => check(&path),
        Ok(Choice::Help) => {
            print!("{}", options::HELP);
            Ok(true)
        }
        Err(error) => Err(format!("{error}\n\n{}", options::HELP).into()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(WRONG),
        Err(error) => {
            eprintln!("workload: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn list() {
    for workload in &WORKLOADS {
        let (name, flops, numbers) = (workload.name, workload.flops() / 1e6, workload.kv_numbers());
        println!("{name:20} {flops:9.0} MFLOP {numbers:10} numbers of keys and values");
    }
    let exact: Vec<&str> = Level::available().map(Level::name).collect();
    let others: Vec<&str> = options::on_request().map(Level::name).collect();
    println!("levels: {}", exact.join(" "));
    println!("levels on request: {}", others.join(" "));
}

fn check(path: &str) -> Result<bool, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let differences = listed::differences(&text);
    differences.iter().for_each(|difference| println!("{difference}"));
    Ok(differences.is_empty())
}

/// Measures all that was asked for: whether every answer was right.
fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let pool: ThreadPool;
    let workers: Workers<'_> = if options.threads > 1 {
        pool = cores::pool(options.threads);
        &pool
    } else {
        &Inline
    };
    let mut right = true;
    for workload in &options.workloads {
        let inputs = Inputs::new(workload);
        for dtype in &options.dtypes {
            let one = match *dtype {
                "f16" => one::<f16>,
                "bf16" => one::<bf16>,
                "int8" => one::<Int8>,
                "int4" => one::<Int4>,
                _ => one::<f32>,
            };
            right &= one(options, workload, &inputs, workers)?;
        }
    }
    Ok(right)
}

/// Measures one workload in one type, at every level.
fn one<E: Element>(
    options: &Options,
    workload: &Workload,
    inputs: &Inputs,
    workers: Workers<'_>,
) -> Result<bool, Box<dyn Error>> {
    let Options { block_size, rotate, .. } = *options;
    let setup = Setup { block_size, level: options.levels[0], copies: rotate };
    let mut problem = Problem::<E>::new(workload, inputs, setup, workers)?;
    let truths = options.check.then(|| {
        let (k, v) = problem.stored();
        let given = Truth::new(workload, &inputs.q, &inputs.k, &inputs.v);
        (given, Truth::new(workload, &inputs.q, &k, &v))
    });
    let mut right = true;
    for &level in &options.levels {
        problem.level = level;
        problem.call(0);
        let errors = truths.as_ref().map(|(given, stored)| {
            (given.distance(problem.answer()), stored.distance(problem.answer()))
        });
        let effort = Effort { seconds: options.seconds, rounds: options.rounds, copies: rotate };
        let held = (options.threads > 1).then(cores::held);
        let measured = measure(&mut problem, level, effort);
        drop(held);
        let record = Record {
            peer: "paged-kv",
            workload: workload.name,
            dtype: E::NAME,
            level: Some(level),
            threads: options.threads,
            rotate,
            times: measured.calls,
            kv_bytes: problem.kv_bytes(),
            flops: workload.flops(),
            errors,
            limits: Some(Limits { block_size, read: measured.reads, fma: measured.fma }),
        };
        if options.json {
            println!("{}", record.json());
        } else {
            println!("{record}");
        }
        right &= errors.is_none_or(|(_, stored)| stored <= most_error::<E>(level));
    }
    Ok(right)
}

/// How far an answer may be from the truth over the rows as they are stored. What a level does not
/// round it does exactly.
fn most_error<E: Element>(level: Level) -> Distance {
    match (level.name(), E::NAME) {
        ("avx512-bf16", "bf16" | "int8" | "int4") | ("avx512-vnni", "int8") => MOST_ROUNDED_ERROR,
        _ => MOST_ERROR,
    }
}
