//! A batch gives each sequence the bits that it gets alone.
//!
//! Whoever works on it, in whatever order, with whatever beside it, sharing blocks or not. Memory
//! is dirty and stands between canaries, rows that nobody has written are NaN.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use paged_kv::attention::{Output, attention_scratch_len, causal_gqa_attention_paged_into};
#[cfg(feature = "std")]
use paged_kv::batch::ThreadPool;
use paged_kv::batch::{
    BatchLayer, BatchPlan, Executor, Inline, SequenceRows, SharedPrefix, shared_prefixes,
};
use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::doors::{Answer, Guarded, options};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Rules, Sizes};
use paged_kv::internal::types::cases;
use paged_kv::{Element, GqaShape, KvDims, KvShape, Level, every_type};
use proptest::prelude::*;

/// Runs the chunks in a random order, the last one not even in its own place in time.
struct Shuffled(u64);

impl Executor for Shuffled {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let mut chunks: Vec<_> = data.chunks_mut(chunk).enumerate().collect();
        Numbers::new(self.0).shuffle(&mut chunks);
        for (index, chunk) in chunks {
            work(index, chunk);
        }
    }

    fn threads(&self) -> usize {
        1
    }
}

/// Counts the chunks that it hands on.
struct Counted<'a>(&'a dyn Executor, AtomicUsize);

impl Executor for Counted<'_> {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        self.1.fetch_add(data.len().div_ceil(chunk), Ordering::Relaxed);
        self.0.for_each_chunk(data, chunk, work);
    }

    fn threads(&self) -> usize {
        self.0.threads()
    }
}

/// Some sequences in one store, and a query for them.
struct World<E: Element> {
    shape: GqaShape,
    store: PagedKvStore<E>,
    caches: Vec<PagedKvCache>,
    rows: Vec<usize>,
    q: Vec<f32>,
    rules: Rules,
    level: Level,
}

/// How one sequence begins, and what is put behind that.
#[derive(Clone, Copy, Debug)]
struct Plot {
    /// Positions of the common beginning that it starts with.
    shared: usize,
    own: usize,
    rows: usize,
}

fn append<E: Element>(
    store: &mut PagedKvStore<E>,
    cache: &mut PagedKvCache,
    n: usize,
    numbers: &mut Numbers,
) {
    let (k, v) = (store.shape().k_row_len(), store.shape().v_row_len());
    cache
        .append(store, &numbers.normals(n * k), &numbers.normals(n * v), n)
        .expect("there is room");
}

impl<E: Element> World<E> {
    /// `common` positions that sequences may begin with, and the sequences.
    fn new(dims: KvDims, group: usize, common: usize, plots: &[Plot], mask: u8, seed: u64) -> Self {
        let kv = KvShape::new(dims).unwrap();
        let shape = GqaShape::new(kv, dims.n_kv_heads * group).unwrap();
        let mut numbers = Numbers::new(seed);
        let blocks = |positions: usize| kv.blocks_for(positions) + 1;
        let total = plots.iter().map(|plot| blocks(plot.shared + plot.own)).sum::<usize>();
        let mut store = PagedKvStore::with_shape(kv, total + blocks(common)).unwrap();
        store.poison_free();
        let mut beginning = PagedKvCache::new();
        append(&mut store, &mut beginning, common, &mut numbers);
        let mut caches = Vec::new();
        for plot in plots {
            let shared = plot.shared.min(common);
            let mut cache = if numbers.below(2) == 0 {
                let mut fork = beginning.fork(&mut store).unwrap();
                fork.truncate(&mut store, shared).unwrap();
                fork
            } else {
                let mut adopted = PagedKvCache::new();
                let blocks = &beginning.block_table()[..kv.blocks_for(shared)];
                adopted.adopt(&mut store, blocks, shared).unwrap();
                adopted
            };
            append(&mut store, &mut cache, plot.own, &mut numbers);
            caches.push(cache);
        }
        let rows: Vec<_> = plots.iter().map(|plot| plot.rows).collect();
        let q = numbers.normals(rows.iter().sum::<usize>() * shape.q_row_len());
        let (k_width, v_width) = (kv.k_width(), kv.v_width());
        let n_kv_heads = kv.n_kv_heads();
        let sizes = Sizes { n_kv_heads, group, k_width, v_width, n_q: 1, len: 1500 };
        let rules = Rules::some(mask, &sizes, &mut numbers);
        let on_request = ["avx512-bf16", "avx512-vnni"].into_iter().filter_map(Level::from_name);
        let level = numbers.pick(&Level::available().chain(on_request).collect::<Vec<_>>());
        let mut world = World { shape, store, caches, rows, q, rules, level };
        if world.rules.causal || world.rules.window.is_some() || world.rules.alibi_slopes.is_some()
        {
            world.limit_rows();
        }
        world
    }

