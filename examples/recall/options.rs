//! The options, read by hand: there are six, and the example has no dependency to spend on them.

use paged_kv::Level;

pub(crate) const HELP: &str = "\
Several requests over one pool of KV blocks; every answer is checked.

usage: recall [options]

  --requests N      requests to serve (4)
  --pairs N         pairs that each of them reads beside the shared ones (2048)
  --threads N       threads that serve them (as many as processors, and at least 2)
  --block-size N    positions in a block (64)
  --pool-blocks N   blocks in each layer (enough for as many requests as threads)
  --level NAME      instruction set of attention (the best of this machine)
  --help            this text

Exit code 0: all answers right. 1: not all. 2: options that make no sense.
";

/// The decoder's sharpness is made for lists of some thousand tokens. With 8,192 pairs the faintest
/// right answer has 0.88 of full weight, and one of another list would be called too faint.
const MOST_PAIRS: usize = 4096;
/// These keep a slip of the finger from taking the machine's memory.
const MOST_THREADS: usize = 256;
const MOST_BLOCK_SIZE: usize = 65_536;
const MOST_BLOCKS: usize = 1 << 24;

/// What to do.
#[derive(Debug)]
pub(crate) enum Choice {
    Run(Options),
    Help,
}

/// How to do it.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) requests: usize,
    pub(crate) pairs: usize,
    pub(crate) threads: usize,
    pub(crate) block_size: usize,
    pub(crate) pool_blocks: Option<usize>,
    pub(crate) level: Level,
}

/// Reads the arguments. `values` is how many values there are: one request more than that would
/// have the same list as another, and a row of the wrong one could not be told.
pub(crate) fn parse(
    mut args: impl Iterator<Item = String>,
    values: usize,
) -> Result<Choice, String> {
    let mut options = Options {
        requests: 4,
        pairs: 2048,
        threads: 0,
        block_size: 64,
        pool_blocks: None,
        level: Level::detect(),
    };
    while let Some(arg) = args.next() {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (arg, None),
        };
        if name == "--help" || name == "-h" {
            return Ok(Choice::Help);
        }
        let known = ["--requests", "--pairs", "--threads", "--block-size", "--pool-blocks"];
        if name != "--level" && !known.contains(&name.as_str()) {
            return Err(format!("there is no option {name}"));
        }
        let value = value.or_else(|| args.next()).ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--requests" => options.requests = number(&name, &value, values)?,
            "--pairs" => options.pairs = number(&name, &value, MOST_PAIRS)?,
            "--threads" => options.threads = number(&name, &value, MOST_THREADS)?,
            "--block-size" => options.block_size = number(&name, &value, MOST_BLOCK_SIZE)?,
            "--pool-blocks" => {
                options.pool_blocks = Some(number(&name, &value, MOST_BLOCKS)?);
            }
            _ => options.level = level(&value)?,
        }
    }
    if options.threads == 0 {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        options.threads = processors.clamp(2, MOST_THREADS);
    }
    options.threads = options.threads.min(options.requests);
    Ok(Choice::Run(options))
}

fn number(name: &str, value: &str, most: usize) -> Result<usize, String> {
    match value.parse() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(format!("{name} takes a number from 1 to {most}, not \"{value}\"")),
    }
}

/// A level by its name, if this machine has it.
fn level(name: &str) -> Result<Level, String> {
    let names: Vec<&str> = Level::available().map(|level| level.name()).collect();
    match Level::from_name(name) {
        Some(level) => Ok(level),
        None => Err(format!("there is no level {name} here, but {}", names.join(", "))),
    }
}
