//! Everything at once: eight threads, each with one request after the other, on layers in which three
//! fit. They share prefixes, fork, draft, roll back, are saved and come back, give way where there is no
//! room, and panic in the middle of a step. What a request says is compared, by bits, with what it says
//! alone in a pool of its own; when all threads stand still, every block is counted.
//!
//! Some seconds of it are a test. `PAGED_KV_STRESS_SECONDS` says how many, `PAGED_KV_STRESS_SEED`
//! which ones: the seed fixes what each thread wants to do, and the rest is the threads' affair.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(feature = "std")]

mod quiet;
mod request;
mod text;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use paged_kv::batch::ThreadPool;
use paged_kv::cache::{Holder, PageGroup, SharedPagedKv};
use paged_kv::prefix::{HashKey, PrefixCache, PrefixEvent};

use quiet::{Holdings, Quiet};
use request::{Counts, Injected, Worker};
use text::{BLOCKS, LAYERS, SIZE};

const THREADS: usize = 8;

pub(crate) type Prefixes<'a> = Mutex<PrefixCache<&'a SharedPagedKv>>;

fn number(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Err(_) => otherwise,
    }
}

#[test]
fn requests_on_many_threads_say_what_they_say_alone() {
    let seconds = number("PAGED_KV_STRESS_SECONDS", 2);
    let seed = number("PAGED_KV_STRESS_SEED", 1);
    println!("{THREADS} threads for {seconds} s, PAGED_KV_STRESS_SEED={seed}");
    let pool = text::layers(BLOCKS, true);
    (0..LAYERS).for_each(|layer| pool.write(layer).poison_free());
    let cached = Arc::new(Mutex::new(HashSet::<PageGroup>::new()));
    let mut prefixes = PrefixCache::new(&pool, SIZE, HashKey::new([5; 16]));
    let told = Arc::clone(&cached);
    prefixes.set_sink(Some(Box::new(move |event| {
        let mut cached = told.lock().unwrap();
        match event {
            PrefixEvent::Stored { group, .. } => assert!(cached.insert(group)),
            PrefixEvent::Removed { group, .. } => assert!(cached.remove(&group)),
            _ => cached.clear(),
        }
    })));
    let prefixes = Mutex::new(prefixes);

    // Nobody takes or gives back: all that is held is told of.
    let check = |holdings: &[Holdings]| {
        let groups = holdings.iter().map(|of_thread| &of_thread.groups[..]);
        prefixes.lock().unwrap().check_invariants(groups.clone()).unwrap();
        let cached = cached.lock().unwrap();
        let groups = groups.flatten().chain(&*cached).map(|group| Holder::Group(*group));
        let tables = holdings.iter().flat_map(|of_thread| &of_thread.tables);
        let tables = tables.map(|(layer, blocks)| Holder::table(*layer, blocks));
        pool.check_invariants(tables.chain(groups)).unwrap();
    };
    let quiet = Quiet::new(THREADS, Duration::from_millis(100), &check);
    let workers = ThreadPool::new(3);
    let end = Instant::now() + Duration::from_secs(seconds);
    let counts = std::thread::scope(|scope| {
        let work = |thread: usize| {
            let (pool, prefixes, quiet, workers) = (&pool, &prefixes, &quiet, &workers);
            move || {
                let (own, of_thread) = (text::layers(BLOCKS, false), seed * 1000 + thread as u64);
                let mut worker = Worker::new(pool, prefixes, quiet, workers, &own, of_thread);
                while Instant::now() < end {
                    match catch_unwind(AssertUnwindSafe(|| worker.request())) {
                        Ok(()) => worker.counts.requests += 1,
                        Err(payload) if payload.is::<Injected>() => worker.counts.panics += 1,
                        Err(payload) => {
                            quiet.fail();
                            println!("thread {thread} failed, PAGED_KV_STRESS_SEED={seed}");
                            resume_unwind(payload);
                        }
                    }
                }
                quiet.leave();
                worker.counts
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(work(thread))).collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let counts = ended.into_iter().map(|end| end.unwrap_or_else(|panic| resume_unwind(panic)));
        counts.fold(Counts::default(), Counts::and)
    });
    let times = quiet.times();
    println!("{counts:?}, all stood still {times} times");

    // Nothing is lost.
    check(&[]);
    let mut prefixes = prefixes.lock().unwrap();
    let stats = prefixes.stats();
    println!("{stats}");
    assert_eq!(prefixes.evictable(), stats.cached);
    assert_eq!(prefixes.evict(usize::MAX), stats.cached);
    pool.check_invariants([]).unwrap();
    for layer in 0..LAYERS {
        assert_eq!(pool.free_blocks(layer), pool.read(layer).total_blocks(), "layer {layer}");
    }
    assert!(counts.requests > 0 && counts.compared > 0);
    // What never happens proves nothing.
    if seconds >= 20 {
        let never = counts.never();
        assert!(never.is_empty(), "there was no {never:?}");
        assert!(stats.hits > 0 && stats.partial_hits > 0 && stats.evicted > 0 && times > 9);
    }
}
