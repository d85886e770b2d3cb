//! Any bytes are a program of operations on requests over three layers: room in all of them or in
//! none, steps that are committed or abandoned, forks, rollbacks, prefixes
//! (`internal::request_ops`, three bytes an operation). The first byte chooses the stored type.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::request_ops::{Model, Op};
use paged_kv::{Int4, Int8, bf16, f16};

/// The layers hold twenty positions; what is longer is only slower.
const MOST_OPS: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, program)) = bytes.split_first() else { return };
    let mut ops = Op::decode_all(program);
    ops.truncate(MOST_OPS);
    match kind % 5 {
        0 => Model::<f32>::run(&ops),
        1 => Model::<f16>::run(&ops),
        2 => Model::<bf16>::run(&ops),
        3 => Model::<Int8>::run(&ops),
        _ => Model::<Int4>::run(&ops),
    }
});
