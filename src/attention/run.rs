//! One item at work: the walk from positions to page tiles.

use core::marker::PhantomData;

use super::arithmetic::{Arithmetic, Seen, unpacked_piece, work};
use super::queries::{LoadQueries, PackPairs};
use super::scratch::{CloseSplit, Inputs, Regions};
use super::task::{Item, Member, Task};
use crate::cut;
use crate::element::float::Single;
use crate::element::tile::{Layout, PANEL, Panels, groups};
use crate::element::{Element, Widen};
use crate::kernel::dot::{Bf16Pairs, I8Quads, pack_quads};
use crate::kernel::scores::Queries;
use crate::kernel::softmax::Rule;
use crate::kernel::step::Side;
use crate::kernel::unpack::{GatherScales, ToF32, ToPairs, UnpackKeys, UnpackValues};
use crate::kernel::values::{Extent, Scales};
use crate::kernel::{Piece, SPLIT, TILE, Tiles, USUAL_PIECES};
use crate::simd::{LANES, Level, MOST_ROWS};
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
        let sharing = rows_per_head.min(most_rows(item, rows_per_head));
        let arithmetic = Arithmetic::choose::<E>(level, sharing, layout.shape());
        let (regions, inputs) = Regions::new::<E>(scratch, &task.shape, item, arithmetic);
        AtWork { task, item, layout, level, rows_per_head, arithmetic, regions, inputs }.run();
    }
}

/// A softmax tile over some rows of an item.
#[derive(Clone, Copy)]
struct Tile<'t, 'a> {
    /// Its first position.
    start: usize,
    /// Whether it is the first one of its rows.
    opens: bool,
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
///
/// Cells of narrow types are then read in place: 32 rows over unpacked tiles, which are twice as large
/// and do not fit the first-level cache, took 1.2 times as long as each sequence alone.
const JOINT_ROWS: usize = 4;

/// The most rows of a KV head that are worked on at once, as far as the item decides it.
fn most_rows(item: &Item, rows_per_head: usize) -> usize {
    let joint = item.sequences.len() > 1 && rows_per_head > 2 * item.sequences.len();
    if joint { JOINT_ROWS } else { usize::MAX }
}

/// Rows that are worked on at once where an item takes all heads, and pages come from memory.
///
/// With more the register tile is half as wide and walks half rows of a cold tile, twice: eight
/// rows over 4096 positions took 2.1 times as long as four, which have half the work.
const WIDE_ROWS: usize = 6;

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
        let (any, all) = self.seen_by_rows();
        let (first, count) = (self.item.sequences.start, self.item.sequences.len());
        let kept = self.kept();
        let window = any.from / TILE * TILE;
        let opening = if kept.is_empty() { window } else { kept.from / TILE * TILE };
        let (mut start, mut sequence) = (opening, first);
        let (mut here, mut there) = cut::split(room, room.len() / 2);
        let any = Extent { from: opening, ..any };
        let mut found = find_pieces(&self.task.member(first).view, start, any.to, there);
        while start < any.to {
            core::mem::swap(&mut here, &mut there);
            let pieces = cut::part(here, 0, found);
            let joint = count == 1 || start + TILE <= self.item.joint;
            let behind = start >= kept.to;
            let whole = joint && start >= all.from && start + TILE <= all.to;
            let extent = if whole {
                Some(Extent { from: 0, to: TILE })
            } else if self.item.rows.len() == 1
                && (count == 1 || !joint)
                && self.task.options.trees.is_none()
                && behind
            {
                let seen = self.seen(&self.task.member(sequence), self.item.rows.start);
                let to = seen.to.min(self.item.positions.end);
                Some(Extent { to, ..seen }.in_tile(start))
            } else {
                None
            };
            // What the sequences do not share is done for one after the other.
            let rows = if joint { self.rows_per_head } else { self.rows_per_head / count };
            let last = joint || sequence + 1 == first + count;
            let mut next_start = if last { start + TILE } else { start };
            if next_start >= kept.to {
                // What only the window's past would have seen.
                next_start = next_start.max(window);
            }
            let next_sequence = if last { first } else { sequence + 1 };
            found = find_pieces(&self.task.member(next_sequence).view, next_start, any.to, there);
            let (next, first_row) = (cut::part(there, 0, found), (sequence - first) * rows);
            let opens = start == opening;
            self.tile(Tile { start, opens, pieces, next, first_row, rows, extent });
            let split = start / SPLIT;
            (start, sequence) = (next_start, next_sequence);
            let merges = last && !self.regions.total_heads.is_empty();
            if merges && (start / SPLIT != split || start >= any.to) {
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
            let to = all.to.min(first.to);
            // What the rows of a tree see of it is asked of each.
            let to = self.task.tree(&member).map_or(to, |(_, before)| to.min(before));
            all = Extent { from: all.from.max(last.from), to };
        }
        let Item { positions, .. } = self.item;
        let clip = |seen: Extent| Extent {
            from: seen.from.max(positions.start),
            to: seen.to.min(positions.end),
        };
        (clip(any), clip(all))
    }

