//! A store whose stored type is known when the program runs, for layers that differ in it.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::any::Any;
use core::fmt;

use super::page::{Page, PageKind};
use super::paged::{Handle, PagedKvStore};
use super::sequence::PagedKvCache;
use super::sequence::window::Hole;
use crate::element::Element;
use crate::error::PagedKvError;
use crate::id::{BlockId, StoreId};
use crate::shape::KvShape;

/// What can be known of a store without its rows, and outlives its lock.
#[derive(Clone, Debug)]
pub struct Books {
    pub(crate) id: StoreId,
    pub(crate) shape: KvShape,
    pub(crate) bytes_per_block: usize,
    pub(crate) blocks: Handle,
}

impl Books {
    pub(crate) fn of<E: Element>(store: &PagedKvStore<E>) -> Self {
        Books {
            id: store.id(),
            shape: store.shape(),
            bytes_per_block: store.bytes_per_block(),
            blocks: Handle::clone(store.blocks()),
        }
    }
}

/// What a sequence over all layers does with the rows of one layer, whatever numbers those are.
pub trait LayerStore: fmt::Debug + Send + Sync + 'static {
    /// The store's name.
    fn id(&self) -> StoreId;

    /// Writes rows of the right length into room that is there.
    fn append(
        &mut self,
        cache: &mut PagedKvCache,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError>;

    /// Copies the block that is being filled into `spare`, which takes its place.
    fn move_tail(&mut self, cache: &mut PagedKvCache, spare: BlockId);

    /// Keeps a path through what was written from `from` on.
    fn keep_path(&mut self, cache: &mut PagedKvCache, from: usize, path: &[usize]);

    /// What its pages are.
    fn page_kind(&self) -> PageKind;

    /// Writes the first `rows` positions of a block to `page`.
    fn save_page(&self, block: BlockId, rows: usize, page: &mut Vec<u8>);

    /// Writes a page of a sequence into the blocks of this table.
    fn load_page(&mut self, page: &Page<'_>, table: &[BlockId], hole: Hole);
}

impl<E: Element> LayerStore for PagedKvStore<E> {
    fn id(&self) -> StoreId {
        self.id()
    }

    fn append(
        &mut self,
        cache: &mut PagedKvCache,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        cache.append_into_room(self, k, v, n)
    }

    fn move_tail(&mut self, cache: &mut PagedKvCache, spare: BlockId) {
        cache.move_tail(self, spare);
    }

    fn keep_path(&mut self, cache: &mut PagedKvCache, from: usize, path: &[usize]) {
        cache.keep_path(self, from, path);
    }

    fn page_kind(&self) -> PageKind {
        self.page_kind()
    }

    fn save_page(&self, block: BlockId, rows: usize, page: &mut Vec<u8>) {
        self.save_page(block, rows, page);
    }

    fn load_page(&mut self, page: &Page<'_>, table: &[BlockId], hole: Hole) {
        self.load_page(page, table, hole);
    }
}

/// A [`PagedKvStore`] of any stored type, which layers that differ in it have in common.
///
/// # Examples
///
/// ```
/// use paged_kv::Int8;
/// use paged_kv::cache::{AnyPagedKvStore, PagedKvStore};
///
/// let store = AnyPagedKvStore::from(PagedKvStore::<Int8>::with_shape(
///     paged_kv::KvShape::square(16, 1, 32)?,
///     4,
/// )?);
/// assert_eq!((store.element(), store.shape().k_width()), ("int8", 32));
/// assert!(store.as_store::<Int8>().is_some() && store.as_store::<f32>().is_none());
/// # Ok::<(), paged_kv::ShapeError>(())
/// ```
pub struct AnyPagedKvStore {
    books: Books,
    element: &'static str,
    store: Box<dyn AsLayerStore>,
}

/// What the box gives out: the one behaviour, and the type it was made of.
trait AsLayerStore: LayerStore {
    fn any(&self) -> &dyn Any;
    fn any_mut(&mut self) -> &mut dyn Any;
}

impl<S: LayerStore> AsLayerStore for S {
    fn any(&self) -> &dyn Any {
        self
    }

    fn any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl AnyPagedKvStore {
    /// The name of the stored type: `f32`.
    pub fn element(&self) -> &'static str {
        self.element
    }

    /// The sizes of the store.
    pub fn shape(&self) -> KvShape {
        self.books.shape
    }

    /// The store, where this is the stored type.
    pub fn as_store<E: Element>(&self) -> Option<&PagedKvStore<E>> {
        self.store.any().downcast_ref()
    }

    /// The store, where this is the stored type.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{AnyPagedKvStore, PagedKvCache, PagedKvStore};
    /// use paged_kv::{KvShape, f16};
    ///
    /// let shape = KvShape::square(16, 1, 2)?;
    /// let mut any = AnyPagedKvStore::from(PagedKvStore::<f16>::with_shape(shape, 4)?);
    /// let store = any.as_store_mut::<f16>().expect("what it was made of");
    /// let mut cache = PagedKvCache::new();
    /// cache.push(store, &[1.0; 2], &[2.0; 2])?;
    /// assert_eq!(store.free_block_count(), 3);
    /// # cache.release(store)?;
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn as_store_mut<E: Element>(&mut self) -> Option<&mut PagedKvStore<E>> {
        self.store.any_mut().downcast_mut()
    }

    pub(crate) fn books(&self) -> &Books {
        &self.books
    }
}

impl<E: Element> From<PagedKvStore<E>> for AnyPagedKvStore {
    fn from(store: PagedKvStore<E>) -> Self {
        AnyPagedKvStore { books: Books::of(&store), element: E::NAME, store: Box::new(store) }
    }
}

impl LayerStore for AnyPagedKvStore {
    fn id(&self) -> StoreId {
        // Asked of what is in the box: a store that was moved into another's box is noticed.
        self.store.id()
    }

    fn append(
        &mut self,
        cache: &mut PagedKvCache,
        k: &[f32],
        v: &[f32],
        n: usize,
    ) -> Result<(), PagedKvError> {
        self.store.append(cache, k, v, n)
    }

    fn move_tail(&mut self, cache: &mut PagedKvCache, spare: BlockId) {
        self.store.move_tail(cache, spare);
    }

    fn keep_path(&mut self, cache: &mut PagedKvCache, from: usize, path: &[usize]) {
        self.store.keep_path(cache, from, path);
    }

    fn page_kind(&self) -> PageKind {
        self.store.page_kind()
    }

    fn save_page(&self, block: BlockId, rows: usize, page: &mut Vec<u8>) {
        self.store.save_page(block, rows, page);
    }

    fn load_page(&mut self, page: &Page<'_>, table: &[BlockId], hole: Hole) {
        self.store.load_page(page, table, hole);
    }
}

impl fmt::Debug for AnyPagedKvStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.store.fmt(f)
    }
}
