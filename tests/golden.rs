//! Attention as others compute it: PyTorch in double precision, onnxruntime in `f32`.
//!
//! The oracle of the test kit and the kernels have the same authors, who may have misread an option
//! both times. The results in `tests/golden/` come from implementations that know nothing of this
//! crate. `make.py` there made them and says what their lines mean; inputs are drawn from seeds on
//! both sides, and a checksum of their bits says whether both drew the same.
//!
//! Every case is asked of a contiguous cache and of a shuffled store, in pages of 16 and of 64, at
//! every level, of every stored type. How far an answer may be off:
//!
//! - where the type holds the numbers exactly, as the oracle's tests allow: `2e-6 x max |v|`, or by
//!   the lengths of the products where an option can lengthen a score. Cases whose numbers are
//!   `bytes` or `nibbles` are made so that integers hold them exactly;
//! - where it does not, that and what rounding can do to a softmax, see [`storing_bound`];
//! - from onnxruntime, that and what a chain of `f32` sums loses there, see [`THEIRS`];
//! - at a level that rounds, had on request alone, that and what it says it loses, see [`rounding`].

use paged_kv::internal::doors::{Place, answer, stored};
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::oracle::{Case, Rules, Sizes, Truth, attention};
use paged_kv::internal::types::storing_error;
use paged_kv::{Element, Int4, Int8, Level, bf16, every_type};

const TORCH: &str = include_str!("golden/torch.txt");
const ONNXRUNTIME: &str = include_str!("golden/onnxruntime.txt");

/// Eight decimals are written down, so a number may be half of the last one off.
const WRITTEN: f64 = 0.5e-8;

/// What onnxruntime may lose beside us, as a part of the largest value: it adds products of `f32` in
/// an order of its own, and a sum of 128 of them is off by 128 x 2^-24 = 7.6e-6 of their sizes at
/// worst.
const THEIRS: f64 = 8e-6;

const PLACES: [Place; 4] =
    [Place::Contiguous(16), Place::Contiguous(64), Place::Paged(16, 3), Place::Paged(64, 5)];

/// A case, and what somebody else computed for it.
#[derive(Debug)]
struct Golden {
    name: &'static str,
    numbers: &'static str,
    case: Case,
    checksum: u64,
    /// `[n_q][n_heads]`, where it was to be had.
    lse: Vec<Option<f64>>,
    /// `[n_q][n_heads][v_width]`.
    out: Vec<f64>,
}

/// All cases of a file.
fn golden(text: &'static str) -> Vec<Golden> {
    let cases: Vec<Golden> = text.split("\ncase ").skip(1).map(one).collect();
    assert!(cases.len() > 10, "the file holds {} cases", cases.len());
    cases
}

fn one(text: &'static str) -> Golden {
    let mut lines = text.lines();
    let name = lines.next().expect("a case has a name");
    let (mut sizes, mut seed, mut numbers, mut checksum) = (None, 0, "", 0);
    let (mut rules, mut lse, mut out) = (Rules::PLAIN, Vec::new(), Vec::new());
    for line in lines {
        let (word, rest) = line.split_once(' ').expect("a line is a word and what it is about");
        match word {
            "by" => (),
            "sizes" => sizes = Some(sizes_of(&list(rest))),
            "seed" => seed = one_of(rest),
            "numbers" => numbers = rest,
            "option" => option(&mut rules, rest),
            "inputs" => checksum = u64::from_str_radix(rest, 16).expect("a checksum is hex"),
            "row" => {
                let (first, rest) = rest.split_once(' ').expect("a row has numbers");
                lse.push((first != "-").then(|| one_of(first)));
                out.extend(list::<f64>(rest));
            }
            _ => panic!("{name}: nobody knows what `{word}` is"),
        }
    }
    let sizes = sizes.expect("a case has sizes");
    assert_eq!(lse.len(), sizes.n_q * sizes.n_heads(), "{name}");
    assert_eq!(out.len(), lse.len() * sizes.v_width, "{name}");
    Golden { name, numbers, case: drawn(sizes, rules, numbers, seed), checksum, lse, out }
}

