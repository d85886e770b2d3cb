//! Plans, looked at and not run.

use alloc::string::String;

use super::*;
use crate::internal::numbers::Numbers;
use crate::kernel::TILE;
use crate::shape::{KvDims, KvShape};

fn shape(n_heads: usize, n_kv_heads: usize, width: usize) -> GqaShape {
    GqaShape::new(KvShape::square(64, n_kv_heads, width).unwrap(), n_heads).unwrap()
}

fn decode(lens: &[usize]) -> Vec<SequenceRows> {
    lens.iter().map(|len| SequenceRows { len: *len, rows: 1 }).collect()
}

fn prefix(sequences: &[usize], positions: usize) -> SharedPrefix {
    SharedPrefix { sequences: sequences.to_vec(), positions }
}

/// Sequences, heads, rows, positions and joint positions of each item.
fn drawn(plan: &BatchPlan) -> Vec<String> {
    let draw = |item: &Item| {
        let Item { sequences, heads, rows, positions, joint } = item;
        alloc::format!("{sequences:?} h{heads:?} r{rows:?} p{positions:?} j{joint}")
    };
    plan.items.iter().map(draw).collect()
}

#[test]
fn decode_is_cut_along_positions_and_heads() {
    // 512 x 256 numbers are 2^17 a head: two heads an item. 1100 = 2 x 512 + 76.
    let plan = BatchPlan::new(shape(16, 4, 128), &decode(&[1100])).unwrap();
    assert_eq!(
        drawn(&plan),
        [
            "0..1 h0..2 r0..1 p0..512 j0",
            "0..1 h2..4 r0..1 p0..512 j0",
            "0..1 h0..2 r0..1 p512..1024 j0",
            "0..1 h2..4 r0..1 p512..1024 j0",
            "0..1 h0..4 r0..1 p1024..1100 j0",
        ]
    );
    assert_eq!(plan.chunks, [0, 1, 2, 3, 4, 5]);
    assert_eq!(plan.parts, [0, 2, 4, 0, 2, 4, 1, 3, 4, 1, 3, 4]);
    assert!(!plan.runs_inline());
}

#[test]
fn a_prompt_is_cut_along_rows_and_heads() {
    // Rows of 4 heads: 24 of them are 96. The last ones see most.
    let plan = BatchPlan::new(shape(8, 2, 16), &[SequenceRows { len: 700, rows: 50 }]).unwrap();
    assert_eq!(
        drawn(&plan),
        [
            "0..1 h0..1 r24..48 p0..700 j0",
            "0..1 h1..2 r24..48 p0..700 j0",
            "0..1 h0..1 r0..24 p0..700 j0",
            "0..1 h1..2 r0..24 p0..700 j0",
            "0..1 h0..1 r48..50 p0..700 j0",
            "0..1 h1..2 r48..50 p0..700 j0",
        ]
    );
    assert_eq!(plan.parts, [2, 3, 0, 1, 4, 5]);
}

#[test]
fn light_items_share_a_chunk() {
    // 30 x 64 numbers of one position for each of 40 sequences: far below a chunk's worth.
    let plan = BatchPlan::new(shape(2, 1, 32), &decode(&[30; 40])).unwrap();
    assert_eq!(plan.items.len(), 40);
    assert!(plan.runs_inline());
    // 40 items' states do not fit beside one item's memory to work in twice over.
    let item = plan.items[0].scratch_len(&plan.shape);
    let states = plan.items[0].states_len(&plan.shape);
    assert!(plan.chunk_len <= (2 * item).next_multiple_of(LANES));
    assert!(plan.chunks.len() - 1 <= (40 * states).div_ceil(item) + 1);
    assert_eq!(plan.starts[1], states);
}

#[test]
fn what_is_shared_is_done_together() {
    let sequences = decode(&[1300, 900, 1200, 1250]);
    let plan =
        BatchPlan::with_shared(shape(1, 1, 128), &sequences, &[prefix(&[3, 0, 2], 800)]).unwrap();
    // 800 is 768 of whole tiles; in the second split 256 shared ones are not read again twice, and
    // each sequence has another 256 of its own: they go apart there.
    assert_eq!(plan.joints, [Joint { places: 0..3, positions: 512 }]);
    let order: Vec<_> = plan.places.iter().map(|place| place.index).collect();
    assert_eq!(order, [0, 2, 3, 1]);
    assert_eq!(drawn(&plan)[0], "0..3 h0..1 r0..1 p0..512 j512");
    assert_eq!(plan.items.len(), 1 + 2 * 3 + 2);

    let plan = BatchPlan::with_shared(shape(1, 1, 128), &sequences, &[prefix(&[3, 0, 2], 1000)]);
    let plan = plan.unwrap();
    assert_eq!(plan.joints, [Joint { places: 0..3, positions: 960 }]);
    assert!(drawn(&plan).contains(&"0..3 h0..1 r0..1 p512..1024 j960".into()));
    assert_eq!(plan.items.len(), 2 + 3 + 2);
}

