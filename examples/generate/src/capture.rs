//! A request's queries, keys and values, written down as attention gets them.
//!
//! For whoever asks what storing a real model's keys and values as something narrower costs:
//! `examples/accuracy --capture FILE` reads the file. Numbers are little-endian, counts are `u32`:
//!
//! ```text
//! "PKVCAP01"   layers   query heads   KV heads   width of a head
//! then, for each layer of each step, until the file ends:
//! layer   first position   rows   queries (f32)   keys (f32)   values (f32)
//! ```
//!
//! Rows are `[rows][heads][width]`, and what is rotary is rotated. Keys and values are those that are
//! handed in, before any store has rounded them.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::model::{Rows, Sizes};

/// A file that is being written.
#[derive(Debug)]
pub struct Capture {
    file: BufWriter<File>,
    path: PathBuf,
    layers: usize,
    q_row: usize,
}

impl Capture {
    /// Creates the file, or empties it.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where that cannot be done.
    pub fn create(path: &Path, sizes: &Sizes) -> Result<Self, Error> {
        let Sizes { layers, n_heads, n_kv_heads, head_dim, .. } = *sizes;
        let begun = File::create(path).map(BufWriter::new).and_then(|mut file| {
            file.write_all(b"PKVCAP01")?;
            counts(&mut file, &[layers, n_heads, n_kv_heads, head_dim])?;
            Ok(file)
        });
        let file = begun.map_err(|why| refused(path, &why))?;
        Ok(Capture { file, path: path.to_owned(), layers, q_row: n_heads * head_dim })
    }

    /// Takes down what a layer is given in a step. After the last layer of a step the file is whole.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it cannot be written.
    pub fn record(&mut self, layer: usize, first: usize, rows: Rows<'_>) -> Result<(), Error> {
        self.write(layer, first, rows).map_err(|why| refused(&self.path, &why))
    }

    fn write(&mut self, layer: usize, first: usize, rows: Rows<'_>) -> io::Result<()> {
        counts(&mut self.file, &[layer, first, rows.q.len() / self.q_row])?;
        for number in [rows.q, rows.k, rows.v].into_iter().flatten() {
            self.file.write_all(&number.to_le_bytes())?;
        }
        if layer + 1 == self.layers { self.file.flush() } else { Ok(()) }
    }
}

fn counts(file: &mut impl Write, counts: &[usize]) -> io::Result<()> {
    for count in counts {
        let count = u32::try_from(*count).expect("no model counts that far");
        file.write_all(&count.to_le_bytes())?;
    }
    Ok(())
}

fn refused(path: &Path, why: &io::Error) -> Error {
    Error::File { path: path.to_owned(), why: why.to_string() }
}
