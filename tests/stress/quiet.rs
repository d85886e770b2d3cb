//! Moments at which all threads stand still, with whatever they hold.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paged_kv::{BlockId, PageGroup};

/// What a thread holds.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    pub(crate) tables: Vec<(usize, Vec<BlockId>)>,
    pub(crate) groups: Vec<PageGroup>,
}

/// Where the threads meet.
pub(crate) struct Quiet<'a> {
    state: Mutex<State>,
    all: Condvar,
    check: &'a (dyn Fn(&[Holdings]) + Sync),
    begun: Instant,
    every: Duration,
    /// Milliseconds from the beginning to the next meeting.
    next: AtomicU64,
    failed: AtomicBool,
}

struct State {
    threads: usize,
    here: Vec<Holdings>,
    times: u64,
}

impl<'a> Quiet<'a> {
    pub(crate) fn new(
        threads: usize,
        every: Duration,
        check: &'a (dyn Fn(&[Holdings]) + Sync),
    ) -> Self {
        Quiet {
            state: Mutex::new(State { threads, here: Vec::new(), times: 0 }),
            all: Condvar::new(),
            check,
            begun: Instant::now(),
            every,
            next: AtomicU64::new(every.as_millis() as u64),
            failed: AtomicBool::new(false),
        }
    }

    /// Waits for the others where it is time, and goes on with them.
    pub(crate) fn point(&self, holdings: impl FnOnce() -> Holdings) {
        assert!(!self.failed.load(Ordering::Relaxed), "another thread has failed");
        if (self.begun.elapsed().as_millis() as u64) < self.next.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        state.here.push(holdings());
        let times = state.times;
        self.go_on_if_all_are_here(&mut state);
        while state.times == times {
            state = self.all.wait(state).unwrap_or_else(PoisonError::into_inner);
            assert!(!self.failed.load(Ordering::Relaxed), "another thread has failed");
        }
    }

    /// A thread that holds nothing is done.
    pub(crate) fn leave(&self) {
        let mut state = self.lock();
        state.threads -= 1;
        self.go_on_if_all_are_here(&mut state);
    }

    /// Nobody waits for the others any more.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        drop(self.lock());
        self.all.notify_all();
    }

    pub(crate) fn times(&self) -> u64 {
        self.lock().times
    }

    fn go_on_if_all_are_here(&self, state: &mut State) {
        if state.here.is_empty() || state.here.len() < state.threads {
            return;
        }
        (self.check)(&state.here);
        state.here.clear();
        state.times += 1;
        let next = self.begun.elapsed() + self.every;
        self.next.store(next.as_millis() as u64, Ordering::Relaxed);
        self.all.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
