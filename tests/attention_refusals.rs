//! What the doors refuse, and that they touched nothing when they did.
//!
//! Heads that do not divide, or a store of another shape, used to read a neighbour's rows: each
//! refusal names what was needed and what was there. Every test runs for every stored type.

use paged_kv::attention::{
    AttentionOptions, Output, TreeMask, attention_scratch_len, causal_gqa_attention,
    causal_gqa_attention_into, causal_gqa_attention_paged, causal_gqa_attention_paged_into,
};
use paged_kv::cache::{KvCache, PagedKvCache, PagedKvStore};
use paged_kv::internal::doors::Guarded;
use paged_kv::{AttentionError, Element, GqaShape, KvShape, ShapeError, every_type};

fn shape(block_size: usize) -> KvShape {
    KvShape::square(block_size, 2, 4).unwrap()
}

fn store<E: Element>() -> PagedKvStore<E> {
    PagedKvStore::with_shape(shape(2), 4).unwrap()
}

/// Two KV heads of width 4, five positions, four query heads.
struct World<E: Element> {
    store: PagedKvStore<E>,
    paged: PagedKvCache,
    contiguous: KvCache<E>,
}

/// What a call is given; the right lengths unless a test says otherwise.
#[derive(Clone, Copy)]
struct Lengths {
    q: usize,
    n_heads: usize,
    out: usize,
    lse: usize,
    scratch: usize,
}

impl<E: Element> World<E> {
    fn new() -> Self {
        let mut world = World {
            store: store(),
            paged: PagedKvCache::new(),
            contiguous: KvCache::with_shape(shape(64)),
        };
        for position in 0..5 {
            let row = [position as f32; 8];
            world.paged.push(&mut world.store, &row, &row).unwrap();
            world.contiguous.push(&row, &row).unwrap();
        }
        world
    }

    /// For `n_q` query rows of four heads.
    fn right(n_q: usize) -> Lengths {
        let shape = GqaShape::new(shape(2), 4).unwrap();
        let scratch = attention_scratch_len(&shape, n_q);
        Lengths { q: n_q * 16, n_heads: 4, out: n_q * 16, lse: n_q * 4, scratch }
    }

    /// Asks both doors; they agree, and on an error nothing was written.
    fn ask(&self, lengths: Lengths, options: &AttentionOptions<'_>) -> Result<(), AttentionError> {
        let q = vec![0.5; lengths.q];
        let [contiguous, paged] = [false, true].map(|paged| {
            let mut out = Guarded::dirty(lengths.out, 0);
            let mut lse = Guarded::dirty(lengths.lse, 0);
            let mut scratch = Guarded::dirty(lengths.scratch, 0);
            let output = Output::new(out.inside()).lse(lse.inside());
            let (n_heads, memory) = (lengths.n_heads, scratch.inside());
            let result = if paged {
                let (store, cache) = (&self.store, &self.paged);
                causal_gqa_attention_paged_into(&q, store, cache, n_heads, options, output, memory)
            } else {
                let cache = &self.contiguous;
                causal_gqa_attention_into(&q, cache, n_heads, options, output, memory)
            };
            let clean = [out, lse, scratch]
                .map(|memory| memory.into_inside("refused").iter().all(|x| x.is_nan()));
            assert!(result.is_ok() || clean == [true; 3], "a refusal wrote something: {clean:?}");
            result
        });
        // By their text: a NaN that was refused does not equal itself.
        assert_eq!(format!("{contiguous:?}"), format!("{paged:?}"));
        paged
    }
}

fn what_is_right_is_accepted<E: Element>() {
    let world = World::<E>::new();
    for n_q in 0..=5 {
        assert_eq!(world.ask(World::<E>::right(n_q), &AttentionOptions::new()), Ok(()), "{n_q}");
    }
    let more = Lengths { scratch: 10_000, ..World::<E>::right(1) };
    assert_eq!(world.ask(more, &AttentionOptions::new()), Ok(()));
}

fn heads_must_divide<E: Element>() {
    let world = World::<E>::new();
    let with = |n_heads, q| {
        world.ask(Lengths { n_heads, q, ..World::<E>::right(1) }, &AttentionOptions::new())
    };
    let zero = ShapeError::Zero { what: "n_heads" };
    assert_eq!(with(0, 16), Err(AttentionError::Shape(zero)));
    for n_heads in [1, 3, 5] {
        let error = ShapeError::HeadsNotDivisible { n_heads, n_kv_heads: 2 };
        assert_eq!(with(n_heads, n_heads * 4), Err(AttentionError::Shape(error)));
    }
    assert_eq!(with(usize::MAX - 1, 16), Err(AttentionError::Shape(ShapeError::Overflow)));
    let q = [0.5; 12];
    let error = ShapeError::HeadsNotDivisible { n_heads: 3, n_kv_heads: 2 };
    let error = Err(AttentionError::Shape(error));
    assert_eq!(causal_gqa_attention(&q, &world.contiguous, 3), error);
    assert_eq!(causal_gqa_attention_paged(&q, &world.store, &world.paged, 3), error);
}

fn the_query_is_whole_rows<E: Element>() {
    let world = World::<E>::new();
    for q in [1, 15, 17, 31] {
        let lengths = Lengths { q, ..World::<E>::right(1) };
        let error = AttentionError::QueryLength { row: 16, have: q };
        assert_eq!(world.ask(lengths, &AttentionOptions::new()), Err(error));
        assert_eq!(causal_gqa_attention(&vec![0.0; q], &world.contiguous, 4), Err(error));
    }
}

