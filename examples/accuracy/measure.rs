//! How far attention is from its formula in double precision, and what of it is storing.
//!
//! ```text
//! formula over what was handed in  <- storing ->  formula over what is stored
//!              ^                                        ^
//!              +---------------- whole ------- ours ----+ arithmetic
//! ```

use paged_kv::internal::doors::{Held, Place, stored};
use paged_kv::internal::oracle::{Case, Truth, attention};
use paged_kv::{Element, Int4, Int8, Level, bf16, f16};

/// Errors of some numbers, each divided by the largest value that its row sees.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Errors {
    /// The largest.
    pub(crate) most: f64,
    squares: f64,
    count: usize,
}

impl Errors {
    fn see(&mut self, error: f64) {
        // A NaN would be lost in a maximum.
        self.most = if error.is_nan() { f64::INFINITY } else { self.most.max(error) };
        self.squares += error * error;
        self.count += 1;
    }

    /// The root of the mean square.
    pub(crate) fn rms(&self) -> f64 {
        (self.squares / self.count as f64).sqrt()
    }
}

/// What one level makes of one stored type.
#[derive(Clone, Debug)]
pub(crate) struct Levelled {
    pub(crate) dtype: &'static str,
    pub(crate) level: Level,
    /// From the formula over what was handed in.
    pub(crate) whole: Errors,
    /// From the formula over what is stored.
    pub(crate) arithmetic: Errors,
    /// The largest of the latter as a part of `1e-6 + 2^-22 S`, which exact levels stay within.
    pub(crate) of_bound: f64,
}

/// All errors over some cases.
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    /// What storing alone loses, for each type.
    pub(crate) storing: Vec<(&'static str, Errors)>,
    /// Each type at each level that does something of its own with it.
    pub(crate) levels: Vec<Levelled>,
}

/// Measures every type at every level of this machine, the inexact ones included.
pub(crate) fn measure(cases: &[Case]) -> Figures {
    let mut figures = Figures { storing: Vec::new(), levels: Vec::new() };
    let given: Vec<Truth> = cases.iter().map(attention).collect();
    one::<f32>(cases, &given, &mut figures);
    one::<f16>(cases, &given, &mut figures);
    one::<bf16>(cases, &given, &mut figures);
    one::<Int8>(cases, &given, &mut figures);
    one::<Int4>(cases, &given, &mut figures);
    figures
}

/// The levels at which a type has bits of its own. The others are those of `avx512`, which the
/// tests of the inexact levels compare.
fn levels<E: Element>() -> impl Iterator<Item = Level> {
    let rounds = |level: &Level| match level.name() {
        "avx512-bf16" => ["bf16", "int8", "int4"].contains(&E::NAME),
        _ => E::NAME == "int8",
    };
    let inexact = [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten();
    Level::available().chain(inexact.filter(rounds))
}

fn one<E: Element>(cases: &[Case], given: &[Truth], figures: &mut Figures) {
    let mut storing = Errors::default();
    let mut levelled: Vec<Levelled> = levels::<E>()
        .map(|level| {
            let none = Errors::default();
            Levelled { dtype: E::NAME, level, whole: none, arithmetic: none, of_bound: 0.0 }
        })
        .collect();
    for (case, given) in cases.iter().zip(given) {
        let kept = attention(&stored::<E>(case));
        let width = case.sizes.v_width;
        for (at, (have, want)) in kept.out.iter().zip(&given.out).enumerate() {
            storing.see((have - want).abs() / given.most[at / width]);
        }
        let held = Held::<E>::full(case, Place::Paged(64, 1));
        for levelled in &mut levelled {
            let asked = held.ask(&case.q, case.sizes.n_heads(), &case.rules, levelled.level);
            let out = asked.expect("the case is legal").out;
            for (at, have) in out.iter().enumerate() {
                let (have, row) = (f64::from(*have), at / width);
                levelled.whole.see((have - given.out[at]).abs() / given.most[row]);
                let error = (have - kept.out[at]).abs() / kept.most[row];
                levelled.arithmetic.see(error);
                let bound = 1e-6 + kept.reach[row] / 4_194_304.0;
                levelled.of_bound = levelled.of_bound.max(error / bound);
            }
        }
    }
    figures.storing.push((E::NAME, storing));
    figures.levels.extend(levelled);
}
