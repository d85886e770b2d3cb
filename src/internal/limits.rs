//! What this processor can do at most, measured by the same vectors that attention uses, and what
//! a call of attention needs at least. The ratio of the two is what a benchmark should say: a
//! percentage holds on a busy machine and on the next one, nanoseconds do not.
//!
//! There are two limits. [`fma`] multiplies and adds and does nothing else, in as many independent
//! chains as the level has registers for. [`read`] looks at every number once and does nothing
//! with it but keep the largest, which no processor finds harder than loading it. (A sum would be
//! as fast and would trip over denormals, as the bytes of a narrower type may be when they are
//! read as `f32`.)
//!
//! The clock is the caller's: this crate has none.

use core::hint::black_box;
use core::ops::Range;

use super::oracle::Sizes;
use crate::element::Element;
use crate::simd::{Kernel, LANES, Level, Simd};
use crate::storage::paged::PagedKvStore;
use crate::storage::sequence::PagedKvCache;

/// Floating point operations in one round of [`fma`], at every level.
pub const ROUND_FLOPS: usize = 2 * LANES * ROUND;

/// Vectors in a round. Each number of chains below divides it.
const ROUND: usize = 48;

/// Multiplies and adds, [`ROUND_FLOPS`] operations a round, as fast as this level can.
///
/// What comes back is not a result, but whoever keeps it keeps the work from being dropped.
#[inline(never)]
pub fn fma(level: Level, rounds: usize) -> f32 {
    level.run(Fma { rounds })
}

struct Fma {
    rounds: usize,
}

impl Kernel for Fma {
    type Output = f32;

    /// As many chains as the level's largest register tile has accumulators, which cover the
    /// latency of a multiply-add at every level: 4 cycles of 2 units are 8 registers, and AVX-512
    /// has 16, AVX2 6 x 2. SSE2 gets three of four registers: a product and a sum take 6 cycles on
    /// 2 units each, and 16 registers hold no more.
    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f32 {
        match S::ROWS * S::COLUMNS[S::ROWS] {
            16.. => chains::<S, 16>(s, self.rounds),
            6.. => chains::<S, 6>(s, self.rounds),
            _ => chains::<S, 3>(s, self.rounds),
        }
    }
}

#[inline(always)]
fn chains<S: Simd, const N: usize>(s: S, rounds: usize) -> f32 {
    const { assert!(ROUND.is_multiple_of(N)) };
    // Every chain runs towards 1, far from denormals and infinity. Each begins elsewhere, or they
    // would all be one.
    let half = s.splat(black_box(0.5));
    let mut sums = [half; N];
    for (index, sum) in sums.iter_mut().enumerate() {
        *sum = s.splat(black_box(index as f32));
    }
    for _ in 0..rounds * (ROUND / N) {
        for sum in &mut sums {
            *sum = s.mul_add(*sum, half, half);
        }
    }
    let all = sums.into_iter().fold(s.splat(0.0), |all, sum| s.add(all, sum));
    s.reduce_sum(all)
}

/// Looks at every number once: the largest, if none is a NaN.
#[inline(never)]
pub fn read(level: Level, numbers: &[f32]) -> f32 {
    level.run(Read { numbers })
}

struct Read<'a> {
    numbers: &'a [f32],
}

impl Kernel for Read<'_> {
    type Output = f32;

    /// Four quarters at once, a vector of each in turn. One stream waits at each border of a page
    /// that the translation is not there yet and that the prefetcher begins anew; with pages of
    /// 4 KiB, rows in memory came at 16 GB/s in one stream and at 23 in four (27 and 29 with pages
    /// of 2 MiB), and attention, which walks several panels, beat the one. In the caches the two
    /// are equal to 3 %. Sixteen registers of 128 bits have room for four vectors and no more.
    #[inline(always)]
    fn call<S: Simd>(self, s: S) -> f32 {
        let quarter = self.numbers.len() / (4 * LANES) * LANES;
        let (ab, cd) = self.numbers.split_at(2 * quarter);
        let ((a, b), (c, rest)) = (ab.split_at(quarter), cd.split_at(quarter));
        let (d, rest) = rest.split_at(quarter);
        let [a, b, c, d] = [a, b, c, d].map(|part| part.as_chunks::<LANES>().0);
        let mut most = [s.splat(f32::NEG_INFINITY); 4];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for (most, vector) in most.iter_mut().zip([a, b, c, d]) {
                *most = s.max(*most, s.load(vector));
            }
        }
        let (vectors, rest) = rest.as_chunks::<LANES>();
        for vector in vectors {
            most[0] = s.max(most[0], s.load(vector));
        }
        let most = most.into_iter().reduce(|a, b| s.max(a, b)).map(|most| s.reduce_max(most));
        let larger = |a: f32, b: &f32| if a < *b { *b } else { a };
        rest.iter().fold(most.unwrap_or(f32::NEG_INFINITY), larger)
    }
}

