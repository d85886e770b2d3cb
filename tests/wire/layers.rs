//! All layers of a request: layers that differ, here and there.
#![cfg(any(feature = "std", feature = "spin"))]

use paged_kv::cache::{
    AnyPagedKvStore, KvWindow, LayerSpec, Mixed, PagedKvCache, PagedKvStore, PagedSequence,
    SharedPagedKv,
};
use paged_kv::internal::saved_bytes::reseal;
use paged_kv::wire::{Label, Saved, WireError};
use paged_kv::{Element, Int4, Int8, KvShape, PagedKvError, bf16, f16};

use super::{ask, rows};

type Sequence<'a> = PagedSequence<&'a SharedPagedKv<Mixed>, Mixed>;

const WINDOW: KvWindow = KvWindow::last(50).and_first(2);

/// Seven layers of every stored type; the fourth reads the second. Block sizes and numbers of blocks
/// are the pool's own.
fn pool(sizes: [usize; 7], blocks: [usize; 7]) -> SharedPagedKv<Mixed> {
    let spec = |layer: usize, heads, width| {
        LayerSpec::new(KvShape::square(sizes[layer], heads, width).unwrap(), blocks[layer])
    };
    let specs = [
        spec(0, 1, 6).element::<f16>(),
        spec(1, 2, 5).element::<Int8>().window(WINDOW),
        spec(2, 2, 5).element::<Int8>().window(WINDOW),
        LayerSpec::same_as(1),
        spec(4, 1, 35).element::<Int4>(),
        spec(5, 1, 6).element::<bf16>(),
        spec(6, 1, 6),
    ];
    SharedPagedKv::with_layers(&specs).unwrap()
}

fn write(sequence: &mut Sequence<'_>, n: usize) {
    for layer in [0, 1, 2, 4, 5, 6] {
        let (shape, cache) = (sequence.shared().read(layer).shape(), sequence.cache(layer));
        let (k, v) = rows(shape, layer as u64, cache.seq_len()..cache.seq_len() + n);
        sequence.append(layer, &k, &v, n).unwrap();
    }
}

fn step(sequence: &mut Sequence<'_>, n: usize) {
    sequence.reserve(n).unwrap();
    write(sequence, n);
    sequence.commit(n).unwrap();
}

fn answer(sequence: &Sequence<'_>) -> Vec<Vec<u32>> {
    fn of<E: Element>(store: &AnyPagedKvStore, sequence: &Sequence<'_>, layer: usize) -> Vec<u32> {
        let window = sequence.shared().window_of(layer);
        ask(store.as_store::<E>().unwrap(), sequence.cache(layer), window, 1)
    }
    let answer = |layer: usize| {
        let guard = sequence.shared().read(layer);
        match guard.element() {
            "f32" => of::<f32>(&guard, sequence, layer),
            "f16" => of::<f16>(&guard, sequence, layer),
            "bf16" => of::<bf16>(&guard, sequence, layer),
            "int8" => of::<Int8>(&guard, sequence, layer),
            _ => of::<Int4>(&guard, sequence, layer),
        }
    };
    (0..7).map(answer).collect()
}

