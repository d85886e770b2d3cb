//! Every level prints the digest of its class over the fixed grid of `internal::digest`.

use paged_kv::internal::digest::{digest, expected, line, line_digest, lines};
use paged_kv::internal::doors::{Place, answer};
use paged_kv::{Element, Level, every_type};

fn every_level_gives_its_classes_digest<E: Element>() {
    let mut wrong = Vec::new();
    for level in Level::available() {
        let (have, want) = (digest::<E>(level), expected::<E>(level));
        println!("{}, {level}: {have:#018x}, fused: {}", E::NAME, level.is_fused());
        if have != want {
            wrong.push((level, have, want));
        }
    }
    // Which lines differ inside a class says where to look.
    for index in 0..lines() {
        let mut seen = [None; 2];
        for level in Level::available() {
            let have = line_digest::<E>(index, level);
            let first = seen[usize::from(level.is_fused())].get_or_insert(have);
            assert_eq!(have, *first, "{level}, line {index}: {:?}", line(index).0.sizes);
        }
    }
    assert!(wrong.is_empty(), "level, have, want: {wrong:x?}");
}

/// The two classes are two: a digest that both gave would see no rounding at all.
fn the_classes_differ<E: Element>() {
    let fused = Level::available().find(|level| level.is_fused());
    if let Some(fused) = fused {
        assert_ne!(digest::<E>(fused), digest::<E>(Level::SCALAR));
    }
}

/// The grid's digest does not hang on where a line is held.
fn a_line_gives_the_same_bits_wherever_it_is_held<E: Element>() {
    for index in 0..lines() {
        let (case, place) = line(index);
        for level in Level::available() {
            let want = answer::<E>(&case, place, level).bits();
            let have = answer::<E>(&case, Place::Paged(48, 3), level).bits();
            assert!(have == want, "{level}, line {index}: {:?}", case.sizes);
        }
    }
}

every_type! {
    every_level_gives_its_classes_digest,
    the_classes_differ,
    a_line_gives_the_same_bits_wherever_it_is_held,
}
