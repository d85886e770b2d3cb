//! The bytes themselves: fixed for ever, and refused when they are not what was written.

use paged_kv::cache::{KvWindow, PagedKvCache, PagedKvStore};
use paged_kv::internal::saved_bytes::reseal;
use paged_kv::wire::{Label, Part, Saved, WireError};
use paged_kv::{Element, Int8, KvDims, KvShape, ShapeError, bf16, every_type};

use super::{rows, shape};

// Written by a program in another language from the drawing alone.
/// One position in blocks of two, under a window, with a token id and a salt of one byte.
const INT8: [u8; 185] = [
    0x89, 0x50, 0x4b, 0x56, 0x0d, 0x0a, 0x1a, 0x0a, 0x01, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x99, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x64, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x04, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x1c, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x04, 0x03, 0x02, 0x01, 0x73, 0x00, 0x11, 0x2a, 0xa0, 0x7f, 0xc0, 0x01, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x7f, 0x81, 0x00, 0x00, 0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x40, 0x00, 0x00, 0x00, 0x00, 0x9f, 0x65, 0x38, 0x05,
];
/// Three positions in blocks of two.
const BF16: [u8; 204] = [
    0x89, 0x50, 0x4b, 0x56, 0x0d, 0x0a, 0x1a, 0x0a, 0x01, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x94, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x18, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x55, 0x14, 0x26, 0xf8, 0x80, 0x3f, 0x00, 0x40, 0x80, 0xbf, 0x00, 0xc0, 0x40, 0x40, 0x00, 0x00,
    0x40, 0xc0, 0x00, 0x00, 0x00, 0x3f, 0x00, 0x41, 0x80, 0xbf, 0x80, 0x41, 0xd5, 0xc7, 0xac, 0x4c,
    0x80, 0x40, 0xa0, 0x40, 0x00, 0x00, 0x00, 0x00, 0xc0, 0x40, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0xe0, 0x40, 0x00, 0x00, 0x10, 0x41, 0x00, 0x00, 0xb2, 0x60, 0x3c, 0x63,
];

fn tiny() -> KvShape {
    KvShape::new(KvDims { block_size: 2, n_kv_heads: 1, k_width: 3, v_width: 2 }).unwrap()
}

#[test]
fn the_bytes_are_these() {
    let mut store = PagedKvStore::<Int8>::with_shape(tiny(), 1).unwrap();
    let window = KvWindow::last(100).and_first(4);
    let mut cache = PagedKvCache::with_window(window);
    cache.push(&mut store, &[127.0, -64.0, 1.0], &[254.0, -254.0]).unwrap();
    let mut bytes = Vec::new();
    cache.save(&store, &Label::new().tokens(&[0x0102_0304]).salt(b"s"), &mut bytes).unwrap();
    assert_eq!(bytes, INT8);
    let mut back = PagedKvCache::with_window(window);
    cache.release(&mut store).unwrap();
    back.restore(&mut store, Saved::open(&INT8[..]).unwrap()).unwrap();
    let (mut k, mut v) = ([0.0; 3], [0.0; 2]);
    back.copy_k_row(&store, 0, 0, &mut k).unwrap();
    back.copy_v_row(&store, 0, 0, &mut v).unwrap();
    assert_eq!((k, v), ([127.0, -64.0, 1.0], [254.0, -254.0]));

    let mut store = PagedKvStore::<bf16>::with_shape(tiny(), 2).unwrap();
    let mut cache = PagedKvCache::new();
    let k = [1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 4.0, 5.0, 6.0];
    cache.append(&mut store, &k, &[0.5, -1.0, 8.0, 16.0, 7.0, 9.0], 3).unwrap();
    let mut bytes = Vec::new();
    cache.save(&store, &Label::new(), &mut bytes).unwrap();
    assert_eq!(bytes, BF16);
}

/// Three pages of five positions, and where the first begins and how long they are.
struct File {
    bytes: Vec<u8>,
    header: usize,
    page: usize,
}