    /// No more query rows than positions.
    fn limit_rows(&mut self) {
        for (rows, cache) in self.rows.iter_mut().zip(&self.caches) {
            *rows = (*rows).min(cache.seq_len());
        }
        self.q.truncate(self.rows.iter().sum::<usize>() * self.shape.q_row_len());
    }

    fn sequences(&self) -> Vec<SequenceRows> {
        let pairs = self.caches.iter().zip(&self.rows);
        pairs.map(|(cache, rows)| SequenceRows { len: cache.seq_len(), rows: *rows }).collect()
    }

    fn caches(&self) -> Vec<&PagedKvCache> {
        self.caches.iter().collect()
    }

    fn shared(&self) -> Vec<SharedPrefix> {
        shared_prefixes(self.store.block_size(), &self.caches())
    }

    /// Each sequence alone, one answer behind the other.
    fn alone(&self) -> Answer {
        let mut all = Answer { out: Vec::new(), lse: Vec::new() };
        let heads = self.shape.n_heads();
        let mut first = 0;
        for (cache, rows) in self.caches.iter().zip(&self.rows) {
            let q = &self.q[first * self.shape.q_row_len()..][..rows * self.shape.q_row_len()];
            first += rows;
            let mut out = vec![f32::NAN; rows * self.shape.out_row_len()];
            let mut lse = vec![f32::NAN; rows * heads];
            let mut scratch = vec![f32::NAN; attention_scratch_len(&self.shape, *rows)];
            let options = options(&self.rules).level(self.level);
            let output = Output::new(&mut out).lse(&mut lse);
            let (store, scratch) = (&self.store, &mut scratch);
            causal_gqa_attention_paged_into(q, store, cache, heads, &options, output, scratch)
                .expect("a legal call");
            all.out.extend(out);
            all.lse.extend(lse);
        }
        all
    }

    fn together(&self, plan: &BatchPlan, executor: &dyn Executor, skip: usize) -> Answer {
        let mut out = Guarded::dirty(plan.out_len(), skip);
        let mut lse = Guarded::dirty(plan.lse_len(), skip);
        let mut scratch = Guarded::dirty(plan.scratch_len(), skip);
        let layer = BatchLayer { store: &self.store, sequences: &self.caches(), q: &self.q };
        let options = options(&self.rules).level(self.level);
        let output = Output::new(out.inside()).lse(lse.inside());
        plan.attend(&layer, &options, output, scratch.inside(), executor).expect("it was planned");
        scratch.into_inside("scratch");
        Answer { out: out.into_inside("out"), lse: lse.into_inside("lse") }
    }

