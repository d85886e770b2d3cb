//! A layer's store as it is known without its lock.

use crate::atomic::{AtomicBool, Ordering};
use alloc::sync::Arc;

use super::guard::Watch;
use super::lock::Gate;
use super::wait::Bell;
use crate::id::StoreId;
use crate::shape::KvShape;
use crate::storage::any::{Books, LayerStore};
use crate::storage::blocks::Blocks;
use crate::storage::sequence::window::KvWindow;

/// What is known of a layer without its lock.
pub(super) struct Seat {
    /// The first layer that reads this store.
    pub(super) layer: usize,
    pub(super) class: usize,
    /// What sequences keep here, where that is not everything.
    pub(super) window: Option<KvWindow>,
    pub(super) gate: Gate,
    /// The free list of the store that the layer began with.
    pub(super) blocks: Arc<Blocks>,
    /// That store's name.
    pub(super) store: StoreId,
    /// Its shape, and what one of its blocks takes.
    pub(super) shape: KvShape,
    pub(super) bytes_per_block: usize,
    /// Those who wait for blocks are told here.
    bell: Arc<Bell>,
    /// Another store was found in its place. Set with lock and gate held, never cleared.
    displaced: AtomicBool,
}

impl Seat {
    pub(super) fn new(
        books: Books,
        layer: usize,
        class: usize,
        window: Option<KvWindow>,
        bell: Arc<Bell>,
    ) -> Self {
        let Books { id: store, shape, bytes_per_block, blocks } = books;
        let (gate, displaced) = (Gate::new(), AtomicBool::new(false));
        Seat { layer, class, window, gate, blocks, store, shape, bytes_per_block, bell, displaced }
    }

    /// Stops a call that would wait for a write guard of its own thread, where that is known.
    #[track_caller]
    pub(super) fn not_mine(&self, call: &str, layer: usize) {
        if self.gate.is_mine() {
            waits_for_itself(call, layer);
        }
    }

    pub(super) fn is_displaced(&self) -> bool {
        self.displaced.load(Ordering::Acquire)
    }
}

impl<S: LayerStore> Watch<S> for Seat {
    fn before_unlock(&self, store: &S) {
        if store.id() != self.store {
            self.displaced.store(true, Ordering::Release);
        }
        // What was given back under this guard was given back without a word.
        self.bell.ring();
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn waits_for_itself(call: &str, layer: usize) -> ! {
    panic!("`{call}` under this thread's own write guard of layer {layer} would wait for ever")
}
