//! Sequences that keep a window: the same bits in bounded memory, and no look at what is gone.

use paged_kv::attention::{
    AttentionOptions, attention_scratch_len, causal_gqa_attention_paged_into,
};
use paged_kv::batch::{
    BatchError, BatchLayer, BatchPlan, Inline, SequenceRows, SharedPrefix, shared_prefixes,
};
use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
use paged_kv::internal::numbers::Numbers;
use paged_kv::{AttentionError, Element, GqaShape, KvShape, Level, PagedKvError, every_type};

const WIDTH: usize = 8;
const HEADS: usize = 2;
const ROW: usize = HEADS * WIDTH;
const N_HEADS: usize = 4;

fn store<E: Element>(block_size: usize, blocks: usize) -> PagedKvStore<E> {
    let shape = KvShape::square(block_size, HEADS, WIDTH).unwrap();
    let mut store = PagedKvStore::with_shape(shape, blocks).unwrap();
    store.poison_free();
    store
}

/// Key and value rows that a position determines.
fn rows(positions: core::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let of = |salt: u64| {
        let row = |position| Numbers::new(salt + position as u64).normals(ROW);
        positions.clone().flat_map(row).collect::<Vec<f32>>()
    };
    (of(1 << 32), of(2 << 32))
}

fn append<E: Element>(
    cache: &mut PagedKvCache,
    store: &mut PagedKvStore<E>,
    n: usize,
) -> Result<(), PagedKvError> {
    let (k, v) = rows(cache.seq_len()..cache.seq_len() + n);
    cache.append(store, &k, &v, n)
}

fn options(window: KvWindow, level: Level) -> AttentionOptions<'static> {
    AttentionOptions::new().window(window.window()).keep_first(window.first()).level(level)
}

/// The last `n_q` rows' answer, bits.
fn ask<E: Element>(
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    n_q: usize,
    options: &AttentionOptions<'_>,
) -> Result<Vec<u32>, AttentionError> {
    let shape = GqaShape::new(store.shape(), N_HEADS).unwrap();
    let q = Numbers::new(77).normals(n_q * N_HEADS * WIDTH);
    let mut out = vec![f32::NAN; n_q * N_HEADS * WIDTH];
    let mut scratch = vec![f32::NAN; attention_scratch_len(&shape, n_q)];
    causal_gqa_attention_paged_into(&q, store, cache, N_HEADS, options, &mut out, &mut scratch)?;
    Ok(out.iter().map(|number| number.to_bits()).collect())
}

/// Step by step beside a sequence that keeps everything; other sequences dirty what is given back.
fn a_window_changes_no_bit<E: Element>() {
    let windows = [(1, 0), (30, 0), (64, 4), (65, 64), (130, 0), (200, 100), (700, 3)];
    for (turn, (last, first)) in windows.into_iter().enumerate() {
        let window = KvWindow::last(last).and_first(first);
        let block_size = [16, 5, 64, 48, 100, 1, 16][turn];
        let mut all = store::<E>(block_size, 2500 / block_size + 2);
        let mut small = store::<E>(block_size, (first + last + 400) / block_size + 4);
        let (mut whole, mut kept) = (PagedKvCache::new(), PagedKvCache::with_window(window));
        let mut numbers = Numbers::new(turn as u64);
        let level = |step: usize| Level::available().nth(step % Level::available().count());
        for step in 0.. {
            let n = numbers.pick(&[1, 1, 2, 7, 40, 64, 130]);
            if whole.seq_len() + n > 1600 {
                break;
            }
            append(&mut whole, &mut all, n).unwrap();
            append(&mut kept, &mut small, n).unwrap();
            // A rollback to where the step began is always to be had.
            if step % 5 == 0 && n > 2 {
                let len = whole.seq_len() - n / 2;
                whole.truncate(&mut all, len).unwrap();
                kept.truncate(&mut small, len).unwrap();
                continue;
            }
            let options = options(window, level(step).unwrap());
            let want = ask(&all, &whole, n, &options).unwrap();
            assert_eq!(ask(&small, &kept, n, &options).unwrap(), want, "{window:?} at step {step}");
        }
        assert!(!kept.freed_blocks().is_empty(), "{window:?} passed something");
        assert_eq!(small.check_invariants([kept.block_table()]), Ok(()));
        kept.release(&mut small).unwrap();
        assert_eq!(small.free_block_count(), small.total_blocks());
        assert_eq!(kept.freed_blocks(), 0..0, "and begins anew");
        append(&mut kept, &mut small, 3).unwrap();
    }
}

