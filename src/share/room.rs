//! Room over all layers, all or none.
//!
//! Several blocks, or one in every layer, are taken under the gates of the layers that lack some:
//! counted in all of them first and taken after, so that nobody ends up with half.

use alloc::vec::Vec;

use super::sequence::Place;
use super::shared::{SharedPagedKv, displaced};
use super::spec::LayerElement;
use crate::error::{GroupError, PagedKvError, PagedStoreExhausted};
use crate::id::PageGroup;
use crate::storage::any::LayerStore;

impl<E: LayerElement> SharedPagedKv<E> {
    /// Takes `n` groups with one holder each, all or none.
    ///
    /// # Errors
    ///
    /// [`PagedStoreExhausted`] with the groups asked for and those that were free; nothing has
    /// changed then. With no layers there is no group.
    ///
    /// # Deadlock
    ///
    /// As [`acquire_group`](Self::acquire_group).
    ///
    /// # Cost
    ///
    /// Two allocations, and the group table may grow.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let groups = shared.acquire_groups(3)?;
    /// let refused = shared.acquire_groups(2).unwrap_err();
    /// assert_eq!((refused.need, refused.free), (2, 1));
    /// groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    /// # Ok::<(), paged_kv::PagedStoreExhausted>(())
    /// ```
    #[must_use = "dropping the handles does not release the groups"]
    #[track_caller]
    pub fn acquire_groups(&self, n: usize) -> Result<Vec<PageGroup>, PagedStoreExhausted> {
        let check = || match self.free_groups() {
            free if free < n => Err(PagedStoreExhausted { need: n, free }),
            _ => Ok(()),
        };
        // Before the gates as well: see `acquire_group`.
        check()?;
        let mut taken = Vec::with_capacity(n);
        if n == 0 {
            return Ok(taken);
        }
        let _gates = self.gates("acquire_groups", 0..self.seats().count());
        check()?;
        let mut groups = self.groups.lock();
        let left = groups.left();
        if left < n {
            return Err(PagedStoreExhausted { need: n, free: left });
        }
        for _ in 0..n {
            let mut seats = self.seats();
            let group = groups.insert(|_| {
                let block = seats.next().and_then(|seat| seat.blocks.take_for_group());
                block.expect("free blocks were counted under the gate")
            });
            taken.extend(group);
        }
        Ok(taken)
    }

    /// Whether a sequence of `len` positions would fit these layers if nobody else held a block.
    ///
    /// A request that does not fit now should wait; one for which this is `false` would wait for
    /// ever. A layer with a window needs room for what the window keeps and one position more; steps
    /// of many positions need that many more. Takes no lock.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let groups = shared.acquire_groups(4)?; // nothing is free, which is no matter
    /// assert!(shared.can_ever_fit(4 * 16) && !shared.can_ever_fit(4 * 16 + 1));
    /// # groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    /// # Ok::<(), paged_kv::PagedStoreExhausted>(())
    /// ```
    pub fn can_ever_fit(&self, len: usize) -> bool {
        self.seats().all(|seat| {
            let all = || seat.shape.blocks_for(len);
            let most = seat.window.map_or_else(all, |window| window.most_blocks(seat.shape, len));
            most <= seat.blocks.total()
        })
    }

    /// Takes what each layer lacks, or nothing. What is to be copied is left in `spare`.
    #[track_caller]
    pub(super) fn take_room(&self, places: &mut [Place]) -> Result<(), PagedKvError> {
        if self.give_spares_back(places) {
            self.bell.ring();
        }
        let check = |places: &[Place]| {
            let mut layers = self.seats().zip(places);
            layers.try_for_each(|(seat, place)| {
                // Who takes from a store that was moved takes under another gate.
                if place.lack.blocks() > 0 && seat.is_displaced() {
                    displaced(seat.layer);
                }
                seat.blocks.check(place.lack.free())
            })
        };
        // Before the gates as well: see `acquire_group`. And before the tables grow: how much is wanted
        // may be anybody's claim.
        check(places)?;
        for place in &mut *places {
            place.cache.prepare(place.lack);
        }
        let lacking = places.iter().enumerate().filter(|(_, place)| place.lack.blocks() > 0);
        let gates = self.gates("reserve", lacking.map(|(store, _)| store));
        check(places)?;
        for (seat, place) in self.seats().zip(places.iter_mut()) {
            debug_assert!(place.spare.is_none());
            place.spare = place.cache.take_room(&seat.blocks, place.lack);
        }
        drop(gates);
        if places.iter().any(|place| place.lack.gives_back()) {
            self.bell.ring();
        }
        Ok(())
    }

