//! Sequences as bytes: to another machine, to a slower tier, and back.
//!
//! A prompt that was computed once need not be computed again because its request has moved to another
//! machine or its blocks were wanted by somebody else. A *saved sequence* is a run of bytes that says by
//! itself what it is: stored types, shapes, windows, token ids, and the rows exactly as they are stored,
//! scales included. Restored, it gives the same bits in attention as the one that was saved, and so does
//! what is appended to it.
//!
//! [`PagedKvCache::save`](crate::cache::PagedKvCache::save) and
//! [`restore`](crate::cache::PagedKvCache::restore) do it for one layer,
//! [`PagedSequence::save`](crate::cache::PagedSequence::save) and
//! [`restore`](crate::cache::PagedSequence::restore) for all layers of a request. Bytes go to a [`Sink`]
//! and come from a [`Source`], a page at a time; `Vec<u8>` and `&[u8]` are such, and under std [`Io`]
//! makes them of files and sockets.
//!
//! ```
//! use paged_kv::cache::{PagedKvCache, PagedKvStore};
//! use paged_kv::wire::{Label, Saved};
//!
//! let mut store = PagedKvStore::new(16, 8, 1, 2);
//! let mut cache = PagedKvCache::new();
//! cache.append(&mut store, &[1.0, 2.0, 3.0, 4.0], &[5.0; 4], 2)?;
//!
//! let mut bytes = Vec::new();
//! cache.save(&store, &Label::new().tokens(&[15496, 995]).salt(b"my model"), &mut bytes)?;
//!
//! // Elsewhere: another block size.
//! let mut there = PagedKvStore::new(64, 2, 1, 2);
//! let saved = Saved::open(&bytes[..])?;
//! assert_eq!((saved.tokens(), saved.salt()), (&[15496, 995][..], &b"my model"[..]));
//! let mut back = PagedKvCache::new();
//! back.restore(&mut there, saved)?;
//! let mut row = [0.0; 2];
//! back.copy_k_row(&there, 1, 0, &mut row)?;
//! assert_eq!(row, [3.0, 4.0]);
//! # cache.release(&mut store)?;
//! # back.release(&mut there)?;
//! # Ok::<(), Box<dyn core::error::Error>>(())
//! ```
//!
//! # What may differ, and what may not
//!
//! The pool may be another one, in any state; the block size may differ, rows are then moved one by one;
//! layers may have other numbers of blocks and so other classes. The number of layers, and of each layer
//! its stored type, KV heads, widths and whose rows it reads, may not: that is an error which names both.
//!
//! A layer's window may differ as long as what it needs was saved. A block that is kept must be there
//! from its first row on, and what a window had passed is cut where *blocks* of the old size end. Where
//! the new block size divides 64, or is the old one, everything is there; with another one
//! [`WireError::PositionFreed`] may say which position is not.
//!
//! # The format
//!
//! Numbers are little endian on every machine. Of anything that is one of several kinds, 0 is none of
//! them, so that cleared memory is never taken for a record.
//!
//! ```text
//! from  bytes
//!    0      8  magic               89 50 4b 56 0d 0a 1a 0a
//!    8      2  version             1
//!   10      2  page layout         1: below
//!   12      4  reserved            0
//!   16      8  header bytes        all up to and with the header's checksum
//!   24      8  positions
//!   32      8  token ids           as many as positions, or 0
//!   40      8  salt bytes
//!   48      8  layers
//!   56         layers, 88 bytes each
//!    +  0     1  kind              1: has rows of its own, 2: reads another layer's
//!    +  1     1  stored type       1: f32, 2: f16, 3: bf16, 4: int8, 5: int4
//!    +  2     6  reserved          0
//!    +  8     8  owner             whose rows it reads: its own number for kind 1;
//!                                  for kind 2 a layer before it of kind 1, and all else is 0
//!    + 16     8  block size
//!    + 24     8  KV heads
//!    + 32     8  key width
//!    + 40     8  value width
//!    + 48     8  window            last positions that are kept; 0: all are
//!    + 56     8  first positions   that a window keeps as well
//!    + 64     8  hole              blocks in front of those that a window has passed
//!    + 72     8  blocks passed     which are not here
//!    + 80     8  page bytes        which follow from the sizes
//!         4 each  token ids
//!                 salt
//!              4  checksum         of all before
//!
//!       then, layer after layer of kind 1, each block that is there, in the order of positions
//!                 page
//!              4  checksum         of the header's, the layer and the block's number in the sequence
//!                                  (8 bytes each), and the page
//! ```
//!
//! Page layout 1 is the tile that attention reads, head by head, without what only aligns it; rows behind
//! the last position are zeros:
//!
//! ```text
//! page      | head 0 | head 1 | ...
//! head      | keys | values | scales |
//! keys      panels of 64 positions: for each cell along the width, the cells of the panel's positions
//! values    panels of 64 columns: for each cell along the positions, the cells of the panel's columns
//! scales    for each group along the key's width, then along the value's: an f32 for each position
//! cell      f32, f16: a number; bf16: two in a word; int8: keys four in a word, values one;
//!           int4: two in a byte; the first in the lowest bits, groups of 32 (int8: the row)
//! ```
//!
//! Why pages, and not rows position by position: what goes out and comes in is then a copy of memory,
//! which keeps up with a network or a disk; for another block size it makes no difference, since pages
//! come in the order of positions and one is all that has to be held. Nothing of a sequence that is not
//! its own goes out: what a block holds behind the last position, and between its parts, may be another
//! conversation's. So the same rows are the same bytes, too, wherever their blocks lie.
//!
//! Nothing follows the last page: a source is left standing there, and files can be laid one behind the
//! other.
//!
//! # Checksums
//!
//! CRC-32 (that of Ethernet and PNG), by the crate `crc32fast`: no_std, well kept, without dependencies
//! that do anything, and at gigabytes a second on processors that multiply without carry. It finds
//! every damage that is 32 bits long at most. Each page's begins with the header's, so that no page
//! is taken for one of another place or file.
//!
//! It is not a signature: whoever can write the bytes can write the checksum. What such hands can do is
//! bounded. Restoring never panics and never reads more than the header tells of; it allocates no more
//! than four times the bytes that arrive, and, over all layers, table entries of 4 bytes for blocks that *are*
//! free; and it is all or nothing. But the numbers in the rows, and a length with no token
//! ids to it, may be anything: compare [`Saved::tokens`] with the prompt, and sign what passes through
//! hands that are not yours.
//!
//! # With an object store or a cache server
//!
//! A saved sequence is one object, written once and never changed. What it is the answer to has to be in
//! its key, all of it: the model and its revision, what the layers store (types, windows; the block size
//! need not be), the salt of the tenant or LoRA, and a hash of the token ids. For prompts that share
//! beginnings, save at lengths that others will ask for as well (multiples of some hundred tokens), key
//! each by the hash of its tokens, and ask for the longest first:
//!
//! ```text
//! kv/<model>@<revision>/<layers>/<salt>/<hash of the first 2048 ids>
//! ```
//!
//! A hash in a key is a way to find and no proof: the header holds the ids themselves, so compare them
//! with the prompt ([`Saved::tokens`]) and the salt with your own, before anything is restored. Put the
//! model's name into the salt as well and an object under the wrong key is noticed.
//!
//! A restore holds its blocks while the bytes come in. From a source that may stall, fetch the object
//! first and restore from memory, or give the source a timeout: its error gives everything back. What
//! comes back is a sequence like another one; to share it between requests,
//! [`fork`](crate::cache::PagedSequence::fork) it.
//!
//! # Whose room this is
//!
//! It knows bytes and their order. It takes no lock: how pages are read and written under the guards of
//! shared layers is `share`'s. What stands in a page is `element`'s.

