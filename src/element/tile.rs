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

mod page;

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

    /// Copies the rows of a position, of all heads, to another position of the same block or another
    /// of `words`: the numbers as they are stored, and their scales. A place is the block's number
    /// and the position in it.
    #[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
    pub(crate) fn copy_position(
        &self,
        words: &mut [u64],
        from: (usize, usize),
        to: (usize, usize),
    ) {
        let ((from_block, from), (to_block, to)) = (from, to);
        let (k_width, v_width) = (self.shape.k_width(), self.shape.v_width());
        for head in 0..self.shape.n_kv_heads() {
            let tile = |block| (block * self.block_words() + head * self.tile_words) * WORD;
            let (from_tile, to_tile) = (tile(from_block), tile(to_block));
            // A key's cells are its own.
            let cells = must_cast_slice_mut::<u64, <E::K as Format>::Cell>(words);
            let base = |tile| tile / size_of::<<E::K as Format>::Cell>();
            for row in 0..k_width.div_ceil(E::K::NUMBERS) {
                cells[base(to_tile) + self.keys.cell(row, to)] =
                    cells[base(from_tile) + self.keys.cell(row, from)];
            }
            // A value's may be shared with its neighbours.
            let cells = must_cast_slice_mut::<u64, <E::V as Format>::Cell>(words);
            let base = |tile| tile / size_of::<<E::V as Format>::Cell>();
            let many = E::V::NUMBERS;
            for column in 0..v_width {
                let found = cells[base(from_tile) + self.values.cell(from / many, column)];
                let cell = &mut cells[base(to_tile) + self.values.cell(to / many, column)];
                E::V::put(cell, to % many, found, from % many);
            }
            let scales = must_cast_slice_mut::<u64, f32>(words);
            let base = |tile| tile / size_of::<f32>() + self.scales;
            for group in 0..groups::<E>(k_width) + groups::<E>(v_width) {
                let row = group * self.shape.block_size();
                scales[base(to_tile) + row + to] = scales[base(from_tile) + row + from];
            }
        }
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
    #[cfg(test)]
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
    use crate::element::{Int4, Int8};
    use crate::shape::KvDims;
    use alloc::vec;
    use alloc::vec::Vec;
    use half::{bf16, f16};

    /// Rows of whole numbers of this size at most, which the first number of each 32 has, so that
    /// every scale is 1 and what is stored is exact.
    fn rows(most: i32, tag: u32, rows: usize, width: usize) -> Vec<f32> {
        let mut state = tag;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as i32 % (most + 1) * if state >> 7 & 1 == 0 { 1 } else { -1 }
        };
        let mut number = |at: usize| match at % 32 {
            0 => most * if next() < 0 { -1 } else { 1 },
            _ => next(),
        };
        (0..rows)
            .flat_map(|_| (0..width).map(&mut number).collect::<Vec<_>>())
            .map(|x| x as f32)
            .collect()
    }

    fn layout<E: Element>(block_size: usize, heads: usize, k: usize, v: usize) -> Layout<E> {
        let dims = KvDims { block_size, n_kv_heads: heads, k_width: k, v_width: v };
        Layout::new(KvShape::new(dims).unwrap())
    }

    /// Writes a block in two parts, which meet in the middle of a cell where its size is odd.
    fn write<E: Element>(layout: &Layout<E>, block: &mut [u64], k: &[f32], v: &[f32]) {
        let shape = layout.shape();
        let half = shape.block_size() / 2;
        let (k_half, v_half) = (half * shape.k_row_len(), half * shape.v_row_len());
        layout.write(block, 0, &k[..k_half], &v[..v_half]);
        layout.write(block, half, &k[k_half..], &v[v_half..]);
    }

    /// Widths and block sizes that no cell, group, vector or panel divides, and some that all do.
    const SHAPES: [(usize, usize, usize, usize); 9] = [
        (1, 1, 1, 1),
        (5, 3, 7, 9),
        (3, 2, 33, 31),
        (16, 2, 64, 64),
        (17, 1, 100, 34),
        (80, 2, 65, 130),
        (144, 1, 16, 8),
        (7, 1, 2, 257),
        (64, 1, 128, 128),
    ];

    /// Every number of every row stands in a place of its own and comes back.
    fn rows_come_back<E: Element>(most: i32) {
        for (block_size, n_kv_heads, k_width, v_width) in SHAPES {
            let layout = layout::<E>(block_size, n_kv_heads, k_width, v_width);
            let k = rows(most, 1, block_size * n_kv_heads, k_width);
            let v = rows(most, 2, block_size * n_kv_heads, v_width);
            let mut block = vec![u64::MAX; layout.block_words()];
            write(&layout, &mut block, &k, &v);
            for (at, (k, v)) in k.chunks(k_width).zip(v.chunks(v_width)).enumerate() {
                let (position, head) = (at / n_kv_heads, at % n_kv_heads);
                let (mut k_back, mut v_back) = (vec![0.0; k_width], vec![0.0; v_width]);
                layout.read_k(&block, head, position, &mut k_back);
                layout.read_v(&block, head, position, &mut v_back);
                assert_eq!((&k_back[..], &v_back[..]), (k, v), "{} {position} {head}", E::NAME);
            }
        }
    }

    #[test]
    fn rows_come_back_for_awkward_shapes() {
        rows_come_back::<f32>(100_000);
        rows_come_back::<f16>(2048);
        rows_come_back::<bf16>(256);
        rows_come_back::<Int8>(127);
        rows_come_back::<Int4>(7);
    }

    /// A block's bits that are written are those of its numbers, its scales, and what the last cell
    /// of a key leaves unused, which is zero.
    fn written_bits<E: Element>(bits: usize, group: usize) {
        for (block_size, n_kv_heads, k_width, v_width) in SHAPES {
            let layout = layout::<E>(block_size, n_kv_heads, k_width, v_width);
            let (k, v) = (
                rows(7, 1, block_size * n_kv_heads, k_width),
                rows(7, 2, block_size * n_kv_heads, v_width),
            );
            let filled = |with: u64| {
                let mut block = vec![with; layout.block_words()];
                write(&layout, &mut block, &k, &v);
                block
            };
            let (zeros, ones) = (filled(0), filled(u64::MAX));
            let same = |(a, b): (&u64, &u64)| (!(a ^ b)).count_ones() as usize;
            let written: usize = zeros.iter().zip(&ones).map(same).sum();
            let k_cells = k_width.next_multiple_of(E::K::NUMBERS);
            let scales =
                if group == 0 { 0 } else { k_width.div_ceil(group) + v_width.div_ceil(group) };
            let want = block_size * n_kv_heads * ((k_cells + v_width) * bits + scales * 32);
            assert_eq!(written, want, "{}: {:?}", E::NAME, layout.shape());
            let tile = layout.tile_words() * WORD;
            assert!(tile.is_multiple_of(LINE));
            // A line for the rounding of numbers, one for that of scales, and cells used in part.
            let most = want / n_kv_heads / 8 + 2 * LINE + block_size + 2 * v_width;
            assert!(tile <= most, "{}: {tile} bytes", E::NAME);
        }
    }

    #[test]
    fn nothing_but_a_rows_numbers_is_written() {
        written_bits::<f32>(32, 0);
        written_bits::<f16>(16, 0);
        written_bits::<bf16>(16, 0);
        written_bits::<Int8>(8, usize::MAX);
        written_bits::<Int4>(4, 32);
    }

    /// The drawing above, by index.
    #[test]
    fn the_page_is_laid_out_as_drawn() {
        let square = |block_size| KvShape::square(block_size, 2, 128).unwrap();
        let layout = Layout::<f32>::new(square(80));
        assert_eq!(layout.tile_words() * 2, 80 * 256);
        assert_eq!(layout.keys().panel(0), Panel { start: 0, width: 64 });
        assert_eq!(layout.keys().panel(1), Panel { start: 64 * 128, width: 16 });
        assert_eq!(layout.values().panel(0), Panel { start: 80 * 128, width: 64 });
        assert_eq!(layout.values().panel(1), Panel { start: 80 * 128 + 80 * 64, width: 64 });

        // 128 / 4 rows of words, then bytes; two scales a position behind them.
        let layout = Layout::<Int8>::new(square(80));
        assert_eq!(layout.keys().panel(1), Panel { start: 64 * 32, width: 16 });
        assert_eq!(layout.values().panel(0), Panel { start: 80 * 128, width: 64 });
        assert_eq!(layout.values().panel(1), Panel { start: 80 * 128 + 80 * 64, width: 64 });
        assert_eq!((layout.key_scales(0), layout.value_scales(0)), (80 * 64, 80 * 65));
        assert_eq!(layout.tile_words() * WORD, 80 * (256 + 8));

        // 128 / 2 rows of bytes, then 5 / 2 rows rounded up; four scales a position for each.
        let layout = Layout::<Int4>::new(square(5));
        assert_eq!(layout.values().panel(1), Panel { start: 5 * 64 + 3 * 64, width: 64 });
        let numbers: usize = 5 * 64 + 3 * 128;
        assert_eq!(layout.key_scales(0) * 4, numbers.next_multiple_of(LINE));
        assert_eq!(layout.value_scales(0) - layout.key_scales(0), 4 * 5);
    }

    /// What the documents say: bytes for each number of a block of 64 at width 128.
    #[test]
    fn bytes_per_number() {
        fn bytes<E: Element>() -> f64 {
            let layout = Layout::<E>::new(KvShape::square(64, 1, 128).unwrap());
            (layout.block_words() * WORD) as f64 / (64 * 2 * 128) as f64
        }
        let all =
            [bytes::<f32>(), bytes::<f16>(), bytes::<bf16>(), bytes::<Int8>(), bytes::<Int4>()];
        assert_eq!(all, [4.0, 2.0, 2.0, 1.031_25, 0.625]);
    }

    /// A row that is not finite or too small leaves its neighbours in the same cells alone.
    #[test]
    fn odd_rows_stay_by_themselves() {
        fn check<E: Element>(most: i32) {
            let layout = layout::<E>(3, 1, 40, 40);
            let good = rows(most, 1, 3, 40);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, 1e-39] {
                for position in 0..3 {
                    let mut rows = good.clone();
                    let row = &mut rows[position * 40..][..40];
                    row.fill(if bad.is_finite() { bad } else { 1.0 });
                    row[35] = bad;
                    let mut block = vec![u64::MAX; layout.block_words()];
                    write(&layout, &mut block, &rows, &rows);
                    for at in 0..3 {
                        for read in [Layout::<E>::read_k, Layout::<E>::read_v] {
                            let mut back = [0.0; 40];
                            read(&layout, &block, 0, at, &mut back);
                            if at != position {
                                assert_eq!(back, good[at * 40..][..40], "{} {bad}", E::NAME);
                                continue;
                            }
                            // Everything that shares a scale with the bad number.
                            let scaled = E::META_GROUP != 0;
                            for (index, back) in back.into_iter().enumerate() {
                                let shares =
                                    index == 35 || scaled && (E::META_GROUP > 40 || index >= 32);
                                match (bad.is_finite(), shares) {
                                    (true, _) if scaled => assert_eq!(back, 0.0),
                                    (true, _) => assert!((back - bad).abs() <= 3e-8),
                                    (false, true) if scaled => assert!(back.is_nan()),
                                    (false, true) if bad.is_nan() => assert!(back.is_nan()),
                                    (false, true) => assert_eq!(back, bad),
                                    (false, false) => assert_eq!(back, 1.0),
                                }
                            }
                        }
                    }
                }
            }
        }
        check::<f32>(100_000);
        check::<f16>(2048);
        check::<bf16>(256);
        check::<Int8>(127);
        check::<Int4>(7);
    }
}
