//! The promises of the caches and stores of one thread, one test each.
#![expect(clippy::std_instead_of_alloc, clippy::std_instead_of_core, reason = "a test runs on std")]

use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::{BlockId, KvCacheError, KvDims, KvShape, PagedKvError, ShapeError, Side};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn id(index: usize) -> BlockId {
    BlockId::new(index).unwrap()
}

/// Rows of `n` positions for `heads` heads of `width`, every number different.
fn rows(from: usize, n: usize, heads: usize, width: usize) -> (Vec<f32>, Vec<f32>) {
    let numbers = n * heads * width;
    let first = from * heads * width;
    let k = (first..).take(numbers).map(|i| i as f32).collect();
    let v = (first..).take(numbers).map(|i| -(i as f32)).collect();
    (k, v)
}

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => other.downcast::<&str>().unwrap().to_string(),
    }
}

#[cfg(target_has_atomic = "ptr")]
mod pool {
    use super::*;
    use paged_kv::cache::KvBlockPool;
    use std::sync::Arc;

    fn pool(block_size: usize, total_blocks: usize) -> Arc<KvBlockPool> {
        Arc::new(KvBlockPool::new(block_size, total_blocks))
    }

    #[test]
    fn with_pool_takes_one_block_up_front() {
        let pool = pool(4, 3);
        assert_eq!((pool.block_size(), pool.total_blocks(), pool.free_blocks()), (4, 3, 3));
        let cache = KvCache::with_pool(1, 2, &pool).unwrap();
        assert_eq!((cache.held_blocks(), pool.free_blocks(), pool.total_blocks()), (1, 2, 3));
        let text = "KvBlockPool { block_size: 4, total_blocks: 3, free_blocks: 2 }";
        assert_eq!(format!("{pool:?}"), text);
        assert_eq!((cache.seq_len(), cache.capacity()), (0, 4));
    }

    #[test]
    fn one_more_block_each_time_it_grows_past_what_it_holds() {
        let pool = pool(4, 3);
        let mut cache = KvCache::with_pool(1, 2, &pool).unwrap();
        let (k, v) = rows(0, 1, 1, 2);
        for position in 0..12 {
            cache.push(&k, &v).unwrap();
            assert_eq!(cache.held_blocks(), position / 4 + 1, "position {position}");
            assert_eq!(pool.free_blocks(), 3 - cache.held_blocks());
        }
    }

    #[test]
    fn drop_returns_every_block() {
        let pool = pool(4, 5);
        let mut cache = KvCache::with_pool(1, 2, &pool).unwrap();
        let (k, v) = rows(0, 9, 1, 2);
        cache.append(&k, &v, 9).unwrap();
        assert_eq!(pool.free_blocks(), 2);
        drop(cache);
        assert_eq!(pool.free_blocks(), 5);
    }

    #[test]
    fn an_exhausted_pool_refuses_the_push_and_nothing_is_lost() {
        let pool = pool(2, 2);
        let mut cache = KvCache::with_pool(1, 2, &pool).unwrap();
        let other = KvCache::with_pool(1, 2, &pool).unwrap();
        let refused = KvCache::with_pool(1, 2, &pool).unwrap_err();
        assert_eq!((refused.need, refused.free), (1, 0));
        let (k, v) = rows(0, 3, 1, 2);
        cache.append(&k[..4], &v[..4], 2).unwrap();
        let refused = cache.push(&k[4..], &v[4..]).unwrap_err();
        assert_eq!((refused.need, refused.free), (1, 0));
        assert_eq!((cache.seq_len(), cache.held_blocks()), (2, 1));
        let mut row = [0.0; 2];
        cache.copy_k_row(1, 0, &mut row).unwrap();
        assert_eq!(row, [2.0, 3.0]);
        drop(other);
        cache.push(&k[4..], &v[4..]).unwrap();
        assert_eq!((cache.seq_len(), pool.free_blocks()), (3, 0));
    }

    #[test]
    fn an_append_over_the_pool_is_all_or_nothing() {
        let pool = pool(2, 3);
        let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
        let (k, v) = rows(0, 7, 1, 1);
        let refused = cache.append(&k, &v, 7).unwrap_err();
        assert_eq!((refused.need, refused.free), (3, 2));
        assert_eq!((cache.seq_len(), cache.held_blocks(), pool.free_blocks()), (0, 1, 2));
        cache.append(&k[..6], &v[..6], 6).unwrap();
        assert_eq!((cache.seq_len(), pool.free_blocks()), (6, 0));
    }

