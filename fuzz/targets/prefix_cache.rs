//! Any bytes are a program of operations on a prefix cache, on those who look up, insert and pin,
//! and on the pool's groups: what is found, who holds what, what is evicted and in which order
//! (`internal::prefix_ops`, four bytes an operation).
//!
//! The first byte chooses the sizes and how many bits of a hash the tables see.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::prefix_ops::{Model, Op, World};

/// The pool holds at most thirty groups; what is longer is only slower.
const MOST_OPS: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Some((&world, program)) = bytes.split_first() else { return };
    let (block_size, groups) =
        [(1, 9), (2, 5), (3, 12), (4, 3), (2, 30), (1, 0), (5, 7), (1, 24)][usize::from(world) % 8];
    let hash_bits = [0, 1, 4, 64][usize::from(world) / 8 % 4];
    let mut ops = Op::decode_all(program);
    ops.truncate(MOST_OPS);
    Model::run(World { block_size, groups, hash_bits }, &ops);
});
