//! Stores in memory that the caller brought.

use paged_kv::attention::causal_gqa_attention_paged;
use paged_kv::cache::{PagedKvCache, PagedKvStore, StoreMemory};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{KvDims, KvShape, ShapeError};

type Store = PagedKvStore<f32>;

/// Bytes that are no number where four of them are read as one.
const DIRT: u8 = 0xff;

/// Four blocks and a bit, of tiles that end in the middle of a line.
fn shape() -> KvShape {
    KvShape::new(KvDims { block_size: 5, n_kv_heads: 2, k_width: 7, v_width: 9 }).unwrap()
}

/// `len` dirty bytes that begin `offset` bytes behind a multiple of 64.
fn leaked(offset: usize, len: usize) -> &'static mut [u8] {
    let bytes = vec![DIRT; len + 128].leak();
    let skip = bytes.as_ptr().align_offset(64) + offset;
    &mut bytes[skip..][..len]
}

fn needed(blocks: usize) -> usize {
    Store::memory_needed(shape(), blocks).unwrap()
}

/// Everything that can be seen of a store that is written, forked, rolled back and attended over.
fn seen(store: &mut Store) -> Vec<u32> {
    let shape = store.shape();
    let mut numbers = Numbers::new(11);
    let mut rows =
        |n| (numbers.normals(n * shape.k_row_len()), numbers.normals(n * shape.v_row_len()));
    let mut sequence = PagedKvCache::new();
    let (k, v) = rows(12);
    sequence.append(store, &k, &v, 12).unwrap();
    let mut fork = sequence.fork(store).unwrap();
    let (k, v) = rows(1);
    fork.push(store, &k, &v).unwrap(); // copies a block that is written in part
    sequence.truncate(store, 11).unwrap();
    let (k, v) = rows(2);
    sequence.append(store, &k, &v, 2).unwrap();

    let q = numbers.normals(3 * 4 * shape.k_width());
    let mut seen = Vec::new();
    for cache in [&sequence, &fork] {
        seen.extend(causal_gqa_attention_paged(&q, store, cache, 4).unwrap());
        let (mut k, mut v) = (vec![0.0; shape.k_width()], vec![0.0; shape.v_width()]);
        for position in 0..cache.seq_len() {
            for head in 0..shape.n_kv_heads() {
                cache.copy_k_row(store, position, head, &mut k).unwrap();
                cache.copy_v_row(store, position, head, &mut v).unwrap();
                seen.extend(k.iter().chain(&v));
            }
        }
    }
    store.check_invariants([sequence.block_table(), fork.block_table()]).unwrap();
    sequence.release(store).unwrap();
    fork.release(store).unwrap();
    seen.iter().map(|number: &f32| number.to_bits()).collect()
}

#[test]
fn a_store_in_dirty_memory_gives_the_bits_of_one_in_fresh_memory() {
    let expected = seen(&mut Store::with_shape(shape(), 4).unwrap());
    assert!(expected.iter().all(|bits| !f32::from_bits(*bits).is_nan()));
    for offset in 0..64 {
        let mut store = Store::from_memory(shape(), leaked(offset, needed(4))).unwrap();
        assert_eq!(seen(&mut store), expected, "offset {offset}");
        assert_eq!(seen(&mut store), expected, "offset {offset}, blocks taken again");
    }
    let owned: [StoreMemory; 3] = [
        vec![DIRT; needed(4)].into(),
        vec![DIRT; needed(4)].into_boxed_slice().into(),
        Box::leak(Box::new([DIRT; 8192])).into(),
    ];
    for memory in owned {
        let what = format!("{memory:?}");
        let mut store = Store::from_memory(shape(), memory).unwrap();
        assert_eq!(seen(&mut store), expected, "{what}");
    }
}

/// The most that is skipped and the line behind the last block are counted: no offset holds a
/// block more or less.
#[test]
fn memory_that_is_needed_holds_exactly_so_many_blocks_wherever_it_begins() {
    for offset in 0..64 {
        for blocks in [1, 2, 7] {
            let store = Store::from_memory(shape(), leaked(offset, needed(blocks))).unwrap();
            assert_eq!(store.total_blocks(), blocks, "offset {offset}");
            assert_eq!(store.free_block_count(), blocks);
        }
    }
    // The smallest block is a line: even there 63 bytes to spare do not make one.
    let shape = KvShape::square(1, 1, 1).unwrap();
    for offset in 0..64 {
        let memory = leaked(offset, Store::memory_needed(shape, 3).unwrap());
        assert_eq!(Store::from_memory(shape, memory).unwrap().total_blocks(), 3);
    }
}