    /// The positions of the item that are seen whatever the window is, as far as they are before it.
    #[inline(always)]
    fn kept(&self) -> Extent {
        let (first, last) = self.task.options.positions;
        let Item { positions, .. } = self.item;
        let to = self.task.options.keep_first.min(last).min(positions.end);
        let kept = Extent { from: first.max(positions.start), to };
        if kept.is_empty() { Extent::EMPTY } else { kept }
    }

    /// The positions that a query row sees in its window, before the item's tiles are laid over them.
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

    /// Copies query rows, scaled, and rounds them for the dot product at hand: of the groups that
    /// begin among these rows of a head; or of all heads at once, where they stand side by side here
    /// as in the caller's memory.
    fn load_queries(&mut self, Batch { head, row, rows }: Batch) {
        let shape = &self.task.shape;
        let (width, group) = (shape.kv().k_width(), shape.group());
        let packed_width = self.arithmetic.packed_width(width);
        let one_query = self.rows_per_head == group;
        let count = match (one_query, head) {
            (true, 0) => self.item.heads.len() * group,
            (true, _) => return,
            (false, _) => group,
        };
        for row in (row.next_multiple_of(group)..row + rows).step_by(group) {
            let place = |row| {
                let (member, query) = self.query(row);
                let place = (member.first + query) * shape.n_heads();
                place + (self.item.heads.start + head) * group
            };
            // What the next batch begins with, while this one is at work.
            let next = row + rows.next_multiple_of(group);
            let here = place(row);
            let next = if next < self.rows_per_head { place(next) } else { here };
            let ahead = next.wrapping_sub(here).wrapping_mul(width);
            let first = head * self.rows_per_head + row;
            let to = cut::part_mut(self.inputs.q, first * width, count * width);
            let from = cut::part(self.task.q, here * width, count * width);
            let scale = self.task.options.query_scale;
            self.level.run(LoadQueries { from, scale, to: &mut *to, ahead });
            if packed_width == 0 {
                continue;
            }
            let (first, len) = (first * packed_width, count * packed_width);
            let packed = cut::part_mut(self.inputs.packed, first, len);
            for (row, packed) in to.chunks_exact(width).zip(packed.chunks_exact_mut(packed_width)) {
                match self.arithmetic {
                    Arithmetic::Quads { .. } => pack_quads(row, packed),
                    _ => self.level.run_bf16(PackPairs { row, packed }),
                }
            }
        }
    }

