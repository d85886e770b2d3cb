//! Everything that the proof shows of the real model, on one small enough to run everywhere.

mod common;

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::tiny::Tiny;
use common::{TIE, all_say_the_same, compare, options, reference, serve};
use generate::error::Error;
use generate::gguf::Gguf;
use generate::memory::PagedMemory;
use generate::model::{Memory, Model, Rows};
use generate::options::Options;
use generate::plan::Plan;
use generate::pool::Pool;
use generate::serve::Event;
use generate::tokenizer::{TextStream, Vocabulary};
use paged_kv::Level;

fn model(name: &str) -> Model {
    let path = Tiny::new().file(name);
    Model::load(&mut Gguf::open(&path).unwrap(), 2).unwrap()
}

/// 140 common tokens, then some of its own.
fn prompts() -> [Vec<u32>; 8] {
    std::array::from_fn(|request| {
        let common = (0..140).map(|i| (i * 37 + 11) % 256);
        common.chain((0..=request as u32 * 9).map(|i| (i * 5 + request as u32) % 256)).collect()
    })
}

#[test]
fn tokens_equal_those_of_the_reference() {
    let tiny = Tiny::new();
    let mut reference = reference(Cursor::new(tiny.bytes()));
    let model = model("reference.gguf");
    for (len, block_size) in [(1, 16), (5, 16), (63, 32), (64, 64), (65, 48), (200, 7)] {
        let prompt: Vec<u32> = (0..len).map(|i| (i * 29 + 3) % 256).collect();
        let tally = compare(&model, &mut reference, &prompt, 20, block_size);
        assert_eq!((tally.compared, tally.differing), (20, 0), "{len} tokens");
        assert!(tally.largest < TIE / 2.0, "{len} tokens: {tally:?}");
    }
}

#[test]
fn tokens_do_not_depend_on_company() {
    let model = model("company.gguf");
    for level in Level::available() {
        let answers = all_say_the_same(&model, &prompts(), 12, &[16, 32, 48, 64], level);
        assert_eq!(answers, 4 * (1 + 2 + 2 + 8 + 8));
    }
}

#[test]
fn a_prefix_is_computed_once() {
    let model = model("prefix.gguf");
    let mut options = options(8, 4);
    options.block_size = 16;
    let plan = Plan::new(&prompts(), &options, model.sizes()).unwrap();
    assert_eq!((plan.prefix, plan.prefix_blocks), (128, 8));
    let mut first = [None; 8];
    let mut prefixes = 0;
    let level = Level::detect();
    let outcome =
        generate::serve::run(&model, &plan, &options, level, None, &mut |event| match event {
            Event::Prefix { done: 128, .. } => prefixes += 1,
            Event::Prefill { request, done, .. } => _ = first[request].get_or_insert(done),
            _ => (),
        })
        .unwrap();
    assert_eq!(prefixes, 1);
    // Each goes on where the prefix ends: its first chunk ends past 128, never at 64.
    assert!(first.iter().all(|done| done.is_some_and(|done| done > 128)), "{first:?}");
    assert_eq!(outcome.handed_out, 8 + plan.jobs.iter().map(|job| job.own_blocks).sum::<usize>());
    assert_eq!(outcome.free, plan.pool_blocks);
}

/// Tokens are a coarse net: last bits must be equal too, or a long text shows it one day.
#[test]
fn an_adopted_prefix_changes_no_bit() {
    let model = model("bits.gguf");
    let prompt = &prompts()[7];
    let level = Level::detect();
    for block_size in [16, 32, 48, 64] {
        let mut options = options(2, 1);
        options.block_size = block_size;
        let plan = Plan::new(std::slice::from_ref(prompt), &options, model.sizes()).unwrap();
        assert!(plan.prefix > 0);
        let own = plan.jobs[0].own_blocks;
        let pool = Pool::new(model.sizes(), block_size, 2 * (plan.prefix_blocks + own)).unwrap();
        let pages = |count| pool.acquire(count, |_| ()).unwrap();
        let mut whole =
            PagedMemory::new(&pool, None, pages(plan.prefix_blocks + own), level).unwrap();
        let alone = model.prefill(prompt, &mut whole, |_| ()).unwrap();
        let mut filling = PagedMemory::new(&pool, None, pages(plan.prefix_blocks), level).unwrap();
        model.prefill(&prompt[..plan.prefix], &mut filling, |_| ()).unwrap();
        let prefix = filling.into_pages();
        let mut rest = PagedMemory::new(&pool, Some(prefix.share()), pages(own), level).unwrap();
        assert_eq!(rest.len(), plan.prefix);
        let adopted = model.prefill(&prompt[plan.prefix..], &mut rest, |_| ()).unwrap();
        let bits = |logits: &[f32]| logits.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&alone), bits(&adopted), "blocks of {block_size}");
    }
}

