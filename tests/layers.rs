//! Layers that differ: windows, shapes, stored types, and layers that read another's rows.
#![cfg(any(feature = "std", feature = "spin"))]

use core::fmt::Debug;

use paged_kv::cache::{
    KvWindow, LayerElement, LayerError, LayerSpec, Mixed, PagedKvCache, PagedKvStore,
    PagedSequence, PagedStoreExhausted, SharedPagedKv,
};
use paged_kv::internal::doors::ask;
use paged_kv::internal::numbers::Numbers;
use paged_kv::{
    Element, Int4, Int8, KvDims, KvShape, PagedKvError, ShapeError, bf16, every_type, f16,
};

type Sequence<'a, E> = PagedSequence<&'a SharedPagedKv<E>, E>;

fn shape(block_size: usize, n_kv_heads: usize, width: usize) -> KvShape {
    KvShape::square(block_size, n_kv_heads, width).unwrap()
}

/// The rows that a tag has in a layer of this shape.
fn rows(tag: u64, layer: usize, shape: KvShape) -> (Vec<f32>, Vec<f32>) {
    let mut numbers = Numbers::new(tag * 16 + layer as u64);
    (numbers.normals(shape.k_row_len()), numbers.normals(shape.v_row_len()))
}

fn layers<E: Element>(specs: &[LayerSpec]) -> SharedPagedKv<E> {
    let shared = SharedPagedKv::<E>::with_layers(specs).unwrap();
    (0..specs.len()).for_each(|layer| shared.write(layer).poison_free());
    shared
}

/// A whole step of these tags, in the layers that own their rows.
fn step<E: Element>(sequence: &mut Sequence<'_, E>, tags: &[u64]) {
    sequence.reserve(tags.len()).unwrap();
    write(sequence, tags);
    sequence.commit(tags.len()).unwrap();
}

fn write<E: Element>(sequence: &mut Sequence<'_, E>, tags: &[u64]) {
    for layer in 0..sequence.shared().layer_count() {
        if sequence.shared().owner_of(layer) == layer {
            let shape = sequence.shared().read(layer).shape();
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for &tag in tags {
                let row = rows(tag, layer, shape);
                k.extend(row.0);
                v.extend(row.1);
            }
            sequence.append(layer, &k, &v, tags.len()).unwrap();
        }
    }
}

/// What a sequence of these tags answers in a store that keeps everything.
fn whole<E: Element>(
    shape: KvShape,
    layer: usize,
    tags: &[u64],
    window: Option<KvWindow>,
    n_q: usize,
) -> Vec<u32> {
    let mut store = PagedKvStore::<E>::with_shape(shape, shape.blocks_for(tags.len())).unwrap();
    let mut cache = PagedKvCache::new();
    for &tag in tags {
        let (k, v) = rows(tag, layer, shape);
        cache.push(&mut store, &k, &v).unwrap();
    }
    ask(&store, &cache, window, n_q)
}

/// Blocks of which some tile is seen by the query at `len` or by a later one, worked out position by
/// position, and those that hold positions behind that.
fn needed(window: Option<KvWindow>, block_size: usize, len: usize, end: usize) -> Vec<usize> {
    let sees =
        |j: usize| window.is_none_or(|window| j < window.first() || j + window.window() > len);
    let tile = |tile: usize| (tile * 64..tile * 64 + 64).any(sees);
    let block = |block: usize| (block * block_size..(block + 1) * block_size).any(|j| tile(j / 64));
    (0..end.div_ceil(block_size)).filter(|&index| block(index)).collect()
}

