//! Everything that the proof shows of the real model, on one small enough to run everywhere.

mod common;

use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};

use common::tiny::Tiny;
use common::{THREADS, TIE, all_say_the_same, choices, compare, options, perplexity, reference};
use common::{serve, told};
use generate::error::Error;
use generate::gguf::Gguf;
use generate::memory::PagedMemory;
use generate::model::{Logits, Model};
use generate::options::{KvType, Options};
use generate::pool::{Pages, Pool};
use generate::prefixes::Prefixes;
use generate::sample::Sampler;
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
        let seen = all_say_the_same(&model, &prompts(), 12, &[16, 32, 48, 64], level, KvType::F32);
        assert_eq!(seen.answers, 4 * (1 + 2 + 2 + 8 + 8 + 8));
        assert!(seen.hits > 0 && seen.preemptions > 0, "{seen:?}");
    }
    for kv_type in KvType::ALL {
        let level = Level::detect();
        let seen = all_say_the_same(&model, &prompts(), 12, &[16, 48], level, kv_type);
        assert_eq!(seen.answers, 2 * (1 + 2 + 2 + 8 + 8 + 8));
        assert!(seen.hits > 0 && seen.preemptions > 0, "{seen:?}");
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
fn a_common_beginning_is_found_and_computed_once() {
    let model = model("prefix.gguf");
    let mut options = options(8, 4);
    options.block_size = 16;
    let (mut first, mut followed) = ([None; 8], Vec::new());
    let mut listen = |event| match event {
        Event::Prefill { answer, done, .. } => _ = first[answer].get_or_insert(done),
        Event::Follows { answer, first } => followed.push((answer, first)),
        _ => (),
    };
    let outcome = told(&model, &prompts(), Level::detect(), &options, &mut listen);
    // Who comes second waits for the first one's prompt, and then all find it.
    assert_eq!(followed, [(1, 0)]);
    let account = outcome.account;
    assert_eq!((account.admissions, account.hits, account.tokens_saved), (8, 7, 7 * 128));
    // Each goes on where that ends: its first chunk ends past 128, never at 64.
    assert_eq!(first[0], Some(64));
    assert!(first[1..].iter().all(|done| done.is_some_and(|done| done > 128)), "{first:?}");
    let fed: usize = prompts().iter().map(|prompt| prompt.len() + 4 - 1).sum();
    assert_eq!(outcome.prompt.rows + outcome.decode.rows, fed - 7 * 128);
    options.share = false;
    let outcome = serve(&model, &prompts(), Level::detect(), &options);
    assert_eq!((outcome.account.hits, outcome.account.tokens_saved), (0, 0));
    assert_eq!(outcome.prompt.rows + outcome.decode.rows, fed);
}

#[test]
fn as_much_is_found_as_anybody_has_computed() {
    let model = model("depths.gguf");
    let mut options = options(4, 4);
    options.block_size = 16;
    let long: Vec<u32> = (0..200).map(|i| (i * 37 + 11) % 256).collect();
    let other = |from: usize, len| [&long[..from], &vec![7; len - from]].concat();
    let prompts = [other(130, 150), long.clone(), other(195, 260), other(60, 200)];
    let outcome = serve(&model, &prompts, Level::detect(), &options);
    // 128 positions of the first one, 192 of the second; 60 are no whole chunk.
    assert_eq!((outcome.account.hits, outcome.account.tokens_saved), (2, 128 + 192));
    // The last token of a prompt is computed however well it is known.
    options.requests = 2;
    let outcome = serve(&model, &[long[..128].to_vec()], Level::detect(), &options);
    assert_eq!((outcome.account.hits, outcome.account.tokens_saved), (1, 64));
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|it| it.to_bits()).collect()
}

/// Tokens are a coarse net: last bits must be equal too, or a long text shows it one day.
#[test]
fn a_found_prefix_changes_no_bit() {
    let model = model("bits.gguf");
    a_found_prefix_changes_no_bit_of::<f32>(&model);
    a_found_prefix_changes_no_bit_of::<f16>(&model);
    a_found_prefix_changes_no_bit_of::<bf16>(&model);
    a_found_prefix_changes_no_bit_of::<Int8>(&model);
    a_found_prefix_changes_no_bit_of::<Int4>(&model);
}

