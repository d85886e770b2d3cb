//! What the documentation says allocates nothing, under an allocator that counts.

#![expect(unsafe_code, reason = "an allocator that counts has to be one")]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::sync::atomic::{AtomicUsize, Ordering};
use paged_kv::attention::{
    AttentionOptions, AttentionState, Output, attention_scratch_len, causal_gqa_attention_into,
    causal_gqa_attention_paged_into,
};
#[cfg(feature = "std")]
use paged_kv::batch::ThreadPool;
use paged_kv::batch::{BatchLayer, BatchPlan, Executor, Inline, SequenceRows, shared_prefixes};
use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::{Element, GqaShape, KvShape, Level, every_type};
use std::alloc::System;

std::thread_local! {
    /// Allocations of this thread: the test harness allocates on others whenever it likes.
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    // The counter itself is gone while a thread ends.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every request is the system allocator's, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often memory was asked for or given back while this ran.
fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

/// The canary: a count that is always 0 would prove nothing.
#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(core::hint::black_box(Box::new(1)))), 2);
}

/// Two KV heads of width 24, three query heads each, 600 positions.
struct World<E: Element> {
    store: PagedKvStore<E>,
    paged: PagedKvCache,
    contiguous: KvCache<E>,
}

fn shape(block_size: usize) -> KvShape {
    KvShape::square(block_size, 2, 24).unwrap()
}

fn world<E: Element>() -> World<E> {
    let mut world = World {
        store: PagedKvStore::with_shape(shape(16), 80).unwrap(),
        paged: PagedKvCache::new(),
        contiguous: KvCache::with_shape(shape(64)),
    };
    for position in 0..600 {
        let row: Vec<f32> = (0..48).map(|i| ((position * 7 + i) % 13) as f32 * 0.1).collect();
        world.paged.push(&mut world.store, &row, &row).unwrap();
        world.contiguous.push(&row, &row).unwrap();
    }
    world
}

fn the_doors_allocate_nothing<E: Element>() {
    let World { store, paged, contiguous } = world::<E>();
    let shape = GqaShape::new(store.shape(), 6).unwrap();
    let (slopes, sinks) = ([0.25; 6], [0.5; 6]);
    // Asks the processor once, whatever that takes.
    let _ = Level::detect();
    for n_q in [0, 1, 5, 100] {
        let q = vec![0.3; n_q * 6 * 24];
        let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; n_q * 6]);
        let mut scratch = vec![0.0; attention_scratch_len(&shape, n_q)];
        for level in Level::available() {
            let count = allocations(|| {
                for options in [
                    AttentionOptions::new(),
                    AttentionOptions::new().soft_cap(20.0).alibi_slopes(&slopes),
                    AttentionOptions::new().window(300).sinks(&sinks).scale(0.1),
                    AttentionOptions::new().causal(false).positions(5..555),
                ] {
                    let options = options.level(level);
                    let output = Output::new(&mut out).lse(&mut lse);
                    causal_gqa_attention_into(&q, &contiguous, 6, &options, output, &mut scratch)
                        .unwrap();
                    let output = Output::new(&mut out).lse(&mut lse);
                    causal_gqa_attention_paged_into(
                        &q,
                        &store,
                        &paged,
                        6,
                        &options,
                        output,
                        &mut scratch,
                    )
                    .unwrap();
                    core::hint::black_box(attention_scratch_len(&shape, n_q));
                }
            });
            assert_eq!(count, 0, "{level}: {n_q} query rows");
        }
    }
}

