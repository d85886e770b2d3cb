//! A fixed grid of attention calls, and what its bits add up to.
//!
//! The promise is that every level of a class gives the same bits, and that includes levels this
//! machine does not have: an emulator, a phone and a microcontroller run the same grid and print
//! the same number. Inputs come from integers by exact conversions; no function of a platform's
//! mathematics library has a say.
//!
//! A change to a constant below is a change of every result of the crate, and says so in the
//! changelog.

use super::doors::{Answer, Place, answer};
use super::oracle::{Case, Rules, Sizes};
use crate::element::Element;
use crate::simd::Level;

/// What [`digest`] gives for each stored type: where products and sums are rounded once, together,
/// and where they are rounded one after the other.
pub const DIGESTS: [(&str, u64, u64); 5] = [
    ("f32", 0xb4f8_1ed2_12f4_a976, 0x83c3_7e97_d0f4_6a3e),
    ("f16", 0x1ebf_fcba_28a5_53e9, 0x66d1_fbfd_cfda_84e4),
    ("bf16", 0x05ff_2580_6604_ccae, 0x26d6_7fee_e64b_e66a),
    ("int8", 0x1a59_52bf_3547_57a2, 0x60d4_09ce_c2ab_b1c7),
    ("int4", 0xec79_ea25_0378_1547, 0x1c54_bc2d_c59f_9cd9),
];

/// What [`digest`] must give for this type at this level, which is one of the exact ones.
///
/// # Panics
///
/// If the type is not in the list.
pub fn expected<E: Element>(level: Level) -> u64 {
    let found = DIGESTS.into_iter().find(|(name, ..)| *name == E::NAME);
    let Some((_, fused, not_fused)) = found else { panic!("{} has no digest yet", E::NAME) };
    if level.is_fused() { fused } else { not_fused }
}

/// One row of the grid: KV heads, group, widths of key and value, query rows, positions, options.
type Line = (usize, usize, usize, usize, usize, usize, u8);

/// Decode, verification and prefill; widths with every kind of tail; lengths on both sides of the
/// borders at 16, 64 and 512; each option alone, then together. The largest holds 1,100 positions
/// of 2 x 8 numbers, 70 KiB.
const GRID: [Line; 22] = [
    (1, 1, 1, 1, 1, 1, 0),
    (1, 1, 64, 64, 1, 64, 0),
    (2, 3, 64, 80, 1, 65, 0),
    (1, 8, 48, 40, 1, 200, 0),
    (1, 16, 16, 16, 1, 129, 0),
    (2, 2, 72, 65, 4, 100, 0),
    (1, 4, 17, 33, 33, 97, 0),
    (1, 5, 8, 8, 3, 513, 0),
    (1, 1, 8, 8, 2, 1100, 0),
    (1, 2, 128, 128, 2, 70, 0),
    (3, 1, 7, 130, 70, 70, 0),
    (2, 2, 24, 24, 5, 90, Rules::SCALE),
    (2, 2, 24, 24, 5, 90, Rules::CAP),
    (2, 2, 24, 24, 5, 90, Rules::ALIBI),
    (2, 2, 24, 24, 5, 90, Rules::WINDOW),
    (2, 2, 24, 24, 5, 90, Rules::SINKS),
    (2, 2, 24, 24, 5, 90, Rules::OPEN),
    (2, 2, 24, 24, 5, 90, Rules::PART),
    (1, 3, 32, 20, 9, 150, Rules::CAP | Rules::ALIBI | Rules::SINKS),
    (1, 3, 32, 20, 9, 150, Rules::SCALE | Rules::WINDOW | Rules::SINKS),
    (1, 1, 8, 8, 2, 1100, Rules::ALIBI | Rules::OPEN),
    (1, 2, 8, 8, 40, 600, Rules::CAP | Rules::WINDOW | Rules::SINKS | Rules::ALIBI),
];

const BLOCK_SIZES: [usize; 7] = [16, 64, 32, 80, 5, 144, 1];

/// Lines in the grid.
pub const fn lines() -> usize {
    GRID.len()
}

/// The case on a line, and where it is held.
pub fn line(index: usize) -> (Case, Place) {
    let (n_kv_heads, group, k_width, v_width, n_q, len, mask) = GRID[index];
    let sizes = Sizes { n_kv_heads, group, k_width, v_width, n_q, len };
    let block_size = BLOCK_SIZES[index % BLOCK_SIZES.len()];
    let place = match index % 2 {
        0 => Place::Paged(block_size, index as u64),
        _ => Place::Contiguous(block_size),
    };
    (Case::random(sizes, mask, 1000 + index as u64), place)
}

/// The digest of one line, stored as `E`, at a level.
///
/// # Panics
///
/// If a result is not a number: the grid has none.
pub fn line_digest<E: Element>(index: usize, level: Level) -> u64 {
    let (case, place) = line(index);
    let Answer { out, lse } = answer::<E>(&case, place, level);
    let mut hash = OFFSET;
    for number in out.iter().chain(&lse) {
        assert!(!number.is_nan(), "line {index} of the grid gave a NaN");
        for byte in number.to_bits().to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }
    hash
}

/// The digest of the whole grid, stored as `E`, at a level.
pub fn digest<E: Element>(level: Level) -> u64 {
    let mut hash = OFFSET;
    for index in 0..lines() {
        for byte in line_digest::<E>(index, level).to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }
    hash
}

/// FNV-1a, 64 bits.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;
