//! Every public error, variant by variant: what it says, and that it says all that it carries.
//!
//! Here and not in the rooms that the others live in, so that they are read one below the other.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Display;

use super::*;
use crate::batch::BatchError;
use crate::prefix::{
    HashKey, InsertError, Once, PinError, PrefixCache, PrefixFault, PrefixReport, Priority,
    RemoveError,
};
use crate::shape::{KvDims, KvShape};
use crate::wire::{Part, WireError};

/// What an error carries, and how a text can say it.
trait Carried {
    fn is_said(&self, text: &str) -> bool;
}

macro_rules! said_as_itself {
    ($($of:ty),+) => {
        $(impl Carried for $of {
            fn is_said(&self, text: &str) -> bool {
                text.contains(&self.to_string())
            }
        })+
    };
}

said_as_itself!(usize, &str, BlockId, StoreId, PageGroup, Side, Part);
said_as_itself!(ShapeError, GroupError, PagedKvError, AttentionError);
said_as_itself!(KvPoolExhausted, PagedStoreExhausted);

/// What a literal is here, whatever the field is: a count, or a checksum.
impl Carried for i32 {
    fn is_said(&self, text: &str) -> bool {
        text.contains(&self.to_string()) || text.contains(&format!("{self:08x}"))
    }
}

impl Carried for f64 {
    fn is_said(&self, text: &str) -> bool {
        text.contains(&format!("{self:e}"))
    }
}

impl Carried for [u8; 8] {
    fn is_said(&self, text: &str) -> bool {
        self.iter().all(|byte| text.contains(&format!("{byte:02x}")))
    }
}

/// Without the block size, which may differ where sizes are told of.
impl Carried for KvDims {
    fn is_said(&self, text: &str) -> bool {
        [self.n_kv_heads, self.k_width, self.v_width].iter().all(|size| size.is_said(text))
    }
}

impl Carried for KvShape {
    fn is_said(&self, text: &str) -> bool {
        self.block_size().is_said(text) && self.dims().is_said(text)
    }
}

/// One error, what it should say, and what it carries.
fn check(error: &dyn Display, expected: &str, carried: &[&dyn Carried]) {
    let text = error.to_string();
    assert_eq!(text, expected);
    assert!(!text.is_empty() && text.trim() == text, "`{text}`");
    assert!(!text.contains(['{', '}']), "for those who know the code: {text}");
    for (place, carried) in carried.iter().enumerate() {
        assert!(carried.is_said(&text), "field {place} is not said: {text}");
    }
}

/// Whatever is inside prints as the error itself, and a chain would say it twice.
fn has_no_source(error: &dyn Error) {
    assert!(error.source().is_none(), "{error}");
}

/// Checks each variant, and gives all of them. One that is not listed does not compile, nor does a
/// field. Numbers have three digits and differ, so that each can be looked for.
macro_rules! says {
    ($error:ident: $($variant:ident { $($field:tt: $value:expr),* } => $text:expr,)+) => {{
        let _all = |error: &$error| match error {
            $($error::$variant { $($field: _),* } => (),)+
        };
        $(check(&$error::$variant { $($field: $value),* }, &$text.to_owned(), &[$(&$value),*]);)+
        Vec::from([$($error::$variant { $($field: $value),* }),+])
    }};
}

const LACK: PagedStoreExhausted = PagedStoreExhausted { need: 311, free: 312 };
const SHAPE: ShapeError = ShapeError::Zero { what: "k_width" };
const GROUP: PageGroup = PageGroup::new(341, 7, 0);
const BLOCK: BlockId = BlockId::from_raw(351);

fn all_without_source<E: Error>(errors: &[E]) {
    errors.iter().for_each(|error| has_no_source(error));
}

#[test]
fn short_of_blocks() {
    let KvPoolExhausted { need, free } = KvPoolExhausted { need: 321, free: 322 };
    let pool = KvPoolExhausted { need, free };
    check(&pool, "KV pool exhausted: 321 blocks needed, 322 free", &[&need, &free]);
    let PagedStoreExhausted { need, free } = LACK;
    check(&LACK, "paged KV store exhausted: 311 blocks needed, 312 free", &[&need, &free]);
    has_no_source(&pool);
    has_no_source(&LACK);
}

