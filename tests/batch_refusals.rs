//! What a plan refuses to run on, and that nothing was touched when it did.
//!
//! A plan is made once and used for many layers, so what it counts on is asked of each of them: a
//! table that is a block too short, or not shared where the plan says so, would be read as another
//! conversation's tokens.

use paged_kv::attention::{AttentionOptions, Output};
use paged_kv::batch::{
    BatchError, BatchLayer, BatchPlan, Inline, SequenceRows, SharedPrefix, shared_prefixes,
};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::doors::Guarded;
use paged_kv::{AttentionError, GqaShape, KvShape};

/// Two KV heads of width 4 and four query heads; three sequences, of which the first and the last
/// share 128 positions.
struct World {
    store: PagedKvStore,
    caches: Vec<PagedKvCache>,
    plan: BatchPlan,
}

/// What a call is given; the right lengths unless a test says otherwise.
#[derive(Clone, Copy)]
struct Lengths {
    q: usize,
    out: usize,
    lse: usize,
    scratch: usize,
}

fn kv() -> KvShape {
    KvShape::square(16, 2, 4).unwrap()
}

fn append(store: &mut PagedKvStore, cache: &mut PagedKvCache, n: usize) {
    cache.append(store, &vec![0.5; n * 8], &vec![2.0; n * 8], n).unwrap();
}

impl World {
    fn new() -> World {
        let mut store = PagedKvStore::with_shape(kv(), 64).unwrap();
        let mut caches = vec![PagedKvCache::new(), PagedKvCache::new()];
        append(&mut store, &mut caches[0], 128);
        append(&mut store, &mut caches[1], 70);
        let mut fork = caches[0].fork(&mut store).unwrap();
        append(&mut store, &mut fork, 1);
        caches.push(fork);
        let shape = GqaShape::new(kv(), 4).unwrap();
        let lens = [(128, 1), (70, 3), (129, 1)];
        let sequences = lens.map(|(len, rows)| SequenceRows { len, rows });
        let shared = shared_prefixes(16, &caches.iter().collect::<Vec<_>>());
        assert_eq!(shared, [SharedPrefix { sequences: vec![0, 2], positions: 128 }]);
        let plan = BatchPlan::with_shared(shape, &sequences, &shared).unwrap();
        assert_ne!(plan, BatchPlan::new(shape, &sequences).unwrap(), "sharing counts");
        World { store, caches, plan }
    }

    fn right(&self) -> Lengths {
        let plan = &self.plan;
        let (q, out, lse) = (plan.q_len(), plan.out_len(), plan.lse_len());
        Lengths { q, out, lse, scratch: plan.scratch_len() }
    }

    /// On an error nothing was written.
    fn ask(&self, lengths: Lengths, options: &AttentionOptions<'_>) -> Result<(), BatchError> {
        let q = vec![0.5; lengths.q];
        let mut out = Guarded::dirty(lengths.out, 0);
        let mut lse = Guarded::dirty(lengths.lse, 0);
        let mut scratch = Guarded::dirty(lengths.scratch, 0);
        let output = Output::new(out.inside()).lse(lse.inside());
        let sequences: Vec<_> = self.caches.iter().collect();
        let layer = BatchLayer { store: &self.store, sequences: &sequences, q: &q };
        let result = self.plan.attend(&layer, options, output, scratch.inside(), &Inline);
        let clean = [out, lse, scratch]
            .map(|memory| memory.into_inside("refused").iter().all(|x| x.is_nan()));
        assert!(result.is_ok() || clean == [true; 3], "a refusal wrote something: {clean:?}");
        result
    }

    fn ask_plainly(&self) -> Result<(), BatchError> {
        self.ask(self.right(), &AttentionOptions::new())
    }
}

#[test]
fn what_is_right_is_done() {
    let world = World::new();
    assert_eq!(world.ask_plainly(), Ok(()));
    let more = Lengths { scratch: world.right().scratch + 100, ..world.right() };
    assert_eq!(world.ask(more, &AttentionOptions::new().query_rows(5)), Ok(()));
}

#[test]
fn lengths_that_do_not_fit() {
    let world = World::new();
    let right = world.right();
    let ask = |lengths| world.ask(lengths, &AttentionOptions::new()).unwrap_err();
    for off in [-1_isize, 1] {
        let wrong = |right: usize| right.wrapping_add_signed(off);
        let (need, have) = (right.q, wrong(right.q));
        assert_eq!(ask(Lengths { q: have, ..right }), BatchError::QueryLength { need, have });
        let (need, have) = (right.out, wrong(right.out));
        let error = AttentionError::OutLength { need, have };
        assert_eq!(ask(Lengths { out: have, ..right }), BatchError::Attention(error));
        let (need, have) = (right.lse, wrong(right.lse));
        let error = AttentionError::LseLength { need, have };
        assert_eq!(ask(Lengths { lse: have, ..right }), BatchError::Attention(error));
    }
    let (need, have) = (right.scratch, right.scratch - 1);
    let error = AttentionError::ScratchLength { need, have };
    assert_eq!(ask(Lengths { scratch: have, ..right }), BatchError::Attention(error));
}

