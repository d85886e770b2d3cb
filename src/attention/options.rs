//! What can be asked of attention beyond the plain formula.

use core::f32::consts::LOG2_E;
use core::ops::Range;

use super::tree::TreeMask;
use crate::error::AttentionError;
use crate::kernel::TILE;
use crate::shape::GqaShape;
use crate::simd::Level;

/// Options of one attention call. The default is plain causal attention at the fastest level.
///
/// For query `i` (a position) and key `j`, in this order:
///
/// ```text
/// s(i, j) = scale x q(i).k(j)              scale: 1 / sqrt(k_width) unless set
/// s = cap x tanh(s / cap)                  soft_cap
/// s = s - slope x |i - j|                  alibi_slopes, one a query head
/// only j <= i                              causal, on by default
/// only j > i - window                      window: the query itself counts
/// or j < first                             keep_first, beside a window
/// only j in positions                      positions
/// only ancestors of i among the drafts     trees
/// out(i) = sum_j e^s v(j) / (sum_j e^s + e^sink)      sinks, one a query head
/// ```
///
/// The soft cap is Gemma 2's, the slopes are those of Press et al. (2022), the sinks those of
/// gpt-oss: a learned logit that takes weight away and gives nothing back.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::{AttentionOptions, attention_scratch_len, causal_gqa_attention_into};
/// use paged_kv::cache::KvCache;
/// use paged_kv::GqaShape;
///
/// let mut cache = KvCache::new(1, 4);
/// cache.append(&[0.5; 3 * 4], &[2.0; 3 * 4], 3)?;
/// let shape = GqaShape::new(cache.shape(), 2)?;
/// let mut scratch = vec![0.0; attention_scratch_len(&shape, 1)];
/// let mut out = vec![0.0; shape.out_row_len()];
///
/// let gemma = AttentionOptions::new().scale(0.0625).soft_cap(50.0).window(4096);
/// causal_gqa_attention_into(&[0.1; 8], &cache, 2, &gemma, &mut out, &mut scratch)?;
/// assert_eq!(out, [2.0; 8]);
/// # Ok::<(), Box<dyn core::error::Error>>(())
/// ```
///
/// In the examples of the setters keys are 0 where nothing else is said: all scores are 0 then, and
/// an answer is the mean of the values that are seen. Their scratch is simply long enough.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "options do nothing until attention is called with them"]
#[non_exhaustive]
pub struct AttentionOptions<'a> {
    scale: Option<f32>,
    soft_cap: Option<f32>,
    alibi_slopes: Option<&'a [f32]>,
    window: Option<usize>,
    keep_first: usize,
    sinks: Option<&'a [f32]>,
    causal: bool,
    positions: Option<(usize, usize)>,
    trees: Option<&'a [TreeMask<'a>]>,
    query_rows: Option<usize>,
    level: Option<Level>,
}

