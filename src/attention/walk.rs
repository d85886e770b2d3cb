//! From positions to page tiles: the walk over one sequence.
//!
//! A call is cut into *items*: some KV heads by some query positions. With few query rows an item
//! takes all heads and walks tile by tile, heads inside, which is the order of memory; with many
//! it takes one KV head and up to [`ITEM_ROWS`] rows, so that their state stays in the cache while
//! keys and values stream by. Items are only a matter of speed: no sum crosses a row.

use super::options::Resolved;
use super::output::Output;
use crate::cut;
use crate::element::Element;
use crate::element::tile::PANEL;
use crate::kernel::scores::scores;
use crate::kernel::softmax::{Rule, softmax};
use crate::kernel::state::{Head, finish, merge};
use crate::kernel::values::{Extent, Outputs, Weights, values};
use crate::kernel::{SPLIT, ScoreRow, Span, TILE};
use crate::shape::GqaShape;
use crate::simd::{Kernel, LANES, MOST_ROWS, Simd};
use crate::storage::view::KvView;

/// Rows of one KV head that an item takes at most, unless a single position has more.
///
/// 64 to 96 were measured alike; 96 rows of 128 + 2 x 128 floats are 144 KiB.
const ITEM_ROWS: usize = 96;

/// Up to this many rows a KV head, an item takes all heads ...
const DECODE_ROWS: usize = 16;

/// ... unless they are more than this many rows together: 256 of 128 + 2 x 128 floats are 384 KiB
/// of state, which has to stay in the second-level cache.
const TOGETHER_ROWS: usize = 256;

/// One attention call, checked.
#[derive(Debug)]
pub struct Job<'a, E: Element> {
    pub(super) shape: GqaShape,
    pub(super) view: KvView<'a, E>,
    pub(super) options: Resolved<'a>,
    pub(super) q: &'a [f32],
    pub(super) n_q: usize,
    pub(super) output: Output<'a>,
    pub(super) scratch: &'a mut [f32],
}

impl<'a, E: Element> Job<'a, E> {
    pub(crate) fn kernel(&mut self) -> Walk<'_, 'a, E> {
        Walk(self)
    }
}

/// How large the items of a call are, which is what its scratch is measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ItemSize {
    /// KV heads in an item.
    heads: usize,
    /// Query positions in an item.
    positions: usize,
}

impl ItemSize {
    fn new(shape: &GqaShape, n_q: usize) -> Self {
        let group = shape.group();
        let few = n_q.saturating_mul(group) <= DECODE_ROWS
            && n_q.saturating_mul(shape.n_heads()) <= TOGETHER_ROWS;
        if few || n_q <= 1 {
            ItemSize { heads: shape.kv().n_kv_heads(), positions: n_q.max(1) }
        } else {
            ItemSize { heads: 1, positions: (ITEM_ROWS / group).clamp(1, n_q) }
        }
    }

    fn rows(&self, shape: &GqaShape) -> usize {
        self.heads * self.positions * shape.group()
    }
}

/// Numbers of scratch that attention over this shape needs for up to `n_q` query rows.
///
/// What is enough for many rows is enough for fewer: ask once, for the largest chunk. The number
/// is bounded whatever `n_q` is (an item has at most 256 rows, or one for each query head, or 96
/// for one KV head), and does not depend on the length of the sequence.
pub fn attention_scratch_len(shape: &GqaShape, n_q: usize) -> usize {
    // Rows grow with `n_q` on either side of the change from all heads to one; it comes somewhere
    // in 1 ..= DECODE_ROWS.
    let most = (1..=n_q.min(DECODE_ROWS)).chain([n_q]).map(|n_q| scratch_needed(shape, n_q));
    most.max().unwrap_or(0)
}

/// Numbers of scratch that exactly `n_q` query rows need.
pub(super) fn scratch_needed(shape: &GqaShape, n_q: usize) -> usize {
    let rows = ItemSize::new(shape, n_q).rows(shape);
    let out = shape.kv().v_width().next_multiple_of(LANES);
    let scores = MOST_ROWS * size_of::<ScoreRow>() / size_of::<f32>();
    // A line to spare, so that regions can start on one.
    let row = shape.kv().k_width().saturating_add(2 * out + 4);
    (LANES + scores).saturating_add(rows.saturating_mul(row))
}

