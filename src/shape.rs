//! Shapes, checked once and trusted after.
//!
//! A [`KvShape`] that exists has no zero and no overflow: the elements of one block, and so every
//! offset inside it, fit `isize`. A [`GqaShape`] that exists has query heads that divide over its
//! KV heads. Nothing behind these two asks again.

use crate::error::ShapeError;

/// The four sizes of a layer's KV memory, by name, before anything is checked.
///
/// # Examples
///
/// ```
/// use paged_kv::{KvDims, KvShape};
///
/// // Keys that are wider than values, as in multi-head latent attention.
/// let dims = KvDims { block_size: 64, n_kv_heads: 1, k_width: 576, v_width: 512 };
/// assert_eq!(KvShape::new(dims).map(|shape| shape.dims()), Ok(dims));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvDims {
    /// Positions in one block.
    ///
    /// Any number from 1 works and gives the same bits; multiples of 16 are fast, 64 is best
    /// where the caller has no wish.
    pub block_size: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Numbers in one key row of one head.
    pub k_width: usize,
    /// Numbers in one value row of one head.
    pub v_width: usize,
}

/// The shape of one layer's KV memory.
///
/// # Examples
///
/// ```
/// use paged_kv::{KvShape, ShapeError};
///
/// let shape = KvShape::square(16, 8, 128)?; // blocks of 16, 8 KV heads, rows of 128
/// assert_eq!((shape.block_size(), shape.n_kv_heads()), (16, 8));
/// assert_eq!((shape.k_width(), shape.v_width()), (128, 128));
/// assert_eq!((shape.k_row_len(), shape.blocks_for(17)), (8 * 128, 2));
/// assert_eq!(KvShape::square(0, 8, 128), Err(ShapeError::Zero { what: "block_size" }));
/// # Ok::<(), ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    dims: KvDims,
}

impl KvShape {
    /// Checks the sizes.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::{KvDims, KvShape};
    ///
    /// // Multi-head latent attention: a key row holds its value row and 64 numbers more.
    /// let dims = KvDims { block_size: 64, n_kv_heads: 1, k_width: 576, v_width: 512 };
    /// let shape = KvShape::new(dims)?;
    /// assert_eq!((shape.k_row_len(), shape.v_row_len()), (576, 512));
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShapeError::Zero`] for a size of 0, [`ShapeError::Overflow`] where one block would not
    /// fit an allocation at 8 bytes a number.
    pub const fn new(dims: KvDims) -> Result<Self, ShapeError> {
        if dims.block_size == 0 {
            return Err(ShapeError::Zero { what: "block_size" });
        }
        if dims.n_kv_heads == 0 {
            return Err(ShapeError::Zero { what: "n_kv_heads" });
        }
        if dims.k_width == 0 {
            return Err(ShapeError::Zero { what: "k_width" });
        }
        if dims.v_width == 0 {
            return Err(ShapeError::Zero { what: "v_width" });
        }
        let Some(row) = dims.k_width.checked_add(dims.v_width) else {
            return Err(ShapeError::Overflow);
        };
        let Some(tile) = dims.block_size.checked_mul(row) else {
            return Err(ShapeError::Overflow);
        };
        let Some(block) = tile.checked_mul(dims.n_kv_heads) else {
            return Err(ShapeError::Overflow);
        };
        // A line of slack for each head's tile, then bytes.
        let Some(slack) = dims.n_kv_heads.checked_mul(64) else {
            return Err(ShapeError::Overflow);
        };
        let Some(padded) = block.checked_add(slack) else {
            return Err(ShapeError::Overflow);
        };
        if padded > (isize::MAX as usize) / 8 {
            return Err(ShapeError::Overflow);
        }
        Ok(KvShape { dims })
    }

    /// Checks the sizes of a layer whose key and value rows are equally wide.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::{KvDims, KvShape};
    ///
    /// let dims = KvDims { block_size: 16, n_kv_heads: 8, k_width: 128, v_width: 128 };
    /// assert_eq!(KvShape::square(16, 8, 128)?.dims(), dims);
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`KvShape::new`].
    pub const fn square(
        block_size: usize,
        n_kv_heads: usize,
        head_dim: usize,
    ) -> Result<Self, ShapeError> {
        Self::new(KvDims { block_size, n_kv_heads, k_width: head_dim, v_width: head_dim })
    }

    /// Positions in one block.
    pub const fn block_size(&self) -> usize {
        self.dims.block_size
    }

    /// Key/value heads.
    pub const fn n_kv_heads(&self) -> usize {
        self.dims.n_kv_heads
    }

    /// Numbers in one key row of one head.
    pub const fn k_width(&self) -> usize {
        self.dims.k_width
    }

    /// Numbers in one value row of one head.
    pub const fn v_width(&self) -> usize {
        self.dims.v_width
    }

    /// The four sizes.
    pub const fn dims(&self) -> KvDims {
        self.dims
    }

    /// Numbers in the key row of one position, over all KV heads.
    pub const fn k_row_len(&self) -> usize {
        self.dims.n_kv_heads * self.dims.k_width
    }

    /// Numbers in the value row of one position, over all KV heads.
    pub const fn v_row_len(&self) -> usize {
        self.dims.n_kv_heads * self.dims.v_width
    }

    /// Blocks needed to hold `positions`.
    pub const fn blocks_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.dims.block_size)
    }
}

/// A layer's shape together with the query heads that attend over it.
///
/// # Examples
///
/// ```
/// use paged_kv::{GqaShape, KvShape, ShapeError};
///
/// let kv = KvShape::square(16, 8, 128)?;
/// let shape = GqaShape::new(kv, 32)?;
/// assert_eq!((shape.n_heads(), shape.group(), shape.q_row_len()), (32, 4, 32 * 128));
/// let refused = ShapeError::HeadsNotDivisible { n_heads: 20, n_kv_heads: 8 };
/// assert_eq!(GqaShape::new(kv, 20), Err(refused));
/// # Ok::<(), ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GqaShape {
    kv: KvShape,
    n_heads: usize,
    /// Query heads of a KV head: the smallest calls ask several times, and feel a division.
    group: usize,
}