fn a_found_prefix_changes_no_bit_of<E: Element>(model: &Model) {
    let prompt = &prompts()[7];
    let mut steps = Steps::new(Level::detect(), THREADS);
    for (block_size, positions) in [(16, 192), (32, 192), (48, 192), (64, 192), (128, 128)] {
        let blocks = prompt.len().div_ceil(block_size);
        let pool = Pool::<E>::new(model.sizes(), block_size, 2 * blocks).unwrap();
        let mut prefixes = Prefixes::new(&pool);
        let own = pool.acquire(blocks).unwrap();
        let mut first = PagedMemory::begin(Pages::none(&pool), own).unwrap();
        let alone = steps.prefill(model, prompt, &mut first, |_| ()).unwrap();
        assert_eq!(prefixes.insert(prompt, first.pages()).unwrap(), positions / block_size);
        let found = prefixes.find(prompt);
        let own = pool.acquire(blocks - found.groups().len()).unwrap();
        let mut second = PagedMemory::begin(found, own).unwrap();
        assert_eq!((second.len(), prefixes.peek(prompt)), (positions, positions));
        let rest = steps.prefill(model, &prompt[positions..], &mut second, |_| ()).unwrap();
        assert_eq!(bits(&alone), bits(&rest), "{}, blocks of {block_size}", E::NAME);
    }
}

/// What a preempted request feeds again goes into one step, and is as if it never had been gone.
#[test]
fn tokens_fed_again_change_no_bit() {
    let model = model("again.gguf");
    tokens_fed_again_change_no_bit_of::<f32>(&model);
    tokens_fed_again_change_no_bit_of::<Int8>(&model);
}

fn tokens_fed_again_change_no_bit_of<E: Element>(model: &Model) {
    let (prompt, answer) = (&prompts()[1][..], &prompts()[6][..70]);
    let mut steps = Steps::new(Level::detect(), THREADS);
    for block_size in [7, 16, 64] {
        let pool = Pool::<E>::new(model.sizes(), block_size, 100).unwrap();
        let (mut slow, mut quick) = (PagedMemory::new(&pool), PagedMemory::new(&pool));
        steps.prefill(model, prompt, &mut slow, |_| ()).unwrap();
        steps.prefill(model, prompt, &mut quick, |_| ()).unwrap();
        let mut one_by_one = Vec::new();
        for token in answer.chunks(1) {
            one_by_one = steps.prefill(model, token, &mut slow, |_| ()).unwrap();
        }
        let mut feed = |tokens, logits| {
            let member = Member { memory: &mut quick, tokens, apart: true, logits };
            steps.step(model, Kind::Prompt, &mut [member]).unwrap().remove(0)
        };
        assert!(feed(&answer[..30], Logits::None).is_empty());
        let vocabulary = model.sizes().vocabulary;
        assert_eq!(feed(&answer[30..40], Logits::All).len(), 10 * vocabulary);
        let again = feed(&answer[40..], Logits::Last);
        assert_eq!(again.len(), vocabulary);
        assert_eq!(bits(&again), bits(&one_by_one), "{}, blocks of {block_size}", E::NAME);
    }
}