fn file<E: Element>(label: &Label<'_>) -> File {
    let mut store = PagedKvStore::<E>::with_shape(shape(2), 3).unwrap();
    let mut cache = PagedKvCache::new();
    let (k, v) = rows(store.shape(), 5, 0..5);
    cache.append(&mut store, &k, &v, 5).unwrap();
    let mut bytes = Vec::new();
    cache.save(&store, label, &mut bytes).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (header, page) = (number(16), number(56 + 80));
    assert_eq!(bytes.len(), header + 3 * (page + 4));
    File { bytes, header, page }
}

const LABEL: Label<'static> = Label::new().tokens(&[1, 2, 3, 4, 5]).salt(b"tenant");

/// Restores into a store that somebody else uses; what was not restored has changed nothing.
fn restore<E: Element>(bytes: &[u8]) -> Result<usize, WireError> {
    let mut store = PagedKvStore::<E>::with_shape(shape(2), 9).unwrap();
    let (mut other, mut back) = (PagedKvCache::new(), PagedKvCache::new());
    let (k, v) = rows(store.shape(), 6, 0..3);
    other.append(&mut store, &k, &v, 3).unwrap();
    let read = Saved::open(bytes).and_then(|saved| back.restore(&mut store, saved));
    if read.is_err() {
        assert_eq!((back.seq_len(), back.block_table().len(), back.store_id()), (0, 0, None));
        assert_eq!(store.free_block_count(), 7);
    }
    assert_eq!(store.check_invariants([other.block_table(), back.block_table()]), Ok(()));
    read.map(|()| back.seq_len())
}

/// Every byte, in its lowest and highest bit and in all of them.
fn no_byte_may_be_another<E: Element>() {
    let File { bytes, .. } = file::<E>(&LABEL);
    assert_eq!(restore::<E>(&bytes), Ok(5));
    let mut resealed = bytes.clone();
    reseal(&mut resealed);
    assert_eq!(resealed, bytes, "checksums are what the drawing says");
    for at in 0..bytes.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut wrong = bytes.clone();
            wrong[at] ^= flip;
            let error = restore::<E>(&wrong).expect_err("a byte is another");
            let found = match error {
                WireError::Magic { .. } => at < 8,
                WireError::Version { .. } => (8..10).contains(&at),
                WireError::Layout { .. } => (10..12).contains(&at),
                // A length: what follows from the others is not what is said.
                WireError::Field { what: "header bytes", .. } => (16..56).contains(&at),
                WireError::Checksum { need, have, .. } => need != have && at >= 12,
                _ => false,
            };
            assert!(found, "byte {at} ^ {flip:02x}: {error:?}");
        }
    }
}

fn no_byte_may_be_missing<E: Element>() {
    let File { bytes, header, page } = file::<E>(&LABEL);
    for end in 0..bytes.len() {
        let ends = [56, header, header + page + 4, header + 2 * (page + 4), bytes.len()];
        let need = ends.into_iter().find(|part| end < *part).unwrap() as u64;
        let error = WireError::Truncated { need, have: end as u64 };
        assert_eq!(restore::<E>(&bytes[..end]), Err(error), "{end} bytes");
    }
}

every_type! { no_byte_may_be_another, no_byte_may_be_missing }

/// Every number of the header set to what it can hold at most and to its neighbours, its checksums made
/// right: it is refused, or it changes nothing that was saved.
#[test]
fn no_number_may_be_anything() {
    let numbers: Vec<usize> = (16..56).chain(64..144).step_by(8).collect();
    assert_eq!(numbers.len(), 15);
    for label in [LABEL, Label::new()] {
        let File { bytes, .. } = file::<f32>(&label);
        for &at in &numbers {
            for value in
                [0, 1, 2, 3, 4, 6, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX - 1, u64::MAX]
            {
                let mut wrong = bytes.clone();
                wrong[at..at + 8].copy_from_slice(&value.to_le_bytes());
                if wrong == bytes {
                    continue;
                }
                reseal(&mut wrong);
                let read = restore::<f32>(&wrong);
                // A window that has passed nothing says nothing, if a `usize` holds it; and with no
                // token ids to them, any positions that the pages hold are as good as five.
                let harmless = at == 104 && usize::try_from(value).is_ok()
                    || (at == 24 && value <= 6 && label != LABEL);
                assert_eq!(read.is_ok(), harmless, "{at}: {value}: {read:?}");
            }
        }
    }
}