    /// One softmax tile: all heads of the item, some rows of each.
    fn tile(&mut self, tile: Tile<'_, 'a>) {
        let mut most = self.arithmetic.rows_at_once::<E>(self.level);
        most = most.min(most_rows(self.item, self.rows_per_head));
        if self.item.heads.len() > 1 {
            most = most.min(WIDE_ROWS);
        }
        // As even as can be: nine rows are five and four, not eight and one.
        let mut rows = tile.rows;
        if rows > most {
            rows = rows.div_ceil(rows.div_ceil(most));
        }
        for head in 0..self.item.heads.len() {
            let tiles = self.tiles(&tile, head);
            self.gather_scales(&tiles);
            self.unpack(&tiles);
            let mut row = tile.first_row;
            while row < tile.first_row + tile.rows {
                let rows = rows.min(tile.first_row + tile.rows - row);
                let batch = Batch { head, row, rows };
                if tile.opens {
                    self.load_queries(batch);
                }
                // Only the first rows ask for what is next; the others find it on its way.
                let next = if row == tile.first_row { tiles.next } else { &[] };
                self.step(&tile, batch, Tiles { next, ..tiles });
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
        // The groups of the value's width follow those of the key's.
        let (first, block_size) = (self.layout.key_scales(0), self.layout.shape().block_size());
        let to = &mut *self.inputs.scales;
        self.level.run(GatherScales { tiles, first, block_size, to });
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
        let (mut extents, mut masks) = ([Extent::EMPTY; MOST_ROWS], [u64::MAX; MOST_ROWS]);
        let extent = match tile.extent {
            Some(extent) => extent,
            None => self.extents(tile, batch, &mut extents, &mut masks),
        };
        if extent.is_empty() {
            return;
        }
        let extents = match tile.extent {
            Some(_) => None,
            None => Some(cut::part(&extents, 0, batch.rows)),
        };
        let options = &self.task.options;
        let masks = if options.trees.is_some() || options.keep_first > 0 {
            Some(cut::part(&masks, 0, batch.rows))
        } else {
            None
        };
        let masks = masks.filter(|masks| masks.iter().any(|mask| *mask != u64::MAX));
        let mut rules = [Rule::NONE; MOST_ROWS];
        let rules = if options.cap.is_some() || options.slopes.is_some() {
            for (line, rule) in rules.iter_mut().enumerate().take(batch.rows) {
                *rule = self.rule(batch.head, batch.row + line, tile.start);
            }
            cut::part(&rules, 0, batch.rows)
        } else {
            &[]
        };
        let first = batch.head * self.rows_per_head + batch.row;
        let seen = &Seen { first, rows: batch.rows, extent, extents, masks, rules };
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
        let q = cut::part(inputs.q, first * k_width, rows * k_width);
        let plain = || Queries::whole(q, k_width, k_width);
        let packed = |width| cut::part(inputs.packed, first * width, rows * width);
        let (one_key, one_value);
        let regions = &mut self.regions;
        let (level, v_width) = (self.level, kv.v_width());
        match self.arithmetic {
            Arithmetic::Plain { unpacked: false } => {
                let q = plain();
                work::<Widen<E::K>, Widen<E::V>>(level, regions, v_width, seen, &q, &keys, &values);
            }
            Arithmetic::Plain { unpacked: true } => {
                let q = plain();
                one_key = unpacked_piece(inputs.keys);
                one_value = unpacked_piece(inputs.values);
                let keys = keys.unpacked(&one_key, Panels::new(k_width, TILE));
                let values = values.unpacked(&one_value, Panels::new(TILE, v_width));
                work::<Widen<Single>, Widen<Single>>(
                    level, regions, v_width, seen, &q, &keys, &values,
                );
            }
            Arithmetic::Pairs { unpacked } if E::PAIRS || E::WHOLE => {
                let width = self.arithmetic.packed_width(k_width);
                let q = Queries::whole(packed(width), width, 2 * width);
                if !unpacked {
                    work::<Bf16Pairs, Bf16Pairs>(level, regions, v_width, seen, &q, &keys, &values);
                    return;
                }
                one_key = unpacked_piece(inputs.keys);
                one_value = unpacked_piece(inputs.values);
                let keys = keys.unpacked(&one_key, Panels::new(width, TILE));
                let values = values.unpacked(&one_value, Panels::new(TILE / 2, v_width));
                work::<Bf16Pairs, Bf16Pairs>(level, regions, v_width, seen, &q, &keys, &values);
            }
            Arithmetic::Quads { unpacked } if E::QUADS => {
                let width = self.arithmetic.packed_width(k_width);
                let q = Queries::whole(packed(width), width, k_width.next_multiple_of(4));
                if !unpacked {
                    work::<I8Quads, Widen<E::V>>(level, regions, v_width, seen, &q, &keys, &values);
                    return;
                }
                one_value = unpacked_piece(inputs.values);
                let values = values.unpacked(&one_value, Panels::new(TILE, v_width));
                work::<I8Quads, Widen<Single>>(level, regions, v_width, seen, &q, &keys, &values);
            }
            _ => cut::out_of_bounds(),
        }
    }

    /// Writes what each row of a head sees in the tile, from where to where and which of those, and
    /// returns what any of them sees.
    fn extents(
        &self,
        tile: &Tile<'_, 'a>,
        batch: Batch,
        extents: &mut [Extent; MOST_ROWS],
        masks: &mut [u64; MOST_ROWS],
    ) -> Extent {
        let mut any = Extent { from: TILE, to: 0 };
        let group = self.task.shape.group();
        let mut known = usize::MAX;
        let (mut extent, mut mask) = (Extent::EMPTY, u64::MAX);
        for line in 0..batch.rows {
            let row = batch.row + line;
            if row / group != known {
                known = row / group;
                let (member, query) = self.query(row);
                let seen = self.seen(&member, query);
                let to = seen.to.min(self.item.positions.end);
                extent = Extent { to, ..seen }.in_tile(tile.start);
                mask = self.task.tree_bits(&member, query, tile.start);
                let kept = self.kept();
                if tile.start < kept.to {
                    let kept = Extent { to: to.min(kept.to), ..kept }.in_tile(tile.start);
                    mask &= extent.mask() | kept.mask();
                    extent = extent.and(kept);
                }
            }
            *cut::one_mut(extents, line) = extent;
            *cut::one_mut(masks, line) = mask;
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
