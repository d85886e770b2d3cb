//! Memory: no more than what arrives, whatever the header says.

#![expect(unsafe_code, reason = "an allocator that counts has to be one")]

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use std::alloc::System;

use paged_kv::cache::{PagedKvCache, PagedKvStore};
use paged_kv::internal::saved_bytes::crc32;
use paged_kv::wire::{Label, Saved, WireError};
use paged_kv::{KvDims, KvShape};

use super::{rows, shape};

std::thread_local! {
    /// Bytes that this thread has, and the most since somebody asked.
    static NOW: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    // The counters themselves are gone while a thread ends.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(now.get())));
    });
}

// SAFETY: every request is the system allocator's, unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there while one is copied into the other.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: as the caller promised.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that were held at once beyond those that were there before.
fn most(work: impl FnOnce()) -> usize {
    let before = NOW.get();
    MOST.set(before);
    work();
    (MOST.get() - before) as usize
}

/// The canary: a count that is always small would prove nothing.
#[test]
fn the_counter_counts() {
    let bytes = most(|| drop(core::hint::black_box(vec![0_u8; 100_000])));
    assert!((100_000..101_000).contains(&bytes), "{bytes}");
}

/// A header of one layer of these sizes, its counts and its checksum right.
fn header(len: u64, tokens: u64, salt: u64, layers: u64, dims: KvDims, page: u64) -> Vec<u8> {
    let mut bytes = b"\x89PKV\r\n\x1a\n\x01\0\x01\0\0\0\0\0".to_vec();
    let total = 56 + 88 * layers + 4 * tokens + salt + 4;
    for number in [total, len, tokens, salt, layers] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend([1, 1, 0, 0, 0, 0, 0, 0]);
    let sizes = [dims.block_size, dims.n_kv_heads, dims.k_width, dims.v_width];
    let sizes = sizes.map(|size| size as u64);
    for number in [&[0], &sizes[..], &[0, 0, 0, 0, page]].concat() {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(crc32(&bytes).to_le_bytes());
    bytes
}

#[test]
fn a_header_costs_what_it_brings() {
    let dims = shape(16).dims();
    let mut store = PagedKvStore::<f32>::with_shape(shape(16), 4).unwrap();
    let mut cases = vec![
        header(1 << 40, 1 << 40, 0, 1, dims, 2048),
        header(0, 0, 1 << 40, 1, dims, 2048),
        header(0, 0, 0, 1 << 30, dims, 2048),
        header(1 << 50, 0, 0, 1, dims, 2048),
    ];
    // One huge page, whose size is true.
    let huge = KvDims { block_size: 1 << (usize::BITS - 24), ..dims };
    cases.push(header(50, 0, 0, 1, huge, huge.block_size as u64 * 128));
    for (case, mut bytes) in cases.into_iter().enumerate() {
        bytes.resize(bytes.len() + 20_000, 7);
        let mut cache = PagedKvCache::new();
        let mut read = Ok(());
        let held = most(|| {
            read = Saved::open(&bytes[..]).and_then(|saved| cache.restore(&mut store, saved));
        });
        // The fourth wants more blocks than there are, and is not read on.
        match read {
            Err(WireError::Truncated { have, .. }) => assert_eq!(have, bytes.len() as u64),
            // A length that no `usize` of this processor holds is refused by itself.
            Err(WireError::Field { need, .. }) => {
                assert!(usize::BITS == 32 && need >= usize::MAX as u64 / 4, "{case}: {need}");
            }
            other => {
                assert!(case == 3 && matches!(other, Err(WireError::Kv(_))), "{case}: {other:?}");
            }
        }
        assert!(held <= 4 * bytes.len(), "{case}: {held} for {}", bytes.len());
        assert_eq!(store.free_block_count(), 4);
    }
}

/// One page at a time, to and fro.
#[test]
fn a_page_is_held_at_a_time() {
    let shape = KvShape::square(64, 2, 32).unwrap();
    let mut store = PagedKvStore::<f32>::with_shape(shape, 60).unwrap();
    let mut cache = PagedKvCache::new();
    let (k, v) = rows(shape, 1, 0..64 * 30);
    cache.append(&mut store, &k, &v, 64 * 30).unwrap();
    let mut bytes = Vec::with_capacity(30 * 33_000);
    let held = most(|| cache.save(&store, &Label::new(), &mut bytes).unwrap());
    let page = 64 * 2 * 64 * 4;
    assert!(bytes.len() > 30 * page && held < 3 * page, "{held}");
    let mut back = PagedKvCache::new();
    let held = most(|| back.restore(&mut store, Saved::open(&bytes[..]).unwrap()).unwrap());
    assert!(held < 3 * page, "{held}");
}