fn one_of<T: core::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("{text} is no number"))
}

fn list<T: core::str::FromStr>(text: &str) -> Vec<T> {
    text.split(' ').map(one_of).collect()
}

fn sizes_of(list: &[usize]) -> Sizes {
    let [n_kv_heads, group, k_width, v_width, n_q, len] = *list else {
        panic!("six sizes, not {list:?}");
    };
    Sizes { n_kv_heads, group, k_width, v_width, n_q, len }
}

fn option(rules: &mut Rules, text: &str) {
    let (name, value) = text.split_once(' ').expect("an option has a value");
    match name {
        "scale" => rules.scale = Some(one_of(value)),
        "soft_cap" => rules.soft_cap = Some(one_of(value)),
        "alibi_slopes" => rules.alibi_slopes = Some(list(value)),
        "window" => rules.window = Some(one_of(value)),
        "keep_first" => rules.keep_first = Some(one_of(value)),
        "sinks" => rules.sinks = Some(list(value)),
        "causal" => rules.causal = one_of::<u8>(value) != 0,
        "positions" => {
            let ends: Vec<usize> = list(value);
            rules.positions = Some(ends[0]..ends[1]);
        }
        "tree" => {
            let parents: Vec<i64> = list(value);
            rules.tree = parents.into_iter().map(|parent| usize::try_from(parent).ok()).collect();
        }
        _ => panic!("there is no option {name}"),
    }
}

/// The inputs, as `make.py` draws them.
fn drawn(sizes: Sizes, rules: Rules, kind: &str, seed: u64) -> Case {
    let mut numbers = Numbers::new(seed);
    let mut rows = |kind: &str, count: usize, width: usize| match kind {
        "normal" => numbers.normals(count * width),
        "bytes" => whole(&mut numbers, count, width, (127, width, 64.0)),
        "nibbles" => whole(&mut numbers, count, width, (7, 32, 4.0)),
        _ => panic!("there are no {kind}"),
    };
    Case {
        sizes,
        rules,
        q: rows("normal", sizes.n_q * sizes.n_heads(), sizes.k_width),
        k: rows(kind, sizes.len * sizes.n_kv_heads, sizes.k_width),
        v: rows(kind, sizes.len * sizes.n_kv_heads, sizes.v_width),
    }
}

/// Rows of whole numbers up to `most` in units of their own, the first of each `share` as large as
/// can be.
fn whole(
    numbers: &mut Numbers,
    count: usize,
    width: usize,
    (most, share, unit): (i32, usize, f32),
) -> Vec<f32> {
    let mut rows = Vec::with_capacity(count * width);
    for index in 0..count * width {
        let mut number = numbers.below(2 * most as usize + 1) as i32 - most;
        if (index % width).is_multiple_of(share) {
            number = if number >= 0 { most } else { -most };
        }
        rows.push(number as f32 / unit);
    }
    rows
}

/// FNV-1a over the bits of all inputs.
fn checksum(case: &Case) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for number in case.q.iter().chain(&case.k).chain(&case.v) {
        for byte in number.to_bits().to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    hash
}

