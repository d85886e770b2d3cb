//! One item at work: the walk from positions to page tiles.

use core::marker::PhantomData;
use core::ops::Range;

use bytemuck::must_cast_slice_mut;

use super::options::Resolved;
use super::output::Output;
use super::task::{Item, Member, Task};
use crate::cut;
use crate::element::float::Single;
use crate::element::tile::{LINE, Layout, PANEL, Panels, groups};
use crate::element::{Element, Format, Widen};
use crate::kernel::dot::{Bf16Pairs, I8Quads, QUADS_TAIL, pack_pairs, pack_quads};
use crate::kernel::scores::{KeyStep, Queries};
use crate::kernel::softmax::Rule;
use crate::kernel::state::{Head, finish, log_sum_exp, merge};
use crate::kernel::step::{Side, Step};
use crate::kernel::unpack::{ToF32, ToPairs, UnpackKeys, UnpackValues, gather_scales};
use crate::kernel::values::{Apart, Extent, Scales, ValueStep, Values};
use crate::kernel::{Piece, SPLIT, ScoreRow, TILE, Tiles, USUAL_PIECES, WIDTH};
use crate::shape::GqaShape;
use crate::simd::{Kernel, LANES, Level, MOST_ROWS, Simd};
use crate::storage::view::KvView;

/// An item of a call, and the memory that it works in.
#[derive(Debug)]
pub struct Job<'j, 'a, E: Element> {
    pub(crate) task: &'j Task<'a, E>,
    pub(crate) item: &'j Item,
    pub(crate) scratch: &'j mut [f32],
}

impl<E: Element> Job<'_, '_, E> {
    /// What [`Element::attend`] does. The walk itself is compiled once for each type, for any
    /// processor; only its steps are compiled for each level.
    #[inline(always)]
    pub(crate) fn run(&mut self) {
        let Job { task, item, scratch } = self;
        let layout = task.member(item.sequences.start).view.layout();
        let rows_per_head = item.rows_per_head(&task.shape);
        let level = task.options.level;
        let arithmetic = Arithmetic::choose::<E>(level, rows_per_head, layout.shape().block_size());
        let (regions, inputs) = Regions::new::<E>(scratch, &task.shape, item, arithmetic);
        AtWork { task, item, layout, level, rows_per_head, arithmetic, regions, inputs }.run();
    }
}

/// The states that an item leaves, at the beginning of its scratch.
pub(crate) struct States<'a> {
    /// Maximum and denominator of each row, KV head by KV head.
    pub(crate) heads: &'a [[f32; 2]],
    /// Output rows, `stride` apart.
    pub(crate) outs: &'a [f32],
    pub(crate) stride: usize,
}

/// Numbers to leave out so that a region starts on a line.
fn to_line(scratch: &[f32]) -> usize {
    scratch.as_ptr().align_offset(LINE).min(LANES)
}

impl<'a> States<'a> {
    /// What an item of so many rows, over all its heads, has left in its scratch.
    pub(crate) fn of(scratch: &'a [f32], rows: usize, v_width: usize) -> Self {
        let stride = v_width.next_multiple_of(LANES);
        let scratch = cut::from(scratch, to_line(scratch));
        let outs = cut::part(scratch, 0, rows * stride);
        let heads = cut::part(scratch, rows * stride, rows * 2).as_chunks().0;
        States { heads, outs, stride }
    }

    pub(crate) fn head(&self, row: usize) -> Head {
        let [max, denom] = *cut::one(self.heads, row);
        Head { max, denom }
    }

    pub(crate) fn out(&self, row: usize) -> &'a [f32] {
        cut::part(self.outs, row * self.stride, self.stride)
    }
}

/// What an item's steps read and do not change, cut from its scratch.
struct Inputs<'a> {
    /// Scaled query rows.
    q: &'a mut [f32],
    /// The same, rounded and packed for a dot product; empty where there is none.
    packed: &'a mut [u32],
    /// The scales of a head's tile: a row for each group of the key's width, then of the value's.
    scales: &'a mut [ScoreRow],
    /// A head's tile, unpacked.
    keys: &'a mut [u32],
    values: &'a mut [u32],
}

