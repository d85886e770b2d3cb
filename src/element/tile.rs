//! The page tile: where each number of a (block, KV head) stands.
//!
//! ```text
//! block     | tile of head 0 | tile of head 1 | ...          each tile starts on a 64-byte line
//! tile      | K panel 0 | K panel 1 | ... | V panel 0 | V panel 1 | ... | scales |
//!
//! K panel p    one row of w cells for each N numbers of the width; a column is a position,
//!              64 p ..= 64 p + w - 1, w = min(64, what is left of the block): keys are transposed
//! V panel q    one row of w cells for each N positions; a column is a column of the value row,
//!              64 q ..= 64 q + w - 1, w = min(64, what is left of the width)
//! scales       on a line of their own: for each group of the key's width, then of the value's,
//!              one f32 a position
//! ```
//!
//! N is the number of numbers in a cell (`Format::NUMBERS`), 1 for `f32`.
//!
//! Why this shape. With keys transposed a vector register holds sixteen *positions*, so a dot
//! product is one chain of multiply-adds over the width and nothing is ever summed across lanes.
//! A panel of 64 floats a row is as wide as the kernel's widest register tile: each step of the
//! chain reads four neighbouring lines, and the whole tile is read in address order, which is
//! what keeps the hardware prefetcher at work. Against rows laid out token by token this was
//! 2.3 to 3 times faster on cold memory, and within 10 % of the read limit in the best cases;
//! appending a token pays for it with `k_width` scattered stores.
//!
//! Nothing is padded inside a panel, for any width and any block size. Only where a width or a
//! block size is no multiple of N does a last row hold cells that are partly used, and the tile's
//! end, and the end of its numbers where scales follow, are rounded up to a line.

use core::marker::PhantomData;

use bytemuck::{must_cast_slice, must_cast_slice_mut};

use super::{Element, Format};
use crate::cut;
use crate::shape::KvShape;

/// Columns in a full panel: four lines of `f32`.
pub(crate) const PANEL: usize = 64;

/// Bytes in a cache line, to which tiles are aligned.
pub(crate) const LINE: usize = 64;

/// Memory is handed around in words of eight bytes, which every format's cells divide.
const WORD: usize = size_of::<u64>();

/// A panel of up to [`PANEL`] columns and how to walk its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panel {
    /// Index of the panel's first cell in the tile.
    pub(crate) start: usize,
    /// Columns in a row, which is also the distance between rows.
    pub(crate) width: usize,
}

/// All panels of keys, or of values, in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panels {
    /// Index of the first cell in the tile.
    base: usize,
    /// Rows of cells.
    rows: usize,
    columns: usize,
}

impl Panels {
    /// Panels of this size that begin a tile.
    pub(crate) const fn new(rows: usize, columns: usize) -> Self {
        Panels { base: 0, rows, columns }
    }

    /// The panel of columns `64 index ..`.
    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> Panel {
        let first = index * PANEL;
        Panel { start: self.base + self.rows * first, width: (self.columns - first).min(PANEL) }
    }

    /// The cell in this row and column.
    fn cell(&self, row: usize, column: usize) -> usize {
        let panel = self.panel(column / PANEL);
        panel.start + row * panel.width + column % PANEL
    }
}

/// A [`KvShape`] laid out for one element type.
#[derive(Debug)]
pub struct Layout<E> {
    shape: KvShape,
    keys: Panels,
    values: Panels,
    /// Where the scales begin, counted in `f32`.
    scales: usize,
    /// Words in one tile, its rounding to a line included.
    tile_words: usize,
    element: PhantomData<E>,
}

impl<E> Clone for Layout<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Layout<E> {}

/// Scales in a row of this width.
pub(crate) const fn groups<E: Element>(width: usize) -> usize {
    match E::META_GROUP {
        0 => 0,
        group => width.div_ceil(group),
    }
}

impl<E: Element> Layout<E> {
    /// Sizes fit: a [`KvShape`] has checked them for the widest type there is.
    pub(crate) const fn new(shape: KvShape) -> Self {
        let key_cell = size_of::<<E::K as Format>::Cell>();
        let value_cell = size_of::<<E::V as Format>::Cell>();
        let rows = shape.k_width().div_ceil(E::K::NUMBERS);
        let keys = Panels { base: 0, rows, columns: shape.block_size() };
        let key_bytes = (rows * shape.block_size() * key_cell).next_multiple_of(value_cell);
        let rows = shape.block_size().div_ceil(E::V::NUMBERS);
        let values = Panels { base: key_bytes / value_cell, rows, columns: shape.v_width() };
        let numbers = (key_bytes + rows * shape.v_width() * value_cell).next_multiple_of(LINE);
        let scales = groups::<E>(shape.k_width()) + groups::<E>(shape.v_width());
        let bytes = numbers + (scales * shape.block_size() * size_of::<f32>());
        let tile_words = bytes.next_multiple_of(LINE) / WORD;
        let scales = numbers / size_of::<f32>();
        Layout { shape, keys, values, scales, tile_words, element: PhantomData }
    }

