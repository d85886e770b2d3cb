//! Which blocks are free and how many hold each: ids only, never a number of a row.
//!
//! # The word of a block
//!
//! ```text
//! bit 31   GROUP          one of the counted holders is a page group
//! bit 30   GROUP_SHARED   that group has had more than one holder of its own
//! 0 ..= 29 count          tables that name the block, and at most one group
//! ```
//!
//! A free block's word is 0. A block may be written while its sole holder is one table, or, where
//! the table has it as room to grow into, one table and a group that nobody else has retained: see
//! [`Blocks::sole_holder`] and [`Blocks::sole_table`]. The two flags exist for that question alone.
//!
//! # Giving back needs no lock
//!
//! A sequence ends wherever its request ends: under another layer's guard, in the middle of
//! unwinding. If giving a block back waited for anything, that would be a deadlock which only
//! shows up on the unlucky path. So the counts are atomics and the free list is a stack of ids
//! linked through `next`, to which any number of threads may push at once.
//!
//! *Taking* is different: there is one taker at a time, because taking needs `&mut` of the store
//! or, in the shared layer, the layer's gate. That is what makes this short stack right:
//!
//! - **No ABA.** The taker reads `head = a`, then `next[a] = b`, then swaps `head` from `a` to
//!   `b`. The swap would be wrong if `a` had been popped and pushed again in between, with
//!   another `next`. Only a taker pops, and there is one. Others can only push, which changes
//!   `head`, makes the swap fail and starts it over.
//! - **A count that can be trusted.** A block is pushed first and counted free after, and the
//!   taker takes from the count first and pops after, so `free <=` real length always. A taker
//!   that saw `free >= n` can pop `n`, which is what lets an append of many rows be all or
//!   nothing.
//! - **Bytes follow the count.** Dropping a count is a `Release`, and who drops the last one
//!   fences with `Acquire` before the push, as in `Arc`: whatever the last holders read or wrote
//!   is over before the next owner writes.
//!
//! `blocks/loom_tests.rs` goes through every order of these, and notices each ordering here that is
//! weakened.
//!
//! # Opening costs nothing
//!
//! Ids that were never handed out are not on the stack: `fresh` counts up to them. The two
//! arrays are zeroed memory that the system has not backed yet, so a store of millions of blocks
//! opens in no time, and the first blocks handed out are 0, 1, 2, ... A block that was given
//! back is preferred over a fresh one, the last one first: its memory is the likeliest to be in
//! a cache.

use crate::atomic::{AtomicU32, Ordering, fence};
use crate::error::{Miscount, PagedStoreExhausted, ShapeError};
use crate::id::BlockId;
use alloc::boxed::Box;
use core::fmt;

/// The end of the stack; no block has this id.
const NIL: u32 = u32::MAX;
const GROUP: u32 = 1 << 31;
const GROUP_SHARED: u32 = 1 << 30;
const COUNT: u32 = GROUP_SHARED - 1;

/// A block's word could not be changed as asked. It is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Nobody of that kind holds the block.
    NotHeld,
    /// The count is full.
    TooMany,
}

/// What became of a block whose holder went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// Others hold it still.
    Held,
    /// That was the last one, the block is free.
    Freed,
}

/// Blocks by who holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    /// By anybody.
    pub(crate) held: usize,
    /// By more than one.
    pub(crate) shared: usize,
    /// By a page group alone.
    pub(crate) grouped: usize,
    /// Most that were held at once.
    pub(crate) peak: usize,
}

/// The free list and the holder counts of one store.
pub(crate) struct Blocks {
    words: Box<[AtomicU32]>,
    next: Box<[AtomicU32]>,
    head: AtomicU32,
    fresh: AtomicU32,
    free: AtomicU32,
    #[cfg(feature = "internal")]
    refusal: refusal::Refusal,
}

impl Blocks {
    /// `total` blocks, all free.
    pub(crate) fn new(total: usize) -> Result<Self, ShapeError> {
        if total > BlockId::MOST {
            return Err(ShapeError::TooLarge {
                what: "total_blocks",
                have: total,
                most: BlockId::MOST,
            });
        }
        Ok(Blocks {
            words: zeroed(total)?,
            next: zeroed(total)?,
            head: AtomicU32::new(NIL),
            fresh: AtomicU32::new(0),
            free: AtomicU32::new(total as u32),
            #[cfg(feature = "internal")]
            refusal: refusal::Refusal::default(),
        })
    }

    /// Blocks there are.
    pub(crate) fn total(&self) -> usize {
        self.words.len()
    }

