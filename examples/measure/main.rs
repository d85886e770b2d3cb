//! This crate's own figures in percent of what the processor can do, as lines of JSON, which
//! `benches/measure` makes tables of.
//!
//! ```text
//! cargo run --release --example measure -- --only decode,small --rounds 5
//! ```
//!
//! Everything that is compared takes turns in one process, in rounds that are some time apart: the
//! machine's bad moments are everybody's, and the best of the rounds is what is reported. `READ` and
//! `FMA` (see `paged_kv::internal::limits`) are measured in the same rounds, in blocks of the same
//! memory. Answers are not looked at: the tests and `examples/workload` do that.
//!
//! - *Warm* rows are in the caches, as far as they fit, and the shortest call counts.
//! - *Cold* rows are slices of 2 MiB of a memory of 300 MiB, gone through in one direction by
//!   whoever has a turn, so that each slice was last looked at 300 MiB ago by anybody. A twentieth of
//!   the calls may have been lucky; the next one counts.

mod append;
mod batch;
mod case;
mod options;
mod subject;

#[path = "../workload/cores.rs"]
mod cores;
#[path = "../workload/inputs.rs"]
#[expect(dead_code, reason = "the rows of these inputs repeat")]
mod inputs;
#[path = "../workload/measure.rs"]
#[expect(dead_code, reason = "turns are taken otherwise here")]
mod measure;
#[path = "../workload/problem.rs"]
#[expect(dead_code, reason = "answers are compared by the other example")]
mod problem;
#[path = "../workload/report.rs"]
#[expect(dead_code, reason = "lines hold other figures")]
mod report;

use core::error::Error;
use std::process::ExitCode;

use paged_kv::internal::oracle::Sizes;
use paged_kv::internal::workloads::Workload;

use case::{Case, Heads, Rows, Spec};
use options::{Choice, Options};

/// The options make no sense.
const USAGE: u8 = 2;

/// Query heads, KV heads, width, of models that people run.
const G4: Heads = (32, 8, 128);
const G3: Heads = (9, 3, 64);
const G2: Heads = (8, 4, 256);
const G1: Heads = (16, 16, 64);
const SHAPES: [Heads; 4] = [G4, G3, G2, G1];

fn main() -> ExitCode {
    let outcome = match options::parse(std::env::args().skip(1)) {
        Ok(Choice::Run(options)) => run(&options),
        Ok(Choice::Help) => {
            print!("{}", options::HELP);
            Ok(())
        }
        Err(error) => Err(format!("{error}\n\n{}", options::HELP).into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("measure: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let pool = cores::pool(2);
    // What fits into memory together goes through its rounds together: those of one case are then
    // seconds apart.
    let specs: Vec<Spec> = warm().filter(|spec| options.wants(spec.kind)).collect();
    let inputs: Vec<_> = specs.iter().map(Spec::inputs).collect();
    let mut cases = Vec::new();
    for (spec, inputs) in specs.iter().zip(&inputs) {
        cases.push(Case::new(spec, inputs, options)?);
    }
    if options.wants("batch") {
        for (heads, shared, own) in [(G4, 0, 512), (G4, 2048, 64), (G1, 0, 512), (G1, 2048, 64)] {
            cases.push(batch::case(heads, shared, own, &pool, options)?);
        }
    }
    for _ in 0..options.rounds {
        cases.iter_mut().for_each(Case::round);
    }
    cases.iter().for_each(Case::report);
    drop(cases);
    // And 300 MiB of each type are a case of its own.
    for spec in cold().filter(|spec| options.wants(spec.kind)) {
        let inputs = spec.inputs();
        let mut case = Case::new(&spec, &inputs, options)?;
        (0..options.rounds).for_each(|_| case.round());
        case.report();
    }
    if options.wants("append") {
        for heads in SHAPES {
            for block_size in [16, 64] {
                let mut case = append::case(heads, block_size, options)?;
                (0..options.rounds).for_each(|_| case.round());
                case.report();
            }
        }
    }
    Ok(())
}

fn spec(kind: &'static str, heads: Heads, block_size: usize, n_q: usize, len: usize) -> Spec {
    let (n_heads, n_kv_heads, width) = heads;
    let group = n_heads / n_kv_heads;
    let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len };
    let workload = Workload { name: kind, batch: 1, sizes };
    Spec { kind, workload, heads, block_size, rows: Rows::Warm }
}

fn warm() -> impl Iterator<Item = Spec> {
    let each = SHAPES.into_iter().flat_map(|heads| [(heads, 16), (heads, 64)]);
    let decode = each
        .map(|(heads, block_size)| spec("decode", heads, block_size, 1, 512))
        .chain([spec("decode", G3, 64, 1, 4096)]);
    let prefill = SHAPES
        .map(|heads| spec("prefill", heads, 64, 512, 512))
        .into_iter()
        .chain([G4, G3].map(|heads| spec("prefill", heads, 64, 512, 2048 + 512)));
    let small = [1, 4, 16, 64].map(|len| spec("small", (8, 4, 8), 64, 1, len));
    let small = small.into_iter().chain([1, 16, 64, 256].map(|len| spec("small", G3, 64, 1, len)));
    let verify = (1..=8).map(|n_q| spec("verify", G4, 64, n_q, 4096));
    decode.chain(prefill).chain(small).chain(verify)
}

fn cold() -> impl Iterator<Item = Spec> {
    SHAPES.into_iter().flat_map(|heads| {
        // How long a slice is depends on the type.
        [16, 64].map(|size| Spec { rows: Rows::Cold, ..spec("cold", heads, size, 1, 0) })
    })
}