mod error;
mod header;
#[cfg(feature = "std")]
mod io;
mod stream;

use alloc::vec::Vec;

pub use error::{Part, WireError};
pub use header::{Label, SavedLayer};
#[cfg(feature = "std")]
pub use io::Io;
pub use stream::{Sink, Source};

use crate::element::Element;
use crate::id::StoreId;
use crate::storage::page::Page;
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;
use crate::storage::sequence::window::Hole;
use header::Header;
use stream::Counted;

/// A saved sequence whose header has been read, and whose pages come next.
///
/// # Examples
///
/// ```
/// use paged_kv::wire::{Saved, WireError};
///
/// let error = Saved::open(&b"\x89PNG\r\n\x1a\n is something else, long enough to be looked at ..."[..]);
/// assert!(matches!(error, Err(WireError::Magic { .. })));
/// ```
#[derive(Debug)]
#[must_use = "it is restored by `PagedKvCache::restore` or `PagedSequence::restore`"]
pub struct Saved<S> {
    source: Counted<S>,
    header: Header,
    page: Vec<u8>,
}

impl<S: Source> Saved<S> {
    /// Reads the header.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::wire::{Label, Saved};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[1.0; 4], &[2.0; 4], 2)?;
    /// let mut bytes = Vec::new();
    /// cache.save(&store, &Label::new().tokens(&[7, 8]).salt(b"tenant 1"), &mut bytes)?;
    ///
    /// let saved = Saved::open(&bytes[..])?;
    /// assert_eq!((saved.len(), saved.is_empty(), saved.layers().len()), (2, false, 1));
    /// assert_eq!((saved.tokens(), saved.salt()), (&[7, 8][..], &b"tenant 1"[..])); // as expected?
    /// # cache.release(&mut store)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`WireError`]: for another version or layout, for bytes that are no header, or not all of one.
    ///
    /// # Cost
    ///
    /// Allocates four times the bytes of the header that arrive, at most.
    pub fn open(source: S) -> Result<Self, WireError<S::Error>> {
        let mut source = Counted::new(source);
        let header = header::read(&mut source)?;
        Ok(Saved { source, header, page: Vec::new() })
    }

