//! The command line, parsed once into values that make sense.

use std::path::PathBuf;

use paged_kv::{Element, Int4, Int8, bf16, f16};

use crate::error::Error;

/// What `--help` prints.
pub const HELP: &str = "\
Generates text from a Llama GGUF, all keys and values in a SharedPagedKv, all attention by paged-kv.

  generate --model FILE --prompt TEXT [options]

  --model FILE       a GGUF of the Llama architecture
  --prompt TEXT      the prompt; given several times, requests take turns over them
  --n N              new tokens per request, at most                       [64]
  --requests N       requests over one store                                [1]
  --fork N           continuations of each request's prompt                 [1]
  --pool-blocks N    blocks in each layer's pool; where they run short, the
                     youngest request waits        [what all requests can need]
  --block-size N     positions in one block                                [64]
  --no-share         every request prefills its whole prompt itself
  --temperature T    0 takes the likeliest token                            [0]
  --seed N           of the first request; the next ones count up           [0]
  --capture FILE     write the queries, keys and values of the only request
                     to a file, for examples/accuracy
  --check            recount every block after every step
  --kv-type NAME     keys and values as f32, f16, bf16, int8 or int4      [f32]
  --threads N        threads, for products and for attention     [all there are]
  --level NAME       instruction set of the attention; avx512-bf16 and
                     avx512-vnni are not exact     [the best of those that are]
  --quiet            no progress on stderr
";

/// More threads than any machine will make use of, and fewer than make systems refuse.
const MOST_THREADS: usize = 1024;

/// More answers than anybody will wait for. What is counted by answers does not overflow.
const MOST_ANSWERS: usize = 1 << 20;

/// What to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The GGUF.
    pub model: PathBuf,
    /// At least one; request `i` takes prompt `i` modulo their number.
    pub prompts: Vec<String>,
    /// New tokens per request, at most.
    pub n: usize,
    /// Requests over one store.
    pub requests: usize,
    /// Continuations of each request's prompt.
    pub fork: usize,
    /// Blocks in each layer; what all requests can need if `None`.
    pub pool_blocks: Option<usize>,
    /// Positions in one block.
    pub block_size: usize,
    /// Whether beginnings of prompts are stored, found and adopted.
    pub share: bool,
    /// 0 is greedy.
    pub temperature: f32,
    /// Seed of the first request.
    pub seed: u64,
    /// What keys and values are stored as.
    pub kv_type: KvType,
    /// Threads, for products and for attention; all there are if `None`.
    pub threads: Option<usize>,
    /// Name of the instruction set, the best if `None`.
    pub level: Option<String>,
    /// Whether every block is recounted after every step.
    pub check: bool,
    /// Where the queries, keys and values of the only request are written.
    pub capture: Option<PathBuf>,
    /// No progress.
    pub quiet: bool,
}

/// What keys and values are stored as: a stored type of paged-kv by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// `f32`
    F32,
    /// [`struct@f16`]
    F16,
    /// [`bf16`]
    Bf16,
    /// [`Int8`]
    Int8,
    /// [`Int4`]
    Int4,
}

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 5] =
        [KvType::F32, KvType::F16, KvType::Bf16, KvType::Int8, KvType::Int4];

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => f32::NAME,
            KvType::F16 => f16::NAME,
            KvType::Bf16 => bf16::NAME,
            KvType::Int8 => Int8::NAME,
            KvType::Int4 => Int4::NAME,
        }
    }
}

/// What the command line asked for.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Print [`HELP`].
    Help,
    /// Run.
    Run(Options),
}

impl Options {
    /// The defaults for one prompt on one model.
    pub fn new(model: PathBuf, prompt: String) -> Self {
        Options {
            model,
            prompts: vec![prompt],
            n: 64,
            requests: 1,
            fork: 1,
            pool_blocks: None,
            block_size: 64,
            share: true,
            temperature: 0.0,
            seed: 0,
            kv_type: KvType::F32,
            threads: None,
            level: None,
            check: false,
            capture: None,
            quiet: false,
        }
    }
}

/// Parses the arguments after the program's name, each `--name value` or `--name=value`.
///
/// # Errors
///
/// [`Error::Usage`] for an option that is unknown, lacks its value or has one out of range.
pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Command, Error> {
    let mut args = args.into_iter();
    let mut options = Options::new(PathBuf::new(), String::new());
    let mut model = None;
    options.prompts.clear();
    while let Some(arg) = args.next() {
        let (name, inline) = match arg.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(value.into())),
            _ => (arg, None),
        };
        match (name.as_str(), &inline) {
            ("--help" | "-h", None) => return Ok(Command::Help),
            ("--no-share", None) => options.share = false,
            ("--check", None) => options.check = true,
            ("--quiet", None) => options.quiet = true,
            _ => {
                let mut value = || {
                    inline
                        .clone()
                        .or_else(|| args.next())
                        .ok_or_else(|| Error::Usage(format!("{name} needs a value")))
                };
                match name.as_str() {
                    "--model" => model = Some(PathBuf::from(value()?)),
                    "--prompt" => options.prompts.push(value()?),
                    _ => set(&mut options, &name, value)?,
                }
            }
        }
    }
    options.model = model.ok_or_else(|| Error::Usage("--model is missing".into()))?;
    if options.prompts.is_empty() {
        return Err(Error::Usage("--prompt is missing".into()));
    }
    if options.requests.checked_mul(options.fork).is_none_or(|answers| answers > MOST_ANSWERS) {
        let most = format!("--requests times --fork must be at most {MOST_ANSWERS}");
        return Err(Error::Usage(most));
    }
    if options.capture.is_some() && options.requests * options.fork > 1 {
        return Err(Error::Usage("--capture takes one request alone".into()));
    }
    Ok(Command::Run(options))
}

