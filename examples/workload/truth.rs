//! Attention by its formula in double precision, for some of a workload's rows.
//!
//! Not the oracle of the test kit: that one calls no mathematics library and computes every row,
//! which for a prompt of 2048 rows takes minutes. This one calls nothing of the crate either.

use std::thread;

use paged_kv::internal::workloads::Workload;

use super::report::Distance;

/// Rows of a sequence that are compared. A longer prompt is compared at so many, evenly spread
/// from its first row to its last, with all their heads.
const ROWS: usize = 24;

/// What some rows of a workload are.
#[derive(Debug)]
pub(crate) struct Truth {
    workload: Workload,
    rows: Vec<Row>,
    /// `[rows][n_heads][v_width]`.
    out: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    sequence: usize,
    query: usize,
}

impl Truth {
    /// For the keys and values as they are handed in, or as a store has rounded them.
    pub(crate) fn new(workload: &Workload, q: &[f32], k: &[f32], v: &[f32]) -> Truth {
        let n_q = workload.sizes.n_q;
        let checked = n_q.min(ROWS);
        let query = |index| if checked == 1 { n_q - 1 } else { index * (n_q - 1) / (checked - 1) };
        let rows: Vec<Row> = (0..workload.batch)
            .flat_map(|sequence| {
                (0..checked).map(move |index| Row { sequence, query: query(index) })
            })
            .collect();
        let row_len = workload.sizes.n_heads() * workload.sizes.v_width;
        let mut out = vec![0.0; rows.len() * row_len];
        let share = rows.len().div_ceil(thread::available_parallelism().map_or(1, usize::from));
        thread::scope(|scope| {
            for (rows, out) in rows.chunks(share).zip(out.chunks_mut(share * row_len)) {
                scope.spawn(move || {
                    for (row, out) in rows.iter().zip(out.chunks_mut(row_len)) {
                        attend(workload, *row, [q, k, v], out);
                    }
                });
            }
        });
        Truth { workload: *workload, rows, out }
    }

    /// How far an answer `[batch][n_q][n_heads][v_width]` is from the truth at most, over the rows
    /// that are compared. Infinite where it holds a NaN.
    pub(crate) fn distance(&self, answer: &[f32]) -> Distance {
        let sizes = &self.workload.sizes;
        let row_len = sizes.n_heads() * sizes.v_width;
        let mut most = 0.0f64;
        for (row, want) in self.rows.iter().zip(self.out.chunks(row_len)) {
            let have = &answer[(row.sequence * sizes.n_q + row.query) * row_len..][..row_len];
            for (have, want) in have.iter().zip(want) {
                let off = (f64::from(*have) - want).abs();
                most = if off.is_nan() { f64::INFINITY } else { most.max(off) };
            }
        }
        Distance(most)
    }
}

/// One query row, all heads.
fn attend(workload: &Workload, row: Row, [q, k, v]: [&[f32]; 3], out: &mut [f64]) {
    let sizes = &workload.sizes;
    let (n_heads, k_width, v_width) = (sizes.n_heads(), sizes.k_width, sizes.v_width);
    let seen = sizes.len - sizes.n_q + row.query + 1;
    let scale = 1.0 / (k_width as f64).sqrt();
    for (head, out) in out.chunks_mut(v_width).enumerate() {
        let query = (row.sequence * sizes.n_q + row.query) * n_heads + head;
        let query = &q[query * k_width..][..k_width];
        let kv_row = |position| {
            (row.sequence * sizes.len + position) * sizes.n_kv_heads + head / sizes.group
        };
        let mut weights: Vec<f64> = (0..seen)
            .map(|position| {
                let key = &k[kv_row(position) * k_width..][..k_width];
                scale
                    * query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            })
            .collect();
        let most = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
        let sum: f64 = weights.iter().sum();
        out.fill(0.0);
        for (position, weight) in weights.iter().enumerate() {
            let value = &v[kv_row(position) * v_width..][..v_width];
            for (out, number) in out.iter_mut().zip(value) {
                *out += weight / sum * f64::from(*number);
            }
        }
    }
}
