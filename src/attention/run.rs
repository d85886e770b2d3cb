//! One item at work: the walk from positions to page tiles.

use core::marker::PhantomData;

use super::options::Resolved;
use super::output::Output;
use super::task::{Item, Member, Task};
use crate::cut;
use crate::element::tile::{LINE, Layout, PANEL};
use crate::element::{Element, Widen};
use crate::kernel::exp::exp2;
use crate::kernel::scores::{Queries, Scores};
use crate::kernel::softmax::{Rule, raise, transform, weigh};
use crate::kernel::state::{Head, finish, log_sum_exp, merge};
use crate::kernel::values::{Extent, Outputs, Values, Weights};
use crate::kernel::{MOST_PIECES, Piece, Pieces, SPLIT, ScoreRow, TILE, Tiles, rows_at_once};
use crate::shape::GqaShape;
use crate::simd::{Kernel, LANES, MOST_ROWS, Simd};
use crate::storage::view::KvView;

/// An item of a call, and the memory that it works in.
#[derive(Debug)]
pub struct Job<'j, 'a, E: Element> {
    pub(crate) task: &'j Task<'a, E>,
    pub(crate) item: &'j Item,
    pub(crate) scratch: &'j mut [f32],
}

impl<'j, 'a, E: Element> Job<'j, 'a, E> {
    pub(crate) fn kernel(&mut self) -> Walk<'_, 'j, 'a, E> {
        Walk(self)
    }
}

/// The kernel that [`Element::attend`] runs.
pub(crate) struct Walk<'w, 'j, 'a, E: Element>(&'w mut Job<'j, 'a, E>);

impl<E: Element> Kernel for Walk<'_, '_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Job { task, item, scratch } = self.0;
        let layout = task.member(item.sequences.start).view.layout();
        let tile = (layout.tile_words() * size_of::<u64>()).cast_signed();
        let next_head = [tile; MOST_PIECES];
        let mut work = AtWork {
            task,
            item,
            layout,
            rows_per_head: item.rows_per_head(&task.shape),
            next_head: &next_head,
            regions: Regions::new(scratch, &task.shape, item),
        };
        work.run(s);
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

/// An item's scratch, cut into regions.
struct Regions<'a> {
    stride: usize,
    /// The states that tiles are added to: of the split at hand, or the totals where there is one
    /// split.
    heads: &'a mut [[f32; 2]],
    outs: &'a mut [f32],
    /// The totals over all splits, where there are more; empty where there is one.
    total_heads: &'a mut [[f32; 2]],
    total_outs: &'a mut [f32],
    /// Scaled query rows.
    q: &'a mut [f32],
    scores: &'a mut [ScoreRow],
}

