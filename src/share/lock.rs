//! Locks: those of `std`, or spinning ones where there is none; under `cfg(loom)` the model
//! checker's in the place of `std`'s.
//!
//! Everything else in the room says [`Lock`], [`Mutex`] and [`Gate`] and cannot tell which it
//! has. Poison is stepped over in here: a panic while holding a store leaves its rows half
//! written, which is not recoverable, and not unsound either, the rows being plain numbers. A
//! poisoned lock should not turn one request's panic into a server that never answers again.
//!
//! # What each does to its users
//!
//! `std`'s RwLock lets waiting writers go first, so that a thread that holds a read guard and
//! asks for a second one of the same layer waits for ever if a writer came in between. The
//! spinning lock by itself never starves readers and may starve writers; here it counts the
//! writers that wait, and readers let them pass, so that the two behave alike and the same code
//! is wrong under both.
//!
//! # What the model checker sees
//!
//! The whole room is written once: loom's locks and atomics have the names of `std`'s, so that
//! what is checked is what is shipped. The spinning locks are `spin`'s affair and not modelled; nor
//! is poison, for which loom has no answer: its locks give up once unwinding has dropped a guard.
//! A panic under a guard is to the others what this file makes of it, a guard that is dropped in the
//! middle of a write, and is modelled as that.

#[cfg(feature = "std")]
pub(crate) use of_std::{Lock, Mutex, MutexGuard, ReadGuard, WriteGuard};
#[cfg(not(feature = "std"))]
pub(crate) use spinning::{Lock, Mutex, MutexGuard, ReadGuard, WriteGuard};

/// What the locks and the bell are made of.
#[cfg(all(feature = "std", not(all(test, loom))))]
pub(super) use std::sync as below;

#[cfg(all(feature = "std", test, loom))]
pub(super) use loom::sync as below;

#[cfg(feature = "std")]
mod of_std {
    use std::sync::PoisonError;

    use super::below as sync;

    pub(crate) type ReadGuard<'a, T> = sync::RwLockReadGuard<'a, T>;
    pub(crate) type WriteGuard<'a, T> = sync::RwLockWriteGuard<'a, T>;
    pub(crate) type MutexGuard<'a, T> = sync::MutexGuard<'a, T>;

    /// Many readers or one writer.
    pub(crate) struct Lock<T>(sync::RwLock<T>);

    impl<T> Lock<T> {
        pub(crate) fn new(value: T) -> Self {
            Lock(sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> ReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> WriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }
    }

    /// One at a time.
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}

#[cfg(not(feature = "std"))]
mod spinning {
    use core::sync::atomic::{AtomicUsize, Ordering};

    pub(crate) type ReadGuard<'a, T> = spin::rwlock::RwLockReadGuard<'a, T>;
    pub(crate) type WriteGuard<'a, T> = spin::rwlock::RwLockWriteGuard<'a, T>;
    pub(crate) type MutexGuard<'a, T> = spin::mutex::MutexGuard<'a, T>;

    /// Many readers or one writer; writers that wait go first.
    pub(crate) struct Lock<T> {
        inner: spin::rwlock::RwLock<T>,
        /// Writers that wait. Without it, readers that come and go leave a writer no instant in
        /// which there is none, and a push may wait as long as attention is busy.
        waiting: AtomicUsize,
    }

    impl<T> Lock<T> {
        pub(crate) fn new(value: T) -> Self {
            Lock { inner: spin::rwlock::RwLock::new(value), waiting: AtomicUsize::new(0) }
        }

        pub(crate) fn read(&self) -> ReadGuard<'_, T> {
            loop {
                // Relaxed: this is manners. What excludes is the lock itself.
                if self.waiting.load(Ordering::Relaxed) == 0
                    && let Some(guard) = self.inner.try_read()
                {
                    return guard;
                }
                core::hint::spin_loop();
            }
        }

        pub(crate) fn write(&self) -> WriteGuard<'_, T> {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let guard = self.inner.write();
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            guard
        }
    }

    /// One at a time.
    pub(crate) struct Mutex<T>(spin::mutex::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(spin::mutex::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock()
        }
    }
}

/// The right to take blocks of one layer.
///
/// In debug builds with `std` it knows which thread holds it, so that a thread that would wait for
/// itself gets a panic that says so.
pub(crate) struct Gate {
    mutex: Mutex<()>,
    holder: holder::Holder,
}

/// Holds a [`Gate`].
pub(crate) struct GateGuard<'a> {
    gate: &'a Gate,
    _mutex: MutexGuard<'a, ()>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Gate { mutex: Mutex::new(()), holder: holder::Holder::new() }
    }

    /// Whether this thread is known to hold the gate, and so the layer's write guard.
    pub(crate) fn is_mine(&self) -> bool {
        self.holder.is_this_thread()
    }

    pub(crate) fn lock(&self) -> GateGuard<'_> {
        let mutex = self.mutex.lock();
        self.holder.set();
        GateGuard { gate: self, _mutex: mutex }
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        // Before the mutex is given up, which is when the fields are dropped.
        self.gate.holder.clear();
    }
}

// A model's threads are one thread to `std`.
#[cfg(all(feature = "std", debug_assertions, not(all(test, loom))))]
mod holder {
    use core::sync::atomic::{AtomicUsize, Ordering};

    std::thread_local! {
        /// Its address tells living threads apart, and a guard cannot leave its thread.
        static HERE: u8 = const { 0 };
    }

    fn here() -> usize {
        HERE.with(|byte| core::ptr::from_ref(byte).addr())
    }

    /// The thread that holds the gate, or 0. Relaxed is enough: the question is only ever "is it
    /// me", and what this thread stored itself it sees.
    pub(crate) struct Holder(AtomicUsize);

    impl Holder {
        pub(crate) fn new() -> Self {
            Holder(AtomicUsize::new(0))
        }

        pub(crate) fn is_this_thread(&self) -> bool {
            self.0.load(Ordering::Relaxed) == here()
        }

        pub(crate) fn set(&self) {
            self.0.store(here(), Ordering::Relaxed);
        }

        pub(crate) fn clear(&self) {
            self.0.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(not(all(feature = "std", debug_assertions, not(all(test, loom)))))]
mod holder {
    /// Nobody is remembered.
    pub(crate) struct Holder;

    impl Holder {
        pub(crate) fn new() -> Self {
            Holder
        }

        pub(crate) fn is_this_thread(&self) -> bool {
            false
        }

        pub(crate) fn set(&self) {}

        pub(crate) fn clear(&self) {}
    }
}