impl GqaShape {
    /// Checks that `n_heads` query heads can be shared out over the KV heads of `kv`.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::{GqaShape, KvShape};
    ///
    /// let shape = GqaShape::new(KvShape::square(16, 1, 64)?, 8)?; // one KV head for all
    /// assert_eq!((shape.group(), shape.kv().k_row_len(), shape.out_row_len()), (8, 64, 8 * 64));
    /// # Ok::<(), paged_kv::ShapeError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ShapeError::Zero`] for no head at all, [`ShapeError::HeadsNotDivisible`] where a KV head
    /// would have to serve a fraction of a group.
    pub const fn new(kv: KvShape, n_heads: usize) -> Result<Self, ShapeError> {
        if n_heads == 0 {
            return Err(ShapeError::Zero { what: "n_heads" });
        }
        if !n_heads.is_multiple_of(kv.dims.n_kv_heads) {
            return Err(ShapeError::HeadsNotDivisible { n_heads, n_kv_heads: kv.dims.n_kv_heads });
        }
        let widest =
            if kv.dims.k_width > kv.dims.v_width { kv.dims.k_width } else { kv.dims.v_width };
        match n_heads.checked_mul(widest) {
            Some(row) if row <= isize::MAX as usize / 8 => {
                Ok(GqaShape { kv, n_heads, group: n_heads / kv.dims.n_kv_heads })
            }
            _ => Err(ShapeError::Overflow),
        }
    }

    /// The layer's shape.
    pub const fn kv(&self) -> KvShape {
        self.kv
    }

    /// Query heads.
    pub const fn n_heads(&self) -> usize {
        self.n_heads
    }

    /// Query heads that share one KV head.
    pub const fn group(&self) -> usize {
        self.group
    }

    /// Numbers in one query row, over all heads.
    pub const fn q_row_len(&self) -> usize {
        self.n_heads * self.kv.dims.k_width
    }

    /// Numbers in one output row, over all heads.
    pub const fn out_row_len(&self) -> usize {
        self.n_heads * self.kv.dims.v_width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_named() {
        for (dims, what) in [
            ((0, 1, 1, 1), "block_size"),
            ((1, 0, 1, 1), "n_kv_heads"),
            ((1, 1, 0, 1), "k_width"),
            ((1, 1, 1, 0), "v_width"),
        ] {
            let dims =
                KvDims { block_size: dims.0, n_kv_heads: dims.1, k_width: dims.2, v_width: dims.3 };
            assert_eq!(KvShape::new(dims), Err(ShapeError::Zero { what }));
        }
    }

    #[test]
    fn overflowing_sizes_are_an_error() {
        let huge = usize::MAX / 2;
        for dims in [(huge, 3, 1), (3, huge, 1), (1, 3, huge), (1, 1, huge)] {
            assert_eq!(KvShape::square(dims.0, dims.1, dims.2), Err(ShapeError::Overflow));
        }
    }

    #[test]
    fn heads_that_do_not_divide_say_so() {
        let kv = KvShape::square(16, 3, 64).unwrap();
        assert_eq!(
            GqaShape::new(kv, 10),
            Err(ShapeError::HeadsNotDivisible { n_heads: 10, n_kv_heads: 3 })
        );
        assert_eq!(GqaShape::new(kv, 0), Err(ShapeError::Zero { what: "n_heads" }));
        assert_eq!(GqaShape::new(kv, 9).unwrap().group(), 3);
    }
}
