//! What the caller handed in panics, at each of its calls in turn: the way to the layers, the sink of
//! events, sinks and sources of bytes, lists of holders, executors. Nobody's blocks are lost by it and
//! no lock is left unusable.

use core::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paged_kv::attention::AttentionOptions;
use paged_kv::batch::{BatchLayer, BatchPlan, Executor, Inline, SequenceRows};
use paged_kv::cache::{Holder, PagedSequence, SharedPagedKv};
use paged_kv::prefix::Priority;
use paged_kv::wire::{Label, Saved, Sink, Source};
use paged_kv::{GqaShape, PageGroup};

use super::world::{LAYERS, Pool, SALT, SIZE, World, rows, shape, tokens};

/// Panics at a call that is chosen beforehand.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fuse(Arc<AtomicUsize>);

impl Fuse {
    pub(crate) fn call(&self) {
        let left = self.0.load(Ordering::Relaxed);
        if left > 0 {
            self.0.store(left - 1, Ordering::Relaxed);
        }
        if left == 1 {
            // Without a word: there will be many.
            resume_unwind(Box::new("what the caller handed in"));
        }
    }

    /// Whether `run` panics where the `nth` call does. There is no panic after this.
    pub(crate) fn burns(&self, nth: usize, run: impl FnOnce()) -> bool {
        self.0.store(nth, Ordering::Relaxed);
        let burnt = catch_unwind(AssertUnwindSafe(run)).is_err();
        assert_eq!(burnt, self.0.swap(0, Ordering::Relaxed) == 0, "a panic goes on to the caller");
        burnt
    }
}

/// Runs `at` for the first call, the second, and so on, until it panics no more. At least `least`
/// calls are made.
pub(crate) fn at_every_call(name: &str, least: usize, mut at: impl FnMut(&Fuse, usize) -> bool) {
    let fuse = Fuse::default();
    let calls = (1..).take_while(|&nth| at(&fuse, nth)).count();
    assert!(calls >= least, "{name}: {calls} calls");
}

/// A way to the layers that panics where it is followed or cloned.
pub(crate) struct Way {
    pub(crate) pool: Pool<f32>,
    pub(crate) fuse: Fuse,
}

impl Deref for Way {
    type Target = SharedPagedKv;

    fn deref(&self) -> &SharedPagedKv {
        self.fuse.call();
        &self.pool
    }
}

impl Clone for Way {
    fn clone(&self) -> Self {
        self.fuse.call();
        Way { pool: Pool::clone(&self.pool), fuse: self.fuse.clone() }
    }
}

type Request = PagedSequence<Way>;

fn write(request: &mut Request, n: usize) {
    for layer in 0..LAYERS {
        let (k, v) = rows(2, request.cache(layer).seq_len(), n);
        request.append(layer, &k, &v, n).unwrap();
    }
}

/// A request that has a block and a half, one that shares them, an empty one, one with drafts.
fn requests(way: &Way) -> Vec<Request> {
    let mut requests: Vec<Request> = (0..4).map(|_| PagedSequence::new(way.clone())).collect();
    for (request, n) in [(0, SIZE + 8), (3, 4)] {
        requests[request].reserve(n).unwrap();
        write(&mut requests[request], n);
        requests[request].commit(n).unwrap();
    }
    requests[1] = requests[0].fork().unwrap();
    requests[3].reserve(2 * SIZE).unwrap();
    write(&mut requests[3], 5);
    requests
}

