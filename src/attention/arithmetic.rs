//! How a stored type is multiplied at a level, and one step of the walk done that way.

use core::marker::PhantomData;

use super::scratch::Regions;
use crate::cut;
use crate::element::{Element, Format};
use crate::kernel::dot::{QUADS_TAIL, QUADS_WIDTH};
use crate::kernel::scores::{KeyStep, Queries};
use crate::kernel::softmax::Rule;
use crate::kernel::step::{Side, Step};
use crate::kernel::values::{Extent, ValueStep};
use crate::kernel::{Aligned, Piece, TILE};
use crate::shape::KvShape;
use crate::simd::{LANES, Level, MOST_ROWS};

/// Which rows a step works on, and what they see of its tile.
#[derive(Clone, Copy)]
pub(super) struct Seen<'s> {
    /// The first row among all rows of the item.
    pub(super) first: usize,
    pub(super) rows: usize,
    /// What any of them sees.
    pub(super) extent: Extent,
    /// What each of them sees, where they differ.
    pub(super) extents: Option<&'s [Extent]>,
    /// Which positions each of them sees, where those are not all in its extent.
    pub(super) masks: Option<&'s [u64]>,
    pub(super) rules: &'s [Rule],
}

/// How numbers are multiplied, and whether a tile is unpacked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arithmetic {
    /// As `f32`.
    Plain { unpacked: bool },
    /// In pairs of bf16, keys and values.
    Pairs { unpacked: bool },
    /// In fours of bytes, keys; values as `f32`.
    Quads { unpacked: bool },
}

impl Arithmetic {
    /// By the level, the stored type and the shape; whether a tile is unpacked, which changes no
    /// bit, by the rows that share the work.
    pub(super) fn choose<E: Element>(level: Level, rows_per_head: usize, shape: KvShape) -> Self {
        // Cells of two positions must not be torn apart by the end of a block.
        let even = shape.block_size().is_multiple_of(2);
        if level.has_i8() && E::QUADS && shape.k_width() <= QUADS_WIDTH {
            Arithmetic::Quads { unpacked: rows_per_head > UNPACK_ROWS }
        } else if level.has_bf16() && E::PAIRS && even {
            Arithmetic::Pairs { unpacked: false }
        } else if level.has_bf16() && E::WHOLE && even {
            Arithmetic::Pairs { unpacked: true }
        } else {
            let in_place = E::K::ROWS >= level.rows() || rows_per_head <= UNPACK_ROWS;
            Arithmetic::Plain { unpacked: !in_place }
        }
    }

    /// Rows of the largest register tile.
    #[inline(always)]
    pub(super) fn rows_at_once<E: Element>(self, level: Level) -> usize {
        match self {
            Arithmetic::Plain { unpacked: false } => level.rows().min(E::K::ROWS),
            Arithmetic::Quads { unpacked: false } => level.rows().min(E::V::ROWS),
            _ => level.rows(),
        }
    }

    /// Words in a packed query row.
    pub(super) fn packed_width(self, k_width: usize) -> usize {
        match self {
            Arithmetic::Plain { .. } => 0,
            Arithmetic::Pairs { .. } => k_width.div_ceil(2),
            Arithmetic::Quads { .. } => k_width.div_ceil(4) + QUADS_TAIL,
        }
    }

    /// Words of a head's tile of keys, and of values, where it is unpacked.
    pub(super) fn unpacked(self, k_width: usize, v_width: usize) -> (usize, usize) {
        // Whole vectors are read to the end.
        match self {
            Arithmetic::Plain { unpacked: true } => (TILE * k_width, TILE * v_width + LANES),
            Arithmetic::Pairs { unpacked: true } => {
                (TILE * k_width.div_ceil(2), TILE / 2 * v_width + LANES)
            }
            Arithmetic::Quads { unpacked: true } => (0, TILE * v_width + LANES),
            _ => (0, 0),
        }
    }
}

/// Up to this many rows of a KV head, narrow cells are widened on their way into the registers.
const UNPACK_ROWS: usize = 8;

/// An unpacked tile, as if it were a block.
pub(super) fn unpacked_piece(words: &[u32]) -> [Piece<'_>; 1] {
    match bytemuck::try_cast_slice(words) {
        Ok(words) => [Piece { words, row: 0, at: 0, len: TILE }],
        // Regions start on a line and have an even length.
        Err(_) => cut::out_of_bounds(),
    }
}

/// One [`Step`].
pub(super) fn work<K: KeyStep, V: ValueStep>(
    level: Level,
    regions: &mut Regions<'_>,
    v_width: usize,
    seen: &Seen<'_>,
    q: &Queries<'_, K::Factor>,
    keys: &Side<'_, '_>,
    values: &Side<'_, '_>,
) {
    let Seen { first, rows, extent, extents, masks, rules } = *seen;
    let stride = regions.stride;
    let mut step = Step::<K, V> {
        q,
        keys,
        values,
        v_width,
        extent,
        extents,
        masks,
        rules,
        scores: regions.scores,
        factors: regions.factors,
        rows,
        heads: cut::part_mut(regions.heads, first, MOST_ROWS),
        outs: cut::part_mut(regions.outs, first * stride, rows * stride),
        stride,
        shrink: &mut Aligned::zeros().0,
        arithmetic: PhantomData,
    };
    K::run(level, &mut step);
}
