//! One request over every layer, which cannot be forgotten.

use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;
#[cfg(feature = "std")]
use core::time::Duration;

use super::report::{Holder, SequenceStats};
use super::shared::{SharedPagedKv, no_layer};
use super::spec::LayerElement;
use crate::error::PagedKvError;
use crate::id::{BlockId, PageGroup, StoreId};
use crate::shape::KvShape;
use crate::storage::any::LayerStore;
use crate::storage::rows;
use crate::storage::sequence::PagedKvCache;
use crate::storage::sequence::step::Lack;
use crate::storage::sequence::window::KvWindow;

/// One request over every layer of a [`SharedPagedKv`], given back when it is dropped.
///
/// `P` is the way to the layers: `&SharedPagedKv`, or an `Arc` of it.
///
/// # A step
///
/// ```text
/// reserve(n)                 room for n more positions in every layer, or an error and no change
/// for each layer
///     push, append           rows into that room, under the layer's write guard alone
///     attend                 over `cache(layer)`, under a read guard: it shows the rows just written
/// commit(n)                  all layers are n positions longer;  or  abandon(): as before the step
/// ```
///
/// Between `reserve` and `commit` nothing can run out of blocks. [`len`](Self::len) is what has
/// been committed; [`cache(layer)`](Self::cache) shows what was written in that layer, which during
/// a step is more: the token that is being decoded attends to itself before all layers have it. A
/// step that fails in its third layer is abandoned, and nobody has seen its rows.
///
/// # Ownership
///
/// Each layer's table counts the blocks it holds. It is only changed through this type, and only
/// with its own layer's store, so that the tables of two layers cannot change places. Dropping the
/// sequence gives everything back, while unwinding and under anybody's guard too: that takes no
/// lock. (Where following `P` panics in the drop itself there is no way to the layers, and the blocks
/// stay held.) [`fork`](Self::fork) counts and copies nothing.
///
/// Nobody writes what somebody else sees: the first [`reserve`](Self::reserve) after a fork copies
/// the block that is being filled, in every layer, unless the others have gone. Full blocks are
/// shared for ever.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::causal_gqa_attention_paged;
/// use paged_kv::cache::{PagedSequence, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(2, 16, 4, 1, 2); // 2 layers of 4 blocks of 16 positions
/// let mut sequence = PagedSequence::new(&shared);
/// sequence.reserve(1)?;
/// for layer in 0..2 {
///     sequence.push(layer, &[1.0; 2], &[2.0; 2])?;
///     let store = shared.read(layer);
///     let out = causal_gqa_attention_paged(&[0.5; 2], &store, sequence.cache(layer), 1)?;
///     assert_eq!(out, [2.0; 2]);
/// }
/// sequence.commit(1)?;
///
/// let beam = sequence.fork()?; // the same block of each layer
/// assert_eq!((beam.len(), beam.shared().free_groups()), (1, 3));
/// assert_eq!(beam.stats().shared, 2);
/// shared.check_invariants(sequence.holders().chain(beam.holders()))?;
/// drop((sequence, beam));
/// assert_eq!(shared.free_groups(), 4);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
///
/// # Deadlock
///
/// [`reserve`](Self::reserve), [`push`](Self::push), [`append`](Self::append) and their kind take
/// locks and must be called with no guard of these layers in hand. All else waits for nothing.
pub struct PagedSequence<P, E = f32>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    pub(super) shared: P,
    pub(super) places: Vec<Place>,
    pub(super) len: usize,
}

/// The sequence in one store.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) cache: PagedKvCache,
    /// What the reservation under way has found missing.
    pub(super) lack: Lack,
    /// Held for the copy of the block that is being filled. `None` between two calls.
    pub(super) spare: Option<BlockId>,
}

