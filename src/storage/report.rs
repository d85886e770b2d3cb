//! What a store looks like from outside: a recount, numbers, and a picture.
//!
//! All of it reads the counts alone and needs no rows, so that the shared layer asks it without a
//! lock.

use alloc::vec::Vec;
use core::fmt;

use super::blocks::Blocks;
use crate::error::Miscount;
use crate::id::BlockId;
use crate::shape::KvShape;

/// Holders that name each block, to be compared with the books.
pub(crate) struct Recount<'a> {
    blocks: &'a Blocks,
    found: Vec<u32>,
    absent: Option<BlockId>,
}

impl<'a> Recount<'a> {
    pub(crate) fn new(blocks: &'a Blocks) -> Self {
        Recount { blocks, found: alloc::vec![0; blocks.total()], absent: None }
    }

    /// Somebody names this block.
    pub(crate) fn hold(&mut self, block: BlockId) {
        match self.found.get_mut(block.index()) {
            Some(found) => *found += 1,
            None => self.absent = self.absent.or(Some(block)),
        }
    }

    /// Tells all that is wrong. Of blocks that are not there it tells the first.
    pub(crate) fn finish(self, mut tell: impl FnMut(Miscount)) {
        if let Some(block) = self.absent {
            tell(Miscount::NoBlock { block, total: self.found.len() });
        }
        self.blocks.audit(&self.found, tell);
    }
}

/// How the blocks of one store are used. Prints as one line.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 8, 1, 2);
/// let mut cache = PagedKvCache::new();
/// cache.append(&mut store, &[0.5; 34], &[0.5; 34], 17)?;
/// let stats = store.stats();
/// assert_eq!((stats.total, stats.held, stats.free, stats.peak), (8, 2, 6, 2));
/// println!("{stats}\n{}", store.map());
/// # cache.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Positions in one block.
    pub block_size: usize,
    /// Bytes of rows in one block.
    pub bytes_per_block: usize,
    /// Blocks there are.
    pub total: usize,
    /// Blocks that nobody holds.
    pub free: usize,
    /// Blocks that somebody holds.
    pub held: usize,
    /// Of those, blocks with more than one holder (sequences, and at most one page group).
    pub shared: usize,
    /// Of those, blocks that a page group holds and no sequence: cached, or room not used yet.
    pub cached: usize,
    /// Most blocks that were held at once since the store was opened.
    pub peak: usize,
}

impl StoreStats {
    pub(crate) fn of(blocks: &Blocks, shape: KvShape, bytes_per_block: usize) -> Self {
        let census = blocks.census();
        StoreStats {
            block_size: shape.block_size(),
            bytes_per_block,
            total: blocks.total(),
            free: blocks.free(),
            held: census.held,
            shared: census.shared,
            cached: census.grouped,
            peak: census.peak,
        }
    }
}

impl fmt::Display for StoreStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StoreStats { total, free, held, shared, cached, peak, .. } = self;
        write!(
            f,
            "{total} blocks of {} positions: {free} free, {held} held ({shared} shared, {cached} \
             cached), {peak} at most",
            self.block_size
        )
    }
}

/// The blocks of one store as a picture.
///
/// Prints 64 blocks a line and at most 16 lines; in larger stores a letter stands for several
/// blocks, the busiest of which it shows:
///
/// ```text
/// .   free                     c   a page group alone
/// 1   one sequence             C   a page group and one sequence
/// 2 ..= 9, +   so many sequences and groups
/// ```
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
///
/// let mut store = PagedKvStore::new(16, 100, 1, 1);
/// let mut cache = PagedKvCache::new();
/// cache.append(&mut store, &[0.5; 40], &[0.5; 40], 40)?;
/// let map = store.map().to_string();
/// let lines: Vec<&str> = map.lines().collect();
/// assert!(lines[0].starts_with("       0 111....") && lines[1].starts_with("      64 ...."));
/// # cache.release(&mut store)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct StoreMap {
    cells: Vec<u8>,
    blocks_per_cell: usize,
}

impl StoreMap {
    const LINE: usize = 64;
    const MOST_LINES: usize = 16;

    pub(crate) fn of(blocks: &Blocks) -> Self {
        let total = blocks.total();
        let blocks_per_cell = total.div_ceil(Self::LINE * Self::MOST_LINES).max(1);
        let mut cells = Vec::with_capacity(total.div_ceil(blocks_per_cell));
        for first in (0..total).step_by(blocks_per_cell) {
            let of_cell = first..total.min(first + blocks_per_cell);
            let busiest = of_cell.filter_map(BlockId::new).max_by_key(|&b| blocks.holders(b));
            cells.push(busiest.map_or(b'.', |block| Self::letter(blocks, block)));
        }
        StoreMap { cells, blocks_per_cell }
    }

    fn letter(blocks: &Blocks, block: BlockId) -> u8 {
        match (blocks.holders(block), blocks.in_group(block)) {
            (0, _) => b'.',
            (1, true) => b'c',
            (2, true) => b'C',
            (holders @ 1..=9, _) => b'0' + holders as u8,
            _ => b'+',
        }
    }
}

impl fmt::Display for StoreMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.blocks_per_cell > 1 {
            writeln!(f, "one letter for {} blocks", self.blocks_per_cell)?;
        }
        for (line, cells) in self.cells.chunks(Self::LINE).enumerate() {
            if line > 0 {
                writeln!(f)?;
            }
            write!(f, "{:>8} ", line * Self::LINE * self.blocks_per_cell)?;
            f.write_str(core::str::from_utf8(cells).unwrap_or_default())?;
        }
        Ok(())
    }
}

impl fmt::Debug for StoreMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn numbers_and_picture_say_who_holds_what() {
        let blocks = Blocks::new(70).unwrap();
        for _ in 0..3 {
            blocks.take().unwrap();
        }
        let [zero, one, two] = [0, 1, 2].map(BlockId::from_raw);
        blocks.add_table(one).unwrap();
        blocks.drop_table(two).unwrap();
        // The block given back is taken again.
        let group = blocks.take_for_group().unwrap();
        assert_eq!(group, two);
        let own = blocks.take_for_group().unwrap();
        blocks.add_table(own).unwrap();
        blocks.drop_table(zero).unwrap();
        let stats = StoreStats::of(&blocks, KvShape::square(16, 1, 1).unwrap(), 4096);
        assert_eq!((stats.total, stats.free, stats.held), (70, 67, 3));
        assert_eq!((stats.shared, stats.cached, stats.peak), (2, 1, 4));
        let line = "70 blocks of 16 positions: 67 free, 3 held (2 shared, 1 cached), 4 at most";
        assert_eq!(stats.to_string(), line);
        let dots = ".".repeat(60);
        let map = alloc::format!("       0 .2cC{dots}\n      64 ......");
        assert_eq!(StoreMap::of(&blocks).to_string(), map);
        assert_eq!(alloc::format!("{:?}", StoreMap::of(&blocks)), map);
    }

    #[test]
    fn a_large_store_fits_a_screen_and_its_busiest_blocks_show() {
        let blocks = Blocks::new(5000).unwrap();
        let first = blocks.take().unwrap();
        for _ in 0..12 {
            blocks.add_table(first).unwrap();
        }
        let map = StoreMap::of(&blocks).to_string();
        let lines: Vec<_> = map.lines().collect();
        assert_eq!((lines.len(), lines[0]), (17, "one letter for 5 blocks"));
        assert!(lines[1].starts_with("       0 +....") && lines[2].starts_with("     320 ...."));
    }
}
