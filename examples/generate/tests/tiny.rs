//! Everything that the proof shows of the real model, on one small enough to run everywhere.

mod common;

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::tiny::Tiny;
use common::{THREADS, TIE, all_say_the_same, choices, compare, options, pages, perplexity};
use common::{reference, serve};
use generate::error::Error;
use generate::gguf::Gguf;
use generate::memory::PagedMemory;
use generate::model::{Logits, Model};
use generate::options::{KvType, Options};
use generate::plan::Plan;
use generate::pool::Pool;
use generate::serve::Event;
use generate::step::{Kind, Member, Steps};
use generate::tokenizer::{TextStream, Vocabulary};
use paged_kv::{Element, Int4, Int8, Level, bf16, f16};

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
        let answers =
            all_say_the_same(&model, &prompts(), 12, &[16, 32, 48, 64], level, KvType::F32);
        assert_eq!(answers, 4 * (1 + 2 + 2 + 8 + 8));
    }
    for kv_type in KvType::ALL {
        let level = Level::detect();
        let answers = all_say_the_same(&model, &prompts(), 12, &[16, 48], level, kv_type);
        assert_eq!(answers, 2 * (1 + 2 + 2 + 8 + 8));
    }
}

/// The widest gap between two types is where numbers are stored most coarsely; all of them see the
/// same text.
#[test]
fn narrow_types_stay_near_the_wide_one() {
    let model = model("types.gguf");
    let (text, level) = (&prompts()[7], Level::detect());
    let wide = perplexity::<f32>(&model, text, level);
    for (name, narrow, most) in [
        ("f16", perplexity::<f16>(&model, text, level), 1e-3),
        ("bf16", perplexity::<bf16>(&model, text, level), 1e-2),
        ("int8", perplexity::<Int8>(&model, text, level), 1e-2),
        ("int4", perplexity::<Int4>(&model, text, level), 0.2),
    ] {
        let off = (narrow / wide - 1.0).abs();
        assert!(off > 0.0 && off < most, "{name}: {narrow} and {wide}");
    }
    let prompts = &prompts()[..3];
    let free = choices::<f32>(&model, prompts, 10, None);
    assert_eq!(choices::<f32>(&model, prompts, 10, Some(&free)), free);
    let mut options = options(3, 10);
    options.share = false;
    let served = serve(&model, prompts, level, &options);
    for (served, chosen) in served.answers.iter().zip(&free) {
        assert!(served.as_ref().unwrap().iter().eq(chosen.iter().map(|(token, _)| token)));
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
    let steps = Steps::new(Level::detect(), THREADS);
    let outcome =
        generate::serve::run(&model, &plan, &options, steps, None, &mut |event| match event {
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
    an_adopted_prefix_changes_no_bit_of::<f32>(&model);
    an_adopted_prefix_changes_no_bit_of::<f16>(&model);
    an_adopted_prefix_changes_no_bit_of::<bf16>(&model);
    an_adopted_prefix_changes_no_bit_of::<Int8>(&model);
    an_adopted_prefix_changes_no_bit_of::<Int4>(&model);
}

fn an_adopted_prefix_changes_no_bit_of<E: Element>(model: &Model) {
    let prompt = &prompts()[7];
    let mut steps = Steps::new(Level::detect(), THREADS);
    for block_size in [16, 32, 48, 64] {
        let mut options = options(2, 1);
        options.block_size = block_size;
        let plan = Plan::new(std::slice::from_ref(prompt), &options, model.sizes()).unwrap();
        assert!(plan.prefix > 0);
        let (shared, own) = (plan.prefix_blocks, plan.jobs[0].own_blocks);
        let pool = Pool::<E>::new(model.sizes(), block_size, 2 * (shared + own)).unwrap();
        let mut whole = PagedMemory::new(&pool, None, pages(&pool, shared + own)).unwrap();
        let alone = steps.prefill(model, prompt, &mut whole, |_| ()).unwrap();
        let mut filling = PagedMemory::new(&pool, None, pages(&pool, shared)).unwrap();
        steps.prefill(model, &prompt[..plan.prefix], &mut filling, |_| ()).unwrap();
        let prefix = filling.into_pages();
        let mut rest = PagedMemory::new(&pool, Some(prefix.share()), pages(&pool, own)).unwrap();
        assert_eq!(rest.len(), plan.prefix);
        let adopted = steps.prefill(model, &prompt[plan.prefix..], &mut rest, |_| ()).unwrap();
        let bits = |logits: &[f32]| logits.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&alone), bits(&adopted), "{}, blocks of {block_size}", E::NAME);
    }
}

/// A decode step and a piece of a prompt go into one plan; neither notices the other.
#[test]
fn a_mixed_step_changes_no_bit() {
    let model = model("mixed.gguf");
    let (speaking, prompt) = (&prompts()[2][..100], &prompts()[5][..50]);
    let steps = |threads| Steps::new(Level::detect(), threads);
    let pool = Pool::<f32>::new(model.sizes(), 16, 100).unwrap();
    let memory = || PagedMemory::new(&pool, None, pages(&pool, 8)).unwrap();
    let bits = |logits: &[f32]| logits.iter().map(|it| it.to_bits()).collect::<Vec<_>>();

    let mut alone = memory();
    steps(1).prefill(&model, speaking, &mut alone, |_| ()).unwrap();
    let one = steps(1).prefill(&model, &[7], &mut alone, |_| ()).unwrap();
    let many = steps(1).prefill(&model, prompt, &mut memory(), |_| ()).unwrap();

    let (mut first, mut second) = (memory(), memory());
    steps(2).prefill(&model, speaking, &mut first, |_| ()).unwrap();
    let mut mixed = steps(2);
    let logits = Logits::Last;
    let mut members = [
        Member { memory: &mut first, tokens: &[7], logits },
        Member { memory: &mut second, tokens: prompt, logits },
    ];
    let both = mixed.step(&model, Kind::Prompt, &mut members).unwrap();
    assert_eq!([bits(&both[0]), bits(&both[1])], [bits(&one), bits(&many)]);
    let spent = mixed.spent(Kind::Prompt);
    assert_eq!((spent.steps, spent.rows), (1, 51));
    assert!(spent.attention < spent.whole && mixed.spent(Kind::Decode).steps == 0);
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
    let pool = Pool::<f32>::new(model.sizes(), 16, 6).unwrap();
    let prefix = pages(&pool, 2);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let own = pages(&pool, 3);
        let mut memory = PagedMemory::new(&pool, Some(prefix.share()), own).unwrap();
        let mut steps = Steps::new(Level::detect(), THREADS);
        steps.prefill(&model, &[1, 2, 3], &mut memory, |_| ()).unwrap();
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
    let pool = Pool::<f32>::new(model.sizes(), 16, 1).unwrap();
    let mut memory = PagedMemory::new(&pool, None, pages(&pool, 1)).unwrap();
    let mut steps = Steps::new(Level::detect(), THREADS);
    let refused = steps.prefill(&model, &[1; 17], &mut memory, |_| ()).unwrap_err();
    assert!(
        refused.to_string().contains("17 positions are to be written, room is reserved for 16"),
        "{refused}"
    );
    drop(memory);
    assert_eq!(pool.shared().free_groups(), 1);
}

#[test]
fn a_small_request_does_not_pass_a_large_one() {
    let model = model("line.gguf");
    let mut options = options(3, 1);
    (options.block_size, options.pool_blocks) = (16, Some(4));
    // 3, 4 and 1 blocks: beside the first there is room for the last, which is not its turn.
    let plan = Plan::new(&[vec![1; 40], vec![2; 60], vec![3; 9]], &options, model.sizes()).unwrap();
    let own: Vec<_> = plan.jobs.iter().map(|job| job.own_blocks).collect();
    assert_eq!(own, [3, 4, 1]);
    let (mut ended, mut waited) = (Vec::new(), Vec::new());
    let steps = Steps::new(Level::detect(), THREADS);
    generate::serve::run(&model, &plan, &options, steps, None, &mut |event| match event {
        Event::Ended { request } => ended.push(request),
        Event::Waits { request, need, free } => waited.push((request, need, free)),
        _ => (),
    })
    .unwrap();
    assert_eq!(ended, [0, 1, 2]);
    assert_eq!(waited, [(1, 4, 1), (2, 1, 0)]);
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
