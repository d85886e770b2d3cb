//! The file: opened, its metadata asked for by name, its tensors taken one after the other.
//!
//! Parsing is candle's. What is added here is the answer to a person: which file, which key, and
//! what is wrong with it. Tensors are *taken*: what nobody has taken when the model is built is a
//! part that this program does not know (a bias, an expert, stretched rotary frequencies), and a
//! model run without one of its parts talks nonsense instead of failing.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};

use crate::error::Error;

/// An opened GGUF.
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    content: Content,
    reader: BufReader<File>,
    left: BTreeSet<String>,
}

impl Gguf {
    /// Reads the head of the file: metadata and the list of tensors.
    ///
    /// # Errors
    ///
    /// [`Error::File`] for a file that cannot be read, is no GGUF, or stops short.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let wrong = |why: String| Error::File { path: path.to_owned(), why };
        let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
        let mut reader = BufReader::new(file);
        // The parser does arithmetic on numbers from the file; one that lies must not end the
        // program as if the program were wrong.
        let content = catch_unwind(AssertUnwindSafe(|| Content::read(&mut reader)))
            .map_err(|_| wrong("a GGUF whose head contradicts itself".into()))?
            .map_err(|error| wrong(format!("not a whole GGUF file ({})", in_words(&error))))?;
        let left = content.tensor_infos.keys().cloned().collect();
        Ok(Gguf { path: path.to_owned(), content, reader, left })
    }

    /// Takes a tensor, as f32, whatever it is stored as.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is missing, has another shape or is cut off.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let have = self.content.tensor_infos.get(name).map(|info| info.shape.dims().to_vec());
        match have {
            None => return Err(self.wrong(format!("tensor {name} is missing"))),
            Some(have) if have != shape => {
                return Err(self.wrong(format!("tensor {name} is {have:?}, {shape:?} is needed")));
            }
            Some(_) => (),
        }
        let read = self
            .content
            .tensor(&mut self.reader, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu));
        let tensor =
            read.map_err(|error| self.wrong(format!("tensor {name}: {}", in_words(&error))))?;
        self.left.remove(name);
        Ok(tensor)
    }

    /// Whether the file has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// The tensors that nobody has taken.
    pub fn left(&self) -> &BTreeSet<String> {
        &self.left
    }

    /// A count of the metadata.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is missing or no count.
    pub fn count(&self, key: &str) -> Result<usize, Error> {
        self.count_or_none(key)?.ok_or_else(|| self.missing(key))
    }

    /// A count that may be missing.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is no count.
    pub fn count_or_none(&self, key: &str) -> Result<Option<usize>, Error> {
        let Some(value) = self.content.metadata.get(key) else {
            return Ok(None);
        };
        whole(value).map(Some).ok_or_else(|| self.wrong(format!("{key} is no count")))
    }

    /// A number of the metadata that may be missing.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is no number.
    pub fn float_or_none(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Value::F32(number)) => Ok(Some(*number)),
            Some(Value::F64(number)) => Ok(Some(*number as f32)),
            Some(_) => Err(self.wrong(format!("{key} is no number"))),
        }
    }

    /// A number of the metadata.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is missing or no number.
    pub fn float(&self, key: &str) -> Result<f32, Error> {
        self.float_or_none(key)?.ok_or_else(|| self.missing(key))
    }

    /// A text of the metadata that may be missing.
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.content.metadata.get(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// A yes or no, `false` where it is missing.
    pub fn flag(&self, key: &str) -> bool {
        matches!(self.content.metadata.get(key), Some(Value::Bool(true)))
    }

    /// A list of texts.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is missing or holds anything else.
    pub fn texts(&self, key: &str) -> Result<Vec<String>, Error> {
        let text = |value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            _ => Err(self.wrong(format!("{key} holds something that is no text"))),
        };
        self.list(key)?.iter().map(text).collect()
    }

    /// A list of counts.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it is missing or holds anything else.
    pub fn counts(&self, key: &str) -> Result<Vec<usize>, Error> {
        let count = |value: &Value| {
            whole(value)
                .ok_or_else(|| self.wrong(format!("{key} holds something that is no count")))
        };
        self.list(key)?.iter().map(count).collect()
    }

    /// An error that names this file.
    pub fn wrong(&self, why: String) -> Error {
        Error::File { path: self.path.clone(), why }
    }

    fn missing(&self, key: &str) -> Error {
        self.wrong(format!("{key} is missing"))
    }

    fn list(&self, key: &str) -> Result<&[Value], Error> {
        match self.content.metadata.get(key) {
            Some(Value::Array(values)) => Ok(values),
            Some(_) => Err(self.wrong(format!("{key} is no list"))),
            None => Err(self.missing(key)),
        }
    }
}

/// A whole number, in whichever of eight types the file's author liked.
fn whole(value: &Value) -> Option<usize> {
    match *value {
        Value::I8(number) => number.try_into().ok(),
        Value::I16(number) => number.try_into().ok(),
        Value::I32(number) => number.try_into().ok(),
        Value::I64(number) => number.try_into().ok(),
        ref unsigned => unsigned.to_u64().ok()?.try_into().ok(),
    }
}

/// candle's message without the stack trace that it may carry.
fn in_words(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => in_words(inner),
        other => other.to_string(),
    }
}