/// How far storing keys and values as `E` may move the output of a row.
///
/// A key's number is off by at most `e` times the largest that shares its scale, so a score of the
/// row by at most `d`, the largest sum of that over the keys that it sees. Weights of a softmax whose
/// scores move by at most `d` move by `2 tanh(d / 2)` altogether. A value's number is off by at most
/// `e` of the largest, and so is an average of them. Neither a soft cap nor a sink makes it worse.
fn storing_bound<E: Element>(case: &Case, truth: &Truth, row: usize) -> f64 {
    let (sizes, e) = (case.sizes, storing_error::<E>());
    let (query, head) = (row / sizes.n_heads(), row % sizes.n_heads());
    let q = &case.q[row * sizes.k_width..][..sizes.k_width];
    let share = match E::NAME {
        "int8" => sizes.k_width,
        "int4" => 32,
        _ => 1,
    };
    // Below the normal numbers of f16 the error no longer shrinks with the number.
    let largest = |group: &[f32]| group.iter().fold(2f32.powi(-14), |most, x| most.max(x.abs()));
    let scale = case.rules.scale.map_or(1.0 / (sizes.k_width as f64).sqrt(), f64::from);
    let moved = (0..sizes.len).filter(|key| case.sees(query, *key)).map(|key| {
        let groups = case.key(key, head / sizes.group).chunks(share).zip(q.chunks(share));
        let sums = groups.map(|(k, q)| {
            f64::from(largest(k)) * q.iter().map(|x| f64::from(x.abs())).sum::<f64>()
        });
        scale.abs() * e * sums.sum::<f64>()
    });
    let moved = moved.fold(0.0, f64::max);
    truth.most[row] * (e + (1.0 + e) * 2.0 * (moved / 2.0).tanh())
}

/// The levels that round where this type is stored, and what they say they lose of the largest value.
/// They say it of scores that are no longer than unit variance makes them; the longest here are two
/// and a half times that.
fn rounding<E: Element>() -> Vec<(Level, f64)> {
    let (bf16, vnni) = match E::NAME {
        "bf16" | "int4" => (true, false),
        "int8" => (true, true),
        _ => (false, false),
    };
    let levels = [("avx512-bf16", bf16, 1e-2), ("avx512-vnni", vnni, 3e-2)];
    let asked = levels.into_iter().filter(|(_, rounds, _)| *rounds);
    asked
        .filter_map(|(name, _, loses)| {
            let level = Level::from_name(name);
            if level.is_none() {
                eprintln!("NOT TESTED: {} at {name}, which this processor lacks", E::NAME);
            }
            Some((level?, loses))
        })
        .collect()
}

/// What is asked of one case, stored as one type: how far each row may be off.
struct Allowed {
    rows: Vec<f64>,
    /// The largest value that each row sees.
    most: Vec<f64>,
    lse: Vec<Option<f64>>,
}

impl Allowed {
    fn new<E: Element>(golden: &Golden, theirs: f64) -> Allowed {
        let case = &golden.case;
        // Its sizes alone are used: how long the products are, and how large the values.
        let truth = attention(case);
        let held = stored::<E>(case);
        let exact = held.k == case.k && held.v == case.v;
        let must_be = match golden.numbers {
            "bytes" => E::NAME != "int4",
            "nibbles" => E::NAME != "int8",
            _ => E::NAME == "f32",
        };
        assert!(exact || !must_be, "{}: {} does not hold it exactly", golden.name, E::NAME);
        let rows = (0..golden.lse.len()).map(|row| {
            let storing = if exact { 0.0 } else { storing_bound::<E>(case, &truth, row) };
            truth.out_bound(&case.rules, row) + theirs * truth.most[row] + WRITTEN + storing
        });
        // What storing does to a sum of exponentials is another question, asked by the oracle.
        let lse = (0..golden.lse.len()).map(|row| exact.then(|| truth.lse_bound(row) + WRITTEN));
        let (rows, lse) = (rows.collect(), lse.collect());
        Allowed { rows, most: truth.most, lse }
    }

    /// At a level that says how much it loses, which it does not say of the LSE.
    fn rounded(&self, loses: f64) -> Allowed {
        let rows = self.rows.iter().zip(&self.most).map(|(row, most)| row + loses * most);
        let lse = vec![None; self.lse.len()];
        Allowed { rows: rows.collect(), most: self.most.clone(), lse }
    }