fn check(shared: &SharedPagedKv<Mixed>, sequences: &[&Sequence<'_>]) {
    let holders = sequences.iter().flat_map(|sequence| sequence.holders());
    assert_eq!(shared.check_invariants(holders), Ok(()));
}

const HERE: [usize; 7] = [16, 16, 16, 1, 24, 16, 64];
const THERE: [usize; 7] = [16, 32, 8, 1, 24, 7, 16];

/// Saved in the middle of a step, restored between others, where classes have another order.
#[test]
fn a_request_comes_back_in_other_layers() {
    let here = pool(HERE, [40; 7]);
    let mut sequence = Sequence::new(&here);
    for _ in 0..13 {
        step(&mut sequence, 19);
    }
    sequence.reserve(30).unwrap();
    write(&mut sequence, 30);
    let tokens: Vec<u32> = (0..13 * 19).collect();
    let label = Label::new().tokens(&tokens).salt(b"a");
    let mut bytes = Vec::new();
    sequence.save(&label, &mut bytes).unwrap();
    sequence.abandon();
    let mut again = Vec::new();
    sequence.save(&label, &mut again).unwrap();
    assert!(bytes == again, "what was not committed is not saved");

    for sizes in [HERE, THERE] {
        let there = pool(sizes, [40, 90, 60, 1, 40, 80, 41]);
        let classes = |shared: &SharedPagedKv<Mixed>| [0, 1, 2].map(|layer| shared.class_of(layer));
        assert_eq!((classes(&here), classes(&there)), ([0, 1, 1], [0, 1, 2]));
        let mut others: Vec<_> = (0..3).map(|_| Sequence::new(&there)).collect();
        for turn in 0..9 {
            step(&mut others[turn % 3], 11);
        }
        others.remove(1);
        let mut back = Sequence::new(&there);
        let saved = Saved::open(&bytes[..]).unwrap();
        let owners: Vec<_> = saved.layers().iter().map(|layer| layer.owner()).collect();
        assert_eq!(owners, [0, 1, 2, 1, 4, 5, 6]);
        back.restore(saved).unwrap();
        assert_eq!(back.len(), 13 * 19);
        check(&there, &[&others[0], &others[1], &back]);
        if sizes == HERE {
            let mut again = Vec::new();
            back.save(&label, &mut again).unwrap();
            assert!(bytes == again, "the same rows are the same bytes");
        }
        for n in [0, 1, 50] {
            step(&mut sequence, n);
            step(&mut back, n);
            assert_eq!(answer(&back), answer(&sequence), "{sizes:?}, {n} behind");
        }
        let child = back.fork().unwrap();
        step(&mut back, 1);
        check(&there, &[&others[0], &others[1], &back, &child]);
        drop((back, child, others));
        check(&there, &[]);
        sequence.truncate(13 * 19).unwrap();
    }
}

#[test]
fn an_empty_request_comes_back() {
    let here = pool(HERE, [4; 7]);
    let mut bytes = Vec::new();
    Sequence::new(&here).save(&Label::new(), &mut bytes).unwrap();
    let mut back = Sequence::new(&here);
    back.restore(Saved::open(&bytes[..]).unwrap()).unwrap();
    assert!(back.is_empty());
    step(&mut back, 2);
    check(&here, &[&back]);
}

/// All layers or none: whatever is wrong, and wherever the bytes end or are damaged.
#[test]
fn nothing_comes_back_or_all_of_it() {
    let here = pool(HERE, [20; 7]);
    let mut sequence = Sequence::new(&here);
    for _ in 0..3 {
        step(&mut sequence, 21);
    }
    let mut bytes = Vec::new();
    sequence.save(&Label::new(), &mut bytes).unwrap();
    let refused = |there: &SharedPagedKv<Mixed>, bytes: &[u8]| {
        let mut back = Sequence::new(there);
        let error = Saved::open(bytes).and_then(|saved| back.restore(saved)).unwrap_err();
        assert!(back.is_empty());
        check(there, &[]);
        // It can begin anew.
        step(&mut back, 1);
        error
    };
    // The sixth layer has a block too few.
    let short = pool(HERE, [20, 20, 20, 20, 20, 3, 20]);
    let error = refused(&short, &bytes);
    let WireError::Kv(PagedKvError::Exhausted(exhausted)) = error else { panic!("{error:?}") };
    assert_eq!((exhausted.need, exhausted.free), (4, 3));

    let there = pool(THERE, [40; 7]);
    for at in (0..bytes.len()).step_by(97) {
        let error = refused(&there, &bytes[..at]);
        assert!(matches!(error, WireError::Truncated { .. }), "{at}: {error:?}");
        let mut wrong = bytes.clone();
        wrong[at] ^= 4;
        refused(&there, &wrong);
    }
    let mut full = Sequence::new(&there);
    full.restore(Saved::open(&bytes[..]).unwrap()).unwrap();
    let again = full.restore(Saved::open(&bytes[..]).unwrap());
    assert!(matches!(again, Err(WireError::Kv(PagedKvError::NotEmpty { len: 63, .. }))));
    assert_eq!(full.len(), 63);
    let mut room = Sequence::new(&there);
    room.reserve(1).unwrap();
    let refused = room.restore(Saved::open(&bytes[..]).unwrap());
    assert!(matches!(refused, Err(WireError::Kv(PagedKvError::NotEmpty { len: 0, .. }))));
}

#[test]
fn layers_have_to_be_the_same() {
    let spec = LayerSpec::new(KvShape::square(16, 1, 4).unwrap(), 4);
    let layers = |specs: &[LayerSpec]| SharedPagedKv::<Mixed>::with_layers(specs).unwrap();
    let here = layers(&[spec, LayerSpec::same_as(0), spec.element::<Int8>()]);
    let mut bytes = Vec::new();
    Sequence::new(&here).save(&Label::new(), &mut bytes).unwrap();
    let restore = |specs: &[LayerSpec]| {
        let there = layers(specs);
        Sequence::new(&there).restore(Saved::open(&bytes[..]).unwrap())
    };
    assert_eq!(restore(&[spec; 2]), Err(WireError::Layers { need: 2, have: 3 }));
    assert_eq!(restore(&[spec; 3]), Err(WireError::Owner { layer: 1, need: 1, have: 0 }));
    let (same, element) = (LayerSpec::same_as(0), "f32");
    let error = WireError::Element { layer: 2, need: element, have: "int8" };
    assert_eq!(restore(&[spec, same, spec]), Err(error));
    let wide = LayerSpec::new(KvShape::square(16, 1, 5).unwrap(), 4);
    let error = restore(&[wide, same, spec.element::<Int8>()]);
    assert!(matches!(error, Err(WireError::Dims { layer: 0, .. })), "{error:?}");
    let small = LayerSpec::new(KvShape::square(3, 1, 4).unwrap(), 1);
    assert_eq!(restore(&[small, same, small.element::<Int8>()]), Ok(()));
}

/// One layer of many, and many of one stored type.
#[test]
fn a_request_of_one_type_and_a_bare_sequence_are_alike() {
    let shared = SharedPagedKv::new(1, 16, 8, 2, 5);
    let mut sequence = PagedSequence::new(&shared);
    sequence.reserve(20).unwrap();
    let (k, v) = rows(KvShape::square(16, 2, 5).unwrap(), 0, 0..20);
    sequence.append(0, &k, &v, 20).unwrap();
    sequence.commit(20).unwrap();
    let (mut of_all, mut of_one) = (Vec::new(), Vec::new());
    sequence.save(&Label::new(), &mut of_all).unwrap();
    sequence.cache(0).save(&shared.read(0), &Label::new(), &mut of_one).unwrap();
    assert_eq!(of_all, of_one);
}

/// A layer that reads another's rows names one before it that has some, and several layers are not one.
#[test]
fn an_owner_has_rows() {
    let shared = pool([16; 7], [4; 7]);
    let mut bytes = Vec::new();
    PagedSequence::new(&shared).save(&Label::new(), &mut bytes).unwrap();
    let owner = 56 + 3 * 88 + 8;
    assert_eq!(bytes[owner..][..8], 1_u64.to_le_bytes());
    for have in [3, 4, 7, u64::MAX] {
        let mut wrong = bytes.clone();
        wrong[owner..][..8].copy_from_slice(&have.to_le_bytes());
        reseal(&mut wrong);
        let refused = WireError::Field { what: "owner", need: 3, have };
        assert_eq!(Saved::open(&wrong[..]).unwrap_err(), refused);
    }
    // The next one reads the one that reads.
    let mut wrong = bytes.clone();
    let next = &mut wrong[56 + 4 * 88..][..88];
    next.fill(0);
    (next[0], next[8]) = (2, 3);
    reseal(&mut wrong);
    let refused = WireError::Field { what: "owner", need: 4, have: 3 };
    assert_eq!(Saved::open(&wrong[..]).unwrap_err(), refused);

    let mut store = PagedKvStore::new(16, 4, 1, 6);
    let mut alone = PagedKvCache::new();
    let refused = alone.restore(&mut store, Saved::open(&bytes[..]).unwrap());
    assert_eq!(refused, Err(WireError::Layers { need: 1, have: 7 }));
    assert_eq!((alone.store_id(), store.free_block_count()), (None, 4));
}