/// Reads the blocks of a sequence in the order of its table: the bytes that attention reads, where
/// it reads them, and in the state of the caches that it finds them in.
///
/// # Panics
///
/// If the sequence belongs to another store.
pub fn read_sequence<E: Element>(
    level: Level,
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
) -> f32 {
    read_blocks(level, store, cache, 0..store.shape().blocks_for(cache.seq_len()))
}

/// As [`read_sequence`], of some entries of the table alone: a thread's share.
///
/// # Panics
///
/// If the sequence belongs to another store or has no such blocks.
pub fn read_blocks<E: Element>(
    level: Level,
    store: &PagedKvStore<E>,
    cache: &PagedKvCache,
    blocks: Range<usize>,
) -> f32 {
    let view = cache.view(store).expect("a sequence of this store");
    // A view's block is all memory from there on.
    let words = view.layout().block_words();
    blocks
        .map(|block| read(level, bytemuck::cast_slice(&view.block(block)[..words])))
        .fold(f32::NEG_INFINITY, f32::max)
}

/// Floating point operations of causal attention over one sequence: two for each number of a key
/// row and two for each number of a value row, for each pair of query row and position that see
/// each other. Masked pairs are not counted, whatever is computed for them.
pub fn causal_flops(sizes: &Sizes) -> f64 {
    let pairs: usize = (0..sizes.n_q).map(|row| sizes.len - row).sum();
    2.0 * (sizes.k_width + sizes.v_width) as f64 * sizes.n_heads() as f64 * pairs as f64
}

/// Numbers in the keys and values of one sequence. Each is read once, at the least.
pub fn kv_numbers(sizes: &Sizes) -> usize {
    sizes.len * sizes.n_kv_heads * (sizes.k_width + sizes.v_width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// No number is left out, wherever the vectors end.
    #[test]
    fn a_read_sees_every_number() {
        for level in Level::available() {
            assert_eq!(read(level, &[]), f32::NEG_INFINITY);
            for len in [1, 15, 16, 17, 63, 64, 65, 200] {
                for at in 0..len {
                    let mut numbers = vec![-2.0; len];
                    numbers[at] = -1.0;
                    assert_eq!(read(level, &numbers), -1.0, "{level}: number {at} of {len}");
                }
            }
        }
    }

    /// Every chain has come to 1: with sixteen lanes each, the sum says how many there were.
    #[test]
    fn chains_run_to_their_end() {
        for level in Level::available() {
            let sum = fma(level, 100);
            assert!([16.0, 6.0, 3.0].map(|n| n * 16.0).contains(&sum), "{level}: {sum}");
        }
    }

    #[test]
    fn a_sequence_is_read_through_its_table() {
        let mut store = PagedKvStore::new(4, 3, 1, 16);
        let mut cache = PagedKvCache::new();
        let mut rows = vec![-2.0; 9 * 16];
        rows[8 * 16] = -0.5;
        cache.append(&mut store, &rows, &rows, 9).unwrap();
        // The rows that the last block has not been given yet are zeros.
        assert_eq!(read_sequence(Level::detect(), &store, &cache), 0.0);
        cache.append(&mut store, &rows[..3 * 16], &rows[..3 * 16], 3).unwrap();
        assert_eq!(read_sequence(Level::detect(), &store, &cache), -0.5);
        assert_eq!(read_blocks(Level::detect(), &store, &cache, 0..2), -2.0);
        assert_eq!(read_blocks(Level::detect(), &store, &cache, 2..3), -0.5);
    }

    #[test]
    fn what_a_call_needs_is_counted_causally() {
        let sizes = Sizes { n_kv_heads: 2, group: 3, k_width: 5, v_width: 7, n_q: 2, len: 10 };
        assert_eq!(causal_flops(&sizes), (2 * (5 + 7) * 6 * (10 + 9)) as f64);
        assert_eq!(kv_numbers(&sizes), 10 * 2 * (5 + 7));
    }
}
