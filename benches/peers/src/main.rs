//! Other implementations of attention from the crate registry and this one, in one process, taking
//! turns.
//!
//! A comparison of two programs compares two moments of the machine as well. Here everybody is
//! called in every round, and what is reported beside each one's best is the ratio of the best
//! peer to us, over all rounds and in each of them: a ratio that does not hold in every round is
//! not a result.
//!
//! Workloads, inputs, the double-precision truth and the lines of JSON are those of
//! `examples/workload`, whose files are compiled in here.

mod machine;
mod options;
mod peers;
mod turns;

#[path = "../../../examples/workload/inputs.rs"]
mod inputs;
#[path = "../../../examples/workload/problem.rs"]
#[expect(dead_code, reason = "the processor's limits are measured by the example")]
mod problem;
#[path = "../../../examples/workload/report.rs"]
mod report;
#[path = "../../../examples/workload/truth.rs"]
mod truth;

use core::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use half::{bf16, f16};
use paged_kv::Level;
use paged_kv::batch::{Inline, ThreadPool};
use paged_kv::internal::workloads::{WORKLOADS, Workload};

use inputs::Inputs;
use options::{Choice, Options};
use peers::{OURS, Task};
use problem::Workers;
use report::{Distance, Record};
use truth::Truth;
use turns::{Contender, Effort, Ratio};

const USAGE: u8 = 2;

fn main() -> ExitCode {
    let outcome = match options::parse(std::env::args().skip(1)) {
        Ok(Choice::Run(options)) => run(&options),
        Ok(Choice::List) => {
            WORKLOADS.iter().for_each(|workload| println!("{}", workload.name));
            println!("peers: {}", peers::NAMES.join(" "));
            Ok(())
        }
        Ok(Choice::Hold) => {
            machine::hold();
            Ok(())
        }
        Ok(Choice::Help) => {
            print!("{}", options::HELP);
            Ok(())
        }
        Err(error) => Err(format!("{error}\n\n{}", options::HELP).into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peers: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let threads = options.threads;
    for name in ["RAYON_NUM_THREADS", "FERROX_CPU_THREADS", "FRINK_CPU_THREADS"] {
        // SAFETY: no other thread has been started yet.
        unsafe { std::env::set_var(name, threads.to_string()) };
    }
    let mut pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    if machine::pins(threads) {
        pool = pool.start_handler(move |index| machine::pin(index % threads));
    }
    pool.build_global()?;
    let pool: ThreadPool;
    let workers: Workers<'_> = if threads > 1 {
        pool = ThreadPool::with_start_hook(threads, machine::pin);
        &pool
    } else {
        &Inline
    };
    for workload in &options.workloads {
        let inputs = Inputs::new(workload);
        let given = options.check.then(|| Truth::new(workload, &inputs.q, &inputs.k, &inputs.v));
        for dtype in &options.dtypes {
            let level = options.levels[0];
            let Options { block_size, rotate: copies, .. } = *options;
            let inputs = &inputs;
            let task =
                Task { workload, inputs, dtype, copies, threads, level, block_size, workers };
            one(options, &task, given.as_ref());
        }
    }
    Ok(())
}

/// Measures everybody on one workload and type.
fn one(options: &Options, task: &Task<'_>, given: Option<&Truth>) {
    let Task { workload, inputs, dtype, threads, copies: rotate, .. } = *task;
    let rounded = given.map(|_| {
        let (k, v) = (rounded(&inputs.k, dtype), rounded(&inputs.v, dtype));
        Truth::new(workload, &inputs.q, &k, &v)
    });
    let levels = |name| match name {
        OURS => options.levels.iter().copied().map(Some).collect(),
        _ => vec![None],
    };
    let each = options
        .peers
        .iter()
        .flat_map(|&name| levels(name).into_iter().map(move |level: Option<Level>| (name, level)));
    let mut contenders = Vec::new();
    let mut errors: Vec<Option<(Distance, Distance)>> = Vec::new();
    for (name, level) in each {
        let task = Task { level: level.unwrap_or(task.level), ..*task };
        let mut peer = match peers::prepare(name, &task) {
            Ok(peer) => peer,
            Err(error) => {
                eprintln!("{name} is left out of {} in {dtype}: {error}", workload.name);
                continue;
            }
        };
        let mut call = || {
            let begin = Instant::now();
            peer.call(0);
            begin.elapsed().as_secs_f64()
        };
        // The first touches all memory for the first time; a long one is not much changed by that.
        let first = call();
        let trial = if first < 1.0 { first.min(call()) } else { first };
        errors.push(given.zip(rounded.as_ref()).map(|(given, rounded)| {
            let answer = peer.answer();
            let stored = match peer.stored() {
                Some((k, v)) => Truth::new(workload, &inputs.q, &k, &v).distance(&answer),
                None => rounded.distance(&answer),
            };
            (given.distance(&answer), stored)
        }));
        contenders.push(Contender { name, level, peer, trial, rounds: Vec::new() });
    }
    let effort =
        Effort { seconds: options.seconds, rounds: options.rounds, copies: rotate, threads };
    turns::take(&mut contenders, effort);
    for (one, errors) in contenders.iter().zip(errors) {
        let record = Record {
            peer: one.name,
            workload: workload.name,
            dtype,
            level: one.level,
            threads,
            rotate,
            times: one.times(),
            kv_bytes: one.peer.kv_bytes(),
            flops: workload.flops(),
            errors,
            limits: None,
        };
        if options.json {
            println!("{}", record.json());
        } else {
            println!("{record}");
        }
    }
    for us in contenders.iter().filter(|one| one.name == OURS) {
        if let Some(ratio) = turns::ratio(&contenders, us, rotate) {
            let level = us.level.map_or("", Level::name);
            say(options, workload, [dtype, level], &ratio);
        }
    }
}

fn say(options: &Options, workload: &Workload, [dtype, level]: [&str; 2], found: &Ratio) {
    let Ratio { best, ours_s, best_s, ratio, spread: [least, median, most] } = found;
    let (name, Options { threads, rotate, .. }) = (workload.name, options);
    if options.json {
        println!(
            "{{\"ratio\": {ratio:.4}, \"ratio_min\": {least:.4}, \"ratio_median\": {median:.4}, \
             \"ratio_max\": {most:.4}, \"workload\": \"{name}\", \"dtype\": \"{dtype}\", \
             \"level\": \"{level}\", \"threads\": {threads}, \"rotate\": {rotate}, \"best\": \"{best}\", \
             \"ours_s\": {ours_s:e}, \"best_s\": {best_s:e}}}"
        );
    } else {
        println!(
            "{name} {dtype} {level} t{threads} x{rotate}: {ratio:.2} times as fast as {best} \
             (rounds {least:.2} {median:.2} {most:.2})\n"
        );
    }
}

/// Keys or values as the type stores them, back in `f32`: what most peers make of them.
fn rounded(numbers: &[f32], dtype: &str) -> Vec<f32> {
    match dtype {
        "f16" => numbers.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
        "bf16" => numbers.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
        "q8" => numbers.chunks(32).flat_map(q8_0).collect(),
        _ => numbers.to_vec(),
    }
}

/// ggml's eight bits: 32 numbers have a scale, which is an `f16`.
fn q8_0(numbers: &[f32]) -> impl Iterator<Item = f32> + '_ {
    let most = numbers.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = most / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let stored = f16::from_f32(scale).to_f32();
    numbers.iter().map(move |x| (x * inverse).round() * stored)
}
