//! Query rows on their way in.

use crate::kernel::dot::pack_pairs;
use crate::simd::{Kernel, Simd};

/// Copies the query rows of a group, scaled.
pub(super) struct LoadQueries<'q> {
    pub(super) from: &'q [f32],
    pub(super) scale: f32,
    pub(super) to: &'q mut [f32],
    /// Numbers from these rows to those that are needed next, which may be far from any cache.
    pub(super) ahead: usize,
}

impl Kernel for LoadQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        let (from, from_rest) = self.from.as_chunks();
        let (to, to_rest) = self.to.as_chunks_mut();
        for (from, to) in from.iter().zip(to) {
            s.fetch_ahead(from.as_ptr().wrapping_add(self.ahead).cast());
            s.store(s.mul(s.load(from), scale), to);
        }
        for (from, to) in from_rest.iter().zip(to_rest) {
            *to = *from * self.scale;
        }
    }
}

/// [`pack_pairs`], with the level's instructions.
pub(super) struct PackPairs<'p> {
    pub(super) row: &'p [f32],
    pub(super) packed: &'p mut [u32],
}

impl Kernel for PackPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        if S::DOT_BF16 {
            pack_pairs(s, self.row, self.packed);
        }
    }
}