#[test]
fn shapes() {
    all_without_source(&says! { ShapeError:
        Zero { what: "k_width" } => "k_width must be at least 1",
        TooLarge { what: "block_size", have: 101, most: 102 } =>
            "block_size is 101, the most is 102",
        Overflow {} => "the bytes of this shape exceed what one allocation can hold",
        HeadsNotDivisible { n_heads: 103, n_kv_heads: 104 } =>
            "103 query heads cannot be divided over 104 KV heads",
        OutOfMemory { bytes: 105 } => "105 bytes could not be allocated",
        MemoryTooSmall { blocks: 106, need: 107, have: 108 } =>
            "106 blocks need 107 bytes of memory, got 108",
    });
    let memory = alloc::vec![0_u8; 3].into();
    let refused = crate::storage::memory::RefusedMemory { error: SHAPE, memory };
    check(&refused, "k_width must be at least 1", &[&SHAPE]);
    has_no_source(&refused);
}

#[test]
fn sequences() {
    let [here, there] = [StoreId::fresh(), StoreId::fresh()];
    let stale = GroupError::Stale { group: GROUP };
    all_without_source(&says! { PagedKvError:
        Exhausted { 0: LACK } => "paged KV store exhausted: 311 blocks needed, 312 free",
        WrongStore { need: here, have: there } =>
            format!("this sequence lives in store {here}, not in store {there}"),
        RowLength { side: Side::Key, need: 201, have: 202 } => "key rows need 201 numbers, got 202",
        BlockOutOfRange { block: BLOCK, total: 203 } =>
            "block 351 is out of range, the store has 203",
        BlockFree { block: BLOCK } => "block 351 is free",
        BlockCount { need: 204, have: 205 } =>
            "204 blocks are needed for that many positions, got 205",
        BlockTwice { block: BLOCK } => "block 351 is named twice",
        TooManyHolders { block: BLOCK } => "block 351 has too many holders",
        NotEmpty { len: 206, blocks: 207 } =>
            "the sequence must be empty, it holds 206 positions in 207 blocks",
        PositionOutOfRange { position: 208, len: 209 } =>
            "position 208 is out of range, the sequence holds 209",
        PositionFreed { position: 210, oldest: 211 } =>
            "position 210 was given back, the oldest one kept is 211",
        HeadOutOfRange { head: 212, n_kv_heads: 213 } =>
            "KV head 212 is out of range, there are 213",
        TooLong {} => "more positions than an index can count",
        NotReserved { need: 214, have: 215 } =>
            "214 positions are to be written, room is reserved for 215",
        LayerBehind { layer: 216, need: 217, have: 218 } =>
            "layer 216 has 218 positions, 217 are to be committed",
        LayerReads { layer: 219, owner: 220 } =>
            "layer 219 reads the rows of layer 220 and has none of its own",
        PathOrder { index: 221 } => "entry 221 of the path is not above the one before it",
        Group { 0: stale } => "page group 341v7 is stale, its last holder has released it",
    });
    all_without_source(&says! { GroupError:
        Stale { group: GROUP } => "page group 341v7 is stale, its last holder has released it",
        WrongPool { group: GROUP } => "page group 341v7 belongs to another pool",
        TooManyHolders { group: GROUP } => "page group 341v7 has too many holders",
    });
}

#[test]
fn contiguous_caches() {
    let lack = KvPoolExhausted { need: 321, free: 322 };
    all_without_source(&says! { KvCacheError:
        Exhausted { 0: lack } => "KV pool exhausted: 321 blocks needed, 322 free",
        Shape { 0: SHAPE } => "k_width must be at least 1",
        RowLength { side: Side::Value, need: 201, have: 202 } =>
            "value rows need 201 numbers, got 202",
        PositionOutOfRange { position: 203, len: 204 } =>
            "position 203 is out of range, the cache holds 204",
        HeadOutOfRange { head: 205, n_kv_heads: 206 } =>
            "KV head 205 is out of range, there are 206",
        TooLong {} => "more positions than an index can count",
    });
}

#[test]
fn attention() {
    let [here, there] = [StoreId::fresh(), StoreId::fresh()];
    all_without_source(&says! { AttentionError:
        Shape { 0: SHAPE } => "k_width must be at least 1",
        QueryLength { row: 401, have: 402 } =>
            "query rows are 401 numbers long, 402 is no multiple of that",
        QueryRows { need: 403, have: 404 } =>
            "the query holds 404 rows of that many heads, 403 were promised",
        TooManyQueryRows { rows: 405, len: 406 } =>
            "405 query rows, and only 406 positions are cached: append first, then attend",
        WrongStore { need: here, have: there } =>
            format!("this sequence lives in store {here}, not in store {there}"),
        PositionFreed { position: 407, oldest: 408 } =>
            "position 407 is looked at and was given back, the oldest one kept is 408",
        OutLength { need: 409, have: 410 } => "the output needs 409 numbers, got 410",
        LseLength { need: 411, have: 412 } => "the LSE output needs 411 numbers, got 412",
        ScratchLength { need: 413, have: 414 } => "the scratch needs 413 numbers, got 414",
        PerHeadLength { what: "sinks", need: 415, have: 416 } =>
            "sinks needs one number for each of 415 query heads, got 416",
        Trees { need: 417, have: 418 } => "each of 417 sequences needs a tree mask, got 418",
        TreeRows { sequence: 419, most: 420, have: 421 } =>
            "the tree of sequence 419 has 421 rows, and 420 query rows are there",
        TreeLength { need: 422, have: 423 } => "the tree mask needs 422 words, got 423",
        TreeBit { row: 424, column: 425 } =>
            "row 424 of a tree sees itself and none behind it, which bit 425 denies",
        BadOption { what: "soft_cap", have: -1.5 } => "soft_cap cannot be -1.5e0",
    });
}

