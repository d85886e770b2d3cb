//! A page as bytes, for another machine: numbers and scales as they stand, and nothing else.
//!
//! ```text
//! page    | head 0 | head 1 | ...
//! head    | cells of keys | cells of values | scales |     in the order of the tile
//! ```
//!
//! What lies between the parts of a tile, and rows that a sequence has not written, may be anything,
//! another sequence's rows or whatever the memory held before. None of that leaves: the former is
//! left out, the latter is zero, so that the same rows are the same bytes on every machine. Cells are
//! little endian; where the machine is, a page is one copy of its parts.
//!
//! Bits are moved and never read as numbers, so that scales and payloads of NaNs come back as they
//! were.

use core::ops::Range;

use bytemuck::{Pod, Zeroable, bytes_of, must_cast_slice, must_cast_slice_mut, pod_read_unaligned};

use super::{Layout, groups};
use crate::element::{Element, Format};

impl<E: Element> Layout<E> {
    /// Bytes of a page.
    pub(crate) fn page_bytes(&self) -> usize {
        self.head_bytes() * self.shape.n_kv_heads()
    }

    /// A block in which every position is written, as its page, where nothing else stands in it.
    pub(crate) fn as_page<'a>(&self, block: &'a [u64]) -> Option<&'a [u8]> {
        self.is_page().then(|| &must_cast_slice::<u64, u8>(block)[..self.page_bytes()])
    }

    /// A block as the place for a page in which every position is written.
    pub(crate) fn as_page_mut<'a>(&self, block: &'a mut [u64]) -> Option<&'a mut [u8]> {
        self.is_page().then(|| &mut must_cast_slice_mut::<u64, u8>(block)[..self.page_bytes()])
    }

    /// Whether tiles have no gaps, and cells the order of bytes that pages have.
    fn is_page(&self) -> bool {
        cfg!(target_endian = "little") && self.head_bytes() == size_of::<u64>() * self.tile_words
    }

    /// Writes the first `rows` positions of a block to `page`, zeros for the rest.
    pub(crate) fn save_page(&self, block: &[u64], rows: usize, page: &mut [u8]) {
        let (numbers, scales) = (self.number_bytes(), self.scale_bytes());
        for (head, to) in page.chunks_exact_mut(self.head_bytes()).enumerate() {
            let tile = must_cast_slice::<u64, u8>(self.tile(block, head));
            let (to_numbers, to_scales) = to.split_at_mut(numbers);
            to_numbers.copy_from_slice(&tile[..numbers]);
            to_scales.copy_from_slice(&tile[self.scales_at()..][..scales]);
            self.turn(to_numbers, to_scales);
            self.clear_from(to, rows);
        }
    }

    /// Writes a page of this layout into a block.
    pub(crate) fn load_page(&self, page: &[u8], block: &mut [u64]) {
        let (numbers, scales) = (self.number_bytes(), self.scale_bytes());
        let tiles = block.chunks_exact_mut(self.tile_words);
        for (from, tile) in page.chunks_exact(self.head_bytes()).zip(tiles) {
            let tile = must_cast_slice_mut::<u64, u8>(tile);
            let (to_numbers, to_scales) = tile.split_at_mut(self.scales_at());
            let (to_numbers, to_scales) = (&mut to_numbers[..numbers], &mut to_scales[..scales]);
            to_numbers.copy_from_slice(&from[..numbers]);
            to_scales.copy_from_slice(&from[numbers..]);
            self.turn(to_numbers, to_scales);
        }
    }

    /// Writes the positions `rows` of a page of another block size to the positions `first ..` of a
    /// block.
    pub(crate) fn load_rows(
        &self,
        page: &[u8],
        of: &Layout<E>,
        rows: Range<usize>,
        block: &mut [u64],
        first: usize,
    ) {
        let tiles = block.chunks_exact_mut(self.tile_words);
        for (head, tile) in page.chunks_exact(of.head_bytes()).zip(tiles) {
            for (to, from) in (first..).zip(rows.clone()) {
                let cells = must_cast_slice_mut::<u64, <E::K as Format>::Cell>(tile);
                for row in 0..self.keys.rows {
                    cells[self.keys.cell(row, to)] = cell(head, of.keys.cell(row, from));
                }
                let cells = must_cast_slice_mut::<u64, <E::V as Format>::Cell>(tile);
                let many = E::V::NUMBERS;
                for column in 0..self.values.columns {
                    let found = cell(head, of.values.cell(from / many, column));
                    let place = &mut cells[self.values.cell(to / many, column)];
                    E::V::put(place, to % many, found, from % many);
                }
                let scales = must_cast_slice_mut::<u64, u32>(tile);
                for group in 0..self.scale_rows() {
                    let found = cell(&head[of.number_bytes()..], of.scale_cell(group, from));
                    scales[self.scales + self.scale_cell(group, to)] = found;
                }
            }
        }
    }

    /// Rows of a head from `rows` on become zero, as does what its last cells do not use.
    fn clear_from(&self, head: &mut [u8], rows: usize) {
        let size = self.shape.block_size();
        for row in 0..self.keys.rows {
            for column in rows..size {
                set_cell(head, self.keys.cell(row, column), <E::K as Format>::Cell::zeroed());
            }
        }
        let many = E::V::NUMBERS;
        for line in rows / many..self.values.rows {
            let kept = rows.saturating_sub(line * many);
            for column in 0..self.values.columns {
                let at = self.values.cell(line, column);
                let mut cells = cell::<<E::V as Format>::Cell>(head, at);
                for index in kept..many {
                    E::V::put(&mut cells, index, <E::V as Format>::Cell::zeroed(), 0);
                }
                set_cell(head, at, cells);
            }
        }
        let scales = &mut head[self.number_bytes()..];
        for group in 0..self.scale_rows() {
            for position in rows..size {
                set_cell(scales, self.scale_cell(group, position), 0_u32);
            }
        }
    }

    /// Turns cells between this machine's order of bytes and that of pages.
    fn turn(&self, numbers: &mut [u8], scales: &mut [u8]) {
        if cfg!(target_endian = "big") {
            let (keys, values) = numbers.split_at_mut(self.key_bytes());
            reverse(keys, size_of::<<E::K as Format>::Cell>());
            reverse(values, size_of::<<E::V as Format>::Cell>());
            reverse(scales, size_of::<f32>());
        }
    }

    fn head_bytes(&self) -> usize {
        self.number_bytes() + self.scale_bytes()
    }

    fn key_bytes(&self) -> usize {
        self.keys.rows * self.keys.columns * size_of::<<E::K as Format>::Cell>()
    }

    fn number_bytes(&self) -> usize {
        // Values follow keys without a gap, which would be bytes that nobody has written.
        const { assert!(size_of::<<E::K as Format>::Cell>() >= size_of::<<E::V as Format>::Cell>()) };
        let values = self.values.rows * self.values.columns;
        self.key_bytes() + values * size_of::<<E::V as Format>::Cell>()
    }

    /// Where a tile keeps its scales, in bytes.
    fn scales_at(&self) -> usize {
        self.scales * size_of::<f32>()
    }

    fn scale_bytes(&self) -> usize {
        self.scale_rows() * self.shape.block_size() * size_of::<f32>()
    }

    fn scale_rows(&self) -> usize {
        groups::<E>(self.shape.k_width()) + groups::<E>(self.shape.v_width())
    }

    fn scale_cell(&self, group: usize, position: usize) -> usize {
        group * self.shape.block_size() + position
    }
}

