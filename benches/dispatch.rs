//! What it takes to get two chunks to two threads.
//!
//! - `empty`: the chunks do nothing, so the caller is done as soon as it has been through both,
//!   whether or not a second thread came. What a run costs a caller whom nobody helps.
//! - `met`: each chunk waits for the other to begin, so it takes two threads. How long until there
//!   is help.
//!
//! One run follows the other at once, so that workers spin in between, or `asleep before` each
//! they have gone to sleep. A core that is taken away at the wrong moment costs a thousand times
//! what is measured, so each sample is its best run.
//!
//! Each executor is checked before it is timed.

use core::hint::{black_box, spin_loop};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
#[cfg(feature = "rayon")]
use paged_kv::batch::Rayon;
use paged_kv::batch::{Executor, Inline, ThreadPool};

/// Longer than a worker spins, the pool's or rayon's, even if it is kept from it for a while.
const ASLEEP: Duration = Duration::from_millis(3);

fn empty(executor: &dyn Executor) {
    executor.for_each_chunk(black_box(&mut [0.0; 2]), 1, &|_, chunk| {
        black_box(chunk);
    });
}

fn met(executor: &dyn Executor) {
    let begun = AtomicUsize::new(0);
    executor.for_each_chunk(black_box(&mut [0.0; 2]), 1, &|_, _| {
        begun.fetch_add(1, Ordering::Relaxed);
        let mut looks = 0_u32;
        while begun.load(Ordering::Relaxed) < 2 {
            looks += 1;
            // On one core the other chunk can begin only if this one makes room.
            if looks.is_multiple_of(1000) { thread::yield_now() } else { spin_loop() }
        }
    });
}

/// The time of `rounds` runs if each took as long as the best of them.
fn best(rounds: u64, pause: Duration, mut run: impl FnMut()) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..rounds {
        if !pause.is_zero() {
            thread::sleep(pause);
        }
        let begun = Instant::now();
        run();
        best = best.min(begun.elapsed());
    }
    best * u32::try_from(rounds).unwrap_or(u32::MAX)
}

/// [`empty`] ten times in a row: one is shorter than a look at the clock.
fn best_empty(rounds: u64, executor: &dyn Executor) -> Duration {
    best(rounds, Duration::ZERO, || (0..10).for_each(|_| empty(executor))) / 10
}

fn dispatch(c: &mut Criterion) {
    let pool = ThreadPool::new(2);
    #[cfg(feature = "rayon")]
    let rayon_pool = rayon_pool();
    let executors: &[(&str, &dyn Executor)] = &[
        ("inline", &Inline),
        ("pool", &pool),
        #[cfg(feature = "rayon")]
        ("rayon", &Rayon::of(&rayon_pool)),
    ];
    for &(name, executor) in executors {
        check(name, executor);
        let mut bench = c.benchmark_group(name);
        bench.bench_function("empty", |b| {
            b.iter_custom(|rounds| best_empty(rounds, executor));
        });
        if executor.threads() > 1 {
            bench.bench_function("met", |b| {
                b.iter_custom(|rounds| best(rounds, Duration::ZERO, || met(executor)));
            });
            bench.sample_size(20);
            bench.bench_function("empty, asleep before", |b| {
                b.iter_custom(|rounds| best(rounds, ASLEEP, || empty(executor)));
            });
            bench.bench_function("met, asleep before", |b| {
                b.iter_custom(|rounds| best(rounds, ASLEEP, || met(executor)));
            });
        }
        bench.finish();
    }
    #[cfg(feature = "rayon")]
    from_inside(c, &rayon_pool);
}

#[cfg(feature = "rayon")]
fn rayon_pool() -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("two threads")
}

/// Rayon as it is used by who is in its pool already.
#[cfg(feature = "rayon")]
fn from_inside(c: &mut Criterion, pool: &rayon::ThreadPool) {
    let mut bench = c.benchmark_group("rayon, from inside");
    bench.bench_function("empty", |b| {
        b.iter_custom(|rounds| pool.install(|| best_empty(rounds, &Rayon::current())));
    });
    bench.bench_function("met", |b| {
        b.iter_custom(|rounds| {
            pool.install(|| best(rounds, Duration::ZERO, || met(&Rayon::current())))
        });
    });
    bench.finish();
}

fn check(name: &str, executor: &dyn Executor) {
    let mut data: Vec<f32> = (0..1000).map(|place| place as f32).collect();
    executor.for_each_chunk(&mut data, 7, &|index, chunk| {
        assert_eq!(chunk[0], (7 * index) as f32, "{name}");
        chunk.fill(index as f32);
    });
    for (place, number) in data.iter().enumerate() {
        assert_eq!(*number, (place / 7) as f32, "{name}");
    }
}

criterion_group!(benches, dispatch);
criterion_main!(benches);
