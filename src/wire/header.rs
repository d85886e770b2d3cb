//! The header: what a saved sequence says about itself. The room's essay draws it.

use alloc::vec::Vec;

use super::error::{Part, WireError};
use super::stream::{Counted, Source};
use crate::element::name_of;
use crate::shape::{KvDims, KvShape};
use crate::storage::MOST_POSITIONS;
use crate::storage::page::PageKind;
use crate::storage::sequence::window::{Hole, KvWindow};

/// Not text, and not whole after a transfer as text: what the first bytes of PNG files are for.
pub(super) const MAGIC: [u8; 8] = *b"\x89PKV\r\n\x1a\n";
const VERSION: u16 = 1;
/// The tile of `element::tile`: keys transposed, panels of 64.
const LAYOUT: u16 = 1;
/// Bytes in front of the layers, and of each layer.
const FIXED: usize = 56;
const LAYER: usize = 88;
/// What a layer is.
const OWN: u8 = 1;
const READS: u8 = 2;

/// What a saved sequence is, in the words of whoever saves it.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::wire::{Label, Saved};
///
/// let mut store = PagedKvStore::new(16, 4, 1, 1);
/// let mut cache = PagedKvCache::new();
/// cache.append(&mut store, &[0.5; 2], &[0.5; 2], 2)?;
/// let label = Label::new().tokens(&[15496, 995]).salt(b"smollm2-135m@f16 tenant 7");
/// let mut bytes = Vec::new();
/// cache.save(&store, &label, &mut bytes)?;
/// assert_eq!(Saved::open(&bytes[..])?.tokens(), [15496, 995]);
/// # cache.release(&mut store)?;
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label<'a> {
    pub(super) tokens: &'a [u32],
    pub(super) salt: &'a [u8],
}

impl<'a> Label<'a> {
    /// Says nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::wire::Label;
    ///
    /// assert_eq!(Label::new(), Label::default().tokens(&[]).salt(b""));
    /// ```
    pub const fn new() -> Self {
        Label { tokens: &[], salt: &[] }
    }

    /// The token ids that the rows stand for: one for each position, or none.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::wire::{Label, WireError};
    ///
    /// let mut store = PagedKvStore::new(16, 4, 1, 1);
    /// let mut cache = PagedKvCache::new();
    /// cache.append(&mut store, &[0.5; 2], &[0.5; 2], 2)?;
    /// let label = Label::new().tokens(&[15496, 995, 0]); // one more than there are rows
    /// let refused = cache.save(&store, &label, &mut Vec::new());
    /// assert_eq!(refused, Err(WireError::Tokens { need: 2, have: 3 }));
    /// # cache.release(&mut store)?;
    /// # Ok::<(), paged_kv::PagedKvError>(())
    /// ```
    pub const fn tokens(self, tokens: &'a [u32]) -> Self {
        Label { tokens, ..self }
    }

    /// Whatever else the rows depend on: model, revision, LoRA, tenant.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::cache::{PagedKvCache, PagedKvStore};
    /// use paged_kv::wire::{Label, Saved};
    ///
    /// let (store, mut bytes) = (PagedKvStore::new(16, 4, 1, 1), Vec::new());
    /// let label = Label::new().salt(b"smollm2-135m@f16 tenant 7");
    /// PagedKvCache::new().save(&store, &label, &mut bytes)?;
    /// // Elsewhere, before anything is restored:
    /// assert_eq!(Saved::open(&bytes[..])?.salt(), b"smollm2-135m@f16 tenant 7");
    /// # Ok::<(), paged_kv::wire::WireError>(())
    /// ```
    pub const fn salt(self, salt: &'a [u8]) -> Self {
        Label { salt, ..self }
    }
}

/// What was saved of one layer.
///
/// # Examples
///
/// ```
/// use paged_kv::cache::{PagedKvCache, PagedKvStore};
/// use paged_kv::wire::{Label, Saved};
///
/// let store = PagedKvStore::new(16, 4, 1, 2);
/// let mut bytes = Vec::new();
/// PagedKvCache::new().save(&store, &Label::new(), &mut bytes)?;
/// let saved = Saved::open(&bytes[..])?;
/// let layer = saved.layers()[0];
/// assert_eq!((layer.element(), layer.shape().block_size(), layer.window()), ("f32", 16, None));
/// assert_eq!(layer.owner(), 0); // its rows are its own
/// # Ok::<(), paged_kv::wire::WireError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedLayer {
    /// The layer whose rows it reads.
    owner: usize,
    code: u8,
    element: &'static str,
    shape: KvShape,
    window: Option<KvWindow>,
    hole: Hole,
    page_bytes: usize,
}

impl SavedLayer {
    pub(crate) fn new(
        layer: usize,
        kind: &PageKind,
        window: Option<KvWindow>,
        hole: Hole,
    ) -> SavedLayer {
        SavedLayer {
            owner: layer,
            code: kind.code,
            element: kind.name,
            shape: kind.shape,
            window,
            hole,
            page_bytes: (kind.bytes)(kind.shape),
        }
    }