    /// Every executor, with and without sharing, against each sequence alone. Returns whether the
    /// executors were asked at all, and whether sharing made a difference to the plan.
    fn check(&self, pools: &[(&str, &dyn Executor)], seed: u64) -> (bool, bool) {
        let want = self.alone().bits();
        let apart = BatchPlan::new(self.shape, &self.sequences()).unwrap();
        let shared = BatchPlan::with_shared(self.shape, &self.sequences(), &self.shared()).unwrap();
        let shuffled = Shuffled(seed);
        for (sharing, plan) in [("apart", &apart), ("shared", &shared)] {
            for (name, executor) in pools.iter().copied().chain([("shuffled", &shuffled as _)]) {
                let counted = Counted(executor, AtomicUsize::new(0));
                let have = self.together(plan, &counted, seed as usize % 17).bits();
                assert!(have == want, "{sharing}, {name}, {}, {:?}", self.level, self.rules);
                let chunks = counted.1.into_inner();
                assert_eq!(chunks == 0, plan.runs_inline(), "{chunks} chunks");
            }
        }
        (!shared.runs_inline(), shared != apart)
    }
}

fn plot() -> impl Strategy<Value = Plot> {
    let rows = prop_oneof![6 => Just(1), 3 => 2usize..=8, 1 => 9usize..=130, 1 => Just(0)];
    let shared = prop_oneof![1 => Just(0), 2 => Just(1200), 1 => 0usize..=1200];
    let own = prop_oneof![1 => 0usize..=100, 1 => 0usize..=1500];
    (shared, own, rows).prop_map(|(shared, own, rows)| Plot {
        shared,
        own: own.min(1500 - shared),
        rows,
    })
}

fn dims() -> impl Strategy<Value = KvDims> {
    let block_size = prop_oneof![Just(1), Just(5), Just(16), Just(64), Just(144)];
    (block_size, 1usize..=3, 1usize..=20, 1usize..=20).prop_map(
        |(block_size, n_kv_heads, k_width, v_width)| KvDims {
            block_size,
            n_kv_heads,
            k_width,
            v_width,
        },
    )
}

fn executors(pools: &[Box<dyn Executor + Sync>]) -> Vec<(&'static str, &dyn Executor)> {
    let names = ["inline", "pool of 2", "pool of 3"];
    names.into_iter().zip(pools).map(|(name, pool)| (name, &**pool as &dyn Executor)).collect()
}

fn pools() -> Vec<Box<dyn Executor + Sync>> {
    vec![
        Box::new(Inline),
        #[cfg(feature = "std")]
        Box::new(ThreadPool::new(2)),
        #[cfg(feature = "std")]
        Box::new(ThreadPool::new(3)),
    ]
}

/// Ragged batches with options on and off. Enough of them are large enough to be handed out, and
/// share enough to be planned otherwise.
fn a_batch_is_its_sequences_alone<E: Element>() {
    let pools = pools();
    let executors = executors(&pools);
    let most = cases::<E>(96, 3);
    let config = ProptestConfig { cases: most, failure_persistence: None, ..Default::default() };
    let counts = Mutex::new((0_u32, 0_u32));
    let case = (
        dims(),
        1usize..=8,
        0usize..=1200,
        proptest::collection::vec(plot(), 1..10),
        prop_oneof![1 => Just(0), 3 => 0..=Rules::ALL],
        any::<u64>(),
    );
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let ran = runner.run(&case, |(dims, group, common, plots, mask, seed)| {
        let world = World::<E>::new(dims, group, common, &plots, mask, seed);
        let (handed_out, joined) = world.check(&executors, seed);
        let mut counts = counts.lock().unwrap();
        counts.0 += u32::from(handed_out);
        counts.1 += u32::from(joined);
        Ok(())
    });
    ran.unwrap_or_else(|failure| panic!("{failure}"));
    let (handed_out, joined) = *counts.lock().unwrap();
    println!("{handed_out} handed out, {joined} with joint positions");
    // Of a few, all may be small.
    let enough = most < 32 || handed_out >= most / 5 && joined >= most / 10;
    assert!(enough, "{handed_out} {joined}");
}