/// A cell of a page.
fn cell<C: Pod>(head: &[u8], index: usize) -> C {
    let bytes = &head[index * size_of::<C>()..][..size_of::<C>()];
    if cfg!(target_endian = "little") {
        return pod_read_unaligned(bytes);
    }
    let mut cell = C::zeroed();
    let own = bytemuck::bytes_of_mut(&mut cell);
    own.copy_from_slice(bytes);
    own.reverse();
    cell
}

fn set_cell<C: Pod>(head: &mut [u8], index: usize, cell: C) {
    let bytes = &mut head[index * size_of::<C>()..][..size_of::<C>()];
    bytes.copy_from_slice(bytes_of(&cell));
    if cfg!(target_endian = "big") {
        bytes.reverse();
    }
}

/// Reverses the bytes of each cell of this size.
fn reverse(cells: &mut [u8], size: usize) {
    for cell in cells.chunks_exact_mut(size) {
        cell.reverse();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Int4, Int8};
    use crate::shape::{KvDims, KvShape};
    use alloc::vec;
    use alloc::vec::Vec;
    use half::{bf16, f16};

    fn layout<E: Element>(block_size: usize, heads: usize, k: usize, v: usize) -> Layout<E> {
        let dims = KvDims { block_size, n_kv_heads: heads, k_width: k, v_width: v };
        Layout::new(KvShape::new(dims).unwrap())
    }

    /// A block of bits that are no number's in particular, NaNs with payloads among them.
    fn block(words: usize, mut state: u64) -> Vec<u64> {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state ^ (state >> 29)
        };
        (0..words).map(|_| next() | 0x7f80_0000).collect()
    }

    /// Whatever stands in a block comes back bit for bit, at once and row by row through pages of
    /// other sizes; what a sequence has not written does not leave.
    fn bits_come_back<E: Element>() {
        for (size, heads, k, v) in [(1, 1, 1, 1), (5, 2, 7, 9), (16, 2, 33, 31), (70, 1, 66, 65)] {
            let from = layout::<E>(size, heads, k, v);
            let rows = size - size / 3;
            let words = block(from.block_words(), size as u64);
            let mut page = vec![0xaa; from.page_bytes()];
            from.save_page(&words, rows, &mut page);

            // The same page, from a block that differs in everything that is nobody's.
            let mut twin = vec![u64::MAX; from.block_words()];
            from.load_rows(&page, &from, 0..rows, &mut twin, 0);
            let mut page_of_twin = vec![0x55; from.page_bytes()];
            from.save_page(&twin, rows, &mut page_of_twin);
            assert_eq!(page, page_of_twin, "{} of {size}", E::NAME);

            let mut whole = vec![u64::MAX; from.block_words()];
            from.load_page(&page, &mut whole);
            from.save_page(&whole, rows, &mut page_of_twin);
            assert_eq!(page, page_of_twin, "{} of {size}, at once", E::NAME);

            // Through blocks of three positions and back.
            let small = layout::<E>(3, heads, k, v);
            let mut back = vec![u64::MAX; from.block_words()];
            for start in (0..rows).step_by(3) {
                let end = rows.min(start + 3);
                let mut part = vec![0; small.block_words()];
                small.load_rows(&page, &from, start..end, &mut part, 0);
                let mut small_page = vec![0; small.page_bytes()];
                small.save_page(&part, end - start, &mut small_page);
                from.load_rows(&small_page, &small, 0..end - start, &mut back, start);
            }
            from.save_page(&back, rows, &mut page_of_twin);
            assert_eq!(page, page_of_twin, "{} of {size}, by threes", E::NAME);
        }
    }

    #[test]
    fn every_bit_comes_back() {
        bits_come_back::<f32>();
        bits_come_back::<f16>();
        bits_come_back::<bf16>();
        bits_come_back::<Int8>();
        bits_come_back::<Int4>();
    }

    /// A page that is written from where it stands is the one that would have been copied.
    fn pages_stand_in_blocks<E: Element>() {
        for width in [16, 32, 64, 128] {
            let layout = layout::<E>(16, 2, width, width);
            let mut words = block(layout.block_words(), width as u64);
            let mut page = vec![0; layout.page_bytes()];
            layout.save_page(&words, 16, &mut page);
            assert_eq!(layout.as_page(&words), Some(&page[..]), "{} of {width}", E::NAME);
            layout.as_page_mut(&mut words).unwrap().fill(7);
            layout.save_page(&words, 16, &mut page);
            assert!(page.iter().all(|byte| *byte == 7), "{} of {width}", E::NAME);
        }
        let gaps = layout::<E>(3, 2, 7, 8);
        assert_eq!(gaps.as_page(&block(gaps.block_words(), 1)), None, "{}", E::NAME);
    }

    #[test]
    fn common_widths_leave_no_gaps() {
        pages_stand_in_blocks::<f32>();
        pages_stand_in_blocks::<f16>();
        pages_stand_in_blocks::<bf16>();
        pages_stand_in_blocks::<Int8>();
        pages_stand_in_blocks::<Int4>();
    }

    #[test]
    fn a_page_is_its_numbers_and_scales() {
        // 5 positions, 2 heads of 7 and 9.
        assert_eq!(layout::<f32>(5, 2, 7, 9).page_bytes(), 2 * 5 * (7 + 9) * 4);
        // Keys in fours: 8 bytes; values 9; two scales.
        assert_eq!(layout::<Int8>(5, 2, 7, 9).page_bytes(), 2 * (5 * 8 + 5 * 9 + 2 * 5 * 4));
        // Keys in pairs: 4 bytes; values in pairs of positions: 3 rows of 9.
        assert_eq!(layout::<Int4>(5, 2, 7, 9).page_bytes(), 2 * (5 * 4 + 3 * 9 + 2 * 5 * 4));
    }

    #[test]
    fn bytes_are_turned_cell_by_cell() {
        let mut bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        reverse(&mut bytes, 4);
        assert_eq!(bytes, [4, 3, 2, 1, 8, 7, 6, 5]);
        set_cell(&mut bytes, 1, 0x0102_0304_u32);
        assert_eq!(bytes[4..], [4, 3, 2, 1]);
        assert_eq!(cell::<u16>(&bytes, 3), 0x0102);
    }
}
