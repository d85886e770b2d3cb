//! Where answers go.

/// The caller's memory for the answers of one call.
///
/// Made from a slice for `out`, with or without one for the log-sum-exp.
///
/// # Examples
///
/// ```
/// use paged_kv::AttentionError;
/// use paged_kv::attention::{AttentionOptions, Output, causal_gqa_attention_into};
/// use paged_kv::cache::KvCache;
///
/// let mut cache = KvCache::new(1, 2);
/// cache.push(&[1.0; 2], &[3.0, 4.0])?;
/// let (mut out, mut lse) = ([0.0; 4], [0.0]); // two heads have two sums
/// let output = Output::new(&mut out).lse(&mut lse);
/// let options = AttentionOptions::new();
/// let refused = causal_gqa_attention_into(&[0.5; 4], &cache, 2, &options, output, &mut []);
/// assert_eq!(refused, Err(AttentionError::LseLength { need: 2, have: 1 }));
/// # Ok::<(), paged_kv::KvPoolExhausted>(())
/// ```
#[derive(Debug)]
#[must_use = "an output is written when attention is called with it"]
pub struct Output<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) lse: Option<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    /// `out` is `[n_q, n_heads, v_width]`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, Output, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 2);
    /// cache.push(&[1.0; 2], &[3.0, 4.0])?;
    /// let (mut rows, mut scratch) = ([0.0; 8], [0.0; 8192]); // rows for four requests
    /// let (output, options) = (Output::new(&mut rows[2..4]), AttentionOptions::new());
    /// causal_gqa_attention_into(&[0.5; 2], &cache, 1, &options, output, &mut scratch)?;
    /// assert_eq!(rows, [0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn new(out: &'a mut [f32]) -> Self {
        Output { out, lse: None }
    }

    /// Asks for the log-sum-exp too, `[n_q, n_heads]`: the natural logarithm of the sum of
    /// `e^score`, sinks left out, -inf for a row that sees no key.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::attention::{AttentionOptions, Output, causal_gqa_attention_into};
    /// use paged_kv::cache::KvCache;
    ///
    /// let mut cache = KvCache::new(1, 1);
    /// cache.append(&[0.0; 5], &[3.0; 5], 5)?; // five scores of 0
    /// let (mut out, mut lse, mut scratch) = ([0.0], [0.0], [0.0; 8192]);
    /// let (output, options) = (Output::new(&mut out).lse(&mut lse), AttentionOptions::new());
    /// causal_gqa_attention_into(&[0.5], &cache, 1, &options, output, &mut scratch)?;
    /// assert!((lse[0] - 5.0_f32.ln()).abs() < 1e-6);
    /// # Ok::<(), Box<dyn core::error::Error>>(())
    /// ```
    pub fn lse(mut self, lse: &'a mut [f32]) -> Self {
        self.lse = Some(lse);
        self
    }
}

impl<'a> From<&'a mut [f32]> for Output<'a> {
    fn from(out: &'a mut [f32]) -> Self {
        Self::new(out)
    }
}

impl<'a> From<&'a mut alloc::vec::Vec<f32>> for Output<'a> {
    fn from(out: &'a mut alloc::vec::Vec<f32>) -> Self {
        Self::new(out)
    }
}

impl<'a, const N: usize> From<&'a mut [f32; N]> for Output<'a> {
    fn from(out: &'a mut [f32; N]) -> Self {
        Self::new(out)
    }
}
