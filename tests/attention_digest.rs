//! Every level prints the digest of its class over the fixed grid of `internal::digest`.

use paged_kv::Level;
use paged_kv::internal::digest::{digest, expected, line, line_digest, lines};
use paged_kv::internal::doors::{Place, answer};

#[test]
fn every_level_gives_its_classes_digest() {
    let mut wrong = Vec::new();
    for level in Level::available() {
        let (have, want) = (digest(level), expected(level));
        println!("{level}: {have:#018x}, fused: {}", level.is_fused());
        if have != want {
            wrong.push((level, have, want));
        }
    }
    // Which lines differ inside a class says where to look.
    for index in 0..lines() {
        let mut seen = [None; 2];
        for level in Level::available() {
            let have = line_digest(index, level);
            let first = seen[usize::from(level.is_fused())].get_or_insert(have);
            assert_eq!(have, *first, "{level}, line {index}: {:?}", line(index).0.sizes);
        }
    }
    assert!(wrong.is_empty(), "level, have, want: {wrong:x?}");
}

/// The two classes are two: a digest that both gave would see no rounding at all.
#[test]
fn the_classes_differ() {
    let fused = Level::available().find(|level| level.is_fused());
    if let Some(fused) = fused {
        assert_ne!(digest(fused), digest(Level::SCALAR));
    }
}

/// The grid's digest does not hang on where a line is held.
#[test]
fn a_line_gives_the_same_bits_wherever_it_is_held() {
    for index in 0..lines() {
        let (case, place) = line(index);
        for level in Level::available() {
            let want = answer(&case, place, level).bits();
            let have = answer(&case, Place::Paged(48, 3), level).bits();
            assert!(have == want, "{level}, line {index}: {:?}", case.sizes);
        }
    }
}