    /// Positions.
    pub fn len(&self) -> usize {
        self.header.len
    }

    /// Whether there are none: an empty sequence can be saved.
    pub fn is_empty(&self) -> bool {
        self.header.len == 0
    }

    /// The token ids that the rows stand for: one for each position, or none.
    pub fn tokens(&self) -> &[u32] {
        &self.header.tokens
    }

    /// What was said of everything else that the rows depend on.
    pub fn salt(&self) -> &[u8] {
        &self.header.salt
    }

    /// The layers.
    pub fn layers(&self) -> &[SavedLayer] {
        &self.header.layers
    }

    /// The next page, which is this one, and whole. Its layer has been found to
    /// [`fit`](SavedLayer::fit).
    pub(crate) fn page(
        &mut self,
        layer: usize,
        index: usize,
    ) -> Result<Page<'_>, WireError<S::Error>> {
        let bytes = self.header.layers[layer].page_bytes();
        self.source.want(bytes.saturating_add(SUM));
        self.source.read(&mut self.page, bytes)?;
        check_page(&mut self.source, self.header.seal, layer, index, &self.page)?;
        let (block_size, rows) = self.rows(layer, index);
        Ok(Page { bytes: &self.page, block_size, index, rows })
    }

    /// The next page, which is this one, read to where it will stand.
    fn page_into(
        &mut self,
        layer: usize,
        index: usize,
        page: &mut [u8],
    ) -> Result<(), WireError<S::Error>> {
        self.source.want(page.len() + SUM);
        self.source.read_into(page)?;
        check_page(&mut self.source, self.header.seal, layer, index, page)
    }

    /// The block size of a layer's pages, and how many positions this one has.
    fn rows(&self, layer: usize, index: usize) -> (usize, usize) {
        let size = self.header.layers[layer].shape().block_size();
        (size, size.min(self.header.len - index * size))
    }
}