impl Default for AttentionOptions<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a> AttentionOptions<'a> {
    /// Plain causal attention.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::AttentionOptions;
    ///
    /// let full = AttentionOptions::new().soft_cap(50.0);
    /// let sliding = full.window(4096); // options are copied: one for each kind of layer
    /// assert_ne!(full, sliding);
    /// assert_eq!(AttentionOptions::new(), AttentionOptions::default());
    /// ```
    pub const fn new() -> Self {
        AttentionOptions {
            scale: None,
            soft_cap: None,
            alibi_slopes: None,
            window: None,
            keep_first: 0,
            sinks: None,
            causal: true,
            positions: None,
            trees: None,
            query_rows: None,
            level: None,
        }
    }

    /// What a product of query and key is multiplied by; 1 / sqrt(k_width) unless set. Any number
    /// that is finite when multiplied by log2(e).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0, 2.0], &[1.0, 3.0], 2)?;
    /// let (plain, half) = (AttentionOptions::new(), AttentionOptions::new().scale(0.5));
    /// let (mut one, mut other, mut scratch) = ([0.0], [0.0], [0.0; 8192]);
    /// // The default is 1 here: half of that is half of the query.
    /// causal_gqa_attention_into(&[0.5], &cache, 1, &plain, &mut one, &mut scratch)?;
    /// causal_gqa_attention_into(&[1.0], &cache, 1, &half, &mut other, &mut scratch)?;
    /// assert_eq!(one, other);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds scores smoothly to `-cap ..= cap`, before any mask. Above zero, finite when
    /// multiplied by log2(e), and not so small that `scale / cap` is infinite.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0, 1000.0], &[1.0, 3.0], 2)?; // scores of 0 and 1000
    /// let (mut out, mut scratch) = ([0.0], [0.0; 8192]);
    /// let options = AttentionOptions::new();
    /// causal_gqa_attention_into(&[1.0], &cache, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [3.0]); // all weight is on one value
    /// let capped = options.soft_cap(1.0);
    /// causal_gqa_attention_into(&[1.0], &cache, 1, &capped, &mut out, &mut scratch)?;
    /// assert!((out[0] - 2.462).abs() < 1e-3); // of 1 and e
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// One ALiBi slope a query head, finite when multiplied by log2(e): a key loses `slope` for
    /// each position of distance.
    ///
    /// # Examples
    ///
    /// ```
    /// use core::f32::consts::LN_2;
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 2], &[1.0, 3.0], 2)?;
    /// let (mut out, mut scratch) = ([0.0; 2], [0.0; 8192]);
    /// let slopes = [0.0, LN_2]; // for the second head, a key one position away weighs half
    /// let options = AttentionOptions::new().alibi_slopes(&slopes);
    /// causal_gqa_attention_into(&[0.5; 2], &cache, 2, &options, &mut out, &mut scratch)?;
    /// assert!((out[0] - 2.0).abs() < 1e-6 && (out[1] - 3.5 / 1.5).abs() < 1e-6);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn alibi_slopes(mut self, slopes: &'a [f32]) -> Self {
        self.alibi_slopes = Some(slopes);
        self
    }

    /// Only the last `window` positions up to the query are seen, the query's own included; at
    /// least 1.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 3], &[100.0, 1.0, 3.0], 3)?;
    /// let (mut out, mut scratch) = ([0.0], [0.0; 8192]);
    /// let options = AttentionOptions::new().window(2);
    /// causal_gqa_attention_into(&[0.5], &cache, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [2.0]); // the mean of the last two
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn window(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    /// With a window, the first `n` positions are seen as well (StreamingLLM, Xiao et al. 2023; their
    /// "attention sinks", which are positions and not the logits of [`sinks`](Self::sinks)).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 3], &[1.0, 100.0, 3.0], 3)?;
    /// let (mut out, mut scratch) = ([0.0], [0.0; 8192]);
    /// let options = AttentionOptions::new().window(1).keep_first(1);
    /// causal_gqa_attention_into(&[0.5], &cache, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [2.0]); // the mean of the first and the last
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn keep_first(mut self, n: usize) -> Self {
        self.keep_first = n;
        self
    }

    /// One learned logit a query head, no NaN: it joins the denominator with a zero value. It is
    /// not scaled, and the log-sum-exp leaves it out. Outputs of parts that are to be merged are
    /// asked for without sinks: the sink joins once, in
    /// [`AttentionState::finish`](crate::attention::AttentionState::finish).
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.push(&[0.0], &[3.0])?; // a score of 0
    /// let (mut out, mut scratch) = ([0.0; 2], [0.0; 8192]);
    /// let sinks = [0.0, f32::NEG_INFINITY]; // half of the weight of head 0, nothing of head 1
    /// let options = AttentionOptions::new().sinks(&sinks);
    /// causal_gqa_attention_into(&[0.5; 2], &cache, 2, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [1.5, 3.0]);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Whether a query sees no key behind its own position; on by default. Off, a query sees all
    /// keys (cross-attention), and there may be more query rows than positions, unless a window or
    /// slopes speak of a row's own position.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut encoded = KvCache::new(1, 1);
    /// encoded.append(&[0.0; 2], &[1.0, 3.0], 2)?;
    /// let (mut out, mut scratch) = ([0.0; 3], [0.0; 8192]);
    /// // Three rows of a decoder look at all of what was encoded.
    /// let options = AttentionOptions::new().causal(false);
    /// causal_gqa_attention_into(&[0.5; 3], &encoded, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [2.0; 3]);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Only these positions are seen, as far as they are cached: a part, to be merged with the
    /// other parts by [`AttentionState`](crate::attention::AttentionState). Leave
    /// [`sinks`](Self::sinks) out of parts.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 4], &[1.0, 3.0, 5.0, 7.0], 4)?;
    /// let (mut out, mut scratch) = ([0.0], [0.0; 8192]);
    /// let options = AttentionOptions::new().positions(1..3);
    /// causal_gqa_attention_into(&[0.5], &cache, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [4.0]); // the mean of 3 and 5
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn positions(mut self, positions: Range<usize>) -> Self {
        self.positions = Some((positions.start, positions.end));
        self
    }

    /// What the last query rows see of each other, where they are a tree of drafted tokens: one mask
    /// for each sequence of the call, in the order of the sequences, so one where it is a single
    /// sequence; [`TreeMask::NONE`] for a sequence without. A mask has at most as many rows as its
    /// sequence has query rows.
    ///
    /// What the other options hide stays hidden. A window and slopes go by places in the cache, where
    /// the distance of two tokens of a tree is not that of the text they belong to.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, TreeMask, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 3], &[1.0, 3.0, 5.0], 3)?; // a text of one, two drafts of the next
    /// let (mut out, mut scratch) = ([0.0; 2], [0.0; 8192]);
    /// let mut words = [0; 2];
    /// let trees = [TreeMask::from_parents(&[None, None], &mut words)?];
    /// let options = AttentionOptions::new().trees(&trees);
    /// causal_gqa_attention_into(&[0.5; 2], &cache, 1, &options, &mut out, &mut scratch)?;
    /// assert_eq!(out, [2.0, 3.0]); // each sees the text and itself: 1 and 3, 1 and 5
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn trees(mut self, trees: &'a [TreeMask<'a>]) -> Self {
        self.trees = Some(trees);
        self
    }

    /// How many query rows the call is meant to have. The doors count them by the query's length and
    /// the number of heads; with this, a number of heads that is wrong and still divides is an
    /// error instead of other numbers.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::AttentionError;
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// cache.append(&[0.5; 4], &[0.5; 4], 2)?;
    /// // One row of two heads, and a number of heads that makes two rows of it.
    /// let options = AttentionOptions::new().query_rows(1);
    /// let mut out = [0.0; 4];
    /// let refused = causal_gqa_attention_into(&[0.5; 4], &cache, 1, &options, &mut out, &mut []);
    /// assert_eq!(refused, Err(AttentionError::QueryRows { need: 1, have: 2 }));
    /// # Ok::<(), paged_kv::KvCacheError>(())
    /// ```
    pub const fn query_rows(mut self, rows: usize) -> Self {
        self.query_rows = Some(rows);
        self
    }

    /// The level to run at; the fastest one of the processor unless set.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    /// use paged_kv::Level;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 2], &[1.0, 3.0], 2)?;
    /// let (mut out, mut scratch) = ([0.0], [0.0; 8192]);
    /// for level in Level::available() {
    ///     let options = AttentionOptions::new().level(level);
    ///     causal_gqa_attention_into(&[0.5], &cache, 1, &options, &mut out, &mut scratch)?;
    ///     assert_eq!(out, [2.0], "{level}");
    /// }
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub const fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// Checks every option against the shape, once.
    pub(crate) fn resolve(&self, shape: &GqaShape) -> Result<Resolved<'a>, AttentionError> {
        // What is checked is the number in the kernel's unit, which may overflow where the option
        // itself does not: infinity times a distance of zero would be a NaN.
        let in_log2 = |number: f32| number * LOG2_E;
        let scale = self.scale.unwrap_or_else(|| default_scale(shape.kv().k_width()));
        require("scale", scale, in_log2(scale).is_finite())?;
        let query_scale = match self.soft_cap {
            None => in_log2(scale),
            Some(cap) => {
                let holds = cap > 0.0 && in_log2(cap).is_finite() && (scale / cap).is_finite();
                require("soft_cap", cap, holds)?;
                scale / cap
            }
        };
        if let Some(slopes) = self.alibi_slopes {
            per_head("alibi_slopes", slopes, shape)?;
            for slope in slopes {
                require("alibi_slopes", *slope, in_log2(*slope).is_finite())?;
            }
        }
        if let Some(sinks) = self.sinks {
            per_head("sinks", sinks, shape)?;
            for sink in sinks {
                require("sinks", *sink, !sink.is_nan())?;
            }
        }
        if let Some(window) = self.window {
            require("window", window as f32, window > 0)?;
        }
        Ok(Resolved {
            query_scale,
            cap: self.soft_cap.map(in_log2),
            slopes: self.alibi_slopes,
            window: self.window.unwrap_or(usize::MAX),
            keep_first: if self.window.is_some() { self.keep_first } else { 0 },
            sinks: self.sinks,
            causal: self.causal,
            positions: self.positions.unwrap_or((0, usize::MAX)),
            trees: self.trees,
            query_rows: self.query_rows,
            level: self.level.unwrap_or_else(Level::detect),
        })
    }
}

