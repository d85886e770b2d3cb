//! Any bytes are a program of operations on page groups and on the sequences that live in them:
//! counts, stale handles, handles of another pool, blocks that a group and sequences hold together
//! (`internal::group_ops`, three bytes an operation).
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::group_ops::{Model, Op};

/// The layers hold at most seven groups; what is longer is only slower.
const MOST_OPS: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let mut ops = Op::decode_all(bytes);
    ops.truncate(MOST_OPS);
    Model::<f32>::run(&ops);
});
