//! Atomics: the processor's, or the model checker's.

#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic::*;

#[cfg(all(test, loom))]
pub(crate) use self::models::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};

/// loom's atomics, with every step in its turn.
///
/// loom remembers one access of a cell, the last. So where one thread loads, and another loads and
/// then stores, as each compare-and-swap loop does, it forgets the first load and never tries the
/// store before it (seen in loom 0.7.3: a load against a `fetch_update` was tried in one order, and
/// against a `fetch_sub` in all six). Here each step first takes a turn at something all of whose
/// steps loom holds to depend on each other: a condition variable nobody waits at, which orders
/// no memory.
#[cfg(all(test, loom))]
mod models {
    use loom::sync::Condvar;
    use loom::sync::atomic;
    pub(crate) use loom::sync::atomic::{Ordering, fence};

    macro_rules! cells {
        ($($name:ident$(<$of:ident>)?: $value:ty;)*) => {$(
            pub(crate) struct $name$(<$of>)? {
                turn: Condvar,
                cell: atomic::$name$(<$of>)?,
            }

            #[allow(dead_code, reason = "all of them have what one of them needs")]
            impl$(<$of>)? $name$(<$of>)? {
                pub(crate) fn new(value: $value) -> Self {
                    $name { turn: Condvar::new(), cell: atomic::$name::new(value) }
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    self.turn.notify_all();
                    self.cell.load(order)
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    self.turn.notify_all();
                    self.cell.store(value, order);
                }

                pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                    self.turn.notify_all();
                    self.cell.swap(value, order)
                }

                pub(crate) fn compare_exchange(
                    &self,
                    found: $value,
                    new: $value,
                    set: Ordering,
                    fetch: Ordering,
                ) -> Result<$value, $value> {
                    self.turn.notify_all();
                    self.cell.compare_exchange(found, new, set, fetch)
                }

                pub(crate) fn fetch_update(
                    &self,
                    set: Ordering,
                    fetch: Ordering,
                    mut new: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    let mut found = self.load(fetch);
                    while let Some(value) = new(found) {
                        match self.compare_exchange(found, value, set, fetch) {
                            Ok(found) => return Ok(found),
                            Err(other) => found = other,
                        }
                    }
                    Err(found)
                }
            }
        )*};
    }

    cells! {
        AtomicBool: bool;
        AtomicU32: u32;
        AtomicUsize: usize;
        AtomicPtr<T>: *mut T;
    }

    #[allow(dead_code, reason = "as above")]
    impl AtomicUsize {
        pub(crate) fn fetch_add(&self, value: usize, order: Ordering) -> usize {
            self.turn.notify_all();
            self.cell.fetch_add(value, order)
        }

        pub(crate) fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
            self.turn.notify_all();
            self.cell.fetch_sub(value, order)
        }
    }
}
