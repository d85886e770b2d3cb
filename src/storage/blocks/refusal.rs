//! A free list that refuses once although it has blocks, for tests.
//!
//! Between two questions whether blocks are free, another thread may take all of them. To a test
//! with one thread that never happens; here it does, at the question of its choice. What is *taken*
//! is taken all the same: a refusal there would be a free list that is broken, not an empty one.

// Not `crate::atomic`: a model checker need not try orders of what no model switches on.
use core::sync::atomic::{AtomicU32, Ordering};

/// Questions until the one that is answered with "none is free"; 0 where none is.
///
/// For one thread: threads that ask at once may each see the same count.
#[derive(Default)]
pub(super) struct Refusal(AtomicU32);

impl Refusal {
    /// The `nth` question from now on is refused, and none after it.
    pub(super) fn set(&self, nth: u32) {
        self.0.store(nth, Ordering::Relaxed);
    }

    /// Whether it is still to come. It does not come any more.
    pub(super) fn cancel(&self) -> bool {
        // Not `swap`, which a processor without compare-and-swap does not have.
        let left = self.0.load(Ordering::Relaxed);
        self.0.store(0, Ordering::Relaxed);
        left != 0
    }

    /// Counts a question; whether it is this one.
    pub(super) fn is_due(&self) -> bool {
        let left = self.0.load(Ordering::Relaxed);
        if left != 0 {
            self.0.store(left - 1, Ordering::Relaxed);
        }
        left == 1
    }
}
