//! The figures as Markdown, and the committed document read back.

use core::fmt::Write;

use paged_kv::Level;

use super::measure::{Errors, Figures, Levelled};

/// A line of a table: what it is about, and a cell for each family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// The first two cells: stored type, and what was computed how.
    pub(crate) what: [String; 2],
    pub(crate) cells: Vec<String>,
}

/// The names of the tables, which stand above them.
pub(crate) const TITLES: [&str; 2] = ["## Altogether", "## Arithmetic alone"];

/// Levels of a class give the same bits and so share a line.
const CLASSES: [&str; 2] = ["`scalar`, `portable`", "`avx2`, `avx512`"];

fn name(level: Level) -> String {
    let inexact = Level::available().all(|exact| exact != level);
    match inexact {
        true => format!("`{level}`"),
        false => CLASSES[usize::from(level.is_fused())].to_owned(),
    }
}

fn cell(errors: &Errors) -> String {
    match errors.most {
        0.0 => "0".into(),
        most => format!("{most:.1e} / {:.1e}", errors.rms()),
    }
}

/// Both tables, of the figures of some families.
///
/// # Panics
///
/// If two levels of a class differ, which they never may.
pub(crate) fn tables(families: &[Figures]) -> [Vec<Line>; 2] {
    let mut all = [Vec::new(), Vec::new()];
    let [altogether, arithmetic] = &mut all;
    let Some(first) = families.first() else { return all };
    for (index, (dtype, _)) in first.storing.iter().enumerate() {
        if *dtype != "f32" {
            let cells = families.iter().map(|it| cell(&it.storing[index].1)).collect();
            altogether.push(Line { what: [format!("`{dtype}`"), "storing".into()], cells });
        }
        for (at, one) in first.levels.iter().enumerate().filter(|(_, it)| it.dtype == *dtype) {
            let line = |of: &dyn Fn(&Levelled) -> Errors| Line {
                what: [format!("`{dtype}`"), name(one.level)],
                cells: families.iter().map(|it| cell(&of(&it.levels[at]))).collect(),
            };
            put(altogether, line(&|it| it.whole));
            put(arithmetic, line(&|it| it.arithmetic));
        }
    }
    all
}

fn put(lines: &mut Vec<Line>, line: Line) {
    match lines.iter().find(|other| other.what == line.what) {
        None => lines.push(line),
        Some(other) => assert_eq!(*other, line, "levels of a class give the same bits"),
    }
}

/// Markdown of both tables.
pub(crate) fn markdown(names: &[&str], tables: &[Vec<Line>; 2]) -> String {
    let mut text = String::new();
    for (title, lines) in TITLES.iter().zip(tables) {
        let _ = write!(text, "{title}\n\n| stored as | at | {} |\n|---|---", names.join(" | "));
        let _ = writeln!(text, "{}|", "|---".repeat(names.len()));
        for Line { what, cells } in lines {
            let _ = writeln!(text, "| {} | {} |", what.join(" | "), cells.join(" | "));
        }
        text.push('\n');
    }
    text
}

/// The tables of a document.
pub(crate) fn read(document: &str) -> [Vec<Line>; 2] {
    TITLES.map(|title| {
        let from = document.split_once(title).map_or("", |(_, rest)| rest);
        let table = from.lines().skip_while(|line| !line.starts_with("|---"));
        let lines = table.skip(1).take_while(|line| line.starts_with('|'));
        lines
            .map(|line| {
                let mut cells =
                    line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
                let what = core::array::from_fn(|_| cells.next().unwrap_or_default());
                Line { what, cells: cells.collect() }
            })
            .collect()
    })
}

/// What the document says otherwise than the figures, whose families are its first columns. Lines
/// for levels that this machine does not have are not looked at; those names come back as well.
pub(crate) fn differences(document: &str, figures: &[Vec<Line>; 2]) -> (Vec<String>, Vec<String>) {
    let (mut wrong, mut not_looked_at) = (Vec::new(), Vec::new());
    for ((title, written), lines) in TITLES.iter().zip(read(document)).zip(figures) {
        for line in lines {
            let found = written.iter().find(|written| written.what == line.what);
            let Some(found) = found else {
                wrong.push(format!("{title}: there is no line {:?}", line.what));
                continue;
            };
            for (column, have) in line.cells.iter().enumerate() {
                let want = found.cells.get(column).map_or("nothing", String::as_str);
                if have != want {
                    let what = line.what.join(" ");
                    wrong.push(format!("{title}: {what}, column {column}: {want}, not {have}"));
                }
            }
        }
        let missing = written.iter().filter(|it| lines.iter().all(|line| line.what != it.what));
        not_looked_at.extend(missing.map(|it| format!("{title}: {}", it.what.join(" "))));
    }
    (wrong, not_looked_at)
}