    /// The name of the stored type: `f32`.
    pub fn element(&self) -> &'static str {
        self.element
    }

    /// The sizes it was saved with.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// What the sequence kept in it, where that is not everything.
    pub fn window(&self) -> Option<KvWindow> {
        self.window
    }

    /// The layer whose rows it reads: itself, unless it was
    /// [the same as another](crate::cache::LayerSpec::same_as).
    pub fn owner(&self) -> usize {
        self.owner
    }

    /// The pages that were saved, by their place in the sequence.
    pub(crate) fn pages(&self, len: usize) -> impl Iterator<Item = usize> + use<> {
        let hole = self.hole.range();
        (0..hole.start).chain(hole.end..self.shape.blocks_for(len))
    }

    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// What the sequence will be without in a store of this kind and under this window, if that is
    /// all that is missing.
    pub(crate) fn fit<X>(
        &self,
        layer: usize,
        len: usize,
        kind: &PageKind,
        window: Option<KvWindow>,
    ) -> Result<Hole, WireError<X>> {
        if kind.code != self.code {
            return Err(WireError::Element { layer, need: kind.name, have: self.element });
        }
        let (need, have) = (kind.shape.dims(), self.shape.dims());
        if (KvDims { block_size: have.block_size, ..need }) != have {
            return Err(WireError::Dims { layer, need, have });
        }
        let bytes = (kind.bytes)(self.shape);
        if bytes != self.page_bytes {
            let (need, have) = (bytes as u64, self.page_bytes as u64);
            return Err(WireError::Field { what: "page bytes", need, have });
        }
        let gone = self.hole.range();
        let missing = gone.start * have.block_size..gone.end * have.block_size;
        let hole = KvWindow::hole_of_saved(window, kind.shape, len, self.window, missing.clone());
        let out = hole.range();
        let out = out.start * need.block_size..out.end * need.block_size;
        if missing.is_empty() || (out.start <= missing.start && missing.end <= out.end) {
            return Ok(hole);
        }
        let in_front = out.is_empty() || missing.start < out.start;
        let position = if in_front { missing.start } else { out.end.max(missing.start) };
        Err(WireError::PositionFreed { layer, position, oldest: missing.end })
    }
}

/// A header that was read.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) len: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) salt: Vec<u8>,
    pub(super) layers: Vec<SavedLayer>,
    /// Its checksum, which those of the pages begin with.
    pub(super) seal: u32,
}

/// The bytes of a header, and its checksum.
pub(super) fn write(len: usize, label: &Label<'_>, layers: &[SavedLayer]) -> (Vec<u8>, u32) {
    let total = FIXED + layers.len() * LAYER + label.tokens.len() * 4 + label.salt.len() + 4;
    let mut bytes = Vec::with_capacity(total);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(LAYOUT.to_le_bytes());
    bytes.extend([0; 4]);
    for number in [total, len, label.tokens.len(), label.salt.len(), layers.len()] {
        bytes.extend((number as u64).to_le_bytes());
    }
    for (index, layer) in layers.iter().enumerate() {
        let own = layer.owner == index;
        bytes.extend(if own { [OWN, layer.code] } else { [READS, 0] });
        bytes.extend([0; 6]);
        let dims = layer.shape.dims();
        let window = layer.window.map_or((0, 0), |window| (window.window(), window.first()));
        let hole = layer.hole.range();
        let of_own = [
            dims.block_size,
            dims.n_kv_heads,
            dims.k_width,
            dims.v_width,
            window.0,
            window.1,
            hole.start,
            hole.len(),
            layer.page_bytes,
        ];
        bytes.extend((layer.owner as u64).to_le_bytes());
        for number in if own { of_own } else { [0; 9] } {
            bytes.extend((number as u64).to_le_bytes());
        }
    }
    for token in label.tokens {
        bytes.extend(token.to_le_bytes());
    }
    bytes.extend(label.salt);
    let seal = crc32fast::hash(&bytes);
    bytes.extend(seal.to_le_bytes());
    debug_assert_eq!(bytes.len(), total);
    (bytes, seal)
}

