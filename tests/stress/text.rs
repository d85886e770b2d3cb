//! Texts, the rows that a model would make of them, and what attention says of those.

use core::ops::Range;

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{BatchLayer, BatchPlan, SequenceRows, ThreadPool};
use paged_kv::cache::{KvWindow, LayerSpec, PagedSequence, SharedPagedKv};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{GqaShape, KvShape};

pub(crate) const LAYERS: usize = 3;
pub(crate) const SIZE: usize = 16;
/// Three of the longest texts fit, and a few blocks more.
pub(crate) const BLOCKS: usize = 3 * LONGEST / SIZE + 3;
pub(crate) const LONGEST: usize = 160;
const KV_HEADS: usize = 2;
const HEADS: usize = 4;
const WIDTH: usize = 16;
/// The layer that looks at a part of the past alone.
pub(crate) const WINDOWED: usize = 1;
const WINDOW: KvWindow = KvWindow::last(40).and_first(3);

pub(crate) type Sequence<'a> = PagedSequence<&'a SharedPagedKv>;

fn shape() -> KvShape {
    KvShape::square(SIZE, KV_HEADS, WIDTH).unwrap()
}

/// Three layers; where they are tight, one of them gives back what its window has passed.
pub(crate) fn layers(blocks: usize, tight: bool) -> SharedPagedKv {
    let spec = |layer| match LayerSpec::new(shape(), blocks) {
        spec if tight && layer == WINDOWED => spec.window(WINDOW),
        spec => spec,
    };
    let specs: [LayerSpec; LAYERS] = core::array::from_fn(spec);
    SharedPagedKv::with_layers(&specs).unwrap()
}

/// Token ids, and for each a hash of all up to it: what its rows depend on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Text {
    pub(crate) tokens: Vec<u32>,
    hashes: Vec<u64>,
}

impl Text {
    pub(crate) fn push(&mut self, token: u32) {
        let before = self.hashes.last().copied().unwrap_or(0);
        self.tokens.push(token);
        self.hashes.push(Numbers::new(before ^ u64::from(token) << 20).bits());
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.hashes.truncate(len);
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    fn numbers(&self, what: u64, rows: Range<usize>, n: usize) -> Vec<f32> {
        let row = |hash: &u64| Numbers::new(hash ^ what.wrapping_mul(0x9e37_79b9)).normals(n);
        self.hashes[rows].iter().flat_map(row).collect()
    }

    /// Key and value rows of a layer.
    pub(crate) fn rows(&self, layer: usize, rows: Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let of = |what| self.numbers(what, rows.clone(), KV_HEADS * WIDTH);
        (of(3 * layer as u64), of(3 * layer as u64 + 1))
    }

    fn query(&self, layer: usize, rows: Range<usize>) -> Vec<f32> {
        self.numbers(3 * layer as u64 + 2, rows, HEADS * WIDTH)
    }
}

/// The bits of attention of the last `n` positions in one layer, which has all of the text.
pub(crate) fn answer(sequence: &Sequence<'_>, text: &Text, layer: usize, n: usize) -> Vec<u32> {
    let gqa = GqaShape::new(shape(), HEADS).unwrap();
    let q = text.query(layer, text.len() - n..text.len());
    let (mut out, mut scratch) = (vec![0.0; q.len()], vec![0.0; attention_scratch_len(&gqa, n)]);
    let (cache, store) = (sequence.cache(layer), sequence.shared().read(layer));
    assert_eq!(cache.seq_len(), text.len());
    let done = causal_gqa_attention_paged_into(
        &q,
        &store,
        cache,
        HEADS,
        &options(layer),
        &mut out,
        &mut scratch,
    );
    drop(store);
    done.unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

/// The same of the last `n` positions of each of several sequences at once, by a plan on these threads,
/// in a layer that has all of them.
pub(crate) fn answers(
    requests: &[(&Text, &Sequence<'_>)],
    layer: usize,
    n: usize,
    threads: &ThreadPool,
) -> Vec<u32> {
    let gqa = GqaShape::new(shape(), HEADS).unwrap();
    let rows = |(text, _): &(&Text, &Sequence<'_>)| SequenceRows { len: text.len(), rows: n };
    let plan = BatchPlan::new(gqa, &requests.iter().map(rows).collect::<Vec<_>>()).unwrap();
    let query = |(text, _): &(&Text, &Sequence<'_>)| text.query(layer, text.len() - n..text.len());
    let q: Vec<f32> = requests.iter().flat_map(query).collect();
    let (mut out, mut scratch) = (vec![0.0; plan.out_len()], vec![0.0; plan.scratch_len()]);
    let caches: Vec<_> = requests.iter().map(|(_, sequence)| sequence.cache(layer)).collect();
    let store = requests[0].1.shared().read(layer);
    let of_layer = BatchLayer { store: &store, sequences: &caches, q: &q };
    // Where somebody else is using these threads, this one does all itself.
    let done = plan.attend(&of_layer, &options(layer), &mut out, &mut scratch, threads);
    drop(store);
    done.unwrap();
    out.into_iter().map(f32::to_bits).collect()
}

fn options(layer: usize) -> AttentionOptions<'static> {
    match layer {
        WINDOWED => AttentionOptions::new().window(WINDOW.window()).keep_first(WINDOW.first()),
        _ => AttentionOptions::new(),
    }
}

/// Writes what is missing of the text, in every layer.
pub(crate) fn write_all(sequence: &mut Sequence<'_>, text: &Text) {
    let rows = sequence.len()..text.len();
    for layer in 0..LAYERS {
        let (k, v) = text.rows(layer, rows.clone());
        sequence.append(layer, &k, &v, rows.len()).unwrap();
    }
}

/// A sequence that has a pool for itself and is written from the first position on.
pub(crate) struct Alone<'a> {
    sequence: Sequence<'a>,
    text: Text,
}

impl<'a> Alone<'a> {
    pub(crate) fn in_pool(pool: &'a SharedPagedKv) -> Self {
        Alone { sequence: PagedSequence::new(pool), text: Text::default() }
    }

    /// What it says of the last `n` positions of this text in one layer.
    pub(crate) fn answer(&mut self, text: &Text, layer: usize, n: usize) -> Vec<u32> {
        let pairs = self.text.hashes.iter().zip(&text.hashes);
        let common = pairs.take_while(|(one, other)| one == other).count();
        if common < self.text.len() {
            self.sequence.truncate(common).unwrap();
        }
        if common < text.len() {
            self.sequence.reserve(text.len() - common).unwrap();
            write_all(&mut self.sequence, text);
            self.sequence.commit(text.len() - common).unwrap();
        }
        self.text = text.clone();
        answer(&self.sequence, text, layer, n)
    }
}