#[test]
fn one_request_that_fails_stops_no_other() {
    let model = model("failing.gguf");
    let outcome = serve(&model, &[vec![9999; 3], vec![1; 20]], Level::detect(), &options(2, 5));
    let failed = outcome.answers[0].as_ref().unwrap_err();
    assert!(failed.to_string().contains("token 9999"), "{failed}");
    assert_eq!(outcome.answers[1].as_ref().unwrap().len(), 5);
}

#[test]
fn whoever_does_not_fit_waits_and_says_the_same() {
    let model = model("waiting.gguf");
    let mut options = options(8, 10);
    options.block_size = 16;
    let roomy = serve(&model, &prompts(), Level::detect(), &options);
    for share in [true, false] {
        // The longest prompt has 204 tokens: 14 blocks of 16 with its 10 new ones.
        (options.pool_blocks, options.share) = (Some(14), share);
        let tight = serve(&model, &prompts(), Level::detect(), &options);
        assert!(tight.peak <= 14 && tight.peak < roomy.peak);
        for (tight, roomy) in tight.answers.iter().zip(&roomy.answers) {
            assert_eq!(tight.as_ref().unwrap(), roomy.as_ref().unwrap());
        }
    }
}

#[test]
fn a_request_that_never_fits_is_refused_and_the_others_run() {
    let model = model("refusal.gguf");
    let mut options = options(3, 10);
    (options.block_size, options.pool_blocks) = (16, Some(4));
    let prompts = [vec![1; 20], vec![1; 100], vec![2; 30]];
    let outcome = serve(&model, &prompts, Level::detect(), &options);
    assert_eq!(outcome.answers[0].as_ref().unwrap().len(), 10);
    let refused = outcome.answers[1].as_ref().unwrap_err();
    assert!(matches!(refused, Error::NeverFits { positions: 110, need: 7, have: 4 }), "{refused}");
    assert_eq!(outcome.answers[2].as_ref().unwrap().len(), 10);
}

#[test]
fn chance_depends_on_the_seed_alone() {
    let model = model("chance.gguf");
    let mut hot = options(4, 12);
    (hot.temperature, hot.seed) = (1.0, 5);
    let prompt = [prompts()[0].clone()];
    let answers = |options: &Options| -> Vec<Vec<u32>> {
        let outcome = serve(&model, &prompt, Level::detect(), options);
        outcome.answers.into_iter().map(Result::unwrap).collect()
    };
    let four = answers(&hot);
    assert_eq!(four, answers(&hot));
    assert!(four[0] != four[1] && four[1] != four[2]);
    (hot.requests, hot.seed) = (1, 7);
    assert_eq!(answers(&hot)[0], four[2]);
}

#[test]
fn a_panic_gives_every_block_back() {
    let model = model("panic.gguf");
    let pool = Pool::new(model.sizes(), 16, 6).unwrap();
    let prefix = pool.acquire(2, |_| ()).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let own = pool.acquire(3, |_| ()).unwrap();
        let mut memory =
            PagedMemory::new(&pool, Some(prefix.share()), own, Level::detect()).unwrap();
        model.forward(&[1, 2, 3], &mut memory).unwrap();
        assert_eq!((memory.len(), pool.shared().free_groups()), (35, 1));
        panic!("half-way, on purpose");
    }));
    assert!(panicked.is_err());
    assert_eq!(pool.shared().free_groups(), 4);
    drop(prefix);
    assert_eq!(pool.shared().free_groups(), 6);
}

#[test]
fn a_memory_that_is_full_refuses_and_loses_nothing() {
    let model = model("full.gguf");
    let pool = Pool::new(model.sizes(), 16, 1).unwrap();
    let own = pool.acquire(1, |_| ()).unwrap();
    let mut memory = PagedMemory::new(&pool, None, own, Level::detect()).unwrap();
    let (k, q) = (vec![0.5; 17 * 16], vec![0.5; 17 * 32]);
    let rows = Rows { count: 17, q: &q, k: &k, v: &k };
    let refused = memory.attend(0, rows, &mut vec![0.0; 17 * 32]).unwrap_err();
    assert!(refused.to_string().contains("exhausted"), "{refused}");
    drop(memory);
    assert_eq!(pool.shared().free_groups(), 1);
}

#[test]
fn text_survives_the_tokens() {
    let file = Gguf::open(&Tiny::new().file("text.gguf")).unwrap();
    let vocabulary = Vocabulary::new(&file).unwrap();
    let text = "the thirty-second café, 123 — 漢字 🦀\n\tthe end";
    let tokens = vocabulary.encode(text).unwrap();
    assert_eq!(vocabulary.decode(&tokens).unwrap(), text);
    let mut stream = TextStream::new(&vocabulary);
    let mut pieces: Vec<_> = tokens.iter().map(|&token| stream.push(token).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    assert_eq!(pieces.concat(), text);
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
    // Control tokens are taken as such, stand for no text, and are no merge of their letters.
    assert_eq!(vocabulary.encode("<|a|>the<|end|>").unwrap(), [259, 257, 258]);
    assert_eq!(vocabulary.decode(&[259, 257, 258]).unwrap(), "the");
}
