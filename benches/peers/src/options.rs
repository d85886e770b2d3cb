//! The options, read by hand.

use paged_kv::Level;
use paged_kv::internal::workloads::{WORKLOADS, Workload};

use crate::peers;

pub(crate) const HELP: &str = "\
Other implementations of attention, and this one, taking turns.

usage: peers --workload NAME[,NAME..]|all [options]

  --list             workloads and peers
  --peer NAME[,..]   who takes part (all)
  --skip NAME[,..]   who does not
  --dtype NAME[,..]  f32, f16, bf16, q8 or all (f32)
  --threads N        threads of each (1)
  --level NAME[,..]  instruction sets, ours alone: we take part once at each (the best that is exact)
  --block-size N     positions in a block, ours alone (64)
  --rotate N         go through N copies of all keys and values (1)
  --min-time S       seconds for each (1)
  --rounds N         turns that each has (5)
  --no-check         do not compare with double precision
  --json             a line of JSON for each, and one for each ratio
  --hold             keep the second core busy for 20 seconds, for the harness in Python

Environment: PEERS_RT=1 or 2, see README.md.
";

pub(crate) const DTYPES: [&str; 4] = ["f32", "f16", "bf16", "q8"];

/// What to do.
#[derive(Debug)]
pub(crate) enum Choice {
    Run(Options),
    List,
    Hold,
    Help,
}

/// How to do it.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) peers: Vec<&'static str>,
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

pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Choice, String> {
    let mut options = Options {
        workloads: Vec::new(),
        peers: peers::NAMES.to_vec(),
        dtypes: vec!["f32"],
        threads: 1,
        levels: vec![Level::detect()],
        block_size: 64,
        rotate: 1,
        seconds: 1.0,
        rounds: 5,
        check: true,
        json: false,
    };
    let mut skipped = Vec::new();
    while let Some(name) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "--help" | "-h" => return Ok(Choice::Help),
            "--list" => return Ok(Choice::List),
            "--hold" => return Ok(Choice::Hold),
            "--no-check" => options.check = false,
            "--json" => options.json = true,
            "--workload" => options.workloads = workloads(&value()?)?,
            "--peer" => options.peers = some_of(&peers::NAMES, &value()?)?,
            "--skip" => skipped = some_of(&peers::NAMES, &value()?)?,
            "--dtype" => options.dtypes = some_of(&DTYPES, &value()?)?,
            "--threads" => options.threads = number(&name, &value()?)?,
            "--block-size" => options.block_size = number(&name, &value()?)?,
            "--rotate" => options.rotate = number(&name, &value()?)?,
            "--rounds" => options.rounds = number(&name, &value()?)?,
            "--min-time" => {
                let text = value()?;
                options.seconds = text.parse().map_err(|_| format!("{text} is no time"))?;
            }
            "--level" => {
                let level = |name| {
                    Level::from_name(name).ok_or_else(|| format!("there is no level {name}"))
                };
                options.levels = value()?.split(',').map(level).collect::<Result<_, _>>()?;
            }
            _ => return Err(format!("there is no option {name}")),
        }
    }
    options.peers.retain(|peer| !skipped.contains(peer));
    if options.workloads.is_empty() {
        return Err("--workload says what to measure; --list says what there is".into());
    }
    Ok(Choice::Run(options))
}

fn workloads(names: &str) -> Result<Vec<Workload>, String> {
    if names == "all" {
        return Ok(WORKLOADS.to_vec());
    }
    let named = |name| Workload::named(name).ok_or_else(|| format!("there is no workload {name}"));
    names.split(',').map(named).collect()
}

fn some_of(all: &[&'static str], names: &str) -> Result<Vec<&'static str>, String> {
    if names == "all" {
        return Ok(all.to_vec());
    }
    let known = |name: &str| {
        let found = all.iter().copied().find(|known| *known == name);
        found.ok_or_else(|| format!("{name} is none of {}", all.join(", ")))
    };
    names.split(',').map(known).collect()
}

fn number(name: &str, value: &str) -> Result<usize, String> {
    match value.parse() {
        Ok(number) if (1..=1 << 16).contains(&number) => Ok(number),
        _ => Err(format!("{name} takes a number from 1 to 65536, not \"{value}\"")),
    }
}