    /// Writes rows `[n][n_kv_heads][k_width]` and `[n][n_kv_heads][v_width]` to the positions
    /// `first ..` of a block.
    ///
    /// The caller has checked lengths: both slices hold the same number of rows and the block
    /// has room for them.
    #[inline(always)]
    pub(crate) fn write(&self, block: &mut [u64], first: usize, k: &[f32], v: &[f32]) {
        let (k_width, v_width) = (self.shape.k_width(), self.shape.v_width());
        for (head, tile) in block.chunks_exact_mut(self.tile_words).enumerate() {
            for (position, row) in (first..).zip(k.chunks_exact(self.shape.k_row_len())) {
                self.write_key(tile, position, &row[head * k_width..][..k_width]);
            }
            for (position, row) in (first..).zip(v.chunks_exact(self.shape.v_row_len())) {
                self.write_value(tile, position, &row[head * v_width..][..v_width]);
            }
        }
    }

    #[inline(always)]
    fn write_key(&self, tile: &mut [u64], position: usize, row: &[f32]) {
        for (group, numbers) in row.chunks(group_len::<E>(row.len())).enumerate() {
            let inverse = self.write_scale(tile, group, position, numbers);
            let panel = self.keys.panel(position / PANEL);
            let first = group * group_len::<E>(row.len()) / E::K::NUMBERS;
            let start = panel.start + first * panel.width + position % PANEL;
            let cells = must_cast_slice_mut::<u64, <E::K as Format>::Cell>(tile);
            let cells = cells[start..].iter_mut().step_by(panel.width);
            for (cell, numbers) in cells.zip(numbers.chunks(E::K::NUMBERS)) {
                // What a last cell does not use is zero, whatever a query meets it with.
                for index in 0..E::K::NUMBERS {
                    E::K::set(cell, index, numbers.get(index).map_or(0.0, |n| n * inverse));
                }
            }
        }
    }

    #[inline(always)]
    fn write_value(&self, tile: &mut [u64], position: usize, row: &[f32]) {
        let (line, index) = (position / E::V::NUMBERS, position % E::V::NUMBERS);
        for (group, numbers) in row.chunks(group_len::<E>(row.len())).enumerate() {
            let place = groups::<E>(self.shape.k_width()) + group;
            let inverse = self.write_scale(tile, place, position, numbers);
            let first = group * group_len::<E>(row.len());
            let cells = must_cast_slice_mut::<u64, <E::V as Format>::Cell>(tile);
            for (part, numbers) in numbers.chunks(PANEL).enumerate() {
                let start = self.values.cell(line, first + part * PANEL);
                for (cell, number) in cells[start..].iter_mut().zip(numbers) {
                    E::V::set(cell, index, number * inverse);
                }
            }
        }
    }

    /// Stores the scale of a group, where the type has one, and returns what to multiply by.
    #[inline(always)]
    fn write_scale(&self, tile: &mut [u64], group: usize, position: usize, numbers: &[f32]) -> f32 {
        if E::META_GROUP == 0 {
            return 1.0;
        }
        let scale = E::scale(numbers);
        let at = self.scales + group * self.shape.block_size() + position;
        must_cast_slice_mut::<u64, f32>(tile)[at] = scale;
        if scale > 0.0 { 1.0 / scale } else { scale }
    }

    /// Reads one key row of one head back.
    pub(crate) fn read_k(&self, block: &[u64], head: usize, position: usize, out: &mut [f32]) {
        let tile = self.tile(block, head);
        let cells = must_cast_slice::<u64, <E::K as Format>::Cell>(tile);
        for (at, number) in out.iter_mut().enumerate() {
            let cell = cells[self.keys.cell(at / E::K::NUMBERS, position)];
            let scale = self.scale(tile, at, 0, position);
            *number = E::K::get(cell, at % E::K::NUMBERS) * scale;
        }
    }

    /// Reads one value row of one head back.
    pub(crate) fn read_v(&self, block: &[u64], head: usize, position: usize, out: &mut [f32]) {
        let tile = self.tile(block, head);
        let cells = must_cast_slice::<u64, <E::V as Format>::Cell>(tile);
        for (at, number) in out.iter_mut().enumerate() {
            let cell = cells[self.values.cell(position / E::V::NUMBERS, at)];
            let scale = self.scale(tile, at, groups::<E>(self.shape.k_width()), position);
            *number = E::V::get(cell, position % E::V::NUMBERS) * scale;
        }
    }

