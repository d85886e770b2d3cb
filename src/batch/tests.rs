//! What is asked of every executor.

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::panic::catch_unwind;

use super::*;

/// Each executor by name; those with threads at several counts.
fn executors() -> Vec<(String, Box<dyn Executor + Sync>)> {
    let mut all: Vec<(String, Box<dyn Executor + Sync>)> = Vec::new();
    // Not `vec!`: without features nothing more is pushed, and `mut` would be too much.
    all.extend([("inline".into(), Box::new(Inline) as _)]);
    #[cfg(feature = "std")]
    for threads in [1, 2, 3, 8] {
        let pool = ThreadPool::new(threads);
        assert_eq!(pool.threads(), threads);
        all.push((format!("pool of {threads}"), Box::new(pool)));
    }
    #[cfg(feature = "rayon")]
    {
        all.push(("rayon".into(), Box::new(Rayon::current())));
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let executor = Rayon::of(Box::leak(Box::new(pool)));
            assert_eq!(executor.threads(), threads);
            all.push((format!("rayon of {threads}"), Box::new(executor)));
        }
    }
    all
}

/// Runs once and looks at every number and every call.
fn check(name: &str, executor: &dyn Executor, len: usize, chunk: usize) {
    let at = format!("{name}, {len} numbers in chunks of {chunk}");
    let count = len.div_ceil(chunk);
    let calls: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
    let mut data: Vec<f32> = (0..len).map(|place| place as f32).collect();
    executor.for_each_chunk(&mut data, chunk, &|index, part| {
        calls[index].fetch_add(1, Ordering::Relaxed);
        let start = index * chunk;
        assert_eq!(part.len(), chunk.min(len - start), "{at}, chunk {index}");
        for (place, number) in part.iter_mut().enumerate() {
            assert_eq!(*number, (start + place) as f32, "{at}, chunk {index}");
            *number = -1.0 - index as f32;
        }
    });
    for (index, calls) in calls.iter().enumerate() {
        assert_eq!(calls.load(Ordering::Relaxed), 1, "{at}, chunk {index}");
    }
    for (place, number) in data.iter().enumerate() {
        assert_eq!(*number, -1.0 - (place / chunk) as f32, "{at}, number {place}");
    }
}

fn panic_text(run: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => payload.downcast::<&str>().expect("a text").to_string(),
    }
}

#[test]
fn each_chunk_once_and_with_its_numbers() {
    for (name, executor) in executors() {
        for len in [0, 1, 2, 7, 64, 1009] {
            for chunk in [1, 2, 3, 63, 64, 65, 1008, 2000, usize::MAX] {
                check(&name, &*executor, len, chunk);
            }
        }
    }
}

#[test]
fn no_numbers_no_calls() {
    for (name, executor) in executors() {
        executor.for_each_chunk(&mut [], 3, &|_, _| panic!("{name} called"));
    }
}

#[test]
fn chunks_of_nothing_are_refused_before_anything_runs() {
    for (name, executor) in executors() {
        for mut data in [vec![], vec![1.0; 5]] {
            let text = panic_text(|| {
                executor.for_each_chunk(&mut data, 0, &|_, _| panic!("{name} called"));
            });
            assert!(text.contains("chunks of 0 numbers"), "{name}: {text}");
        }
    }
}

/// When a chunk begins, those before it have been handed out; each other thread may hold one of
/// them and have lost its core before it could say so.
#[test]
fn chunks_begin_in_ascending_order() {
    for (name, executor) in executors() {
        for _ in 0..50 {
            let begun: Vec<_> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            executor.for_each_chunk(&mut [0.0; 100], 1, &|index, _| {
                begun[index].store(1, Ordering::SeqCst);
                let before = begun[..index].iter();
                let late = before.filter(|begun| begun.load(Ordering::SeqCst) == 0).count();
                assert!(late < executor.threads(), "{name}: chunk {index} passed {late} others by");
                std::thread::yield_now();
            });
        }
    }
}

#[test]
fn a_panic_goes_on_at_the_caller_when_all_have_stopped() {
    for (name, executor) in executors() {
        for panicking in [0, 1, 39] {
            let inside = AtomicUsize::new(0);
            let mut data = [0.0; 40];
            let text = panic_text(|| {
                executor.for_each_chunk(&mut data, 1, &|index, part| {
                    if index == panicking {
                        panic!("chunk {index}");
                    }
                    inside.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                    part[0] = 1.0;
                    inside.fetch_sub(1, Ordering::Relaxed);
                });
            });
            assert_eq!(text, format!("chunk {panicking}"), "{name}");
            assert_eq!(inside.load(Ordering::Relaxed), 0, "{name} is still at work");
            check(&name, &*executor, 100, 3);
        }
    }
}

/// A run inside the work of another, on the same executor, ends.
#[test]
fn runs_may_be_nested() {
    for (name, executor) in executors() {
        let mut data = [0.0; 60];
        executor.for_each_chunk(&mut data, 10, &|outer, part| {
            executor.for_each_chunk(part, 3, &|inner, part| {
                executor.for_each_chunk(part, 1, &|innermost, part| {
                    part[0] = (10 * outer + 3 * inner + innermost) as f32;
                });
            });
        });
        for (place, number) in data.iter().enumerate() {
            assert_eq!(*number, place as f32, "{name}");
        }
    }
}

#[test]
fn two_callers_do_not_wait_for_each_other_for_ever() {
    for (name, executor) in executors() {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for len in 0..200 {
                        check(&name, &*executor, len, 7);
                    }
                });
            }
        });
    }
}