/// The scratch, cut into regions.
struct Regions<'a> {
    scores: &'a mut [ScoreRow],
    /// Totals over all splits so far, and their outputs.
    total: &'a mut [f32],
    total_out: &'a mut [f32],
    /// The split at hand.
    part: &'a mut [f32],
    part_out: &'a mut [f32],
    /// Scaled query rows.
    q: &'a mut [f32],
}

impl<'a> Regions<'a> {
    /// Cuts, and clears what has to be: nothing that the scratch held before shows in a result.
    fn new(scratch: &'a mut [f32], rows: usize, k_width: usize, stride: usize) -> Self {
        let line = scratch.as_ptr().align_offset(LANES * size_of::<f32>()).min(LANES);
        let (_, rest) = cut::split(scratch, line);
        let scores = MOST_ROWS * size_of::<ScoreRow>() / size_of::<f32>();
        let (scores, rest) = cut::split(rest, scores);
        let (total_out, rest) = cut::split(rest, rows * stride);
        let (part_out, rest) = cut::split(rest, rows * stride);
        let (total, rest) = cut::split(rest, rows * 2);
        let (part, rest) = cut::split(rest, rows * 2);
        let (q, _) = cut::split(rest, rows * k_width);
        let mut regions =
            Regions { scores: scores.as_chunks_mut().0, total, total_out, part, part_out, q };
        for state in regions.total.as_chunks_mut().0 {
            write_head(state, Head::EMPTY);
        }
        regions.open_split();
        regions
    }

    /// Empties the split at hand. Its outputs are multiplied before anything is added, and zero
    /// times what a scratch may hold is not zero; those of the totals are copied over first, and
    /// scores are written, or masked, before they count.
    fn open_split(&mut self) {
        for state in self.part.as_chunks_mut().0 {
            write_head(state, Head::EMPTY);
        }
        self.part_out.fill(0.0);
    }
}

fn read_head(state: &[f32; 2]) -> Head {
    Head { max: state[0], denom: state[1] }
}

fn write_head(state: &mut [f32; 2], head: Head) {
    *state = [head.max, head.denom];
}

/// The kernel that [`Element::attend`] runs.
pub(crate) struct Walk<'j, 'a, E: Element>(&'j mut Job<'a, E>);

/// One item at work.
struct Item<'i, 'a, E: Element> {
    shape: GqaShape,
    view: KvView<'a, E>,
    options: Resolved<'a>,
    /// KV heads `head .. head + heads`.
    head: usize,
    /// Query rows `query .. query + positions`.
    query: usize,
    heads: usize,
    positions: usize,
    /// Position of query row 0, where it has one.
    base: isize,
    stride: usize,
    regions: Regions<'i>,
}

impl<E: Element> Kernel for Walk<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let job = self.0;
        let size = ItemSize::new(&job.shape, job.n_q);
        let kv = job.shape.kv();
        let stride = kv.v_width().next_multiple_of(LANES);
        let mut head = 0;
        while head < kv.n_kv_heads() {
            let mut query = 0;
            while query < job.n_q {
                let positions = size.positions.min(job.n_q - query);
                let rows = size.heads * positions * job.shape.group();
                let mut item = Item {
                    shape: job.shape,
                    view: job.view,
                    options: job.options,
                    head,
                    query,
                    heads: size.heads,
                    positions,
                    base: job.view.len().cast_signed() - job.n_q.cast_signed(),
                    stride,
                    regions: Regions::new(job.scratch, rows, kv.k_width(), stride),
                };
                item.run(s, job.q, &mut job.output);
                query += positions;
            }
            head += size.heads;
        }
    }
}