    #[test]
    fn truncate_and_clear_keep_the_blocks_and_release_to_pool_gives_them_back() {
        let pool = pool(2, 4);
        let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
        let (k, v) = rows(0, 6, 1, 1);
        assert!(cache.is_empty());
        cache.append(&k, &v, 6).unwrap();
        cache.truncate(3).unwrap();
        assert_eq!((cache.seq_len(), cache.held_blocks(), pool.free_blocks()), (3, 3, 1));
        cache.truncate(3).unwrap();
        let longer = KvCacheError::PositionOutOfRange { position: 4, len: 3 };
        assert_eq!(cache.truncate(4), Err(longer));
        assert!(cache.seq_len() == 3 && !cache.is_empty());
        cache.clear();
        assert!(cache.is_empty());
        assert_eq!((cache.seq_len(), cache.held_blocks(), pool.free_blocks()), (0, 3, 1));
        // What it holds it can grow into again, though the pool is empty now.
        let last = KvCache::with_pool(1, 1, &pool).unwrap();
        cache.append(&k, &v, 6).unwrap();
        cache.release_to_pool();
        assert_eq!((cache.seq_len(), cache.held_blocks(), pool.free_blocks()), (0, 0, 3));
        assert_eq!(cache.memory_bytes(), 0);
        cache.push(&k[..1], &v[..1]).unwrap();
        assert_eq!((cache.held_blocks(), pool.free_blocks()), (1, 2));
        drop((cache, last));
        assert_eq!(pool.free_blocks(), 4);
    }

    #[test]
    fn a_clone_of_a_pooled_cache_is_accounted_for_or_refused() {
        let pool = pool(2, 4);
        let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
        let (k, v) = rows(0, 3, 1, 1);
        cache.append(&k, &v, 3).unwrap();
        let mut copy = cache.try_clone().unwrap();
        assert_eq!((copy.held_blocks(), pool.free_blocks()), (2, 0));
        assert!(matches!(cache.try_clone(), Err(KvCacheError::Exhausted(e)) if e.need == 2));
        copy.truncate(1).unwrap();
        copy.push(&[9.0], &[9.0]).unwrap();
        let mut row = [0.0];
        cache.copy_k_row(1, 0, &mut row).unwrap();
        assert_eq!(row, [1.0], "the copy has memory of its own");
        drop(copy);
        assert_eq!(pool.free_blocks(), 2);
    }

    #[test]
    fn a_clone_of_an_empty_pooled_cache_holds_one_block() {
        let pool = pool(2, 2);
        let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
        cache.release_to_pool();
        let copy = cache.try_clone().unwrap();
        assert_eq!((cache.held_blocks(), copy.held_blocks(), pool.free_blocks()), (0, 1, 1));
    }

    #[test]
    fn free_blocks_is_live_and_the_push_asks_again() {
        let pool = pool(1, 2);
        let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
        let seen = pool.free_blocks();
        let thief = KvCache::with_pool(1, 1, &pool).unwrap();
        cache.push(&[0.0], &[0.0]).unwrap();
        assert_eq!((seen, cache.push(&[0.0], &[0.0]).unwrap_err().free), (1, 0));
        drop(thief);
        assert_eq!(pool.free_blocks(), 1);
    }

    #[test]
    fn many_threads_never_take_more_than_there_is() {
        let pool = pool(1, 5);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..3000 {
                        if let Ok(mut cache) = KvCache::with_pool(1, 1, &pool) {
                            let _full = cache.append(&[0.0; 3], &[0.0; 3], 3);
                            assert!(cache.held_blocks() == 1 || cache.held_blocks() == 3);
                        }
                    }
                });
            }
        });
        assert_eq!(pool.free_blocks(), 5);
    }

    #[test]
    fn a_pool_of_empty_blocks_is_refused() {
        assert_eq!(KvBlockPool::try_new(0, 3).err(), Some(ShapeError::Zero { what: "block_size" }));
        let panic = catch_unwind(|| KvBlockPool::new(0, 3)).unwrap_err();
        assert!(message(panic).contains("block_size must be at least 1"));
        let none = pool(4, 0);
        assert!(KvCache::with_pool(1, 1, &none).is_err());
        assert_eq!((none.block_size(), none.total_blocks()), (4, 0));
    }

    #[test]
    fn rows_that_cannot_be_stored_take_no_block() {
        let pool = pool(1, 3);
        let mut cache = KvCache::with_pool(1, 2, &pool).unwrap();
        let refused = cache.try_append(&[0.0; 5], &[0.0; 6], 3);
        let need = KvCacheError::RowLength { side: Side::Key, need: 6, have: 5 };
        assert_eq!(refused, Err(need));
        assert!(catch_unwind(AssertUnwindSafe(|| cache.push(&[0.0; 2], &[0.0]))).is_err());
        assert_eq!((cache.seq_len(), cache.held_blocks(), pool.free_blocks()), (0, 1, 2));
    }

    #[test]
    fn blocks_are_given_back_while_unwinding() {
        let pool = pool(1, 3);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let mut cache = KvCache::with_pool(1, 1, &pool).unwrap();
            cache.append(&[0.0; 3], &[0.0; 3], 3).unwrap();
            panic!("a forward failed");
        }));
        assert!(unwound.is_err());
        assert_eq!(pool.free_blocks(), 3);
    }
}

