//! The options, read by hand.

use paged_kv::Level;

pub(crate) const HELP: &str = "\
This crate's figures in percent of what the processor can do, as lines of JSON.

usage: measure [options]

  --only NAME[,..]   some of decode, cold, prefill, small, verify, batch, append (all)
  --dtype NAME[,..]  some of f32, f16, bf16, int8, int4 (all)
  --level NAME[,..]  instruction sets (all but scalar, and for the types that gain by them those
                     that are not exact)
  --rounds N         turns that each has (6)
  --help             this text
";

const KINDS: [&str; 7] = ["decode", "cold", "prefill", "small", "verify", "batch", "append"];
const DTYPES: [&str; 5] = ["f32", "f16", "bf16", "int8", "int4"];
const MOST_ROUNDS: usize = 1000;

/// What to do.
#[derive(Debug)]
pub(crate) enum Choice {
    Run(Options),
    Help,
}

/// How to do it.
#[derive(Debug)]
pub(crate) struct Options {
    kinds: Vec<&'static str>,
    dtypes: Vec<&'static str>,
    levels: Vec<Level>,
    pub(crate) rounds: usize,
}

impl Options {
    /// Whether this is to be measured.
    pub(crate) fn wants(&self, kind: &str) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether rows stored as this are.
    pub(crate) fn wants_type(&self, dtype: &str) -> bool {
        self.dtypes.contains(&dtype)
    }

    /// The levels at which a type gives answers, or answers in a time, of its own. Of those that
    /// are exact only the best where levels are not the question.
    pub(crate) fn levels(&self, dtype: &str, every: bool) -> Vec<Level> {
        let best = self.levels.iter().rfind(|level| !is_on_request(**level)).copied();
        let wanted = |level: &&Level| match (level.name(), dtype) {
            ("avx512-bf16", "bf16" | "int8" | "int4") | ("avx512-vnni", "int8") => true,
            ("avx512-bf16" | "avx512-vnni", _) => false,
            _ => every || Some(**level) == best,
        };
        self.levels.iter().filter(wanted).copied().collect()
    }
}

fn is_on_request(level: Level) -> bool {
    !Level::available().any(|exact| exact == level)
}

pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Choice, String> {
    let exact = Level::available().filter(|level| *level != Level::SCALAR);
    let on_request = [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten();
    let mut options = Options {
        kinds: KINDS.to_vec(),
        dtypes: DTYPES.to_vec(),
        levels: exact.chain(on_request).collect(),
        rounds: 6,
    };
    while let Some(name) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{name} needs a value"));
        match name.as_str() {
            "--help" | "-h" => return Ok(Choice::Help),
            "--only" => options.kinds = some_of(&KINDS, &value()?)?,
            "--dtype" => options.dtypes = some_of(&DTYPES, &value()?)?,
            "--level" => {
                let level = |name| {
                    Level::from_name(name).ok_or_else(|| format!("there is no level {name} here"))
                };
                options.levels = value()?.split(',').map(level).collect::<Result<_, _>>()?;
            }
            "--rounds" => {
                let text = value()?;
                let number = text.parse().ok().filter(|number| (1..=MOST_ROUNDS).contains(number));
                options.rounds =
                    number.ok_or_else(|| format!("{text} rounds are not to be had"))?;
            }
            _ => return Err(format!("there is no option {name}")),
        }
    }
    Ok(Choice::Run(options))
}

fn some_of(all: &[&'static str], names: &str) -> Result<Vec<&'static str>, String> {
    let known = |name: &str| {
        let found = all.iter().copied().find(|known| *known == name);
        found.ok_or_else(|| format!("{name} is none of {}", all.join(", ")))
    };
    names.split(',').map(known).collect()
}
