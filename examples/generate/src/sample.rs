//! From logits to a token.

/// Picks tokens: the likeliest at temperature 0, by chance above it, the same for the same seed.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f32,
    state: u64,
}

impl Sampler {
    /// A sampler whose choices depend on these two and the logits alone.
    pub fn new(temperature: f32, seed: u64) -> Self {
        Sampler { temperature, state: seed }
    }

    /// The seed of a continuation of a request whose own seed is `seed`. That of the first is the
    /// same.
    pub fn seed_of(seed: u64, continuation: usize) -> u64 {
        // Neighbouring seeds are the next requests', and seeds that are apart by multiples of the
        // step of `uniform` draw the same numbers, some later than the others.
        seed.wrapping_add((continuation as u64).wrapping_mul(0xd1b5_4a32_d192_ed03))
    }

    /// The next token.
    ///
    /// # Panics
    ///
    /// Without logits.
    pub fn pick(&mut self, logits: &[f32]) -> u32 {
        let best = likeliest(logits);
        if self.temperature <= 0.0 {
            return best;
        }
        let top = logits[best as usize];
        let temperature = self.temperature;
        let weight = |logit: f32| f64::from((logit - top) / temperature).exp();
        let sum: f64 = logits.iter().map(|&logit| weight(logit)).sum();
        let mut left = self.uniform() * sum;
        for (token, &logit) in logits.iter().enumerate() {
            left -= weight(logit);
            if left < 0.0 {
                return token as u32;
            }
        }
        // Rounding can leave a crumb of the sum after the last token.
        best
    }

    /// A number in `0.0 .. 1.0`, by SplitMix64: one word of state, and every seed is a good one.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        (word >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The index of the largest logit, the first of equals.
///
/// # Panics
///
/// Without logits.
pub fn likeliest(logits: &[f32]) -> u32 {
    assert!(!logits.is_empty(), "a vocabulary has tokens");
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let mut sampler = Sampler::new(0.0, 1);
        assert_eq!(sampler.pick(&[0.0, 3.0, -1.0, 3.0]), 1);
    }

    #[test]
    fn one_seed_makes_one_sequence() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
        let draw = |seed| {
            let mut sampler = Sampler::new(1.0, seed);
            (0..40).map(|_| sampler.pick(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    #[test]
    fn continuations_draw_numbers_of_their_own() {
        let mut drawn = std::collections::HashSet::new();
        for (request, continuation) in (0..8).flat_map(|it| (0..8).map(move |other| (it, other))) {
            let mut sampler = Sampler::new(1.0, Sampler::seed_of(5 + request, continuation));
            for _ in 0..100 {
                assert!(drawn.insert(sampler.uniform().to_bits()));
            }
        }
        assert_eq!(Sampler::seed_of(5, 0), 5);
    }

    #[test]
    fn chances_follow_the_logits() {
        let mut sampler = Sampler::new(1.0, 9);
        let logits = [0.0, 3.0f32.ln(), f32::NEG_INFINITY];
        let mut seen = [0u32; 3];
        for _ in 0..20_000 {
            seen[sampler.pick(&logits) as usize] += 1;
        }
        // Three quarters of 20000 are 15000; one standard deviation is 61.
        assert!(seen[1].abs_diff(15_000) < 400 && seen[2] == 0, "{seen:?}");
    }
}
