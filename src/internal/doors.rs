//! Cases put through the crate's own doors, on dirty memory between canaries.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::numbers::Numbers;
use super::oracle::{Case, Rules, Sizes};
use crate::attention::{
    AttentionOptions, Output, TreeMask, attention_scratch_len, causal_gqa_attention_into,
    causal_gqa_attention_paged_into,
};
use crate::element::Element;
use crate::error::AttentionError;
use crate::shape::{GqaShape, KvDims, KvShape};
use crate::simd::Level;
use crate::storage::contiguous::KvCache;
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;
use crate::storage::sequence::window::KvWindow;

/// Memory full of NaN with canaries on both sides.
#[derive(Debug)]
pub struct Guarded {
    numbers: Vec<f32>,
    inside: Range<usize>,
}

impl Guarded {
    /// More than a vector on each side.
    const EDGE: usize = 40;
    /// A number that no test computes.
    const CANARY: u32 = 0xdead_beef;

    /// Room for `len` numbers that begins `skip` numbers later than it could, which moves it
    /// about in its line.
    pub fn dirty(len: usize, skip: usize) -> Self {
        let inside = Self::EDGE + skip..Self::EDGE + skip + len;
        let mut numbers = Vec::new();
        numbers.resize(inside.end + Self::EDGE, f32::from_bits(Self::CANARY));
        numbers[inside.clone()].fill(f32::NAN);
        Guarded { numbers, inside }
    }

    /// The room.
    pub fn inside(&mut self) -> &mut [f32] {
        &mut self.numbers[self.inside.clone()]
    }

    /// What is in the room now.
    ///
    /// # Panics
    ///
    /// If a canary is dead.
    pub fn into_inside(self, what: &str) -> Vec<f32> {
        for (index, number) in self.numbers.iter().enumerate() {
            let alive = self.inside.contains(&index) || number.to_bits() == Self::CANARY;
            assert!(alive, "{what}: number {index} outside of {:?} was written", self.inside);
        }
        self.numbers[self.inside].to_vec()
    }
}

/// Where the keys and values of a case are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A cache of its own, in pages of this size.
    Contiguous(usize),
    /// A shared store in blocks of this size, whose free list the seed has shuffled.
    Paged(usize, u64),
}

/// What attention wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// `[n_q][n_heads][v_width]`.
    pub out: Vec<f32>,
    /// `[n_q][n_heads]`.
    pub lse: Vec<f32>,
}

impl Answer {
    /// The bits of everything; any NaN is one NaN, as payloads are not promised.
    pub fn bits(&self) -> Vec<u32> {
        let bits = |x: &f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
        self.out.iter().chain(&self.lse).map(bits).collect()
    }
}

/// Keys and values, held somewhere as some type.
#[derive(Debug)]
pub enum Held<E: Element = f32> {
    /// In a cache of its own.
    Contiguous(KvCache<E>),
    /// In a store that others use too.
    Paged(PagedKvStore<E>, PagedKvCache),
}

impl<E: Element> Held<E> {
    /// Nothing yet, and room for all rows of a case of these sizes. With `poison`, memory that
    /// nobody has written is NaN.
    pub fn empty(sizes: &Sizes, place: Place, poison: bool) -> Self {
        let (Place::Contiguous(block_size) | Place::Paged(block_size, _)) = place;
        let Sizes { n_kv_heads, k_width, v_width, .. } = *sizes;
        let shape = KvShape::new(KvDims { block_size, n_kv_heads, k_width, v_width });
        let shape = shape.expect("a case has a shape");
        match place {
            Place::Contiguous(_) => {
                let mut cache = KvCache::with_shape(shape);
                if poison {
                    cache.poison_free();
                }
                Held::Contiguous(cache)
            }
            Place::Paged(_, seed) => {
                let blocks = shape.blocks_for(sizes.len) + 3;
                let mut store = PagedKvStore::with_shape(shape, blocks).expect("it is small");
                if poison {
                    store.poison_free();
                }
                shuffle_free_list(&mut store, seed);
                Held::Paged(store, PagedKvCache::new())
            }
        }
    }

    /// All rows of a case.
    pub fn full(case: &Case, place: Place) -> Self {
        let mut held = Self::empty(&case.sizes, place, false);
        held.append(case, 0..case.sizes.len);
        held
    }

