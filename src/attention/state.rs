//! Attention over parts, merged by the caller.

use core::f32::consts::{LN_2, LOG2_E};

use crate::kernel::state::{Head, finish, log_sum_exp, merge};
use crate::simd::{Kernel, Level, Simd};

/// The attention of one query row of one head over some of the keys, not yet divided.
///
/// Keys may be split over calls, threads or machines: attend over each part
/// ([`AttentionOptions::positions`](crate::attention::AttentionOptions::positions)), turn each
/// output and its log-sum-exp into a state, and merge. Merging is exact up to rounding, in any
/// grouping, and the empty state is legal everywhere: merged with it nothing changes, and
/// finishing it gives zeros and -inf.
///
/// The state borrows the memory of its output row and allocates nothing. Sinks belong to
/// [`finish`](AttentionState::finish), so that parts stay mergeable.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::AttentionState;
///
/// let (mut left, mut right) = ([0.0; 2], [0.0; 2]);
/// let mut state = AttentionState::empty(&mut left);
/// state.push(0.0, &[1.0, 0.0]);
/// let mut other = AttentionState::empty(&mut right);
/// other.push(0.0, &[0.0, 1.0]);
/// state.merge(&other);
/// assert!(!state.is_empty());
/// assert_eq!((state.max(), state.denom(), state.out()), (0.0, 2.0, &[1.0, 1.0][..]));
/// assert_eq!(state.lse(), 2.0_f32.ln());
///
/// let mut answer = [0.0; 2];
/// let lse = state.finish(None, &mut answer);
/// assert_eq!(answer, [0.5, 0.5]);
/// assert_eq!(lse, 2.0_f32.ln());
/// ```
#[derive(Debug)]
pub struct AttentionState<'a> {
    head: Head,
    out: &'a mut [f32],
    level: Level,
}

impl<'a> AttentionState<'a> {
    /// No key seen yet. `out` is as long as a value row and is cleared.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::AttentionState;
    ///
    /// let (mut row, mut answer) = ([7.0; 2], [7.0; 2]);
    /// let state = AttentionState::empty(&mut row);
    /// assert!(state.is_empty());
    /// // A query that sees no key: zeros, and the logarithm of nothing.
    /// assert_eq!(state.finish(None, &mut answer), f32::NEG_INFINITY);
    /// assert_eq!(answer, [0.0; 2]);
    /// ```
    pub fn empty(out: &'a mut [f32]) -> Self {
        out.fill(0.0);
        AttentionState { head: Head::EMPTY, out, level: Level::detect() }
    }