/// Random lives of three requests over layers with and without windows: what each layer holds is what
/// its window needs, and bits are those of a sequence that keeps everything.
fn requests_under_windows<E: Element>() {
    let windows = [
        None,
        Some(KvWindow::last(70)),
        Some(KvWindow::last(33).and_first(5)),
        Some(KvWindow::last(200)),
    ];
    let shapes = [shape(16, 1, 4), shape(16, 2, 3), shape(40, 1, 5), shape(24, 1, 4)];
    let specs: Vec<_> = (shapes.iter().zip(windows))
        .map(|(&shape, window)| {
            let spec = LayerSpec::new(shape, 3 * 1600 / shape.block_size());
            window.map_or(spec, |window| spec.window(window))
        })
        .collect();
    for seed in 0..if paged_kv::internal::types::is_f32::<E>() { 6 } else { 1 } {
        let shared = layers::<E>(&specs);
        let mut numbers = Numbers::new(seed);
        let mut requests: Vec<_> = (0..3).map(|_| Sequence::<E>::new(&shared)).collect();
        // Tags, and the length at which blocks were last taken, layer by layer.
        let mut truths = vec![(Vec::<u64>::new(), [0; 4]); 3];
        let mut tag = 0;
        for _ in 0..120 {
            let at = numbers.below(3);
            match numbers.below(10) {
                0 => {
                    let to = (at + 1) % 3;
                    requests[to] = requests[at].fork().unwrap();
                    truths[to] = truths[at].clone();
                }
                1 => {
                    requests[at].release();
                    truths[at] = (Vec::new(), [0; 4]);
                }
                2 => {
                    let (tags, taken) = &mut truths[at];
                    let len = tags.len() - numbers.below(tags.len().min(40) + 1);
                    let gone = |layer: usize| {
                        let held = needed(
                            windows[layer],
                            shapes[layer].block_size(),
                            taken[layer],
                            tags.len(),
                        );
                        needed(windows[layer], shapes[layer].block_size(), len, len)
                            .into_iter()
                            .any(|block| !held.contains(&block))
                    };
                    let possible = !(0..4).any(gone);
                    let got = requests[at].truncate(len);
                    assert_eq!(got.is_ok(), possible, "{got:?}, {} to {len}", tags.len());
                    if possible {
                        tags.truncate(len);
                        taken.iter_mut().for_each(|taken| *taken = (*taken).min(len));
                    }
                }
                _ => {
                    let n = numbers.pick(&[1, 2, 9, 64, 100]);
                    let (tags, taken) = &mut truths[at];
                    if tags.len() + n > 1500 {
                        continue;
                    }
                    let tables: Vec<_> = (0..4)
                        .map(|layer| requests[at].cache(layer).block_table().to_vec())
                        .collect();
                    let new: Vec<u64> = (0..n)
                        .map(|_| {
                            tag += 1;
                            tag
                        })
                        .collect();
                    requests[at].reserve(n).unwrap();
                    for (layer, before) in tables.iter().enumerate() {
                        if requests[at].cache(layer).block_table() != before {
                            taken[layer] = tags.len();
                        }
                    }
                    write(&mut requests[at], &new);
                    let accepted = numbers.between(1, n);
                    requests[at].commit(accepted).unwrap();
                    tags.extend(&new[..accepted]);
                }
            }
            let holders = requests.iter().flat_map(Sequence::holders);
            assert_eq!(shared.check_invariants(holders), Ok(()));
            for (request, (tags, taken)) in requests.iter().zip(&truths) {
                for layer in 0..4 {
                    let cache = request.cache(layer);
                    let have = cache.block_table().len() + cache.freed_blocks().len();
                    let size = shapes[layer].block_size();
                    let want = needed(windows[layer], size, taken[layer], have * size);
                    let kept = (0..have).filter(|block| !cache.freed_blocks().contains(block));
                    assert_eq!(
                        kept.collect::<Vec<_>>(),
                        want,
                        "layer {layer}, {} positions",
                        tags.len()
                    );
                }
            }
            let (request, (tags, _)) = (&requests[at], &truths[at]);
            let layer = numbers.below(4);
            let n_q = tags.len().min(3);
            let have = ask(&shared.read(layer), request.cache(layer), windows[layer], n_q);
            assert_eq!(have, whole::<E>(shapes[layer], layer, tags, windows[layer], n_q));
        }
        drop(requests);
        assert_eq!(shared.check_invariants([]), Ok(()));
        assert_eq!(shared.free_blocks(2), 120);
    }
}