    /// Blocks that nobody holds. Others may give more back at any time; only the taker takes.
    pub(crate) fn free(&self) -> usize {
        #[cfg(feature = "internal")]
        if self.refusal.is_due() {
            return 0;
        }
        self.counted_free()
    }

    fn counted_free(&self) -> usize {
        self.free.load(Ordering::Acquire) as usize
    }

    /// Whether `need` blocks can be taken, which stays so until the one taker takes some.
    pub(crate) fn check(&self, need: usize) -> Result<(), PagedStoreExhausted> {
        let free = self.free();
        if need <= free { Ok(()) } else { Err(PagedStoreExhausted { need, free }) }
    }

    /// Takes a block for a table.
    ///
    /// Called by the one taker only: with `&mut` of the store, or holding the layer's gate.
    pub(crate) fn take(&self) -> Option<BlockId> {
        self.take_as(1)
    }

    /// Takes a block for a page group. The same rule holds as for [`Blocks::take`].
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only the shared layer has groups")
    )]
    pub(crate) fn take_for_group(&self) -> Option<BlockId> {
        self.take_as(GROUP | 1)
    }

    fn take_as(&self, word: u32) -> Option<BlockId> {
        update(&self.free, Ordering::Acquire, |free| free.checked_sub(1)).ok()?;
        let id = self.pop();
        let before = self.words[id as usize].load(Ordering::Relaxed);
        debug_assert_eq!(before, 0, "a free block has no holder");
        self.words[id as usize].store(word, Ordering::Relaxed);
        Some(BlockId::from_raw(id))
    }

    /// The top of the stack, or the next id never handed out. There is one: `free` said so.
    fn pop(&self) -> u32 {
        let popped = update(&self.head, Ordering::Acquire, |head| {
            (head != NIL).then(|| self.next[head as usize].load(Ordering::Relaxed))
        });
        popped.unwrap_or_else(|_| {
            let id = self.fresh.load(Ordering::Relaxed);
            assert!((id as usize) < self.total(), "the free count is never above the free list");
            self.fresh.store(id + 1, Ordering::Relaxed);
            id
        })
    }

    fn push(&self, id: u32) {
        let linked = update(&self.head, Ordering::Release, |head| {
            self.next[id as usize].store(head, Ordering::Relaxed);
            Some(id)
        });
        debug_assert!(linked.is_ok(), "a push is never refused");
        let counted = update(&self.free, Ordering::Release, |free| Some(free + 1));
        debug_assert!(counted.is_ok_and(|before| (before as usize) < self.total()));
    }

    /// One more table names a block that somebody holds.
    pub(crate) fn add_table(&self, block: BlockId) -> Result<(), Refused> {
        // Relaxed, as `Arc::clone`: whoever hands the block on holds it while we count.
        update(&self.words[block.index()], Ordering::Relaxed, |word| {
            (word & COUNT != 0 && word & COUNT < COUNT).then_some(word + 1)
        })
        .map(drop)
        .map_err(|word| if word & COUNT == 0 { Refused::NotHeld } else { Refused::TooMany })
    }

    /// One table less names the block. Never takes a table's count away from a group.
    pub(crate) fn drop_table(&self, block: BlockId) -> Result<Released, Refused> {
        self.drop_holder(block, |word| {
            let groups = u32::from(word & GROUP != 0);
            (word & COUNT > groups).then(|| word - 1)
        })
    }

    /// The block's group lets go of it.
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only the shared layer has groups")
    )]
    pub(crate) fn drop_group(&self, block: BlockId) -> Result<Released, Refused> {
        self.drop_holder(block, |word| (word & GROUP != 0).then(|| (word & COUNT) - 1))
    }

    fn drop_holder(
        &self,
        block: BlockId,
        less: impl Fn(u32) -> Option<u32>,
    ) -> Result<Released, Refused> {
        let before = update(&self.words[block.index()], Ordering::Release, &less)
            .map_err(|_| Refused::NotHeld)?;
        if before & COUNT > 1 {
            return Ok(Released::Held);
        }
        fence(Ordering::Acquire);
        self.push(block.raw());
        Ok(Released::Freed)
    }

    /// Notes that the block's group has more than one holder, for as long as there is the group: of
    /// the one that is left in the end nobody knows whether it is the one that wrote the rows.
    ///
    /// Called with the group table locked, so that it does not come after the last release.
    #[cfg_attr(
        not(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr")),
        allow(dead_code, reason = "only the shared layer has groups")
    )]
    pub(crate) fn mark_group_shared(&self, block: BlockId) {
        let marked = update(&self.words[block.index()], Ordering::AcqRel, |word| {
            (word & GROUP != 0).then_some(word | GROUP_SHARED)
        });
        debug_assert!(marked.is_ok(), "a living group holds its blocks");
    }

    /// Whether a table that names this block may write into it: nobody else would see the write.
    ///
    /// That is one table alone, or one table and a group that nobody else has retained.
    #[inline]
    pub(crate) fn sole_table(&self, block: BlockId) -> bool {
        // Acquire: where another holder has just gone, its reads are over before we write.
        let word = self.words[block.index()].load(Ordering::Acquire);
        word == 1 || word == (GROUP | 2)
    }

    /// Compares the books with `found`, the holders that name each block, and tells what is wrong.
    ///
    /// Right only while nobody takes or gives back.
    pub(crate) fn audit(&self, found: &[u32], mut tell: impl FnMut(Miscount)) {
        for (index, &found) in found.iter().enumerate() {
            let block = BlockId::from_raw(index as u32);
            let counted = self.holders(block);
            if counted != found {
                tell(Miscount::Holders { block, counted, found });
            }
        }
        let mut listed = alloc::vec![false; self.total()];
        let mut list = |id: u32| {
            let first = self.holders(BlockId::from_raw(id)) == 0 && !listed[id as usize];
            listed[id as usize] = true;
            first
        };
        let mut length = 0;
        for id in self.fresh.load(Ordering::Relaxed)..self.total() as u32 {
            length += usize::from(list(id));
        }
        let mut id = self.head.load(Ordering::Acquire);
        // A block met twice may be a ring, so that the walk ends there.
        while id != NIL && list(id) {
            length += 1;
            id = self.next[id as usize].load(Ordering::Relaxed);
        }
        let held = self.census().held;
        let free = self.counted_free();
        if id != NIL || length != free || free + held != self.total() {
            tell(Miscount::FreeList { free, found: length });
        }
    }

    /// Counts the blocks by who holds them. Visits those that were ever held.
    pub(crate) fn census(&self) -> Census {
        // A block given back is taken before one that never was, so that as many were held at once
        // as were ever held.
        let peak = self.fresh.load(Ordering::Relaxed) as usize;
        let mut census = Census { peak, ..Census::default() };
        for word in &self.words[..peak] {
            let word = word.load(Ordering::Relaxed);
            census.held += usize::from(word & COUNT > 0);
            census.shared += usize::from(word & COUNT > 1);
            census.grouped += usize::from(word & GROUP != 0 && word & COUNT == 1);
        }
        census
    }

    /// Whether one of the block's holders is a page group.
    pub(crate) fn in_group(&self, block: BlockId) -> bool {
        self.words[block.index()].load(Ordering::Relaxed) & GROUP != 0
    }

    /// Whether one table holds this block and nobody else, no group either.
    #[inline]
    pub(crate) fn sole_holder(&self, block: BlockId) -> bool {
        self.words[block.index()].load(Ordering::Acquire) == 1
    }

    /// Answers the `nth` question for free blocks from now on as if there were none.
    #[cfg(feature = "internal")]
    pub(crate) fn refuse(&self, nth: u32) {
        self.refusal.set(nth);
    }

    /// Whether a refusal is still to come, which does not come any more.
    #[cfg(feature = "internal")]
    pub(crate) fn cancel_refusal(&self) -> bool {
        self.refusal.cancel()
    }

    /// The word of each block, and the free ones in the order in which they will be taken.
    ///
    /// Right only while nobody takes or gives back.
    #[cfg(feature = "internal")]
    pub(crate) fn state(&self) -> (alloc::vec::Vec<u32>, alloc::vec::Vec<u32>) {
        let words = self.words.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let mut listed = alloc::vec::Vec::new();
        let mut id = self.head.load(Ordering::Acquire);
        while id != NIL {
            listed.push(id);
            id = self.next[id as usize].load(Ordering::Relaxed);
        }
        listed.extend(self.fresh.load(Ordering::Relaxed)..self.total() as u32);
        (words, listed)
    }

    /// How many hold the block: tables and at most one group.
    pub(crate) fn holders(&self, block: BlockId) -> u32 {
        self.words[block.index()].load(Ordering::Relaxed) & COUNT
    }
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} free", self.counted_free(), self.total())
    }
}

