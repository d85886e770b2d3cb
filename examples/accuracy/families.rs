//! Inputs that an error is measured over: ordinary ones, and such as are hard on `f32`.
//!
//! All are drawn from seeds by integers and exact conversions, so that the figures are the same on
//! every machine. No option is set: what is hard here is in the numbers.

use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Sizes};

/// Attention calls of one kind.
#[derive(Debug)]
pub(crate) struct Family {
    /// The head of its column.
    pub(crate) name: &'static str,
    pub(crate) cases: Vec<Case>,
}

/// The five that need no file, in the order of the columns.
pub(crate) fn made_up() -> Vec<Family> {
    vec![
        Family { name: "unit variance", cases: unit_variance() },
        Family { name: "huge logits", cases: huge_logits() },
        Family { name: "dominant key", cases: dominant_key() },
        Family { name: "32k context", cases: long_context() },
        Family { name: "alternating signs", cases: alternating_signs() },
    ]
}

fn sizes(n_kv_heads: usize, group: usize, width: usize, n_q: usize, len: usize) -> Sizes {
    Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len }
}

/// Four draws of some sizes, each changed in some way.
fn drawn(sizes: &[Sizes], change: impl Fn(&mut Case, &mut Numbers)) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, sizes) in sizes.iter().enumerate() {
        for draw in 0..4 {
            let seed = (10 * index + draw) as u64;
            let mut case = Case::random(*sizes, 0, 500 + seed);
            change(&mut case, &mut Numbers::new(900 + seed));
            cases.push(case);
        }
    }
    cases
}

/// Normal numbers: decode at widths 64, 128 and 256, a few rows, a chunk of a prompt.
fn unit_variance() -> Vec<Case> {
    let sizes = [
        sizes(2, 4, 128, 1, 1000),
        sizes(3, 3, 64, 4, 600),
        sizes(1, 2, 256, 1, 300),
        sizes(1, 2, 64, 64, 256),
    ];
    drawn(&sizes, |_, _| ())
}

/// Every score is near 700, by a vector that all keys have in common, as learned biases make them;
/// what tells keys apart are the last few digits of that. In half of the draws scores have a
/// deviation of 128 around zero instead, and the softmax is nearly a choice.
fn huge_logits() -> Vec<Case> {
    let mut far = false;
    let mut cases = drawn(&[sizes(1, 1, 128, 1, 1000), sizes(1, 1, 64, 4, 600)], |_, _| ());
    for (index, case) in cases.iter_mut().enumerate() {
        far = !far;
        let width = case.sizes.k_width;
        if far {
            let common = Numbers::new(700 + index as u64).normals(width);
            // 64 / sqrt(width) x |common|^2, which is about the width: 724 and 512.
            add(&mut case.k, &common, 16.0);
            case.q.iter_mut().for_each(|number| *number *= 0.25);
            add(&mut case.q, &common, 4.0);
        } else {
            case.q.iter_mut().for_each(|number| *number *= 128.0);
        }
    }
    cases
}

/// Adds a multiple of a row to every row.
fn add(rows: &mut [f32], row: &[f32], times: f32) {
    for numbers in rows.chunks_mut(row.len()) {
        numbers.iter_mut().zip(row).for_each(|(number, more)| *number += times * more);
    }
}

/// One key in some place is the query itself, or four times the query. At width 128 the first takes
/// almost all of the weight and leaves about a fiftieth, the second leaves nothing.
fn dominant_key() -> Vec<Case> {
    let mut cases = Vec::new();
    for times in [1.0, 4.0] {
        for sizes in [sizes(1, 1, 128, 1, 1000), sizes(1, 1, 64, 1, 600)] {
            cases.extend(drawn(&[sizes], |case, numbers| {
                let width = case.sizes.k_width;
                let at = numbers.below(case.sizes.len);
                let key = &mut case.k[at * width..][..width];
                key.iter_mut().zip(&case.q).for_each(|(number, query)| *number = times * query);
            }));
        }
    }
    cases
}

/// 32,768 positions; in half of the draws the query is so small that all count alike.
fn long_context() -> Vec<Case> {
    let mut cases = drawn(&[sizes(1, 2, 64, 1, 32_768)], |_, _| ());
    for case in cases.iter_mut().step_by(2) {
        case.q.iter_mut().for_each(|number| *number /= 64.0);
    }
    cases
}

/// Sums whose terms cancel: the products of a score are about 16, up and down from one column to the
/// next; values are about 1, up and down from one position to the next.
fn alternating_signs() -> Vec<Case> {
    let sign = |at: usize| if at.is_multiple_of(2) { 1.0 } else { -1.0 };
    drawn(&[sizes(1, 2, 128, 1, 1000), sizes(1, 3, 64, 4, 600)], |case, _| {
        let width = case.sizes.k_width;
        case.q.iter_mut().for_each(|number| *number = 0.25 * *number + 4.0);
        for key in case.k.chunks_mut(width) {
            key.iter_mut().enumerate().for_each(|(at, number)| *number += 4.0 * sign(at));
        }
        for (at, value) in case.v.chunks_mut(width).enumerate() {
            value.iter_mut().for_each(|number| *number = sign(at) * (1.0 + *number / 64.0));
        }
    })
}
