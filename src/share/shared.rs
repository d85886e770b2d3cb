//! One store a layer, shared by many requests. The lock order is carried out here and nowhere
//! else; the room's essay draws it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use super::groups::{Groups, Release};
use super::guard::{RwLockReadGuard, RwLockWriteGuard};
use super::lock::{GateGuard, Lock, Mutex};
use super::seat::Seat;
use super::spec::LayerElement;
use super::wait::Bell;
use crate::element::Element;
use crate::error::{GroupError, PagedKvError, ShapeError};
use crate::id::{BlockId, PageGroup};
use crate::shape::KvShape;
use crate::storage::paged::PagedKvStore;
use crate::storage::rows;
use crate::storage::sequence::PagedKvCache;
use crate::storage::sequence::window::KvWindow;

/// Per-layer [`PagedKvStore`]s that many concurrent requests share.
///
/// # Why a lock per layer, and why two phases
///
/// Attention takes `&PagedKvStore` and only a push takes `&mut`: many concurrent readers and one
/// short exclusive write per position, which is a readers-writer lock, and one per *layer*, so
/// that two requests contend only when both write the same layer at the same instant.
///
/// Take the write guard for the push alone and drop it before attending under a read guard. Held
/// across attention it would serialise the expensive half and give back a global lock with extra
/// steps. Nothing breaks in the gap: a sequence's block table and length are its own, and another
/// request's push in between only touches blocks that it holds alone.
///
/// # Deadlock
///
/// [`write_all`](Self::write_all) is the one place where several layers are held at once, and it
/// takes them in ascending order. Code that holds a guard of one layer must not ask for a guard
/// of another or of the same one; it drops the first, or uses `write_all`.
///
/// [`acquire_group`](Self::acquire_group) takes blocks and so waits for writers, never for
/// readers. Under a write guard of the same thread it would wait for itself, as `read`, `write` and
/// `write_all` would; debug builds with `std` panic instead. (A read guard is not remembered:
/// `write` under one's own read guard waits for ever in every build.)
///
/// A guard that is made inside an expression lives to the end of the whole expression: in
/// `match cache.push(&mut shared.write(0), ..) { .. }` the layer stays locked in every arm. Bind
/// the result with `let` first; the lint `clippy::significant_drop_in_scrutinee` finds such places.
/// Everything that gives back or counts ([`release`](Self::release),
/// [`release_group`](Self::release_group), [`retain_group`](Self::retain_group),
/// [`free_blocks`](Self::free_blocks), ...) waits for nobody's guard: it is legal under any, and
/// while unwinding.
///
/// # Poisoning
///
/// A panic while holding a store leaves its rows mid-write, which is not recoverable, and not
/// unsound either: they are plain numbers. Poison is stepped over, so that one request's panic is
/// not a permanently dead server.
///
/// # Stores that are moved out of their layer
///
/// A write guard gives `&mut PagedKvStore`, and with two of them in hand two stores can be
/// exchanged, or one replaced. Block ids would then name rows of another layer, so this is noticed
/// when the guard is dropped, and the layer is *displaced* from then on: `read`, `write` and
/// `write_all` panic and say so, `acquire_group` gives `None` and `free_groups` 0. Counting and
/// giving back go on working with the store the layer began with. Exchanging them back before the
/// guards are dropped is harmless.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
///
/// let shared = SharedPagedKv::new(2, 16, 8, 1, 4); // 2 layers of 8 blocks of 16 positions
/// let group = shared.acquire_group().expect("8 are free");
/// assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (7, 7));
///
/// // A sequence in layer 1 grows into the group's block there.
/// let block = shared.group_block(group, 1).expect("alive");
/// let mut cache = PagedKvCache::new();
/// cache.adopt(&mut shared.write(1), &[block], 0)?;
/// cache.push(&mut shared.write(1), &[1.0; 4], &[2.0; 4])?;
///
/// assert!(shared.release_group(group), "that was the last holder");
/// assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (8, 7));
/// shared.release(1, &mut cache)?;
/// assert_eq!(shared.free_groups(), 8);
/// # Ok::<(), paged_kv::PagedKvError>(())
/// ```
pub struct SharedPagedKv<E: LayerElement = f32> {
    /// The layers that have a store of their own, in ascending order.
    layers: Vec<Layer<E>>,
    /// For each layer, where in `layers` its store is.
    of_layer: Vec<usize>,
    pub(super) groups: Mutex<Groups>,
    pub(super) bell: Arc<Bell>,
}