impl<'a, E: Element> Item<'_, 'a, E> {
    #[inline(always)]
    fn run<S: Simd>(&mut self, s: S, q: &[f32], output: &mut Output<'_>) {
        self.load_queries(q);
        let (first, _) = self.seen(self.query);
        let (_, end) = self.seen(self.query + self.positions - 1);
        let mut start = first / TILE * TILE;
        while start < end {
            for head in 0..self.heads {
                self.tile(s, head, start);
            }
            start += TILE;
            if start.is_multiple_of(SPLIT) || start >= end {
                self.close_split(s);
                if start < end {
                    self.regions.open_split();
                }
            }
        }
        self.answer(s, output);
    }

    /// Rows of one KV head in this item; row `r` is query `r / group` of head `r % group`.
    fn rows(&self) -> usize {
        self.positions * self.shape.group()
    }

    /// The query row and the query head that a row of the item's `head`-th KV head stands for.
    #[inline(always)]
    fn line(&self, head: usize, row: usize) -> (usize, usize) {
        let group = self.shape.group();
        (self.query + row / group, (self.head + head) * group + row % group)
    }

    /// The positions that a query row sees, before the item's tiles are laid over them.
    #[inline(always)]
    fn seen(&self, query: usize) -> (usize, usize) {
        let len = self.view.len();
        let position = self.base + query.cast_signed();
        let end = if self.options.causal { (position + 1).max(0).cast_unsigned() } else { len };
        let from = (position + 1).max(0).cast_unsigned().saturating_sub(self.options.window);
        let (first, last) = self.options.positions;
        (from.max(first), end.min(last).min(len))
    }

    /// Copies the item's query rows, scaled, head by head.
    #[inline(always)]
    fn load_queries(&mut self, q: &[f32]) {
        let width = self.shape.kv().k_width();
        let rows = self.rows();
        for index in 0..self.heads * rows {
            let (query, query_head) = self.line(index / rows, index % rows);
            let place = query * self.shape.n_heads() + query_head;
            let from = cut::part(q, place * width, width);
            let to = cut::part_mut(self.regions.q, index * width, width);
            for (scaled, number) in to.iter_mut().zip(from) {
                *scaled = *number * self.options.query_scale;
            }
        }
    }

    /// One softmax tile of one KV head, over all rows of the item.
    #[inline(always)]
    fn tile<S: Simd>(&mut self, s: S, head: usize, start: usize) {
        let rows = self.rows();
        // As even as can be: nine rows are five and four, not eight and one.
        let group = rows.div_ceil(rows.div_ceil(S::ROWS));
        let mut row = 0;
        while row < rows {
            let count = group.min(rows - row);
            self.step(s, head, start, row, count);
            row += count;
        }
    }

    /// One register-tile-high group of rows over one softmax tile: scores, softmax, values.
    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S, head: usize, start: usize, row: usize, count: usize) {
        let group = self.shape.group();
        let mut extents = [Extent::EMPTY; MOST_ROWS];
        let mut all = Extent { from: TILE, to: 0 };
        for (line, extent) in extents.iter_mut().enumerate().take(count) {
            let (from, end) = self.seen(self.query + (row + line) / group);
            let from = from.saturating_sub(start).min(TILE);
            let to = end.saturating_sub(start).min(TILE);
            if from < to {
                *extent = Extent { from, to };
                all = Extent { from: all.from.min(from), to: all.to.max(to) };
            }
        }
        if all.is_empty() {
            return;
        }
        let view = self.view;
        let spans = Spans::new(&view, self.head + head, start, all);
        let first = head * self.rows() + row;
        let width = self.shape.kv().k_width();
        let q = cut::part(self.regions.q, first * width, count * width);
        let out = &mut *self.regions.scores;
        match count {
            1 => scores::<S, E, 1>(s, rows_of(q, width), spans, out),
            2 if S::ROWS >= 2 => scores::<S, E, 2>(s, rows_of(q, width), spans, out),
            3 if S::ROWS >= 3 => scores::<S, E, 3>(s, rows_of(q, width), spans, out),
            4 if S::ROWS >= 4 => scores::<S, E, 4>(s, rows_of(q, width), spans, out),
            5 if S::ROWS >= 5 => scores::<S, E, 5>(s, rows_of(q, width), spans, out),
            6 if S::ROWS >= 6 => scores::<S, E, 6>(s, rows_of(q, width), spans, out),
            7 if S::ROWS >= 7 => scores::<S, E, 7>(s, rows_of(q, width), spans, out),
            8 if S::ROWS >= 8 => scores::<S, E, 8>(s, rows_of(q, width), spans, out),
            _ => {}
        }
        let mut shrink = [1.0; MOST_ROWS];
        for line in 0..count {
            let rule = self.rule(head, row + line, start);
            let state = cut::one_mut(self.regions.part.as_chunks_mut().0, first + line);
            let mut kept = read_head(state);
            let scores = cut::one_mut(self.regions.scores, line);
            *cut::one_mut(&mut shrink, line) =
                softmax(s, scores, *cut::one(&extents, line), rule, &mut kept);
            write_head(state, kept);
        }
        self.gather(s, first, count, &extents, &mut shrink, spans);
    }

    fn rule(&self, head: usize, row: usize, start: usize) -> Rule {
        let (query, query_head) = self.line(head, row);
        let position = self.base + query.cast_signed();
        Rule {
            cap: self.options.cap,
            slope: self
                .options
                .slopes
                .map(|slopes| cut::one(slopes, query_head) * core::f32::consts::LOG2_E),
            distance: (position - start.cast_signed()) as f32,
        }
    }

    /// Adds the weighted values of one group of rows to its outputs.
    ///
    /// Where rows end at different positions (the edge of causality or of a window) only the
    /// positions that all of them see are done together. A row never multiplies a value it does
    /// not see, not even by zero: 0 x inf and 0 x NaN are not 0.
    #[inline(always)]
    fn gather<S: Simd>(
        &mut self,
        s: S,
        first: usize,
        count: usize,
        extents: &[Extent; MOST_ROWS],
        shrink: &mut [f32; MOST_ROWS],
        spans: Spans<'_, 'a, E>,
    ) {
        let extents = cut::part(extents, 0, count);
        let from = extents.iter().map(|extent| extent.from).max().unwrap_or(0);
        let to = extents.iter().map(|extent| extent.to).min().unwrap_or(0).max(from);
        let common = Extent { from, to };
        let ragged = extents.iter().any(|extent| *extent != common);
        // First each row's own beginning, then the common middle, then each row's own end.
        let steps = if ragged { 2 * count + 1 } else { 1 };
        for step in 0..steps {
            let (line, lines, extent) = if !ragged || step == count {
                (0, count, common)
            } else if step < count {
                let own = *cut::one(extents, step);
                (step, 1, Extent { from: own.from, to: own.to.min(common.from) })
            } else {
                let line = step - count - 1;
                let own = *cut::one(extents, line);
                (line, 1, Extent { from: own.from.max(common.to), to: own.to })
            };
            if extent.is_empty() {
                continue;
            }
            let taken = Taken { first, line, lines, extent };
            self.accumulate(s, taken, shrink, spans);
            // What has shrunk once must not shrink again.
            cut::part_mut(shrink, line, lines).fill(1.0);
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd>(
        &mut self,
        s: S,
        taken: Taken,
        shrink: &[f32; MOST_ROWS],
        spans: Spans<'_, 'a, E>,
    ) {
        let Taken { first, line, lines, extent } = taken;
        let (stride, width) = (self.stride, self.shape.kv().v_width());
        let rows = cut::part_mut(self.regions.part_out, (first + line) * stride, lines * stride);
        let mut out = Outputs { rows, stride, width };
        let weights = Rows {
            scores: cut::part(self.regions.scores, line, lines),
            shrink: cut::part(shrink, line, lines),
            extent,
        };
        match lines {
            1 => weigh::<S, E, 1>(s, weights, spans, &mut out),
            2 if S::ROWS >= 2 => weigh::<S, E, 2>(s, weights, spans, &mut out),
            3 if S::ROWS >= 3 => weigh::<S, E, 3>(s, weights, spans, &mut out),
            4 if S::ROWS >= 4 => weigh::<S, E, 4>(s, weights, spans, &mut out),
            5 if S::ROWS >= 5 => weigh::<S, E, 5>(s, weights, spans, &mut out),
            6 if S::ROWS >= 6 => weigh::<S, E, 6>(s, weights, spans, &mut out),
            7 if S::ROWS >= 7 => weigh::<S, E, 7>(s, weights, spans, &mut out),
            8 if S::ROWS >= 8 => weigh::<S, E, 8>(s, weights, spans, &mut out),
            _ => {}
        }
    }

    /// Merges the split at hand into the totals.
    #[inline(always)]
    fn close_split<S: Simd>(&mut self, s: S) {
        let regions = &mut self.regions;
        let totals = regions.total.as_chunks_mut().0.iter_mut();
        let parts = regions.part.as_chunks().0.iter();
        let totals = totals.zip(regions.total_out.chunks_exact_mut(self.stride));
        let parts = parts.zip(regions.part_out.chunks_exact(self.stride));
        for ((total, total_out), (part, part_out)) in totals.zip(parts) {
            let mut head = read_head(total);
            merge(s, &mut head, total_out, read_head(part), part_out);
            write_head(total, head);
        }
    }

    /// Divides, adds sinks, and writes the item's rows to the output.
    #[inline(always)]
    fn answer<S: Simd>(&mut self, s: S, output: &mut Output<'_>) {
        let width = self.shape.kv().v_width();
        let rows = self.rows();
        let totals = self.regions.total.as_chunks().0.iter();
        for (index, (total, out)) in
            totals.zip(self.regions.total_out.chunks_exact(self.stride)).enumerate()
        {
            let (query, query_head) = self.line(index / rows, index % rows);
            let place = query * self.shape.n_heads() + query_head;
            let sink = self.options.sinks.map(|sinks| *cut::one(sinks, query_head));
            let answer = cut::part_mut(output.out, place * width, width);
            let sum = finish(s, read_head(total), out, sink, answer);
            if let Some(lse) = &mut output.lse {
                *cut::one_mut(lse, place) = sum;
            }
        }
    }
}

/// The `MR` query rows that stand one after the other in `q`.
#[inline(always)]
fn rows_of<const MR: usize>(q: &[f32], width: usize) -> [&[f32]; MR] {
    let mut rows = [q; MR];
    for (line, row) in rows.iter_mut().enumerate() {
        *row = cut::part(q, line * width, width);
    }
    rows
}

/// Which rows of a group are done together, and over which positions.
#[derive(Clone, Copy)]
struct Taken {
    /// The group's first row in the item.
    first: usize,
    /// The first row that is done, counted in the group.
    line: usize,
    lines: usize,
    extent: Extent,
}

/// [`Weights`], before the number of rows is known to the compiler.
#[derive(Clone, Copy)]
struct Rows<'w> {
    scores: &'w [ScoreRow],
    shrink: &'w [f32],
    extent: Extent,
}