/// Sharing that gains nothing makes the same plan as none.
#[test]
fn what_gains_nothing_is_left_out() {
    let shape = shape(8, 2, 16);
    let rows = |rows: [usize; 3]| rows.map(|rows| SequenceRows { len: 600, rows });
    for (sequences, shared) in [
        (rows([1, 1, 1]), prefix(&[0, 1, 2], 63)), // less than a tile
        (rows([1, 1, 1]), prefix(&[1], 600)),      // alone
        (rows([1, 2, 3]), prefix(&[0, 1, 2], 600)), // no two have as many rows
        (rows([40, 40, 40]), prefix(&[0, 1], 600)), // rows enough to fill a register tile
        (rows([1, 0, 0]), prefix(&[0, 1, 2], 600)), // two ask nothing
        (rows([1, 1, 1]), prefix(&[0, 1], 128)),   // far more of their own in that split
    ] {
        let plan = BatchPlan::with_shared(shape, &sequences, &[shared]).unwrap();
        assert_eq!(plan, BatchPlan::new(shape, &sequences).unwrap());
    }
}

#[test]
fn a_crowd_is_cut_into_even_parts() {
    let plan = BatchPlan::with_shared(
        shape(8, 1, 16),
        &decode(&[600; 25]),
        &[prefix(&Vec::from_iter(0..25), 512)],
    );
    let places: Vec<_> = plan.unwrap().joints.into_iter().map(|joint| joint.places).collect();
    assert_eq!(places, [0..8, 8..16, 16..25]);
}

#[test]
fn prefixes_that_cannot_be_are_refused() {
    let plan = |shared: &[SharedPrefix]| {
        BatchPlan::with_shared(shape(4, 2, 16), &decode(&[100, 70, 0]), shared).err()
    };
    assert_eq!(
        plan(&[prefix(&[0, 3], 64)]),
        Some(BatchError::NoSequence { sequence: 3, sequences: 3 })
    );
    assert_eq!(plan(&[prefix(&[1, 1], 64)]), Some(BatchError::SharedTwice { sequence: 1 }));
    assert_eq!(
        plan(&[prefix(&[0, 1], 64), prefix(&[1, 2], 0)]),
        Some(BatchError::SharedTwice { sequence: 1 })
    );
    assert_eq!(
        plan(&[prefix(&[0, 1], 71)]),
        Some(BatchError::SharedTooLong { sequence: 1, positions: 71, len: 70 })
    );
}

#[test]
fn what_no_memory_holds_is_refused() {
    let shape = shape(32, 8, 128);
    let too_large = |what| Some(BatchError::TooLarge { what });
    let plan = |len, rows| BatchPlan::new(shape, &[SequenceRows { len, rows }; 2]).err();
    assert_eq!(plan(usize::MAX, 1), too_large("positions"));
    assert_eq!(plan(1, usize::MAX), too_large("query rows"));
    assert_eq!(plan(1, usize::MAX / 2 + 1), too_large("query rows"));
    // Arrays that an address could reach, and more items than memory has room for.
    let many = MOST_ITEMS * 512;
    let small = GqaShape::new(KvShape::square(16, 1, 1).unwrap(), 1).unwrap();
    let plan = |len, rows| BatchPlan::new(small, &[SequenceRows { len, rows }]).err();
    assert_eq!((plan(many + 1, 1), plan(many + 1, 0)), (too_large("items"), None));
    assert_eq!(plan(0, many / 4), too_large("items"));
}

#[test]
fn nothing_at_all_is_a_plan() {
    for sequences in [vec![], vec![SequenceRows { len: 70, rows: 0 }; 3]] {
        let plan = BatchPlan::new(shape(8, 2, 16), &sequences).unwrap();
        assert_eq!((plan.scratch_len(), plan.out_len(), plan.items.len()), (0, 0, 0));
        assert!(plan.runs_inline());
    }
}