/// Two continuations go different ways from a block that is not full, which one of them copies.
#[test]
fn a_fork_changes_no_bit() {
    let model = model("branches.gguf");
    let prompt = &prompts()[2];
    let mut steps = Steps::new(Level::detect(), THREADS);
    for (block_size, copies) in [(16, 1), (7, 1), (53, 0)] {
        assert_eq!(usize::from(!prompt.len().is_multiple_of(block_size)), copies);
        let pool = Pool::<f32>::new(model.sizes(), block_size, 100).unwrap();
        let mut alone = |token| {
            let mut memory = PagedMemory::new(&pool);
            steps.prefill(&model, prompt, &mut memory, |_| ()).unwrap();
            steps.prefill(&model, &[token], &mut memory, |_| ()).unwrap()
        };
        let (seven, nine) = (alone(7), alone(9));
        let mut memory = PagedMemory::new(&pool);
        steps.prefill(&model, prompt, &mut memory, |_| ()).unwrap();
        let mut branch = memory.fork().unwrap();
        let held = prompt.len().div_ceil(block_size);
        assert_eq!(pool.shared().free_groups(), 100 - held);
        let member = |memory, tokens| Member { memory, tokens, apart: true, logits: Logits::Last };
        let mut members = [member(&mut memory, &[7]), member(&mut branch, &[9])];
        let both = steps.step(&model, Kind::Decode, &mut members).unwrap();
        assert_eq!([bits(&both[0]), bits(&both[1])], [bits(&seven), bits(&nine)], "{block_size}");
        assert_eq!(pool.shared().free_groups(), 100 - held - 2 + copies);
        pool.shared().check_invariants(memory.holders().chain(branch.holders())).unwrap();
        drop(memory);
        pool.shared().check_invariants(branch.holders()).unwrap();
        drop(branch);
        assert_eq!(pool.shared().free_groups(), 100);
    }
}

