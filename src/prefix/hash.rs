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
#[derive(Clone, Copy)]
pub struct HashKey {
    low: u64,
    high: u64,
}

impl HashKey {
    /// A key from sixteen random bytes.
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
    /// 13 rounds for 16 tokens and 37 for 64: one for every two tokens, and five for what came
    /// before and the end. Each waits for the one before, some six cycles: on a Zen 4 that is 1.4 ns
    /// a token in blocks of 16 and 0.95 in blocks of 64. One running state for the whole prompt saves a
    /// round a block (1.15 and 0.90), and a block's hash could no longer be recounted from its
    /// parent's; hashing blocks apart and chaining the results (1.7 and 1.0) overlaps less than it
    /// adds.
    pub(super) fn block(&self, before: u64, tokens: &[u32]) -> u64 {
        let mut sip = SipHasher13::new_with_keys(self.low, self.high);
        sip.write_u64(before);
        sip.write(bytemuck::cast_slice(tokens));
        sip.finish()
    }
}

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn a_hash_depends_on_the_key_the_history_and_every_token() {
        let key = HashKey::new([7; 16]);
        let hash = key.block(1, &[1, 2, 3, 4]);
        assert_ne!(hash, HashKey::new([8; 16]).block(1, &[1, 2, 3, 4]));
        assert_ne!(hash, key.block(2, &[1, 2, 3, 4]));
        for at in 0..4 {
            let mut tokens = [1, 2, 3, 4];
            tokens[at] += 1;
            assert_ne!(hash, key.block(1, &tokens));
        }
        assert_ne!(key.root(b"one"), key.root(b"another"));
    }

    #[test]
    fn a_key_does_not_print() {
        assert_eq!(format!("{:?}", HashKey::new(*b"a secret of ours")), "HashKey(..)");
    }
}
