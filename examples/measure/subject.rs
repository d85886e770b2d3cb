//! What can be timed, whatever it stores.

use core::hint::black_box;

use paged_kv::{Element, Level};

use super::measure::seconds;
use super::problem::Problem;

/// What is timed of a subject.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// A call, in one of the ways there are.
    Call { level: Level, way: usize },
    /// Reading what a call reads.
    Read(Level),
}

/// Keys and values of one type, and something to be done with them.
pub(crate) trait Subject {
    fn dtype(&self) -> &'static str;

    /// The ways in which it can be done, by name, and with how many threads.
    fn ways(&self) -> &'static [(&'static str, usize)] {
        &[("", 1)]
    }

    /// Positions that a call goes over.
    fn positions(&self) -> usize;

    /// Floating point operations of a call.
    fn flops(&self) -> f64;

    /// Bytes of keys and values that a call reads. None where that is no limit.
    fn bytes(&self) -> Option<f64>;

    /// Copies that calls go through in turn.
    fn copies(&self) -> usize;

    /// Does it `again` times, and says how many seconds one of them took.
    fn time(&mut self, ask: Ask, copy: usize, again: usize) -> f64;
}

/// A problem, and how much of it there is.
pub(crate) struct Attend<'a, E: Element> {
    pub(crate) problem: Problem<'a, E>,
    pub(crate) n_q: usize,
    pub(crate) len: usize,
    pub(crate) flops: f64,
    pub(crate) copies: usize,
}

/// With more query rows than this, reading is not what takes time.
const FEW_ROWS: usize = 8;

impl<E: Element> Subject for Attend<'_, E> {
    fn dtype(&self) -> &'static str {
        E::NAME
    }

    fn positions(&self) -> usize {
        self.len
    }

    fn flops(&self) -> f64 {
        self.flops
    }

    fn bytes(&self) -> Option<f64> {
        (self.n_q <= FEW_ROWS).then(|| self.problem.kv_bytes())
    }

    fn copies(&self) -> usize {
        self.copies
    }

    fn time(&mut self, ask: Ask, copy: usize, again: usize) -> f64 {
        let problem = &mut self.problem;
        let all = match ask {
            Ask::Call { level, .. } => {
                problem.level = level;
                seconds(|| (0..again).for_each(|_| problem.call(black_box(copy))))
            }
            Ask::Read(level) => {
                problem.level = level;
                let read = |most: f32, _| most.max(problem.read(black_box(copy)));
                seconds(|| (0..again).fold(0.0, read))
            }
        };
        all / again as f64
    }
}