/// Options that were checked, in the units of the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolved<'a> {
    /// What the query is multiplied by: `scale x log2(e)`, or `scale / cap` under a soft cap.
    pub(crate) query_scale: f32,
    /// `cap x log2(e)`.
    pub(crate) cap: Option<f32>,
    pub(crate) slopes: Option<&'a [f32]>,
    pub(crate) window: usize,
    /// Positions seen beside the window; 0 without one.
    pub(crate) keep_first: usize,
    pub(crate) sinks: Option<&'a [f32]>,
    pub(crate) causal: bool,
    pub(crate) positions: (usize, usize),
    pub(crate) trees: Option<&'a [TreeMask<'a>]>,
    pub(crate) query_rows: Option<usize>,
    pub(crate) level: Level,
}

impl Resolved<'_> {
    /// How many of a sequence's last positions an option speaks of, so that they must be there: those of
    /// its query rows, or of its tree.
    pub(crate) fn needed_positions(&self, sequence: usize, rows: usize) -> usize {
        if self.causal || self.window != usize::MAX || self.slopes.is_some() {
            return rows;
        }
        self.trees.and_then(|trees| trees.get(sequence)).map_or(0, TreeMask::rows)
    }

    /// The first position that the last `n_q` of `len` query rows look at and that is among those
    /// that were `freed`. Whole tiles are read.
    pub(crate) fn freed_position(
        &self,
        freed: Range<usize>,
        n_q: usize,
        len: usize,
    ) -> Option<usize> {
        let (first, last) = self.positions;
        let reads = |seen: Range<usize>| {
            let seen = seen.start.max(first)..seen.end.min(last).min(len);
            let tiles = seen.start / TILE * TILE..seen.end.next_multiple_of(TILE);
            let touched = tiles.start.max(freed.start)..tiles.end.min(freed.end);
            (!seen.is_empty() && !touched.is_empty()).then_some(touched.start.max(seen.start))
        };
        if freed.is_empty() || n_q == 0 {
            return None;
        }
        let window = (len + 1).saturating_sub(n_q).saturating_sub(self.window);
        reads(0..self.keep_first).or_else(|| reads(window..len))
    }

    /// Whether there is a mask for each sequence, of at most as many rows as it has query rows.
    pub(crate) fn check_trees(
        &self,
        rows: impl ExactSizeIterator<Item = usize>,
    ) -> Result<(), AttentionError> {
        let Some(trees) = self.trees else { return Ok(()) };
        if trees.len() != rows.len() {
            return Err(AttentionError::Trees { need: rows.len(), have: trees.len() });
        }
        for (sequence, (tree, most)) in trees.iter().zip(rows).enumerate() {
            let have = tree.rows();
            if have > most {
                return Err(AttentionError::TreeRows { sequence, most, have });
            }
        }
        Ok(())
    }
}

