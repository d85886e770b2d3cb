//! Everything that can stop a run, in words for the person who started it.

use std::fmt;
use std::path::PathBuf;

/// Why nothing, or no more, was generated.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The command line makes no sense. Exit code 2; everything else is 1.
    Usage(String),
    /// The file cannot be read, is no whole GGUF, or cannot be written.
    File {
        /// The file.
        path: PathBuf,
        /// What was wrong with it.
        why: String,
    },
    /// A sound file of a model that this program cannot run.
    Unsupported(String),
    /// The prompt cannot be used.
    Prompt(String),
    /// The whole pool, empty, is smaller than what one request can need.
    NeverFits {
        /// Positions that the request can need.
        positions: usize,
        /// Blocks for them, in each layer.
        need: usize,
        /// Blocks there are, in each layer.
        have: usize,
    },
    /// A product was refused.
    Tensor(candle_core::Error),
    /// The KV memory refused.
    Kv(String),
    /// The text could not be written.
    Output(String),
}

impl Error {
    /// What the KV memory refused.
    pub(crate) fn kv(error: impl std::error::Error) -> Self {
        Error::Kv(error.to_string())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(what) => write!(f, "{what}; --help lists the options"),
            Error::File { path, why } => write!(f, "{}: {why}", path.display()),
            Error::Unsupported(what) => write!(f, "this model is not supported: {what}"),
            Error::Prompt(what) => f.write_str(what),
            Error::NeverFits { positions, need, have } => write!(
                f,
                "{positions} positions (prompt and new tokens) need {need} blocks and the pool has \
                 {have}, so this request could never run; raise --pool-blocks or lower --n"
            ),
            Error::Tensor(inner) => write!(f, "a product was refused: {inner}"),
            Error::Kv(inner) => write!(f, "the KV memory refused: {inner}"),
            Error::Output(why) => write!(f, "the text could not be written: {why}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Tensor(inner) => Some(inner),
            _ => None,
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(inner: candle_core::Error) -> Self {
        Error::Tensor(inner)
    }
}