pub(super) struct Layer<E: LayerElement> {
    lock: Lock<E::Store>,
    pub(super) seat: Seat,
}

impl SharedPagedKv<f32> {
    /// One store per layer, each with `blocks_per_layer` blocks of `block_size` positions, for
    /// `n_kv_heads` heads whose key and value rows are `head_dim` numbers of `f32`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(4, 16, 100, 2, 64); // 4 layers of 100 blocks of 16
    /// assert_eq!((shared.layer_count(), shared.free_blocks(3)), (4, 100));
    /// assert_eq!(shared.read(0).shape().k_row_len(), 2 * 64);
    /// ```
    ///
    /// # Panics
    ///
    /// On a shape that cannot exist and on memory that cannot be had. Where the numbers come from
    /// outside, use [`try_new`](Self::try_new).
    #[track_caller]
    pub fn new(
        n_layers: usize,
        block_size: usize,
        blocks_per_layer: usize,
        n_kv_heads: usize,
        head_dim: usize,
    ) -> Self {
        match Self::try_new(n_layers, block_size, blocks_per_layer, n_kv_heads, head_dim) {
            Ok(shared) => shared,
            Err(error) => rows::impossible(error),
        }
    }

    /// As [`new`](Self::new), with the impossible as a value.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::ShapeError;
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let head_dim = 0; // as a damaged file says
    /// let refused = SharedPagedKv::try_new(4, 16, 100, 2, head_dim).unwrap_err();
    /// assert_eq!(refused, ShapeError::Zero { what: "k_width" });
    /// ```
    ///
    /// # Errors
    ///
    /// As [`PagedKvStore::with_shape`].
    pub fn try_new(
        n_layers: usize,
        block_size: usize,
        blocks_per_layer: usize,
        n_kv_heads: usize,
        head_dim: usize,
    ) -> Result<Self, ShapeError> {
        let shape = KvShape::square(block_size, n_kv_heads, head_dim)?;
        Self::with_shape(n_layers, shape, blocks_per_layer)
    }
}

impl<E: Element> SharedPagedKv<E> {
    /// One store per layer, all of one shape, for any stored number.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    /// use paged_kv::{KvShape, f16};
    ///
    /// let shared = SharedPagedKv::<f16>::with_shape(2, KvShape::square(16, 1, 8)?, 4)?;
    /// assert_eq!(shared.read(1).bytes_per_block(), 16 * (8 + 8) * 2);
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`PagedKvStore::with_shape`].
    pub fn with_shape(
        n_layers: usize,
        shape: KvShape,
        blocks_per_layer: usize,
    ) -> Result<Self, ShapeError> {
        let mut stores = Vec::new();
        let bytes = n_layers.saturating_mul(size_of::<PagedKvStore<E>>());
        stores.try_reserve_exact(n_layers).map_err(|_| ShapeError::OutOfMemory { bytes })?;
        for _ in 0..n_layers {
            stores.push(PagedKvStore::with_shape(shape, blocks_per_layer)?);
        }
        Ok(Self::from_stores(stores))
    }

    /// Wraps stores the caller built, for tests and for callers that size layers differently.
    ///
    /// Their shapes may differ. What sequences hold in them stays held.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvStore, SharedPagedKv};
    ///
    /// let stores = vec![PagedKvStore::new(16, 8, 1, 4), PagedKvStore::new(16, 3, 2, 4)];
    /// let shared = SharedPagedKv::from_stores(stores);
    /// assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (8, 3));
    /// assert_eq!(shared.free_groups(), 3); // a block of each layer
    /// ```
    pub fn from_stores(stores: Vec<PagedKvStore<E>>) -> Self {
        let of_layer = (0..stores.len()).collect();
        Self::assemble(stores.into_iter().map(|store| (store, 0, None)).collect(), of_layer)
    }
}