/// Four beams under windows: copies of tails, blocks that one has let go and another holds.
fn beams_under_windows<E: Element>() {
    let window = KvWindow::last(40).and_first(2);
    let specs =
        [LayerSpec::new(shape(16, 1, 4), 60).window(window), LayerSpec::new(shape(16, 1, 4), 90)];
    let shared = layers::<E>(&specs);
    let mut beams: Vec<_> = (0..4).map(|_| Sequence::<E>::new(&shared)).collect();
    let mut tags = vec![Vec::<u64>::new(); 4];
    let mut numbers = Numbers::new(4);
    for round in 0..200 {
        let chosen: Vec<usize> = (0..4).map(|_| numbers.below(4)).collect();
        beams = chosen.iter().map(|&from| beams[from].fork().unwrap()).collect();
        tags = chosen.iter().map(|&from| tags[from].clone()).collect();
        for (beam, tags) in beams.iter_mut().zip(&mut tags) {
            tags.push(numbers.bits() >> 8);
            step(beam, &tags[tags.len() - 1..]);
        }
        assert_eq!(shared.check_invariants(beams.iter().flat_map(Sequence::holders)), Ok(()));
        let beam = round % 4;
        for (layer, window) in [(0, Some(window)), (1, None)] {
            let have = ask(&shared.read(layer), beams[beam].cache(layer), window, 1);
            assert_eq!(have, whole::<E>(shape(16, 1, 4), layer, &tags[beam], window, 1), "{round}");
        }
    }
    assert!(beams.iter().all(|beam| beam.cache(0).freed_blocks() == (4..8)));
    drop(beams);
    assert_eq!(shared.free_groups(), 60);
}

/// A shared prefix: the layer with a window holds what the window needs of it.
fn a_prefix_is_adopted_as_far_as_it_is_needed<E: Element>() {
    let window = KvWindow::last(50);
    let specs =
        [LayerSpec::new(shape(16, 1, 4), 40), LayerSpec::new(shape(16, 1, 4), 40).window(window)];
    let shared = layers::<E>(&specs);
    let groups = shared.acquire_groups(20).unwrap();
    let tags: Vec<u64> = (1..=320).collect();
    let mut writer = Sequence::<E>::new(&shared);
    writer.adopt_groups(&groups, 0).unwrap();
    write_committed(&mut writer, &tags);
    drop(writer);
    let mut reader = Sequence::<E>::new(&shared);
    reader.adopt_groups(&groups, 310).unwrap();
    assert_eq!(reader.cache(0).freed_blocks(), 0..0);
    // The window of position 310 begins at 261, in the tile at 256.
    assert_eq!((reader.cache(1).freed_blocks(), reader.cache(1).block_table().len()), (0..16, 4));
    step(&mut reader, &[1000]);
    let tags: Vec<u64> = tags[..310].iter().copied().chain([1000]).collect();
    for (layer, window) in [(0, None), (1, Some(window))] {
        let have = ask(&shared.read(layer), reader.cache(layer), window, 1);
        assert_eq!(have, whole::<E>(shape(16, 1, 4), layer, &tags, window, 1));
    }
    drop(reader);
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    assert_eq!(shared.free_groups(), 40);
}

