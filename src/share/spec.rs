//! Layers that differ: what is said of each, and the stored type they have in common or not.

use alloc::vec::Vec;
use core::error::Error;
use core::fmt;

use super::shared::SharedPagedKv;
use crate::element::Element;
use crate::error::ShapeError;
use crate::shape::KvShape;
use crate::storage::any::{AnyPagedKvStore, Books, LayerStore};
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::window::KvWindow;

/// What one layer of a [`SharedPagedKv`] stores: shape, blocks, window, stored type.
///
/// Layers that are alike form a *class* with a number of blocks of its own. So a model that mixes full and
/// sliding layers gives the sliding ones as many blocks as their windows need, which do not grow with
/// the length of the texts.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{KvWindow, LayerSpec, PagedSequence, SharedPagedKv};
/// use paged_kv::KvShape;
///
/// // Two sliding layers to one full one, and a last layer that reads what the full one wrote.
/// let shape = KvShape::square(16, 1, 4)?;
/// let sliding = LayerSpec::new(shape, 9).window(KvWindow::last(64));
/// let specs = [sliding, sliding, LayerSpec::new(shape, 100), LayerSpec::same_as(2)];
/// let shared = SharedPagedKv::<f32>::with_layers(&specs)?;
///
/// let mut sequence = PagedSequence::new(&shared);
/// for _ in 0..1500 {
///     sequence.reserve(1)?;
///     for layer in 0..3 {
///         sequence.push(layer, &[1.0; 4], &[2.0; 4])?;
///     }
///     sequence.commit(1)?;
/// }
/// assert_eq!(sequence.cache(3).block_table(), sequence.cache(2).block_table());
/// assert_eq!(sequence.cache(0).freed_blocks(), 0..88, "the sliding layers keep the last few");
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a layer is made by `SharedPagedKv::with_layers`"]
pub struct LayerSpec(Spec);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spec {
    Own(OwnSpec),
    SameAs(usize),
}

/// What a layer with a store of its own was asked to be.
#[derive(Clone, Copy, Debug)]
pub struct OwnSpec {
    shape: KvShape,
    blocks: usize,
    window: Option<KvWindow>,
    element: Option<OfElement>,
}

/// How a store of a certain type is opened.
#[derive(Clone, Copy, Debug)]
struct OfElement {
    name: &'static str,
    open: fn(KvShape, usize) -> Result<AnyPagedKvStore, ShapeError>,
}

impl PartialEq for OwnSpec {
    fn eq(&self, other: &Self) -> bool {
        let name = |spec: &Self| spec.element.map(|element| element.name);
        let key = |spec: &Self| (spec.shape, spec.blocks, spec.window);
        key(self) == key(other) && name(self) == name(other)
    }
}

impl Eq for OwnSpec {}

impl LayerSpec {
    /// A layer with a store of its own, of so many blocks.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::{LayerSpec, SharedPagedKv};
    ///
    /// let narrow = LayerSpec::new(KvShape::square(16, 1, 64)?, 100);
    /// let wide = LayerSpec::new(KvShape::square(16, 4, 128)?, 50);
    /// let shared = SharedPagedKv::<f32>::with_layers(&[narrow, wide])?;
    /// assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (100, 50));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn new(shape: KvShape, blocks: usize) -> Self {
        LayerSpec(Spec::Own(OwnSpec { shape, blocks, window: None, element: None }))
    }

    /// A layer that computes no keys and values and reads those of another, which comes before it and
    /// has a store of its own (cross-layer sharing).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::{LayerError, LayerSpec, SharedPagedKv};
    ///
    /// let own = LayerSpec::new(KvShape::square(16, 1, 4)?, 8);
    /// let shared = SharedPagedKv::<f32>::with_layers(&[own, LayerSpec::same_as(0)])?;
    /// assert_eq!((shared.layer_count(), shared.owner_of(1)), (2, 0));
    /// // The rows have to be there when they are read.
    /// let refused = SharedPagedKv::<f32>::with_layers(&[LayerSpec::same_as(1), own]).unwrap_err();
    /// assert_eq!(refused, LayerError::SameAs { layer: 0, other: 1 });
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn same_as(layer: usize) -> Self {
        LayerSpec(Spec::SameAs(layer))
    }

    /// What sequences keep in the layer, where that is not everything. A layer that is
    /// [`same_as`](Self::same_as) another keeps what that one does, whatever is set here.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::{KvWindow, LayerSpec, SharedPagedKv};
    ///
    /// let full = LayerSpec::new(KvShape::square(16, 1, 4)?, 9);
    /// let sliding = full.window(KvWindow::last(64));
    /// let one = |spec| SharedPagedKv::<f32>::with_layers(&[spec]);
    /// assert!(!one(full)?.can_ever_fit(1000) && one(sliding)?.can_ever_fit(1_000_000));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn window(mut self, window: KvWindow) -> Self {
        if let Spec::Own(spec) = &mut self.0 {
            spec.window = Some(window);
        }
        self
    }

    /// The stored type, for [`Mixed`] layers; `f32` unless set. A layer that is
    /// [`same_as`](Self::same_as) another has that one's.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{LayerSpec, Mixed, SharedPagedKv};
    /// use paged_kv::{Int8, KvShape};
    ///
    /// let spec = LayerSpec::new(KvShape::square(16, 1, 4)?, 8);
    /// let shared = SharedPagedKv::<Mixed>::with_layers(&[spec, spec.element::<Int8>()])?;
    /// assert_eq!((shared.read(0).element(), shared.read(1).element()), ("f32", "int8"));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn element<E: Element>(mut self) -> Self {
        if let Spec::Own(spec) = &mut self.0 {
            let open = |shape, blocks| PagedKvStore::<E>::with_shape(shape, blocks).map(Into::into);
            spec.element = Some(OfElement { name: E::NAME, open });
        }
        self
    }
}