/// Replaces the value by `new(value)` unless that is `None`; gives the value found, either way.
#[cfg(target_has_atomic = "32")]
fn update(cell: &AtomicU32, order: Ordering, new: impl Fn(u32) -> Option<u32>) -> Result<u32, u32> {
    // What is found is read with the strength the caller wants it published or taken with.
    let fetch = match order {
        Ordering::Acquire | Ordering::AcqRel => Ordering::Acquire,
        _ => Ordering::Relaxed,
    };
    cell.fetch_update(order, fetch, new)
}

/// A processor without compare-and-swap has one core and the crate has no shared layer there, so
/// that a load and a store are enough. An interrupt must not touch a store that the code it
/// interrupts is working on.
#[cfg(not(target_has_atomic = "32"))]
fn update(cell: &AtomicU32, _: Ordering, new: impl Fn(u32) -> Option<u32>) -> Result<u32, u32> {
    let found = cell.load(Ordering::Acquire);
    let value = new(found).ok_or(found)?;
    cell.store(value, Ordering::Release);
    Ok(found)
}

/// Zeroed words that the system need not back with memory before they are written.
#[cfg(all(target_has_atomic = "32", not(all(test, loom))))]
fn zeroed(count: usize) -> Result<Box<[AtomicU32]>, ShapeError> {
    bytemuck::allocation::try_zeroed_slice_box(count)
        .map_err(|()| ShapeError::OutOfMemory { bytes: count.saturating_mul(size_of::<u32>()) })
}

