//! The options, read by hand: the example has no dependency to spend on them.

use paged_kv::Level;
use paged_kv::internal::workloads::{WORKLOADS, Workload};

pub(crate) const HELP: &str = "\
Attention on the workloads that the README's tables are about.

usage: workload --workload NAME[,NAME..]|all [options]

  --list            the workloads there are, and the levels of this machine
  --check FILE      compare them with a workloads.json
  --dtype NAME[,..] what keys and values are stored as: f32, f16, bf16, int8 (or q8), int4, all (f32)
  --threads N       threads that attend, one for each core (1)
  --level NAME[,..] instruction sets, those included that are not exact (the best that is)
  --block-size N    positions in a block (64)
  --rotate N        go through N copies of all keys and values, to find none in the caches (1)
  --min-time S      seconds of calls for each workload (2)
  --rounds N        in so many parts, with the processor's limits measured between them (8)
  --no-check        do not compare with double precision
  --json            a line of JSON for each workload
  --help            this text

Exit code 0: done, and the answers are right. 1: they are not, or the file differs.
2: options that make no sense.
";

/// These keep a slip of the finger from taking the machine's memory.
const MOST_BLOCK_SIZE: usize = 65_536;
const MOST_COPIES: usize = 1 << 16;
const MOST_ROUNDS: usize = 1 << 16;
const MOST_THREADS: usize = 1024;

/// The names of stored types.
const DTYPES: [&str; 5] = ["f32", "f16", "bf16", "int8", "int4"];

/// What to do.
#[derive(Debug)]
pub(crate) enum Choice {
    Run(Options),
    List,
    Check(String),
    Help,
}

/// How to do it.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) dtypes: Vec<&'static str>,
    pub(crate) threads: usize,
    pub(crate) levels: Vec<Level>,
    pub(crate) block_size: usize,
    pub(crate) rotate: usize,
    pub(crate) seconds: f64,
    pub(crate) rounds: usize,
    pub(crate) check: bool,
    pub(crate) json: bool,
}

/// Reads the arguments.
pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Choice, String> {
    let mut options = Options {
        workloads: Vec::new(),
        dtypes: vec!["f32"],
        threads: 1,
        levels: vec![Level::detect()],
        block_size: 64,
        rotate: 1,
        seconds: 2.0,
        rounds: 8,
        check: true,
        json: false,
    };
    while let Some(arg) = args.next() {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (arg, None),
        };
        match (name.as_str(), &value) {
            ("--help" | "-h", None) => return Ok(Choice::Help),
            ("--list", None) => return Ok(Choice::List),
            ("--no-check", None) => options.check = false,
            ("--json", None) => options.json = true,
            _ => {
                let value = value.or_else(|| args.next());
                if let Some(choice) = set(&mut options, &name, value)? {
                    return Ok(choice);
                }
            }
        }
    }
    if options.workloads.is_empty() {
        return Err("--workload says what to measure; --list says what there is".into());
    }
    Ok(Choice::Run(options))
}

/// Takes in an option that has a value.
fn set(options: &mut Options, name: &str, value: Option<String>) -> Result<Option<Choice>, String> {
    let value = || value.clone().ok_or_else(|| format!("{name} needs a value"));
    match name {
        "--workload" => options.workloads = workloads(&value()?)?,
        "--check" => return Ok(Some(Choice::Check(value()?))),
        "--dtype" => options.dtypes = dtypes(&value()?)?,
        "--threads" => options.threads = number(name, &value()?, MOST_THREADS)?,
        "--level" => options.levels = value()?.split(',').map(level).collect::<Result<_, _>>()?,
        "--block-size" => options.block_size = number(name, &value()?, MOST_BLOCK_SIZE)?,
        "--rotate" => options.rotate = number(name, &value()?, MOST_COPIES)?,
        "--min-time" => options.seconds = seconds(name, &value()?)?,
        "--rounds" => options.rounds = number(name, &value()?, MOST_ROUNDS)?,
        _ => return Err(format!("there is no option {name}")),
    }
    Ok(None)
}

fn workloads(names: &str) -> Result<Vec<Workload>, String> {
    if names == "all" {
        return Ok(WORKLOADS.to_vec());
    }
    let named = |name| Workload::named(name).ok_or_else(|| format!("there is no workload {name}"));
    names.split(',').map(named).collect()
}

fn number(name: &str, value: &str, most: usize) -> Result<usize, String> {
    match value.parse() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(format!("{name} takes a number from 1 to {most}, not \"{value}\"")),
    }
}

fn seconds(name: &str, value: &str) -> Result<f64, String> {
    match value.parse() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err(format!("{name} takes seconds, at most an hour of them, not \"{value}\"")),
    }
}

/// Stored types by their names. `q8` is what the other harnesses call eight bits.
fn dtypes(names: &str) -> Result<Vec<&'static str>, String> {
    if names == "all" {
        return Ok(DTYPES.to_vec());
    }
    let known = |name| {
        let name = if name == "q8" { "int8" } else { name };
        let found = DTYPES.into_iter().find(|known| *known == name);
        found.ok_or_else(|| format!("nothing is stored as {name}, but as {}", DTYPES.join(", ")))
    };
    names.split(',').map(known).collect()
}

/// A level by its name, if this machine has it.
fn level(name: &str) -> Result<Level, String> {
    let unknown = || {
        let names: Vec<&str> =
            Level::available().chain(on_request()).map(|level| level.name()).collect();
        format!("there is no level {name} here, but {}", names.join(", "))
    };
    Level::from_name(name).ok_or_else(unknown)
}

/// The levels that are not exact, as far as this machine has them.
pub(crate) fn on_request() -> impl Iterator<Item = Level> {
    [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten()
}
