//! A target that has to fail. `.ci/fuzz` runs it first and fails where nothing is found: a harness
//! that cannot catch anything shows nothing.
//!
//! It is `block_table` in a store with a fault: a sequence that is rolled back right after it was
//! forked loses its blocks, which stay held for ever. The first corpus has no such program.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paged_kv::internal::sequence_ops::{Model, Op, SEQUENCES, World};

fuzz_target!(|bytes: &[u8]| {
    let mut model = Model::<f32>::new(World { block_size: 3, total_blocks: 12, poison: false });
    let mut forked = None;
    for op in Op::decode_all(bytes).into_iter().take(50) {
        model.step(op);
        if let (Op::Truncate { seq, .. }, Some(fork)) = (op, forked)
            && usize::from(seq) % SEQUENCES == fork
        {
            model.forget(fork);
        }
        forked = match op {
            Op::Fork { to, .. } => Some(usize::from(to) % SEQUENCES),
            _ => None,
        };
        model.check();
    }
});