    /// Copies the blocks that are being filled where others hold them too, one layer at a time.
    #[track_caller]
    pub(super) fn move_tails(&self, places: &mut [Place]) {
        for (seat, place) in self.seats().zip(places) {
            if place.spare.is_some() {
                let mut store = self.write(seat.layer);
                if let Some(spare) = place.spare.take() {
                    store.move_tail(&mut place.cache, spare);
                }
            }
        }
    }

    /// Gives back what a reservation that a panic ended may have left. Whether there was any.
    pub(super) fn give_spares_back(&self, places: &mut [Place]) -> bool {
        let mut gone = false;
        for (seat, place) in self.seats().zip(places) {
            if let Some(spare) = place.spare.take()
                && place.cache.check_store(seat.store).is_ok()
            {
                let released = seat.blocks.drop_table(spare);
                debug_assert!(released.is_ok(), "a spare block is held");
                gone = true;
            }
        }
        gone
    }

    /// Makes these tables, all of them empty, hold the blocks of the groups, or none of them.
    pub(super) fn begin_with(
        &self,
        places: &mut [Place],
        groups: &[PageGroup],
        len: usize,
    ) -> Result<(), PagedKvError> {
        for (seat, place) in self.seats().zip(places.iter()) {
            place.cache.check_store(seat.store)?;
        }
        let mut sorted = groups.to_vec();
        sorted.sort_unstable_by_key(|group| group.index());
        // Held until every block is counted: no group is released in between. Counting is atomic
        // steps that wait for nothing.
        let table = self.groups.lock();
        for &group in groups {
            table.blocks(group)?;
        }
        if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(match table.blocks(twice[0])?.first() {
                Some(&block) => PagedKvError::BlockTwice { block },
                None => GroupError::Stale { group: twice[0] }.into(),
            });
        }
        // Where block sizes differ, a group that one layer needs for `len` has rows in all of them.
        let filled = self.seats().map(|seat| seat.shape.blocks_for(len)).max().unwrap_or(0);
        if groups.len() < filled {
            return Err(PagedKvError::BlockCount { need: filled, have: groups.len() });
        }
        let mut result = Ok(());
        for (layer, (seat, place)) in self.seats().zip(places.iter_mut()).enumerate() {
            let of_layer = groups.iter().filter_map(|&group| table.blocks(group).ok());
            let blocks = of_layer.filter_map(|blocks| blocks.get(layer).copied());
            result = place.cache.begin_with(&seat.blocks, seat.shape, blocks, filled, len);
            if result.is_err() {
                break;
            }
        }
        if result.is_err() {
            for (seat, place) in self.seats().zip(places) {
                place.cache.cut_to(&seat.blocks, seat.shape, 0);
            }
        }
        result
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::sequence::PagedSequence;
    use super::*;

    /// A panic between the taking of a block and the copy into it.
    #[test]
    fn what_a_copy_that_was_ended_had_taken_goes_back() {
        let shared = SharedPagedKv::<f32>::new(2, 2, 4, 1, 1);
        let mut sequence = PagedSequence::new(&shared);
        for restart in [true, false] {
            let seat = shared.seats().nth(1).unwrap();
            sequence.places[1].spare = seat.blocks.take();
            assert_eq!(shared.check_invariants(sequence.holders()), Ok(()));
            if restart {
                sequence.reserve(3).unwrap();
                assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (2, 2));
            } else {
                sequence.release();
            }
            assert_eq!(shared.check_invariants(sequence.holders()), Ok(()));
        }
        assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (4, 4));
    }
}
