//! Where answers go.

/// The caller's memory for the answers of one call.
///
/// Made from a slice for `out`, with or without one for the log-sum-exp.
///
/// # Examples
///
/// ```
/// use paged_kv::attention::Output;
///
/// let (mut out, mut lse) = ([0.0; 8], [0.0; 2]);
/// let output = Output::new(&mut out).lse(&mut lse);
/// # let _ = output;
/// ```
#[derive(Debug)]
#[must_use = "an output is written when attention is called with it"]
pub struct Output<'a> {
    pub(crate) out: &'a mut [f32],
    pub(crate) lse: Option<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    /// `out` is `[n_q, n_heads, v_width]`.
    pub fn new(out: &'a mut [f32]) -> Self {
        Output { out, lse: None }
    }

    /// Asks for the log-sum-exp too, `[n_q, n_heads]`: the natural logarithm of the sum of
    /// `e^score`, sinks left out, -inf for a row that sees no key.
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
