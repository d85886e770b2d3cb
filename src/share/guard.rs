//! The guards that the shared layer hands out: our own types around whatever lock there is.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};

use super::lock::{GateGuard, ReadGuard, WriteGuard};

/// `Sync`, and not `Send`.
///
/// `std`'s guards must be dropped by the thread that took them, spinning ones need not. Turning a
/// feature on must never break a dependent, so neither may be sent.
type NotSend = PhantomData<dyn Sync>;

/// Shared access to one layer's store, for attention. Dropping it ends the access.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::SharedPagedKv;
///
/// let shared = SharedPagedKv::new(1, 16, 4, 1, 1);
/// let guard = shared.read(0);
/// assert_eq!(guard.free_block_count(), 4); // it is a `&PagedKvStore`
/// std::thread::scope(|scope| {
///     scope.spawn(|| assert_eq!(shared.read(0).block_size(), 16)); // readers do not wait
/// });
/// ```
///
/// # Deadlock
///
/// A thread that holds one and asks for another guard of the same layer, be it a read guard, may
/// wait for ever: a writer that came in between goes first.
///
/// ```compile_fail
/// fn send<T: Send>(_: T) {}
/// let shared = paged_kv::cache::SharedPagedKv::new(1, 16, 1, 1, 1);
/// send(shared.read(0));
/// ```
#[must_use = "the access ends when the guard is dropped"]
pub struct RwLockReadGuard<'a, T> {
    value: ReadGuard<'a, T>,
    not_send: NotSend,
}

/// Exclusive access to one layer's store, for a push. While it lives, nobody else takes blocks of
/// the layer. Dropping it ends the access.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(1, 16, 4, 1, 1);
/// let mut cache = PagedKvCache::new();
/// let mut guard = shared.write(0);
/// cache.push(&mut guard, &[0.5], &[0.5])?; // it is a `&mut PagedKvStore`
/// assert_eq!(shared.free_blocks(0), 3); // counting waits for nobody
/// # drop(guard);
/// # shared.release(0, &mut cache)?;
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
///
/// # Deadlock
///
/// As [`RwLockReadGuard`]; and `acquire_group` by the thread that holds one waits for itself
/// (debug builds with `std` panic). Giving back and counting never wait.
///
/// ```compile_fail
/// fn send<T: Send>(_: T) {}
/// let shared = paged_kv::cache::SharedPagedKv::new(1, 16, 1, 1, 1);
/// send(shared.write(0));
/// ```
#[must_use = "the access ends when the guard is dropped"]
pub struct RwLockWriteGuard<'a, T> {
    // Dropped in this order: the reverse of how they were taken.
    gate: Option<GateGuard<'a>>,
    value: WriteGuard<'a, T>,
    watch: &'a (dyn Watch<T> + Sync),
    not_send: NotSend,
}

/// Looks at a value once more before its writer lets go of it.
pub(crate) trait Watch<T> {
    fn before_unlock(&self, value: &T);
}

impl<'a, T> RwLockReadGuard<'a, T> {
    pub(crate) fn new(value: ReadGuard<'a, T>) -> Self {
        RwLockReadGuard { value, not_send: PhantomData }
    }
}

impl<'a, T> RwLockWriteGuard<'a, T> {
    /// The gate comes later where several layers are taken: every lock first, then every gate.
    pub(crate) fn new(value: WriteGuard<'a, T>, watch: &'a (dyn Watch<T> + Sync)) -> Self {
        RwLockWriteGuard { gate: None, value, watch, not_send: PhantomData }
    }

    pub(crate) fn set_gate(&mut self, gate: GateGuard<'a>) {
        debug_assert!(self.gate.is_none());
        self.gate = Some(gate);
    }
}

impl<T> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        // Both lock and gate are still held.
        self.watch.before_unlock(&self.value);
    }
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLockReadGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl<T: fmt::Debug> fmt::Debug for RwLockWriteGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