impl<E: LayerElement> SharedPagedKv<E> {
    /// From stores with their class and window, and the store of each layer.
    pub(super) fn assemble(
        stores: Vec<(E::Store, usize, Option<KvWindow>)>,
        of_layer: Vec<usize>,
    ) -> Self {
        let groups = Groups::new(PageGroup::fresh_pool(), stores.len());
        let bell = Arc::new(Bell::new());
        let layers = stores.into_iter().enumerate().map(|(index, (store, class, window))| {
            let layer = of_layer.iter().position(|&of| of == index).unwrap_or(index);
            let seat = Seat::new(E::books(&store), layer, class, window, Arc::clone(&bell));
            Layer { seat, lock: Lock::new(store) }
        });
        SharedPagedKv { layers: layers.collect(), of_layer, groups: Mutex::new(groups), bell }
    }

    /// Layers there are.
    pub fn layer_count(&self) -> usize {
        self.of_layer.len()
    }

    /// Shared access to one layer, for attention.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::causal_gqa_attention_paged;
    /// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut shared.write(0), &[1.0; 2], &[2.0; 2])?; // this guard ends here
    /// let store = shared.read(0);
    /// assert_eq!(causal_gqa_attention_paged(&[0.5; 2], &store, &cache, 1)?, [2.0; 2]);
    /// # shared.release(0, &mut cache)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If there is no such layer, or its store was moved out of it.
    ///
    /// # Deadlock
    ///
    /// Waits for the layer's writer, and for writers that came first. See the type.
    #[track_caller]
    pub fn read(&self, layer: usize) -> RwLockReadGuard<'_, E::Store> {
        let of = self.layer(layer);
        of.seat.not_mine("read", layer);
        let guard = RwLockReadGuard::new(of.lock.read());
        if of.seat.is_displaced() {
            drop(guard);
            displaced(layer);
        }
        guard
    }

    /// Exclusive access to one layer, for a push. Hold it for the push and nothing else; see the
    /// type.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut batch = [PagedKvCache::new(), PagedKvCache::new()];
    /// let mut store = shared.write(1);
    /// for cache in &mut batch {
    ///     cache.push(&mut store, &[1.0; 2], &[2.0; 2])?;
    /// }
    /// drop(store); // before anybody attends
    /// assert_eq!(shared.free_blocks(1), 2);
    /// # batch.iter_mut().try_for_each(|cache| shared.release(1, cache))?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If there is no such layer, or its store was moved out of it.
    ///
    /// # Deadlock
    ///
    /// Waits for the layer's readers and writer, and for an `acquire_group` under way. See the
    /// type.
    #[track_caller]
    pub fn write(&self, layer: usize) -> RwLockWriteGuard<'_, E::Store> {
        let of = self.layer(layer);
        of.seat.not_mine("write", layer);
        let mut guard = of.write();
        guard.set_gate(of.seat.gate.lock());
        if of.seat.is_displaced() {
            drop(guard);
            displaced(layer);
        }
        guard
    }

    /// Every layer's store at once, in ascending order, so that a multi-layer append is atomic against
    /// other requests.
    ///
    /// A decoder cannot push every layer at once (layer 1's keys need layer 0's attention); what it
    /// does under these guards is to [`reserve`](PagedKvCache::reserve) room in every layer before a
    /// step, after which no push of the step can run out. A
    /// [`PagedSequence`](crate::cache::PagedSequence) does that without stopping readers.
    ///
    /// This is what makes "all layers advance or none do" hold under concurrency: checking free
    /// space and then appending are separate steps, and without guards that span both another
    /// request can take the blocks in between and leave this one half-written.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 2);
    /// let mut layers = [PagedKvCache::new(), PagedKvCache::new()];
    /// let mut stores = shared.write_all(); // nobody takes a block from here on
    /// for (cache, store) in layers.iter_mut().zip(&mut stores) {
    ///     cache.reserve(store, 20)?;
    /// }
    /// drop(stores);
    /// assert_eq!(shared.free_groups(), 2);
    /// # for (layer, cache) in layers.iter_mut().enumerate() {
    /// #     shared.release(layer, cache)?;
    /// # }
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If a layer's store was moved out of it.
    ///
    /// # Deadlock
    ///
    /// Waits for every layer's readers and writer; while it does, `acquire_group` does not wait
    /// for it. Under a guard of the same thread it waits for ever.
    ///
    /// # Cost
    ///
    /// One allocation.
    #[track_caller]
    pub fn write_all(&self) -> Vec<RwLockWriteGuard<'_, E::Store>> {
        self.none_mine("write_all");
        let mut guards: Vec<_> = self.layers.iter().map(Layer::write).collect();
        // Every lock is held before the first gate is asked for: a gate held while waiting for
        // some layer's readers would make `acquire_group` wait for them too.
        for (guard, layer) in guards.iter_mut().zip(&self.layers) {
            guard.set_gate(layer.seat.gate.lock());
        }
        if let Some(layer) = self.first_displaced() {
            drop(guards);
            displaced(layer);
        }
        guards
    }

    /// Free blocks in one layer's store, for admission control.
    ///
    /// A snapshot: by the time a caller acts on it another request may have taken them, which is
    /// why the append itself asks again under its guard. Under the caller's own write guard it can
    /// only grow. Takes no lock.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn free_blocks(&self, layer: usize) -> usize {
        self.layer(layer).seat.blocks.free()
    }

    /// Gives back what a sequence holds in one layer, without its lock.
    ///
    /// As [`PagedKvCache::release`], and legal under any guard and while unwinding.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(1, 16, 4, 1, 2);
    /// let mut cache = PagedKvCache::new();
    /// cache.push(&mut shared.write(0), &[1.0; 2], &[2.0; 2])?;
    /// let reader = shared.read(0);
    /// shared.release(0, &mut cache)?; // does not wait for the reader
    /// assert_eq!(shared.free_blocks(0), 4);
    /// # drop(reader);
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`PagedKvError::WrongStore`] where the sequence was filled from another store; nothing is
    /// lost then.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn release(&self, layer: usize, cache: &mut PagedKvCache) -> Result<(), PagedKvError> {
        let seat = &self.layer(layer).seat;
        cache.release_to(seat.store, &seat.blocks, seat.shape)?;
        self.bell.ring();
        Ok(())
    }

    /// Takes one block from *every* layer as a single group with one holder, or `None`.
    ///
    /// All layers or none: a group that existed in some layers and not in others could not answer
    /// "which block holds position p in layer l", which is the only question it exists to answer.
    /// With no layers there is no group.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 1, 1, 4);
    /// let group = shared.acquire_group().expect("one block is free in both layers");
    /// assert!(shared.acquire_group().is_none());
    /// assert!(shared.release_group(group));
    /// assert_eq!(shared.free_groups(), 1);
    /// ```
    ///
    /// # Deadlock
    ///
    /// Waits for writers of any layer, never for readers, and for nobody where a layer is exhausted
    /// already. The thread must hold no write guard of this `SharedPagedKv`: it would wait for
    /// itself; debug builds with `std` panic instead.
    ///
    /// # Cost
    ///
    /// One allocation, and the group table may grow.
    #[must_use = "dropping the handle does not release the group"]
    #[track_caller]
    pub fn acquire_group(&self) -> Option<PageGroup> {
        // Asked before the gates as well, so that polling an exhausted pool never stands in a
        // push's way: neither std's mutex nor a spinning one lets those who wait go first. With
        // no layers it is 0.
        if self.free_groups() == 0 {
            return None;
        }
        let _gates = self.gates("acquire_group", 0..self.layers.len());
        // What is free now stays free: this thread is the one taker of every layer.
        if self.free_groups() == 0 {
            return None;
        }
        self.groups.lock().insert(|layer| {
            let taken = self.layers[layer].seat.blocks.take_for_group();
            taken.expect("free blocks were counted under the gate")
        })
    }

    /// One more holder of `group`.
    ///
    /// For whoever keeps the handle: a prefix index, or a second sequence between finding a cached
    /// prefix and [adopting it](crate::cache::PagedSequence::adopt_groups). Without it, the first holder to finish frees pages the second is
    /// about to attend over, which shows up as another conversation's tokens rather than as a
    /// crash. A sequence that has adopted the blocks holds them by itself, past the group's last
    /// release. From then on nobody writes into the group's blocks, whoever lets go of it first: the one
    /// who filled them may be gone, or be rolled back, while a prefix index keeps the rows.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// shared.retain_group(group); // for an index that keeps the handle
    /// assert_eq!(shared.group_refs(group), 2);
    /// shared.release_group(group); // the request is done, the index is not
    /// assert_eq!((shared.group_refs(group), shared.free_groups()), (1, 3));
    /// # shared.release_group(group);
    /// ```
    ///
    /// # Panics
    ///
    /// If the handle is stale, of another pool, or held too often, with nothing changed and no
    /// lock held. [`try_retain`](Self::try_retain) returns those as errors.
    #[track_caller]
    pub fn retain_group(&self, group: PageGroup) {
        if let Err(error) = self.try_retain(group) {
            bad_handle(error);
        }
    }

    /// As [`retain_group`](Self::retain_group), with a bad handle as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::GroupError;
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// assert_eq!(shared.try_retain(group), Ok(()));
    /// shared.release_group(group);
    /// shared.release_group(group);
    /// assert_eq!(shared.try_retain(group), Err(GroupError::Stale { group }));
    /// ```
    ///
    /// # Errors
    ///
    /// [`GroupError`], with nothing changed.
    pub fn try_retain(&self, group: PageGroup) -> Result<(), GroupError> {
        let mut groups = self.groups.lock();
        if let Some(blocks) = groups.retain(group)? {
            self.mark_shared(blocks);
        }
        Ok(())
    }

    /// One holder less. At zero the group's counts on its blocks go, and each block that no
    /// sequence holds goes back to its layer.
    ///
    /// Returns whether this was the last holder, so that a caller can assert on it rather than
    /// guess. The handle, and every copy of it, is stale from then on.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// shared.retain_group(group);
    /// assert!(!shared.release_group(group), "somebody else holds it");
    /// assert!(shared.release_group(group), "that was the last holder");
    /// assert_eq!(shared.group_refs(group), 0);
    /// ```
    ///
    /// # Panics
    ///
    /// If the handle is stale or of another pool, with nothing changed and no lock held.
    /// [`try_release`](Self::try_release) returns those as errors.
    #[track_caller]
    pub fn release_group(&self, group: PageGroup) -> bool {
        match self.try_release(group) {
            Ok(last) => last,
            Err(error) => bad_handle(error),
        }
    }

    /// As [`release_group`](Self::release_group), with a bad handle as an error.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::GroupError;
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// assert_eq!(shared.try_release(group), Ok(true));
    /// let next = shared.acquire_group().expect("four are free"); // perhaps in the same slot
    /// assert_eq!(shared.try_release(group), Err(GroupError::Stale { group }));
    /// # shared.release_group(next);
    /// ```
    ///
    /// # Errors
    ///
    /// [`GroupError::Stale`] and [`GroupError::WrongPool`], with nothing changed.
    pub fn try_release(&self, group: PageGroup) -> Result<bool, GroupError> {
        let mut groups = self.groups.lock();
        match groups.release(group)? {
            Release::Held => Ok(false),
            Release::Last(blocks) => {
                for (layer, &block) in self.layers.iter().zip(blocks) {
                    let dropped = layer.seat.blocks.drop_group(block);
                    debug_assert!(dropped.is_ok(), "a living group holds its blocks");
                }
                drop(groups);
                self.bell.ring();
                Ok(true)
            }
        }
    }

    /// Which block in each layer this group owns, indexed by layer; empty for a stale handle.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::SharedPagedKv;
    ///
    /// let shared = SharedPagedKv::new(3, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// assert_eq!(shared.group_blocks(group).len(), 3); // one in each layer
    /// shared.release_group(group);
    /// assert!(shared.group_blocks(group).is_empty());
    /// ```
    pub fn group_blocks(&self, group: PageGroup) -> Vec<usize> {
        let groups = self.groups.lock();
        let blocks = groups.blocks(group).unwrap_or(&[]);
        let of_layer = self.of_layer.iter().filter_map(|&of| blocks.get(of));
        of_layer.map(|block| block.index()).collect()
    }

    /// Which block in each layer this group owns, indexed by layer.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, SharedPagedKv};
    ///
    /// let shared = SharedPagedKv::new(2, 16, 4, 1, 4);
    /// let group = shared.acquire_group().expect("four are free");
    /// let mut layers = [PagedKvCache::new(), PagedKvCache::new()];
    /// for (layer, block) in shared.try_group_blocks(group)?.into_iter().enumerate() {
    ///     layers[layer].adopt(&mut shared.write(layer), &[block], 0)?; // room to grow into
    /// }
    /// shared.release_group(group); // the sequences hold the blocks
    /// assert_eq!(shared.free_groups(), 3);
    /// # for (layer, cache) in layers.iter_mut().enumerate() {
    /// #     shared.release(layer, cache)?;
    /// # }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`GroupError::Stale`] and [`GroupError::WrongPool`].
    pub fn try_group_blocks(&self, group: PageGroup) -> Result<Vec<BlockId>, GroupError> {
        let groups = self.groups.lock();
        let blocks = groups.blocks(group)?;
        Ok(self.of_layer.iter().filter_map(|&of| blocks.get(of).copied()).collect())
    }

    /// Which block of one layer this group owns; `None` for a stale handle and for a layer that
    /// is not there. Allocates nothing.
    pub fn group_block(&self, group: PageGroup, layer: usize) -> Option<BlockId> {
        let &of = self.of_layer.get(layer)?;
        self.groups.lock().blocks(group).ok()?.get(of).copied()
    }

    /// How many holders `group` has. Zero means that it does not exist.
    pub fn group_refs(&self, group: PageGroup) -> u32 {
        self.groups.lock().refs(group)
    }

    /// Groups that could still be taken, bounded by the layer with the fewest free blocks: a group
    /// needs one from each. A snapshot, as [`free_blocks`](Self::free_blocks). Takes no lock.
    pub fn free_groups(&self) -> usize {
        let free = self.layers.iter().map(|layer| match layer.seat.is_displaced() {
            true => 0,
            false => layer.seat.blocks.free(),
        });
        free.min().unwrap_or(0)
    }

    #[track_caller]
    fn none_mine(&self, call: &str) {
        for Layer { seat, .. } in &self.layers {
            seat.not_mine(call, seat.layer);
        }
    }

    /// Stops a call that could not write into every layer, before it writes into the first.
    #[track_caller]
    pub(super) fn check_writes(&self, call: &str) {
        self.none_mine(call);
        if let Some(layer) = self.first_displaced() {
            displaced(layer);
        }
    }

    /// A layer whose store was moved out of it.
    fn first_displaced(&self) -> Option<usize> {
        self.seats().find(|seat| seat.is_displaced()).map(|seat| seat.layer)
    }

    /// What is known of the stores without their locks, in the order of their layers.
    pub(super) fn seats(&self) -> impl Iterator<Item = &Seat> {
        self.layers.iter().map(|layer| &layer.seat)
    }

    /// The gates of these stores, in ascending order: nobody else takes blocks of them.
    ///
    /// `stores`, by their places among the seats, ascends. Waits for writers of these layers.
    #[track_caller]
    pub(super) fn gates(
        &self,
        call: &str,
        stores: impl Iterator<Item = usize> + Clone,
    ) -> Vec<GateGuard<'_>> {
        let seats = || stores.clone().filter_map(|store| self.layers.get(store));
        seats().for_each(|Layer { seat, .. }| seat.not_mine(call, seat.layer));
        let mut gates = Vec::with_capacity(self.layers.len());
        gates.extend(seats().map(|layer| layer.seat.gate.lock()));
        gates
    }

    fn mark_shared(&self, blocks: &[BlockId]) {
        for (layer, &block) in self.layers.iter().zip(blocks) {
            layer.seat.blocks.mark_group_shared(block);
        }
    }

    /// Where a layer's store is among the [`seats`](Self::seats).
    pub(super) fn store_of(&self, layer: usize) -> Option<usize> {
        self.of_layer.get(layer).copied()
    }

    #[track_caller]
    pub(super) fn layer(&self, layer: usize) -> &Layer<E> {
        match self.of_layer.get(layer) {
            Some(&of) => &self.layers[of],
            None => no_layer(layer, self.of_layer.len()),
        }
    }
}

impl<E: LayerElement> Layer<E> {
    fn write(&self) -> RwLockWriteGuard<'_, E::Store> {
        RwLockWriteGuard::new(self.lock.write(), &self.seat)
    }
}

impl<E: LayerElement> fmt::Debug for SharedPagedKv<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The free lists print without a lock, so that this is legal under any guard.
        f.debug_list().entries(self.layers.iter().map(|layer| &layer.seat.blocks)).finish()
    }
}

#[cold]
#[inline(never)]
#[track_caller]
pub(super) fn no_layer(layer: usize, layers: usize) -> ! {
    panic!("layer {layer} is out of range, there are {layers}")
}

#[cold]
#[inline(never)]
#[track_caller]
pub(super) fn displaced(layer: usize) -> ! {
    panic!("the store of layer {layer} was moved out of it under a write guard")
}

#[cold]
#[inline(never)]
#[track_caller]
fn bad_handle(error: GroupError) -> ! {
    panic!("{error}")
}