/// Room that came with groups stays the sequence's own when the window passes rows in front of it: what
/// is written there is in the groups.
fn room_of_groups_is_written_in_place_after_the_window_has_passed<E: Element>() {
    let spec = LayerSpec::new(shape(16, 1, 4), 40).window(KvWindow::last(20));
    let shared = layers::<E>(&[spec]);
    let groups = shared.acquire_groups(20).unwrap();
    let mut writer = Sequence::<E>::new(&shared);
    writer.adopt_groups(&groups[..10], 0).unwrap();
    write_committed(&mut writer, &(1..=160).collect::<Vec<_>>());
    drop(writer);
    let mut sequence = Sequence::<E>::new(&shared);
    // The window of position 146 begins at 127, and all of its tile is kept: six blocks, with the one
    // that is being filled.
    sequence.adopt_groups(&groups, 146).unwrap();
    assert_eq!(sequence.cache(0).freed_blocks(), 0..4);
    write_committed(&mut sequence, &(147..=211).collect::<Vec<_>>());
    // A fork shares the block that is being filled. Its copy makes the window give blocks back: that
    // of position 211 begins at a tile, and two blocks are left.
    let fork = sequence.fork().unwrap();
    write_committed(&mut sequence, &(212..=320).collect::<Vec<_>>());
    assert_eq!(sequence.cache(0).freed_blocks(), 0..12);
    let table = sequence.cache(0).block_table();
    let of_group = |index: usize| shared.group_block(groups[index], 0).unwrap();
    assert_eq!(table[2..], [14, 15, 16, 17, 18, 19].map(of_group));
    assert_ne!(table[1], of_group(13), "the block that was shared");
    drop((sequence, fork));
    groups.into_iter().for_each(|group| assert!(shared.release_group(group)));
    assert_eq!(shared.free_groups(), 40);
}

/// Rows into room that came with groups, in steps of one block.
fn write_committed<E: Element>(sequence: &mut Sequence<'_, E>, tags: &[u64]) {
    for tags in tags.chunks(16) {
        step(sequence, tags);
    }
}

every_type! {
    requests_under_windows,
    beams_under_windows,
    a_prefix_is_adopted_as_far_as_it_is_needed,
    room_of_groups_is_written_in_place_after_the_window_has_passed,
}

/// Two sliding layers to one full one, as in Gemma 3 with less of everything: the sliding layers hold
/// a handful of blocks however long the text is.
#[test]
fn a_hundred_thousand_tokens_in_bounded_memory() {
    const LEN: usize = 100_000;
    let (small, window) = (shape(16, 1, 2), KvWindow::last(128).and_first(4));
    // The first tile; 127 positions before the query and up to 49 more of their tile, at the worst
    // block border; and the block that is taken there.
    let most = 4 + (127 + 49) / 16 + 1;
    let sliding = LayerSpec::new(small, most).window(window);
    let specs = [sliding, sliding, LayerSpec::new(small, LEN / 16)];
    let shared = layers::<f32>(&specs);
    assert_eq!([0, 1, 2].map(|layer| shared.class_of(layer)), [0, 0, 1]);
    assert!(shared.can_ever_fit(LEN) && !shared.can_ever_fit(LEN + 1));
    let mut sequence = Sequence::<f32>::new(&shared);
    let row = |position: usize| {
        let of = |salt: usize| [0, 1].map(|i| ((position * 7 + salt + i) % 31) as f32 / 16.0 - 1.0);
        (of(0), of(5))
    };
    for position in 0..LEN {
        sequence.reserve(1).unwrap();
        let (k, v) = row(position);
        (0..3).for_each(|layer| sequence.push(layer, &k, &v).unwrap());
        sequence.commit(1).unwrap();
        assert!(sequence.cache(0).block_table().len() <= most);
    }
    assert_eq!(shared.stats().layers[0].peak, most, "not a block more than the spec needs");
    assert_eq!(sequence.cache(2).block_table().len(), LEN / 16);
    let answers =
        [0, 1, 2].map(|layer| ask(&shared.read(layer), sequence.cache(layer), Some(window), 1));
    assert_eq!(answers[0], answers[2]);
    assert_eq!(answers[1], answers[2]);
    let stats = sequence.stats();
    assert_eq!(stats.blocks, 2 * sequence.cache(0).block_table().len() + LEN / 16);
    assert!(stats.waste < 3 * 16, "{stats}");
}

