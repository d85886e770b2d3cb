//! No memory is to be had: each allocation of a call that promises an error fails once. Small ones
//! (a handle's, a list of a few layers) are not promised and do not fail here; what grows with the
//! caller's numbers is.
#![expect(unsafe_code, reason = "an allocator that fails has to be one")]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::ptr;
use std::alloc::System;
use std::sync::Arc;

use paged_kv::cache::{KvBlockPool, KvCache, LayerError, PagedKvStore, SharedPagedKv};
use paged_kv::wire::{Label, Saved, WireError};
use paged_kv::{KvCacheError, KvShape, ShapeError};

use super::world::{SIZE, World, rows, shape};

/// Bytes from which on an allocation counts.
const LARGE: usize = 1024;

std::thread_local! {
    /// Large allocations of this thread until the one that fails; 0 where none does.
    static LEFT: Cell<u32> = const { Cell::new(0) };
}

struct Failing;

fn fails(bytes: usize) -> bool {
    // The counter itself is gone while a thread ends.
    bytes >= LARGE
        && LEFT
            .try_with(|left| {
                let before = left.get();
                left.set(before.saturating_sub(1));
                before == 1
            })
            .unwrap_or(false)
}

// SAFETY: every request is the system allocator's, unchanged, or is refused.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if fails(layout.size()) {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if fails(size) {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

/// Runs `call` with the first large allocation failing, the second, and so on, until all are had; it
/// says whether it was refused. At least `least` are made.
fn at_every_allocation(name: &str, least: u32, mut call: impl FnMut() -> bool) {
    for nth in 1.. {
        LEFT.set(nth);
        let refused = call();
        let failed = LEFT.replace(0) == 0;
        assert_eq!(refused, failed, "{name}, allocation {nth}");
        if !failed {
            assert!(nth > least, "{name}: {nth}");
            return;
        }
    }
}

fn is_memory(error: ShapeError) -> bool {
    matches!(error, ShapeError::OutOfMemory { .. }) || panic!("{error}")
}

#[test]
fn stores_that_cannot_be_opened_say_so() {
    let store = || PagedKvStore::<f32>::with_shape(shape(), 500).map_err(is_memory);
    at_every_allocation("a store", 3, || store().is_err());
    let bytes = PagedKvStore::<f32>::memory_needed(shape(), 300).unwrap();
    let mut memory = Some(vec![7_u8; bytes].into());
    at_every_allocation("a store in brought memory", 2, || match PagedKvStore::<f32>::from_memory(
        shape(),
        memory.take().unwrap(),
    ) {
        Ok(_) => false,
        Err(refused) => {
            assert_eq!(refused.memory.as_bytes(), &vec![7; bytes][..]);
            memory = Some(refused.memory);
            is_memory(refused.error)
        }
    });
    let shared = || SharedPagedKv::<f32>::with_shape(3, shape(), 500).map_err(is_memory);
    at_every_allocation("layers", 9, || shared().is_err());
    let spec = paged_kv::cache::LayerSpec::new(shape(), 500);
    at_every_allocation("specified layers", 9, || {
        match SharedPagedKv::<f32>::with_layers(&[spec; 3]) {
            Err(LayerError::Shape { error, .. }) => is_memory(error),
            other => other.is_err(),
        }
    });
}

/// A bounded cache gives the blocks back that it took for rows which found no memory.
#[test]
fn caches_that_cannot_grow_are_as_they_were() {
    let pool = Arc::new(KvBlockPool::new(8, 100));
    let shape = KvShape::square(SIZE, 2, 8).unwrap();
    let refused = |result: Result<(), KvCacheError>| match result {
        Ok(()) => false,
        Err(KvCacheError::Shape(error)) => is_memory(error),
        Err(other) => panic!("{other}"),
    };
    let n = 5 * SIZE;
    let all = vec![1.5; n * 16];
    for bounded in [false, true] {
        let open = || match bounded {
            false => KvCache::<f32>::with_shape(shape),
            true => KvCache::with_shape_in_pool(shape, &pool).unwrap(),
        };
        let mut cache = open();
        cache.append(&all[..3 * 16], &all[..3 * 16], 3).unwrap();
        let see = |cache: &KvCache| {
            let numbers = (cache.seq_len(), cache.held_blocks(), cache.memory_bytes());
            (numbers, pool.free_blocks())
        };
        let before = see(&cache);
        at_every_allocation("append", 4, || {
            let refused = refused(cache.try_append(&all, &all, n));
            assert!(!refused || see(&cache) == before);
            refused
        });
        let before = pool.free_blocks();
        at_every_allocation("try_clone", 4, || {
            let copied = refused(cache.try_clone().map(drop));
            assert_eq!(pool.free_blocks(), before);
            copied
        });
    }
    at_every_allocation("try_with_capacity", 2, || {
        KvCache::<f32>::try_with_capacity(2, 8, 200).map_err(is_memory).is_err()
    });
    assert_eq!(pool.free_blocks(), 100);
}

#[test]
fn what_comes_back_to_no_memory_holds_nothing() {
    let mut world = World::<f32>::with(80);
    let n = 30 * SIZE;
    let mut long = paged_kv::cache::PagedSequence::new(Arc::clone(&world.pool));
    long.reserve(n).unwrap();
    for layer in 0..3 {
        let (k, v) = rows(1, 0, n);
        long.append(layer, &k, &v, n).unwrap();
    }
    long.commit(n).unwrap();
    let tokens: Vec<u32> = (0..n as u32).collect();
    let label = Label::new().tokens(&tokens).salt(&[3; 2000]);
    let mut bytes = Vec::new();
    long.save(&label, &mut bytes).unwrap();
    drop(long);
    let before = world.see();
    // The header's lists grow as they arrive, and one page is held.
    at_every_allocation("restore", 3, || {
        let read = Saved::open(&bytes[..]).and_then(|saved| world.requests[2].restore(saved));
        let refused = matches!(read, Err(WireError::OutOfMemory { .. }));
        assert!(refused || read.is_ok(), "{read:?}");
        // The comparison itself has all the memory it wants.
        let left = LEFT.replace(0);
        if refused {
            world.see().unordered().must_be(&before.clone().unordered(), format_args!("restore"));
        }
        LEFT.set(left);
        refused
    });
    world.end();
}