    /// Takes in rows of a case.
    pub fn append(&mut self, case: &Case, rows: Range<usize>) {
        let Sizes { n_kv_heads, k_width, v_width, .. } = case.sizes;
        let (k_row, v_row) = (n_kv_heads * k_width, n_kv_heads * v_width);
        let k = &case.k[rows.start * k_row..rows.end * k_row];
        let v = &case.v[rows.start * v_row..rows.end * v_row];
        match self {
            Held::Contiguous(cache) => cache.append(k, v, rows.len()).expect("no pool bounds it"),
            Held::Paged(store, cache) => {
                cache.append(store, k, v, rows.len()).expect("there is room for all");
            }
        }
    }

    /// Reads all rows of a case back, as numbers.
    fn read(&self, case: &mut Case) {
        let Sizes { n_kv_heads, k_width, v_width, .. } = case.sizes;
        for (at, row) in case.k.chunks_exact_mut(k_width).enumerate() {
            let (position, head) = (at / n_kv_heads, at % n_kv_heads);
            match self {
                Held::Contiguous(cache) => {
                    cache.copy_k_row(position, head, row).expect("it was written");
                }
                Held::Paged(store, cache) => {
                    cache.copy_k_row(store, position, head, row).expect("it was written");
                }
            }
        }
        for (at, row) in case.v.chunks_exact_mut(v_width).enumerate() {
            let (position, head) = (at / n_kv_heads, at % n_kv_heads);
            match self {
                Held::Contiguous(cache) => {
                    cache.copy_v_row(position, head, row).expect("it was written");
                }
                Held::Paged(store, cache) => {
                    cache.copy_v_row(store, position, head, row).expect("it was written");
                }
            }
        }
    }

    /// Takes all rows back and leaves their memory to the next ones.
    pub fn clear(&mut self) {
        match self {
            Held::Contiguous(cache) => cache.clear(),
            Held::Paged(store, cache) => cache.release(store).expect("its own store"),
        }
    }

    /// Attends, on dirty memory.
    ///
    /// # Errors
    ///
    /// What the door says; then nothing may have been written.
    ///
    /// # Panics
    ///
    /// If anything beside `out`, `lse` and the scratch was written, or any of them on an error.
    pub fn ask(
        &self,
        q: &[f32],
        n_heads: usize,
        rules: &Rules,
        level: Level,
    ) -> Result<Answer, AttentionError> {
        let kv = match self {
            Held::Contiguous(cache) => cache.shape(),
            Held::Paged(store, _) => store.shape(),
        };
        let shape = GqaShape::new(kv, n_heads)?;
        let n_q = q.len() / shape.q_row_len();
        let skip = (q.len() + n_heads) % 17;
        let mut out = Guarded::dirty(n_q * shape.out_row_len(), skip);
        let mut lse = Guarded::dirty(n_q * n_heads, skip);
        let mut scratch = Guarded::dirty(attention_scratch_len(&shape, n_q), skip);
        let rows = rules.tree.len();
        let mut words = alloc::vec![0; rows * TreeMask::words_for_row(rows)];
        let tree = TreeMask::from_parents(&rules.tree, &mut words)?;
        let trees = [tree];
        let mut options = options(rules).level(level);
        if tree != TreeMask::NONE {
            options = options.trees(&trees);
        }
        let output = Output::new(out.inside()).lse(lse.inside());
        let asked = match self {
            Held::Contiguous(cache) => {
                let scratch = scratch.inside();
                causal_gqa_attention_into(q, cache, n_heads, &options, output, scratch)
            }
            Held::Paged(store, cache) => {
                let scratch = scratch.inside();
                causal_gqa_attention_paged_into(q, store, cache, n_heads, &options, output, scratch)
            }
        };
        let scratch = scratch.into_inside("scratch");
        let answer = Answer { out: out.into_inside("out"), lse: lse.into_inside("lse") };
        if asked.is_err() {
            let mut all = answer.out.iter().chain(&answer.lse).chain(&scratch);
            assert!(all.all(|number| number.is_nan()), "an error comes before any write");
        }
        asked.map(|()| answer)
    }
}

