//! A request that is saved, and one that comes back: bytes by `wire`, locks here.
//!
//! The guard of a layer is held for the copy of one page, never while bytes come or go: a slow disk
//! makes nobody wait. What comes back is written into room that was taken ahead in all layers, so that
//! all of them have their rows or none has blocks.

use alloc::vec::Vec;
use core::ops::Deref;

use super::sequence::PagedSequence;
use super::shared::SharedPagedKv;
use super::spec::LayerElement;
use crate::error::PagedKvError;
use crate::storage::any::LayerStore;
use crate::storage::sequence::step::Lack;
use crate::storage::sequence::window::Hole;
use crate::wire::{Label, Saved, SavedLayer, Sink, Source, WireError, Writer};

impl<P, E> PagedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    /// Writes what was committed to `sink`: all layers, exactly as they are stored. The
    /// [module](crate::wire) draws the bytes.
    ///
    /// # Errors
    ///
    /// [`WireError::Tokens`] for another number of token ids than of positions, [`WireError::Stream`]
    /// where the sink fails, [`WireError::Kv`] where `P` leads to other layers than it did.
    ///
    /// # Panics
    ///
    /// If a layer's store was moved out of it.
    ///
    /// # Deadlock
    ///
    /// Takes the read guard of one layer at a time, for the copy of a page. The thread must hold no guard
    /// of these layers.
    ///
    /// # Cost
    ///
    /// Allocates the header and one page. Each page is copied once on its way to the sink.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    /// use paged_kv::wire::{Label, Saved};
    ///
    /// let here = SharedPagedKv::new(2, 16, 4, 1, 2); // 2 layers of 4 blocks of 16 positions
    /// let mut sequence = PagedSequence::new(&here);
    /// sequence.reserve(1)?;
    /// for layer in 0..2 {
    ///     sequence.push(layer, &[1.0; 2], &[2.0; 2])?;
    /// }
    /// sequence.commit(1)?;
    /// let mut bytes = Vec::new();
    /// sequence.save(&Label::new().tokens(&[7]), &mut bytes)?;
    ///
    /// let there = SharedPagedKv::new(2, 32, 9, 1, 2);
    /// let mut back = PagedSequence::new(&there);
    /// back.restore(Saved::open(&bytes[..])?)?;
    /// assert_eq!((back.len(), there.free_groups()), (1, 8));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn save<W: Sink>(&self, label: &Label<'_>, sink: W) -> Result<(), WireError<W::Error>> {
        let (shared, len) = (self.shared(), self.len());
        let mut layers = Vec::<SavedLayer>::with_capacity(shared.layer_count());
        for layer in 0..shared.layer_count() {
            let owner = shared.owner_of(layer);
            if let Some(&of) = layers.get(owner) {
                layers.push(of);
                continue;
            }
            let (cache, seat) = (self.cache(layer), &shared.layer(layer).seat);
            cache.check_store(seat.store).map_err(PagedKvError::from)?;
            let kind = shared.read(layer).page_kind();
            layers.push(SavedLayer::new(layer, &kind, seat.window, cache.hole()));
        }
        let mut writer = Writer::begin(sink, len, label, &layers)?;
        for seat in shared.seats() {
            for (index, block, rows) in self.cache(seat.layer).pages(seat.shape, len) {
                shared.read(seat.layer).save_page(block, rows, &mut writer.page);
                writer.put(seat.layer, index)?;
            }
        }
        Ok(())
    }

    /// Makes this empty sequence the one that was saved, in all layers or in none.
    ///
    /// Each layer keeps the window that it has here. The module says [what may
    /// differ](crate::wire#what-may-differ-and-what-may-not).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    /// use paged_kv::wire::{Label, Saved, WireError};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(1)?;
    /// sequence.push(0, &[1.0; 2], &[2.0; 2])?;
    /// sequence.commit(1)?;
    /// let mut bytes = Vec::new();
    /// sequence.save(&Label::new(), &mut bytes)?;
    /// sequence.release();
    ///
    /// let cut = &bytes[..bytes.len() - 1]; // it has not arrived as a whole
    /// let refused = sequence.restore(Saved::open(cut)?);
    /// assert!(matches!(refused, Err(WireError::Truncated { .. })));
    /// assert_eq!((sequence.len(), shared.free_blocks(0)), (0, 4));
    /// sequence.restore(Saved::open(&bytes[..])?)?;
    /// assert_eq!(sequence.len(), 1);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`WireError::Kv`] where the sequence is not empty, or a layer has too few blocks free;
    /// [`WireError::Layers`], [`WireError::Owner`], [`WireError::Element`], [`WireError::Dims`],
    /// [`WireError::PositionFreed`], [`WireError::Field`] for pages of another size, where it does not
    /// fit these layers;
    /// [`WireError::Truncated`], [`WireError::Checksum`] and [`WireError::Stream`] from its pages. The
    /// sequence is empty then, and every block that was taken is given back, also where the source panics.
    ///
    /// # Panics
    ///
    /// If a layer's store was moved out of it.
    ///
    /// # Deadlock
    ///
    /// Waits for writers when it takes the blocks, and takes the write guard of one layer at a time, for
    /// the copy of a page. The thread must hold no guard of these layers.
    ///
    /// # Cost
    ///
    /// Holds all of its blocks while pages arrive. Allocates one page and the tables. Where the block size
    /// is the same a page is copied once, from the buffer that it was read to; otherwise number by number.
    #[track_caller]
    pub fn restore<S: Source>(&mut self, mut saved: Saved<S>) -> Result<(), WireError<S::Error>> {
        let holes = self.fit(&saved)?;
        self.take_all(saved.len(), &holes)?;
        let mut room = Room { sequence: self, filled: false };
        room.sequence.read_pages(&mut saved, &holes)?;
        room.sequence.fill(saved.len(), &holes);
        room.filled = true;
        Ok(())
    }

    /// What the sequence will be without in each store, where all else is the same.
    fn fit<S: Source>(&self, saved: &Saved<S>) -> Result<Vec<Hole>, WireError<S::Error>> {
        let shared = self.shared();
        let (need, have) = (shared.layer_count(), saved.layers().len());
        if need != have {
            return Err(WireError::Layers { need, have });
        }
        for (layer, saved) in saved.layers().iter().enumerate() {
            let (need, have) = (shared.owner_of(layer), saved.owner());
            if need != have {
                return Err(WireError::Owner { layer, need, have });
            }
        }
        let fit = shared.seats().map(|seat| {
            let (layer, kind) = (seat.layer, shared.read(seat.layer).page_kind());
            saved.layers()[layer].fit(layer, saved.len(), &kind, seat.window)
        });
        fit.collect()
    }

    /// Takes room for the first `len` positions, but for the holes, in every layer or in none. The
    /// sequence has to be empty.
    #[track_caller]
    fn take_all(&mut self, len: usize, holes: &[Hole]) -> Result<(), PagedKvError> {
        let blocks = self.places.iter().map(|place| place.cache.block_table().len()).sum();
        if self.len != 0 || blocks != 0 {
            return Err(PagedKvError::NotEmpty { len: self.len, blocks });
        }
        for ((seat, place), hole) in self.shared.seats().zip(&mut self.places).zip(holes) {
            place.cache.check_store(seat.store)?;
            place.lack = Lack::room(hole.entries(seat.shape.blocks_for(len)));
            // Before the tables grow: `len` may be anybody's claim.
            seat.blocks.check(place.lack.free())?;
        }
        let shared: &SharedPagedKv<E> = &self.shared;
        shared.take_room(&mut self.places)
    }

    /// The room that was taken holds the first `len` positions from now on.
    fn fill(&mut self, len: usize, holes: &[Hole]) {
        for (place, &hole) in self.places.iter_mut().zip(holes) {
            place.cache.fill(len, hole);
        }
        self.len = len;
    }

    fn read_pages<S: Source>(
        &self,
        saved: &mut Saved<S>,
        holes: &[Hole],
    ) -> Result<(), WireError<S::Error>> {
        let shared = self.shared();
        for (seat, &hole) in shared.seats().zip(holes) {
            let (layer, table) = (seat.layer, self.cache(seat.layer).block_table());
            for index in saved.layers()[layer].pages(saved.len()) {
                let page = saved.page(layer, index)?;
                shared.write(layer).load_page(&page, table, hole);
            }
        }
        Ok(())
    }
}

/// Blocks of a sequence that wait for their rows. They go back where those do not come: the source
/// is the caller's, and may fail or panic.
struct Room<'a, P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    sequence: &'a mut PagedSequence<P, E>,
    filled: bool,
}

impl<P, E> Drop for Room<'_, P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    fn drop(&mut self) {
        if !self.filled {
            self.sequence.release();
        }
    }
}
