//! What was measured, as one line of JSON or one for people.
//!
//! The keys up to `load1` are those of every harness in `benches/peers`; the rest is ours.

use core::fmt::{self, Write};

use paged_kv::Level;

/// One workload, measured.
#[derive(Clone, Debug)]
pub(crate) struct Record<'a> {
    /// Who attended.
    pub(crate) peer: &'a str,
    pub(crate) workload: &'a str,
    pub(crate) dtype: &'a str,
    /// The instruction set, of those who have a choice.
    pub(crate) level: Option<Level>,
    pub(crate) threads: usize,
    /// Copies of the keys and values that calls went through in turn.
    pub(crate) rotate: usize,
    pub(crate) times: Times,
    /// Keys and values of one call, as they are stored.
    pub(crate) kv_bytes: f64,
    pub(crate) flops: f64,
    /// From the truth over the inputs, and over the inputs as they are stored.
    pub(crate) errors: Option<(Distance, Distance)>,
    /// What only this crate's own programs know.
    pub(crate) limits: Option<Limits>,
}

/// Seconds of the calls that counted, the shortest first.
#[derive(Clone, Debug)]
pub(crate) struct Times(Vec<f64>);

impl Times {
    /// # Panics
    ///
    /// If there are none.
    pub(crate) fn new(mut seconds: Vec<f64>) -> Times {
        assert!(!seconds.is_empty(), "nothing was timed");
        seconds.sort_by(f64::total_cmp);
        Times(seconds)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn least(&self) -> f64 {
        self.0[0]
    }

    /// The 20th part of all was faster. Where calls go through cold memory this is the figure to
    /// compare: the shortest may have found its rows in a cache that somebody else shares.
    pub(crate) fn fast(&self) -> f64 {
        self.0[self.0.len() / 20]
    }

    pub(crate) fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }
}

/// The largest absolute error.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct Distance(pub(crate) f64);

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1e}", self.0)
    }
}

/// What the processor could do, measured between the calls, and how it was asked.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) block_size: usize,
    /// Reading the same bytes once.
    pub(crate) read: Times,
    /// Floating point operations a second.
    pub(crate) fma: f64,
}

impl Record<'_> {
    /// The figure that percentages are of.
    fn seconds(&self, times: &Times) -> f64 {
        if self.rotate > 1 { times.fast() } else { times.least() }
    }

    /// How much of the bandwidth was used, in percent.
    fn read_percent(&self, limits: &Limits) -> f64 {
        100.0 * self.seconds(&limits.read) / self.seconds(&self.times)
    }

    /// How much of the arithmetic was used, in percent.
    fn fma_percent(&self, limits: &Limits) -> f64 {
        100.0 * self.flops / limits.fma / self.seconds(&self.times)
    }

    /// One line of JSON.
    pub(crate) fn json(&self) -> String {
        let mut line = String::from("{");
        let mut put = |key: &str, value: &dyn fmt::Display| {
            let comma = if line.len() > 1 { ", " } else { "" };
            write!(line, "{comma}\"{key}\": {value}").expect("a string takes all");
        };
        let least = self.times.least();
        put("peer", &Quoted(self.peer));
        put("workload", &Quoted(self.workload));
        put("dtype", &Quoted(self.dtype));
        put("threads", &self.threads);
        put("rotate", &self.rotate);
        put("reps", &self.times.count());
        put("min_s", &Number(least));
        put("median_s", &Number(self.times.median()));
        put("kv_bytes", &Number(self.kv_bytes));
        put("gbps", &Number(self.kv_bytes / least / 1e9));
        put("gflops", &Number(self.flops / least / 1e9));
        put("err_f32", &Number(self.errors.map_or(f64::NAN, |(given, _)| given.0)));
        put("err_dtype", &Number(self.errors.map_or(f64::NAN, |(_, stored)| stored.0)));
        put("load1", &Number(load()));
        put("p5_s", &Number(self.times.fast()));
        if let Some(level) = self.level {
            put("level", &Quoted(level.name()));
        }
        if let Some(limits) = &self.limits {
            put("block_size", &limits.block_size);
            put("read_gbps", &Number(self.kv_bytes / self.seconds(&limits.read) / 1e9));
            put("read_percent", &Number(self.read_percent(limits)));
            put("fma_gflops", &Number(limits.fma / 1e9));
            put("fma_percent", &Number(self.fma_percent(limits)));
        }
        line.push('}');
        line
    }
}

/// For people.
impl fmt::Display for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Record { peer, workload, dtype, threads, .. } = self;
        let level = self.level.map_or("", Level::name);
        let (least, median) = (self.times.least(), self.times.median());
        write!(
            f,
            "{peer:14} {workload:20} {dtype:4} {level:11} t{threads} min {:9.1} us  med {:9.1} us  \
             {:6.2} GB/s  {:7.2} GFLOP/s",
            least * 1e6,
            median * 1e6,
            self.kv_bytes / least / 1e9,
            self.flops / least / 1e9,
        )?;
        if let Some(limits) = &self.limits {
            write!(
                f,
                "  {:3.0} % of READ  {:3.0} % of FMA",
                self.read_percent(limits),
                self.fma_percent(limits)
            )?;
        }
        if let Some((given, stored)) = &self.errors {
            write!(f, "  err {given} / {stored}")?;
        }
        write!(f, "  n={}", self.times.count())
    }
}

/// A name: none of ours has a quote or a backslash.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0)
    }
}

/// JSON knows no NaN and no infinity.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_finite() { write!(f, "{:e}", self.0) } else { f.write_str("null") }
    }
}

/// How many wanted to run during the last minute: a number to doubt the others by. Linux alone
/// says so.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(f64::NAN)
}