/// `bytemuck` knows atomics only where they are complete; the small machines that have none, and the
/// model checker, can afford the loop.
#[cfg(any(not(target_has_atomic = "32"), all(test, loom)))]
fn zeroed(count: usize) -> Result<Box<[AtomicU32]>, ShapeError> {
    let mut words = alloc::vec::Vec::new();
    words
        .try_reserve_exact(count)
        .map_err(|_| ShapeError::OutOfMemory { bytes: count.saturating_mul(size_of::<u32>()) })?;
    words.resize_with(count, || AtomicU32::new(0));
    Ok(words.into_boxed_slice())
}

#[cfg(feature = "internal")]
mod refusal;

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    fn id(index: usize) -> BlockId {
        BlockId::new(index).unwrap()
    }

    #[test]
    fn the_first_blocks_are_0_1_2_and_the_last_given_back_comes_first() {
        let blocks = Blocks::new(4).unwrap();
        let taken: Vec<_> = (0..3).map(|_| blocks.take().unwrap()).collect();
        assert_eq!(taken, [id(0), id(1), id(2)]);
        assert_eq!(alloc::format!("{blocks:?}"), "1 of 4 free");
        assert_eq!(blocks.drop_table(id(2)), Ok(Released::Freed));
        assert_eq!(blocks.drop_table(id(0)), Ok(Released::Freed));
        let taken: Vec<_> = (0..3).map(|_| blocks.take().unwrap()).collect();
        assert_eq!(taken, [id(0), id(2), id(3)]);
        assert_eq!(blocks.take(), None);
        assert_eq!(blocks.free(), 0);
    }

    #[test]
    fn a_double_release_is_refused_and_changes_nothing() {
        let blocks = Blocks::new(2).unwrap();
        assert_eq!(blocks.drop_table(id(0)), Err(Refused::NotHeld));
        assert_eq!(blocks.add_table(id(0)), Err(Refused::NotHeld));
        let block = blocks.take().unwrap();
        assert_eq!(blocks.drop_group(block), Err(Refused::NotHeld));
        assert_eq!(blocks.drop_table(block), Ok(Released::Freed));
        assert_eq!(blocks.drop_table(block), Err(Refused::NotHeld));
        assert_eq!((blocks.free(), blocks.holders(block)), (2, 0));
    }

    #[test]
    fn a_table_cannot_drop_the_count_of_a_group() {
        let blocks = Blocks::new(1).unwrap();
        let block = blocks.take_for_group().unwrap();
        assert_eq!(blocks.drop_table(block), Err(Refused::NotHeld));
        blocks.add_table(block).unwrap();
        assert_eq!(blocks.drop_group(block), Ok(Released::Held));
        assert_eq!(blocks.drop_group(block), Err(Refused::NotHeld));
        assert_eq!(blocks.drop_table(block), Ok(Released::Freed));
    }

    #[test]
    fn a_block_is_written_by_its_one_table_and_that_tables_own_group() {
        let blocks = Blocks::new(2).unwrap();
        let own = blocks.take().unwrap();
        assert!(blocks.sole_table(own));
        blocks.add_table(own).unwrap();
        assert!(!blocks.sole_table(own));
        let grouped = blocks.take_for_group().unwrap();
        blocks.add_table(grouped).unwrap();
        assert!(blocks.sole_table(grouped));
        blocks.add_table(grouped).unwrap();
        assert!(!blocks.sole_table(grouped));
        blocks.drop_table(grouped).unwrap();
        blocks.mark_group_shared(grouped);
        assert!(!blocks.sole_table(grouped), "another holder of the group may attend over it");
        assert_eq!(blocks.drop_group(grouped), Ok(Released::Held));
        assert!(blocks.sole_table(grouped));
    }

    #[test]
    fn counts_stop_instead_of_wrapping() {
        let blocks = Blocks::new(1).unwrap();
        let block = blocks.take_for_group().unwrap();
        blocks.words[0].store(GROUP | COUNT, Ordering::Relaxed);
        assert_eq!(blocks.add_table(block), Err(Refused::TooMany));
        assert_eq!(blocks.holders(block), COUNT);
        assert_eq!(blocks.drop_table(block), Ok(Released::Held));
    }

    #[test]
    fn the_audit_walks_the_free_list_and_ends() {
        /// What the audit says of a list 2, 1, 0 and the fresh block 3, once it was broken.
        fn audit(holders: [u32; 4], break_it: fn(&Blocks)) -> Vec<Miscount> {
            let blocks = Blocks::new(4).unwrap();
            let taken: Vec<_> = (0..3).map(|_| blocks.take().unwrap()).collect();
            taken
                .into_iter()
                .for_each(|block| assert_eq!(blocks.drop_table(block), Ok(Released::Freed)));
            break_it(&blocks);
            let mut told = Vec::new();
            blocks.audit(&holders, |miscount| told.push(miscount));
            told
        }
        let list = |free, found| [Miscount::FreeList { free, found }];
        assert_eq!(audit([0; 4], |_| ()), []);
        let ring = audit([0; 4], |blocks| blocks.next[0].store(2, Ordering::Relaxed));
        assert_eq!(ring, list(4, 4));
        let lost = audit([0; 4], |blocks| blocks.next[1].store(NIL, Ordering::Relaxed));
        assert_eq!(lost, list(4, 3));
        let held = audit([0, 1, 0, 0], |blocks| blocks.words[1].store(1, Ordering::Relaxed));
        assert_eq!(held, list(4, 2));
        let miscounted = audit([0; 4], |blocks| blocks.free.store(3, Ordering::Relaxed));
        assert_eq!(miscounted, list(3, 4));
        let neither_held_nor_free = audit([0; 4], |blocks| {
            blocks.free.store(3, Ordering::Relaxed);
            blocks.next[1].store(NIL, Ordering::Relaxed);
        });
        assert_eq!(neither_held_nor_free, list(3, 3));
    }

    #[test]
    fn opening_does_not_visit_the_blocks() {
        // 2^31 blocks are 16 GiB of words; they must not be touched to be opened.
        #[cfg(target_pointer_width = "64")]
        if let Ok(blocks) = Blocks::new(1 << 31) {
            assert_eq!(blocks.take(), Some(id(0)));
            assert_eq!(blocks.free(), (1 << 31) - 1);
        }
        #[cfg(target_pointer_width = "64")]
        assert!(matches!(Blocks::new(1 << 32), Err(ShapeError::TooLarge { .. })));
    }

    /// Many give back while one takes: no block is lost and none is handed out twice.
    ///
    /// With one block the taker waits for each of them at the very moment it is given back, which
    /// is when a count that runs ahead of the list would be found out.
    #[test]
    fn giving_back_from_many_threads_loses_nothing() {
        for total in [1, 8] {
            give_back_and_take(total, 20_000);
        }
    }

    fn give_back_and_take(total: usize, rounds: usize) {
        use std::sync::mpsc;
        use std::thread;
        let blocks = Blocks::new(total).unwrap();
        thread::scope(|scope| {
            let senders: Vec<_> = (0..3)
                .map(|_| {
                    let (sender, receiver) = mpsc::channel::<BlockId>();
                    let blocks = &blocks;
                    scope.spawn(move || {
                        for block in receiver {
                            assert_eq!(blocks.drop_table(block), Ok(Released::Freed));
                        }
                    });
                    sender
                })
                .collect();
            for round in 0..rounds {
                let mut tries = 0;
                let block = loop {
                    // `take` asserts that the block it pops has no holder.
                    match blocks.take() {
                        Some(block) => break block,
                        None if tries < 1000 => core::hint::spin_loop(),
                        None => thread::yield_now(),
                    }
                    tries += 1;
                };
                assert_eq!(blocks.holders(block), 1);
                senders[round % senders.len()].send(block).unwrap();
            }
        });
        blocks.audit(&alloc::vec![0; total], |miscount| panic!("{miscount}"));
    }
}