/// The stored types of the layers of a [`SharedPagedKv`]: an [`Element`] for all of them, or
/// [`Mixed`].
///
/// The trait is sealed.
///
/// # Examples
///
/// ```
/// use paged_kv::KvShape;
/// use paged_kv::cache::{LayerElement, LayerSpec, Mixed, SharedPagedKv};
///
/// /// What an engine says of its pool, whatever the layers store.
/// fn positions<E: LayerElement>(shared: &SharedPagedKv<E>) -> usize {
///     shared.stats().layers.iter().map(|layer| layer.total * layer.block_size).sum()
/// }
///
/// let alike = SharedPagedKv::new(2, 16, 4, 1, 4);
/// let mixed =
///     SharedPagedKv::<Mixed>::with_layers(&[LayerSpec::new(KvShape::square(16, 1, 4)?, 4)])?;
/// assert_eq!((positions(&alike), positions(&mixed)), (128, 64));
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
pub trait LayerElement: sealed::Sealed + 'static {
    /// A layer's store.
    #[allow(private_bounds, reason = "what the layers do with it is theirs")]
    type Store: LayerStore;

    #[doc(hidden)]
    fn open(spec: &OwnSpec) -> Result<Self::Store, Refused>;

    #[doc(hidden)]
    fn books(store: &Self::Store) -> Books;
}

mod sealed {
    pub trait Sealed {}
    impl<E: crate::element::Element> Sealed for E {}
    impl Sealed for super::Mixed {}
}

/// Why a store was not opened.
#[derive(Debug)]
pub enum Refused {
    Shape(ShapeError),
    Element { need: &'static str, have: &'static str },
}

impl<E: Element> LayerElement for E {
    type Store = PagedKvStore<E>;

    fn open(spec: &OwnSpec) -> Result<Self::Store, Refused> {
        match spec.element {
            Some(OfElement { name, .. }) if name != E::NAME => {
                Err(Refused::Element { need: E::NAME, have: name })
            }
            _ => PagedKvStore::with_shape(spec.shape, spec.blocks).map_err(Refused::Shape),
        }
    }

    fn books(store: &Self::Store) -> Books {
        Books::of(store)
    }
}

/// Layers whose stored types differ: their stores are [`AnyPagedKvStore`]s.
///
/// A read guard derefs to one, and [`as_store`](AnyPagedKvStore::as_store) gives the store of the
/// type that the layer was asked to have, for attention.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::causal_gqa_attention_paged;
/// use paged_kv::cache::{LayerSpec, Mixed, PagedSequence, SharedPagedKv};
/// use paged_kv::{Int8, KvShape, f16};
///
/// let spec = LayerSpec::new(KvShape::square(16, 1, 4)?, 8);
/// let specs = [spec.element::<f16>(), spec.element::<Int8>()];
/// let shared = SharedPagedKv::<Mixed>::with_layers(&specs)?;
/// let mut sequence = PagedSequence::new(&shared);
/// sequence.reserve(1)?;
/// sequence.push(0, &[1.0; 4], &[2.0; 4])?;
/// sequence.push(1, &[1.0; 4], &[2.0; 4])?;
/// sequence.commit(1)?;
///
/// let guard = shared.read(1);
/// let store = guard.as_store::<Int8>().expect("as it was asked to be");
/// assert_eq!(causal_gqa_attention_paged(&[0.5; 4], store, sequence.cache(1), 1)?, [2.0; 4]);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Mixed {}

impl LayerElement for Mixed {
    type Store = AnyPagedKvStore;

    fn open(spec: &OwnSpec) -> Result<Self::Store, Refused> {
        let opened = match spec.element {
            Some(OfElement { open, .. }) => open(spec.shape, spec.blocks),
            None => PagedKvStore::<f32>::with_shape(spec.shape, spec.blocks).map(Into::into),
        };
        opened.map_err(Refused::Shape)
    }