/// A decode step and a piece of a prompt go into one plan; neither notices the other.
#[test]
fn a_mixed_step_changes_no_bit() {
    let model = model("mixed.gguf");
    let (speaking, prompt) = (&prompts()[2][..100], &prompts()[5][..50]);
    let steps = |threads| Steps::new(Level::detect(), threads);
    let pool = Pool::<f32>::new(model.sizes(), 16, 100).unwrap();
    let memory = || PagedMemory::new(&pool);

    let mut alone = memory();
    steps(1).prefill(&model, speaking, &mut alone, |_| ()).unwrap();
    let one = steps(1).prefill(&model, &[7], &mut alone, |_| ()).unwrap();
    let many = steps(1).prefill(&model, prompt, &mut memory(), |_| ()).unwrap();

    let (mut first, mut second) = (memory(), memory());
    steps(2).prefill(&model, speaking, &mut first, |_| ()).unwrap();
    let mut mixed = steps(2);
    let logits = Logits::Last;
    let mut members = [
        Member { memory: &mut first, tokens: &[7], apart: true, logits },
        Member { memory: &mut second, tokens: prompt, apart: false, logits },
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
    for fork in [1, 3] {
        options.fork = fork;
        let outcome = serve(&model, &prompts, Level::detect(), &options);
        for (answer, tokens) in outcome.answers.iter().enumerate() {
            if answer / fork != 1 {
                assert_eq!(tokens.as_ref().unwrap().len(), 10);
                continue;
            }
            let refused = tokens.as_ref().unwrap_err();
            assert!(
                matches!(refused, Error::NeverFits { positions: 110, need: 7, have: 4 }),
                "{refused}"
            );
        }
    }
}

/// With blocks for one and a little more, the youngest gives way again and again, and nobody can
/// tell from what is said.
#[test]
fn preempted_requests_say_the_same() {
    let model = model("preempted.gguf");
    for (kv_type, block_size) in [(KvType::F32, 16), (KvType::F32, 32), (KvType::Int8, 16)] {
        let mut options = options(8, 60);
        (options.block_size, options.kv_type) = (block_size, kv_type);
        let roomy = serve(&model, &prompts(), Level::detect(), &options);
        assert_eq!((roomy.account.preemptions, roomy.account.evictions), (0, 0));
        // The longest prompt has 204 tokens.
        let least = 264usize.div_ceil(block_size);
        for (share, more) in [(true, 0), (true, 4), (false, 0), (false, 4)] {
            (options.share, options.pool_blocks) = (share, Some(least + more));
            let (mut preempted, mut ended) = ([0; 8], Vec::new());
            let (mut held, mut together) = ([0; 8], 0);
            let mut listen = |event| match event {
                Event::Preempted { answer, .. } => {
                    preempted[answer] += 1;
                    held[answer] = 0;
                }
                Event::Prefill { answer, done, .. } => {
                    together += done - held[answer];
                    held[answer] = done;
                }
                Event::Ended { answer } => ended.push(answer),
                _ => (),
            };
            let tight = told(&model, &prompts(), Level::detect(), &options, &mut listen);
            assert_eq!(preempted.iter().sum::<usize>(), tight.account.preemptions);
            assert!(tight.peak <= least + more);
            // Where nothing is found there is no room for a second one beside the first.
            let preempted_any = tight.account.preemptions > 0;
            assert_eq!(preempted_any, share || more > 0, "{block_size}: {preempted:?}");
            if !share {
                // New tokens meet no others in a product, neither the first time nor again.
                let (prompt, decode) = (tight.prompt, tight.decode);
                assert_eq!(prompt.rows + decode.rows, together + prompt.apart + decode.apart);
            }
            // The oldest never gives way, so all end in order.
            assert_eq!((preempted[0], ended), (0, (0..8).collect()));
            for (tight, roomy) in tight.answers.iter().zip(&roomy.answers) {
                assert_eq!(tight.as_ref().unwrap(), roomy.as_ref().unwrap());
            }
        }
    }
}

#[test]
fn what_is_only_cached_goes_before_anybody() {
    let model = model("evicted.gguf");
    let mut options = options(2, 60);
    // 8 blocks for the first, which leaves 4 in the cache; 4 for the second one's prompt, and then
    // one after the other until there are 8.
    (options.block_size, options.pool_blocks) = (16, Some(8));
    let prompts = [vec![1; 68], vec![2; 60]];
    let tight = serve(&model, &prompts, Level::detect(), &options);
    assert_eq!((tight.account.evictions, tight.account.preemptions, tight.peak), (4, 0, 8));
    // And before anybody is let in, no more than is needed.
    let prompts = [vec![1; 68], vec![2; 90]];
    (options.n, options.pool_blocks) = (20, Some(7));
    let tight = serve(&model, &prompts, Level::detect(), &options);
    assert_eq!((tight.account.evictions, tight.account.preemptions), (4, 0));
}

#[test]
fn the_cache_spares_nothing_that_does_not_suffice() {
    let model = model("spared.gguf");
    let pool = Pool::<f32>::new(model.sizes(), 16, 8).unwrap();
    let mut prefixes = Prefixes::new(&pool);
    let prompt = &prompts()[0][..64];
    let mut memory = PagedMemory::begin(Pages::none(&pool), prefixes.acquire(4).unwrap()).unwrap();
    let mut steps = Steps::new(Level::detect(), THREADS);
    steps.prefill(&model, prompt, &mut memory, |_| ()).unwrap();
    prefixes.insert(prompt, memory.pages()).unwrap();
    // What is held is not to be had.
    assert!(prefixes.acquire(5).is_none());
    drop(memory);
    let held = prefixes.acquire(3).unwrap();
    assert!(prefixes.acquire(6).is_none());
    assert_eq!((prefixes.evicted(), pool.shared().free_groups()), (0, 1));
    let rest = prefixes.acquire(4).unwrap();
    assert_eq!((prefixes.evicted(), pool.shared().free_groups()), (3, 0));
    drop((held, rest, prefixes));
    assert_eq!(pool.shared().free_groups(), 8);
}

#[test]
fn continuations_are_as_if_each_were_alone() {
    let model = model("continuations.gguf");
    for (len, block_size, kv_type) in [(150, 16, KvType::F32), (144, 16, KvType::Int8)] {
        let mut options = options(1, 40);
        (options.temperature, options.seed) = (1.0, 5);
        (options.block_size, options.kv_type) = (block_size, kv_type);
        let prompt = [prompts()[7][..len].to_vec()];
        let alone: Vec<_> = (0..4)
            .map(|continuation| {
                let mut options = options.clone();
                options.seed = Sampler::seed_of(5, continuation);
                serve(&model, &prompt, Level::detect(), &options).answers.remove(0).unwrap()
            })
            .collect();
        assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[2] != alone[3]);
        options.fork = 4;
        // 9 full blocks of the prompt and 3 more for each answer; then as many as one needs.
        for (pool_blocks, share) in [(21, true), (21, false), (14, true), (12, false)] {
            (options.pool_blocks, options.share) = (Some(pool_blocks), share);
            let forked = serve(&model, &prompt, Level::detect(), &options);
            let answers: Vec<_> = forked.answers.into_iter().map(Result::unwrap).collect();
            assert_eq!(answers, alone, "{len} tokens, {pool_blocks} blocks");
            let roomy = pool_blocks == 21;
            assert_eq!(forked.account.preemptions == 0, roomy, "{:?}", forked.account);
            if roomy {
                // The prompt once, and all tokens of each answer but the last.
                let rows = forked.prompt.rows + forked.decode.rows;
                assert_eq!((rows, forked.peak), (len + 4 * 39, 21));
            }
        }
    }
}

