//! The page tile: where each number of a (block, KV head) stands.
//!
//! ```text
//! block     | tile of head 0 | tile of head 1 | ...          each tile starts on a 64-byte line
//! tile      | K panel 0 | K panel 1 | ... | V panel 0 | V panel 1 | ...
//!
//! K panel p    k_width rows of w columns; a column is a position, 64 p ..= 64 p + w - 1,
//!              w = min(64, what is left of the block): keys are stored transposed
//! V panel q    block_size rows of w columns; a row is a position, columns 64 q ..= 64 q + w - 1
//!              of the value row, w = min(64, what is left of the width)
//! ```
//!
//! Why this shape. With keys transposed a vector register holds sixteen *positions*, so a dot
//! product is one chain of multiply-adds over the width and nothing is ever summed across lanes.
//! A panel of 64 floats a row is as wide as the kernel's widest register tile: each step of the
//! chain reads four neighbouring lines, and the whole tile is read in address order, which is
//! what keeps the hardware prefetcher at work. Against rows laid out token by token this was
//! 2.3 to 3 times faster on cold memory, and within 10 % of the read limit in the best cases;
//! appending a token pays for it with `k_width` scattered stores.
//!
//! Nothing is padded inside a tile: its numbers are `block_size x (k_width + v_width)`, for any
//! width and any block size. Only the tile's end is rounded up to a line, which changes nothing
//! where the block size is a multiple of 16.

use core::marker::PhantomData;

use super::Element;
use crate::cut;
use crate::shape::KvShape;

/// Columns in a full panel: four lines of `f32`.
pub(crate) const PANEL: usize = 64;

/// Bytes in a cache line, to which tiles are aligned.
pub(crate) const LINE: usize = 64;

/// A panel of up to [`PANEL`] columns and how to walk its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panel {
    /// Index of the panel's first number in the tile.
    pub(crate) start: usize,
    /// Columns in a row, which is also the distance between rows.
    pub(crate) width: usize,
}

/// A [`KvShape`] laid out for one element type.
#[derive(Debug)]
pub struct Layout<E> {
    shape: KvShape,
    /// Numbers in one tile, its rounding to a line included.
    tile_len: usize,
    element: PhantomData<E>,
}

impl<E> Clone for Layout<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Layout<E> {}

impl<E: Element> Layout<E> {
    pub(crate) const fn new(shape: KvShape) -> Self {
        let numbers = shape.block_size() * (shape.k_width() + shape.v_width());
        let tile_len = numbers.next_multiple_of(LINE / size_of::<E::Stored>());
        Layout { shape, tile_len, element: PhantomData }
    }

    /// Writes rows `[n][n_kv_heads][k_width]` and `[n][n_kv_heads][v_width]` to the positions
    /// `first ..` of a block.
    ///
    /// The caller has checked lengths: both slices hold the same number of rows and the block
    /// has room for them.
    pub(crate) fn write(&self, block: &mut [E::Stored], first: usize, k: &[f32], v: &[f32]) {
        let (k_width, v_width) = (self.shape.k_width(), self.shape.v_width());
        for (head, tile) in block.chunks_exact_mut(self.tile_len).enumerate() {
            let rows = k.chunks_exact(self.shape.k_row_len());
            for (column, row) in (first..).zip(rows) {
                let panel = self.k_panel(column);
                let cells = tile[panel.start..].iter_mut().skip(column % PANEL);
                let row = &row[head * k_width..][..k_width];
                for (cell, number) in cells.step_by(panel.width).zip(row) {
                    *cell = E::encode(*number);
                }
            }
            let rows = v.chunks_exact(self.shape.v_row_len());
            for (position, row) in (first..).zip(rows) {
                let row = &row[head * v_width..][..v_width];
                for (index, part) in row.chunks(PANEL).enumerate() {
                    let panel = self.v_panel(index);
                    let cells = &mut tile[panel.start + position * panel.width..][..panel.width];
                    for (cell, number) in cells.iter_mut().zip(part) {
                        *cell = E::encode(*number);
                    }
                }
            }
        }
    }

    /// Reads one key row of one head back.
    pub(crate) fn read_k(
        &self,
        block: &[E::Stored],
        head: usize,
        position: usize,
        out: &mut [f32],
    ) {
        let tile = self.tile(block, head);
        let panel = self.k_panel(position);
        let cells = tile[panel.start..].iter().skip(position % PANEL).step_by(panel.width);
        for (number, cell) in out.iter_mut().zip(cells) {
            *number = E::decode(*cell);
        }
    }

    /// Reads one value row of one head back.
    pub(crate) fn read_v(
        &self,
        block: &[E::Stored],
        head: usize,
        position: usize,
        out: &mut [f32],
    ) {
        let tile = self.tile(block, head);
        for (index, part) in out.chunks_mut(PANEL).enumerate() {
            let panel = self.v_panel(index);
            let cells = &tile[panel.start + position * panel.width..][..panel.width];
            for (number, cell) in part.iter_mut().zip(cells) {
                *number = E::decode(*cell);
            }
        }
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Numbers in one block.
    pub(crate) const fn block_len(&self) -> usize {
        self.tile_len * self.shape.n_kv_heads()
    }

    /// The tile of one KV head.
    #[inline(always)]
    pub(crate) fn tile<'a>(&self, block: &'a [E::Stored], head: usize) -> &'a [E::Stored] {
        cut::part(block, head * self.tile_len, self.tile_len)
    }

    /// The K panel that the position `column` of a block stands in; its column there is
    /// `column % PANEL`.
    #[inline(always)]
    pub(crate) fn k_panel(&self, column: usize) -> Panel {
        let first = column - column % PANEL;
        Panel {
            start: first * self.shape.k_width(),
            width: (self.shape.block_size() - first).min(PANEL),
        }
    }

    /// The V panel of columns `64 index ..`.
    #[inline(always)]
    pub(crate) fn v_panel(&self, index: usize) -> Panel {
        let rows = self.shape.block_size();
        Panel {
            start: rows * (self.shape.k_width() + index * PANEL),
            width: (self.shape.v_width() - index * PANEL).min(PANEL),
        }
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
            let mut block = vec![f32::NAN; layout.block_len()];
            let half = block_size / 2;
            let (k_half, v_half) = (half * n_kv_heads * k_width, half * n_kv_heads * v_width);
            layout.write(&mut block, 0, &k[..k_half], &v[..v_half]);
            layout.write(&mut block, half, &k[k_half..], &v[v_half..]);
            let written = block.iter().filter(|cell| !cell.is_nan()).count();
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
        assert_eq!(layout.tile_len, 80 * 256);
        assert_eq!(layout.k_panel(63), Panel { start: 0, width: 64 });
        assert_eq!(layout.k_panel(64), Panel { start: 64 * 128, width: 16 });
        assert_eq!(layout.v_panel(0), Panel { start: 80 * 128, width: 64 });
        assert_eq!(layout.v_panel(1), Panel { start: 80 * 128 + 80 * 64, width: 64 });
    }
}