fn refusals_allocate_nothing<E: Element>() {
    let World { store, paged, .. } = world::<E>();
    let other = PagedKvStore::<E>::with_shape(shape(16), 1).unwrap();
    let (q, mut out) = ([0.0; 144], [0.0; 144]);
    let count = allocations(|| {
        let options = AttentionOptions::new();
        for (store, n_heads) in [(&other, 6), (&store, 5), (&store, 6)] {
            let refused = causal_gqa_attention_paged_into(
                &q,
                store,
                &paged,
                n_heads,
                &options,
                &mut out,
                &mut [],
            );
            assert!(refused.is_err());
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn states_allocate_nothing() {
    let (mut a, mut b, mut c) = ([0.0; 40], [0.0; 40], [0.0; 40]);
    let mut answer = [0.0; 40];
    for level in Level::available() {
        let count = allocations(|| {
            let mut state = AttentionState::empty(&mut a).with_level(level);
            let mut other = AttentionState::empty(&mut b).with_level(level);
            state.push(0.5, &[1.0; 40]);
            state.push(f32::NEG_INFINITY, &[1.0; 40]);
            other.push(1.5, &[2.0; 40]);
            state.merge(&other);
            state.merge(&AttentionState::from_output(&mut c, 0.25).with_level(level));
            core::hint::black_box((state.lse(), state.max(), state.denom(), state.is_empty()));
            state.finish(Some(0.5), &mut answer);
        });
        assert_eq!(count, 0, "{level}");
    }
}

/// Reserved room is room: pushing into it, reading back, truncating and releasing ask for nothing.
fn reserved_room_is_room<E: Element>() {
    let World { mut store, mut paged, .. } = world::<E>();
    paged.release(&mut store).unwrap();
    paged.reserve(&mut store, 300).unwrap();
    let row = [0.5; 48];
    let rows = vec![0.5; 48 * 100];
    let mut back = [0.0; 24];
    let count = allocations(|| {
        for _ in 0..200 {
            paged.push(&mut store, &row, &row).unwrap();
        }
        paged.append(&mut store, &rows, &rows, 100).unwrap();
        paged.copy_k_row(&store, 250, 1, &mut back).unwrap();
        paged.copy_v_row(&store, 250, 1, &mut back).unwrap();
        paged.truncate(&mut store, 30).unwrap();
        paged.release(&mut store).unwrap();
    });
    assert_eq!(count, 0);

    let mut cache = KvCache::<E>::with_shape(shape(64));
    cache.append(&vec![0.5; 48 * 300], &vec![0.5; 48 * 300], 300).unwrap();
    cache.clear();
    let count = allocations(|| {
        for _ in 0..200 {
            cache.push(&row, &row).unwrap();
        }
        cache.append(&rows, &rows, 100).unwrap();
        cache.truncate(10).unwrap();
        cache.clear();
        cache.append(&rows, &rows, 100).unwrap();
    });
    assert_eq!(count, 0);
}

/// A push that needs no new block allocates nothing either.
fn inside_a_block_a_push_allocates_nothing<E: Element>() {
    let mut store = PagedKvStore::<E>::with_shape(shape(16), 4).unwrap();
    let mut cache = PagedKvCache::new();
    let row = [0.5; 48];
    cache.push(&mut store, &row, &row).unwrap();
    let count = allocations(|| {
        for _ in 1..16 {
            cache.push(&mut store, &row, &row).unwrap();
        }
    });
    assert_eq!(count, 0);
}

/// Neither the caller of a run nor the worker asks for anything.
#[cfg(any(feature = "std", feature = "spin"))]
#[test]
fn a_step_over_all_layers_allocates_nothing() {
    use paged_kv::cache::{PagedSequence, SharedPagedKv};
    let shared = SharedPagedKv::new(3, 16, 8, 1, 1);
    let mut sequence = PagedSequence::new(&shared);
    let row = [1.0; 20];
    sequence.reserve(100).unwrap();
    let count = allocations(|| {
        for _ in 0..5 {
            sequence.reserve(20).unwrap();
            for layer in 0..3 {
                sequence.push(layer, &row[..1], &row[..1]).unwrap();
            }
            sequence.abandon();
            for layer in 0..3 {
                sequence.append(layer, &row, &row, 20).unwrap();
            }
            sequence.commit(20).unwrap();
        }
        assert!(!sequence.shared().can_ever_fit(129));
        sequence.truncate(17).unwrap();
        sequence.release();
    });
    assert_eq!(count, 0);
}

#[cfg(feature = "std")]
#[test]
fn a_run_of_the_pool_allocates_nothing() {
    let pool = ThreadPool::new(2);
    let both = std::sync::Barrier::new(2);
    let caller = std::thread::current().id();
    let mut data = [0.0; 2];
    let mut worker_counts = [0; 2];
    // What a thread asks for once in its life, it has after the first of the two.
    for worker_count in &mut worker_counts {
        let count = allocations(|| {
            for _ in 0..100 {
                pool.for_each_chunk(&mut data, 1, &|_, part| {
                    both.wait();
                    let here = std::thread::current().id() == caller;
                    part[0] = if here { 0.0 } else { COUNT.get() as f32 };
                });
            }
        });
        assert_eq!(count, 0);
        *worker_count = data.iter().sum::<f32>() as usize;
    }
    assert_eq!(worker_counts[0], worker_counts[1]);
    assert!(worker_counts[0] > 0, "the worker was counted: it told that it had started");
}

/// Passes on to another executor, and counts what the work asks for, on whichever thread.
struct Watched<'a> {
    executor: &'a dyn Executor,
    count: AtomicUsize,
    chunks: AtomicUsize,
}

impl Executor for Watched<'_> {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let Watched { executor, count, chunks } = self;
        executor.for_each_chunk(data, chunk, &|index, part| {
            count.fetch_add(allocations(|| work(index, part)), Ordering::Relaxed);
            chunks.fetch_add(1, Ordering::Relaxed);
        });
    }

    fn threads(&self) -> usize {
        self.executor.threads()
    }
}

/// A batch with joint positions, splits, a prompt and log-sum-exps; also one that is refused.
fn attend_a_batch(executor: &dyn Executor) {
    let World::<f32> { mut store, paged, .. } = world();
    let mut fork = paged.fork(&mut store).unwrap();
    fork.push(&mut store, &[0.5; 48], &[0.5; 48]).unwrap();
    let caches = [&paged, &fork, &paged];
    let sequences = [(600, 1), (601, 1), (600, 100)];
    let sequences = sequences.map(|(len, rows)| SequenceRows { len, rows });
    let shape = GqaShape::new(store.shape(), 6).unwrap();
    let shared = shared_prefixes(16, &caches);
    let plan = BatchPlan::with_shared(shape, &sequences, &shared).unwrap();
    assert!(!plan.runs_inline());
    let q = vec![0.3; plan.q_len()];
    let (mut out, mut lse) = (vec![0.0; plan.out_len()], vec![0.0; plan.lse_len()]);
    let mut scratch = vec![0.0; plan.scratch_len()];
    let layer = BatchLayer { store: &store, sequences: &caches, q: &q };
    let watched = Watched { executor, count: Default::default(), chunks: Default::default() };
    for level in Level::available() {
        let options = AttentionOptions::new().level(level).sinks(&[0.5; 6]);
        let mut attend = |scratch: &mut [f32]| {
            let output = Output::new(&mut out).lse(&mut lse);
            plan.attend(&layer, &options, output, scratch, &watched)
        };
        // What a thread asks for once in its life, it has after this.
        attend(&mut scratch).unwrap();
        let before = watched.count.load(Ordering::Relaxed);
        let count = allocations(|| {
            for _ in 0..20 {
                attend(&mut scratch).unwrap();
            }
            assert!(attend(&mut []).is_err());
        });
        assert_eq!(count, 0, "{level}");
        let inside = watched.count.load(Ordering::Relaxed) - before;
        assert_eq!(inside, 0, "{level}, inside of the work");
    }
    assert!(watched.chunks.into_inner() > 300, "the executor was asked");
}

#[test]
fn a_batch_allocates_nothing() {
    let _ = Level::detect();
    attend_a_batch(&Inline);
    #[cfg(feature = "std")]
    attend_a_batch(&ThreadPool::new(2));
}

every_type! {
    the_doors_allocate_nothing,
    refusals_allocate_nothing,
    reserved_room_is_room,
    inside_a_block_a_push_allocates_nothing,
}