impl<P, E> PagedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    /// An empty sequence. One allocation; takes no block and no lock.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = Arc::new(SharedPagedKv::new(2, 16, 4, 1, 2));
    /// let mut sequence = PagedSequence::new(Arc::clone(&shared)); // may go to any thread
    /// std::thread::spawn(move || sequence.reserve(20)).join().expect("no panic")?;
    /// assert_eq!(shared.free_groups(), 4); // that thread has dropped it
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub fn new(shared: P) -> Self {
        let place = |window: Option<KvWindow>| {
            let cache = window.map_or_else(PagedKvCache::new, PagedKvCache::with_window);
            Place { cache, lack: Lack::default(), spare: None }
        };
        let places = shared.seats().map(|seat| place(seat.window)).collect();
        let mut sequence = PagedSequence { shared, places, len: 0 };
        sequence.bind();
        sequence
    }

    /// Begins, as an empty sequence, with `len` positions that others have written into the blocks
    /// of these groups: a shared prefix. In all layers or in none.
    ///
    /// Each block gets one more holder, and stays past the group's last release. Blocks that come
    /// with rows are not written as long as anybody else holds them; where the prefix ends inside
    /// of a block, the first [`reserve`](Self::reserve) copies it. Groups past `len` are room to
    /// grow into, and are written in place as long as they never had another holder. In a layer with a window
    /// the blocks that it has passed at `len` are not held.
    ///
    /// `len` is taken on trust: more positions than were written is whatever rows lie there.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 4, 8, 1, 2); // blocks of 4 positions
    /// let groups = shared.acquire_groups(2)?;
    /// let mut first = PagedSequence::new(&shared);
    /// first.adopt_groups(&groups, 0)?; // room to grow into
    /// first.reserve(8)?; // takes no block
    /// first.append(0, &[1.0; 8 * 2], &[2.0; 8 * 2], 8)?;
    /// first.commit(8)?;
    ///
    /// let mut second = PagedSequence::new(&shared);
    /// second.adopt_groups(&groups, 8)?; // with the rows that are there now
    /// assert_eq!(second.cache(0).block_table(), first.cache(0).block_table());
    /// assert_eq!((second.len(), shared.free_blocks(0)), (8, 6));
    /// # groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::NotEmpty`], [`PagedKvError::Group`] for a handle that is stale or of another
    /// pool, [`PagedKvError::BlockTwice`] for a group named twice, [`PagedKvError::BlockCount`] for
    /// fewer groups than `len` positions need, [`PagedKvError::TooManyHolders`],
    /// [`PagedKvError::WrongStore`] where `P` leads to other layers than it did. Nothing has changed
    /// then.
    ///
    /// # Cost
    ///
    /// One allocation a layer and one more; one atomic step for each block. Takes the group table's
    /// lock and waits for no guard.
    pub fn adopt_groups(&mut self, groups: &[PageGroup], len: usize) -> Result<(), PagedKvError> {
        let blocks = self.places.iter().map(|place| place.cache.block_table().len()).sum();
        if self.len != 0 || blocks != 0 {
            return Err(PagedKvError::NotEmpty { len: self.len, blocks });
        }
        self.shared.begin_with(&mut self.places, groups, len)?;
        self.len = len;
        Ok(())
    }

    /// Makes room for `n` positions behind [`len`](Self::len) in every layer, or in none.
    ///
    /// Where blocks are lacking, those that a layer's [window](crate::cache::KvWindow) has passed are
    /// given back first. After that no write of those positions can run out of blocks, whatever others do. Where the
    /// block that is being filled is held by others as well, its copy is made here. Room that is
    /// not used stays until [`truncate`](Self::truncate) or [`release`](Self::release).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::PagedKvError;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?; // two blocks of each layer
    /// assert_eq!(shared.free_groups(), 2);
    /// let refused = sequence.reserve(80).unwrap_err(); // three more of each, and two are free
    /// let PagedKvError::Exhausted(short) = refused else { unreachable!() };
    /// assert_eq!((short.need, short.free, shared.free_groups()), (3, 2, 2));
    /// # Ok::<(), PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::Exhausted`] with the blocks that the first short layer lacks and those that
    /// it has free; [`PagedKvError::TooLong`]; [`PagedKvError::WrongStore`] where `P` leads to other
    /// layers than it did. Nothing has changed then.
    ///
    /// # Panics
    ///
    /// If the store of a layer in which blocks are lacking was moved out of it, before anything has
    /// changed.
    ///
    /// # Deadlock
    ///
    /// Where blocks are lacking it waits for writers of those layers, and for readers only of a
    /// layer in which a block is copied. The thread must hold no guard of these layers.
    ///
    /// # Cost
    ///
    /// Where nothing is lacking, one atomic load for each block to be written. Otherwise the gates
    /// of the layers concerned, one allocation, and the tables may grow.
    #[track_caller]
    pub fn reserve(&mut self, n: usize) -> Result<(), PagedKvError> {
        let end = crate::storage::grown(self.len, n).ok_or(PagedKvError::TooLong)?;
        let mut lacking = false;
        let shared: &SharedPagedKv<E> = &self.shared;
        for (seat, place) in shared.seats().zip(&mut self.places) {
            place.cache.check_store(seat.store)?;
            place.lack = place.cache.lack(&seat.blocks, seat.shape, self.len, end);
            lacking |= place.lack.blocks() > 0;
        }
        if !lacking {
            return Ok(());
        }
        shared.take_room(&mut self.places)?;
        shared.move_tails(&mut self.places);
        Ok(())
    }

    /// As [`reserve`](Self::reserve), and sleeps until the blocks are there, `most` at the longest.
    ///
    /// Waiting is safe for a request that holds nothing yet. One that holds blocks may wait for
    /// another that waits for it: both come back after `most`, and one of them has to give way.
    ///
    /// # Examples
    ///
    /// ```
    /// use core::time::Duration;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let (mut running, mut waiting) = (PagedSequence::new(&shared), PagedSequence::new(&shared));
    /// running.reserve(64)?;
    /// assert!(waiting.reserve_within(20, Duration::from_millis(1)).is_err());
    /// std::thread::scope(|scope| {
    ///     scope.spawn(move || drop(running));
    ///     waiting.reserve_within(20, Duration::from_secs(60))
    /// })?;
    /// assert_eq!(shared.free_groups(), 2);
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As `reserve`, with the last refusal; at once where the positions could
    /// [never fit](SharedPagedKv::can_ever_fit).
    ///
    /// # Deadlock
    ///
    /// As `reserve`.
    #[cfg(feature = "std")]
    #[track_caller]
    pub fn reserve_within(&mut self, n: usize, most: Duration) -> Result<(), PagedKvError> {
        let mut left = most;
        loop {
            let refused = match self.reserve(n) {
                Err(refused @ PagedKvError::Exhausted(_)) => refused,
                other => return other,
            };
            // One step may want more at once than one position after the other.
            let mut places = self.shared.seats().zip(&self.places);
            let never = places.any(|(seat, place)| place.lack.free() > seat.blocks.total());
            if left.is_zero() || never || !self.shared.can_ever_fit(self.len + n) {
                return Err(refused);
            }
            left = self.shared.wait_for(left, &self.places);
        }
    }

    /// Writes the next position of one layer into reserved room: `k` is `[n_kv_heads][k_width]`,
    /// `v` is `[n_kv_heads][v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::PagedKvError;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// let no_room = Err(PagedKvError::NotReserved { need: 1, have: 0 });
    /// assert_eq!(sequence.push(0, &[1.0; 2], &[2.0; 2]), no_room);
    /// sequence.reserve(1)?;
    /// sequence.push(0, &[1.0; 2], &[2.0; 2])?;
    /// assert_eq!((sequence.cache(0).seq_len(), sequence.len()), (1, 0)); // written, not committed
    /// # Ok::<(), PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::NotReserved`] where there is no room: none was reserved, or a fork or a
    /// group's new holder has a share in it since. [`PagedKvError::LayerReads`] for a layer that reads
    /// another's rows. Nothing has changed then.
    ///
    /// # Panics
    ///
    /// If there is no such layer, or a row has the wrong length, before anything is changed.
    ///
    /// # Deadlock
    ///
    /// Takes the layer's write guard for the write alone.
    ///
    /// # Cost
    ///
    /// Allocates nothing.
    #[track_caller]
    pub fn push(&mut self, layer: usize, k: &[f32], v: &[f32]) -> Result<(), PagedKvError> {
        self.append(layer, k, v, 1)
    }

    /// Writes the next `n` positions of one layer, all or none: `k` is `[n][n_kv_heads][k_width]`,
    /// `v` is `[n][n_kv_heads][v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(3)?; // a prompt of three tokens
    /// for layer in 0..2 {
    ///     sequence.append(layer, &[1.0; 3 * 2], &[2.0; 3 * 2], 3)?;
    /// }
    /// sequence.commit(3)?;
    /// assert_eq!(sequence.len(), 3);
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors, panics, deadlock
    ///
    /// As [`push`](Self::push).
    #[track_caller]
    pub fn append(
        &mut self,
        layer: usize,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        let shared: &SharedPagedKv<E> = &self.shared;
        let place = owned(shared, &mut self.places, layer)?;
        let seat = &shared.layer(layer).seat;
        check_rows(seat.shape, place, seat.store, n, k, v)?;
        shared.write(layer).append(&mut place.cache, k, v, n)
    }

    /// As [`append`](Self::append), under a write guard that the caller holds: for a batch whose
    /// sequences write one after the other under one guard.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut batch = [(); 3].map(|()| PagedSequence::new(&shared));
    /// batch.iter_mut().try_for_each(|sequence| sequence.reserve(1))?;
    /// let mut store = shared.write(0);
    /// for sequence in &mut batch {
    ///     sequence.append_to(&mut store, 0, &[1.0; 2], &[2.0; 2], 1)?;
    /// }
    /// drop(store);
    /// assert!(batch.iter().all(|sequence| sequence.cache(0).seq_len() == 1));
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As `append`, and [`PagedKvError::WrongStore`] for the store of another layer.
    ///
    /// # Panics
    ///
    /// As `append`.
    #[track_caller]
    pub fn append_to(
        &mut self,
        store: &mut E::Store,
        layer: usize,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        let shared: &SharedPagedKv<E> = &self.shared;
        let place = owned(shared, &mut self.places, layer)?;
        check_rows(shared.layer(layer).seat.shape, place, store.id(), n, k, v)?;
        store.append(&mut place.cache, k, v, n)
    }

    /// Makes the sequence `n` positions longer, in all layers at once.
    ///
    /// What was written past that is taken back, its blocks stay as room: of eight draft tokens
    /// `commit(3)` keeps the first three. So a step always ends with all layers alike.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::PagedKvError;
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(4)?; // a token and three drafted ones
    /// sequence.append(0, &[1.0; 4 * 2], &[2.0; 4 * 2], 4)?;
    /// let behind = Err(PagedKvError::LayerBehind { layer: 1, need: 3, have: 0 });
    /// assert_eq!(sequence.commit(3), behind);
    /// sequence.append(1, &[1.0; 4 * 2], &[2.0; 4 * 2], 4)?;
    /// sequence.commit(3)?; // the last one was rejected
    /// assert_eq!((sequence.len(), sequence.cache(0).seq_len()), (3, 3));
    /// # Ok::<(), PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::LayerBehind`] where a layer has fewer positions, [`PagedKvError::TooLong`] for more
    /// than any sequence has; nothing has changed then.
    ///
    /// # Cost
    ///
    /// Looks at one length a layer. No lock, no allocation.
    pub fn commit(&mut self, n: usize) -> Result<(), PagedKvError> {
        let need = self.len.checked_add(n).ok_or(PagedKvError::TooLong)?;
        for (seat, place) in self.shared.seats().zip(&self.places) {
            let have = place.cache.seq_len();
            if have < need {
                return Err(PagedKvError::LayerBehind { layer: seat.layer, need, have });
            }
        }
        self.len = need;
        self.abandon();
        Ok(())
    }

    /// Commits a path through drafts that branch: of the positions written since the last commit those
    /// in `path`, counted from the first of these, are kept in every layer, moved together, and the
    /// rest is taken back. Its blocks stay as room, until [`truncate`](Self::truncate).
    ///
    /// The rows are copied as they are stored, so that what comes after is attended as if the tokens
    /// of the path had been written one after the other. Keys that were rotated for their depth in the
    /// tree are right where they end up; keys rotated for their place in it are not.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 1);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(3)?;
    /// // A draft and two that follow it, of which the second was right.
    /// sequence.append(0, &[1.0, 2.0, 3.0], &[0.5; 3], 3)?;
    /// sequence.compact(&[0, 2])?;
    /// let mut key = [0.0];
    /// sequence.cache(0).copy_k_row(&shared.read(0), 1, 0, &mut key)?;
    /// assert_eq!((sequence.len(), key), (2, [3.0]));
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::PathOrder`] for a path that does not ascend; [`PagedKvError::LayerBehind`] where
    /// a layer has not all of its positions; [`PagedKvError::NotReserved`] where the room has become
    /// somebody else's; [`PagedKvError::TooLong`] for a row that no sequence can have;
    /// [`PagedKvError::WrongStore`] where `P` leads to other layers than it did. Nothing has changed then.
    ///
    /// # Panics
    ///
    /// Where a row moves: if the store of a layer was moved out of it, before anything has changed.
    ///
    /// # Deadlock
    ///
    /// Where a row moves, takes the write guard of one layer after the other. The thread must hold no
    /// guard of these layers.
    ///
    /// # Cost
    ///
    /// A copy of each row that moves, in every layer. Allocates nothing.
    #[track_caller]
    pub fn compact(&mut self, path: &[usize]) -> Result<(), PagedKvError> {
        if let Some(index) = path.windows(2).position(|pair| pair[1] <= pair[0]) {
            return Err(PagedKvError::PathOrder { index: index + 1 });
        }
        let drafts = path.last().map_or(Some(0), |last| last.checked_add(1));
        let need = drafts.and_then(|drafts| self.len.checked_add(drafts));
        let need = need.ok_or(PagedKvError::TooLong)?;
        let shared: &SharedPagedKv<E> = &self.shared;
        for (seat, place) in shared.seats().zip(&self.places) {
            place.cache.check_store(seat.store)?;
            let have = place.cache.seq_len();
            if have < need {
                return Err(PagedKvError::LayerBehind { layer: seat.layer, need, have });
            }
            let need = path.len();
            let have = place.cache.writable(&seat.blocks, seat.shape, self.len, need);
            if have < need {
                return Err(PagedKvError::NotReserved { need, have });
            }
        }
        if path.iter().enumerate().any(|(to, &row)| row != to) {
            // In every layer or in none.
            shared.check_writes("compact");
            for (seat, place) in shared.seats().zip(&mut self.places) {
                shared.write(seat.layer).keep_path(&mut place.cache, self.len, path);
            }
        }
        self.commit(path.len())
    }

    /// Takes back what was written since the last [`commit`](Self::commit), in every layer. The
    /// room stays reserved.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(1)?;
    /// sequence.push(0, &[1.0; 2], &[2.0; 2])?;
    /// sequence.abandon(); // something failed before layer 1
    /// assert_eq!((sequence.len(), sequence.cache(0).seq_len()), (0, 0));
    /// sequence.push(0, &[1.0; 2], &[2.0; 2])?; // the step is done again, in the same room
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub fn abandon(&mut self) {
        for place in &mut self.places {
            place.cache.rewind(self.len);
        }
    }

    /// Takes back all positions from `len` on, in every layer, and gives back every block that the
    /// rest does not need, reserved ones too. A step under way is abandoned.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?;
    /// sequence.append(0, &[1.0; 20 * 2], &[2.0; 20 * 2], 20)?;
    /// sequence.commit(20)?;
    /// sequence.truncate(10)?; // the conversation goes on from its tenth token
    /// assert_eq!((sequence.len(), shared.free_blocks(0)), (10, 3));
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::PositionOutOfRange`] where the sequence is shorter than `len`: a rollback by
    /// the wrong count is a mistake and shall not pass for a short one.
    /// [`PagedKvError::PositionFreed`] where in some layer the window of the next position begins
    /// before the oldest one that was kept; the last step can always be taken back, until the next
    /// one has reserved. Nothing has changed then.
    ///
    /// # Cost
    ///
    /// One atomic step for each block that goes. Waits for nothing.
    pub fn truncate(&mut self, len: usize) -> Result<(), PagedKvError> {
        if len > self.len {
            return Err(PagedKvError::PositionOutOfRange { position: len, len: self.len });
        }
        for (seat, place) in self.shared.seats().zip(&self.places) {
            place.cache.check_cut(seat.shape, len)?;
        }
        self.cut_to(len);
        Ok(())
    }

    /// Gives every block of every layer back; the sequence is empty then, and can begin anew.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut sequence = PagedSequence::new(&shared);
    /// sequence.reserve(20)?;
    /// sequence.release(); // others need the blocks now
    /// assert!(sequence.is_empty());
    /// assert_eq!(shared.free_groups(), 4);
    /// sequence.reserve(40)?; // it is computed anew from its tokens, later
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Cost
    ///
    /// One atomic step for each block. Waits for nothing, and is legal under any guard and while
    /// unwinding. Keeps the tables' memory.
    pub fn release(&mut self) {
        self.cut_to(0);
    }

    /// A second sequence with the same positions, in the same blocks.
    ///
    /// Nothing is copied: each block that holds committed positions gets one more holder. What is
    /// not committed, and room that is reserved, stays with this sequence; where the two share a
    /// block that is being filled, either needs to [`reserve`](Self::reserve) before it writes the
    /// next position.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedSequence, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 2);
    /// let mut prompt = PagedSequence::new(&shared);
    /// prompt.reserve(20)?;
    /// prompt.append(0, &[1.0; 20 * 2], &[2.0; 20 * 2], 20)?;
    /// prompt.commit(20)?;
    /// let mut answer = prompt.fork()?;
    /// assert_eq!((answer.len(), shared.free_blocks(0)), (20, 2)); // nothing was copied
    /// answer.reserve(1)?; // copies the block that it will write into
    /// assert_eq!(shared.free_blocks(0), 1);
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::TooManyHolders`] where a count is full, [`PagedKvError::WrongStore`] where `P`
    /// leads to other layers than it did; nothing has changed then.
    ///
    /// # Cost
    ///
    /// One allocation a layer and one more; one atomic step for each block. Waits for nothing.
    pub fn fork(&self) -> Result<Self, PagedKvError>
    where
        P: Clone,
    {
        let mut child = PagedSequence::new(self.shared.clone());
        let seats = self.shared.seats().zip(&self.places);
        for ((seat, place), of_child) in seats.zip(&mut child.places) {
            // Where one is refused, what the child has so far goes back with it.
            place.cache.check_store(seat.store)?;
            of_child.cache = place.cache.fork_at(&seat.blocks, seat.shape, self.len)?;
        }
        child.len = self.len;
        Ok(child)
    }

    /// Positions that all layers have and that were committed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position was committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The sequence in one layer, for attention, alone or in a batch.
    ///
    /// During a step it is as long as what was written in this layer, which may be more than
    /// [`len`](Self::len); between steps it is that.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn cache(&self, layer: usize) -> &PagedKvCache {
        match self.shared.store_of(layer).and_then(|of| self.places.get(of)) {
            Some(place) => &place.cache,
            None => no_layer(layer, self.shared.layer_count()),
        }
    }

    /// The layers it lives in.
    pub fn shared(&self) -> &SharedPagedKv<E> {
        &self.shared
    }

    /// What it holds, for [`SharedPagedKv::check_invariants`].
    pub fn holders(&self) -> impl Iterator<Item = Holder<'_>> {
        self.shared.seats().zip(&self.places).flat_map(|(seat, place)| {
            let (layer, table) = (seat.layer, place.cache.block_table());
            [table, place.spare.as_slice()].map(|blocks| Holder::Table { layer, blocks })
        })
    }

    /// How many blocks it holds and what becomes of them.
    ///
    /// # Cost
    ///
    /// Visits each block. Waits for nothing, allocates nothing.
    pub fn stats(&self) -> SequenceStats {
        let mut stats = SequenceStats { len: self.len, ..SequenceStats::default() };
        for (seat, place) in self.shared.seats().zip(&self.places) {
            // A `P` that leads elsewhere than it did knows nothing of these blocks.
            if place.cache.check_store(seat.store).is_err() {
                continue;
            }
            let table = place.cache.block_table();
            stats.blocks += table.len();
            stats.shared += table.iter().filter(|&&b| seat.blocks.holders(b) > 1).count();
            let blocks = table.len() + place.cache.freed_blocks().len();
            stats.waste += blocks * seat.shape.block_size() - self.len;
        }
        stats
    }

    fn cut_to(&mut self, len: usize) {
        // Followed once, and first: where `P` panics, nothing has gone yet and nobody's bell is left
        // unrung.
        let shared: &SharedPagedKv<E> = &self.shared;
        self.len = len;
        let mut gone = shared.give_spares_back(&mut self.places);
        for (seat, place) in shared.seats().zip(&mut self.places) {
            // A `P` that leads elsewhere than it did costs its owner the blocks, and nobody else.
            if place.cache.check_store(seat.store).is_err() {
                continue;
            }
            let had = place.cache.block_table().len();
            place.cache.cut_to(&seat.blocks, seat.shape, len);
            gone |= place.cache.block_table().len() < had;
        }
        if gone {
            shared.bell.ring();
        }
    }

    /// Binds each layer's table to its store, before the first block.
    fn bind(&mut self) {
        for (seat, place) in self.shared.seats().zip(&mut self.places) {
            place.cache.bind(seat.store);
        }
    }
}

/// The sequence in a layer that has a store of its own.
#[track_caller]
fn owned<'a, E: LayerElement>(
    shared: &SharedPagedKv<E>,
    places: &'a mut [Place],
    layer: usize,
) -> Result<&'a mut Place, PagedKvError> {
    let owner = shared.owner_of(layer);
    if owner != layer {
        return Err(PagedKvError::LayerReads { layer, owner });
    }
    match shared.store_of(layer).and_then(|of| places.get_mut(of)) {
        Some(place) => Ok(place),
        None => no_layer(layer, shared.layer_count()),
    }
}

/// The store first: a row that fits the right store is no mistake of the rows.
#[track_caller]
fn check_rows(
    shape: KvShape,
    place: &Place,
    store: StoreId,
    n: usize,
    k: &[f32],
    v: &[f32],
) -> Result<(), PagedKvError> {
    place.cache.check_store(store)?;
    if let Err(wrong) = rows::check(shape, n, k, v) {
        wrong.panic();
    }
    Ok(())
}

impl<P, E> Drop for PagedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    fn drop(&mut self) {
        self.release();
    }
}

impl<P, E> fmt::Debug for PagedSequence<P, E>
where
    P: Deref<Target = SharedPagedKv<E>>,
    E: LayerElement,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let caches = self.places.iter().map(|place| &place.cache);
        f.debug_struct("PagedSequence")
            .field("len", &self.len)
            .field("layers", &DebugList(caches))
            .finish()
    }
}

struct DebugList<I>(I);

impl<I: Iterator<Item: fmt::Debug> + Clone> fmt::Debug for DebugList<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.clone()).finish()
    }
}
