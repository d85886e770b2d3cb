//! Any bytes are a program of operations on the sequences of one small store, and the store agrees
//! with the model after each of them: rows, holders of every block, free blocks, errors.
//!
//! The first byte chooses the store and its type, the rest are operations of three bytes each
//! (`internal::sequence_ops`).
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::sequence_ops::{Model, Op, World};
use paged_kv::{Int4, Int8, bf16, f16};

/// Two operations a block and a few more reach every state; what is longer is only slower.
const MOST_OPS: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Some((&world, program)) = bytes.split_first() else { return };
    // Sizes of one, sizes that are no power of two, and stores that run out soon or late.
    let (block_size, total_blocks) =
        [(1, 9), (2, 5), (3, 12), (16, 3), (5, 1), (4, 0), (1, 24), (7, 6)][world as usize % 8];
    let mut ops = Op::decode_all(program);
    ops.truncate(MOST_OPS);
    let kind = usize::from(world & 127) / 8 % 5;
    let world = World { block_size, total_blocks, poison: world & 128 != 0 };
    match kind {
        0 => Model::<f32>::run(world, &ops),
        1 => Model::<f16>::run(world, &ops),
        2 => Model::<bf16>::run(world, &ops),
        3 => Model::<Int8>::run(world, &ops),
        _ => Model::<Int4>::run(world, &ops),
    }
});