#[inline(always)]
fn weigh<'a, S: Simd, E: Element, const MR: usize>(
    s: S,
    rows: Rows<'_>,
    spans: Spans<'_, 'a, E>,
    out: &mut Outputs<'_>,
) {
    if let (Some(scores), Some(shrink)) = (rows.scores.first_chunk(), rows.shrink.first_chunk()) {
        let weights = Weights::<MR> { rows: scores, shrink, extent: rows.extent };
        values::<S, E, MR>(s, weights, spans, out);
    }
}

/// The spans of a softmax tile, in the order of positions.
#[derive(Clone, Copy)]
struct Spans<'v, 'a, E: Element> {
    view: &'v KvView<'a, E>,
    head: usize,
    /// Block and row in it of the next position.
    block: usize,
    row: usize,
    left: Extent,
}

impl<'v, 'a, E: Element> Spans<'v, 'a, E> {
    #[inline(always)]
    fn new(view: &'v KvView<'a, E>, head: usize, start: usize, extent: Extent) -> Self {
        let block_size = view.layout().shape().block_size();
        let position = start + extent.from;
        let (block, row) = (position / block_size, position % block_size);
        Spans { view, head, block, row, left: extent }
    }
}

impl<'a, E: Element> Iterator for Spans<'_, 'a, E> {
    type Item = Span<'a, E>;

    #[inline(always)]
    fn next(&mut self) -> Option<Span<'a, E>> {
        if self.left.is_empty() {
            return None;
        }
        let layout = self.view.layout();
        let block_size = layout.shape().block_size();
        let panel_end = (self.row / PANEL * PANEL + PANEL).min(block_size);
        let len = (panel_end - self.row).min(self.left.to - self.left.from);
        let cells = layout.tile(self.view.block(self.block), self.head);
        let span = Span { cells, layout, row: self.row, at: self.left.from, len };
        self.left.from += len;
        self.row += len;
        if self.row == block_size {
            self.block += 1;
            self.row = 0;
        }
        Some(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::KvShape;

    #[test]
    fn scratch_for_many_rows_is_enough_for_fewer() {
        for (n_heads, n_kv_heads, width) in
            [(32, 8, 128), (128, 128, 128), (9, 3, 64), (8, 8, 8), (100, 2, 8), (1, 1, 1)]
        {
            let kv = KvShape::square(16, n_kv_heads, width).unwrap();
            let shape = GqaShape::new(kv, n_heads).unwrap();
            let mut most = attention_scratch_len(&shape, 0);
            for n_q in (1..300).chain([512, 10_000, usize::MAX]) {
                let len = attention_scratch_len(&shape, n_q);
                assert!(len >= most, "{n_heads}/{n_kv_heads} heads, {n_q} rows");
                assert!(len >= scratch_needed(&shape, n_q));
                most = len;
            }
            // An item has at most 256 rows, or one for each head, or 96 of one KV head.
            let rows = 256.max(n_heads).max(96.max(shape.group()));
            assert!(most <= 1024 + rows * (width + 2 * width.next_multiple_of(16) + 4));
        }
    }
}
