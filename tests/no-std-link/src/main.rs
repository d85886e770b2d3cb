//! Paged decode with a shared prefix, in a program that has no std.
//!
//! What stands in for std is the least that a program needs: a panic handler, an allocator over
//! the C library, and a `main` that C calls. If std came in through any dependency, linking would
//! fail: a program has one panic handler. So the proof is that this file becomes a program, and
//! that the program returns 0.
//!
//! ```text
//! cargo run --manifest-path tests/no-std-link/Cargo.toml
//! cargo run --manifest-path tests/no-std-link/Cargo.toml --features spin
//! ```
//!
//! The numbers are checked too. Two sequences share a prefix of 24 positions and then go separate
//! ways; each must give the bits of a contiguous cache that holds the same rows, and the two must
//! differ. Every level of the processor takes its turn, and finding them is the part of the crate
//! that std would otherwise help with.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::vec;
use alloc::vec::Vec;
use core::ffi::{c_char, c_int, c_void};
use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_into,
    causal_gqa_attention_paged_into,
};
use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::{GqaShape, KvShape, Level};

const BLOCK: usize = 16;
const KV_HEADS: usize = 2;
const HEADS: usize = 6;
const WIDTH: usize = 40;
/// One block and a half: forks share a full block and a half-filled one.
const PREFIX: usize = 24;
const TAIL: usize = 19;

#[unsafe(no_mangle)]
extern "C" fn main(_argc: c_int, _argv: *const *const c_char) -> c_int {
    let levels = Level::available().count();
    if levels < 2 {
        return 10;
    }
    for level in Level::available() {
        let code = paged_decode(level);
        if code != 0 {
            return code;
        }
        #[cfg(feature = "spin")]
        {
            let code = shared_decode(level);
            if code != 0 {
                return code;
            }
        }
    }
    say(c"no std: paged decode over a shared prefix gives the bits of a contiguous cache");
    0
}

/// Two forks of one prefix in one store.
fn paged_decode(level: Level) -> c_int {
    let mut store = PagedKvStore::new(BLOCK, 12, KV_HEADS, WIDTH);
    let mut parent = PagedKvCache::new();
    if append_paged(&mut parent, &mut store, 0, PREFIX) != 0 {
        return 20;
    }
    let Ok(mut child) = parent.fork(&mut store) else { return 21 };
    if append_paged(&mut parent, &mut store, 100, TAIL) != 0
        || append_paged(&mut child, &mut store, 200, TAIL) != 0
    {
        return 22;
    }
    if parent.block_table()[0] != child.block_table()[0] {
        return 23;
    }
    let paged = [decode(level, &store, &parent), decode(level, &store, &child)];
    let alone = [contiguous(level, 100), contiguous(level, 200)];
    if bits(&paged[0]) != bits(&alone[0]) || bits(&paged[1]) != bits(&alone[1]) {
        return 24;
    }
    if paged[0] == paged[1] {
        return 25;
    }
    if parent.release(&mut store).is_err() || child.release(&mut store).is_err() {
        return 26;
    }
    if store.free_block_count() == 12 { 0 } else { 27 }
}

/// The same with the prefix in page groups of the shared layer.
#[cfg(feature = "spin")]
fn shared_decode(level: Level) -> c_int {
    use paged_kv::cache::SharedPagedKv;
    use paged_kv::prefix::{HashKey, PrefixCache, Priority};

    let shared = SharedPagedKv::new(1, BLOCK, 12, KV_HEADS, WIDTH);
    let (Some(first), Some(second)) = (shared.acquire_group(), shared.acquire_group()) else {
        return 30;
    };
    let blocks: Vec<_> = [first, second].iter().filter_map(|g| shared.group_block(*g, 0)).collect();
    let (mut writer, mut reader) = (PagedKvCache::new(), PagedKvCache::new());
    {
        let mut store = shared.write(0);
        if writer.adopt(&mut store, &blocks, 0).is_err()
            || append_paged(&mut writer, &mut store, 0, PREFIX) != 0
        {
            return 31;
        }
        shared.retain_group(first);
        shared.retain_group(second);
        if reader.adopt(&mut store, &blocks, PREFIX).is_err()
            || append_paged(&mut writer, &mut store, 100, TAIL) != 0
            || append_paged(&mut reader, &mut store, 200, TAIL) != 0
        {
            return 32;
        }
    }
    let store = shared.read(0);
    let paged = [decode(level, &store, &writer), decode(level, &store, &reader)];
    drop(store);
    let alone = [contiguous(level, 100), contiguous(level, 200)];
    if bits(&paged[0]) != bits(&alone[0]) || bits(&paged[1]) != bits(&alone[1]) {
        return 33;
    }
    // The full block of the prefix is found by its tokens, and goes once nobody uses it but the cache.
    let mut prefixes = PrefixCache::new(&shared, BLOCK, HashKey::new([7; 16]));
    let tokens: Vec<u32> = (0..PREFIX as u32).collect();
    if prefixes.insert(b"", &tokens, &[first, second], Priority::NORMAL).is_err() {
        return 37;
    }
    for group in [first, second] {
        if shared.release_group(group) || shared.release_group(group) != (group == second) {
            return 34;
        }
    }
    let lease = prefixes.lookup(b"", &tokens);
    if lease.groups() != [first] || lease.covered() != BLOCK || prefixes.evict(1) != 0 {
        return 38;
    }
    drop(lease);
    // While sequences hold its block nothing would come back, and it stays.
    if prefixes.evict(1) != 0 {
        return 39;
    }
    if shared.release(0, &mut writer).is_err() || shared.release(0, &mut reader).is_err() {
        return 35;
    }
    if prefixes.evict(1) != 1 || prefixes.check_invariants([]).is_err() {
        return 40;
    }
    if shared.free_groups() == 12 { 0 } else { 36 }
}

