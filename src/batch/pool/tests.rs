//! What is asked of the pool beside what is asked of every executor.
//!
//! Under ThreadSanitizer, with Debian's compiler, which has the sources of the standard library
//! (`rustc-web cargo-web rust-web-src clang-22 libclang-rt-22-dev`; without those sources it sees
//! races where there are none), all of the room passes by
//!
//! ```text
//! PATH=/usr/bin:/bin RUSTC_BOOTSTRAP=1 CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS="\
//!   -Zsanitizer=thread -Zexternal-clangrt -Clinker=clang-22 -Clink-arg=-fsanitize=thread" \
//!   cargo test -Zbuild-std --target x86_64-unknown-linux-gnu --lib batch
//! ```

use alloc::vec;
use core::sync::atomic::AtomicU64;
use core::time::Duration;
use std::sync::Barrier;
use std::thread::sleep;
use std::time::Instant;

use super::*;

/// Long enough for every worker to have gone to sleep.
fn until_asleep(pool: &ThreadPool) {
    let begun = Instant::now();
    while !pool.shared.asleep.iter().all(|flag| flag.0.load(Ordering::SeqCst)) {
        assert!(begun.elapsed() < Duration::from_secs(60), "a worker never sleeps");
        sleep(Duration::from_micros(100));
    }
    sleep(Duration::from_millis(1));
}

#[test]
fn ten_thousand_small_runs_one_after_the_other() {
    for threads in [2, 3, 8] {
        let pool = ThreadPool::new(threads);
        let mut data = vec![0.0; 37];
        let begun = Instant::now();
        for run in 0..10_000 {
            pool.for_each_chunk(&mut data, 1 + run % 40, &|_, part| {
                part.iter_mut().for_each(|number| *number += 1.0);
            });
        }
        assert_eq!(data, [10_000.0; 37]);
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(20), "{threads} threads took {took:?}");
    }
}

/// Two chunks that wait for each other need two threads.
fn meet(pool: &ThreadPool) {
    let both = Barrier::new(2);
    pool.for_each_chunk(&mut [0.0; 2], 1, &|_, _| {
        both.wait();
    });
}

#[test]
fn workers_come_to_help_from_sleep_too() {
    let pool = ThreadPool::new(2);
    for _ in 0..20 {
        until_asleep(&pool);
        meet(&pool);
    }
    for _ in 0..1000 {
        meet(&pool);
    }
}

/// As many are woken as there are chunks for, less the caller and those who are awake.
#[test]
fn no_more_are_woken_than_can_help() {
    let pool = ThreadPool::new(4);
    let asleep = || pool.shared.asleep.iter().filter(|flag| flag.0.load(Ordering::SeqCst)).count();
    until_asleep(&pool);
    pool.shared.wake(2, &pool.workers);
    pool.shared.wake(2, &pool.workers);
    assert!(asleep() >= 1, "all three workers were woken for two chunks");
    until_asleep(&pool);
    pool.shared.wake(9, &pool.workers);
}

/// The caller does not need its workers: here the only one is kept elsewhere.
#[test]
fn a_worker_that_never_comes_is_not_waited_for() {
    let mut pool = ThreadPool::new(1);
    // A worker that is on the list and never looks.
    let (release, held) = std::sync::mpsc::channel::<()>();
    pool.workers.push(std::thread::spawn(move || held.recv().unwrap_or_default()));
    let mut data = [0.0; 9];
    for _ in 0..100 {
        pool.for_each_chunk(&mut data, 2, &|_, part| part.iter_mut().for_each(|x| *x += 1.0));
    }
    assert_eq!(data, [100.0; 9]);
    release.send(()).unwrap();
}

