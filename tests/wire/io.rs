//! Files and sockets, as the system gives them: a little at a time, interrupted, broken.

use std::io::{Error, ErrorKind, Read, Write};

use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::wire::{Io, Label, Saved, WireError};

use super::{rows, shape};

/// Three bytes in each call, every other of which is interrupted, and an error after so many bytes.
struct Pipe {
    bytes: Vec<u8>,
    at: usize,
    breaks_at: usize,
    calls: usize,
}

impl Pipe {
    fn new(bytes: Vec<u8>) -> Pipe {
        Pipe { bytes, at: 0, breaks_at: usize::MAX, calls: 0 }
    }

    fn some(&mut self) -> Result<usize, Error> {
        self.calls += 1;
        if self.at >= self.breaks_at {
            return Err(ErrorKind::BrokenPipe.into());
        }
        if self.calls % 2 == 1 { Err(ErrorKind::Interrupted.into()) } else { Ok(3) }
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> Result<usize, Error> {
        let n = self.some()?.min(into.len()).min(self.bytes.len() - self.at);
        into[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let n = self.some()?.min(bytes.len());
        self.bytes.extend(&bytes[..n]);
        self.at += n;
        Ok(n)
    }

    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

#[test]
fn files_and_sockets_are_read_and_written_to_the_end() {
    let mut store = PagedKvStore::<f32>::with_shape(shape(2), 9).unwrap();
    let mut cache = PagedKvCache::new();
    let (k, v) = rows(store.shape(), 5, 0..5);
    cache.append(&mut store, &k, &v, 5).unwrap();
    let mut bytes = Vec::new();
    cache.save(&store, &Label::new(), &mut bytes).unwrap();

    let mut pipe = Pipe::new(Vec::new());
    cache.save(&store, &Label::new(), Io(&mut pipe)).unwrap();
    assert_eq!(pipe.bytes, bytes);
    let mut pipe = Pipe { breaks_at: 90, ..Pipe::new(Vec::new()) };
    let Err(WireError::Stream(error)) = cache.save(&store, &Label::new(), Io(&mut pipe)) else {
        panic!("the pipe is broken")
    };
    assert_eq!((error.kind(), pipe.bytes.len()), (ErrorKind::BrokenPipe, 90));

    let mut back = PagedKvCache::new();
    let mut pipe = Pipe { breaks_at: 300, ..Pipe::new(bytes.clone()) };
    let read = Saved::open(Io(&mut pipe)).and_then(|saved| back.restore(&mut store, saved));
    assert!(matches!(read, Err(WireError::Stream(error)) if error.kind() == ErrorKind::BrokenPipe));
    assert!(back.is_empty() && back.block_table().is_empty());
    let mut pipe = Pipe::new(bytes[..300].to_vec());
    let read = Saved::open(Io(&mut pipe)).and_then(|saved| back.restore(&mut store, saved));
    assert!(matches!(read, Err(WireError::Truncated { have: 300, .. })));
    let mut pipe = Pipe::new(bytes.clone());
    let saved = Saved::open(Io(&mut pipe)).unwrap();
    back.restore(&mut store, saved).unwrap();
    let mut again = Vec::new();
    back.save(&store, &Label::new(), &mut again).unwrap();
    assert_eq!(again, bytes);
}