/// What the number is called that was refused.
#[test]
fn errors_name_what_was_found() {
    let File { bytes, header, page } = file::<f32>(&LABEL);
    let with = |at: usize, value: &[u8]| {
        let mut wrong = bytes.clone();
        wrong[at..at + value.len()].copy_from_slice(value);
        reseal(&mut wrong);
        restore::<f32>(&wrong).unwrap_err()
    };
    let number = |at, value: u64| with(at, &value.to_le_bytes());
    let field = |what, need, have| WireError::Field { what, need, have };
    assert_eq!(with(8, &[2, 0]), WireError::Version { need: 1, have: 2 });
    assert_eq!(with(10, &[0, 0]), WireError::Layout { need: 1, have: 0 });
    assert_eq!(with(12, &[0, 0, 1, 0]), field("reserved", 0, 65536));
    assert_eq!(number(24, u64::MAX), field("positions", usize::MAX as u64 / 4, u64::MAX));
    assert_eq!(number(24, 6), WireError::Tokens { need: 6, have: 5 });
    let most = usize::MAX / 4;
    assert_eq!(number(24, most as u64), WireError::Tokens { need: most, have: 5 });
    assert_eq!(number(40, u64::MAX), field("header bytes", u64::MAX, header as u64));
    assert_eq!(with(56, &[0]), WireError::Unknown { what: "kind of layer", have: 0 });
    assert_eq!(with(56, &[3]), WireError::Unknown { what: "kind of layer", have: 3 });
    assert_eq!(with(57, &[0]), WireError::Unknown { what: "stored type", have: 0 });
    assert_eq!(with(57, &[9]), WireError::Unknown { what: "stored type", have: 9 });
    assert_eq!(with(57, &[4]), WireError::Element { layer: 0, need: "f32", have: "int8" });
    assert_eq!(with(60, &[1]), field("reserved", 0, 1));
    assert_eq!(number(64, 1), field("owner", 0, 1));
    let zero = ShapeError::Zero { what: "block_size" };
    assert_eq!(number(72, 0), WireError::Shape { layer: 0, error: zero });
    assert_eq!(
        number(80, 1 << (usize::BITS - 4)),
        WireError::Shape { layer: 0, error: ShapeError::Overflow }
    );
    let have = KvDims { k_width: 8, ..shape(2).dims() };
    let dims = WireError::Dims { layer: 0, need: shape(2).dims(), have };
    assert_eq!(number(88, 8), dims);
    assert_eq!(
        dims.to_string(),
        "layer 0 was saved with 2 KV heads of 8 and 7, its store has 2 of 9 and 7"
    );
    assert_eq!(number(112, 5), field("first positions", 0, 5));
    assert_eq!(number(128, 1), field("hole", 0, 1));
    assert_eq!(number(128, 3), field("hole", 2, 3));
    assert_eq!(number(136, 0), field("page bytes", page as u64, 0));
    let part = Part::Page { layer: 0, index: 1 };
    assert_eq!(part.to_string(), "page 1 of layer 0");
}

/// A page of another place, or of another sequence with the same rows, is no page of this one.
#[test]
fn pages_keep_their_places() {
    let File { bytes, header, page } = file::<f32>(&LABEL);
    let mut swapped = bytes.clone();
    let (one, rest) = swapped[header..].split_at_mut(page + 4);
    one.swap_with_slice(&mut rest[..page + 4]);
    let first = Part::Page { layer: 0, index: 0 };
    let found = |error| matches!(error, Err(WireError::Checksum { part, .. }) if part == first);
    assert!(found(restore::<f32>(&swapped)));
    let mut other = file::<f32>(&Label::new().salt(b"other")).bytes;
    let pages = other.len() - 3 * (page + 4);
    other[pages..].copy_from_slice(&bytes[header..]);
    assert!(found(restore::<f32>(&other)));
}

#[test]
fn files_may_follow_each_other() {
    let one = file::<f32>(&LABEL).bytes;
    let both = [&one[..], &INT8[..]].concat();
    let mut source = &both[..];
    let mut store = PagedKvStore::<f32>::with_shape(shape(2), 3).unwrap();
    PagedKvCache::new().restore(&mut store, Saved::open(&mut source).unwrap()).unwrap();
    assert_eq!(source, INT8);
}
