//! Files and sockets of std.

use std::io::{ErrorKind, Read, Write};

use super::stream::{Sink, Source};

/// Makes a [`Source`] of a reader, and a [`Sink`] of a writer.
///
/// Reads and writes are as large as a page and no larger: a file wants no buffer around it where pages
/// have some kilobytes, and a `BufReader` where they are small.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::wire::{Io, Label, Saved};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.push(&mut store, &[1.0; 2], &[2.0; 2])?;
///
/// let mut file = std::io::Cursor::new(Vec::new());
/// cache.save(&store, &Label::new(), Io(&mut file))?;
/// cache.release(&mut store)?;
///
/// file.set_position(0);
/// cache.restore(&mut store, Saved::open(Io(&mut file))?)?;
/// assert_eq!(cache.seq_len(), 1);
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Io<T>(pub T);

impl<T: Write> Sink for Io<T> {
    type Error = std::io::Error;

    fn put(&mut self, bytes: &[u8]) -> Result<(), std::io::Error> {
        self.0.write_all(bytes)
    }
}

impl<T: Read> Source for Io<T> {
    type Error = std::io::Error;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, std::io::Error> {
        loop {
            match self.0.read(into) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}