/// At each offset the last byte that is used is the spare line's last.
#[test]
fn one_byte_short_is_one_block_less_and_no_block_is_an_error() {
    let block = needed(1) - needed(0);
    for offset in 0..64 {
        let skipped = (64 - offset) % 64;
        let exact = |blocks: usize| skipped + blocks * block + 64;
        for blocks in [2, 3] {
            let fits = Store::from_memory(shape(), leaked(offset, exact(blocks))).unwrap();
            assert_eq!(fits.total_blocks(), blocks, "offset {offset}");
            let short = Store::from_memory(shape(), leaked(offset, exact(blocks) - 1)).unwrap();
            assert_eq!(short.total_blocks(), blocks - 1, "offset {offset}");
        }
        Store::from_memory(shape(), leaked(offset, exact(1))).unwrap();
        let have = exact(1) - 1;
        let refused = Store::from_memory(shape(), leaked(offset, have)).unwrap_err();
        let small = ShapeError::MemoryTooSmall { blocks: 1, need: needed(1), have };
        assert_eq!(refused.error, small, "offset {offset}");
    }
}

#[test]
fn blocks_that_were_asked_for_are_those_that_are_there() {
    let memory = |blocks| StoreMemory::from(vec![DIRT; needed(4)]).with_blocks(blocks);
    for blocks in [0, 1, 4] {
        let store = Store::from_memory(shape(), memory(blocks)).unwrap();
        assert_eq!(store.total_blocks(), blocks);
    }
    let refused = Store::from_memory(shape(), memory(5)).unwrap_err();
    let small = ShapeError::MemoryTooSmall { blocks: 5, need: needed(5), have: needed(4) };
    assert_eq!(refused.error, small);
    let refused = Store::from_memory(shape(), memory(usize::MAX)).unwrap_err();
    assert_eq!(refused.error, ShapeError::Overflow);
    // No block at all takes the spare line still, where it was asked for.
    let none = |len| Store::from_memory(shape(), StoreMemory::from(leaked(0, len)).with_blocks(0));
    assert_eq!(none(64).unwrap().total_blocks(), 0);
    let small = ShapeError::MemoryTooSmall { blocks: 0, need: 127, have: 63 };
    assert_eq!(none(63).unwrap_err().error, small);
}

#[test]
fn refused_memory_comes_back_as_it_was() {
    let bytes: Vec<u8> = (0..needed(1) - 64).map(|index| index as u8).collect();
    let (owned, leaked) = (bytes.clone(), bytes.clone().leak());
    let at = [owned.as_ptr().addr(), leaked.as_ptr().addr()];
    let memories: [StoreMemory; 2] = [owned.into(), leaked.into()];
    for (memory, at) in memories.into_iter().zip(at) {
        let memory = memory.with_blocks(3);
        let refused = Store::from_memory(shape(), memory).unwrap_err();
        assert_eq!(refused.to_string(), refused.error.to_string());
        assert_eq!(refused.memory.as_bytes().as_ptr().addr(), at, "the same memory");
        assert_eq!(refused.memory.as_bytes(), bytes);
        // It can be used still, for something smaller.
        let smaller = KvShape::square(1, 1, 1).unwrap();
        let store = Store::from_memory(smaller, refused.memory).unwrap();
        assert_eq!(store.total_blocks(), 3);
    }
    let nothing = Store::from_memory(shape(), Vec::new()).unwrap_err();
    let small = ShapeError::MemoryTooSmall { blocks: 1, need: needed(1), have: 0 };
    assert_eq!(ShapeError::from(nothing), small);
}

/// A store owns its memory, wherever it goes.
#[test]
fn a_store_in_brought_memory_moves_between_threads() {
    let mut store = Store::from_memory(shape(), vec![DIRT; needed(4)]).unwrap();
    let expected = seen(&mut store);
    let found = std::thread::spawn(move || seen(&mut store)).join().unwrap();
    assert_eq!(found, expected);
}
