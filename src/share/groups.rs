//! Page groups: one block in every layer, behind a handle that expires.
//!
//! ```text
//! slot    generation, holders          slots[7] = { 3, 2 }      handle 7v3, two holders
//! blocks  slot-major, one a layer      blocks[7 * layers + l]
//! vacant  slots to be used again
//! ```
//!
//! The table knows which blocks a group has. What a block's counts are is the free list's
//! business (`storage::blocks`): every change of a group's holders that matters to a block is
//! passed on at once, under the table's lock, by atomic steps that wait for nothing.

use alloc::vec::Vec;

use crate::error::GroupError;
use crate::id::{BlockId, PageGroup};

/// The groups of one shared layer set.
pub(crate) struct Groups {
    pool: u32,
    layers: usize,
    slots: Vec<Slot>,
    blocks: Vec<BlockId>,
    vacant: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Slot {
    /// The generation of the handle that is out, or of the next one to be handed out.
    generation: u32,
    /// Holders; 0 where the slot is vacant or retired.
    refs: u32,
}

/// What a release came to.
pub(crate) enum Release<'a> {
    /// Others hold the group.
    Held,
    /// That was the last holder; these are to be given back.
    Last(&'a [BlockId]),
}

impl Groups {
    pub(crate) fn new(pool: u32, layers: usize) -> Self {
        Groups { pool, layers, slots: Vec::new(), blocks: Vec::new(), vacant: Vec::new() }
    }

    /// Enters a group with one holder, whose blocks `take` gives, layer by layer.
    ///
    /// `None` where every slot there can be is in use or retired; `take` has not been called then.
    pub(crate) fn insert(&mut self, take: impl FnMut(usize) -> BlockId) -> Option<PageGroup> {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).ok()?;
                self.blocks.reserve(self.layers);
                self.slots.push(Slot { generation: 0, refs: 0 });
                self.blocks.resize(self.slots.len() * self.layers, BlockId::from_raw(0));
                index
            }
        };
        let blocks = &mut self.blocks[index as usize * self.layers..][..self.layers];
        blocks.iter_mut().zip((0..).map(take)).for_each(|(cell, block)| *cell = block);
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.refs, 0, "a vacant slot has no holder");
        slot.refs = 1;
        Some(PageGroup::new(index, slot.generation, self.pool))
    }

    /// Groups that could be entered before every slot there can be is in use or retired.
    pub(crate) fn left(&self) -> usize {
        // Indices have 32 bits. So has `usize` on small processors, where 2^32 would be cut to 0.
        let left = (1 << 32) - self.slots.len() as u64 + self.vacant.len() as u64;
        usize::try_from(left).unwrap_or(usize::MAX)
    }

    /// Groups with a holder, and how many each has.
    pub(crate) fn living(&self) -> impl Iterator<Item = (PageGroup, u32, &[BlockId])> {
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.refs > 0);
        slots.map(|(index, slot)| {
            let group = PageGroup::new(index as u32, slot.generation, self.pool);
            (group, slot.refs, self.blocks_of(index))
        })
    }

    /// One more holder; gives the blocks where there are now two.
    pub(crate) fn retain(&mut self, group: PageGroup) -> Result<Option<&[BlockId]>, GroupError> {
        let index = self.find(group)?;
        let slot = &mut self.slots[index];
        slot.refs = slot.refs.checked_add(1).ok_or(GroupError::TooManyHolders { group })?;
        let shared_now = slot.refs == 2;
        Ok(shared_now.then(|| self.blocks_of(index)))
    }

    /// One holder less. After the last one the handle names nothing any more.
    pub(crate) fn release(&mut self, group: PageGroup) -> Result<Release<'_>, GroupError> {
        let index = self.find(group)?;
        let slot = &mut self.slots[index];
        slot.refs -= 1;
        let refs = slot.refs;
        if refs > 0 {
            return Ok(Release::Held);
        }
        // A slot whose generations are used up is retired: were it to start over, the oldest
        // handles of all would name its new groups.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.vacant.push(index as u32);
        }
        Ok(Release::Last(self.blocks_of(index)))
    }

    /// Holders of the group; 0 where the handle names none.
    pub(crate) fn refs(&self, group: PageGroup) -> u32 {
        self.find(group).map_or(0, |index| self.slots[index].refs)
    }

    /// The group's blocks, by layer.
    pub(crate) fn blocks(&self, group: PageGroup) -> Result<&[BlockId], GroupError> {
        self.find(group).map(|index| self.blocks_of(index))
    }

    fn find(&self, group: PageGroup) -> Result<usize, GroupError> {
        if group.pool() != self.pool {
            return Err(GroupError::WrongPool { group });
        }
        match self.slots.get(group.index()) {
            Some(slot) if slot.refs > 0 && slot.generation == group.generation() => {
                Ok(group.index())
            }
            _ => Err(GroupError::Stale { group }),
        }
    }

    fn blocks_of(&self, index: usize) -> &[BlockId] {
        &self.blocks[index * self.layers..][..self.layers]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(groups: &mut Groups) -> PageGroup {
        groups.insert(|layer| BlockId::new(layer).unwrap()).unwrap()
    }

    #[test]
    fn a_slot_is_used_again_under_another_generation() {
        let mut groups = Groups::new(9, 2);
        let first = one(&mut groups);
        assert!(matches!(groups.release(first), Ok(Release::Last(_))));
        let second = one(&mut groups);
        assert_eq!(first.index(), second.index());
        assert_ne!(first, second);
        assert_eq!((groups.refs(first), groups.refs(second)), (0, 1));
        assert!(
            matches!(groups.release(first), Err(GroupError::Stale { group }) if group == first)
        );
        assert_eq!(groups.refs(second), 1);
    }

    #[test]
    fn a_slot_whose_generations_are_used_up_is_retired() {
        let mut groups = Groups::new(0, 1);
        let group = one(&mut groups);
        groups.slots[0].generation = u32::MAX;
        let last = PageGroup::new(0, u32::MAX, 0);
        assert!(matches!(groups.release(last), Ok(Release::Last(_))));
        assert_eq!(groups.refs(last), 0);
        let stale = Some(GroupError::Stale { group: last });
        assert_eq!((groups.blocks(last).err(), groups.retain(last).err()), (stale, stale));
        assert_eq!(one(&mut groups).index(), 1, "slot 0 is never handed out again");
        assert_eq!(groups.refs(group), 0);
    }

    /// Fails on a 32-bit target alone: `.ci/targets/i686`.
    #[test]
    fn an_empty_table_has_room_whatever_the_size_of_usize() {
        assert!(Groups::new(0, 1).left() >= u32::MAX as usize);
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn what_is_left_is_every_slot_that_is_not_in_use() {
        let mut groups = Groups::new(0, 1);
        let taken = [(); 3].map(|()| one(&mut groups));
        assert_eq!(groups.left(), (1 << 32) - 3);
        for (group, left) in taken.into_iter().zip(1..) {
            assert!(matches!(groups.release(group), Ok(Release::Last(_))));
            assert_eq!(groups.left(), (1 << 32) - 3 + left);
        }
        one(&mut groups);
        assert_eq!(groups.left(), (1 << 32) - 1);
    }

    #[test]
    fn holders_stop_instead_of_wrapping() {
        let mut groups = Groups::new(0, 1);
        let group = one(&mut groups);
        groups.slots[0].refs = u32::MAX;
        assert_eq!(groups.retain(group).err(), Some(GroupError::TooManyHolders { group }));
        assert_eq!(groups.refs(group), u32::MAX);
    }
}
