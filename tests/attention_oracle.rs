//! Every level against naive attention in double precision.
//!
//! The grid is a covering design: every width in `WIDTHS` meets no option, one option and several;
//! block sizes, groups and query rows go round beside it in steps that have no common divisor with
//! the lists' lengths, and a random part fills in pairs. What is compared is bounded by what
//! rounding in `f32` can do and not by what was observed:
//!
//! - unit variance and the default scale: `2e-6 x max |v|`;
//! - any other scale or option: `max |v| x (1e-6 + 2^-22 x S)`, where `S` is the largest sum of
//!   sizes that a score of the row is made of.
//!
//! `max |v|` is over the values that the row sees.
//!
//! The same for every stored type: the oracle works on what was stored, so the bound is that of `f32`
//! whatever storing costs. Types beside `f32` take a third of the cases, each width and one in
//! three of the pairs of group and block size included.

use paged_kv::internal::doors::{Place, answer, stored};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, Truth, attention};
use paged_kv::internal::types::is_f32;
use paged_kv::{Element, Level, every_type};

const BLOCK_SIZES: [usize; 41] = {
    let mut sizes = [
        48, 64, 80, 96, 112, 128, 144, 256, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    let mut at = 8;
    while at < 41 {
        sizes[at] = at - 7;
        at += 1;
    }
    sizes
};

const ONE_OPTION: [u8; 8] = [
    Rules::SCALE,
    Rules::CAP,
    Rules::ALIBI,
    Rules::WINDOW,
    Rules::SINKS,
    Rules::OPEN,
    Rules::PART,
    Rules::FIRST,
];

fn widths() -> impl Iterator<Item = usize> {
    (1..=160).chain([192, 256, 512, 576])
}

/// The worst error seen at one level, as a part of what is allowed, and where.
#[derive(Clone, Debug, Default)]
struct Worst {
    part: f64,
    error: f64,
    what: String,
}

impl Worst {
    fn see(&mut self, error: f64, bound: f64, what: impl Fn() -> String) {
        // An error that is not a number is the worst of all.
        if error.is_nan() || error > bound * self.part {
            *self = Worst { part: error / bound, error, what: what() };
        }
    }
}

/// What was found over a grid: at the default scale, with options, and of log-sum-exps.
#[derive(Debug, Default)]
struct Found {
    plain: Worst,
    options: Worst,
    lse: Worst,
    cases: usize,
}

impl Found {
    fn compare<E: Element>(
        &mut self,
        case: &Case,
        mask: u8,
        truth: &Truth,
        place: Place,
        level: Level,
    ) {
        let have = answer::<E>(case, place, level);
        let sizes = case.sizes;
        self.cases += 1;
        for row in 0..truth.lse.len() {
            let reach = truth.reach[row];
            let about = || format!("{sizes:?} {place:?} options {mask:#b} row {row} S {reach:.2}");
            let bound = truth.out_bound(&case.rules, row);
            // The default scale and nothing that can lengthen a score.
            let plain = mask & (Rules::SCALE | Rules::CAP | Rules::ALIBI) == 0;
            let worst = if plain { &mut self.plain } else { &mut self.options };
            for column in 0..sizes.v_width {
                let at = row * sizes.v_width + column;
                let error = (f64::from(have.out[at]) - truth.out[at]).abs();
                // A row that sees nothing is exactly zero, and its bound is 0.
                if error != 0.0 {
                    worst.see(error, bound, || format!("{} column {column}", about()));
                }
            }
            let (have, want) = (f64::from(have.lse[row]), truth.lse[row]);
            if want == f64::NEG_INFINITY {
                assert_eq!(have, want, "{level}: {}", about());
            } else {
                self.lse.see((have - want).abs(), truth.lse_bound(row), about);
            }
        }
    }
}

/// One case at every level, contiguous or paged.
fn compare<E: Element>(
    found: &mut [(Level, Found)],
    sizes: Sizes,
    mask: u8,
    block_size: usize,
    seed: u64,
) {
    let case = Case::random(sizes, mask, seed);
    let truth = attention(&stored::<E>(&case));
    let place = match seed % 3 {
        0 => Place::Contiguous(block_size),
        _ => Place::Paged(block_size, seed),
    };
    for (level, found) in found {
        found.compare::<E>(&case, mask, &truth, place, *level);
    }
}

/// Prints the worst of each level, then fails if any is past its bound.
fn judge<E: Element>(name: &str, found: Vec<(Level, Found)>) {
    for (level, found) in &found {
        println!("{}, {name}, {level}, {} cases", E::NAME, found.cases);
        for (what, worst) in
            [("plain", &found.plain), ("options", &found.options), ("lse", &found.lse)]
        {
            let Worst { part, error, what: at } = worst;
            println!("  {what:8} {part:.3} of the bound, error {error:.3e}: {at}");
        }
    }
    for (level, found) in &found {
        for worst in [&found.plain, &found.options, &found.lse] {
            assert!(worst.part <= 1.0, "{}, {level}: {worst:?}", E::NAME);
        }
    }
}

fn nothing_yet() -> Vec<(Level, Found)> {
    Level::available().map(|level| (level, Found::default())).collect()
}

/// Decode, verification of a few rows, or a chunk of prefill, with the positions before it.
fn rows_and_positions(turn: usize, group: usize, numbers: &mut Numbers) -> (usize, usize) {
    let n_q = match turn % 3 {
        0 => 1,
        1 => numbers.between(2, 8),
        // More rows than one item takes, now and then.
        _ => numbers.between(9, 40.min(9 + 220 / group)),
    };
    (n_q, n_q + numbers.between(0, 150))
}

/// Every width meets no option, one option, and several; everything else goes round beside it.
fn every_width_with_groups_blocks_and_options<E: Element>() {
    let mut found = nothing_yet();
    let mut numbers = Numbers::new(12);
    for pass in 0..3 {
        for (index, k_width) in widths().enumerate() {
            let turn = pass * 164 + index;
            let mask = match pass {
                0 => 0,
                1 => ONE_OPTION[turn % 8],
                _ => numbers.below(256) as u8,
            };
            let v_width = match turn % 2 {
                0 => k_width,
                _ => numbers.between(1, 160),
            };
            let group = 1 + turn * 7 % 16;
            let n_kv_heads = if group > 8 { 1 } else { 1 + turn % 2 };
            let (n_q, len) = rows_and_positions(turn, group, &mut numbers);
            let sizes = Sizes { n_kv_heads, group, k_width, v_width, n_q, len };
            if !is_f32::<E>() && index % 3 != pass {
                continue;
            }
            compare::<E>(&mut found, sizes, mask, BLOCK_SIZES[turn * 11 % 41], turn as u64);
        }
    }
    judge::<E>("widths", found);
}

/// Every group with every kind of block and of rows, small widths.
fn every_group_with_every_block_size<E: Element>() {
    let mut found = nothing_yet();
    let mut numbers = Numbers::new(34);
    for group in 1..=16 {
        for (index, block_size) in BLOCK_SIZES.iter().enumerate() {
            let turn = group * 41 + index;
            let (n_q, len) = rows_and_positions(turn, 2 * group, &mut numbers);
            let (k_width, v_width) = (numbers.between(1, 40), numbers.between(1, 40));
            let sizes = Sizes { n_kv_heads: 1 + turn % 3, group, k_width, v_width, n_q, len };
            let mask = if turn.is_multiple_of(2) { 0 } else { numbers.below(256) as u8 };
            if !is_f32::<E>() && turn % 3 != 0 {
                continue;
            }
            compare::<E>(&mut found, sizes, mask, *block_size, 10_000 + turn as u64);
        }
    }
    judge::<E>("groups", found);
}

/// Contexts past the border at 512 and the next one, where states are merged.
fn long_contexts<E: Element>() {
    let mut found = nothing_yet();
    let mut numbers = Numbers::new(56);
    for turn in 0..40 {
        let (k_width, v_width) = (numbers.between(4, 24), numbers.between(4, 24));
        let len = [511, 512, 513, 575, 1023, 1024, 1025, 1200][turn % 8];
        let (n_q, group) = (1 + turn % 5, 1 + turn % 3);
        let sizes = Sizes { n_kv_heads: 1, group, k_width, v_width, n_q, len };
        let mask = if turn < 16 { 0 } else { numbers.below(256) as u8 };
        if !is_f32::<E>() && turn % 3 != 0 {
            continue;
        }
        compare::<E>(&mut found, sizes, mask, BLOCK_SIZES[turn * 11 % 41], 20_000 + turn as u64);
    }
    judge::<E>("long", found);
}

every_type! {
    every_width_with_groups_blocks_and_options,
    every_group_with_every_block_size,
    long_contexts,
}
