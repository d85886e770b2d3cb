//! One layer: bits, windows, pools in any state.

use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore, PagedStoreExhausted};
use paged_kv::internal::numbers::Numbers;
use paged_kv::wire::{Label, Saved, Sink, Source, WireError};
use paged_kv::{BlockId, Element, KvShape, PagedKvError, every_type};

use super::{ask, rows, shape};

fn append<E: Element>(cache: &mut PagedKvCache, store: &mut PagedKvStore<E>, n: usize) {
    let (k, v) = rows(store.shape(), 0, cache.seq_len()..cache.seq_len() + n);
    cache.append(store, &k, &v, n).unwrap();
}

/// A pool in use: half of its blocks are others', and the free ones are in no order.
fn fragmented<E: Element>(shape: KvShape, free: usize) -> (PagedKvStore<E>, Vec<PagedKvCache>) {
    let mut store = PagedKvStore::<E>::with_shape(shape, 2 * free).unwrap();
    store.poison_free();
    let mut others: Vec<_> = (0..2 * free).map(|_| PagedKvCache::new()).collect();
    for (other, tag) in others.iter_mut().zip(100..) {
        let (k, v) = rows(shape, tag, 0..1);
        other.push(&mut store, &k, &v).unwrap();
    }
    Numbers::new(free as u64).shuffle(&mut others);
    for mut other in others.split_off(free) {
        other.release(&mut store).unwrap();
    }
    assert_eq!(store.free_block_count(), free);
    (store, others)
}

fn check<E: Element>(store: &PagedKvStore<E>, others: &[PagedKvCache], cache: &PagedKvCache) {
    let tables = others.iter().chain([cache]).map(PagedKvCache::block_table);
    assert_eq!(store.check_invariants(tables), Ok(()));
}

fn save<E: Element>(cache: &PagedKvCache, store: &PagedKvStore<E>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let tokens: Vec<u32> = (0..cache.seq_len() as u32).map(|id| id * 77).collect();
    cache.save(store, &Label::new().tokens(&tokens).salt(b"salt"), &mut bytes).unwrap();
    bytes
}

const SIZES: [(usize, usize); 8] =
    [(16, 16), (5, 5), (16, 5), (5, 64), (64, 16), (48, 100), (1, 16), (32, 1)];

/// Restored into the holes of another pool, and appended to: the same bits, the same rows, and saved
/// again the same bytes.
fn a_sequence_comes_back<E: Element>() {
    for (from, to) in SIZES {
        for len in [0, 1, 64, 130] {
            let mut here = PagedKvStore::<E>::with_shape(shape(from), 300).unwrap();
            let mut cache = PagedKvCache::new();
            append(&mut cache, &mut here, len);
            let bytes = save(&cache, &here);

            let saved = Saved::open(&bytes[..]).unwrap();
            assert_eq!(
                (saved.len(), saved.salt(), saved.is_empty()),
                (len, &b"salt"[..], len == 0)
            );
            assert_eq!(saved.tokens(), (0..len as u32).map(|id| id * 77).collect::<Vec<_>>());
            let layer = saved.layers()[0];
            assert_eq!((layer.element(), layer.shape()), (E::NAME, shape(from)));
            assert_eq!((saved.layers().len(), layer.window(), layer.owner()), (1, None, 0));

            let (mut there, others) = fragmented::<E>(shape(to), shape(to).blocks_for(160));
            let mut back = PagedKvCache::new();
            back.restore(&mut there, saved).unwrap();
            check(&there, &others, &back);
            assert_eq!((back.seq_len(), back.block_table().len()), (len, len.div_ceil(to)));
            if from == to {
                assert_eq!(save(&back, &there), bytes, "{from}, {len}");
            }
            let mut again = PagedKvCache::new();
            let mut home = PagedKvStore::<E>::with_shape(shape(from), 300).unwrap();
            again.restore(&mut home, Saved::open(&save(&back, &there)[..]).unwrap()).unwrap();
            assert_eq!(save(&again, &home), bytes, "{from} to {to} and back, {len}");
            for n in [0, 1, 22] {
                append(&mut cache, &mut here, n);
                append(&mut back, &mut there, n);
                let n_q = cache.seq_len().min(3);
                let want = ask(&here, &cache, None, n_q);
                assert_eq!(ask(&there, &back, None, n_q), want, "{from} to {to}, {len} and {n}");
            }
            back.release(&mut there).unwrap();
            check(&there, &others, &back);
        }
    }
}