fn what_is_gone_is_not_looked_at<E: Element>() {
    let window = KvWindow::last(100).and_first(4);
    let mut store = store::<E>(16, 20);
    let mut cache = PagedKvCache::with_window(window);
    for _ in 0..500 {
        append(&mut cache, &mut store, 1).unwrap();
    }
    // The last block was taken for position 496, whose window begins at 397: in the tile at 384.
    // The first four positions keep their tile.
    assert_eq!(cache.freed_blocks(), 4..24);
    assert_eq!(cache.block_table().len(), 32 - 20);
    let plain = AttentionOptions::new();
    let gone = |position| AttentionError::PositionFreed { position, oldest: 384 };
    for (options, want) in [
        (plain, Err(gone(64))),
        (plain.window(116), Ok(())),
        (plain.window(117), Err(gone(383))),
        (plain.window(100).keep_first(64), Ok(())),
        (plain.window(100).keep_first(65), Err(gone(64))),
        (plain.positions(0..64), Ok(())),
        (plain.positions(384..500), Ok(())),
        (plain.positions(380..384), Err(gone(380))),
        (plain.positions(0..65), Err(gone(64))),
        // Whole tiles are read: the one at 320 is not there.
        (plain.window(116).positions(383..500), Ok(())),
    ] {
        assert_eq!(ask(&store, &cache, 1, &options).map(drop), want, "{options:?}");
    }
    // The earliest row decides.
    assert_eq!(ask(&store, &cache, 17, &plain.window(100)).map(drop), Ok(()));
    assert_eq!(ask(&store, &cache, 18, &plain.window(100)).map(drop), Err(gone(383)));

    let mut row = [0.5; WIDTH];
    let freed = |position| Err(PagedKvError::PositionFreed { position, oldest: 384 });
    assert_eq!(cache.copy_k_row(&store, 64, 0, &mut row), freed(64));
    assert_eq!(cache.copy_v_row(&store, 383, 0, &mut row), freed(383));
    assert_eq!(row, [0.5; WIDTH]);
    assert_eq!(cache.copy_v_row(&store, 384, 1, &mut row), Ok(()));
}

fn a_rollback_ends_where_the_window_is_whole<E: Element>() {
    let window = KvWindow::last(100).and_first(4);
    let mut store = store::<E>(16, 20);
    let mut cache = PagedKvCache::with_window(window);
    for _ in 0..500 {
        append(&mut cache, &mut store, 1).unwrap();
    }
    let table = cache.block_table().to_vec();
    // The window of position 483 begins at 384, the oldest one kept.
    let refused = |position| Err(PagedKvError::PositionFreed { position, oldest: 384 });
    assert_eq!(cache.truncate(&mut store, 482), refused(383));
    assert_eq!(cache.truncate(&mut store, 100), refused(1));
    assert_eq!((cache.seq_len(), cache.block_table()), (500, &table[..]));
    assert_eq!(cache.truncate(&mut store, 483), Ok(()));
    let long = PagedKvError::PositionOutOfRange { position: 484, len: 483 };
    assert_eq!(cache.truncate(&mut store, 484), Err(long));
    append(&mut cache, &mut store, 1).unwrap();
    ask(&store, &cache, 1, &options(window, Level::detect())).unwrap();
    // In front of what is gone everything is there.
    assert_eq!(cache.truncate(&mut store, 65), refused(0));
    assert_eq!(cache.truncate(&mut store, 64), Ok(()));
    assert_eq!(cache.freed_blocks(), 0..0);
    assert_eq!(store.check_invariants([cache.block_table()]), Ok(()));
    assert_eq!(store.free_block_count(), 16);
}

