//! One comparison: the same work over rows of every type, at every level, taking turns.

use core::error::Error;
use std::time::Instant;

use paged_kv::batch::Inline;
use paged_kv::internal::numbers::Numbers;
use paged_kv::internal::workloads::Workload;
use paged_kv::{Element, Int4, Int8, KvShape, Level, bf16, f16};

use super::inputs::Inputs;
use super::measure::multiply_adds;
use super::options::Options;
use super::problem::{Problem, Setup};
use super::report::Times;
use super::subject::{Ask, Attend, Subject};

/// Query heads, KV heads, width.
pub(crate) type Heads = (usize, usize, usize);

/// Where calls find their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// In the caches, as far as they fit.
    Warm,
    /// In memory.
    Cold,
}

/// What is read between two looks at the same slice: nine times the largest cache of the machine
/// that the README's figures are from.
pub(crate) const POOL: usize = 300 << 20;

/// What one cold call reads.
const SLICE: usize = 2 << 20;

/// Calls in a cold turn, and those before that are not noted: after somebody else's turn the code
/// is cold, too.
const COLD_CALLS: usize = 40;
const COLD_BEFORE: usize = 2;

/// Seconds of calls in a warm turn.
const WARM: f64 = 1.5e-3;

/// Shorter calls are timed several at once: a clock costs some 25 ns.
const SHORT: f64 = 20e-6;

/// Longer ones need nothing to come before them.
const LONG: f64 = 20e-3;

/// What a case is about.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) kind: &'static str,
    /// Of cold rows the length is left out: it is what fits a slice.
    pub(crate) workload: Workload,
    pub(crate) heads: Heads,
    pub(crate) block_size: usize,
    pub(crate) rows: Rows,
}

/// Positions after which rows repeat. That changes no time, and drawing them all would take longer
/// than everything else.
const PERIOD: usize = 64;

impl Spec {
    /// Rows for every type: as many positions as the narrowest fits into a slice.
    pub(crate) fn inputs(&self) -> Inputs {
        let mut numbers = Numbers::new(1);
        let row = self.workload.sizes.n_kv_heads * self.workload.sizes.k_width;
        let len = self.len::<Int4>().max(self.len::<f32>());
        let mut rows = || {
            let rows = numbers.normals(PERIOD * row);
            rows.iter().copied().cycle().take(len * row).collect()
        };
        let (k, v) = (rows(), rows());
        Inputs { q: numbers.normals(self.workload.q_numbers()), k, v }
    }

    fn len<E: Element>(&self) -> usize {
        match self.rows {
            Rows::Warm => self.workload.sizes.len,
            Rows::Cold => SLICE / bytes_per_position::<E>(self.heads) / PERIOD * PERIOD,
        }
    }
}

/// Keys and values of a position, as they are stored.
pub(crate) fn bytes_per_position<E: Element>((_, n_kv_heads, width): Heads) -> usize {
    let shape = KvShape::square(PERIOD, n_kv_heads, width).expect("a shape");
    let store = paged_kv::cache::PagedKvStore::<E>::with_shape(shape, 1).expect("one block");
    store.bytes_per_block() / PERIOD
}

/// A case at work.
pub(crate) struct Case<'a> {
    spec: Spec,
    subjects: Vec<Box<dyn Subject + 'a>>,
    /// For each subject the copy that is next.
    cursors: Vec<usize>,
    contenders: Vec<Contender>,
    /// The multiply-adds of levels.
    fma: Vec<(Level, f64)>,
    rounds: usize,
}

/// Somebody who takes turns.
struct Contender {
    subject: usize,
    ask: Ask,
    /// Warm: of each turn the shortest call. Cold: all.
    times: Vec<f64>,
    /// How many calls are timed at once.
    again: usize,
}

