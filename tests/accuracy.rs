//! The table of `manual::accuracy` is what is measured, digit by digit.
//!
//! Inputs come from integers and levels promise their bits, so another figure is another result of
//! the crate. The column of a real model is not among them: its inputs are not in the repository.

#[path = "../examples/accuracy/families.rs"]
mod families;
#[path = "../examples/accuracy/measure.rs"]
mod measure;
#[path = "../examples/accuracy/table.rs"]
#[expect(dead_code, reason = "the example prints, this compares")]
mod table;

use std::sync::LazyLock;

use measure::{Figures, measure};
use paged_kv::Level;
use table::{differences, read, tables};

const DOCUMENT: &str = include_str!("../src/manual/accuracy.md");

/// What is compared by column has the same columns.
#[test]
fn columns_are_in_the_documents_order() {
    let names: Vec<&str> = families::made_up().iter().map(|family| family.name).collect();
    let head = format!("| stored as | at | {} | a real model |", names.join(" | "));
    assert_eq!(DOCUMENT.matches(&head).count(), 2, "{head}");
}

static FIGURES: LazyLock<Vec<Figures>> =
    LazyLock::new(|| families::made_up().iter().map(|family| measure(&family.cases)).collect());

#[test]
fn the_document_says_what_is_measured() {
    let (wrong, not_looked_at) = differences(DOCUMENT, &tables(&FIGURES));
    for line in not_looked_at {
        eprintln!("NOT TESTED: this processor does not have the level of {line}");
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// What the README promises for options that lengthen scores holds where inputs do, too.
#[test]
fn exact_levels_stay_within_their_bound() {
    let mut seen = 0;
    for levelled in FIGURES.iter().flat_map(|figures| &figures.levels) {
        if Level::available().any(|level| level == levelled.level) {
            assert!(levelled.of_bound <= 1.0, "{levelled:?}");
            seen += 1;
        }
    }
    assert_eq!(seen, FIGURES.len() * 5 * Level::available().count());
}

/// Storing less loses more, and what both lines of a type have in common is storing.
#[test]
fn types_are_in_order() {
    for figures in FIGURES.iter() {
        let rms: Vec<f64> = figures.storing.iter().map(|(_, errors)| errors.rms()).collect();
        assert!(rms[0] == 0.0 && rms.is_sorted(), "{rms:?}");
        for levelled in &figures.levels {
            let storing = figures.storing.iter().find(|it| it.0 == levelled.dtype);
            let storing = storing.expect("each type is stored").1;
            let most = storing.most + 1.01 * levelled.arithmetic.most;
            assert!(levelled.whole.most <= most * 1.0001, "{levelled:?}");
        }
    }
}

/// The comparison can fail: another digit, a line too few, a document without tables.
#[test]
fn a_document_that_is_wrong_is_seen() {
    let figures = tables(&FIGURES);
    let cell = &read(DOCUMENT)[1][0].cells[0];
    let other = DOCUMENT.replacen(cell, "9.9e-9 / 9.9e-9", 1);
    assert_eq!(differences(&other, &figures).0.len(), 1);
    let start = DOCUMENT.find("| `f16` |").expect("there is a line for f16");
    let end = start + DOCUMENT[start..].find('\n').expect("which ends") + 1;
    let shorter = format!("{}{}", &DOCUMENT[..start], &DOCUMENT[end..]);
    assert_eq!(differences(&shorter, &figures).0.len(), 1);
    assert!(differences("", &figures).0.len() > 10);
}