fn forks_and_adopted_blocks_keep_the_window<E: Element>() {
    let window = KvWindow::last(70).and_first(1);
    let mut store = store::<E>(16, 40);
    let mut cache = PagedKvCache::with_window(window);
    append(&mut cache, &mut store, 300).unwrap();
    append(&mut cache, &mut store, 16).unwrap();
    // Positions 64 to 191 are gone: those of blocks 4 to 11.
    assert_eq!(cache.freed_blocks(), 4..12);
    let mut fork = cache.fork(&mut store).unwrap();
    assert_eq!((fork.freed_blocks(), fork.block_table()), (4..12, cache.block_table()));
    append(&mut fork, &mut store, 30).unwrap();
    append(&mut cache, &mut store, 30).unwrap();
    let options = options(window, Level::detect());
    let both = [&cache, &fork].map(|cache| ask(&store, cache, 5, &options).unwrap());
    assert_eq!(both[0], both[1]);
    let tables = [cache.block_table(), fork.block_table()];
    assert_eq!(store.check_invariants(tables), Ok(()));
    fork.release(&mut store).unwrap();
    cache.release(&mut store).unwrap();

    // Blocks that somebody filled: those that the window has passed are not held.
    let mut whole = PagedKvCache::new();
    append(&mut whole, &mut store, 320).unwrap();
    let mut adopted = PagedKvCache::with_window(window);
    adopted.adopt(&mut store, whole.block_table(), 310).unwrap();
    assert_eq!(adopted.freed_blocks(), 4..12);
    let held: Vec<u32> = whole.block_table().iter().map(|&block| store.holders(block)).collect();
    let want: Vec<u32> =
        (0..20).map(|block| if (4..12).contains(&block) { 1 } else { 2 }).collect();
    assert_eq!(held, want);
    append(&mut adopted, &mut store, 10).unwrap();
    let have = ask(&store, &adopted, 3, &options).unwrap();
    assert_eq!(have, ask(&store, &whole, 3, &options).unwrap());
    assert_ne!(adopted.block_table()[11], whole.block_table()[19], "the tail was copied");
}

/// What the window gives back counts as free for the step that takes more, and a step that is
/// refused gives nothing back.
fn a_step_is_all_or_nothing<E: Element>() {
    let window = KvWindow::last(64);
    let mut store = store::<E>(16, 9);
    let mut cache = PagedKvCache::with_window(window);
    append(&mut cache, &mut store, 144).unwrap();
    // The window of position 144 begins at 81: the four blocks of the first tile go.
    let before = (cache.seq_len(), cache.block_table().to_vec(), cache.freed_blocks());
    let refused = append(&mut cache, &mut store, 65).unwrap_err();
    let PagedKvError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!((exhausted.need, exhausted.free), (1, 0));
    assert_eq!((cache.seq_len(), cache.block_table().to_vec(), cache.freed_blocks()), before);
    append(&mut cache, &mut store, 64).unwrap();
    assert_eq!((cache.freed_blocks(), store.free_block_count()), (0..4, 0));

    // A block that others hold too is given back and is not free by that.
    let mut fork = cache.fork(&mut store).unwrap();
    let refused = append(&mut cache, &mut store, 16).unwrap_err();
    let PagedKvError::Exhausted(exhausted) = refused else { panic!("{refused}") };
    assert_eq!((exhausted.need, exhausted.free), (1, 0));
    fork.release(&mut store).unwrap();
    append(&mut cache, &mut store, 16).unwrap();
    assert_eq!(store.check_invariants([cache.block_table()]), Ok(()));
}