fn require(what: &'static str, have: f32, holds: bool) -> Result<(), AttentionError> {
    if holds { Ok(()) } else { Err(AttentionError::BadOption { what, have }) }
}

fn per_head(what: &'static str, have: &[f32], shape: &GqaShape) -> Result<(), AttentionError> {
    let need = shape.n_heads();
    if have.len() == need {
        Ok(())
    } else {
        Err(AttentionError::PerHeadLength { what, need, have: have.len() })
    }
}

/// `1 / sqrt(width)`, rounded once.
///
/// `core` has no square root. Newton's iteration in double precision doubles its digits each time.
/// It starts from half the exponent, negated, with a constant that makes the mantissa right to
/// 3.5 % at once (Lomont 2003): 2e-3, 5e-6, 3e-11, and then all digits there are.
fn default_scale(width: usize) -> f32 {
    let width = width as f64;
    let mut root = f64::from_bits(0x5fe6_eb50_c7b5_37a9 - (width.to_bits() >> 1));
    for _ in 0..4 {
        root *= 1.5 - 0.5 * width * root * root;
    }
    root as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_scale_is_the_rounded_quotient() {
        for width in (1..2000).chain([4096, 65_536, 1 << 20, 1 << 31]) {
            assert_eq!(default_scale(width), (1.0 / (width as f64).sqrt()) as f32, "{width}");
        }
    }
}
