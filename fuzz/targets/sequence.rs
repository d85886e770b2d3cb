//! Any bytes are a program of operations on requests over three layers: room in all of them or in
//! none, steps that are committed or abandoned, forks, rollbacks, prefixes
//! (`internal::request_ops`, three bytes an operation). The first byte chooses the stored type and
//! whether two of the layers have windows.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::request_ops::{Model, Op, World};
use paged_kv::{Int4, Int8, bf16, f16};

/// The layers are small; what is longer is only slower.
const MOST_OPS: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, program)) = bytes.split_first() else { return };
    let mut ops = Op::decode_all(program);
    ops.truncate(MOST_OPS);
    let world = if kind % 16 < 8 { World::SMALL } else { World::WINDOWS };
    match kind / 16 % 5 {
        0 => Model::<f32>::run(world, &ops),
        1 => Model::<f16>::run(world, &ops),
        2 => Model::<bf16>::run(world, &ops),
        3 => Model::<Int8>::run(world, &ops),
        _ => Model::<Int4>::run(world, &ops),
    }
});