#[test]
fn the_way_to_the_layers_may_panic() {
    type Operation = (&'static str, usize, fn(&mut World<f32>, &Way, &mut Vec<Request>));
    let operations: &[Operation] = &[
        ("reserve", 1, |_, _, requests| requests[0].reserve(2 * SIZE).unwrap()),
        #[cfg(feature = "std")]
        ("reserve_within", 4, |_, _, requests| {
            let most = core::time::Duration::from_millis(2);
            assert!(requests[0].reserve_within(39 * SIZE, most).is_err());
            let held = requests[2].shared().free_blocks(0) * SIZE;
            requests[2].reserve(held).unwrap();
            assert!(requests[0].reserve_within(SIZE, most).is_err());
        }),
        ("append", 3, |_, _, requests| write(&mut requests[3], 2)),
        ("commit", 1, |_, _, requests| requests[3].commit(3).unwrap()),
        ("compact", 1, |_, _, requests| requests[3].compact(&[1, 2, 4]).unwrap()),
        ("truncate", 2, |_, _, requests| requests[3].truncate(1).unwrap()),
        ("release", 1, |_, _, requests| requests[0].release()),
        ("fork", 3, |_, _, requests| {
            let child = requests[3].fork().unwrap();
            requests.push(child);
        }),
        ("new", 2, |_, way, requests| requests.push(PagedSequence::new(way.clone()))),
        ("adopt_groups", 1, |world, _, requests| {
            requests[2].adopt_groups(&world.groups, SIZE + 1).unwrap();
        }),
        ("save", 3, |_, _, requests| requests[0].save(&Label::new(), Vec::new()).unwrap()),
        ("restore", 3, |world, _, requests| {
            requests[2].restore(Saved::open(&world.saved[0][..]).unwrap()).unwrap();
        }),
        ("a prefix cache that makes room", 2, |world, _, requests| {
            let n = (world.pool.free_groups() + 1) * SIZE;
            world.prefixes.reserve(&mut requests[0], n).unwrap();
        }),
        ("numbers", 3, |_, _, requests| {
            let _ = (requests[0].stats(), requests[0].holders().count(), requests[0].cache(1));
        }),
    ];
    for &(name, least, run) in operations {
        at_every_call(name, least, |fuse, nth| {
            let mut world = World::<f32>::with(40);
            let way = Way { pool: Pool::clone(&world.pool), fuse: fuse.clone() };
            let mut requests = requests(&way);
            let burnt = fuse.burns(nth, || run(&mut world, &way, &mut requests));
            world.check(requests.iter().flat_map(PagedSequence::holders));
            if requests[2].is_empty() {
                // What was taken for it went back, or goes now.
                requests[2].release();
            }
            // A step under way can be taken back, and the next one made.
            requests.iter_mut().for_each(PagedSequence::abandon);
            requests.retain(|request| request.cache(0).block_table().len() <= 3);
            for request in &mut requests {
                request.reserve(1).unwrap();
                write(request, 1);
                request.commit(1).unwrap();
            }
            world.check(requests.iter().flat_map(PagedSequence::holders));
            drop(requests);
            world.end();
            burnt
        });
    }
}

#[test]
fn the_sink_of_events_may_panic() {
    type Operation = (&'static str, usize, fn(&mut World<f32>));
    let operations: [Operation; 7] = [
        ("insert", 2, |world| {
            let groups = world.pool.acquire_groups(2).unwrap();
            world.groups.extend_from_slice(&groups);
            world.cached.extend_from_slice(&groups);
            world.prefixes.insert(SALT, &tokens(300), &groups, Priority::LOWEST).unwrap();
        }),
        ("evict", 3, |world| assert_eq!(world.prefixes.evict(3), 3)),
        ("try_evict", 3, |world| assert!(world.prefixes.try_evict(3))),
        ("remove_salt", 4, |world| assert_eq!(world.prefixes.remove_salt(SALT), Ok(4))),
        ("clear", 1, |world| assert_eq!(world.prefixes.clear(), 4)),
        ("reserve", 1, |world| {
            let n = (world.pool.free_groups() + 1) * SIZE;
            world.prefixes.reserve(&mut world.requests[0], n).unwrap();
        }),
        ("acquire_groups", 1, |world| {
            let n = world.pool.free_groups() + 2;
            let groups = world.prefixes.acquire_groups(n).unwrap();
            world.groups.extend(groups);
        }),
    ];
    for (name, least, run) in operations {
        at_every_call(name, least, |fuse, nth| {
            let mut world = World::<f32>::with(40);
            let told = fuse.clone();
            world.prefixes.set_sink(Some(Box::new(move |_| told.call())));
            if nth == 1 {
                world.check([]);
            }
            let burnt = fuse.burns(nth, || run(&mut world));
            world.check([]);
            world.end();
            burnt
        });
    }
}

/// Takes bytes, or gives them some at a time.
struct Bytes<'a> {
    fuse: &'a Fuse,
    bytes: &'a [u8],
}

impl Sink for Bytes<'_> {
    type Error = core::convert::Infallible;

    fn put(&mut self, _: &[u8]) -> Result<(), Self::Error> {
        self.fuse.call();
        Ok(())
    }
}

impl Source for Bytes<'_> {
    type Error = core::convert::Infallible;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, Self::Error> {
        self.fuse.call();
        let some = into.len().min(300);
        self.bytes.fill(&mut into[..some])
    }
}