#[test]
fn options_that_do_not_fit() {
    let world = World::new();
    let ask = |options: AttentionOptions<'_>| world.ask(world.right(), &options).unwrap_err();
    for (what, options) in [
        ("sinks", AttentionOptions::new().sinks(&[0.0; 3])),
        ("alibi_slopes", AttentionOptions::new().alibi_slopes(&[0.0; 3])),
    ] {
        let error = AttentionError::PerHeadLength { what, need: 4, have: 3 };
        assert_eq!(ask(options), BatchError::Attention(error));
    }
    let error = AttentionError::BadOption { what: "soft_cap", have: 0.0 };
    assert_eq!(ask(AttentionOptions::new().soft_cap(0.0)), BatchError::Attention(error));
    let error = AttentionError::QueryRows { need: 4, have: 5 };
    assert_eq!(ask(AttentionOptions::new().query_rows(4)), BatchError::Attention(error));
}

#[test]
fn a_plan_for_something_else() {
    let mut world = World::new();
    let last = world.caches.pop().unwrap();
    assert_eq!(world.ask_plainly(), Err(BatchError::Sequences { need: 3, have: 2 }));
    world.caches.push(last);

    append(&mut world.store, &mut world.caches[1], 1);
    let error = BatchError::Length { sequence: 1, need: 70, have: 71 };
    assert_eq!(world.ask_plainly(), Err(error));
    world.caches[1].truncate(&mut world.store, 69).unwrap();
    let error = BatchError::Length { sequence: 1, need: 70, have: 69 };
    assert_eq!(world.ask_plainly(), Err(error));
    append(&mut world.store, &mut world.caches[1], 1);
    assert_eq!(world.ask_plainly(), Ok(()));

    let mut other = PagedKvStore::with_shape(kv(), 8).unwrap();
    world.caches[1].release(&mut world.store).unwrap();
    append(&mut other, &mut world.caches[1], 70);
    let (need, have) = (other.id(), world.store.id());
    let error = BatchError::WrongStore { sequence: 1, need, have };
    assert_eq!(world.ask_plainly(), Err(error));

    let shape = KvShape::square(16, 2, 5).unwrap();
    world.store = PagedKvStore::with_shape(shape, 8).unwrap();
    assert_eq!(world.ask_plainly(), Err(BatchError::Shape { need: kv(), have: shape }));
}

#[test]
fn a_prefix_that_is_not_shared() {
    let mut world = World::new();
    let mut stranger = PagedKvCache::new();
    append(&mut world.store, &mut stranger, 129);
    world.caches[2] = stranger;
    let error = BatchError::NotShared { sequence: 2, with: 0, block: 0 };
    assert_eq!(world.ask_plainly(), Err(error));
    assert_eq!(error.to_string(), "sequences 0 and 2 do not share entry 0 of their block tables");

    // The first seven blocks, and then its own.
    let mut halfway = PagedKvCache::new();
    let blocks = world.caches[0].block_table()[..7].to_vec();
    halfway.adopt(&mut world.store, &blocks, 7 * 16).unwrap();
    append(&mut world.store, &mut halfway, 17);
    world.caches[2] = halfway;
    let error = BatchError::NotShared { sequence: 2, with: 0, block: 7 };
    assert_eq!(world.ask_plainly(), Err(error));
}

/// A row that stands for no position is refused where options speak of its position, and sees all
/// of the keys where they do not.
#[test]
fn more_rows_than_positions() {
    let shape = GqaShape::new(kv(), 4).unwrap();
    let mut world = World::new();
    let sequences = [(128, 1), (70, 71), (129, 1)].map(|(len, rows)| SequenceRows { len, rows });
    world.plan = BatchPlan::new(shape, &sequences).unwrap();
    let error = BatchError::TooManyQueryRows { sequence: 1, rows: 71, len: 70 };
    assert_eq!(world.ask_plainly(), Err(error));
    assert_eq!(world.ask(world.right(), &AttentionOptions::new().causal(false)), Ok(()));
}

/// No sequences, no rows, no positions.
#[test]
fn nothing_is_attended_as_nothing() {
    let shape = GqaShape::new(kv(), 4).unwrap();
    let mut world = World::new();
    world.caches = vec![PagedKvCache::new(), PagedKvCache::new()];
    let sequences = [SequenceRows { len: 0, rows: 0 }, SequenceRows { len: 0, rows: 2 }];
    world.plan = BatchPlan::new(shape, &sequences).unwrap();
    let (mut out, mut lse) = (vec![f32::NAN; 2 * 16], vec![f32::NAN; 2 * 4]);
    let sequences: Vec<_> = world.caches.iter().collect();
    let layer = BatchLayer { store: &world.store, sequences: &sequences, q: &[0.5; 2 * 16] };
    let mut scratch = vec![f32::NAN; world.plan.scratch_len()];
    let options = AttentionOptions::new().causal(false);
    let output = Output::new(&mut out).lse(&mut lse);
    world.plan.attend(&layer, &options, output, &mut scratch, &Inline).unwrap();
    assert_eq!((out, lse), (vec![0.0; 2 * 16], vec![f32::NEG_INFINITY; 2 * 4]));

    world.plan = BatchPlan::new(shape, &[]).unwrap();
    world.caches.clear();
    assert_eq!(world.ask_plainly(), Ok(()));
}