/// What an item's steps change, cut from its scratch.
struct Regions<'a> {
    stride: usize,
    /// The states that tiles are added to: of the split at hand, or the totals where there is one
    /// split.
    heads: &'a mut [[f32; 2]],
    outs: &'a mut [f32],
    /// The totals over all splits, where there are more; empty where there is one.
    total_heads: &'a mut [[f32; 2]],
    total_outs: &'a mut [f32],
    scores: &'a mut [ScoreRow],
    /// What becomes of weights before they meet values.
    factors: &'a mut [ScoreRow],
}

impl<'a> Regions<'a> {
    /// Cuts, and clears what has to be: nothing that the scratch held before shows in a result.
    fn new<E: Element>(
        scratch: &'a mut [f32],
        shape: &GqaShape,
        item: &Item,
        arithmetic: Arithmetic,
    ) -> (Self, Inputs<'a>) {
        let rows = item.heads.len() * item.rows_per_head(shape);
        let (k_width, v_width) = (shape.kv().k_width(), shape.kv().v_width());
        let stride = v_width.next_multiple_of(LANES);
        let (mut outs, mut heads, mut rest) = states(scratch, rows, stride);
        let (mut total_outs, mut total_heads) = (Default::default(), Default::default());
        if item.merges() {
            (total_outs, total_heads) = (outs, heads);
            (outs, heads, rest) = states(rest, rows, stride);
        }
        let (scores, rest) = region(rest, MOST_ROWS * WIDTH);
        let (factors, rest) = region(rest, MOST_ROWS * WIDTH);
        let (scores, factors) = (scores.as_chunks_mut().0, factors.as_chunks_mut().0);
        let (q, rest) = region(rest, rows * k_width);
        let (packed, rest) = region(rest, rows * arithmetic.packed_width(k_width));
        let groups = groups::<E>(k_width) + groups::<E>(v_width);
        let (scales, rest) = region(rest, groups * WIDTH);
        let (keys, values) = arithmetic.unpacked(k_width, v_width);
        let (keys, rest) = region(rest, keys);
        let (values, _) = region(rest, values);
        let mut regions = Regions { stride, heads, outs, total_heads, total_outs, scores, factors };
        regions.total_heads.fill(EMPTY);
        regions.open_split();
        let inputs = Inputs {
            q,
            packed: must_cast_slice_mut(packed),
            scales: scales.as_chunks_mut().0,
            keys: must_cast_slice_mut(keys),
            values: must_cast_slice_mut(values),
        };
        (regions, inputs)
    }

    /// Empties the split at hand. Its outputs are multiplied before anything is added, and zero
    /// times what a scratch may hold is not zero; those of the totals are copied over first, and
    /// scores are written, or masked, before they count.
    fn open_split(&mut self) {
        self.heads.fill(EMPTY);
        self.outs.fill(0.0);
    }
}

const EMPTY: [f32; 2] = [Head::EMPTY.max, Head::EMPTY.denom];

/// Cuts off `len` numbers that start on a line.
fn region(scratch: &mut [f32], len: usize) -> (&mut [f32], &mut [f32]) {
    let line = to_line(scratch);
    let (_, rest) = cut::split(scratch, line);
    cut::split(rest, len)
}

/// Cuts off the output rows and the heads of so many states.
fn states(
    scratch: &mut [f32],
    rows: usize,
    stride: usize,
) -> (&mut [f32], &mut [[f32; 2]], &mut [f32]) {
    let (outs, rest) = region(scratch, rows * stride);
    let (heads, rest) = cut::split(rest, rows * 2);
    (outs, heads.as_chunks_mut().0, rest)
}

/// A softmax tile over some rows of an item.
#[derive(Clone, Copy)]
struct Tile<'t, 'a> {
    /// Its first position.
    start: usize,
    pieces: &'t [Piece<'a>],
    /// The pieces of the next tile.
    next: &'t [Piece<'a>],
    /// Rows of each KV head, counted in the item.
    first_row: usize,
    rows: usize,
    /// What all of the rows see, where it is the same; for the others each row is asked.
    extent: Option<Extent>,
}

/// Rows of several sequences that are worked on at once over the same pages, where each sequence has
/// more than two of its own.
///
/// Eight at once read a tile twice as wide as four do half as often, which is slower while pages come
/// from further away than the second-level cache: 8 sequences of 4 rows over 2048 joint positions
/// took 1.1 times as long as each alone, and take 0.85 of that with four. Sequences of one or two
/// rows gain more from a high tile: they have no other way to fill one.
const JOINT_ROWS: usize = 4;

