//! Attention on the workloads that the README's tables are about, next to what the processor could
//! do at most.
//!
//! ```text
//! cargo run --release --example workload -- --workload decode-L8B-4096
//! cargo run --release --example workload -- --workload all --rotate 16 --json
//! ```
//!
//! Names, inputs, counting and output are those of the harnesses in `benches/peers`, which measure
//! other implementations, so that lines of both can stand in one table. Blocks are in random order.
//! The answers are compared with double precision before anything is timed.
//!
//! Two figures are ours alone. `READ` is a call that loads the same bytes from the same blocks and
//! does nothing with them; `FMA` is the rate of multiply-adds alone. Decode cannot be faster than
//! the one or the other, prefill not than the second.

mod inputs;
mod listed;
mod measure;
mod options;
mod problem;
mod report;
mod truth;

use core::error::Error;
use std::process::ExitCode;

use paged_kv::Element;
use paged_kv::internal::workloads::{WORKLOADS, Workload};

use inputs::Inputs;
use measure::{Effort, measure};
use options::{Choice, Options};
use problem::{Problem, Setup};
use report::{Distance, Limits, Record};
use truth::Truth;

/// An answer is not right, or the file is not the table.
const WRONG: u8 = 1;
/// The options make no sense.
const USAGE: u8 = 2;

/// From the truth over the rows as they are stored. Inputs have unit variance; what `f32` loses
/// over the longest of these sums is a tenth of it.
const MOST_ERROR: Distance = Distance(1e-5);

fn main() -> ExitCode {
    let outcome = match options::parse(std::env::args().skip(1)) {
        Ok(Choice::Run(options)) => run(&options),
        Ok(Choice::List) => {
            WORKLOADS.iter().for_each(list);
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

fn list(workload: &Workload) {
    let (name, flops) = (workload.name, workload.flops() / 1e6);
    println!("{name:20} {flops:9.0} MFLOP {:10} numbers of keys and values", workload.kv_numbers());
}

fn check(path: &str) -> Result<bool, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let differences = listed::differences(&text);
    differences.iter().for_each(|difference| println!("{difference}"));
    Ok(differences.is_empty())
}

/// Measures all that was asked for: whether every answer was right.
fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let one = match options.dtype.as_str() {
        "f32" => one::<f32>,
        other => return Err(format!("nothing is stored as {other}").into()),
    };
    let mut right = true;
    for workload in &options.workloads {
        right &= one(options, workload)?;
    }
    Ok(right)
}

/// Measures one workload in one type.
fn one<E: Element>(options: &Options, workload: &Workload) -> Result<bool, Box<dyn Error>> {
    let Options { level, block_size, rotate, .. } = *options;
    let inputs = Inputs::new(workload);
    let mut problem =
        Problem::<E>::new(workload, &inputs, Setup { block_size, level, copies: rotate })?;
    problem.call(0);
    let errors = options.check.then(|| {
        let given = Truth::new(workload, &inputs.q, &inputs.k, &inputs.v);
        let (k, v) = problem.stored();
        let stored = Truth::new(workload, &inputs.q, &k, &v);
        (given.distance(problem.answer()), stored.distance(problem.answer()))
    });
    let effort = Effort { seconds: options.seconds, rounds: options.rounds, copies: rotate };
    let measured = measure(&mut problem, level, effort);
    let record = Record {
        peer: "paged-kv",
        workload: workload.name,
        dtype: E::NAME,
        threads: options.threads,
        rotate,
        times: measured.calls,
        kv_bytes: problem.kv_bytes(),
        flops: workload.flops(),
        errors,
        limits: Some(Limits {
            level: level.name(),
            block_size,
            read: measured.reads,
            fma: measured.fma,
        }),
    };
    if options.json {
        println!("{}", record.json());
    } else {
        println!("{record}");
    }
    Ok(errors.is_none_or(|(_, stored)| stored <= MOST_ERROR))
}