#[test]
fn caches_without_a_pool_never_run_out() {
    let mut plain = KvCache::new(2, 3);
    let mut sized = KvCache::with_capacity(2, 3, 10);
    for position in 0..300 {
        let (k, v) = rows(position, 1, 2, 3);
        assert_eq!(plain.push(&k, &v), Ok(()));
        assert_eq!(sized.push(&k, &v), Ok(()));
    }
    for cache in [&plain, &sized] {
        assert_eq!((cache.seq_len(), cache.held_blocks()), (300, 0));
        for position in 0..300 {
            let (k, v) = rows(position, 1, 2, 3);
            for head in 0..2 {
                let mut row = [0.0; 3];
                cache.copy_k_row(position, head, &mut row).unwrap();
                assert_eq!(row, k[head * 3..][..3]);
                cache.copy_v_row(position, head, &mut row).unwrap();
                assert_eq!(row, v[head * 3..][..3]);
            }
        }
    }
}

#[test]
fn capacity_is_in_positions_and_memory_in_pages() {
    let lazy = KvCache::new(1, 2);
    assert_eq!((lazy.capacity(), lazy.memory_bytes(), lazy.shape().block_size()), (0, 0, 64));
    for (max_seq_len, page, capacity) in
        [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 32, 32), (63, 64, 64), (65, 64, 128)]
    {
        let cache = KvCache::with_capacity(1, 2, max_seq_len);
        assert_eq!((cache.shape().block_size(), cache.capacity()), (page, capacity));
        assert_eq!(cache.memory_bytes(), capacity * 4 * 4);
    }
}

#[test]
fn memory_that_cannot_be_had_is_an_error_and_nothing_is_lost() {
    // On a 64-bit machine no page can be this large; on smaller ones the shape says no.
    let huge = 1 << 28;
    let dims = KvDims { block_size: huge, n_kv_heads: 1, k_width: huge, v_width: 1 };
    let Ok(shape) = KvShape::new(dims) else { return };
    let mut cache = KvCache::<f32>::with_shape(shape);
    let k = vec![0.0; huge];
    let refused = cache.try_push(&k, &[0.0]);
    let Err(KvCacheError::Shape(ShapeError::OutOfMemory { bytes })) = refused else {
        panic!("{refused:?}")
    };
    // A position has a key of 2^28 numbers of four bytes and a value of one; then room to align.
    let page = huge as u64 * (4 * huge as u64 + 4);
    assert!((page..page + (8 << 20)).contains(&(bytes as u64)), "{bytes} bytes for {page}");
    // A list of pages that is too long by itself, before any of them is asked for.
    #[cfg(target_pointer_width = "64")]
    {
        let pages = KvCache::try_with_capacity(1, 1, 1 << 58).unwrap_err();
        assert_eq!(pages, ShapeError::OutOfMemory { bytes: 1 << 61 });
    }
    assert_eq!((cache.seq_len(), cache.memory_bytes()), (0, 0));
    let store = PagedKvStore::<f32>::with_shape(shape, 1).map(drop);
    assert!(matches!(store, Err(ShapeError::OutOfMemory { .. })));
    let capacity = KvCache::try_with_capacity(1, 1 << 20, usize::MAX / 2).map(drop);
    assert!(capacity.is_err());
}

