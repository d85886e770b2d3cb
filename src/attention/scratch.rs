//! What an item works in: its scratch, cut into regions, and the states that it leaves there.

use bytemuck::must_cast_slice_mut;

use super::arithmetic::Arithmetic;
use super::options::Resolved;
use super::output::Output;
use super::task::{Item, Task};
use crate::cut;
use crate::element::Element;
use crate::element::tile::{LINE, groups};
use crate::kernel::state::{Head, finish, log_sum_exp, merge};
use crate::kernel::{ScoreRow, WIDTH};
use crate::shape::GqaShape;
use crate::simd::{Kernel, LANES, MOST_ROWS, Simd};

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

    #[inline(always)]
    pub(crate) fn head(&self, row: usize) -> Head {
        let [max, denom] = *cut::one(self.heads, row);
        Head { max, denom }
    }

    #[inline(always)]
    pub(crate) fn out(&self, row: usize) -> &'a [f32] {
        cut::part(self.outs, row * self.stride, self.stride)
    }
}

/// What an item's steps read and do not change, cut from its scratch.
pub(super) struct Inputs<'a> {
    /// Scaled query rows.
    pub(super) q: &'a mut [f32],
    /// The same, rounded and packed for a dot product; empty where there is none.
    pub(super) packed: &'a mut [u32],
    /// The scales of a head's tile: a row for each group of the key's width, then of the value's.
    pub(super) scales: &'a mut [ScoreRow],
    /// A head's tile, unpacked.
    pub(super) keys: &'a mut [u32],
    pub(super) values: &'a mut [u32],
}

/// What an item's steps change, cut from its scratch.
pub(super) struct Regions<'a> {
    pub(super) stride: usize,
    /// The states that tiles are added to: of the split at hand, or the totals where there is one
    /// split. Heads of `MOST_ROWS` rows more stand behind them.
    pub(super) heads: &'a mut [[f32; 2]],
    pub(super) outs: &'a mut [f32],
    /// The totals over all splits, where there are more; empty where there is one.
    pub(super) total_heads: &'a mut [[f32; 2]],
    pub(super) total_outs: &'a mut [f32],
    pub(super) scores: &'a mut [ScoreRow],
    /// What becomes of weights before they meet values.
    pub(super) factors: &'a mut [ScoreRow],
}

impl<'a> Regions<'a> {
    /// Cuts, and clears what has to be: nothing that the scratch held before shows in a result.
    pub(super) fn new<E: Element>(
        scratch: &'a mut [f32],
        shape: &GqaShape,
        item: &Item,
        arithmetic: Arithmetic,
    ) -> (Self, Inputs<'a>) {
        let rows = item.rows(shape);
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
    pub(super) fn open_split(&mut self) {
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
    // A vector of them is read and written at once, from the last row on, too.
    let (heads, rest) = cut::split(rest, (rows + MOST_ROWS) * 2);
    (outs, heads.as_chunks_mut().0, rest)
}

/// Merges the states of a split into the totals.
pub(super) struct CloseSplit<'c> {
    pub(super) stride: usize,
    pub(super) heads: &'c [[f32; 2]],
    pub(super) outs: &'c [f32],
    pub(super) total_heads: &'c mut [[f32; 2]],
    pub(super) total_outs: &'c mut [f32],
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
        let states = States::of(scratch, item.rows(shape), width);
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
