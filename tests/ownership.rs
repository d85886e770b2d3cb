//! Containers against their models: who holds which block, and whose rows are in it. For every stored
//! type; those beside `f32` with a tenth of the programs.
#![expect(clippy::std_instead_of_core, reason = "a test runs on std")]

use paged_kv::internal::sequence_ops::{Model, Op, World};
use paged_kv::internal::types::{cases, is_f32};
use paged_kv::{Element, every_type};
use proptest::collection::vec;
use proptest::prelude::*;

/// Programs in which some kinds of operation may be missing altogether: a run without releases
/// fills the store, one without forks never copies.
fn programs() -> impl Strategy<Value = Vec<[u8; 3]>> {
    (any::<u16>(), vec(any::<[u8; 3]>(), 0..120)).prop_map(|(missing, mut ops)| {
        ops.retain(|op| missing >> (op[0] % 16) & 1 == 0);
        ops
    })
}

fn config<E: Element>() -> ProptestConfig {
    let cases = cases::<E>(1500, 10);
    // Of tests that are not in a file of their own, proptest cannot find the file.
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn sequences_hold_what_was_written_to_them_and_every_block_is_counted<E: Element>() {
    let worlds = (1..5_usize, 0..9_usize, any::<bool>());
    proptest!(config::<E>(), |((block_size, total_blocks, poison) in worlds, program in programs())| {
        let ops: Vec<Op> = program.into_iter().map(Op::decode).collect();
        Model::<E>::run(World { block_size, total_blocks, poison }, &ops);
    });
}

#[cfg(any(feature = "std", feature = "spin"))]
mod groups {
    use super::{config, programs};
    use paged_kv::internal::group_ops::{Model, Op};
    use paged_kv::{Element, every_type};
    use proptest::prelude::*;

    fn groups_and_sequences_share_blocks_and_every_block_is_counted<E: Element>() {
        proptest!(config::<E>(), |(program in programs())| {
            let ops: Vec<Op> = program.into_iter().map(Op::decode).collect();
            Model::<E>::run(&ops);
        });
    }

    every_type! { groups_and_sequences_share_blocks_and_every_block_is_counted }
}

#[cfg(any(feature = "std", feature = "spin"))]
mod requests {
    use super::{config, programs};
    use paged_kv::internal::request_ops::{Model, Op, World};
    use paged_kv::{Element, every_type};
    use proptest::prelude::*;

    fn requests_over_all_layers_hold_what_was_committed_and_every_block_is_counted<E: Element>() {
        proptest!(config::<E>(), |(program in programs())| {
            let ops: Vec<Op> = program.into_iter().map(Op::decode).collect();
            Model::<E>::run(World::SMALL, &ops);
        });
    }

    /// Texts of hundreds of positions, each of them compared after each operation: fewer programs.
    fn requests_under_windows_hold_what_those_need<E: Element>() {
        let few = ProptestConfig { cases: config::<E>().cases.div_ceil(8), ..config::<E>() };
        proptest!(few, |(program in programs())| {
            let ops: Vec<Op> = program.into_iter().map(Op::decode).collect();
            Model::<E>::run(World::WINDOWS, &ops);
        });
    }

    fn the_model_notices_a_request_that_was_forgotten<E: Element>() {
        let shared = Model::<E>::layers(World::SMALL);
        let mut model = Model::new(World::SMALL, &shared);
        model.step(Op::Step { request: 0, n: 2, keep: 2 });
        model.check();
        model.forget(0);
        let noticed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.check()));
        assert!(noticed.is_err());
    }

    every_type! {
        requests_over_all_layers_hold_what_was_committed_and_every_block_is_counted,
        requests_under_windows_hold_what_those_need,
        the_model_notices_a_request_that_was_forgotten,
    }
}

/// The same smoke run everywhere, whatever proptest draws.
fn a_fixed_run_reaches_every_operation<E: Element>() {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    let most = if is_f32::<E>() { 12_000 } else { 3_000 };
    let bytes: Vec<u8> = std::iter::repeat_with(&mut next).take(most).collect();
    for (block_size, total_blocks) in [(1, 9), (2, 5), (3, 12), (16, 3)] {
        for poison in [false, true] {
            Model::<E>::run(World { block_size, total_blocks, poison }, &Op::decode_all(&bytes));
        }
    }
    #[cfg(any(feature = "std", feature = "spin"))]
    {
        use paged_kv::internal::{group_ops, request_ops};
        group_ops::Model::<E>::run(&group_ops::Op::decode_all(&bytes));
        let ops = request_ops::Op::decode_all(&bytes);
        request_ops::Model::<E>::run(request_ops::World::SMALL, &ops);
        request_ops::Model::<E>::run(request_ops::World::WINDOWS, &ops[..ops.len() / 4]);
    }
}

/// The canary: a model that is told the wrong thing must notice, or all of the above proves
/// nothing.
fn the_model_notices_a_sequence_that_was_dropped<E: Element>() {
    let mut model = Model::<E>::new(World { block_size: 2, total_blocks: 4, poison: false });
    model.step(Op::Push { seq: 0 });
    model.forget(0);
    let noticed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.check()));
    assert!(noticed.is_err());
}

every_type! {
    sequences_hold_what_was_written_to_them_and_every_block_is_counted,
    a_fixed_run_reaches_every_operation,
    the_model_notices_a_sequence_that_was_dropped,
}
