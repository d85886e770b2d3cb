//! A large store costs nothing to open. Alone in its process: what is measured is the process's.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]

use paged_kv::cache::{PagedKvCache, PagedKvStore};
use std::time::Instant;

/// Bytes of this process that stand in memory. Not from `statm`, whose unit is a page of any size.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("and counts");
    let kib = line.trim().strip_suffix(" kB").expect("in units of 1024 bytes");
    kib.parse::<usize>().expect("a number") << 10
}

#[test]
fn opening_eight_gib_touches_nothing() {
    // 64 positions x 8 heads x (128 + 128) numbers x 4 B = 512 KiB a block.
    const BLOCK: usize = 512 << 10;
    let before = resident();
    let begun = Instant::now();
    let opened = PagedKvStore::try_new(64, (8 << 30) / BLOCK, 8, 128);
    let mut store = opened.unwrap_or_else(|refused| {
        // A system may refuse to promise more than it has. A quarter is no less a proof.
        println!("8 GiB are more than this system promises ({refused}); opening 2 GiB");
        PagedKvStore::new(64, (2 << 30) / BLOCK, 8, 128)
    });
    let took = begun.elapsed();
    let grown = resident().saturating_sub(before);
    assert_eq!(store.bytes_per_block(), BLOCK);
    println!("{} blocks in {took:?}, {} KiB resident", store.total_blocks(), grown >> 10);
    assert!(grown < 8 << 20, "opening made {grown} bytes resident");

    // What is measured does see memory that is touched: 64 blocks of rows are 32 MiB.
    let mut sequence = PagedKvCache::new();
    let row = vec![1.0; 64 * 64 * 8 * 128];
    let before = resident();
    sequence.append(&mut store, &row, &row, 64 * 64).unwrap();
    let grown = resident().saturating_sub(before);
    println!("{} KiB resident with {} positions", grown >> 10, sequence.seq_len());
    assert!(grown >= 30 << 20, "32 MiB were written and {grown} bytes became resident");
    sequence.release(&mut store).unwrap();

    // And all of it goes with the store.
    drop(store);
    let left = resident().saturating_sub(before);
    assert!(left < 8 << 20, "{left} bytes stayed resident behind the store");
}