#[test]
fn wrong_rows_panic_before_any_change() {
    let mut cache = KvCache::new(2, 2);
    let mut store = PagedKvStore::new(4, 2, 2, 2);
    let mut paged = PagedKvCache::new();
    let panics = [
        catch_unwind(AssertUnwindSafe(|| cache.push(&[0.0; 4], &[0.0; 3]).unwrap())),
        catch_unwind(AssertUnwindSafe(|| paged.push(&mut store, &[0.0; 4], &[0.0; 3]).unwrap())),
        catch_unwind(AssertUnwindSafe(|| {
            paged.append(&mut store, &[0.0; 8], &[0.0; 3], 2).unwrap();
        })),
    ];
    let texts: Vec<_> = panics.into_iter().map(|panic| message(panic.unwrap_err())).collect();
    assert_eq!(texts[0], "value rows need 4 numbers, got 3");
    assert_eq!(texts[1], "value rows need 4 numbers, got 3");
    assert_eq!(texts[2], "value rows need 8 numbers, got 3");
    assert_eq!((cache.seq_len(), paged.seq_len(), store.free_block_count()), (0, 0, 2));
    assert_eq!(paged.store_id(), None);
}

#[test]
fn rows_and_heads_out_of_range_are_errors_that_leave_out_alone() {
    let mut cache = KvCache::new(2, 2);
    cache.push(&[1.0; 4], &[2.0; 4]).unwrap();
    let mut out = [7.0; 2];
    let past = KvCacheError::PositionOutOfRange { position: 1, len: 1 };
    assert_eq!(cache.copy_k_row(1, 0, &mut out), Err(past));
    let head = KvCacheError::HeadOutOfRange { head: 2, n_kv_heads: 2 };
    assert_eq!(cache.copy_v_row(0, 2, &mut out), Err(head));
    let short = KvCacheError::RowLength { side: Side::Value, need: 2, have: 1 };
    assert_eq!(cache.copy_v_row(0, 0, &mut out[..1]), Err(short));
    assert_eq!(cache.truncate(2), Err(KvCacheError::PositionOutOfRange { position: 2, len: 1 }));
    assert_eq!(out, [7.0; 2]);

    let mut store = PagedKvStore::new(4, 1, 2, 2);
    let mut paged = PagedKvCache::new();
    paged.push(&mut store, &[1.0; 4], &[2.0; 4]).unwrap();
    let head = PagedKvError::HeadOutOfRange { head: 9, n_kv_heads: 2 };
    assert_eq!(paged.copy_k_row(&store, 0, 9, &mut out), Err(head));
    let short = PagedKvError::RowLength { side: Side::Key, need: 2, have: 0 };
    assert_eq!(paged.copy_k_row(&store, 0, 0, &mut []), Err(short));
    assert_eq!(out, [7.0; 2]);
}

#[test]
fn a_store_of_no_blocks_is_legal_and_exhausted() {
    let mut store = PagedKvStore::new(16, 0, 1, 1);
    let mut cache = PagedKvCache::new();
    let refused = cache.push(&mut store, &[0.0], &[0.0]).unwrap_err();
    assert!(matches!(refused, PagedKvError::Exhausted(e) if (e.need, e.free) == (1, 0)));
    assert_eq!((cache.seq_len(), cache.store_id()), (0, None));
    assert_eq!((store.total_blocks(), store.free_block_count()), (0, 0));
}

#[test]
fn impossible_stores_are_errors_and_new_panics_with_the_reason() {
    assert_eq!(
        PagedKvStore::try_new(16, 1, 1, 0).err(),
        Some(ShapeError::Zero { what: "k_width" })
    );
    assert_eq!(PagedKvStore::try_new(usize::MAX, 1, 2, 2).err(), Some(ShapeError::Overflow));
    assert_eq!(PagedKvStore::try_new(16, usize::MAX, 1, 1).err(), Some(ShapeError::Overflow));
    let panic = catch_unwind(|| PagedKvStore::new(0, 1, 1, 1)).unwrap_err();
    assert!(message(panic).contains("block_size must be at least 1"));
}

#[test]
fn the_first_sequence_gets_the_first_blocks() {
    let mut store = PagedKvStore::new(2, 8, 1, 1);
    let mut cache = PagedKvCache::new();
    let (k, v) = rows(0, 5, 1, 1);
    cache.append(&mut store, &k, &v, 5).unwrap();
    assert_eq!(cache.block_table(), [id(0), id(1), id(2)]);
    assert_eq!((store.block_size(), store.total_blocks()), (2, 8));
    assert_eq!(cache.store_id(), Some(store.id()));
}

