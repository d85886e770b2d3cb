//! The one currency that attention accepts: a sequence's pages, in order, however they are held.

use core::ops::Range;

use super::memory::Memory;
use super::sequence::window::Hole;
use crate::cut;
use crate::element::Element;
use crate::element::tile::Layout;
use crate::id::BlockId;

/// A sequence as attention sees it: position `p` stands in row `p % block_size` of
/// `block(p / block_size)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvView<'a, E: Element> {
    layout: &'a Layout<E>,
    pages: Pages<'a>,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
enum Pages<'a> {
    /// Blocks of a shared store, found through a block table.
    Table { memory: &'a [u64], table: &'a [BlockId], hole: Hole },
    /// Blocks of the sequence's own, in order.
    Owned(&'a [Memory]),
}

impl<'a, E: Element> KvView<'a, E> {
    /// The first `len` positions of the blocks that `table` names in `memory`, a line to spare
    /// included.
    pub(crate) fn table(
        layout: &'a Layout<E>,
        memory: &'a [u64],
        table: &'a [BlockId],
        hole: Hole,
        len: usize,
    ) -> Self {
        let blocks = hole.entries(layout.shape().blocks_for(len));
        debug_assert!(blocks <= table.len(), "a table covers its sequence");
        KvView { layout, pages: Pages::Table { memory, table, hole }, len }
    }

    /// The first `len` positions of these blocks.
    pub(crate) fn owned(layout: &'a Layout<E>, blocks: &'a [Memory], len: usize) -> Self {
        debug_assert!(layout.shape().blocks_for(len) <= blocks.len(), "pages cover the cache");
        KvView { layout, pages: Pages::Owned(blocks), len }
    }

    /// Positions in the sequence.
    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Positions that are not there any more: a window has passed them.
    pub(crate) fn freed(&self) -> Range<usize> {
        let Pages::Table { hole, .. } = self.pages else { return 0..0 };
        let (blocks, size) = (hole.range(), self.layout.shape().block_size());
        blocks.start * size..blocks.end * size
    }

    #[inline(always)]
    pub(crate) fn layout(&self) -> &'a Layout<E> {
        self.layout
    }

    /// The memory from the sequence's `index`-th block on, a line behind the last block included.
    #[inline(always)]
    pub(crate) fn block(&self, index: usize) -> &'a [u64] {
        match self.pages {
            Pages::Table { memory, table, hole } => {
                let block = cut::one(table, hole.entry(index));
                cut::from(memory, block.index() * self.layout.block_words())
            }
            Pages::Owned(blocks) => cut::one(blocks, index).with_slack(),
        }
    }
}