#[test]
fn requests_and_their_continuations_share_a_pool() {
    let model = model("both.gguf");
    let mut options = options(3, 30);
    (options.temperature, options.seed, options.block_size) = (1.0, 9, 16);
    let plain = serve(&model, &prompts(), Level::detect(), &options);
    options.fork = 3;
    for pool_blocks in [None, Some(13)] {
        options.pool_blocks = pool_blocks;
        let forked = serve(&model, &prompts(), Level::detect(), &options);
        assert_eq!(forked.account.preemptions > 0, pool_blocks.is_some());
        let answers: Vec<_> = forked.answers.into_iter().map(Result::unwrap).collect();
        // The first continuation is the answer without a fork.
        for (request, plain) in plain.answers.iter().enumerate() {
            assert_eq!(&answers[3 * request], plain.as_ref().unwrap());
        }
        assert!(
            answers.iter().all(|answer| answers.iter().filter(|it| *it == answer).count() == 1)
        );
    }
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
    let prefix = pool.acquire(2).unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let own = pool.acquire(1).unwrap();
        let mut memory = PagedMemory::begin(prefix.share(), own).unwrap();
        let mut steps = Steps::new(Level::detect(), THREADS);
        steps.prefill(&model, &[1; 17], &mut memory, |_| ()).unwrap();
        let mut branch = memory.fork().unwrap();
        branch.reserve(1).unwrap();
        assert_eq!((memory.len(), pool.shared().free_groups()), (49, 1));
        panic!("half-way, on purpose");
    }));
    assert!(panicked.is_err());
    assert_eq!(pool.shared().free_groups(), 4);
    drop(prefix);
    assert_eq!(pool.shared().free_groups(), 6);
}

#[test]
fn a_memory_that_finds_no_block_is_refused_and_loses_nothing() {
    let model = model("full.gguf");
    let pool = Pool::<f32>::new(model.sizes(), 16, 1).unwrap();
    let mut memory = PagedMemory::new(&pool);
    let mut steps = Steps::new(Level::detect(), THREADS);
    let refused = steps.prefill(&model, &[1; 17], &mut memory, |_| ()).unwrap_err();
    assert!(refused.to_string().contains("2 blocks needed, 1 free"), "{refused}");
    assert_eq!((memory.len(), pool.shared().free_groups()), (0, 1));
    steps.prefill(&model, &[1; 16], &mut memory, |_| ()).unwrap();
    let refused = steps.prefill(&model, &[1], &mut memory, |_| ()).unwrap_err();
    assert!(refused.to_string().contains("1 blocks needed, 0 free"), "{refused}");
    assert!(matches!(
        steps.step(
            &model,
            Kind::Decode,
            &mut [Member { memory: &mut memory, tokens: &[], apart: true, logits: Logits::Last }]
        ),
        Err(Error::Prompt(_))
    ));
    drop(memory);
    assert_eq!(pool.shared().free_groups(), 1);
}

#[test]
fn a_small_request_does_not_pass_a_large_one() {
    let model = model("line.gguf");
    let mut options = options(3, 1);
    (options.block_size, options.pool_blocks) = (16, Some(4));
    // 3, 4 and 1 blocks: beside the first there is room for the last, which is not its turn.
    let prompts = [vec![1; 40], vec![2; 60], vec![3; 9]];
    let (mut ended, mut waited) = (Vec::new(), Vec::new());
    told(&model, &prompts, Level::detect(), &options, &mut |event| match event {
        Event::Ended { answer } => ended.push(answer),
        Event::Waits { answer, need, free } => waited.push((answer, need, free)),
        _ => (),
    });
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