    fn books(store: &Self::Store) -> Books {
        store.books().clone()
    }
}

/// A layer that cannot be made.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{LayerError, LayerSpec, SharedPagedKv};
/// use paged_kv::{Int8, KvShape};
///
/// let spec = LayerSpec::new(KvShape::square(16, 1, 8)?, 4);
/// // Layers of several stored types are `SharedPagedKv<Mixed>`.
/// let refused = SharedPagedKv::<f32>::with_layers(&[spec, spec.element::<Int8>()]).unwrap_err();
/// assert!(matches!(refused, LayerError::Element { layer: 1, need: "f32", .. }));
/// # Ok::<(), paged_kv::ShapeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerError {
    /// Its shape, or its memory.
    Shape {
        /// The layer.
        layer: usize,
        /// What is wrong.
        error: ShapeError,
    },
    /// It was to have another stored type than all of the layers: they are not [`Mixed`].
    Element {
        /// The layer.
        layer: usize,
        /// The type of all layers.
        need: &'static str,
        /// The type asked for.
        have: &'static str,
    },
    /// It was to read another layer's keys and values, which is not before it or has no store of its
    /// own.
    SameAs {
        /// The layer.
        layer: usize,
        /// The other one.
        other: usize,
    },
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerError::Shape { layer, error } => write!(f, "layer {layer}: {error}"),
            LayerError::Element { layer, need, have } => {
                write!(f, "layer {layer} was to store {have}, all layers store {need}")
            }
            LayerError::SameAs { layer, other } => {
                write!(f, "layer {layer} cannot read layer {other}, which has no store before it")
            }
        }
    }
}

impl Error for LayerError {}

impl<E: LayerElement> SharedPagedKv<E> {
    /// Layers that may differ, each as its [`LayerSpec`] says. [`Mixed`] layers may differ in the
    /// stored type as well.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::KvShape;
    /// use paged_kv::cache::{KvWindow, LayerSpec, SharedPagedKv};
    ///
    /// let full = LayerSpec::new(KvShape::square(16, 1, 4)?, 100);
    /// let sliding = LayerSpec::new(KvShape::square(16, 1, 4)?, 9).window(KvWindow::last(64));
    /// let specs = [sliding, full, sliding, LayerSpec::same_as(1)];
    /// let shared = SharedPagedKv::<f32>::with_layers(&specs)?;
    /// assert_eq!([0, 1, 2, 3].map(|layer| shared.class_of(layer)), [0, 1, 0, 1]);
    /// assert_eq!([0, 1, 2, 3].map(|layer| shared.owner_of(layer)), [0, 1, 2, 1]);
    /// assert_eq!((shared.window_of(0), shared.window_of(1)), (Some(KvWindow::last(64)), None));
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LayerError`], with the layer; nothing is held then.
    pub fn with_layers(specs: &[LayerSpec]) -> Result<Self, LayerError> {
        let (mut stores, mut of_layer) = (Vec::new(), Vec::with_capacity(specs.len()));
        let mut classes = Vec::<OwnSpec>::new();
        for (layer, LayerSpec(spec)) in specs.iter().enumerate() {
            let spec = match spec {
                Spec::Own(spec) => spec,
                &Spec::SameAs(other) => {
                    let owns = matches!(specs[..layer].get(other), Some(LayerSpec(Spec::Own(_))));
                    if !owns {
                        return Err(LayerError::SameAs { layer, other });
                    }
                    of_layer.push(of_layer[other]);
                    continue;
                }
            };
            let store = E::open(spec).map_err(|refused| match refused {
                Refused::Shape(error) => LayerError::Shape { layer, error },
                Refused::Element { need, have } => LayerError::Element { layer, need, have },
            })?;
            let class = classes.iter().position(|class| class == spec).unwrap_or_else(|| {
                classes.push(*spec);
                classes.len() - 1
            });
            of_layer.push(stores.len());
            stores.push((store, class, spec.window));
        }
        Ok(Self::assemble(stores, of_layer))
    }

    /// The class of a layer: layers of one class are alike in shape, blocks, window and stored type.
    /// Classes are numbered as they come. The layers of [`from_stores`](Self::from_stores) and of
    /// the short constructors are one class.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn class_of(&self, layer: usize) -> usize {
        self.layer(layer).seat.class
    }

    /// What sequences keep in a layer, where that is not everything.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn window_of(&self, layer: usize) -> Option<KvWindow> {
        self.layer(layer).seat.window
    }

    /// The layer whose keys and values this one reads: itself, unless it was said to be
    /// [the same as another](LayerSpec::same_as).
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    #[track_caller]
    pub fn owner_of(&self, layer: usize) -> usize {
        self.layer(layer).seat.layer
    }
}
