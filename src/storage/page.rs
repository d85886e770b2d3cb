//! Blocks as bytes: what a saved sequence is made of.
//!
//! A page is a block's rows as `element::tile` writes them out. Which pages there are, in what order
//! and with which checksum, is the affair of `wire`; here they are cut into blocks. A page belongs to a
//! place in its sequence, so that a store whose blocks have another size knows where its rows go.

use alloc::vec::Vec;

use super::paged::PagedKvStore;
use super::sequence::window::Hole;
use crate::element::Element;
use crate::element::tile::Layout;
use crate::id::BlockId;
use crate::shape::{KvDims, KvShape};

/// What has to agree before a page is read: everything but the block size.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
    allow(unreachable_pub, reason = "what layers that are shared have in common shows it")
)]
pub struct PageKind {
    pub(crate) code: u8,
    pub(crate) name: &'static str,
    pub(crate) shape: KvShape,
    /// Bytes of a page of this shape, which may have another block size.
    pub(crate) bytes: fn(KvShape) -> usize,
}

/// A page of a sequence.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
    allow(unreachable_pub, reason = "what layers that are shared have in common shows it")
)]
pub struct Page<'a> {
    pub(crate) bytes: &'a [u8],
    /// The block size it was saved with.
    pub(crate) block_size: usize,
    /// Its place in the sequence, in blocks of that size.
    pub(crate) index: usize,
    /// Positions that are there.
    pub(crate) rows: usize,
}

impl<E: Element> PagedKvStore<E> {
    /// What this store's pages are.
    pub(crate) fn page_kind(&self) -> PageKind {
        let bytes = |shape| Layout::<E>::new(shape).page_bytes();
        PageKind { code: E::CODE, name: E::NAME, shape: self.shape(), bytes }
    }

    /// The first `rows` positions of a block as a page, where that is what stands in the memory.
    pub(crate) fn whole_page(&self, block: BlockId, rows: usize) -> Option<&[u8]> {
        if rows < self.block_size() { None } else { self.layout().as_page(self.words(block)) }
    }

    /// The memory of a block, where a page of all its positions can be read into it as it is.
    pub(crate) fn whole_page_mut(&mut self, block: BlockId, rows: usize) -> Option<&mut [u8]> {
        if rows < self.block_size() {
            return None;
        }
        let (layout, words) = self.words_mut(block);
        layout.as_page_mut(words)
    }

    /// Writes the first `rows` positions of a block to `page`, which becomes as long as a page is.
    pub(crate) fn save_page(&self, block: BlockId, rows: usize, page: &mut Vec<u8>) {
        page.resize(self.layout().page_bytes(), 0);
        self.layout().save_page(self.words(block), rows, page);
    }

    /// Writes the rows of a page into the blocks of this table that they belong into. What the hole
    /// leaves out is left out. The page is as long as its kind says.
    pub(crate) fn load_page(&mut self, page: &Page<'_>, table: &[BlockId], hole: Hole) {
        let size = self.block_size();
        let Ok(theirs) =
            KvShape::new(KvDims { block_size: page.block_size, ..self.shape().dims() })
        else {
            return;
        };
        let first = page.index * page.block_size;
        let mut row = 0;
        while row < page.rows {
            let (index, to) = ((first + row) / size, (first + row) % size);
            let rows = row..page.rows.min(row + size - to);
            row = rows.end;
            if hole.range().contains(&index) {
                continue;
            }
            let block = table[hole.entry(index)];
            let end = to + rows.len();
            let (layout, words) = self.words_mut(block);
            if page.block_size == size {
                layout.load_page(page.bytes, words);
            } else {
                layout.load_rows(page.bytes, &Layout::new(theirs), rows, words, to);
            }
            self.forget_rows(block, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise each page would be copied once more on its way.
    #[test]
    fn a_full_block_is_a_page_as_it_stands() {
        let shape = KvShape::square(4, 2, 8).unwrap();
        let mut store = PagedKvStore::<f32>::with_shape(shape, 1).unwrap();
        let block = BlockId::from_raw(0);
        let bytes = cfg!(target_endian = "little").then_some(4 * 2 * (8 + 8) * 4);
        assert_eq!(store.whole_page(block, 4).map(<[u8]>::len), bytes);
        assert_eq!(store.whole_page_mut(block, 4).map(|page| page.len()), bytes);
        assert_eq!(store.whole_page(block, 3), None);
        assert_eq!(store.whole_page_mut(block, 3), None);
    }
}
