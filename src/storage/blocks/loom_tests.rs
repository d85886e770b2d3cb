//! The free list in every order: one taker and those who give back.
//!
//! What a block's holders wrote is stood for by a word of loom's that is stored and loaded
//! `Relaxed`: who may see the old value, because nothing orders the two, is made to see it. Run by
//! `.ci/loom`.

use alloc::sync::Arc;
use alloc::vec::Vec;

use loom::thread;

use super::*;
use crate::internal::orders::every_order;

fn block(index: usize) -> BlockId {
    BlockId::new(index).unwrap()
}

/// A free list of which the first `held` blocks are one table's.
fn opened(total: usize, held: usize) -> Arc<Blocks> {
    let blocks = Blocks::new(total).unwrap();
    (0..held).for_each(|index| assert_eq!(blocks.take(), Some(block(index))));
    Arc::new(blocks)
}

fn gives_back(blocks: &Arc<Blocks>, index: usize) -> thread::JoinHandle<()> {
    let blocks = Arc::clone(blocks);
    thread::spawn(move || assert_eq!(blocks.drop_table(block(index)), Ok(Released::Freed)))
}

/// Takes what is counted free, which must be there, and gives back what it took after the others
/// are done.
fn every_block_once(blocks: &Blocks, mut taken: Vec<BlockId>) {
    while let Some(block) = blocks.take() {
        taken.push(block);
    }
    taken.sort_unstable();
    let all: Vec<_> = (0..blocks.total()).map(block).collect();
    assert_eq!(taken, all, "none is lost and none is handed out twice");
    assert_eq!(blocks.free(), 0);
    let ones = alloc::vec![1; blocks.total()];
    blocks.audit(&ones, |miscount| panic!("{miscount}"));
}

/// The taker's swap meets two pushes, in any order; what it counted it gets.
#[test]
fn one_taker_and_two_givers() {
    every_order(3, || {
        let blocks = opened(2, 2);
        let givers = [gives_back(&blocks, 1), gives_back(&blocks, 0)];
        let mut taken = Vec::new();
        for _ in 0..2 {
            let free = blocks.free();
            assert!(blocks.check(free).is_ok());
            taken.extend((0..free).map(|_| blocks.take().expect("counted by the one taker")));
        }
        givers.into_iter().for_each(|giver| giver.join().unwrap());
        every_block_once(&blocks, taken);
    });
}

/// The top of the stack goes away and comes back between a giver's two looks at it: what he has
/// linked his block to is the top again, with another block below it, and that is right.
#[test]
fn a_giver_meets_a_top_that_comes_back() {
    every_order(4, || {
        let blocks = opened(3, 3);
        blocks.drop_table(block(1)).unwrap();
        blocks.drop_table(block(0)).unwrap();
        let giver = gives_back(&blocks, 2);
        let first = blocks.take().unwrap();
        let second = blocks.take().unwrap();
        blocks.drop_table(first).unwrap();
        giver.join().unwrap();
        every_block_once(&blocks, alloc::vec![second]);
    });
}

/// Blocks that were never handed out are taken while others come back.
#[test]
fn a_fresh_block_and_one_that_comes_back() {
    every_order(4, || {
        let blocks = opened(2, 1);
        let giver = gives_back(&blocks, 0);
        let taken = blocks.take().expect("one was free all the time");
        giver.join().unwrap();
        every_block_once(&blocks, alloc::vec![taken]);
    });
}

/// Two tables hold a block and let go of it at once: one of them frees it, and its next owner sees
/// what both have done.
#[test]
fn the_next_owner_comes_after_all_holders() {
    every_order(4, || {
        let blocks = opened(1, 1);
        blocks.add_table(block(0)).unwrap();
        let written = Arc::new([(); 2].map(|()| AtomicU32::new(0)));
        let holder = |index: usize| {
            let (blocks, written) = (Arc::clone(&blocks), Arc::clone(&written));
            move || {
                written[index].store(1, Ordering::Relaxed);
                blocks.drop_table(block(0)).unwrap() == Released::Freed
            }
        };
        let other = thread::spawn(holder(0));
        let here = holder(1)();
        let owned = blocks.take();
        if owned.is_some() {
            let seen = [0, 1].map(|index| written[index].load(Ordering::Relaxed));
            assert_eq!(seen, [1, 1], "a holder was still at it");
        }
        let there = other.join().unwrap();
        assert!(here != there, "the last holder frees it, and nobody else does");
        every_block_once(&blocks, owned.into_iter().collect());
    });
}

/// Who finds that he is the one who is left may write: whoever has gone is done with it.
#[test]
fn who_is_left_comes_after_those_who_have_gone() {
    for alone in [Blocks::sole_table, Blocks::sole_holder] {
        every_order(4, move || {
            let blocks = opened(1, 1);
            blocks.add_table(block(0)).unwrap();
            let written = Arc::new(AtomicU32::new(0));
            let other = {
                let (blocks, written) = (Arc::clone(&blocks), Arc::clone(&written));
                thread::spawn(move || {
                    written.store(1, Ordering::Relaxed);
                    assert_eq!(blocks.drop_table(block(0)), Ok(Released::Held));
                })
            };
            if alone(&blocks, block(0)) {
                assert_eq!(written.load(Ordering::Relaxed), 1, "the other is still at it");
            }
            other.join().unwrap();
            assert!(alone(&blocks, block(0)));
        });
    }
}

/// A group's last holder and a table let go at once.
#[test]
fn a_group_and_a_table_let_go_at_once() {
    every_order(4, || {
        let blocks = Arc::new(Blocks::new(1).unwrap());
        let grouped = blocks.take_for_group().unwrap();
        blocks.add_table(grouped).unwrap();
        let table = {
            let blocks = Arc::clone(&blocks);
            thread::spawn(move || blocks.drop_table(grouped).unwrap())
        };
        blocks.mark_group_shared(grouped);
        let here = blocks.drop_group(grouped).unwrap();
        let freed = [here, table.join().unwrap()].map(|done| done == Released::Freed);
        assert!(freed[0] != freed[1]);
        every_block_once(&blocks, Vec::new());
    });
}
