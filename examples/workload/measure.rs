//! Calls, timed one by one, and the limits of the processor between them.
//!
//! A machine has good and bad moments, and a limit measured in a good one makes everything look
//! bad. So the time is cut into rounds, and in each there are calls, then reads of the same bytes
//! in the same state of the caches, then multiply-adds.

use core::hint::black_box;
use std::time::Instant;

use paged_kv::internal::limits;
use paged_kv::{Element, Level};

use super::problem::{Problem, Workers};
use super::report::Times;

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Seconds for the calls of all rounds.
    pub(crate) seconds: f64,
    pub(crate) rounds: usize,
    /// Copies to go through in turn.
    pub(crate) copies: usize,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(crate) calls: Times,
    pub(crate) reads: Times,
    /// Floating point operations a second at most.
    pub(crate) fma: f64,
}

/// Below this, what a clock costs shows: reads of short sequences are timed several at once.
const SHORT: f64 = 20e-6;

pub(crate) fn measure<E: Element>(
    problem: &mut Problem<'_, E>,
    level: Level,
    effort: Effort,
) -> Measured {
    let (mut calls, mut reads, mut fma) = (Vec::new(), Vec::new(), 0.0f64);
    let share = effort.seconds / effort.rounds as f64;
    for _ in 0..effort.rounds {
        turn(effort.copies, share, &mut calls, |copy| seconds(|| problem.call(copy)));
        let again = repeats(problem, effort.copies);
        turn(effort.copies, share / 4.0, &mut reads, |copy| {
            let read = |most: f32, _| most.max(problem.read(black_box(copy)));
            seconds(|| (0..again).fold(0.0, read)) / again as f64
        });
        fma = fma.max(multiply_adds(level, problem.workers()));
    }
    Measured { calls: Times::new(calls), reads: Times::new(reads), fma }
}

/// Goes through all copies until the time is over, at least once, and notes what `call` took.
///
/// One copy is called twice before, so that the caches hold it. Several are gone through once
/// without being noted: then each is as long ago as all the others together.
fn turn(copies: usize, share: f64, times: &mut Vec<f64>, mut call: impl FnMut(usize) -> f64) {
    let before = if copies == 1 { 2 } else { copies };
    for index in 0..before {
        call(index % copies);
    }
    let begin = Instant::now();
    loop {
        (0..copies).for_each(|copy| times.push(call(copy)));
        if begin.elapsed().as_secs_f64() >= share {
            return;
        }
    }
}

/// How many reads of a copy make a time worth measuring. With several copies it is one: the
/// second would find the rows in the caches.
fn repeats<E: Element>(problem: &Problem<'_, E>, copies: usize) -> usize {
    if copies > 1 {
        return 1;
    }
    let once = seconds(|| problem.read(0));
    (SHORT / once.max(1e-9)).ceil() as usize
}

/// The best of a few runs of about a millisecond, in which each thread does as much as another.
pub(crate) fn multiply_adds(level: Level, workers: Workers<'_>) -> f64 {
    let mut each = vec![0.0; workers.threads()];
    let mut rounds = 1000;
    let mut best = 0.0f64;
    for _ in 0..6 {
        let took = seconds(|| {
            workers.for_each_chunk(&mut each, 1, &|_, one| {
                one[0] = limits::fma(level, black_box(rounds));
            });
        });
        best = best.max((workers.threads() * rounds * limits::ROUND_FLOPS) as f64 / took);
        rounds = (best / workers.threads() as f64 * 1e-3) as usize / limits::ROUND_FLOPS + 1;
    }
    black_box(&each);
    best
}

/// How long it took.
pub(crate) fn seconds<T>(work: impl FnOnce() -> T) -> f64 {
    let begin = Instant::now();
    black_box(work());
    begin.elapsed().as_secs_f64()
}