impl<'a> Regions<'a> {
    /// Cuts, and clears what has to be: nothing that the scratch held before shows in a result.
    fn new(scratch: &'a mut [f32], shape: &GqaShape, item: &Item) -> Self {
        let rows = item.heads.len() * item.rows_per_head(shape);
        let stride = shape.kv().v_width().next_multiple_of(LANES);
        let (outs, heads, mut rest) = states(scratch, rows, stride);
        let (mut total_outs, mut total_heads) = (Default::default(), Default::default());
        let (mut outs, mut heads) = (outs, heads);
        if item.merges() {
            (total_outs, total_heads) = (outs, heads);
            (outs, heads, rest) = states(rest, rows, stride);
        }
        let (scores, rest) = region(rest, MOST_ROWS * size_of::<ScoreRow>() / size_of::<f32>());
        let (q, _) = region(rest, rows * shape.kv().k_width());
        let scores = scores.as_chunks_mut().0;
        let mut regions = Regions { stride, heads, outs, total_heads, total_outs, q, scores };
        regions.total_heads.fill(EMPTY);
        regions.open_split();
        regions
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
    pieces: &'t Pieces<'a>,
    /// For each piece, bytes from the last head's tile to the first one's in the next blocks.
    next: &'t [isize; MOST_PIECES],
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
    rows_per_head: usize,
    /// For each piece, bytes from one head's tile to the next one's.
    next_head: &'i [isize; MOST_PIECES],
    regions: Regions<'i>,
}

impl<'i, 'a, E: Element> AtWork<'i, 'a, E> {
    #[inline(always)]
    fn run<S: Simd>(&mut self, s: S) {
        self.load_queries();
        let (any, all) = self.seen_by_rows();
        let (first, count) = (self.item.sequences.start, self.item.sequences.len());
        let (mut start, mut sequence) = (any.from / TILE * TILE, first);
        let mut pieces = Pieces::NONE;
        let mut following = pieces_of(&self.task.member(first).view, start, 0, any.to);
        // One place that does a tile: in a second one it would not be inlined, and then every vector
        // operation in it is a call.
        while start < any.to {
            core::mem::swap(&mut pieces, &mut following);
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
            let rows = if joint { self.rows_per_head } else { self.rows_per_head / count };
            let last = joint || sequence + 1 == first + count;
            let next_start = if last { start + TILE } else { start };
            let next_sequence = if last { first } else { sequence + 1 };
            following = pieces_of(&self.task.member(next_sequence).view, next_start, 0, any.to);
            let next = &self.distances::<S>(&pieces, &following);
            let (pieces, first_row) = (&pieces, (sequence - first) * rows);
            self.tile(s, Tile { start, pieces, next, first_row, rows, extent });
            (start, sequence) = (next_start, next_sequence);
            let merges = last && !self.regions.total_heads.is_empty();
            if merges && (start.is_multiple_of(SPLIT) || start >= any.to) {
                self.close_split(s);
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
        let mut places = self.regions.q.chunks_exact_mut(width);
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

    /// For each piece, bytes from the last head's tile to the first one's in the next blocks.
    #[inline(always)]
    fn distances<S: Simd>(&self, here: &Pieces<'a>, next: &Pieces<'a>) -> [isize; MOST_PIECES] {
        let mut distances = [0; MOST_PIECES];
        if S::AHEAD > 0 {
            let heads = (self.item.heads.len() - 1).cast_signed() * self.next_head[0];
            let pairs = here.list().iter().zip(next.list());
            for (distance, (here, next)) in distances.iter_mut().zip(pairs) {
                let blocks = next.words.as_ptr().addr().wrapping_sub(here.words.as_ptr().addr());
                *distance = blocks.cast_signed() - heads;
            }
        }
        distances
    }

    /// One softmax tile: all heads of the item, some rows of each.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, s: S, tile: Tile<'_, 'a>) {
        let mut most = rows_at_once::<S, Widen<E::K>>();
        if self.item.sequences.len() > 1 && self.rows_per_head > 2 * self.item.sequences.len() {
            most = most.min(JOINT_ROWS);
        }
        // As even as can be: nine rows are five and four, not eight and one.
        let rows = tile.rows.div_ceil(tile.rows.div_ceil(most));
        for head in 0..self.item.heads.len() {
            let mut row = tile.first_row;
            while row < tile.first_row + tile.rows {
                let rows = rows.min(tile.first_row + tile.rows - row);
                self.step(s, &tile, Batch { head, row, rows });
                row += rows;
            }
        }
    }

    /// Some rows over one softmax tile: scores, softmax, values.
    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S, tile: &Tile<'_, 'a>, batch: Batch) {
        let mut extents = [Extent::EMPTY; MOST_ROWS];
        let extent = match tile.extent {
            Some(extent) => extent,
            None => self.extents(tile, batch, &mut extents),
        };
        if extent.is_empty() {
            return;
        }
        self.scores(s, tile, batch, extent);
        let mut shrink = [0.0; LANES];
        match tile.extent {
            Some(extent) => self.softmax(s, tile, batch, &mut shrink, |_| extent),
            None => self.softmax(s, tile, batch, &mut shrink, |row| *cut::one(&extents, row)),
        }
        match tile.extent {
            Some(extent) => {
                let taken = Taken { line: 0, lines: batch.rows, extent };
                self.values(s, tile, batch, taken, &shrink);
            }
            None => self.ragged(s, tile, batch, &extents, &mut shrink),
        }
    }

    /// The first row of a batch among all rows of the item.
    #[inline(always)]
    fn first(&self, batch: Batch) -> usize {
        batch.head * self.rows_per_head + batch.row
    }

    /// Where a head's tiles are, and what is needed next.
    #[inline(always)]
    fn tiles<'t>(&self, tile: &Tile<'t, 'a>, batch: Batch) -> Tiles<'t, 'a>
    where
        'i: 't,
    {
        let head = batch.head;
        let ahead = if head + 1 < self.item.heads.len() { self.next_head } else { tile.next };
        let head = (self.item.heads.start + head) * self.layout.tile_words();
        Tiles { pieces: tile.pieces, head, ahead }
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

    /// The scores of one head of a batch.
    #[inline(always)]
    fn scores<S: Simd>(&mut self, s: S, tile: &Tile<'_, 'a>, batch: Batch, extent: Extent) {
        let width = self.task.shape.kv().k_width();
        let first = self.first(batch);
        let tiles = self.tiles(tile, batch);
        let (panels, step) = (self.layout.keys(), PhantomData::<Widen<E::K>>);
        let rows = cut::part(self.regions.q, first * width, batch.rows * width);
        let q = Queries { rows, width, first: 0, first_row: 0, numbers: width };
        let out = cut::part_mut(self.regions.scores, 0, batch.rows);
        Scores { q, tiles, panels, extent, out, step }.run(s, batch.rows);
        let mut end = tile.pieces.end_if_more(extent);
        while end < extent.to {
            let view = self.query(batch.row).0.view;
            let more = pieces_of(&view, tile.start, end, tile.start + extent.to);
            let tiles = self.tiles(&Tile { pieces: &more, ..*tile }, batch);
            let rows = cut::part(self.regions.q, first * width, batch.rows * width);
            let out = cut::part_mut(self.regions.scores, 0, batch.rows);
            Scores { q: Queries { rows, ..q }, tiles, panels, extent, out, step }
                .run(s, batch.rows);
            end = more.end_if_more(extent);
        }
    }

    /// The softmax of all rows of a batch, and the factors by which their outputs shrink.
    #[inline(always)]
    fn softmax<S: Simd>(
        &mut self,
        s: S,
        tile: &Tile<'_, 'a>,
        batch: Batch,
        shrink: &mut [f32; LANES],
        extent: impl Fn(usize) -> Extent,
    ) {
        let first = self.first(batch);
        let lines = batch.rows;
        let options = &self.task.options;
        if options.cap.is_some() || options.slopes.is_some() {
            for line in 0..lines {
                let rule = self.rule(batch.head, batch.row + line, tile.start);
                transform(s, cut::one_mut(self.regions.scores, line), extent(line), rule);
            }
        }
        let heads = cut::part_mut(self.regions.heads, first, lines);
        let rows = cut::part_mut(self.regions.scores, 0, lines);
        let mut rises = [0.0; LANES];
        for (line, ((scores, head), rise)) in
            rows.iter_mut().zip(&mut *heads).zip(&mut rises).enumerate()
        {
            *rise = raise(s, scores, extent(line), head);
        }
        s.store(exp2(s, s.load(&rises)), shrink);
        for (line, ((scores, head), shrink)) in rows.iter_mut().zip(heads).zip(shrink).enumerate() {
            weigh(s, scores, extent(line), *shrink, head);
        }
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

    /// Adds the weighted values of rows that end at different positions: the edge of causality or
    /// of a window.
    ///
    /// Only the positions that all of them see are done together. A row never multiplies a value
    /// it does not see, not even by zero: 0 x inf and 0 x NaN are not 0. Rows with one extent stay
    /// together.
    fn ragged<S: Simd>(
        &mut self,
        s: S,
        tile: &Tile<'_, 'a>,
        batch: Batch,
        extents: &[Extent; MOST_ROWS],
        shrink: &mut [f32; LANES],
    ) {
        let extents = cut::part(extents, 0, batch.rows);
        let from = extents.iter().map(|extent| extent.from).max().unwrap_or(0);
        let to = extents.iter().map(|extent| extent.to).min().unwrap_or(0).max(from);
        let common = Extent { from, to };
        // First each row's own beginning, then the common middle, then each row's own end.
        for part in [Part::Beginning, Part::Middle, Part::End] {
            let mut line = 0;
            while line < batch.rows {
                let own = *cut::one(extents, line);
                let same = cut::from(extents, line).iter().take_while(|extent| **extent == own);
                let (lines, extent) = match part {
                    Part::Beginning => {
                        (same.count(), Extent { from: own.from, to: own.to.min(common.from) })
                    }
                    Part::Middle => (batch.rows, common),
                    Part::End => {
                        (same.count(), Extent { from: own.from.max(common.to), to: own.to })
                    }
                };
                if !extent.is_empty() {
                    self.values(s, tile, batch, Taken { line, lines, extent }, shrink);
                    // What has shrunk once must not shrink again.
                    cut::part_mut(shrink, line, lines).fill(1.0);
                }
                line += lines;
            }
        }
    }

    /// Adds the weighted values of some rows of one head of a batch to their outputs.
    #[inline(always)]
    fn values<S: Simd>(
        &mut self,
        s: S,
        tile: &Tile<'_, 'a>,
        batch: Batch,
        taken: Taken,
        shrink: &[f32; LANES],
    ) {
        let Taken { line, lines, extent } = taken;
        let first = self.first(batch) + line;
        let stride = self.regions.stride;
        let (panels, step) = (self.layout.values(), PhantomData::<Widen<E::V>>);
        let columns = Extent { from: 0, to: self.task.shape.kv().v_width() };
        let mut shrink = cut::part(shrink, line, lines);
        let mut end = tile.pieces.end_if_more(extent);
        let mut more = Pieces::NONE;
        loop {
            let pieces = if more.list().is_empty() { tile.pieces } else { &more };
            let tiles = self.tiles(&Tile { pieces, ..*tile }, batch);
            let rows = cut::part(self.regions.scores, line, lines).as_flattened();
            let width = size_of::<ScoreRow>() / size_of::<f32>();
            let weights = Weights { rows, stride: width, shrink, extent };
            let rows = cut::part_mut(self.regions.outs, first * stride, lines * stride);
            let out = Outputs { rows, stride, columns };
            Values { weights, tiles, panels, out, step }.run(s, lines);
            if end >= extent.to {
                return;
            }
            let view = self.query(batch.row).0.view;
            more = pieces_of(&view, tile.start, end, tile.start + extent.to);
            end = more.end_if_more(extent);
            shrink = cut::part(&[1.0; MOST_ROWS], 0, lines);
        }
    }

    /// Merges the split at hand into the totals.
    #[inline(always)]
    fn close_split<S: Simd>(&mut self, s: S) {
        let Regions { stride, heads, outs, total_heads, total_outs, .. } = &mut self.regions;
        let totals = total_heads.iter_mut().zip(total_outs.chunks_exact_mut(*stride));
        let parts = heads.iter().zip(outs.chunks_exact(*stride));
        for ((total, total_out), (part, part_out)) in totals.zip(parts) {
            let mut head = Head { max: total[0], denom: total[1] };
            let part = Head { max: part[0], denom: part[1] };
            merge(s, &mut head, total_out, part, part_out);
            *total = [head.max, head.denom];
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

/// Which rows of a group are done together, and over which positions.
#[derive(Clone, Copy)]
struct Taken {
    /// The first row that is done, counted in the group.
    line: usize,
    lines: usize,
    extent: Extent,
}

/// The pieces of the softmax tile at `start`, from its position `from` on and below the position
/// `end` of the sequence, as many as fit.
#[inline(always)]
fn pieces_of<'a, E: Element>(
    view: &KvView<'a, E>,
    start: usize,
    from: usize,
    end: usize,
) -> Pieces<'a> {
    let block_size = view.layout().shape().block_size();
    let end = end.min(view.len()).saturating_sub(start).min(TILE);
    let mut pieces = Pieces::NONE;
    if from >= end {
        return pieces;
    }
    let position = start + from;
    let (mut block, mut row) = (position / block_size, position % block_size);
    let mut at = from;
    while at < end && !pieces.is_full() {
        let panel_end = (row / PANEL * PANEL + PANEL).min(block_size);
        let len = (panel_end - row).min(end - at);
        pieces.push(Piece { words: view.block(block), row, at, len });
        at += len;
        row += len;
        if row == block_size {
            block += 1;
            row = 0;
        }
    }
    pieces
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
        for index in 0..item.heads.len() * rows {
            let (head, row) = (index / rows, index % rows);
            let query_head = (item.heads.start + head) * group + row % group;
            let place = (item.rows.start + row / group) * shape.n_heads() + query_head;
            let sink = options.sinks.map(|sinks| *cut::one(sinks, query_head));
            let answer = cut::part_mut(output.out, place * width, width);
            finish(s, states.head(index), states.out(index), sink, answer);
            if let Some(lse) = &mut output.lse {
                *cut::one_mut(lse, place) = log_sum_exp(states.head(index));
            }
        }
    }
}