/// Rows of a tile that are worked on at once: at most as many as the level's register tile is high.
///
/// Rows of one KV head, although more of them at once would keep the processor busy during the
/// long chain of the softmax: with the keys of two heads before the values of the first, cold pages
/// were read at 73 % of the memory's speed instead of 97 % (16 heads of 64, one row each).
#[derive(Clone, Copy)]
struct Batch {
    /// The KV head, counted in the item.
    head: usize,
    /// The first row, counted in the item's rows of that head.
    row: usize,
    rows: usize,
}

/// One item at work.
struct AtWork<'i, 'a, E: Element> {
    task: &'i Task<'a, E>,
    item: &'i Item,
    layout: &'a Layout<E>,
    level: Level,
    rows_per_head: usize,
    arithmetic: Arithmetic,
    regions: Regions<'i>,
    inputs: Inputs<'i>,
}

impl<'i, 'a, E: Element> AtWork<'i, 'a, E> {
    #[inline(always)]
    fn run(&mut self) {
        // Room for the pieces of two tiles: clearing more than is needed would be felt in the
        // smallest calls.
        if self.layout.shape().block_size() >= LANES {
            let mut room = [Piece::NONE; 2 * USUAL_PIECES];
            self.walk(&mut room);
        } else {
            let mut room = [Piece::NONE; 2 * TILE];
            self.walk(&mut room);
        }
    }