/// Sizes that all differ, from `first` on.
fn dims(first: usize) -> KvDims {
    KvDims { block_size: first, n_kv_heads: first + 1, k_width: first + 2, v_width: first + 3 }
}

#[test]
fn batches() {
    let [here, there] = [StoreId::fresh(), StoreId::fresh()];
    let [planned, store] = [501, 505].map(|first| KvShape::new(dims(first)).unwrap());
    let option = AttentionError::OutLength { need: 409, have: 410 };
    all_without_source(&says! { BatchError:
        TooLarge { what: "the output" } =>
            "the output: there are more numbers than memory can hold",
        NoSequence { sequence: 510, sequences: 511 } =>
            "a shared prefix names sequence 510 of a batch that has 511",
        SharedTwice { sequence: 512 } => "shared prefixes name sequence 512 twice",
        SharedTooLong { sequence: 513, positions: 514, len: 515 } =>
            "sequence 513 has 515 positions and cannot share 514 of them",
        Shape { need: planned, have: store } =>
            "the plan is for blocks of 501 and 502 KV heads of 503 and 504, the store has blocks of \
             505 and 506 of 507 and 508",
        Sequences { need: 516, have: 517 } => "the plan is for 516 sequences, got 517",
        Length { sequence: 518, need: 519, have: 520 } =>
            "the plan is for 519 positions of sequence 518, it has 520",
        WrongStore { sequence: 521, need: here, have: there } =>
            format!("sequence 521 lives in store {here}, not in store {there}"),
        PositionFreed { sequence: 522, position: 523, oldest: 524 } =>
            "position 523 of sequence 522 is looked at and was given back, the oldest one kept is \
             524",
        TooManyQueryRows { sequence: 525, rows: 526, len: 527 } =>
            "sequence 525 has 526 query rows, and only 527 positions are cached",
        NotShared { sequence: 528, with: 529, block: 530 } =>
            "sequences 529 and 528 do not share entry 530 of their block tables",
        QueryLength { need: 531, have: 532 } => "the query needs 531 numbers, got 532",
        Attention { 0: option } => "the output needs 409 numbers, got 410",
    });
}

#[test]
fn saved_sequences() {
    // What a sink or a source fails with is the caller's own.
    type Wire = WireError<ShapeError>;
    let page = Part::Page { layer: 609, index: 610 };
    let [store, saved] = [dims(631), dims(641)];
    all_without_source(&says! { Wire:
        Stream { 0: SHAPE } => "k_width must be at least 1",
        Truncated { need: 601, have: 602 } =>
            "the saved sequence ends after 602 bytes, 601 are needed",
        Magic { have: *b"%PDF-1.7" } =>
            "this is no saved sequence, it begins with [25, 50, 44, 46, 2d, 31, 2e, 37]",
        Version { need: 603, have: 604 } =>
            "saved in version 604 of the format, version 603 is read here",
        Layout { need: 605, have: 606 } =>
            "saved in page layout 606, layout 605 is read here",
        Checksum { part: page, need: 607, have: 608 } =>
            "page 610 of layer 609 is damaged: its checksum is 0000025f, it says 00000260",
        Field { what: "pages", need: 611, have: 612 } =>
            "the field `pages` should be 611 and is 612",
        Unknown { what: "stored type", have: 613 } => "unknown stored type: 613",
        Shape { layer: 614, error: SHAPE } => "layer 614: k_width must be at least 1",
        Tokens { need: 615, have: 616 } => "616 token ids for 615 positions",
        Layers { need: 617, have: 618 } => "618 layers were saved, there are 617",
        Owner { layer: 619, need: 620, have: 621 } =>
            "layer 619 read the rows of layer 621, it reads those of 620",
        Element { layer: 622, need: "f16", have: "int8" } =>
            "layer 622 was saved as int8, its store holds f16",
        Dims { layer: 623, need: store, have: saved } =>
            "layer 623 was saved with 642 KV heads of 643 and 644, its store has 632 of 633 and 634",
        PositionFreed { layer: 624, position: 625, oldest: 626 } =>
            "position 625 of layer 624 was not saved, the oldest one behind it is 626",
        Kv { 0: PagedKvError::TooLong } => "more positions than an index can count",
        OutOfMemory { bytes: 627 } => "627 bytes could not be allocated",
    });
    let _both = says! { Part:
        Header {} => "the header",
        Page { layer: 628, index: 629 } => "page 629 of layer 628",
    };
}