impl<'a> Case<'a> {
    /// Every type that is wanted, in a store of its own.
    pub(crate) fn new(
        spec: &Spec,
        inputs: &'a Inputs,
        options: &Options,
    ) -> Result<Case<'a>, Box<dyn Error>> {
        let mut subjects = Vec::new();
        for dtype in ["f32", "f16", "bf16", "int8", "int4"] {
            if options.wants_type(dtype) {
                subjects.push(match dtype {
                    "f16" => attend::<f16>(spec, inputs)?,
                    "bf16" => attend::<bf16>(spec, inputs)?,
                    "int8" => attend::<Int8>(spec, inputs)?,
                    "int4" => attend::<Int4>(spec, inputs)?,
                    _ => attend::<f32>(spec, inputs)?,
                });
            }
        }
        let every = spec.kind != "verify";
        Ok(Case::of(spec.clone(), subjects, |dtype| options.levels(dtype, every)))
    }

    /// These subjects, each at the levels of its type.
    pub(crate) fn of(
        spec: Spec,
        subjects: Vec<Box<dyn Subject + 'a>>,
        levels: impl Fn(&str) -> Vec<Level>,
    ) -> Case<'a> {
        let mut contenders = Vec::new();
        let mut fma: Vec<(Level, f64)> = Vec::new();
        for (subject, one) in subjects.iter().enumerate() {
            let asks = levels(one.dtype())
                .into_iter()
                .flat_map(|level| (0..one.ways().len()).map(move |way| Ask::Call { level, way }));
            let read = one.bytes().map(|_| Ask::Read(Level::detect()));
            for ask in asks.chain(read) {
                contenders.push(Contender { subject, ask, times: Vec::new(), again: 0 });
                if let Ask::Call { level, .. } = ask
                    && fma.iter().all(|(known, _)| *known != level)
                {
                    fma.push((level, 0.0));
                }
            }
        }
        Case { spec, cursors: vec![0; subjects.len()], subjects, contenders, fma, rounds: 0 }
    }

    /// Everybody once.
    pub(crate) fn round(&mut self) {
        let Case { spec, subjects, cursors, contenders, fma, rounds } = self;
        // Nobody always comes after the same one.
        let count = contenders.len();
        for index in 0..count {
            let one = &mut contenders[(index + *rounds) % count];
            let (subject, cursor) = (&mut *subjects[one.subject], &mut cursors[one.subject]);
            match spec.rows {
                Rows::Warm => one.warm(subject),
                Rows::Cold => one.cold(subject, cursor),
            }
        }
        for (level, most) in fma {
            *most = most.max(multiply_adds(*level, &Inline));
        }
        *rounds += 1;
    }

    /// A line for each type, way and level.
    pub(crate) fn report(&self) {
        for one in &self.contenders {
            if let Ask::Call { level, way } = one.ask {
                self.line(one, level, way);
            }
        }
    }

    fn line(&self, one: &Contender, level: Level, way: usize) {
        let Spec { kind, workload, heads: (n_heads, n_kv_heads, width), block_size, .. } =
            &self.spec;
        let subject = &self.subjects[one.subject];
        let (way, threads) = subject.ways()[way];
        let took = self.seconds(one);
        let fma = self.fma.iter().find(|(known, _)| *known == level).map_or(f64::NAN, |fma| fma.1);
        let is_read =
            |other: &&Contender| other.subject == one.subject && matches!(other.ask, Ask::Read(_));
        let read = self.contenders.iter().find(is_read).map(|read| self.seconds(read));
        let optional = |number: Option<f64>| match number {
            Some(number) if number.is_finite() => format!("{number:.4}"),
            _ => "null".into(),
        };
        let gbps = subject.bytes().zip(read).map(|(bytes, seconds)| bytes / seconds / 1e9);
        println!(
            "{{\"kind\": \"{kind}\", \"heads\": \"{n_heads}/{n_kv_heads} d{width}\", \
             \"block_size\": {block_size}, \"q_len\": {}, \"kv_len\": {}, \"way\": \"{way}\", \
             \"threads\": {threads}, \"dtype\": \"{}\", \"level\": \"{level}\", \"us\": {:.4}, \
             \"ns_per_position\": {:.4}, \"read_percent\": {}, \"fma_percent\": {}, \
             \"read_gbps\": {}, \"fma_gflops\": {}, \"rounds\": {}}}",
            workload.sizes.n_q,
            subject.positions(),
            subject.dtype(),
            took * 1e6,
            took * 1e9 / subject.positions() as f64,
            optional(read.map(|read| 100.0 * read / took)),
            optional(Some(100.0 * subject.flops() / fma / threads as f64 / took)),
            optional(gbps),
            optional(Some(fma / 1e9)),
            self.rounds,
        );
    }

    /// The figure that counts.
    fn seconds(&self, one: &Contender) -> f64 {
        let times = Times::new(one.times.clone());
        if self.spec.rows == Rows::Cold { times.fast() } else { times.least() }
    }
}

impl Contender {
    /// Calls on rows that the two calls before have brought into the caches.
    fn warm(&mut self, subject: &mut dyn Subject) {
        let mut once = f64::INFINITY;
        for _ in 0..2 {
            once = once.min(subject.time(self.ask, 0, 1));
            if once > LONG {
                break;
            }
        }
        if self.again == 0 {
            self.again = (SHORT / once.max(1e-9)).ceil() as usize;
        }
        let mut least = f64::INFINITY;
        let begin = Instant::now();
        loop {
            least = least.min(subject.time(self.ask, 0, self.again));
            if begin.elapsed().as_secs_f64() >= WARM {
                break;
            }
        }
        self.times.push(least);
    }

    /// Calls on the slices that nobody has looked at for longest.
    fn cold(&mut self, subject: &mut dyn Subject, cursor: &mut usize) {
        for index in 0..COLD_BEFORE + COLD_CALLS {
            let took = subject.time(self.ask, *cursor, 1);
            *cursor = (*cursor + 1) % subject.copies();
            if index >= COLD_BEFORE {
                self.times.push(took);
            }
        }
    }
}

fn attend<'a, E: Element>(
    spec: &Spec,
    inputs: &'a Inputs,
) -> Result<Box<dyn Subject + 'a>, Box<dyn Error>> {
    let mut workload = spec.workload;
    workload.sizes.len = spec.len::<E>();
    let copies = match spec.rows {
        Rows::Warm => 1,
        Rows::Cold => POOL / (workload.sizes.len * bytes_per_position::<E>(spec.heads)) + 1,
    };
    let setup = Setup { block_size: spec.block_size, level: Level::detect(), copies };
    let problem = Problem::<E>::new(&workload, inputs, setup, &Inline)?;
    let Workload { sizes, .. } = workload;
    let (n_q, len, flops) = (sizes.n_q, sizes.len, workload.flops());
    Ok(Box::new(Attend { problem, n_q, len, flops, copies }))
}
