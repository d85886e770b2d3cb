//! Waiting for blocks, and being told.
//!
//! A request that does not fit now waits; one that cannot ever fit must not
//! ([`can_ever_fit`](SharedPagedKv::can_ever_fit) tells them apart). Under `std` there is a bell:
//! those who wait sleep at a condition variable, and everything that gives blocks back rings. The
//! ringing must not cost those who give back anything, and must never make them wait for a guard,
//! so it is one fence and one load as long as nobody waits, and the bell's mutex is a leaf that is
//! held while free counts are read and no longer.
//!
//! Why no ring is missed: who waits says so first (`waiting`) and counts then; who gives back
//! counts first and looks at `waiting` then. With a fence between the two on both sides, at least
//! one of them sees what the other did. And who rings passes through the mutex, which who waits
//! holds from his last look at the counts until he sleeps.
//!
//! `loom_tests/bell_tests.rs` goes through the orders, and notices where a fence or the mutex is left out.
//!
//! Without `std` there is nobody to sleep with: the bell is nothing, and waiting is the caller's.

#[cfg(feature = "std")]
pub(crate) use of_std::Bell;

#[cfg(not(feature = "std"))]
pub(crate) struct Bell;

#[cfg(not(feature = "std"))]
impl Bell {
    pub(crate) fn new() -> Self {
        Bell
    }

    pub(crate) fn ring(&self) {}
}

#[cfg(feature = "std")]
mod of_std {
    use core::time::Duration;
    use std::sync::PoisonError;
    use std::time::Instant;

    use super::super::lock::below::{Condvar, Mutex};
    use super::super::sequence::Place;
    use super::super::shared::SharedPagedKv;
    use super::super::spec::LayerElement;
    use crate::atomic::{AtomicUsize, Ordering, fence};

    pub(crate) struct Bell {
        waiting: AtomicUsize,
        mutex: Mutex<()>,
        rung: Condvar,
    }

    impl Bell {
        pub(crate) fn new() -> Self {
            Bell { waiting: AtomicUsize::new(0), mutex: Mutex::new(()), rung: Condvar::new() }
        }

        /// Blocks were given back.
        #[inline]
        pub(crate) fn ring(&self) {
            fence(Ordering::SeqCst);
            if self.waiting.load(Ordering::Relaxed) != 0 {
                self.wake();
            }
        }

        #[cold]
        fn wake(&self) {
            drop(self.mutex.lock().unwrap_or_else(PoisonError::into_inner));
            self.rung.notify_all();
        }

        /// Sleeps until `ready`, `most` at the longest. Returns whether it was.
        ///
        /// `ready` only reads counts: it is asked with the bell's mutex held.
        pub(crate) fn wait(&self, most: Duration, ready: impl Fn() -> bool) -> bool {
            struct Waiting<'a>(&'a AtomicUsize);
            impl Drop for Waiting<'_> {
                fn drop(&mut self) {
                    self.0.fetch_sub(1, Ordering::Relaxed);
                }
            }
            if ready() {
                return true;
            }
            let begun = Instant::now();
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let _waiting = Waiting(&self.waiting);
            let mut held = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                fence(Ordering::SeqCst);
                if ready() {
                    return true;
                }
                let left = most.saturating_sub(begun.elapsed());
                if left.is_zero() {
                    return false;
                }
                let woken = self.rung.wait_timeout(held, left);
                held = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    impl<E: LayerElement> SharedPagedKv<E> {
        /// Sleeps until what these places lack is free; gives what is left of `most`.
        pub(in super::super) fn wait_for(&self, most: Duration, places: &[Place]) -> Duration {
            let begun = Instant::now();
            let ready = || {
                let mut layers = self.seats().zip(places);
                layers.all(|(seat, place)| seat.blocks.free() >= place.lack.free())
            };
            let woken = self.bell.wait(most, ready);
            if woken { most.saturating_sub(begun.elapsed()) } else { Duration::ZERO }
        }

        /// Sleeps until `n` groups are free, `most` at the longest. Returns whether they were.
        ///
        /// At once where they are free already, and where there are not that many blocks. What was
        /// free when it returns may be taken by somebody else a moment later: ask, be refused,
        /// wait, ask again. There is no queue, and a small request may pass a large one by.
        ///
        /// Hold nothing while waiting that others may be waiting for: two requests that each keep
        /// half of the pool and wait for the other half meet the bound of both their waits.
        ///
        /// # Deadlock
        ///
        /// Takes no lock that a guard holds; but a thread that sleeps with a guard keeps those
        /// from giving back who need it.
        ///
        /// # Examples
        ///
        /// ```
        /// use core::time::Duration;
        /// use paged_kv::cache::SharedPagedKv;
        ///
        /// let shared = SharedPagedKv::new(2, 16, 1, 1, 4);
        /// let group = shared.acquire_group().expect("one is free");
        /// assert!(!shared.wait_for_groups(1, Duration::from_millis(1)));
        /// std::thread::scope(|scope| {
        ///     scope.spawn(|| assert!(shared.release_group(group)));
        ///     assert!(shared.wait_for_groups(1, Duration::from_secs(60)));
        /// });
        /// ```
        pub fn wait_for_groups(&self, n: usize, most: Duration) -> bool {
            let ever = self.seats().map(|seat| seat.blocks.total()).min().unwrap_or(0);
            n <= ever && self.bell.wait(most, || self.free_groups() >= n)
        }
    }

    #[cfg(all(test, not(loom)))]
    mod tests {
        use super::*;

        /// A count that stayed would make every release after it wake somebody who is not there.
        #[test]
        fn who_has_waited_is_not_rung_for() {
            let bell = Bell::new();
            assert!(!bell.wait(Duration::ZERO, || false));
            assert!(bell.wait(Duration::ZERO, || true));
            assert_eq!(bell.waiting.load(Ordering::Relaxed), 0);
        }
    }
}