/// `can_ever_fit` knows to the block what a request needs that grows one position at a time.
#[test]
fn what_fits_is_known_to_the_block() {
    for (block_size, last, first) in
        [(16, 1, 0), (16, 100, 0), (5, 64, 1), (48, 70, 70), (64, 65, 0)]
    {
        let spec = |blocks| {
            LayerSpec::new(shape(block_size, 1, 1), blocks)
                .window(KvWindow::last(last).and_first(first))
        };
        for blocks in 1..40 {
            let shared = layers::<f32>(&[spec(blocks)]);
            let mut sequence = Sequence::<f32>::new(&shared);
            let mut fits = 0;
            while fits < 900 && sequence.reserve(1).is_ok() {
                sequence.push(0, &[1.0], &[1.0]).unwrap();
                sequence.commit(1).unwrap();
                fits += 1;
            }
            let about = format!("{blocks} blocks of {block_size}, {last} and {first}");
            assert!(shared.can_ever_fit(fits), "{about}");
            assert_eq!(shared.can_ever_fit(fits + 1), fits == 900, "{about}: {fits}");
        }
    }
}

#[test]
fn the_last_step_can_be_taken_back_and_more_names_the_oldest_position() {
    let spec = LayerSpec::new(shape(16, 1, 1), 40);
    let shared = layers::<f32>(&[spec, spec.window(KvWindow::last(64))]);
    let mut sequence = Sequence::<f32>::new(&shared);
    for tag in 0..300 {
        step(&mut sequence, &[tag]);
    }
    step(&mut sequence, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    sequence.truncate(300).unwrap();
    // Blocks were taken last at position 304, whose window begins at 241.
    let freed = PagedKvError::PositionFreed { position: 191, oldest: 192 };
    assert_eq!(sequence.truncate(254), Err(freed));
    assert_eq!(
        (sequence.len(), sequence.cache(0).seq_len(), sequence.cache(1).seq_len()),
        (300, 300, 300)
    );
    sequence.truncate(255).unwrap();
    step(&mut sequence, &[7]);
    sequence.release();
    step(&mut sequence, &[8]);
    assert_eq!(sequence.cache(1).freed_blocks(), 0..0);
}

/// Each stored type beside the others in one sequence: the bits of a sequence in that type alone.
#[test]
fn layers_of_several_stored_types() {
    fn check<E: Element>(
        shared: &SharedPagedKv<Mixed>,
        sequence: &PagedSequence<&SharedPagedKv<Mixed>, Mixed>,
        layer: usize,
        tags: &[u64],
    ) {
        let guard = shared.read(layer);
        assert_eq!(guard.element(), E::NAME);
        let store = guard.as_store::<E>().expect("the type that was asked for");
        let shape = store.shape();
        assert_eq!(
            ask(store, sequence.cache(layer), None, 2),
            whole::<E>(shape, layer, tags, None, 2)
        );
    }
    let spec = LayerSpec::new(shape(16, 2, 6), 30);
    let wide = LayerSpec::new(
        KvShape::new(KvDims { block_size: 8, n_kv_heads: 1, k_width: 40, v_width: 3 }).unwrap(),
        30,
    );
    let specs = [
        spec,
        spec.element::<f16>(),
        wide.element::<bf16>(),
        spec.element::<Int8>(),
        wide.element::<Int4>(),
        spec.element::<Int8>(),
    ];
    let shared = SharedPagedKv::<Mixed>::with_layers(&specs).unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5].map(|layer| shared.class_of(layer)), [0, 1, 2, 3, 4, 3]);
    for layer in 0..6 {
        let mut store = shared.write(layer);
        if let Some(store) = store.as_store_mut::<Int8>() {
            store.poison_free();
        }
    }
    let mut sequence = PagedSequence::new(&shared);
    let tags: Vec<u64> = (5..90).collect();
    let put = |sequence: &mut PagedSequence<&SharedPagedKv<Mixed>, Mixed>, tags: &[u64]| {
        sequence.reserve(tags.len()).unwrap();
        for layer in 0..6 {
            let shape = shared.read(layer).shape();
            let (mut k, mut v) = (Vec::new(), Vec::new());
            for &tag in tags {
                let row = rows(tag, layer, shape);
                k.extend(row.0);
                v.extend(row.1);
            }
            if layer % 2 == 0 {
                sequence.append(layer, &k, &v, tags.len()).unwrap();
            } else {
                sequence.append_to(&mut shared.write(layer), layer, &k, &v, tags.len()).unwrap();
            }
        }
    };
    put(&mut sequence, &tags[..45]);
    sequence.commit(45).unwrap();
    // A fork copies the tail of every type, and a path is moved in every type.
    let mut fork = sequence.fork().unwrap();
    put(&mut fork, &[1, 45 + 5, 2, 46 + 5]);
    fork.compact(&[1, 3]).unwrap();
    put(&mut fork, &tags[47..]);
    fork.commit(38).unwrap();
    check::<f32>(&shared, &fork, 0, &tags);
    check::<f16>(&shared, &fork, 1, &tags);
    check::<bf16>(&shared, &fork, 2, &tags);
    check::<Int8>(&shared, &fork, 3, &tags);
    check::<Int4>(&shared, &fork, 4, &tags);
    check::<Int8>(&shared, &fork, 5, &tags);
    check::<bf16>(&shared, &sequence, 2, &tags[..45]);
    let holders = sequence.holders().chain(fork.holders());
    assert_eq!(shared.check_invariants(holders), Ok(()));
    drop((sequence, fork));
    assert_eq!(shared.free_groups(), 30);
}

