//! Saved sequences: the same bits elsewhere, the same bytes everywhere, and nothing at all from bytes
//! that are not whole.

mod bytes;
#[cfg(feature = "std")]
mod io;
mod layers;
mod memory;
mod single;

use paged_kv::internal::doors::ask;
use paged_kv::internal::numbers::Numbers;
use paged_kv::{KvDims, KvShape};

/// Sizes that no cell, group or vector divides.
fn shape(block_size: usize) -> KvShape {
    KvShape::new(KvDims { block_size, n_kv_heads: 2, k_width: 9, v_width: 7 }).unwrap()
}

/// The rows of these positions in a layer of this shape; one in eleven is all zeros.
fn rows(shape: KvShape, tag: u64, positions: core::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for position in positions {
        let mut numbers = Numbers::new(tag << 32 | position as u64);
        let size = if position % 11 == 7 { 0.0 } else { 1.0 };
        k.extend(numbers.normals(shape.k_row_len()).iter().map(|x| x * size));
        v.extend(numbers.normals(shape.v_row_len()).iter().map(|x| x * size));
    }
    (k, v)
}