/// Windows of several sequences in one call, with a prefix in common where they have all of it.
fn a_batch_of_windows<E: Element>() {
    let window = KvWindow::last(90).and_first(3);
    let mut store = store::<E>(16, 200);
    let gqa = GqaShape::new(store.shape(), N_HEADS).unwrap();
    let mut prefix = PagedKvCache::with_window(window);
    append(&mut prefix, &mut store, 128).unwrap();
    let mut sequences: Vec<_> = (0..4).map(|_| prefix.fork(&mut store).unwrap()).collect();
    for (sequence, more) in sequences.iter_mut().zip([1, 300, 700, 20]) {
        for _ in 0..more {
            append(sequence, &mut store, 1).unwrap();
        }
    }
    let caches: Vec<&PagedKvCache> = sequences.iter().collect();
    // The second and third have let the blocks behind the first tile go.
    let prefixes = shared_prefixes(16, &caches);
    assert!(prefixes.iter().all(|prefix| prefix.positions == 64 || prefix.sequences == [0, 3]));
    let n_q = [1, 3, 1, 9];
    let rows = |prefixes| {
        let rows =
            caches.iter().zip(n_q).map(|(cache, rows)| SequenceRows { len: cache.seq_len(), rows });
        let rows: Vec<_> = rows.collect();
        BatchPlan::with_shared(gqa, &rows, prefixes)
    };
    let q = Numbers::new(5).normals(14 * N_HEADS * WIDTH);
    let layer = BatchLayer { q: &q, store: &store, sequences: &caches };
    let options = options(window, Level::detect());
    let run = |plan: &BatchPlan, options: &AttentionOptions<'_>| {
        let mut scratch = vec![f32::NAN; plan.scratch_len()];
        let mut out = vec![f32::NAN; 14 * N_HEADS * WIDTH];
        let run = plan.attend(&layer, options, &mut out, &mut scratch, &Inline);
        run.map(|()| out.iter().map(|number| number.to_bits()).collect::<Vec<u32>>())
    };
    let have = run(&rows(&prefixes).unwrap(), &options).unwrap();
    let mut first = 0;
    for (cache, n_q) in caches.iter().zip(n_q) {
        let len = n_q * N_HEADS * WIDTH;
        let mut out = vec![f32::NAN; len];
        let mut scratch = vec![f32::NAN; attention_scratch_len(&gqa, n_q)];
        let q = &q[first..first + len];
        causal_gqa_attention_paged_into(
            q,
            &store,
            cache,
            N_HEADS,
            &options,
            &mut out,
            &mut scratch,
        )
        .unwrap();
        let want: Vec<u32> = out.iter().map(|number| number.to_bits()).collect();
        assert_eq!(have[first..first + len], want);
        first += len;
    }
    let plan = rows(&[]).unwrap();
    let refused = run(&plan, &AttentionOptions::new()).unwrap_err();
    assert!(matches!(refused, BatchError::PositionFreed { sequence: 1, position: 64, .. }));

    // One that has all of the blocks, and one whose window has passed most of them.
    let (mut whole, mut kept) = (PagedKvCache::new(), PagedKvCache::with_window(window));
    append(&mut whole, &mut store, 1024).unwrap();
    kept.adopt(&mut store, whole.block_table(), 1024).unwrap();
    let rows = [SequenceRows { len: 1024, rows: 1 }; 2];
    let wrong = SharedPrefix { sequences: vec![0, 1], positions: 1024 };
    let plan = BatchPlan::with_shared(gqa, &rows, &[wrong]).unwrap();
    let (q, caches) = (&q[..2 * N_HEADS * WIDTH], [&whole, &kept]);
    let layer = BatchLayer { q, store: &store, sequences: &caches };
    let (mut out, mut scratch) = (q.to_vec(), vec![0.0; plan.scratch_len()]);
    let refused = plan.attend(&layer, &options, &mut out, &mut scratch, &Inline).unwrap_err();
    assert!(matches!(refused, BatchError::NotShared { block: 4, .. }), "{refused}");
    assert_eq!(out, q, "nothing was written");
}

every_type! {
    a_window_changes_no_bit,
    what_is_gone_is_not_looked_at,
    a_rollback_ends_where_the_window_is_whole,
    forks_and_adopted_blocks_keep_the_window,
    a_step_is_all_or_nothing,
    a_batch_of_windows,
}

#[test]
#[should_panic(expected = "a window of 0 positions")]
fn a_window_of_nothing_is_a_mistake() {
    let _ = KvWindow::last(0);
}

#[test]
fn another_store_is_refused_first() {
    let (mut store, other) = (store::<f32>(16, 4), store::<f32>(16, 4));
    let mut cache = PagedKvCache::with_window(KvWindow::last(5));
    append(&mut cache, &mut store, 2).unwrap();
    let wrong = AttentionError::WrongStore { need: store.id(), have: other.id() };
    assert_eq!(ask(&other, &cache, 1, &AttentionOptions::new()), Err(wrong));
}