    /// The largest error of an answer, as a part of what is allowed.
    fn part(&self, golden: &Golden, out: &[f32], lse: &[f32]) -> f64 {
        let width = golden.case.sizes.v_width;
        let mut part = 0.0f64;
        let mut see = |error: f64, bound: f64| {
            part = if error.is_nan() { f64::INFINITY } else { part.max(error / bound) };
        };
        for (at, (have, want)) in out.iter().zip(&golden.out).enumerate() {
            see((f64::from(*have) - want).abs(), self.rows[at / width]);
        }
        for (row, (have, want)) in lse.iter().zip(&golden.lse).enumerate() {
            if let (Some(want), Some(bound)) = (want, self.lse[row]) {
                see((f64::from(*have) - want).abs(), bound);
            }
        }
        part
    }
}

/// Every case of a file, everywhere it can be held, at every level.
fn agrees<E: Element>(text: &'static str, theirs: f64) {
    let rounding = rounding::<E>();
    for golden in golden(text) {
        let exact = Allowed::new::<E>(&golden, theirs);
        let mut worst = 0.0f64;
        let mut ask = |level: Level, allowed: &Allowed| {
            for place in PLACES {
                let have = answer::<E>(&golden.case, place, level);
                let part = allowed.part(&golden, &have.out, &have.lse);
                worst = worst.max(part);
                let what = || format!("{}, {}, {level}, {place:?}", golden.name, E::NAME);
                assert!(part <= 1.0, "{}: {part:.3} times what is allowed", what());
            }
        };
        Level::available().for_each(|level| ask(level, &exact));
        rounding.iter().for_each(|(level, loses)| ask(*level, &exact.rounded(*loses)));
        println!("{:30} {:4} {worst:.3} of what is allowed", golden.name, E::NAME);
    }
}

fn attention_is_that_of_torch<E: Element>() {
    agrees::<E>(TORCH, 0.0);
}

fn attention_is_that_of_onnxruntime<E: Element>() {
    agrees::<E>(ONNXRUNTIME, THEIRS);
}

every_type! {
    attention_is_that_of_torch,
    attention_is_that_of_onnxruntime,
}

#[test]
fn both_sides_drew_the_same_inputs() {
    for text in [TORCH, ONNXRUNTIME] {
        for golden in golden(text) {
            let (have, want) = (checksum(&golden.case), golden.checksum);
            assert_eq!(have, want, "{}: the generators have drifted apart", golden.name);
        }
    }
}

/// What everything else in the suite is compared with, compared with somebody else's.
#[test]
fn the_oracle_is_that_of_torch() {
    for golden in golden(TORCH) {
        let truth = attention(&golden.case);
        let lse = golden.lse.iter().map(|lse| lse.expect("it was written"));
        let pairs = truth.out.iter().zip(&golden.out).map(|(have, want)| (*have, *want));
        for (have, want) in pairs.chain(truth.lse.iter().copied().zip(lse)) {
            assert!((have - want).abs() <= 1.01 * WRITTEN, "{}: {have} {want}", golden.name);
        }
    }
}

/// The same rules with one thing in them a little wrong, for each thing that they say.
fn mistakes(rules: &Rules) -> Vec<(&'static str, Rules)> {
    let mut all = Vec::new();
    let mut wrong = |name, change: &dyn Fn(&mut Rules)| {
        let mut changed = rules.clone();
        change(&mut changed);
        if changed != *rules {
            all.push((name, changed));
        }
    };
    let percent = |number: &mut f32| *number *= 1.01;
    wrong("scale", &|it| it.scale.iter_mut().for_each(percent));
    wrong("soft_cap", &|it| it.soft_cap.iter_mut().for_each(percent));
    wrong("alibi_slopes", &|it| it.alibi_slopes.iter_mut().flatten().for_each(percent));
    wrong("alibi_slopes", &|it| it.alibi_slopes.iter_mut().for_each(|all| all.rotate_left(1)));
    wrong("sinks", &|it| it.sinks.iter_mut().flatten().for_each(|sink| *sink += 0.01));
    wrong("sinks", &|it| it.sinks = None);
    wrong("window", &|it| it.window.iter_mut().for_each(|window| *window += 1));
    wrong("window", &|it| it.window.iter_mut().for_each(|window| *window -= 1));
    wrong("keep_first", &|it| it.keep_first.iter_mut().for_each(|first| *first += 1));
    wrong("keep_first", &|it| it.keep_first.iter_mut().for_each(|first| *first -= 1));
    wrong("causal", &|it| it.causal |= it.window.is_none() && it.alibi_slopes.is_none());
    wrong("positions", &|it| it.positions.iter_mut().for_each(|part| part.start += 1));
    wrong("positions", &|it| it.positions.iter_mut().for_each(|part| part.end -= 1));
    wrong("tree", &|it| it.tree.iter_mut().last().into_iter().for_each(|it| *it = Some(0)));
    all
}