#[test]
fn prefix_caches() {
    all_without_source(&says! { InsertError:
        GroupCount { need: 701, have: 702 } => "the tokens fill 701 blocks, got 702 page groups",
        GroupCached { group: GROUP } => "page group 341v7 is cached already, for other tokens",
        Group { 0: GroupError::WrongPool { group: GROUP } } =>
            "page group 341v7 belongs to another pool",
    });
    all_without_source(&says! { PinError:
        TooShort { need: 703, have: 704 } => "a pin needs 703 tokens, one block, got 704",
        NotCached { need: 705, have: 706 } =>
            "705 blocks are to be pinned, 706 of them are cached",
        OverBudget { need: 707, left: 708 } =>
            "707 more blocks are to be pinned, the budget has 708 left",
        TooMany {} => "too many pins are out",
        UnknownPin {} => "the pin is of another cache, or from before it was cleared",
    });
    all_without_source(&says! { RemoveError:
        Pinned { blocks: 709 } => "709 blocks of the salt are pinned",
    });
    let _all = says! { PrefixFault:
        Holders { group: GROUP, counted: 711, found: 712 } =>
            "page group 341v7 has a holder count of 711, found 712",
        Lost { group: GROUP } => "the block in page group 341v7 is not found by its tokens",
        Unlisted { group: GROUP } => "page group 341v7 is cached and not listed for its block",
        AheadOfParent { group: GROUP } =>
            "the block in page group 341v7 counts for more than the one before it",
        Leaf { group: GROUP } => "the block in page group 341v7 is listed as one to go, wrongly",
        Order { group: GROUP } =>
            "the block in page group 341v7 is out of order among its siblings",
        Count { what: "pinned blocks", need: 713, have: 714 } =>
            "there should be 713 pinned blocks, there are 714",
    };
    let mut cache = PrefixCache::new(&Once, 1, HashKey::new([1; 16]));
    cache.insert(b"", &[5], &[GROUP], Priority::NORMAL).unwrap();
    let report: PrefixReport = cache.check_invariants([&[GROUP; 2][..]]).unwrap_err();
    check(&report, "page group 341v7 has a holder count of 1, found 3", &[&GROUP]);
    has_no_source(&report);
}

#[cfg(all(any(feature = "std", feature = "spin"), target_has_atomic = "ptr"))]
#[test]
fn layers() {
    use crate::share::spec::LayerError;
    all_without_source(&says! { LayerError:
        Shape { layer: 801, error: SHAPE } => "layer 801: k_width must be at least 1",
        Element { layer: 802, need: "f16", have: "int8" } =>
            "layer 802 was to store int8, all layers store f16",
        SameAs { layer: 803, other: 804 } =>
            "layer 803 cannot read layer 804, which has no store before it",
    });
}

#[test]
fn recounts() {
    let miscounts = says! { Miscount:
        Holders { block: BLOCK, counted: 901, found: 902 } =>
            "block 351 has a holder count of 901, found 902",
        FreeList { free: 903, found: 904 } =>
            "903 blocks are counted free, 904 are on the free list",
        NoBlock { block: BLOCK, total: 905 } => "block 351 is named, and there are 905",
        NoLayer { layer: 906, layers: 907 } => "layer 906 is named, and there are 907",
        GroupHolders { group: GROUP, counted: 908, found: 909 } =>
            "page group 341v7 has a holder count of 908, found 909",
        NoGroup { group: GROUP } => "page group 341v7 is held, and names nothing",
    };
    all_without_source(&miscounts);
    let mut report = InvariantReport::default();
    miscounts.iter().for_each(|miscount| report.note(Some(910), *miscount));
    let lines = miscounts.iter().map(|miscount| format!("\n  layer 910: {miscount}"));
    check(&report, &format!("miscounts: 6{}", lines.collect::<String>()), &[&910_usize]);
    has_no_source(&report);
}