/// What a window has passed stays away, what it needs comes back.
fn windows_come_back<E: Element>() {
    for (last, first) in [(30, 0), (64, 4), (130, 70)] {
        let window = KvWindow::last(last).and_first(first);
        for (from, to) in [(16, 16), (64, 16), (16, 64), (5, 32), (100, 4)] {
            let mut here = PagedKvStore::<E>::with_shape(shape(from), 600).unwrap();
            let mut cache = PagedKvCache::with_window(window);
            for _ in 0..40 {
                append(&mut cache, &mut here, 17);
            }
            assert!(!cache.freed_blocks().is_empty());
            let bytes = save(&cache, &here);
            let saved = Saved::open(&bytes[..]).unwrap();
            assert_eq!(saved.layers()[0].window(), Some(window));
            let (mut there, others) = fragmented::<E>(shape(to), 500 / to + 8);
            let mut back = PagedKvCache::with_window(window);
            back.restore(&mut there, saved).unwrap();
            if from == to {
                assert_eq!(back.freed_blocks(), cache.freed_blocks());
                assert_eq!(save(&back, &there), bytes);
            }
            // The last step can be taken back.
            for (cache, store) in [(&mut cache, &mut here), (&mut back, &mut there)] {
                cache.truncate(store, 40 * 17 - 3).unwrap();
            }
            for n in [1, 40, 90] {
                append(&mut cache, &mut here, n);
                append(&mut back, &mut there, n);
                let want = ask(&here, &cache, Some(window), 1);
                assert_eq!(ask(&there, &back, Some(window), 1), want, "{window:?}, {from} to {to}");
            }
            check(&there, &others, &back);
        }
    }
}

/// Saved whole, kept under a window; or the other way round, which is refused.
fn a_window_may_differ_where_rows_are_there<E: Element>() {
    let (wide, narrow) = (KvWindow::last(200), KvWindow::last(40).and_first(3));
    let mut here = PagedKvStore::<E>::with_shape(shape(16), 40).unwrap();
    let (mut whole, mut under) = (PagedKvCache::new(), PagedKvCache::with_window(narrow));
    append(&mut whole, &mut here, 300);
    for _ in 0..20 {
        append(&mut under, &mut here, 15);
    }
    let (bytes, gone) = (save(&whole, &here), save(&under, &here));
    let mut there = PagedKvStore::<E>::with_shape(shape(16), 19).unwrap();
    for window in [wide, narrow] {
        let mut back = PagedKvCache::with_window(window);
        back.restore(&mut there, Saved::open(&bytes[..]).unwrap()).unwrap();
        assert_eq!(ask(&there, &back, Some(window), 1), ask(&here, &whole, Some(window), 1));
        assert!(!back.freed_blocks().is_empty());
        back.release(&mut there).unwrap();
    }
    let (first, oldest) = (under.freed_blocks().start * 16, under.freed_blocks().end * 16);
    let refused = |blank: PagedKvCache, block_size: usize| {
        let mut blank = blank;
        let mut there = PagedKvStore::<E>::with_shape(shape(block_size), 400).unwrap();
        let error = blank.restore(&mut there, Saved::open(&gone[..]).unwrap());
        assert!(blank.is_empty() && blank.store_id().is_none());
        assert_eq!(there.free_block_count(), 400);
        error
    };
    let error = |position| Err(WireError::PositionFreed { layer: 0, position, oldest });
    assert_eq!(refused(PagedKvCache::new(), 16), error(first));
    // The wide window begins at 301 - 200, in the tile of 64.
    assert_eq!(refused(PagedKvCache::with_window(wide), 16), error(64));
    // This one at 301 - 120, and what is missing begins for both behind the same first positions.
    let nearer = KvWindow::last(120).and_first(narrow.first());
    assert_eq!(refused(PagedKvCache::with_window(nearer), 16), error(128));
    assert_eq!(refused(PagedKvCache::with_window(narrow), 128), error(first));
    let mut back = PagedKvCache::with_window(narrow);
    back.restore(&mut there, Saved::open(&gone[..]).unwrap()).unwrap();
}

every_type! {
    a_sequence_comes_back,
    windows_come_back,
    a_window_may_differ_where_rows_are_there,
    the_same_rows_are_the_same_bytes,
}