    /// Goes over the tiles; `room` is for the pieces of two of them.
    fn walk(&mut self, room: &mut [Piece<'a>]) {
        self.load_queries();
        self.pack_queries();
        let (any, all) = self.seen_by_rows();
        let (first, count) = (self.item.sequences.start, self.item.sequences.len());
        let (mut start, mut sequence) = (any.from / TILE * TILE, first);
        let (mut here, mut there) = cut::split(room, room.len() / 2);
        let mut found = find_pieces(&self.task.member(first).view, start, any.to, there);
        while start < any.to {
            core::mem::swap(&mut here, &mut there);
            let pieces = cut::part(here, 0, found);
            let joint = count == 1 || start + TILE <= self.item.joint;
            let whole = joint && start >= all.from && start + TILE <= all.to;
            let extent = if whole {
                Some(Extent { from: 0, to: TILE })
            } else if self.item.rows.len() == 1 && (count == 1 || !joint) {
                let seen = self.seen(&self.task.member(sequence), self.item.rows.start);
                let to = seen.to.min(self.item.positions.end);
                Some(Extent { to, ..seen }.in_tile(start))
            } else {
                None
            };
            // What the sequences do not share is done for one after the other.
            let rows = if joint { self.rows_per_head } else { self.rows_per_head / count };
            let last = joint || sequence + 1 == first + count;
            let next_start = if last { start + TILE } else { start };
            let next_sequence = if last { first } else { sequence + 1 };
            found = find_pieces(&self.task.member(next_sequence).view, next_start, any.to, there);
            let (next, first_row) = (cut::part(there, 0, found), (sequence - first) * rows);
            self.tile(Tile { start, pieces, next, first_row, rows, extent });
            (start, sequence) = (next_start, next_sequence);
            let merges = last && !self.regions.total_heads.is_empty();
            if merges && (start.is_multiple_of(SPLIT) || start >= any.to) {
                self.close_split();
                self.regions.open_split();
            }
        }
    }

    /// The positions that any row of the item sees, and those that all of them see.
    fn seen_by_rows(&self) -> (Extent, Extent) {
        let mut any = Extent { from: usize::MAX, to: 0 };
        let mut all = Extent { from: 0, to: usize::MAX };
        for sequence in self.item.sequences.clone() {
            let member = self.task.member(sequence);
            let first = self.seen(&member, self.item.rows.start);
            let last = self.seen(&member, self.item.rows.end - 1);
            any = Extent { from: any.from.min(first.from), to: any.to.max(last.to) };
            all = Extent { from: all.from.max(last.from), to: all.to.min(first.to) };
        }
        let Item { positions, .. } = self.item;
        let clip = |seen: Extent| Extent {
            from: seen.from.max(positions.start),
            to: seen.to.min(positions.end),
        };
        (clip(any), clip(all))
    }

    /// The positions that a query row sees, before the item's tiles are laid over them.
    #[inline(always)]
    fn seen(&self, member: &Member<'a, E>, query: usize) -> Extent {
        let options = &self.task.options;
        let len = member.view.len();
        let position = member.base() + query.cast_signed();
        let end = if options.causal { (position + 1).max(0).cast_unsigned() } else { len };
        let from = (position + 1).max(0).cast_unsigned().saturating_sub(options.window);
        let (first, last) = options.positions;
        Extent { from: from.max(first), to: end.min(last).min(len) }
    }

    /// The sequence and the query row in it that a row of a KV head stands for.
    #[inline(always)]
    fn query(&self, row: usize) -> (Member<'a, E>, usize) {
        let query = row / self.task.shape.group();
        let per_sequence = self.item.rows.len();
        let (sequence, query) = if self.item.sequences.len() == 1 {
            (0, query)
        } else {
            (query / per_sequence, query % per_sequence)
        };
        (self.task.member(self.item.sequences.start + sequence), self.item.rows.start + query)
    }

    /// Copies the item's query rows, scaled, head by head.
    fn load_queries(&mut self) {
        let shape = &self.task.shape;
        let (width, group) = (shape.kv().k_width(), shape.group());
        let mut places = self.inputs.q.chunks_exact_mut(width);
        for head in self.item.heads.clone() {
            for sequence in self.item.sequences.clone() {
                let first = self.task.member(sequence).first;
                for query in self.item.rows.clone() {
                    let place = (first + query) * shape.n_heads() + head * group;
                    let from = cut::part(self.task.q, place * width, group * width);
                    for from in from.chunks_exact(width) {
                        let Some(to) = places.next() else { cut::out_of_bounds() };
                        for (scaled, number) in to.iter_mut().zip(from) {
                            *scaled = *number * self.task.options.query_scale;
                        }
                    }
                }
            }
        }
    }

    /// Rounds the query rows for the dot product at hand.
    fn pack_queries(&mut self) {
        let width = self.task.shape.kv().k_width();
        let packed_width = self.arithmetic.packed_width(width);
        if packed_width == 0 {
            return;
        }
        let rows = self.inputs.q.chunks_exact(width);
        for (row, packed) in rows.zip(self.inputs.packed.chunks_exact_mut(packed_width)) {
            match self.arithmetic {
                Arithmetic::Quads { .. } => pack_quads(row, packed),
                _ => self.level.run_bf16(PackPairs { row, packed }),
            }
        }
    }

    /// One softmax tile: all heads of the item, some rows of each.
    fn tile(&mut self, tile: Tile<'_, 'a>) {
        let mut most = self.arithmetic.rows_at_once::<E>(self.level);
        if self.item.sequences.len() > 1 && self.rows_per_head > 2 * self.item.sequences.len() {
            most = most.min(JOINT_ROWS);
        }
        // As even as can be: nine rows are five and four, not eight and one.
        let rows = tile.rows.div_ceil(tile.rows.div_ceil(most));
        for head in 0..self.item.heads.len() {
            let tiles = self.tiles(&tile, head);
            self.gather_scales(&tiles);
            self.unpack(&tiles);
            let mut row = tile.first_row;
            while row < tile.first_row + tile.rows {
                let rows = rows.min(tile.first_row + tile.rows - row);
                // Only the first rows ask for what is next; the others find it on its way.
                let next = if row == tile.first_row { tiles.next } else { &[] };
                self.step(&tile, Batch { head, row, rows }, Tiles { next, ..tiles });
                row += rows;
            }
        }
    }

    /// Where a head's tiles are, and what is needed next: the next head's, or the first head's in
    /// the next blocks.
    #[inline(always)]
    fn tiles<'t>(&self, tile: &Tile<'t, 'a>, head: usize) -> Tiles<'t, 'a> {
        let words = self.layout.tile_words();
        let head = self.item.heads.start + head;
        let (next_head, next) = if head + 1 < self.item.heads.end {
            (head + 1, tile.pieces)
        } else {
            (self.item.heads.start, tile.next)
        };
        Tiles { pieces: tile.pieces, head: head * words, next_head: next_head * words, next }
    }

    /// Copies the scales of a head's tile to the places of its positions.
    #[inline(always)]
    fn gather_scales(&mut self, tiles: &Tiles<'_, 'a>) {
        if E::META_GROUP == 0 {
            return;
        }
        let keys = groups::<E>(self.task.shape.kv().k_width());
        for (index, row) in self.inputs.scales.iter_mut().enumerate() {
            let start = match index.checked_sub(keys) {
                None => self.layout.key_scales(index),
                Some(index) => self.layout.value_scales(index),
            };
            gather_scales(tiles, start, row);
        }
    }