    /// The scale of number `at` of a row whose groups begin with `first`; 1 where there is none.
    fn scale(&self, tile: &[u64], at: usize, first: usize, position: usize) -> f32 {
        match E::META_GROUP {
            0 => 1.0,
            group => {
                let place = first + at / group;
                let start = self.scales + place * self.shape.block_size();
                must_cast_slice::<u64, f32>(tile)[start + position]
            }
        }
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Lines in one block.
    pub(crate) const fn block_lines(&self) -> usize {
        self.block_words() / (LINE / WORD)
    }

    /// Words in one block.
    pub(crate) const fn block_words(&self) -> usize {
        self.tile_words * self.shape.n_kv_heads()
    }

    /// Words from one head's tile to the next one's.
    #[inline(always)]
    pub(crate) fn tile_words(&self) -> usize {
        self.tile_words
    }

    /// The tile of one KV head.
    fn tile<'a>(&self, block: &'a [u64], head: usize) -> &'a [u64] {
        cut::part(block, head * self.tile_words, self.tile_words)
    }

    #[inline(always)]
    pub(crate) fn keys(&self) -> Panels {
        self.keys
    }

    #[inline(always)]
    pub(crate) fn values(&self) -> Panels {
        self.values
    }

    /// Where a tile keeps the scales of a key's group, one a position, counted in `f32`.
    #[inline(always)]
    pub(crate) fn key_scales(&self, group: usize) -> usize {
        self.scales + group * self.shape.block_size()
    }

    /// Where a tile keeps the scales of a value's group, one a position, counted in `f32`.
    #[inline(always)]
    pub(crate) fn value_scales(&self, group: usize) -> usize {
        self.key_scales(groups::<E>(self.shape.k_width()) + group)
    }
}

/// Numbers in a group of a row of this width; all of them where there are no scales.
fn group_len<E: Element>(width: usize) -> usize {
    match E::META_GROUP {
        0 => width,
        group => group.min(width),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::KvDims;
    use alloc::vec;
    use alloc::vec::Vec;

    fn numbers(tag: usize, n: usize) -> Vec<f32> {
        (0..n).map(|i| (tag * 100_000 + i) as f32).collect()
    }

    /// Every number of every row stands in a cell of its own and comes back.
    #[test]
    fn rows_come_back_for_awkward_shapes() {
        for (block_size, n_kv_heads, k_width, v_width) in
            [(1, 1, 1, 1), (5, 3, 7, 9), (16, 2, 64, 64), (80, 2, 65, 130), (144, 1, 16, 8)]
        {
            let dims = KvDims { block_size, n_kv_heads, k_width, v_width };
            let layout = Layout::<f32>::new(KvShape::new(dims).unwrap());
            let k = numbers(1, block_size * n_kv_heads * k_width);
            let v = numbers(2, block_size * n_kv_heads * v_width);
            let mut block = vec![u64::MAX; layout.block_words()];
            let half = block_size / 2;
            let (k_half, v_half) = (half * n_kv_heads * k_width, half * n_kv_heads * v_width);
            layout.write(&mut block, 0, &k[..k_half], &v[..v_half]);
            layout.write(&mut block, half, &k[k_half..], &v[v_half..]);
            let cells: &[f32] = must_cast_slice(&block);
            let written = cells.iter().filter(|cell| !cell.is_nan()).count();
            assert_eq!(written, k.len() + v.len(), "no two numbers share a cell");
            for position in 0..block_size {
                for head in 0..n_kv_heads {
                    let at = position * n_kv_heads + head;
                    let mut row = vec![0.0; k_width];
                    layout.read_k(&block, head, position, &mut row);
                    assert_eq!(row, k[at * k_width..][..k_width]);
                    let mut row = vec![0.0; v_width];
                    layout.read_v(&block, head, position, &mut row);
                    assert_eq!(row, v[at * v_width..][..v_width]);
                }
            }
        }
    }

    /// The drawing above, by index.
    #[test]
    fn the_page_is_laid_out_as_drawn() {
        let layout = Layout::<f32>::new(KvShape::square(80, 2, 128).unwrap());
        assert_eq!(layout.tile_words() * 2, 80 * 256);
        assert_eq!(layout.keys().panel(0), Panel { start: 0, width: 64 });
        assert_eq!(layout.keys().panel(1), Panel { start: 64 * 128, width: 16 });
        assert_eq!(layout.values().panel(0), Panel { start: 80 * 128, width: 64 });
        assert_eq!(layout.values().panel(1), Panel { start: 80 * 128 + 80 * 64, width: 64 });
    }
}