#[test]
fn an_append_that_runs_out_on_its_last_row_takes_nothing() {
    let mut store = PagedKvStore::new(2, 3, 1, 1);
    let mut cache = PagedKvCache::new();
    let (k, v) = rows(0, 7, 1, 1);
    let refused = cache.append(&mut store, &k, &v, 7).unwrap_err();
    assert!(matches!(refused, PagedKvError::Exhausted(e) if (e.need, e.free) == (4, 3)));
    assert_eq!((cache.seq_len(), cache.block_table().len()), (0, 0));
    assert_eq!(store.free_block_count(), 3);
    cache.append(&mut store, &k[..6], &v[..6], 6).unwrap();
    assert_eq!(store.free_block_count(), 0);
}

#[test]
fn reserved_pushes_take_no_block() {
    let mut store = PagedKvStore::new(2, 6, 1, 1);
    let mut cache = PagedKvCache::new();
    cache.push(&mut store, &[0.0], &[0.0]).unwrap();
    cache.reserve(&mut store, 7).unwrap();
    assert_eq!((cache.seq_len(), cache.block_table().len()), (1, 4));
    let mut other = PagedKvCache::new();
    other.append(&mut store, &[0.0; 4], &[0.0; 4], 4).unwrap();
    assert_eq!(store.free_block_count(), 0);
    for _ in 0..7 {
        cache.push(&mut store, &[0.0], &[0.0]).unwrap();
    }
    assert!(cache.push(&mut store, &[0.0], &[0.0]).is_err());
    let mut more = PagedKvCache::new();
    assert!(more.reserve(&mut store, 1).is_err());
    assert_eq!(cache.reserve(&mut store, usize::MAX), Err(PagedKvError::TooLong));
}

#[test]
fn a_write_into_a_shared_block_is_seen_by_the_writer_alone() {
    let mut store = PagedKvStore::new(4, 4, 1, 1);
    let mut first = PagedKvCache::new();
    let (k, v) = rows(0, 3, 1, 1);
    first.append(&mut store, &k, &v, 3).unwrap();
    let mut second = first.fork(&mut store).unwrap();
    second.truncate(&mut store, 1).unwrap();
    second.push(&mut store, &[50.0], &[50.0]).unwrap();
    let mut row = [0.0];
    first.copy_k_row(&store, 1, 0, &mut row).unwrap();
    assert_eq!(row, [1.0]);
    second.copy_k_row(&store, 1, 0, &mut row).unwrap();
    assert_eq!(row, [50.0]);
    second.copy_k_row(&store, 0, 0, &mut row).unwrap();
    assert_eq!(row, [0.0]);
    // The first is alone in its block now and writes into it without a copy.
    first.push(&mut store, &[3.0], &[3.0]).unwrap();
    assert_eq!((first.block_table(), second.block_table()), (&[id(0)][..], &[id(1)][..]));
}

#[test]
fn a_copy_that_finds_no_block_is_refused_and_nothing_is_lost() {
    let mut store = PagedKvStore::new(4, 1, 1, 1);
    let mut first = PagedKvCache::new();
    first.push(&mut store, &[1.0], &[1.0]).unwrap();
    let mut second = first.fork(&mut store).unwrap();
    let refused = second.push(&mut store, &[2.0], &[2.0]).unwrap_err();
    assert!(matches!(refused, PagedKvError::Exhausted(e) if (e.need, e.free) == (1, 0)));
    assert_eq!((second.seq_len(), second.block_table()), (1, first.block_table()));
    first.release(&mut store).unwrap();
    second.push(&mut store, &[2.0], &[2.0]).unwrap();
    assert_eq!(store.free_block_count(), 0);
}

#[test]
fn two_releases_of_forks_free_each_block_once() {
    let mut store = PagedKvStore::new(2, 4, 1, 1);
    let mut first = PagedKvCache::new();
    let (k, v) = rows(0, 4, 1, 1);
    first.append(&mut store, &k, &v, 4).unwrap();
    let mut second = first.fork(&mut store).unwrap();
    assert_eq!(store.free_block_count(), 2);
    first.release(&mut store).unwrap();
    assert_eq!(store.free_block_count(), 2, "the fork keeps the pages alive");
    second.release(&mut store).unwrap();
    second.release(&mut store).unwrap();
    assert_eq!(store.free_block_count(), 4);
}