fn a_causal_row_needs_a_position<E: Element>() {
    let world = World::<E>::new();
    let options = AttentionOptions::new();
    let refused = Err(AttentionError::TooManyQueryRows { rows: 6, len: 5 });
    let slopes = [0.5; 4];
    assert_eq!(world.ask(World::<E>::right(6), &options), refused);
    let open = options.causal(false);
    assert_eq!(world.ask(World::<E>::right(6), &open), Ok(()));
    assert_eq!(world.ask(World::<E>::right(6), &open.window(3)), refused);
    assert_eq!(world.ask(World::<E>::right(6), &open.alibi_slopes(&slopes)), refused);
    let mut words = [0; 6];
    let tree = [TreeMask::from_parents(&[None; 6], &mut words).unwrap()];
    assert_eq!(world.ask(World::<E>::right(6), &open.trees(&tree)), refused);
    assert_eq!(
        causal_gqa_attention(&[0.0; 16], &KvCache::<E>::with_shape(shape(64)), 4),
        Err(AttentionError::TooManyQueryRows { rows: 1, len: 0 })
    );
}

fn another_store_of_the_same_shape_is_refused<E: Element>() {
    let world = World::<E>::new();
    let mut other = store::<E>();
    let (need, have) = (world.store.id(), other.id());
    let refused = AttentionError::WrongStore { need, have };
    let q = [0.5; 16];
    assert_eq!(causal_gqa_attention_paged(&q, &other, &world.paged, 4), Err(refused));
    // And a store that does hold blocks.
    let mut own = PagedKvCache::new();
    own.push(&mut other, &[1.0; 8], &[1.0; 8]).unwrap();
    let Lengths { out, lse, scratch, .. } = World::<E>::right(1);
    let [mut out, mut lse, mut scratch] = [out, lse, scratch].map(|len| Guarded::dirty(len, 0));
    let output = Output::new(out.inside()).lse(lse.inside());
    let options = AttentionOptions::new();
    let (cache, memory) = (&world.paged, scratch.inside());
    let result = causal_gqa_attention_paged_into(&q, &other, cache, 4, &options, output, memory);
    assert_eq!(result, Err(refused));
    for memory in [out, lse, scratch] {
        assert!(memory.into_inside("refused").iter().all(|x| x.is_nan()));
    }
}

fn every_length_is_checked<E: Element>() {
    let world = World::<E>::new();
    let options = AttentionOptions::new();
    for n_q in [0, 1, 3] {
        let right = World::<E>::right(n_q);
        for have in [right.out.wrapping_sub(1), right.out + 1, right.out + 16] {
            if have < 1000 {
                let refused = Err(AttentionError::OutLength { need: right.out, have });
                assert_eq!(world.ask(Lengths { out: have, ..right }, &options), refused);
            }
        }
        for have in [right.lse.wrapping_sub(1), right.lse + 1] {
            if have < 1000 {
                let refused = Err(AttentionError::LseLength { need: right.lse, have });
                assert_eq!(world.ask(Lengths { lse: have, ..right }, &options), refused);
            }
        }
        for have in [0, right.scratch - 1] {
            let refused = Err(AttentionError::ScratchLength { need: right.scratch, have });
            assert_eq!(world.ask(Lengths { scratch: have, ..right }, &options), refused);
        }
    }
}

fn options_are_checked<E: Element>() {
    let world = World::<E>::new();
    let refused = |options: &AttentionOptions<'_>| world.ask(World::<E>::right(1), options);
    let plain = AttentionOptions::new;
    for have in [0, 3, 5] {
        let numbers = vec![0.5; have];
        let error = |what| Err(AttentionError::PerHeadLength { what, need: 4, have });
        assert_eq!(refused(&plain().alibi_slopes(&numbers)), error("alibi_slopes"));
        assert_eq!(refused(&plain().sinks(&numbers)), error("sinks"));
    }
    // One row of four heads is two rows of two: nobody can tell who has not said how many.
    let error = AttentionError::QueryRows { need: 2, have: 1 };
    assert_eq!(refused(&plain().query_rows(2)), Err(error));
    assert_eq!(refused(&plain().query_rows(1)), Ok(()));
    let bad = |options: &AttentionOptions<'_>, what: &str, have: f32| match refused(options) {
        Err(AttentionError::BadOption { what: said, have: number }) => {
            assert_eq!((said, number.to_bits()), (what, have.to_bits()));
        }
        other => panic!("{what} = {have} gave {other:?}"),
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    // Finite, but not any more in the kernel's unit.
    for have in [nan, inf, -inf, f32::MAX, f32::MIN] {
        bad(&plain().scale(have), "scale", have);
        bad(&plain().alibi_slopes(&[0.0, 0.0, 0.0, have]), "alibi_slopes", have);
    }
    for have in [0.0, -0.0, -1.0, nan, inf, -inf, f32::MAX, 1e-45] {
        bad(&plain().soft_cap(have), "soft_cap", have);
    }
    bad(&plain().window(0), "window", 0.0);
    bad(&plain().sinks(&[0.0, nan, 0.0, 0.0]), "sinks", nan);
    // What is unusual and means something.
    let inverted = core::ops::Range { start: 9, end: 2 };
    for options in [
        plain().scale(0.0),
        plain().scale(-1.0),
        plain().window(usize::MAX),
        plain().sinks(&[inf, -inf, 0.0, 1e30]),
        plain().alibi_slopes(&[-1.0, 0.0, 1e30, 1e-40]),
        plain().positions(0..usize::MAX),
        plain().positions(inverted),
    ] {
        assert_eq!(refused(&options), Ok(()), "{options:?}");
    }
}

every_type! {
    what_is_right_is_accepted,
    heads_must_divide,
    the_query_is_whole_rows,
    a_causal_row_needs_a_position,
    another_store_of_the_same_shape_is_refused,
    every_length_is_checked,
    options_are_checked,
}