/// Late workers look at what is left of a run, over and over, while runs come and go.
#[test]
fn who_comes_late_touches_nothing() {
    let pool = ThreadPool::new(2);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    pool.shared.work();
                }
            });
        }
        for run in 0..2000_u16 {
            // The run's frame differs from the last one's: a late step would show.
            let (sum, mut data) = (AtomicU64::new(0), vec![f32::from(run); 1 + run as usize % 9]);
            pool.for_each_chunk(&mut data, 1, &|index, part| {
                assert_eq!(part[0], f32::from(run));
                sum.fetch_add(index as u64 + 1, Ordering::Relaxed);
            });
            let count = data.len() as u64;
            assert_eq!(sum.load(Ordering::Relaxed), count * (count + 1) / 2);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Caught on the worker and on the caller, and at once on both.
#[test]
fn panics_on_either_side() {
    let pool = ThreadPool::new(2);
    let caller = std::thread::current().id();
    for (on_caller, on_worker) in [(true, false), (false, true), (true, true)] {
        let both = Barrier::new(2);
        let ran = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each_chunk(&mut [0.0; 1000], 1, &|index, _| {
                ran.fetch_add(1, Ordering::Relaxed);
                if index < 2 {
                    both.wait();
                    let here = std::thread::current().id() == caller;
                    if if here { on_caller } else { on_worker } {
                        panic!("{here}");
                    }
                }
                // Long enough for a panic to be printed with all of its frames meanwhile.
                sleep(Duration::from_millis(5));
            });
        }));
        let payload = result.expect_err("a panic");
        let here = payload.downcast_ref::<alloc::string::String>().expect("a text");
        assert!(here == "true" && on_caller || here == "false" && on_worker);
        assert!(ran.load(Ordering::Relaxed) < 1000, "chunks that had not begun are left out");
        meet(&pool);
    }
}

#[test]
fn a_payload_that_panics_when_it_is_dropped_is_kept_from_it() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    let pool = ThreadPool::new(2);
    let both = Barrier::new(2);
    let result = catch_unwind(AssertUnwindSafe(|| {
        pool.for_each_chunk(&mut [0.0; 2], 1, &|_, _| {
            both.wait();
            std::panic::panic_any(Bomb);
        });
    }));
    core::mem::forget(result.expect_err("a panic"));
    meet(&pool);
}

#[test]
fn a_second_caller_does_its_work_alone() {
    let pool = ThreadPool::new(2);
    let (inside, outside) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pool.for_each_chunk(&mut [0.0; 2], 1, &|_, _| {
                inside.wait();
                outside.wait();
            });
        });
        inside.wait();
        // Both threads of the pool are held in the other's run. What fails does so after they are
        // let go.
        let (here, mut data) = (std::thread::current().id(), [0.0; 9]);
        pool.for_each_chunk(&mut data, 2, &|_, part| {
            part.fill(if std::thread::current().id() == here { 1.0 } else { 2.0 });
        });
        outside.wait();
        assert_eq!(data, [1.0; 9]);
    });
    meet(&pool);
}

#[test]
fn workers_end_when_the_pool_is_dropped() {
    for round in 0..200 {
        let pool = ThreadPool::new(1 + round % 5);
        let shared = Arc::downgrade(&pool.shared);
        match round % 4 {
            0 => until_asleep(&pool),
            1 => pool.for_each_chunk(&mut [0.0; 9], 1, &|_, _| {}),
            2 => sleep(Duration::from_micros(round as u64)),
            _ => {}
        }
        drop(pool);
        assert_eq!(shared.strong_count(), 0, "a worker is left, round {round}");
    }
}

#[test]
fn the_hook_has_run_on_every_worker() {
    let calls: Arc<Vec<AtomicUsize>> = Arc::new((0..5).map(|_| AtomicUsize::new(0)).collect());
    let pool = ThreadPool::with_start_hook(5, {
        let calls = calls.clone();
        move |index| {
            sleep(Duration::from_millis(1));
            calls[index].fetch_add(1, Ordering::Relaxed);
        }
    });
    let called: Vec<_> = calls.iter().map(|calls| calls.load(Ordering::Relaxed)).collect();
    assert_eq!(called, [0, 1, 1, 1, 1]);
    drop(pool);
    assert_eq!(Arc::strong_count(&calls), 1);
}

#[test]
#[should_panic(expected = "no core 2")]
fn a_hook_that_panics_is_the_makers_panic() {
    ThreadPool::with_start_hook(4, |index| assert!(index != 2, "no core {index}"));
}

#[test]
#[should_panic(expected = "a pool of 0 threads")]
fn no_threads_are_refused() {
    ThreadPool::new(0);
}

#[test]
fn a_pool_can_be_shared_and_sent() {
    fn check<T: Send + Sync + fmt::Debug>(value: &T, text: &str) {
        assert_eq!(format!("{value:?}"), text);
    }
    check(&ThreadPool::new(2), "ThreadPool { threads: 2, .. }");
}