/// Random shapes, lengths, rows and prefixes.
fn random(numbers: &mut Numbers) -> (GqaShape, Vec<SequenceRows>, Vec<SharedPrefix>) {
    let kv = KvShape::new(KvDims {
        block_size: 16,
        n_kv_heads: numbers.between(1, 5),
        k_width: numbers.pick(&[1, 24, 128, 300]),
        v_width: numbers.pick(&[1, 40, 128]),
    });
    let kv = kv.unwrap();
    let shape = GqaShape::new(kv, kv.n_kv_heads() * numbers.between(1, 20)).unwrap();
    let sequences: Vec<_> = (0..numbers.between(1, 30))
        .map(|_| SequenceRows {
            len: numbers.below(3) * 700 + numbers.below(200),
            rows: numbers.pick(&[0, 1, 1, 1, 2, 5, 130]),
        })
        .collect();
    let mut order = Vec::from_iter(0..sequences.len());
    numbers.shuffle(&mut order);
    let mut shared = Vec::new();
    while !order.is_empty() {
        let some = order.split_off(order.len().saturating_sub(numbers.between(1, 12)));
        let shortest = some.iter().map(|place| sequences[*place].len).min().unwrap();
        shared.push(SharedPrefix { positions: numbers.between(0, shortest), sequences: some });
    }
    (shape, sequences, shared)
}

/// Each row of each head has each position once; states stand where nobody else writes; splits are
/// in order.
#[test]
fn every_row_sees_every_position_once() {
    let mut numbers = Numbers::new(5);
    let (mut joined, mut several) = (0, 0);
    for _ in 0..500 {
        let (shape, sequences, shared) = random(&mut numbers);
        let plan = BatchPlan::with_shared(shape, &sequences, &shared).unwrap();
        joined += plan.joints.len();
        for (sequence, rows) in sequences.iter().enumerate() {
            for row in plan.rows(sequence) {
                for head in 0..shape.n_heads() {
                    let cell = plan.cell(row * shape.n_heads() + head);
                    several += usize::from(cell.parts.len() > 1);
                    let mut seen = 0;
                    for (at, number) in cell.parts.iter().enumerate() {
                        let item = &plan.items[*number as usize];
                        assert!(item.heads.contains(&(head / shape.group())));
                        assert!(item.rows.contains(&(row - plan.rows(sequence).start)));
                        let mut members = plan.places[item.sequences.clone()].iter();
                        assert!(members.any(|place| place.index == sequence));
                        assert!(plan.state_in(item, &cell) < item.rows(&shape));
                        assert_eq!(item.positions.start, seen);
                        // A state over more than one split is only whole if it is all of them.
                        assert!(!item.merges() || at == 0);
                        assert!(item.joint.is_multiple_of(TILE));
                        seen = item.positions.end;
                        assert!(seen.is_multiple_of(SPLIT) || seen >= rows.len);
                    }
                    assert!(seen >= rows.len, "all of the positions");
                }
            }
        }
        check_scratch(&plan);
    }
    assert!(joined > 50 && several > 10_000, "{joined} {several}");
}

fn check_scratch(plan: &BatchPlan) {
    let chunks = plan.chunks.len() - 1;
    assert_eq!(plan.chunks.last(), Some(&plan.items.len()));
    let mut end = 0;
    for chunk in 0..chunks {
        let items = plan.chunks[chunk]..plan.chunks[chunk + 1];
        assert!(!items.is_empty());
        end = end.max(chunk * plan.chunk_len);
        for number in items {
            let (item, start) = (&plan.items[number], plan.starts[number]);
            assert!(start >= end, "what was left before is not written over");
            assert!(start + item.scratch_len(&plan.shape) <= (chunk + 1) * plan.chunk_len);
            end = start + item.states_len(&plan.shape);
        }
    }
    let costs: Vec<_> = plan.items.iter().map(|item| plan.cost_of(item)).collect();
    assert!(costs.is_sorted_by(|one, next| one >= next), "heavy ones first");
    assert_eq!(costs.iter().sum::<u64>(), plan.cost);
    // What the module's documentation says about memory.
    let most = plan.items.iter().map(|item| item.scratch_len(&plan.shape)).max().unwrap_or(0);
    let states: usize = plan.items.iter().map(|item| item.states_len(&plan.shape)).sum();
    assert!(plan.scratch_len() <= 257 * (2 * most + LANES) + 2 * states + 2 * most);
}

/// A plan is a function of what it is made from, and who is named first in a prefix is no part of
/// that.
#[test]
fn the_same_facts_make_the_same_plan() {
    let mut numbers = Numbers::new(6);
    for _ in 0..50 {
        let (shape, sequences, mut shared) = random(&mut numbers);
        let plan = BatchPlan::with_shared(shape, &sequences, &shared).unwrap();
        for prefix in &mut shared {
            numbers.shuffle(&mut prefix.sequences);
        }
        assert_eq!(plan, BatchPlan::with_shared(shape, &sequences, &shared).unwrap());
    }
}