/// Reads a page's checksum.
fn check_page<S: Source>(
    source: &mut Counted<S>,
    seal: u32,
    layer: usize,
    index: usize,
    page: &[u8],
) -> Result<(), WireError<S::Error>> {
    let mut sum = [0; SUM];
    source.read_into(&mut sum)?;
    let (need, have) = (page_sum(seal, layer, index, page), u32::from_le_bytes(sum));
    if need == have {
        return Ok(());
    }
    Err(WireError::Checksum { part: Part::Page { layer, index }, need, have })
}

/// Writes a saved sequence, part by part.
pub(crate) struct Writer<W> {
    sink: W,
    seal: u32,
    /// The next page, to be filled by whoever has its store.
    pub(crate) page: Vec<u8>,
}

impl<W: Sink> Writer<W> {
    /// Writes the header.
    pub(crate) fn begin(
        mut sink: W,
        len: usize,
        label: &Label<'_>,
        layers: &[SavedLayer],
    ) -> Result<Self, WireError<W::Error>> {
        if !label.tokens.is_empty() && label.tokens.len() != len {
            return Err(WireError::Tokens { need: len, have: label.tokens.len() });
        }
        let (bytes, seal) = header::write(len, label, layers);
        sink.put(&bytes).map_err(WireError::Stream)?;
        let page = layers.iter().map(SavedLayer::page_bytes).max().unwrap_or(0);
        Ok(Writer { sink, seal, page: Vec::with_capacity(page + SUM) })
    }

    /// Writes the page.
    pub(crate) fn put(&mut self, layer: usize, index: usize) -> Result<(), WireError<W::Error>> {
        let sum = page_sum(self.seal, layer, index, &self.page);
        self.page.extend(sum.to_le_bytes());
        self.sink.put(&self.page).map_err(WireError::Stream)
    }

    /// Writes a page from where it stands.
    fn put_whole(
        &mut self,
        layer: usize,
        index: usize,
        page: &[u8],
    ) -> Result<(), WireError<W::Error>> {
        let sum = page_sum(self.seal, layer, index, page).to_le_bytes();
        self.sink.put(page).and_then(|()| self.sink.put(&sum)).map_err(WireError::Stream)
    }
}

/// Bytes of a page's checksum.
const SUM: usize = 4;

/// A page's checksum.
fn page_sum(seal: u32, layer: usize, index: usize, page: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&seal.to_le_bytes());
    hasher.update(&(layer as u64).to_le_bytes());
    hasher.update(&(index as u64).to_le_bytes());
    hasher.update(page);
    hasher.finalize()
}

/// Blocks of a sequence that are taken as its rows come. They go back where those end too early: the
/// source is the caller's, and may fail or panic.
struct Room<'a, E: Element> {
    cache: &'a mut PagedKvCache,
    store: &'a mut PagedKvStore<E>,
    bound: Option<StoreId>,
    filled: bool,
}

impl<E: Element> Drop for Room<'_, E> {
    fn drop(&mut self) {
        if !self.filled {
            self.cache.forget(self.store, self.bound);
        }
    }
}

impl PagedKvCache {
    /// Writes the sequence to `sink`: its one layer, exactly as it is stored. The
    /// [module](crate::wire) draws the bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::wire::{Label, Saved};
    ///
    /// let mut store = PagedKvStore::new(16, 1, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut store, &[1.0; 2], &[2.0; 2])?;
    /// let mut bytes = Vec::new();
    /// cache.save(&store, &Label::new(), &mut bytes)?;
    /// cache.release(&mut store)?; // somebody else needs the block
    /// assert_eq!(store.free_block_count(), 1);
    /// cache.restore(&mut store, Saved::open(&bytes[..])?)?; // and is done
    /// assert_eq!(cache.seq_len(), 1);
    /// # cache.release(&mut store)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`WireError::Kv`] for a store that did not fill this sequence, [`WireError::Tokens`] for
    /// another number of token ids than of positions, [`WireError::Stream`] where the sink fails.
    ///
    /// # Cost
    ///
    /// Allocates the header and one page. Full blocks go to the sink from where they stand, where a head's
    /// keys, values and scales are multiples of 64 bytes each (so widths of 16, 32, 64, 128 in blocks of
    /// 16); the other pages are copied once.
    pub fn save<E: Element, W: Sink>(
        &self,
        store: &PagedKvStore<E>,
        label: &Label<'_>,
        sink: W,
    ) -> Result<(), WireError<W::Error>> {
        self.check_store(store.id()).map_err(|wrong| WireError::Kv(wrong.into()))?;
        let len = self.seq_len();
        let layer = SavedLayer::new(0, &store.page_kind(), self.window(), self.hole());
        let mut writer = Writer::begin(sink, len, label, &[layer])?;
        for (index, block, rows) in self.pages(store.shape(), len) {
            if let Some(page) = store.whole_page(block, rows) {
                writer.put_whole(0, index, page)?;
            } else {
                store.save_page(block, rows, &mut writer.page);
                writer.put(0, index)?;
            }
        }
        Ok(())
    }