/// The case whose keys and values are what becomes of them when they are stored: what attention
/// works on, and what its answer is to be compared by.
pub fn stored<E: Element>(case: &Case) -> Case {
    let mut stored = case.clone();
    Held::<E>::full(case, Place::Contiguous(64)).read(&mut stored);
    stored
}

/// The answer to a whole case, its keys and values held as `E`.
///
/// # Panics
///
/// If the door refuses it.
pub fn answer<E: Element>(case: &Case, place: Place, level: Level) -> Answer {
    let held = Held::<E>::full(case, place);
    match held.ask(&case.q, case.sizes.n_heads(), &case.rules, level) {
        Ok(answer) => answer,
        Err(error) => panic!("{error}: {:?}", case.sizes),
    }
}

/// The options that these rules stand for, without their tree.
pub fn options(rules: &Rules) -> AttentionOptions<'_> {
    let mut options = AttentionOptions::new().causal(rules.causal);
    if let Some(scale) = rules.scale {
        options = options.scale(scale);
    }
    if let Some(cap) = rules.soft_cap {
        options = options.soft_cap(cap);
    }
    if let Some(slopes) = &rules.alibi_slopes {
        options = options.alibi_slopes(slopes);
    }
    if let Some(window) = rules.window {
        options = options.window(window);
    }
    if let Some(first) = rules.keep_first {
        options = options.keep_first(first);
    }
    if let Some(sinks) = &rules.sinks {
        options = options.sinks(sinks);
    }
    if let Some(part) = &rules.positions {
        options = options.positions(part.clone());
    }
    options
}

/// Lets other sequences take every block and give them back in any order.
fn shuffle_free_list<E: Element>(store: &mut PagedKvStore<E>, seed: u64) {
    let mut others: Vec<_> = (0..store.total_blocks()).map(|_| PagedKvCache::new()).collect();
    for other in &mut others {
        other.reserve(store, 1).expect("one block for each");
    }
    Numbers::new(seed).shuffle(&mut others);
    for other in &mut others {
        other.release(store).expect("its own store");
    }
}

/// What the last `n_q` positions of a paged cache answer to a query that is always the same one, two query
/// heads for each KV head, as bits. Under a window it is attended as that window keeps it.
pub fn ask<E: Element>(
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    window: Option<KvWindow>,
    n_q: usize,
) -> Vec<u32> {
    let gqa = GqaShape::new(store.shape(), 2 * store.shape().n_kv_heads()).expect("two for each");
    let q = Numbers::new(3).normals(n_q * gqa.q_row_len());
    let mut options = AttentionOptions::new();
    if let Some(window) = window {
        options = options.window(window.window()).keep_first(window.first());
    }
    let mut out = vec![f32::NAN; n_q * gqa.out_row_len()];
    let mut scratch = vec![f32::NAN; attention_scratch_len(&gqa, n_q)];
    let heads = gqa.n_heads();
    causal_gqa_attention_paged_into(&q, store, cache, heads, &options, &mut out, &mut scratch)
        .expect("the cache has these rows");
    out.iter().map(|number| number.to_bits()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The canaries sing: a number written just outside of the room on either side is seen.
    #[test]
    fn a_write_outside_is_seen() {
        for outside in [39, 45] {
            let mut memory = Guarded::dirty(5, 0);
            memory.inside().fill(1.0);
            assert_eq!(memory.inside, 40..45);
            memory.numbers[outside] = 0.0;
            let dead = std::panic::catch_unwind(|| memory.into_inside("test"));
            assert!(dead.is_err(), "{outside}");
        }
        assert!(Guarded::dirty(3, 2).into_inside("test").iter().all(|x| x.is_nan()));
    }

    /// The block tables that tests shuffle are in no order.
    #[test]
    fn block_tables_are_shuffled() {
        let sizes = Sizes { n_kv_heads: 1, group: 1, k_width: 1, v_width: 1, n_q: 1, len: 40 };
        let held = Held::<f32>::full(&Case::random(sizes, 0, 1), Place::Paged(4, 1));
        let Held::Paged(_, cache) = &held else { panic!("it is paged") };
        let table: Vec<_> = cache.block_table().iter().map(|block| block.index()).collect();
        assert!(!table.is_sorted() && !table.iter().rev().is_sorted(), "{table:?}");
    }
}