    /// What a finished part amounts to: its output row and its log-sum-exp, as attention writes
    /// them without sinks (a sink would be counted in each part, and the log-sum-exp leaves it
    /// out). A log-sum-exp of -inf is the empty state, whatever the row says.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{
    ///     AttentionOptions, AttentionState, Output, causal_gqa_attention_into,
    /// };
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 4], &[1.0, 3.0, 5.0, 7.0], 4)?;
    /// let (mut out, mut lse, mut scratch) = ([[0.0]; 2], [[0.0]; 2], [0.0; 8192]);
    /// for (part, (out, lse)) in [0..1, 1..4].into_iter().zip(out.iter_mut().zip(&mut lse)) {
    ///     let options = AttentionOptions::new().positions(part);
    ///     let output = Output::new(out).lse(lse);
    ///     causal_gqa_attention_into(&[0.5], &cache, 1, &options, output, &mut scratch)?;
    /// }
    /// let ([mut first, mut rest], mut answer) = (out, [0.0]);
    /// let mut state = AttentionState::from_output(&mut first, lse[0][0]);
    /// state.merge(&AttentionState::from_output(&mut rest, lse[1][0]));
    /// state.finish(None, &mut answer);
    /// assert!((answer[0] - 4.0).abs() < 1e-6);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn from_output(out: &'a mut [f32], lse: f32) -> Self {
        let mut state = AttentionState { head: Head::EMPTY, out, level: Level::detect() };
        if lse == f32::NEG_INFINITY {
            state.out.fill(0.0);
        } else {
            state.head = Head { max: lse * LOG2_E, denom: 1.0 };
        }
        if lse.is_nan() {
            state.head = Head { max: f32::NEG_INFINITY, denom: f32::NAN };
        }
        state
    }

    /// The same state, merged and finished at this level from now on.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::Level;
    /// use paged_kv::attention::AttentionState;
    ///
    /// let (mut row, mut answer) = ([0.0; 2], [0.0; 2]);
    /// let mut state = AttentionState::empty(&mut row).with_level(Level::SCALAR); // the reference
    /// state.push(1.0, &[3.0, 4.0]);
    /// state.finish(None, &mut answer);
    /// assert_eq!(answer, [3.0, 4.0]);
    /// ```
    #[must_use = "the state is moved into the one returned"]
    pub fn with_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Takes one more key in: its score (a natural logarithm, scaled and masked already) and its
    /// value.
    ///
    /// # Examples
    ///
    /// ```
    /// use core::f32::consts::LN_2;
    /// use paged_kv::attention::AttentionState;
    ///
    /// let (mut row, mut answer) = ([0.0], [0.0]);
    /// let mut state = AttentionState::empty(&mut row);
    /// state.push(0.0, &[1.0]);
    /// state.push(LN_2, &[4.0]); // weighs twice as much
    /// state.push(f32::NEG_INFINITY, &[100.0]); // was masked
    /// state.finish(None, &mut answer);
    /// assert!((answer[0] - 3.0).abs() < 1e-6);
    /// ```
    ///
    /// # Panics
    ///
    /// If the value is not as long as the output row.
    pub fn push(&mut self, score: f32, value: &[f32]) {
        self.check(value.len());
        let head = if score.is_nan() {
            Head { max: f32::NEG_INFINITY, denom: f32::NAN }
        } else if score == f32::NEG_INFINITY {
            return;
        } else {
            Head { max: score * LOG2_E, denom: 1.0 }
        };
        let (into, out) = (&mut self.head, &mut *self.out);
        self.level.run(Merge { into, out, from: head, from_out: value });
    }

    /// Takes in what the other state has seen.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::AttentionState;
    ///
    /// let (mut rows, mut answer) = ([[0.0]; 3], [0.0]);
    /// let [first, second, third] = &mut rows; // of three machines
    /// let mut all = AttentionState::empty(first);
    /// for (row, value) in [(second, 2.0), (third, 7.0)] {
    ///     let mut part = AttentionState::empty(row);
    ///     part.push(0.0, &[value]);
    ///     part.push(0.0, &[0.0]);
    ///     all.merge(&part);
    /// }
    /// all.finish(None, &mut answer);
    /// assert_eq!(answer, [2.25]);
    /// ```
    ///
    /// # Panics
    ///
    /// If the two output rows differ in length.
    pub fn merge(&mut self, other: &AttentionState<'_>) {
        self.check(other.out.len());
        let (into, out) = (&mut self.head, &mut *self.out);
        self.level.run(Merge { into, out, from: other.head, from_out: other.out });
    }

    /// Whether no key was seen.
    pub fn is_empty(&self) -> bool {
        self.head.is_empty()
    }

    /// What the sums are relative to, a natural logarithm: the largest score seen, where a finished
    /// part counts as one score, its log-sum-exp. -inf for the empty state.
    pub fn max(&self) -> f32 {
        self.head.max * LN_2
    }

    /// The sum of `e^(score - max)`, a finished part counting as one; 0 for the empty state.
    pub fn denom(&self) -> f32 {
        self.head.denom
    }

    /// The sum of `e^(score - max) x value`.
    pub fn out(&self) -> &[f32] {
        self.out
    }

    /// Writes the answer and returns its log-sum-exp. The sink, a learned logit with a zero
    /// value, joins the denominator here and stays out of the log-sum-exp.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::AttentionState;
    ///
    /// let (mut row, mut answer) = ([0.0], [0.0]);
    /// let mut state = AttentionState::empty(&mut row);
    /// state.push(0.0, &[3.0]);
    /// assert_eq!(state.finish(Some(0.0), &mut answer), 0.0); // the log-sum-exp without the sink
    /// assert_eq!(answer, [1.5]); // which took half of the weight
    /// ```
    ///
    /// # Panics
    ///
    /// If the answer is not as long as the output row.
    pub fn finish(&self, sink: Option<f32>, answer: &mut [f32]) -> f32 {
        self.check(answer.len());
        self.level.run(Finish { head: self.head, out: self.out, sink, answer });
        self.lse()
    }

    /// The log-sum-exp so far, a natural logarithm; -inf for the empty state.
    pub fn lse(&self) -> f32 {
        log_sum_exp(self.head)
    }

    #[track_caller]
    fn check(&self, have: usize) {
        if have != self.out.len() {
            width_differs(self.out.len(), have);
        }
    }
}

#[cold]
#[inline(never)]
#[track_caller]
fn width_differs(need: usize, have: usize) -> ! {
    panic!("this state's rows hold {need} numbers, got {have}");
}

struct Merge<'m> {
    into: &'m mut Head,
    out: &'m mut [f32],
    from: Head,
    from_out: &'m [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        merge(s, self.into, self.out, self.from, self.from_out);
    }
}

struct Finish<'m> {
    head: Head,
    out: &'m [f32],
    sink: Option<f32>,
    answer: &'m mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        finish(s, self.head, self.out, self.sink, self.answer);
    }
}