    /// Makes this empty sequence the one that was saved, in blocks of `store`, all of it or nothing.
    ///
    /// It keeps the window that it has ([`with_window`](Self::with_window)), whatever was saved;
    /// [`SavedLayer::window`] says what that was. The module says [what may
    /// differ](crate::wire#what-may-differ-and-what-may-not).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::wire::{Label, Saved, WireError};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 2);
    /// let mut bytes = Vec::new();
    /// PagedKvCache::new().save(&store, &Label::new(), &mut bytes)?;
    ///
    /// let mut wide = PagedKvStore::new(16, 4, 1, 4); // the store of another model
    /// let refused = PagedKvCache::new().restore(&mut wide, Saved::open(&bytes[..])?);
    /// assert!(matches!(refused, Err(WireError::Dims { need, have, .. })
    ///     if (need.k_width, have.k_width) == (4, 2)));
    /// # Ok::<(), WireError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`WireError::Kv`] where the sequence is not empty, is bound to another store, or too few blocks are
    /// free; [`WireError::Layers`], [`WireError::Element`], [`WireError::Dims`],
    /// [`WireError::PositionFreed`], [`WireError::Field`] for pages of another size, where it does not
    /// fit this store or window;
    /// [`WireError::Truncated`], [`WireError::Checksum`] and [`WireError::Stream`] from its pages. The
    /// sequence and the store hold what they held, also where the source panics.
    ///
    /// # Cost
    ///
    /// Takes blocks as pages arrive. Allocates one page and the table. Where the block size is the same,
    /// what [`save`](Self::save) does not copy is read to where it will stand, other pages are copied
    /// once; where it is another one, number by number.
    pub fn restore<E: Element, S: Source>(
        &mut self,
        store: &mut PagedKvStore<E>,
        mut saved: Saved<S>,
    ) -> Result<(), WireError<S::Error>> {
        self.check_blank(store)?;
        let (len, layers) = (saved.len(), saved.layers());
        let &[layer] = layers else {
            return Err(WireError::Layers { need: 1, have: layers.len() });
        };
        let hole = layer.fit(0, len, &store.page_kind(), self.window())?;
        let need = hole.entries(store.shape().blocks_for(len));
        store.check_free(need).map_err(|exhausted| WireError::Kv(exhausted.into()))?;
        let mut room = Room { bound: self.store_id(), cache: self, store, filled: false };
        room.cache.read_pages(room.store, &mut saved, &layer, hole)?;
        room.cache.fill(len, hole);
        room.filled = true;
        Ok(())
    }

    fn read_pages<E: Element, S: Source>(
        &mut self,
        store: &mut PagedKvStore<E>,
        saved: &mut Saved<S>,
        layer: &SavedLayer,
        hole: Hole,
    ) -> Result<(), WireError<S::Error>> {
        for index in layer.pages(saved.len()) {
            let (block_size, rows) = saved.rows(0, index);
            if block_size == store.block_size() && !hole.range().contains(&index) {
                let block = self.room_for(store, hole, index);
                if let Some(page) = store.whole_page_mut(block, rows) {
                    saved.page_into(0, index, page)?;
                    continue;
                }
            }
            let page = saved.page(0, index)?;
            self.load_page(store, &page, hole);
        }
        Ok(())
    }
}