#[test]
fn another_store_of_the_same_shape_is_refused() {
    let mut store = PagedKvStore::new(4, 2, 1, 1);
    let mut other = PagedKvStore::new(4, 2, 1, 1);
    let mut cache = PagedKvCache::new();
    cache.push(&mut store, &[1.0], &[1.0]).unwrap();
    let wrong = PagedKvError::WrongStore { need: store.id(), have: other.id() };
    assert_eq!(cache.push(&mut other, &[1.0], &[1.0]), Err(wrong));
    // The store is looked at before the rows: a row of the other store's length is no panic.
    let mut wide = PagedKvStore::new(4, 2, 1, 8);
    assert!(cache.push(&mut wide, &[1.0; 8], &[1.0; 8]).is_err());
    assert_eq!(cache.release(&mut other), Err(wrong));
    assert_eq!((cache.seq_len(), store.free_block_count()), (1, 1));
    cache.release(&mut store).unwrap();
    cache.push(&mut other, &[1.0], &[1.0]).unwrap();
    assert_eq!(cache.store_id(), Some(other.id()));
}

#[test]
fn a_rollback_at_a_block_boundary_gives_back_what_is_past_it() {
    for (len, blocks) in [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)] {
        let mut store = PagedKvStore::new(4, 4, 1, 1);
        let mut cache = PagedKvCache::new();
        let (k, v) = rows(0, 9, 1, 1);
        cache.append(&mut store, &k, &v, 9).unwrap();
        cache.reserve(&mut store, 4).unwrap();
        cache.truncate(&mut store, len).unwrap();
        assert_eq!((cache.seq_len(), cache.block_table().len()), (len, blocks));
        assert_eq!(store.free_block_count(), 4 - blocks);
    }
}

#[test]
fn bad_tables_are_refused_by_adopt_and_no_count_is_added() {
    let mut store = PagedKvStore::new(2, 3, 1, 1);
    let mut first = PagedKvCache::new();
    first.append(&mut store, &[0.0; 4], &[0.0; 4], 4).unwrap();
    let mut cache = PagedKvCache::new();
    let [a, b, free] = [id(0), id(1), id(2)];
    for (blocks, len, refused) in [
        (&[a, b, free][..], 4, PagedKvError::BlockFree { block: free }),
        (&[a, id(3)], 4, PagedKvError::BlockOutOfRange { block: id(3), total: 3 }),
        (&[a, b, a], 4, PagedKvError::BlockTwice { block: a }),
        (&[a, b], 5, PagedKvError::BlockCount { need: 3, have: 2 }),
    ] {
        assert_eq!(cache.adopt(&mut store, blocks, len), Err(refused));
        assert!(cache.block_table().is_empty());
        assert_eq!(store.check_invariants([first.block_table()]), Ok(()));
    }
    let full = PagedKvError::NotEmpty { len: 4, blocks: 2 };
    assert_eq!(first.adopt(&mut store, &[a], 2), Err(full));
    cache.adopt(&mut store, &[a, b], 3).unwrap();
    assert_eq!(store.check_invariants([first.block_table(), cache.block_table()]), Ok(()));
}

#[test]
fn rows_nobody_wrote_are_not_numbers_in_poison_mode() {
    let mut store = PagedKvStore::new(2, 2, 1, 1);
    store.poison_free();
    let mut cache = PagedKvCache::new();
    cache.append(&mut store, &[1.0; 4], &[1.0; 4], 4).unwrap();
    let blocks = cache.block_table().to_vec();
    cache.truncate(&mut store, 1).unwrap();
    // A second table over the same block is a window on what lies past the first one's end.
    let mut window = PagedKvCache::new();
    window.adopt(&mut store, &blocks[..1], 2).unwrap();
    let mut row = [0.0];
    window.copy_k_row(&store, 0, 0, &mut row).unwrap();
    assert_eq!(row, [1.0]);
    window.copy_k_row(&store, 1, 0, &mut row).unwrap();
    assert!(row[0].is_nan());
    window.release(&mut store).unwrap();
    cache.release(&mut store).unwrap();
    cache.push(&mut store, &[1.0], &[1.0]).unwrap();
    let blocks = cache.block_table().to_vec();
    window.adopt(&mut store, &blocks, 2).unwrap();
    window.copy_v_row(&store, 1, 0, &mut row).unwrap();
    assert!(row[0].is_nan(), "a block that is handed out again holds nothing of its last owner");
}