/// The comparison can fail: a window that is one too long, a scale one percent too large and their
/// like are each seen, by both files.
#[test]
fn options_that_are_slightly_wrong_are_seen() {
    for (text, theirs, options) in [(TORCH, 0.0, 9), (ONNXRUNTIME, THEIRS, 6)] {
        let mut seen = Vec::new();
        for golden in golden(text) {
            let allowed = Allowed::new::<f32>(&golden, theirs);
            for (name, rules) in mistakes(&golden.case.rules) {
                let case = Case { rules, ..golden.case.clone() };
                let have = answer::<f32>(&case, PLACES[0], Level::detect());
                let part = allowed.part(&golden, &have.out, &[]);
                assert!(part > 10.0, "{}: {name} is off and nobody sees it", golden.name);
                seen.push(name);
            }
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), options, "{seen:?} were asked for");
    }
}

/// What a level that rounds may lose hides no option: one that it left out would be seen, and so
/// would keys of another head.
#[test]
fn options_that_a_level_that_rounds_leaves_out_are_seen() {
    fn left_out<E: Element>(numbers: &str) {
        for (level, loses) in rounding::<E>() {
            let mut seen = 0;
            for golden in golden(TORCH).iter().filter(|golden| golden.numbers == numbers) {
                let allowed = Allowed::new::<E>(golden, 0.0).rounded(loses);
                let mut case = Case { rules: Rules::PLAIN, ..golden.case.clone() };
                let (heads, width) = (case.sizes.n_kv_heads, case.sizes.k_width);
                if golden.case.rules == Rules::PLAIN {
                    case.k.chunks_mut(heads * width).for_each(|row| row.rotate_left(width));
                }
                if (&case.k, &case.rules) != (&golden.case.k, &golden.case.rules) {
                    let have = answer::<E>(&case, PLACES[0], level);
                    let part = allowed.part(golden, &have.out, &[]);
                    assert!(part > 1.0, "{}, {}, {level}: {part:.3}", golden.name, E::NAME);
                    seen += 1;
                }
            }
            assert!(seen > 7, "{}, {level}: {seen}", E::NAME);
        }
    }
    left_out::<bf16>("bytes");
    left_out::<Int8>("bytes");
    left_out::<Int4>("nibbles");
}

/// A query head that reads another KV head than its own is seen, too.
#[test]
fn heads_that_are_mixed_up_are_seen() {
    let mut seen = 0;
    for golden in golden(TORCH).iter().filter(|it| it.case.sizes.n_kv_heads > 1) {
        let allowed = Allowed::new::<f32>(golden, 0.0);
        let mut case = golden.case.clone();
        let (heads, width) = (case.sizes.n_kv_heads, case.sizes.k_width);
        case.k.chunks_mut(heads * width).for_each(|row| row.rotate_left(width));
        let have = answer::<f32>(&case, PLACES[0], Level::detect());
        assert!(allowed.part(golden, &have.out, &[]) > 10.0, "{}", golden.name);
        seen += 1;
    }
    assert!(seen > 5);
}
