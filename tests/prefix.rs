//! The prefix cache: against its model, and its promises, one test each.
#![allow(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]
#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::internal::prefix_ops::{Model, Op, World};
use proptest::collection::vec;
use proptest::prelude::*;

/// Programs in which some kinds of operation may be missing altogether: a run without evictions
/// fills the pool, one without ends holds what it finds.
fn programs() -> impl Strategy<Value = Vec<Op>> {
    let ops = vec(any::<[u8; 4]>(), 0..80);
    (any::<u32>(), any::<u32>(), ops).prop_map(|(a, b, mut ops)| {
        ops.retain(|op| (a & b) >> (op[0] % 32) & 1 == 0);
        ops.into_iter().map(Op::decode).collect()
    })
}

fn worlds() -> impl Strategy<Value = World> {
    (1..5_usize, 0..14_usize, prop_oneof![Just(0), Just(1), Just(64)])
        .prop_map(|(block_size, groups, hash_bits)| World { block_size, groups, hash_bits })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn what_is_found_is_what_a_list_of_prefixes_finds(world in worlds(), ops in programs()) {
        Model::run(world, &ops);
    }
}
