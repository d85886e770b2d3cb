//! Where bytes go to and come from.

use alloc::vec::Vec;
use core::convert::Infallible;

use super::error::WireError;

/// Takes the bytes of a saved sequence, in order.
///
/// `Vec<u8>` is one, and under std [`Io`](super::Io) makes one of whatever is `Write`.
///
/// # Examples
///
/// A sink that only counts:
///
/// ```
/// use core::convert::Infallible;
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::wire::{Label, Sink};
///
/// struct Count(usize);
///
/// impl Sink for Count {
///     type Error = Infallible;
///
///     fn put(&mut self, bytes: &[u8]) -> Result<(), Infallible> {
///         self.0 += bytes.len();
///         Ok(())
///     }
/// }
///
/// let mut count = Count(0);
/// PagedKvCache::new().save(&PagedKvStore::new(16, 4, 1, 2), &Label::new(), &mut count)?;
/// assert_eq!(count.0, 56 + 88 + 4);
/// # Ok::<(), paged_kv::wire::WireError>(())
/// ```
pub trait Sink {
    /// Why bytes were not taken.
    type Error;

    /// Takes all of these bytes.
    ///
    /// # Errors
    ///
    /// The sink's own. What was taken before is a beginning that cannot be restored.
    fn put(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Gives the bytes of a saved sequence, in order.
///
/// `&[u8]` is one, and under std [`Io`](super::Io) makes one of whatever is `Read`.
///
/// # Examples
///
/// A source in two parts, as a ring buffer has its bytes:
///
/// ```
/// use paged_kv::wire::{Saved, Source, WireError};
///
/// #[derive(Debug)]
/// struct Two<'a>(&'a [u8], &'a [u8]);
///
/// impl Source for Two<'_> {
///     type Error = core::convert::Infallible;
///
///     fn fill(&mut self, into: &mut [u8]) -> Result<usize, Self::Error> {
///         if self.0.is_empty() { self.1.fill(into) } else { self.0.fill(into) }
///     }
/// }
///
/// let error = Saved::open(Two(b"not a", b" saved sequence")).unwrap_err();
/// assert_eq!(error, WireError::Truncated { need: 56, have: 20 });
/// ```
pub trait Source {
    /// Why bytes were not given.
    type Error;

    /// Fills the beginning of `into`, which is not empty, and says how many bytes that were: 0 where
    /// there are no more.
    ///
    /// # Errors
    ///
    /// The source's own.
    fn fill(&mut self, into: &mut [u8]) -> Result<usize, Self::Error>;
}

impl Sink for Vec<u8> {
    type Error = Infallible;

    fn put(&mut self, bytes: &[u8]) -> Result<(), Infallible> {
        self.extend_from_slice(bytes);
        Ok(())
    }
}

/// What was read is gone from the front.
impl Source for &[u8] {
    type Error = Infallible;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, Infallible> {
        let n = into.len().min(self.len());
        let (now, rest) = self.split_at(n);
        into[..n].copy_from_slice(now);
        *self = rest;
        Ok(n)
    }
}

impl<S: Sink + ?Sized> Sink for &mut S {
    type Error = S::Error;

    fn put(&mut self, bytes: &[u8]) -> Result<(), S::Error> {
        (**self).put(bytes)
    }
}

impl<S: Source + ?Sized> Source for &mut S {
    type Error = S::Error;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, S::Error> {
        (**self).fill(into)
    }
}

/// A source, and how much of it was read.
#[derive(Debug)]
pub(super) struct Counted<S> {
    source: S,
    have: u64,
    /// What there has to be at least.
    need: u64,
}

/// What a buffer grows by before anything has arrived.
const FIRST: usize = 4096;

impl<S: Source> Counted<S> {
    pub(super) fn new(source: S) -> Self {
        Counted { source, have: 0, need: 0 }
    }

    /// So many bytes are wanted next, in however many parts.
    pub(super) fn want(&mut self, bytes: usize) {
        self.need = self.have.saturating_add(bytes as u64);
    }

    /// Reads so many bytes to `buffer`, whose memory is used again.
    ///
    /// It grows as they arrive, by as much as has arrived: a length that is not true costs no more
    /// memory than twice the bytes that are, and half as much again while it grows.
    pub(super) fn read(
        &mut self,
        buffer: &mut Vec<u8>,
        bytes: usize,
    ) -> Result<(), WireError<S::Error>> {
        let mut at = 0;
        while at < bytes {
            if at == buffer.len() {
                let more = at.max(FIRST).min(bytes - at);
                buffer
                    .try_reserve_exact(more)
                    .map_err(|_| WireError::OutOfMemory { bytes: at.saturating_add(more) })?;
                buffer.resize(at + more, 0);
            }
            let part = at..buffer.len().min(bytes);
            // A source that claims more than it was asked for is taken at what it was asked for.
            let most = part.len();
            match self.source.fill(&mut buffer[part]).map_err(WireError::Stream)?.min(most) {
                0 => return Err(self.truncated()),
                n => (at, self.have) = (at + n, self.have + n as u64),
            }
        }
        buffer.truncate(bytes);
        Ok(())
    }

    /// Fills a buffer.
    pub(super) fn read_into(&mut self, mut buffer: &mut [u8]) -> Result<(), WireError<S::Error>> {
        while !buffer.is_empty() {
            match self.source.fill(buffer).map_err(WireError::Stream)?.min(buffer.len()) {
                0 => return Err(self.truncated()),
                n => (buffer, self.have) = (&mut buffer[n..], self.have + n as u64),
            }
        }
        Ok(())
    }

    fn truncated(&self) -> WireError<S::Error> {
        WireError::Truncated { need: self.need, have: self.have }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes one by one, from a source that counts wrong.
    struct Drops(u8);

    impl Source for Drops {
        type Error = Infallible;

        fn fill(&mut self, into: &mut [u8]) -> Result<usize, Infallible> {
            into[0] = self.0;
            self.0 += 1;
            Ok(if into.len() == 1 { 7 } else { 1 })
        }
    }

    #[test]
    fn bytes_arrive_however_they_come() {
        let (mut source, mut buffer) = (Counted::new(Drops(3)), alloc::vec![9; 2]);
        source.read(&mut buffer, 5).unwrap();
        assert_eq!((&buffer[..], source.have), (&[3, 4, 5, 6, 7][..], 5));
        source.read(&mut buffer, 1).unwrap();
        assert_eq!((&buffer[..], source.have), (&[8][..], 6));
        source.read(&mut buffer, 0).unwrap();
        assert!(buffer.is_empty());
        let mut place = [0; 3];
        source.read_into(&mut place).unwrap();
        assert_eq!((place, source.have), ([9, 10, 11], 9));
    }

    #[test]
    fn a_buffer_grows_with_what_is_there() {
        let bytes = alloc::vec![1; 3 * FIRST];
        let (mut source, mut buffer) = (Counted::new(&bytes[..]), Vec::new());
        source.want(usize::MAX);
        let refused = source.read(&mut buffer, usize::MAX);
        let have = bytes.len() as u64;
        assert_eq!(refused, Err(WireError::Truncated { need: usize::MAX as u64, have }));
        assert!(buffer.capacity() <= 2 * bytes.len(), "{}", buffer.capacity());
    }
}