/// Prefixes that end before, at and behind the borders of tiles and splits.
fn the_borders_of_a_prefix<E: Element>() {
    let pools = pools();
    let executors = executors(&pools);
    let mut joined = 0;
    for common in [63, 64, 65, 128, 500, 511, 512, 513, 576, 640, 960, 1000, 1024, 1100] {
        for (block_size, group, rows) in [(16, 1, 1), (5, 4, 1), (144, 2, 3), (64, 1, 8)] {
            let dims = KvDims { block_size, n_kv_heads: 2, k_width: 9, v_width: 17 };
            let own = [1, 70, 8, 600, 13, 1];
            let plots = own.map(|own| Plot { shared: common, own, rows: rows.min(own) });
            for mask in [0, Rules::WINDOW, Rules::ALL] {
                let world = World::<E>::new(dims, group, common, &plots, mask, common as u64);
                joined += usize::from(world.check(&executors[..1], 1).1);
            }
        }
    }
    assert!(joined > 100, "{joined}");
}

/// Answers wider than what is merged at once, and a group wider than an item.
fn wide_rows_and_wide_groups<E: Element>() {
    for (v_width, group) in [(256, 1), (257, 1), (530, 2), (3, 120)] {
        let dims = KvDims { block_size: 64, n_kv_heads: 2, k_width: 4, v_width };
        let plot = |own, rows| Plot { shared: 600, own, rows };
        let plots = [plot(1, 1), plot(500, 1), plot(700, 2), plot(20, 1)];
        let world = World::<E>::new(dims, group, 600, &plots, Rules::SINKS, 3);
        world.check(&[("inline", &Inline)], 2);
    }
}

every_type! {
    a_batch_is_its_sequences_alone,
    the_borders_of_a_prefix,
    wide_rows_and_wide_groups,
}

/// The finder sees what is there: the longest prefixes where they save most.
#[test]
fn prefixes_are_found() {
    let kv = KvShape::square(16, 1, 1).unwrap();
    let mut store = PagedKvStore::<f32>::with_shape(kv, 400).unwrap();
    let mut numbers = Numbers::new(1);
    let mut system = PagedKvCache::new();
    append(&mut store, &mut system, 100, &mut numbers);
    let mut document = system.fork(&mut store).unwrap();
    append(&mut store, &mut document, 1000, &mut numbers);
    let (nothing, mut caches) = (PagedKvCache::new(), Vec::new());
    for index in 0..9 {
        let from = [&system, &document, &nothing][index % 3];
        let mut cache = from.fork(&mut store).unwrap();
        append(&mut store, &mut cache, 1 + 20 * index, &mut numbers);
        caches.push(cache);
    }
    let find = |which: &[usize]| {
        shared_prefixes(16, &which.iter().map(|index| &caches[*index]).collect::<Vec<_>>())
    };
    let prefix =
        |sequences: &[usize], positions| SharedPrefix { sequences: sequences.to_vec(), positions };
    // The half-filled block at the end of each beginning was copied before it was written.
    assert_eq!(
        find(&[0, 1, 2, 3, 4, 5, 6, 7, 8]),
        [prefix(&[1, 4, 7], 1088), prefix(&[0, 3, 6], 96)]
    );
    // One with the document does not make up for what five with the system prompt save.
    assert_eq!(find(&[7, 0, 3, 6]), [prefix(&[0, 1, 2, 3], 96)]);
    assert_eq!(find(&[2, 5, 8]), []);
    assert_eq!(find(&[1, 2]), []);
    assert_eq!(shared_prefixes(16, &[]), []);
    // A fork that nobody has written to shares its half-filled block, too.
    let fork = system.fork(&mut store).unwrap();
    assert_eq!(shared_prefixes(16, &[&system, &fork]), [prefix(&[0, 1], 100)]);
    // Blocks of another store have the same names.
    let mut other = PagedKvStore::<f32>::with_shape(kv, 400).unwrap();
    let mut stranger = PagedKvCache::new();
    append(&mut other, &mut stranger, 100, &mut numbers);
    assert_eq!(stranger.block_table(), system.block_table());
    assert_eq!(shared_prefixes(16, &[&system, &stranger]), []);
}
