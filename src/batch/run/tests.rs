//! That states of several items really are merged, looked at from inside.

use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::batch::SequenceRows;
use crate::internal::numbers::Numbers;
use crate::shape::{GqaShape, KvShape};

/// Each of the items of a row matters: without its states, its rows change and no others do.
#[test]
fn every_state_counts() {
    let kv = KvShape::square(16, 2, 128).unwrap();
    let shape = GqaShape::new(kv, 4).unwrap();
    let mut numbers = Numbers::new(3);
    let mut store = PagedKvStore::<f32>::with_shape(kv, 200).unwrap();
    let mut sequences = Vec::new();
    let mut caches = Vec::new();
    for (len, rows) in [(1300, 1), (40, 2), (600, 20)] {
        let mut cache = PagedKvCache::new();
        let row = kv.k_row_len();
        cache
            .append(&mut store, &numbers.normals(len * row), &numbers.normals(len * row), len)
            .unwrap();
        caches.push(cache);
        sequences.push(SequenceRows { len, rows });
    }
    let plan = BatchPlan::new(shape, &sequences).unwrap();
    let parts: Vec<_> = (0..3)
        .map(|sequence| plan.cell(plan.rows(sequence).start * shape.n_heads()).parts.len())
        .collect();
    assert_eq!(parts, [3, 1, 1]);

    let q = numbers.normals(plan.q_len());
    let options = AttentionOptions::new().resolve(&shape).unwrap();
    let caches: Vec<_> = caches.iter().collect();
    let (store, places) = (&store, &plan.places);
    let members = Members::Batch { store, caches: &caches, places };
    let task = Task { shape, options, q: &q, members };
    let mut scratch = vec![f32::NAN; plan.scratch_len()];
    plan.leave_states(&task, &mut scratch, &Inline);
    let answer = |scratch: &[f32]| {
        let mut out = vec![f32::NAN; plan.out_len()];
        plan.answer(&task.options, scratch, Output::new(&mut out), &Inline);
        out
    };
    let whole = answer(&scratch);
    assert!(whole.iter().all(|number| number.is_finite()));
    for (number, item) in plan.items.iter().enumerate() {
        // States of another maximum, denominator and output.
        // In place: where states begin depends on the memory's address.
        let states = plan.starts[number]..plan.starts[number] + item.states_len(&shape);
        let before = scratch[states.clone()].to_vec();
        scratch[states.clone()].fill(2.0);
        let part = answer(&scratch);
        scratch[states].copy_from_slice(&before);
        let mut changed = 0;
        for cell in 0..plan.lse_len() {
            let of = |out: &[f32]| out[cell * 128..][..128].to_vec();
            let has = plan.cell(cell).parts.contains(&(number as u32));
            assert_eq!(of(&whole) != of(&part), has, "item {number}, row {cell}");
            changed += usize::from(has);
        }
        assert_eq!(changed, item.rows(&shape));
    }
}
