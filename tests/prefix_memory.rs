//! What a cached block takes, under an allocator that counts.
#![cfg(any(feature = "std", feature = "spin"))]

use core::alloc::{GlobalAlloc, Layout};
use core::sync::atomic::{AtomicUsize, Ordering};
use paged_kv::cache::SharedPagedKv;
use paged_kv::prefix::{HashKey, PrefixCache, Priority};
use std::alloc::System;

/// Bytes that are allocated now. This file has one test, so that they are that test's.
static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every request is the system allocator's, unchanged.
#[expect(unsafe_code, reason = "an allocator that counts has to be one")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Prompts of a hundred blocks each, so that one block in a hundred has none behind it.
#[test]
fn a_cached_block_takes_what_the_documentation_says() {
    for block_size in [16, 64] {
        let shared = SharedPagedKv::new(1, block_size, 12_000, 1, 1);
        // The group table has its size before anything is cached.
        let groups = shared.acquire_groups(12_000).unwrap();
        for blocks in [4_000, 4_200, 7_000, 7_200, 10_000, 12_000] {
            let before = BYTES.load(Ordering::Relaxed);
            let mut cache = PrefixCache::new(&shared, block_size, HashKey::new([7; 16]));
            for (prompt, groups) in (0_u32..).zip(groups[..blocks].chunks(100)) {
                let tokens = vec![prompt; 100 * block_size];
                cache.insert(b"", &tokens, groups, Priority::NORMAL).unwrap();
            }
            let stats = cache.stats();
            assert_eq!(stats.cached, blocks);
            let bytes = (BYTES.load(Ordering::Relaxed) - before) as f64 / blocks as f64;
            let least = stats.bytes_per_block;
            assert_eq!(least, 56 + 4 * block_size);
            // Twice that at worst, the table, the slot, and a hundredth of an end.
            let most = 2.0 * least as f64 + 12.0 + 8.0 + 0.6;
            assert!(bytes >= least as f64 + 6.0 && bytes <= most, "{bytes} bytes a block");
        }
    }
}