    /// Unpacks a head's tile, where that is how it is read.
    fn unpack(&mut self, tiles: &Tiles<'_, 'a>) {
        let kv = self.task.shape.kv();
        let (level, layout, inputs) = (self.level, self.layout, &mut self.inputs);
        let (keys, k_width) = (layout.keys(), kv.k_width());
        let (values, v_width) = (layout.values(), kv.v_width());
        match self.arithmetic {
            Arithmetic::Plain { unpacked: true } => {
                let how = PhantomData::<(E::K, ToF32)>;
                let to = &mut *inputs.keys;
                level.run(UnpackKeys { tiles, panels: keys, width: k_width, to, how });
                let how = PhantomData::<(E::V, ToF32)>;
                let to = &mut *inputs.values;
                level.run(UnpackValues { tiles, panels: values, width: v_width, to, how });
            }
            Arithmetic::Pairs { unpacked: true } if E::WHOLE => {
                let how = PhantomData::<(E::K, ToPairs)>;
                let to = &mut *inputs.keys;
                level.run_bf16(UnpackKeys { tiles, panels: keys, width: k_width, to, how });
                let how = PhantomData::<(E::V, ToPairs)>;
                let to = &mut *inputs.values;
                level.run_bf16(UnpackValues { tiles, panels: values, width: v_width, to, how });
            }
            Arithmetic::Quads { unpacked: true } if E::QUADS => {
                let how = PhantomData::<(E::V, ToF32)>;
                let to = &mut *inputs.values;
                level.run(UnpackValues { tiles, panels: values, width: v_width, to, how });
            }
            _ => {}
        }
    }

    /// Some rows over one softmax tile: scores, softmax, values.
    #[inline(always)]
    fn step(&mut self, tile: &Tile<'_, 'a>, batch: Batch, tiles: Tiles<'_, 'a>) {
        let mut extents = [Extent::EMPTY; MOST_ROWS];
        let extent = match tile.extent {
            Some(extent) => extent,
            None => self.extents(tile, batch, &mut extents),
        };
        if extent.is_empty() {
            return;
        }
        let extents = match tile.extent {
            Some(_) => None,
            None => Some(cut::part(&extents, 0, batch.rows)),
        };
        let mut rules = [Rule::NONE; MOST_ROWS];
        let options = &self.task.options;
        let rules = if options.cap.is_some() || options.slopes.is_some() {
            for (line, rule) in rules.iter_mut().enumerate().take(batch.rows) {
                *rule = self.rule(batch.head, batch.row + line, tile.start);
            }
            cut::part(&rules, 0, batch.rows)
        } else {
            &[]
        };
        let first = batch.head * self.rows_per_head + batch.row;
        let seen = Seen { first, rows: batch.rows, extent, extents, rules };
        let kv = self.task.shape.kv();
        let inputs = &self.inputs;
        let (key_scales, value_scales) =
            inputs.scales.split_at(groups::<E>(kv.k_width()).min(inputs.scales.len()));
        let group = E::META_GROUP;
        let keys =
            Side { tiles, panels: self.layout.keys(), scales: Scales { rows: key_scales, group } };
        let values = Side {
            tiles,
            panels: self.layout.values(),
            scales: Scales { rows: value_scales, group },
        };
        let (k_width, rows) = (kv.k_width(), batch.rows);
        let q = Queries {
            rows: cut::part(inputs.q, first * k_width, rows * k_width),
            width: k_width,
            first: 0,
            first_row: 0,
            numbers: k_width,
        };
        let (one_key, one_value);
        let regions = &mut self.regions;
        let (level, v_width) = (self.level, kv.v_width());
        match self.arithmetic {
            Arithmetic::Plain { unpacked: false } => {
                work::<Widen<E::K>, Widen<E::V>>(level, regions, v_width, seen, q, keys, values);
            }
            Arithmetic::Plain { unpacked: true } => {
                one_key = unpacked_piece(inputs.keys);
                one_value = unpacked_piece(inputs.values);
                let keys = keys.unpacked(&one_key, Panels::new(k_width, TILE));
                let values = values.unpacked(&one_value, Panels::new(TILE, v_width));
                work::<Widen<Single>, Widen<Single>>(
                    level, regions, v_width, seen, q, keys, values,
                );
            }
            Arithmetic::Pairs { unpacked } if E::PAIRS || E::WHOLE => {
                let width = k_width.div_ceil(2);
                let q = Queries {
                    rows: cut::part(inputs.packed, first * width, rows * width),
                    width,
                    first: 0,
                    first_row: 0,
                    numbers: 2 * width,
                };
                if !unpacked {
                    work::<Bf16Pairs, Bf16Pairs>(level, regions, v_width, seen, q, keys, values);
                    return;
                }
                one_key = unpacked_piece(inputs.keys);
                one_value = unpacked_piece(inputs.values);
                let keys = keys.unpacked(&one_key, Panels::new(width, TILE));
                let values = values.unpacked(&one_value, Panels::new(TILE / 2, v_width));
                work::<Bf16Pairs, Bf16Pairs>(level, regions, v_width, seen, q, keys, values);
            }
            Arithmetic::Quads { unpacked } if E::QUADS => {
                let width = k_width.div_ceil(4) + QUADS_TAIL;
                let q = Queries {
                    rows: cut::part(inputs.packed, first * width, rows * width),
                    width,
                    first: 0,
                    first_row: 0,
                    numbers: k_width.next_multiple_of(4),
                };
                if !unpacked {
                    work::<I8Quads, Widen<E::V>>(level, regions, v_width, seen, q, keys, values);
                    return;
                }
                one_value = unpacked_piece(inputs.values);
                let values = values.unpacked(&one_value, Panels::new(TILE, v_width));
                work::<I8Quads, Widen<Single>>(level, regions, v_width, seen, q, keys, values);
            }
            _ => cut::out_of_bounds(),
        }
    }

