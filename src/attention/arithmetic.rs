//! How a stored type is multiplied at a level, and one step of the walk done that way.

use core::marker::PhantomData;
use core::ops::Range;

use super::scratch::Regions;
use crate::cut;
use crate::element::{Element, Format};
use crate::kernel::dot::{QUADS_TAIL, QUADS_WIDTH, pack_pairs};
use crate::kernel::scores::{KeyStep, Queries};
use crate::kernel::softmax::Rule;
use crate::kernel::step::{Side, Step};
use crate::kernel::values::{Apart, Extent, ValueStep, Values};
use crate::kernel::{Piece, TILE};
use crate::shape::KvShape;
use crate::simd::{Kernel, LANES, Level, Simd};

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

/// A [`Step`], and the values of rows that do not see the same positions.
pub(super) fn work<K: KeyStep, V: ValueStep>(
    level: Level,
    regions: &mut Regions<'_>,
    v_width: usize,
    seen: Seen<'_>,
    q: Queries<'_, K::Factor>,
    keys: Side<'_, '_>,
    values: Side<'_, '_>,
) {
    let Seen { first, rows, extent, extents, rules } = seen;
    let stride = regions.stride;
    let mut shrink = [0.0; LANES];
    // Positions that share a factor stay together.
    let common = extents.map_or(extent, |extents| in_common(extents, V::NUMBERS / V::FACTORS));
    let beginnings = extents.is_some_and(|rows| rows.iter().any(|row| row.from < common.from));
    let mut step = Step::<K, V> {
        q,
        keys,
        values,
        v_width,
        extent,
        extents,
        common: if beginnings { Extent::EMPTY } else { common },
        rules,
        scores: regions.scores,
        factors: regions.factors,
        heads: cut::part_mut(regions.heads, first, rows),
        outs: cut::part_mut(regions.outs, first * stride, rows * stride),
        stride,
        shrink: &mut shrink,
        arithmetic: PhantomData,
    };
    K::run(level, &mut step);
    if let Some(extents) = extents {
        if !beginnings && !common.is_empty() {
            shrink.fill(1.0);
        }
        let ragged = Ragged { first, extents, common, beginnings, v_width };
        ragged.add::<V>(level, regions, &values, &mut shrink);
    }
}

/// The positions that all rows see, cut to whole cells of so many.
fn in_common(extents: &[Extent], together: usize) -> Extent {
    let from = extents.iter().map(|extent| extent.from).max().unwrap_or(0);
    let to = extents.iter().map(|extent| extent.to).min().unwrap_or(0);
    let from = from.next_multiple_of(together);
    Extent { from, to: (to - to % together).max(from) }
}

/// Rows that end at different positions: the edge of causality or of a window.
///
/// Only the positions that all of them see are done together. A row never multiplies a value it
/// does not see, not even by zero: 0 x inf and 0 x NaN are not 0. Rows with one extent stay
/// together.
struct Ragged<'r> {
    first: usize,
    extents: &'r [Extent],
    common: Extent,
    /// Whether some row begins before the common positions, which then are still to be done.
    beginnings: bool,
    v_width: usize,
}

impl Ragged<'_> {
    /// First each row's own beginning, then the common middle, then each row's own end.
    fn add<V: ValueStep>(
        &self,
        level: Level,
        regions: &mut Regions<'_>,
        side: &Side<'_, '_>,
        shrink: &mut [f32; LANES],
    ) {
        let Ragged { extents, common, .. } = *self;
        let parts = [Part::Beginning, Part::Middle, Part::End];
        for part in cut::from(&parts, if self.beginnings { 0 } else { 2 }) {
            let mut line = 0;
            while line < extents.len() {
                let own = *cut::one(extents, line);
                let same = cut::from(extents, line).iter().take_while(|extent| **extent == own);
                let (lines, extent) = match part {
                    Part::Beginning => {
                        (same.count(), Extent { from: own.from, to: own.to.min(common.from) })
                    }
                    Part::Middle => (extents.len(), common),
                    Part::End => {
                        (same.count(), Extent { from: own.from.max(common.to), to: own.to })
                    }
                };
                if !extent.is_empty() {
                    self.some::<V>(level, regions, side, shrink, extent, line..line + lines);
                }
                line += lines;
            }
        }
    }

    /// Adds the values in an extent to some rows, at most four at once.
    fn some<V: ValueStep>(
        &self,
        level: Level,
        regions: &mut Regions<'_>,
        side: &Side<'_, '_>,
        shrink: &mut [f32; LANES],
        extent: Extent,
        rows: Range<usize>,
    ) {
        let stride = regions.stride;
        let most = level.rows().min(4);
        let mut line = rows.start;
        while line < rows.end {
            let lines = most.min(rows.end - line);
            let first = self.first + line;
            let shrink = cut::part_mut(shrink, line, lines);
            let values = Values {
                weights: cut::part(regions.scores, line, lines),
                factors: regions.factors,
                scales: side.scales,
                shrink,
                extent,
                tiles: &side.tiles,
                panels: side.panels,
                v_width: self.v_width,
                outs: cut::part_mut(regions.outs, first * stride, lines * stride),
                stride,
            };
            V::run(level, Apart(values, PhantomData::<V>));
            // What has shrunk once must not shrink again.
            shrink.fill(1.0);
            line += lines;
        }
    }
}

/// [`pack_pairs`], with the level's instructions.
pub(super) struct PackPairs<'p> {
    pub(super) row: &'p [f32],
    pub(super) packed: &'p mut [u32],
}

impl Kernel for PackPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        if S::DOT_BF16 {
            pack_pairs(s, self.row, self.packed);
        }
    }
}

/// Which of a row's positions: its own ones before those that all rows of its batch see, those, or
/// its own ones behind them.
#[derive(Clone, Copy)]
enum Part {
    Beginning,
    Middle,
    End,
}