fn append_paged(cache: &mut PagedKvCache, store: &mut PagedKvStore, tag: u32, n: usize) -> c_int {
    let (k, v) = rows(tag, n);
    c_int::from(cache.append(store, &k, &v, n).is_err())
}

fn decode(level: Level, store: &PagedKvStore, cache: &PagedKvCache) -> Vec<f32> {
    let (options, mut scratch) = call(level);
    let mut out = vec![f32::NAN; HEADS * WIDTH];
    let q = query();
    match causal_gqa_attention_paged_into(&q, store, cache, HEADS, &options, &mut out, &mut scratch)
    {
        Ok(()) => out,
        Err(_) => Vec::new(),
    }
}

/// The answer of a cache that holds the prefix and this tail alone.
fn contiguous(level: Level, tail: u32) -> Vec<f32> {
    let mut cache = KvCache::new(KV_HEADS, WIDTH);
    for (tag, n) in [(0, PREFIX), (tail, TAIL)] {
        let (k, v) = rows(tag, n);
        if cache.append(&k, &v, n).is_err() {
            return vec![f32::NAN];
        }
    }
    let (options, mut scratch) = call(level);
    let mut out = vec![f32::NAN; HEADS * WIDTH];
    let q = query();
    match causal_gqa_attention_into(&q, &cache, HEADS, &options, &mut out, &mut scratch) {
        Ok(()) => out,
        Err(_) => vec![f32::NAN],
    }
}

/// Options, and a scratch that is full of what is not a number.
fn call(level: Level) -> (AttentionOptions<'static>, Vec<f32>) {
    let len = KvShape::square(BLOCK, KV_HEADS, WIDTH)
        .and_then(|kv| GqaShape::new(kv, HEADS))
        .map_or(0, |shape| attention_scratch_len(&shape, 1));
    (AttentionOptions::new().level(level), vec![f32::NAN; len])
}

fn query() -> Vec<f32> {
    numbers(7, HEADS * WIDTH)
}

fn rows(tag: u32, n: usize) -> (Vec<f32>, Vec<f32>) {
    let len = n * KV_HEADS * WIDTH;
    (numbers(tag + 1, len), numbers(tag + 2, len))
}

/// Numbers in -1 .. 1 that depend on the seed alone.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    core::iter::repeat_with(next).take(len).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// What std would have brought: memory, a voice, and an end.
mod libc {
    use super::{c_char, c_int, c_void};
    use core::alloc::{GlobalAlloc, Layout};

    #[link(name = "c")]
    unsafe extern "C" {
        pub(super) fn puts(text: *const c_char) -> c_int;
        pub(super) fn abort() -> !;
        fn posix_memalign(at: *mut *mut c_void, align: usize, size: usize) -> c_int;
        fn free(at: *mut c_void);
    }

    struct Heap;

    // SAFETY: `posix_memalign` gives memory of the size and alignment asked for, or none, and
    // `free` takes it back.
    unsafe impl GlobalAlloc for Heap {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            let mut at = core::ptr::null_mut();
            let align = layout.align().max(size_of::<usize>());
            // SAFETY: a power of two that is a multiple of a pointer's size.
            match unsafe { posix_memalign(&mut at, align, layout.size()) } {
                0 => at.cast(),
                _ => core::ptr::null_mut(),
            }
        }

        unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
            // SAFETY: it came from `posix_memalign`.
            unsafe { free(at.cast()) }
        }
    }

    #[global_allocator]
    static HEAP: Heap = Heap;
}

fn say(text: &core::ffi::CStr) {
    // SAFETY: a C string, which lives on.
    unsafe { libc::puts(text.as_ptr()) };
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    say(c"panicked");
    // SAFETY: always legal.
    unsafe { libc::abort() }
}

/// The alloc that comes with the compiler was built for unwinding and names these two. Nothing
/// calls them here.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    // SAFETY: always legal.
    unsafe { libc::abort() }
}