    /// Writes what each row of a head sees in the tile, and returns what any of them sees.
    fn extents(
        &self,
        tile: &Tile<'_, 'a>,
        batch: Batch,
        extents: &mut [Extent; MOST_ROWS],
    ) -> Extent {
        let mut any = Extent { from: TILE, to: 0 };
        let group = self.task.shape.group();
        let mut known = usize::MAX;
        let mut extent = Extent::EMPTY;
        for line in 0..batch.rows {
            let row = batch.row + line;
            if row / group != known {
                known = row / group;
                let (member, query) = self.query(row);
                let seen = self.seen(&member, query);
                let to = seen.to.min(self.item.positions.end);
                extent = Extent { to, ..seen }.in_tile(tile.start);
            }
            *cut::one_mut(extents, line) = extent;
            if !extent.is_empty() {
                any = Extent { from: any.from.min(extent.from), to: any.to.max(extent.to) };
            }
        }
        any
    }

    fn rule(&self, head: usize, row: usize, start: usize) -> Rule {
        let (member, query) = self.query(row);
        let position = member.base() + query.cast_signed();
        let group = self.task.shape.group();
        let query_head = (self.item.heads.start + head) * group + row % group;
        let slope = |slopes: &[f32]| cut::one(slopes, query_head) * core::f32::consts::LOG2_E;
        Rule {
            cap: self.task.options.cap,
            slope: self.task.options.slopes.map(slope),
            distance: (position - start.cast_signed()) as f32,
        }
    }

    /// Merges the split at hand into the totals.
    fn close_split(&mut self) {
        let Regions { stride, heads, outs, total_heads, total_outs, .. } = &mut self.regions;
        self.level.run(CloseSplit { stride: *stride, heads, outs, total_heads, total_outs });
    }
}

/// Merges the states of a split into the totals.
struct CloseSplit<'c> {
    stride: usize,
    heads: &'c [[f32; 2]],
    outs: &'c [f32],
    total_heads: &'c mut [[f32; 2]],
    total_outs: &'c mut [f32],
}

impl Kernel for CloseSplit<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let totals = self.total_heads.iter_mut().zip(self.total_outs.chunks_exact_mut(self.stride));
        let parts = self.heads.iter().zip(self.outs.chunks_exact(self.stride));
        for ((total, total_out), (part, part_out)) in totals.zip(parts) {
            let mut head = Head { max: total[0], denom: total[1] };
            let part = Head { max: part[0], denom: part[1] };
            merge(s, &mut head, total_out, part, part_out);
            *total = [head.max, head.denom];
        }
    }
}