/// Reads a header, and believes nothing of it before its checksum but what is needed to find that.
pub(super) fn read<S: Source>(source: &mut Counted<S>) -> Result<Header, WireError<S::Error>> {
    let mut bytes = Vec::new();
    source.want(FIXED);
    source.read(&mut bytes, FIXED)?;
    let mut fixed = Fields(&bytes);
    let magic = fixed.take();
    if magic != MAGIC {
        return Err(WireError::Magic { have: magic });
    }
    let (version, layout) = (u16::from_le_bytes(fixed.take()), u16::from_le_bytes(fixed.take()));
    if version != VERSION {
        return Err(WireError::Version { need: VERSION, have: version });
    }
    if layout != LAYOUT {
        return Err(WireError::Layout { need: LAYOUT, have: layout });
    }
    let zero = u32::from_le_bytes(fixed.take());
    let [total, len, tokens, salt, layers] = [(); 5].map(|()| fixed.number());
    // What follows from the counts, where they can be true at all.
    let parts = layers.checked_mul(LAYER as u64).zip(tokens.checked_mul(4));
    let sum = parts.and_then(|(layers, tokens)| layers.checked_add(tokens)?.checked_add(salt));
    let need = sum.and_then(|sum| sum.checked_add(FIXED as u64 + 4)).unwrap_or(u64::MAX);
    if total != need {
        return Err(WireError::Field { what: "header bytes", need, have: total });
    }
    let rest = index("header bytes", total)? - FIXED;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes);
    source.want(rest);
    source.read(&mut bytes, rest)?;
    let (body, sum) = bytes.split_at(rest - 4);
    hasher.update(body);
    let (need, have) = (hasher.finalize(), Fields(sum).word());
    if need != have {
        return Err(WireError::Checksum { part: Part::Header, need, have });
    }
    field("reserved", 0, u64::from(zero))?;
    let most = MOST_POSITIONS as u64;
    if len > most {
        return Err(WireError::Field { what: "positions", need: most, have: len });
    }
    let mut fields = Fields(body);
    let (len, n_tokens) = (index("positions", len)?, index("token ids", tokens)?);
    let n_layers = index("layers", layers)?;
    let mut header =
        Header { len, tokens: Vec::new(), salt: Vec::new(), layers: Vec::new(), seal: have };
    reserve(&mut header.layers, n_layers)?;
    for layer in 0..n_layers {
        let saved = read_layer(&mut fields, layer, len, &header.layers)?;
        header.layers.push(saved);
    }
    reserve(&mut header.tokens, n_tokens)?;
    header.tokens.extend((0..n_tokens).map(|_| fields.word()));
    if n_tokens != 0 && n_tokens != len {
        return Err(WireError::Tokens { need: len, have: n_tokens });
    }
    reserve(&mut header.salt, fields.0.len())?;
    header.salt.extend(fields.0);
    Ok(header)
}

/// The next layer's record; `before` has those that it may read.
fn read_layer<X>(
    fields: &mut Fields<'_>,
    layer: usize,
    len: usize,
    before: &[SavedLayer],
) -> Result<SavedLayer, WireError<X>> {
    let [kind, code] = fields.take();
    let reserved: [u8; 6] = fields.take();
    field("reserved", 0, reserved.into_iter().map(u64::from).sum())?;
    let owner = fields.number();
    let numbers = [(); 9].map(|()| fields.number());
    match kind {
        OWN => field("owner", layer as u64, owner)?,
        READS => {
            // An owner has rows of its own and comes before.
            let of = usize::try_from(owner).ok().and_then(|owner| before.get(owner));
            let Some(of) = of.filter(|of| of.owner as u64 == owner) else {
                return Err(WireError::Field { what: "owner", need: layer as u64, have: owner });
            };
            field("reserved", 0, u64::from(code))?;
            numbers.into_iter().try_for_each(|number| field("reserved", 0, number))?;
            return Ok(*of);
        }
        _ => return Err(WireError::Unknown { what: "kind of layer", have: u64::from(kind) }),
    }
    let Some(element) = name_of(code) else {
        return Err(WireError::Unknown { what: "stored type", have: u64::from(code) });
    };
    let [block_size, n_kv_heads, k_width, v_width, last, first, at, gone, page_bytes] = numbers;
    let dims = KvDims {
        block_size: index("block size", block_size)?,
        n_kv_heads: index("KV heads", n_kv_heads)?,
        k_width: index("key width", k_width)?,
        v_width: index("value width", v_width)?,
    };
    let shape = KvShape::new(dims).map_err(|error| WireError::Shape { layer, error })?;
    let window = match (index("window", last)?, index("first positions", first)?) {
        (0, first) => {
            field("first positions", 0, first as u64)?;
            None
        }
        (last, first) => Some(KvWindow::last(last).and_first(first)),
    };
    // Only blocks that are whole are ever given back.
    let (most, end) = ((len / dims.block_size) as u64, at.saturating_add(gone));
    if end > most {
        return Err(WireError::Field { what: "hole", need: most, have: end });
    }
    if gone == 0 || window.is_none() {
        field("hole", 0, end)?;
    }
    let hole = Hole::new(index("hole", at)?, index("hole", gone)?);
    let page_bytes = index("page bytes", page_bytes)?;
    Ok(SavedLayer { owner: layer, code, element, shape, window, hole, page_bytes })
}

/// A number that has to be this one.
fn field<X>(what: &'static str, need: u64, have: u64) -> Result<(), WireError<X>> {
    if need == have { Ok(()) } else { Err(WireError::Field { what, need, have }) }
}

/// A number that this machine can count to.
fn index<X>(what: &'static str, have: u64) -> Result<usize, WireError<X>> {
    usize::try_from(have).map_err(|_| WireError::Field { what, need: usize::MAX as u64, have })
}

fn reserve<T, X>(list: &mut Vec<T>, more: usize) -> Result<(), WireError<X>> {
    let refused = |_| WireError::OutOfMemory { bytes: more.saturating_mul(size_of::<T>()) };
    list.try_reserve_exact(more).map_err(refused)
}

/// Bytes that are known to be there, taken from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((taken, rest)) => {
                self.0 = rest;
                *taken
            }
            // The header's length was checked against its counts.
            None => [0; N],
        }
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn number(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