#[test]
fn sinks_and_sources_of_bytes_may_panic() {
    type Operation = (&'static str, usize, fn(&mut World<f32>, Bytes<'_>));
    let operations: [Operation; 4] = [
        ("save a request", 4, |world, sink| {
            world.requests[3].save(&Label::new(), sink).unwrap();
        }),
        ("save", 3, |world, sink| {
            world.bare[0].save(&world.pool.read(0), &Label::new(), sink).unwrap();
        }),
        ("restore a request", 12, |world, source| {
            world.requests[2].restore(Saved::open(source).unwrap()).unwrap();
        }),
        ("restore", 6, |world, source| {
            let saved = Saved::open(source).unwrap();
            world.bare[2].restore(&mut world.pool.write(0), saved).unwrap();
        }),
    ];
    for (index, (name, least, run)) in operations.into_iter().enumerate() {
        at_every_call(name, least, |fuse, nth| {
            let mut world = World::<f32>::with(40);
            let bytes = world.saved[index % 2].clone();
            let before = world.see();
            let burnt = fuse.burns(nth, || run(&mut world, Bytes { fuse, bytes: &bytes }));
            if burnt {
                // Blocks of a restore were taken and came back, one by one.
                let what = format_args!("{name}, call {nth}").to_string();
                world.see().unordered().must_be(&before.unordered(), format_args!("{what}"));
            }
            world.end();
            burnt
        });
    }
}

#[test]
fn lists_of_holders_may_panic() {
    let world = World::<f32>::with(40);
    let before = world.see();
    at_every_call("holders", 8, |fuse, nth| {
        fuse.burns(nth, || {
            let all = world.requests.iter().flat_map(PagedSequence::holders);
            let _ = world.pool.check_invariants(all.inspect(|_| fuse.call()));
        })
    });
    at_every_call("tables", 2, |fuse, nth| {
        fuse.burns(nth, || {
            let tables = [world.bare[0].block_table(), world.bare[1].block_table()];
            let tables = tables.into_iter().inspect(|_| fuse.call());
            let _ = world.pool.read(0).check_invariants(tables);
        })
    });
    at_every_call("groups", 1, |fuse, nth| {
        fuse.burns(nth, || {
            let groups = [&world.groups[..]].into_iter().inspect(|_| fuse.call());
            world.prefixes.check_invariants(groups).unwrap();
        })
    });
    // Whoever lists may ask the pool meanwhile: no lock is held for it.
    let ask = |group: &PageGroup| {
        assert_eq!(world.pool.group_refs(*group), 1);
        Holder::Group(*group)
    };
    assert!(world.pool.check_invariants(world.groups.iter().map(ask)).is_err());
    world.see().must_be(&before, format_args!("lists"));
    world.end();
}

/// Does the work, and may panic before each part and at the end.
#[derive(Debug)]
struct Tired(Fuse);

impl Executor for Tired {
    fn for_each_chunk(
        &self,
        data: &mut [f32],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        Inline.for_each_chunk(data, chunk, &|index, chunk| {
            self.0.call();
            work(index, chunk);
        });
        self.0.call();
    }

    fn threads(&self) -> usize {
        2
    }
}

/// Under a read guard, as executors are called; the guard goes with the panic, and the layer can be
/// written and attended as before.
#[test]
fn executors_may_panic() {
    let long = 40 * SIZE;
    let pool = SharedPagedKv::<f32>::with_shape(1, shape(), 2 * 40 + 2).unwrap();
    let mut requests = [PagedSequence::new(&pool), PagedSequence::new(&pool)];
    for request in &mut requests {
        request.reserve(long).unwrap();
        let (k, v) = rows(6, 0, long);
        request.append(0, &k, &v, long).unwrap();
        request.commit(long).unwrap();
    }
    let gqa = GqaShape::new(shape(), 4).unwrap();
    let rows_each = SequenceRows { len: long, rows: 256 };
    let plan = BatchPlan::new(gqa, &[rows_each; 2]).unwrap();
    assert!(!plan.runs_inline(), "the executor is asked");
    let (q, _) = rows(7, 0, plan.q_len().div_ceil(6));
    let q = &q[..plan.q_len()];
    let mut scratch = vec![f32::NAN; plan.scratch_len()];
    let mut attend = |executor: &dyn Executor| {
        let store = pool.read(0);
        let sequences = [requests[0].cache(0), requests[1].cache(0)];
        let layer = BatchLayer { store: &store, sequences: &sequences, q };
        let mut out = vec![f32::NAN; plan.out_len()];
        let options = AttentionOptions::new();
        plan.attend(&layer, &options, &mut out, &mut scratch, executor).unwrap();
        out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected = attend(&Inline);
    at_every_call("attend", 4, |fuse, nth| {
        let burnt = fuse.burns(nth, || drop(attend(&Tired(fuse.clone()))));
        drop(pool.write(0));
        assert_eq!(attend(&Inline), expected, "after call {nth}");
        burnt
    });
}