/// Which rows a step works on, and what they see of its tile.
#[derive(Clone, Copy)]
struct Seen<'s> {
    /// The first row among all rows of the item.
    first: usize,
    rows: usize,
    /// What any of them sees.
    extent: Extent,
    /// What each of them sees, where they differ.
    extents: Option<&'s [Extent]>,
    rules: &'s [Rule],
}

/// How numbers are multiplied, and whether a tile is unpacked before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
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
    fn choose<E: Element>(level: Level, rows_per_head: usize, block_size: usize) -> Self {
        // Cells of two positions must not be torn apart by the end of a block.
        let even = block_size.is_multiple_of(2);
        if level.has_i8() && E::QUADS {
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
    fn rows_at_once<E: Element>(self, level: Level) -> usize {
        match self {
            Arithmetic::Plain { unpacked: false } => level.rows().min(E::K::ROWS),
            Arithmetic::Quads { unpacked: false } => level.rows().min(E::V::ROWS),
            _ => level.rows(),
        }
    }

    /// Words in a packed query row.
    fn packed_width(self, k_width: usize) -> usize {
        match self {
            Arithmetic::Plain { .. } => 0,
            Arithmetic::Pairs { .. } => k_width.div_ceil(2),
            Arithmetic::Quads { .. } => k_width.div_ceil(4) + QUADS_TAIL,
        }
    }

    /// Words of a head's tile of keys, and of values, where it is unpacked.
    fn unpacked(self, k_width: usize, v_width: usize) -> (usize, usize) {
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
fn unpacked_piece(words: &[u32]) -> [Piece<'_>; 1] {
    match bytemuck::try_cast_slice(words) {
        Ok(words) => [Piece { words, row: 0, at: 0, len: TILE }],
        // Regions start on a line and have an even length.
        Err(_) => cut::out_of_bounds(),
    }
}

/// A [`Step`], and the values of rows that do not see the same positions.
fn work<K: KeyStep, V: ValueStep>(
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
struct PackPairs<'p> {
    row: &'p [f32],
    packed: &'p mut [u32],
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

/// Finds the pieces of the softmax tile at `start`, below the position `end` of the sequence, and
/// returns how many there are.
fn find_pieces<'a, E: Element>(
    view: &KvView<'a, E>,
    start: usize,
    end: usize,
    pieces: &mut [Piece<'a>],
) -> usize {
    let end = end.min(view.len()).saturating_sub(start).min(TILE);
    if end == 0 {
        return 0;
    }
    let block_size = view.layout().shape().block_size();
    let (mut block, mut row) = (start / block_size, start % block_size);
    let (mut at, mut count) = (0, 0);
    while at < end {
        let panel_end = (row / PANEL * PANEL + PANEL).min(block_size);
        let len = (panel_end - row).min(end - at);
        *cut::one_mut(pieces, count) = Piece { words: view.block(block), row, at, len };
        count += 1;
        at += len;
        row += len;
        if row == block_size {
            block += 1;
            row = 0;
        }
    }
    count
}

/// Divides, adds sinks, and writes an item's rows to the output, where they are complete.
pub(crate) struct Finish<'f, 'a, 'o, E: Element> {
    pub(crate) task: &'f Task<'a, E>,
    pub(crate) item: &'f Item,
    pub(crate) scratch: &'f [f32],
    pub(crate) output: &'f mut Output<'o>,
}

impl<E: Element> Kernel for Finish<'_, '_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Finish { task, item, scratch, output } = self;
        let shape = &task.shape;
        let options: &Resolved<'_> = &task.options;
        let (width, group) = (shape.kv().v_width(), shape.group());
        let rows = item.rows_per_head(shape);
        let states = States::of(scratch, item.heads.len() * rows, width);
        let mut index = 0;
        for head in item.heads.clone() {
            for query in item.rows.clone() {
                for query_head in head * group..(head + 1) * group {
                    let place = query * shape.n_heads() + query_head;
                    let sink = options.sinks.map(|sinks| *cut::one(sinks, query_head));
                    let answer = cut::part_mut(output.out, place * width, width);
                    finish(s, states.head(index), states.out(index), sink, answer);
                    if let Some(lse) = &mut output.lse {
                        *cut::one_mut(lse, place) = log_sum_exp(states.head(index));
                    }
                    index += 1;
                }
            }
        }
    }
}
