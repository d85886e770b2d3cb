//! The key of a block: a chain of keyed hashes over everything before it.
//!
//! ```text
//! root   sip(key; salt)
//! block  sip(key; hash of the block before, its tokens)
//! ```
//!
//! Why SipHash-1-3. Tokens and salts come from tenants, who may choose them so that they meet in one
//! place of the table, and a table in which all meet takes a walk over all of them for every
//! lookup. SipHash is made for exactly that: who does not know the 128 bits of the key cannot find
//! colliding inputs, nor foresee where anything lands. `foldhash` and the like take half the time
//! and claim to resist only those who do not watch the answers' timing; `ahash` needs the
//! processor's AES for its claim, which a target without std may not have; a cryptographic hash
//! costs 100 ns and more a token and would still not be trusted, because tokens are compared
//! whatever the hash says. `siphasher` has no dependency and runs on `core`.

use core::fmt;
use core::hash::Hasher;

use siphasher::sip::SipHasher13;

/// The secret that a [`PrefixCache`](super::PrefixCache) hashes with: sixteen bytes that nobody
/// outside can guess.
///
/// They are the caller's because without std there is nothing to draw them from. Drawn anew at
/// every start they are best; the same ones in several processes make the hashes in their
/// [`PrefixEvent`](super::PrefixEvent)s comparable (on processors of one byte order). Nothing but
/// time depends on them: whatever the key, a block is found by its tokens or not at all. `Debug`
/// does not print them.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "std")] {
/// use paged_kv::prefix::HashKey;
/// use std::hash::{BuildHasher, RandomState};
///
/// // Under std, without another crate: two draws of what its hash maps are keyed with.
/// let draw = || u128::from(RandomState::new().hash_one(0_u8));
/// let key = HashKey::new((draw() << 64 | draw()).to_le_bytes());
/// assert_eq!(format!("{key:?}"), "HashKey(..)");
/// # }
/// ```
#[derive(Clone, Copy)]
pub struct HashKey {
    low: u64,
    high: u64,
}

impl HashKey {
    /// A key from sixteen random bytes.
    ///
    /// # Examples
    ///
    /// ```
    /// use paged_kv::prefix::HashKey;
    ///
    /// let key = HashKey::new(*b"from the config."); // one key for several processes
    /// assert_eq!(format!("{key:?}"), "HashKey(..)");
    /// ```
    pub const fn new(bytes: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = bytes;
        HashKey {
            low: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            high: u64::from_le_bytes([i, j, k, l, m, n, o, p]),
        }
    }

    /// What the blocks of a salt begin with.
    pub(super) fn root(&self, salt: &[u8]) -> u64 {
        let mut sip = SipHasher13::new_with_keys(self.low, self.high);
        sip.write(salt);
        sip.finish()
    }

    /// The hash of a block behind another.
    ///
    /// Three tokens are one word, as long as each fits 21 bits: which they all do in the vocabularies
    /// that there are, and digests written over placeholder ids do not. So 16 tokens take 11 rounds and
    /// 64 take 27: one for every three tokens, and five for what came before and the end. Each
    /// waits for the one before, some six cycles: on a Zen 4 that is 1.09 ns a token in blocks of 16
    /// and 0.74 in blocks of 64. As they lie in memory, two to a word, it was 1.30 and 0.93.
    ///
    /// What stops blocks of 16 at a nanosecond is those five rounds. Tried beside this: what came
    /// before as a part of the key saves a round (1.05) and is a use that nobody vouches for; the same
    /// behind the tokens, so that the tokens of two blocks could overlap, saves nothing (1.12); one
    /// running state for the whole prompt saves a round, and a block's hash could no longer be
    /// recounted from its parent's; hashing blocks apart and chaining the results adds more than it
    /// overlaps.
    pub(super) fn block(&self, before: u64, tokens: &[u32]) -> u64 {
        let mut sip = SipHasher13::new_with_keys(self.low, self.high);
        sip.write_u64(before);
        if tokens.iter().fold(0, |all, token| all | token) >> PACKED_BITS != 0 {
            sip.write(bytemuck::cast_slice(tokens));
            return sip.finish();
        }
        let (threes, rest) = tokens.as_chunks::<3>();
        for three in threes {
            sip.write_u64(pack(three));
        }
        match rest {
            [] => {}
            [one] => sip.write_u32(*one),
            // Seven bytes, so that they go into one word with the length.
            two => sip.write(&pack(two).to_le_bytes()[..7]),
        }
        sip.finish()
    }
}

/// Of 64, for three tokens.
const PACKED_BITS: u32 = 21;

/// Three tokens at most, each of so many bits at most, the first lowest.
fn pack(tokens: &[u32]) -> u64 {
    tokens.iter().rev().fold(0, |packed, token| packed << PACKED_BITS | u64::from(*token))
}

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::format;
    use alloc::vec::Vec;

    #[test]
    fn a_hash_depends_on_the_key_the_history_and_every_bit_of_every_token() {
        let key = HashKey::new([7; 16]);
        // Three and no rest, a rest of one, of two; small tokens and one that is not.
        for len in 1..=17_u32 {
            for first in [0, 1 << 20, 1 << 30] {
                let tokens: Vec<u32> = (first..first + len).collect();
                let mut seen = BTreeSet::from([key.block(1, &tokens)]);
                assert!(seen.insert(HashKey::new([8; 16]).block(1, &tokens)));
                assert!(seen.insert(key.block(2, &tokens)));
                for at in 0..tokens.len() {
                    for bit in 0..32 {
                        let mut other = tokens.clone();
                        other[at] ^= 1 << bit;
                        assert!(seen.insert(key.block(1, &other)), "bit {bit} of token {at}");
                    }
                }
            }
        }
        assert_ne!(key.root(b"one"), key.root(b"another"));
    }

    /// The words are SipHash-1-3 of the bytes that the comment says.
    #[test]
    fn tokens_are_hashed_three_to_a_word() {
        let key = HashKey::new([7; 16]);
        let sip = |bytes: &[u8]| SipHasher13::new_with_key(&[7; 16]).hash(bytes);
        let before = 9_u64.to_le_bytes();
        let word = (1_u64 | 2 << 21 | 3 << 42).to_le_bytes();
        let two = (4_u64 | 5 << 21).to_le_bytes();
        assert_eq!(key.block(9, &[1, 2, 3]), sip(&[before, word].concat()));
        let all = [&before[..], &word, &two[..7]].concat();
        assert_eq!(key.block(9, &[1, 2, 3, 4, 5]), sip(&all));
        let plain = [&before[..], &1_u32.to_le_bytes(), &(1_u32 << 21).to_le_bytes()].concat();
        assert_eq!(key.block(9, &[1, 1 << 21]), sip(&plain));
    }

    #[test]
    fn a_key_does_not_print() {
        assert_eq!(format!("{:?}", HashKey::new(*b"a secret of ours")), "HashKey(..)");
    }
}