#[test]
fn a_layer_may_read_the_rows_of_another() {
    let spec = LayerSpec::new(shape(16, 1, 2), 4);
    let specs = [
        spec,
        LayerSpec::same_as(0),
        spec.window(KvWindow::last(9)),
        LayerSpec::same_as(2),
        LayerSpec::same_as(0),
    ];
    let shared = SharedPagedKv::<f32>::with_layers(&specs).unwrap();
    assert_eq!(shared.layer_count(), 5);
    assert_eq!([0, 1, 2, 3, 4].map(|layer| shared.owner_of(layer)), [0, 0, 2, 2, 0]);
    assert_eq!(shared.window_of(3), Some(KvWindow::last(9)));
    let mut sequence = Sequence::<f32>::new(&shared);
    let refused = |layer, owner| Err(PagedKvError::LayerReads { layer, owner });
    sequence.reserve(3).unwrap();
    assert_eq!(sequence.push(1, &[1.0; 2], &[1.0; 2]), refused(1, 0));
    assert_eq!(sequence.push(3, &[1.0; 2], &[1.0; 2]), refused(3, 2));
    write(&mut sequence, &[5, 6, 7]);
    sequence.commit(3).unwrap();
    for (layer, owner) in [(1, 0), (3, 2), (4, 0)] {
        assert_eq!(sequence.cache(layer).block_table(), sequence.cache(owner).block_table());
        let answers =
            [layer, owner].map(|layer| ask(&shared.read(layer), sequence.cache(layer), None, 1));
        assert_eq!(answers[0], answers[1]);
    }
    assert_eq!(shared.write_all().len(), 2, "one guard a store");
    let group = shared.acquire_group().unwrap();
    let blocks = shared.group_blocks(group);
    assert_eq!(
        (blocks.len(), blocks[1], blocks[3], blocks[4]),
        (5, blocks[0], blocks[2], blocks[0])
    );
    let ids = shared.try_group_blocks(group).unwrap();
    assert_eq!(ids.iter().map(|id| id.index()).collect::<Vec<_>>(), blocks);
    assert_eq!(shared.group_block(group, 4).map(|id| id.index()), Some(blocks[4]));
    assert_eq!((shared.group_block(group, 5), shared.free_blocks(3)), (None, 2));
    assert!(shared.release_group(group));
    let text = shared.stats().to_string();
    assert!(text.contains("layer 0: ") || text.contains("layers 0 to 2: "), "{text}");
    assert_eq!(shared.check_invariants(sequence.holders()), Ok(()));
    let behind = PagedKvError::LayerBehind { layer: 2, need: 4, have: 3 };
    sequence.reserve(1).unwrap();
    sequence.push(0, &[1.0; 2], &[1.0; 2]).unwrap();
    assert_eq!(sequence.commit(1), Err(behind));
}

