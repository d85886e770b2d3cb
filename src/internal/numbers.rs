//! Numbers that look random and are the same on every machine.
//!
//! Everything comes from integers and one exact conversion, so that a target with another float
//! unit, or none, sees the same bits.

use alloc::vec::Vec;

/// A stream of numbers that a seed determines (splitmix64, Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// The stream of this seed.
    pub const fn new(seed: u64) -> Self {
        Numbers(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: usize) -> usize {
        (((self.bits() >> 32) * end as u64) >> 32) as usize
    }

    /// A number in `first ..= last`.
    pub fn between(&mut self, first: usize, last: usize) -> usize {
        first + self.below(last - first + 1)
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// A number of mean 0 and variance 1, close to normal: twelve uniform ones of 16 bits, added.
    ///
    /// The sum is a whole number below 2^20 and its 2^16th part is exact, so the bits are the
    /// same wherever this runs.
    pub fn normal(&mut self) -> f32 {
        let mut sum = -6 * 65_535;
        for _ in 0..3 {
            let bits = self.bits();
            for shift in [0, 16, 32, 48] {
                sum += ((bits >> shift) & 0xffff) as i32;
            }
        }
        sum as f32 / 65_536.0
    }

    /// `n` of them.
    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    /// Any order of these, each as likely as another.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let numbers = Numbers::new(1).normals(100_000);
        let mean = numbers.iter().map(|x| f64::from(*x)).sum::<f64>() / 1e5;
        let variance = numbers.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn the_stream_is_what_it_was() {
        let mut numbers = Numbers::new(0);
        assert_eq!(numbers.bits(), 0xe220_a839_7b1d_cdaf);
        assert!((0..1000).all(|_| numbers.below(7) < 7));
    }
}