/// Options that hold one value with a range.
fn set(
    options: &mut Options,
    name: &str,
    mut value: impl FnMut() -> Result<String, Error>,
) -> Result<(), Error> {
    match name {
        "--n" => options.n = at_least_one(name, &value()?)?,
        "--requests" => options.requests = at_least_one(name, &value()?)?,
        "--fork" => options.fork = at_least_one(name, &value()?)?,
        "--pool-blocks" => options.pool_blocks = Some(at_least_one(name, &value()?)?),
        "--block-size" => options.block_size = at_least_one(name, &value()?)?,
        "--threads" => {
            let threads = at_least_one(name, &value()?)?;
            if threads > MOST_THREADS {
                return Err(Error::Usage(format!("{name} must be at most {MOST_THREADS}")));
            }
            options.threads = Some(threads);
        }
        "--kv-type" => {
            let text = value()?;
            let named = KvType::ALL.into_iter().find(|it| it.name() == text);
            options.kv_type = named.ok_or_else(|| {
                let names = KvType::ALL.map(KvType::name).join(", ");
                Error::Usage(format!("{name} {text} is not known; {names} are"))
            })?;
        }
        "--seed" => options.seed = number(name, &value()?)?,
        "--level" => options.level = Some(value()?),
        "--capture" => options.capture = Some(PathBuf::from(value()?)),
        "--temperature" => {
            let text = value()?;
            options.temperature = number(name, &text)?;
            if !options.temperature.is_finite() || options.temperature < 0.0 {
                return Err(Error::Usage(format!("{name} must be 0 or more, not {text}")));
            }
        }
        _ => return Err(Error::Usage(format!("unknown option {name}"))),
    }
    Ok(())
}

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, Error> {
    text.parse().map_err(|_| Error::Usage(format!("{name} needs a number, not {text:?}")))
}

fn at_least_one(name: &str, text: &str) -> Result<usize, Error> {
    match number(name, text)? {
        0 => Err(Error::Usage(format!("{name} must be at least 1"))),
        many => Ok(many),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &[&str]) -> Result<Command, Error> {
        parse(line.iter().map(|arg| (*arg).to_owned()))
    }

    #[test]
    fn both_spellings_say_the_same() {
        let spaced = parsed(&["--model", "m", "--prompt", "a=b", "--n", "3", "--seed", "7"]);
        let joined = parsed(&["--model=m", "--prompt=a=b", "--n=3", "--seed=7"]);
        assert_eq!(spaced.unwrap(), joined.unwrap());
    }

    #[test]
    fn prompts_add_up_and_the_rest_is_set() {
        let line = "--model m --prompt a --prompt b --requests 8 --pool-blocks 9 --block-size 16 \
                    --temperature 0.5 --threads 2 --level avx2 --kv-type int8 --fork 3 --no-share \
                    --check --quiet";
        let Ok(Command::Run(options)) = parsed(&line.split(' ').collect::<Vec<_>>()) else {
            panic!("a good line must parse");
        };
        assert_eq!(options.prompts, ["a", "b"]);
        assert_eq!((options.requests, options.pool_blocks, options.block_size), (8, Some(9), 16));
        assert_eq!((options.temperature, options.threads), (0.5, Some(2)));
        assert_eq!(options.level.as_deref(), Some("avx2"));
        assert_eq!(options.kv_type, KvType::Int8);
        assert_eq!(options.fork, 3);
        assert!(!options.share && options.check && options.quiet);
    }

    #[test]
    fn mistakes_are_named() {
        for (line, word) in [
            (&["--prompt", "a"][..], "--model"),
            (&["--model", "m"], "--prompt"),
            (&["--model"], "--model needs a value"),
            (&["--model", "m", "--prompt", "a", "--n", "0"], "--n must be at least 1"),
            (&["--model", "m", "--prompt", "a", "--n", "x"], "--n needs a number"),
            (&["--model", "m", "--prompt", "a", "--temperature", "-1"], "--temperature"),
            (&["--model", "m", "--prompt", "a", "--temperature", "NaN"], "--temperature"),
            (&["--model", "m", "--prompt", "a", "--threads", "9999"], "at most 1024"),
            (&["--model", "m", "--prompt", "a", "--kv-type", "f8"], "f16, bf16, int8, int4 are"),
            (&["--model", "m", "--prompt", "a", "--fork", "0"], "--fork must be at least 1"),
            (&["--model", "m", "--prompt", "a", "--requests", "2", "--fork", "999999"], "--fork"),
            (&["--model", "m", "--prompt", "a", "--capture", "c", "--fork", "2"], "one request"),
            (&["--model", "m", "--prompt", "a", "--fast"], "--fast"),
            (&["--model", "m", "--prompt", "a", "b"], "unknown option b"),
        ] {
            let message = parsed(line).unwrap_err().to_string();
            assert!(message.contains(word), "{line:?}: {message}");
        }
    }

    #[test]
    fn help_wins() {
        assert_eq!(parsed(&["--help"]).unwrap(), Command::Help);
    }
}