/// A step waits for those who write into the layers that it needs blocks of, and for no others.
#[test]
fn room_is_taken_in_one_layer_while_another_is_written() {
    let specs = [4, 64].map(|block_size| LayerSpec::new(shape(block_size, 1, 1), 4));
    let shared = layers::<f32>(&specs);
    let mut sequence = Sequence::<f32>::new(&shared);
    step(&mut sequence, &[1, 2, 3, 4]);
    let guard = shared.write(1);
    sequence.reserve(1).unwrap();
    assert_eq!((shared.free_blocks(0), shared.free_blocks(1)), (2, 3));
    drop(guard);
}

#[test]
fn layers_that_cannot_be_are_refused_by_name() {
    fn refused<E: LayerElement>(specs: &[LayerSpec]) -> LayerError
    where
        SharedPagedKv<E>: Debug,
    {
        SharedPagedKv::<E>::with_layers(specs).unwrap_err()
    }
    let spec = LayerSpec::new(shape(16, 1, 2), 4);
    let (need, have) = ("f32", "int8");
    assert_eq!(
        refused::<f32>(&[spec, spec.element::<Int8>()]),
        LayerError::Element { layer: 1, need, have }
    );
    for specs in [[spec, LayerSpec::same_as(1)], [LayerSpec::same_as(1), spec]] {
        let layer = specs.iter().position(|spec| *spec == LayerSpec::same_as(1)).unwrap();
        assert_eq!(refused::<f32>(&specs), LayerError::SameAs { layer, other: 1 });
    }
    let chain = [spec, LayerSpec::same_as(0), LayerSpec::same_as(1)];
    assert_eq!(refused::<Mixed>(&chain), LayerError::SameAs { layer: 2, other: 1 });
    let large = LayerSpec::new(shape(16, 1, 2), usize::MAX);
    let error = refused::<Mixed>(&[spec, large]);
    assert!(
        matches!(error, LayerError::Shape { layer: 1, error: ShapeError::Overflow }),
        "{error}"
    );
    assert!(error.to_string().starts_with("layer 1: "), "{error}");
    assert_eq!(SharedPagedKv::<f32>::with_layers(&[]).unwrap().layer_count(), 0);
    // What all layers store may be said again.
    let same = SharedPagedKv::<Int8>::with_layers(&[spec, spec.element::<Int8>()]).unwrap();
    assert_eq!(same.layer_count(), 2);
}

/// The pool is full, and the window of a layer gives back what the step needs; where it does not, the
/// refusal says what is missing beyond that, and nothing has changed.
#[test]
fn what_a_window_gives_back_counts_as_free() {
    let shared = layers::<f32>(&[LayerSpec::new(shape(16, 1, 1), 9).window(KvWindow::last(64))]);
    let mut sequence = Sequence::<f32>::new(&shared);
    step(&mut sequence, &(0..144).collect::<Vec<_>>());
    let before = format!("{sequence:?}");
    let refused = sequence.reserve(65).unwrap_err();
    let PagedKvError::Exhausted(PagedStoreExhausted { need, free, .. }) = refused else {
        panic!("{refused}")
    };
    assert_eq!((need, free, format!("{sequence:?}")), (1, 0, before));
    sequence.reserve(64).unwrap();
    assert_eq!((sequence.cache(0).freed_blocks(), shared.free_blocks(0)), (0..4, 0));
}