/// What does not fit is refused by name, and changes nothing.
#[test]
fn what_does_not_fit_is_refused() {
    let mut here = PagedKvStore::<f32>::with_shape(shape(16), 10).unwrap();
    let mut cache = PagedKvCache::new();
    append(&mut cache, &mut here, 100);
    let bytes = save(&cache, &here);
    let open = || Saved::open(&bytes[..]).unwrap();

    let mut small = PagedKvStore::<f32>::with_shape(shape(32), 3).unwrap();
    let mut back = PagedKvCache::new();
    let refused = back.restore(&mut small, open());
    let Err(WireError::Kv(PagedKvError::Exhausted(PagedStoreExhausted { need, free, .. }))) =
        refused
    else {
        panic!("{refused:?}")
    };
    assert_eq!((need, free, small.free_block_count()), (4, 3, 3));

    let mut other = PagedKvStore::<paged_kv::Int8>::with_shape(shape(16), 10).unwrap();
    let refused = back.restore(&mut other, open()).unwrap_err();
    assert_eq!(refused, WireError::Element { layer: 0, need: "int8", have: "f32" });
    assert_eq!(refused.to_string(), "layer 0 was saved as f32, its store holds int8");

    let wide = KvShape::square(16, 2, 9).unwrap();
    let mut other = PagedKvStore::<f32>::with_shape(wide, 10).unwrap();
    let refused = back.restore(&mut other, open());
    let (need, have) = (wide.dims(), shape(16).dims());
    assert_eq!(refused, Err(WireError::Dims { layer: 0, need, have }));

    assert!(back.is_empty() && back.block_table().is_empty() && back.store_id().is_none());
    let refused = cache.restore(&mut here, open());
    assert_eq!(refused, Err(WireError::Kv(PagedKvError::NotEmpty { len: 100, blocks: 7 })));
    back.reserve(&mut here, 20).unwrap();
    let refused = back.restore(&mut here, open());
    assert_eq!(refused, Err(WireError::Kv(PagedKvError::NotEmpty { len: 0, blocks: 2 })));
    back.release(&mut here).unwrap();
    let wrong = PagedKvError::WrongStore { need: here.id(), have: other.id() };
    assert_eq!(cache.restore(&mut other, open()), Err(WireError::Kv(wrong)));
    assert_eq!(cache.save(&other, &Label::new(), Vec::new()), Err(WireError::Kv(wrong)));
    let tokens = Label::new().tokens(&[1, 2]);
    let refused = cache.save(&here, &tokens, Vec::new());
    assert_eq!(refused, Err(WireError::Tokens { need: 100, have: 2 }));
    cache.release(&mut here).unwrap();
    assert_eq!(here.check_invariants([]), Ok(()));
}

/// Gives its bytes by threes and stops, or fails, after some.
struct Slow<'a>(&'a [u8], usize);

impl Source for Slow<'_> {
    type Error = &'static str;

    fn fill(&mut self, into: &mut [u8]) -> Result<usize, &'static str> {
        let Some(left) = self.1.checked_sub(3) else { return Err("the line is cut") };
        self.1 = left;
        let most = into.len().min(3);
        let Ok(n) = self.0.fill(&mut into[..most]);
        Ok(n)
    }
}

impl Sink for Slow<'_> {
    type Error = &'static str;

    fn put(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        self.1 = self.1.checked_sub(bytes.len()).ok_or("the disk is full")?;
        Ok(())
    }
}

#[test]
fn a_stream_may_be_slow_and_may_fail() {
    let mut store = PagedKvStore::<f32>::with_shape(shape(4), 10).unwrap();
    let mut cache = PagedKvCache::new();
    append(&mut cache, &mut store, 11);
    let bytes = save(&cache, &store);
    let mut back = PagedKvCache::new();
    for after in (0..bytes.len() + 200).step_by(61) {
        let read =
            Saved::open(Slow(&bytes, after)).and_then(|saved| back.restore(&mut store, saved));
        let enough = after / 3 >= bytes.len().div_ceil(3) + 20;
        match read {
            Ok(()) => {
                assert_eq!(ask(&store, &back, None, 2), ask(&store, &cache, None, 2));
                back.release(&mut store).unwrap();
            }
            other => {
                assert_eq!(other, Err(WireError::Stream("the line is cut")));
                assert!(!enough, "after {after} of {}", bytes.len());
            }
        }
        assert_eq!(store.check_invariants([cache.block_table()]), Ok(()));
        let written = cache.save(&store, &Label::new(), Slow(&[], after));
        assert_eq!(written.is_ok(), after >= bytes.len() - 48);
    }
}

/// What stands behind the last position, and between the parts of a tile, does not leave.
fn the_same_rows_are_the_same_bytes<E: Element>() {
    for (block_size, len) in [(5, 13), (16, 20), (1, 3)] {
        let shape = shape(block_size);
        let mut clean = PagedKvStore::<E>::with_shape(shape, 20).unwrap();
        let bytes = PagedKvStore::<E>::memory_needed(shape, 20).unwrap();
        let mut dirty = PagedKvStore::<E>::from_memory(shape, vec![0xa5; bytes]).unwrap();
        let (mut one, mut two) = (PagedKvCache::new(), PagedKvCache::new());
        append(&mut one, &mut clean, len);
        append(&mut two, &mut dirty, len + 9);
        two.truncate(&mut dirty, len).unwrap();
        assert_eq!(save(&one, &clean), save(&two, &dirty), "{block_size}");
        // A sequence that shares its last block with a longer one.
        let child = two.fork(&mut dirty).unwrap();
        assert_eq!(save(&one, &clean), save(&child, &dirty), "{block_size}");
    }
}

#[test]
fn ids_of_blocks_are_not_saved() {
    let mut store = PagedKvStore::<f32>::with_shape(shape(16), 4).unwrap();
    let (mut one, mut two) = (PagedKvCache::new(), PagedKvCache::new());
    append(&mut one, &mut store, 20);
    append(&mut two, &mut store, 20);
    let ids = |cache: &PagedKvCache| cache.block_table().iter().map(|b: &BlockId| b.index()).sum();
    let (first, second): (usize, usize) = (ids(&one), ids(&two));
    assert_ne!(first, second);
    assert_eq!(save(&one, &store), save(&two, &store));
}
