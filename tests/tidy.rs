//! The rules that a reader of the sources could check, checked.
//!
//! Rooms look one way only; `unsafe` and `std` stand in their named places; files stay short
//! enough to be read in one sitting. What is checked is text, so a rule can be got round on
//! purpose; it cannot be broken by accident.

use std::fs;
use std::path::{Path, PathBuf};

/// Each room, and the rooms it may look at beside itself.
///
/// `element` looks at `attention` for one name, [`DECLARED`], so that kernels are compiled here
/// and not in a dependent's debug build.
const ARROWS: [(&str, &[&str]); 15] = [
    ("atomic", &[]),
    ("manual", &[]),
    ("cut", &[]),
    ("id", &[]),
    ("error", &["id"]),
    ("shape", &["error"]),
    ("simd", &["cut"]),
    ("element", &["cut", "error", "id", "shape", "simd"]),
    ("kernel", &["cut", "error", "id", "shape", "simd", "element"]),
    ("storage", &["atomic", "cut", "error", "id", "shape", "simd", "element"]),
    ("attention", &["cut", "error", "id", "shape", "simd", "element", "kernel", "storage"]),
    ("wire", &["error", "id", "shape", "element", "storage"]),
    ("share", &["atomic", "error", "id", "shape", "element", "storage", "wire"]),
    ("prefix", &["error", "id", "element", "share"]),
    (
        "batch",
        &[
            "atomic",
            "cut",
            "error",
            "id",
            "shape",
            "simd",
            "element",
            "kernel",
            "storage",
            "attention",
        ],
    ),
];

/// Whole lines that a room may have although its arrow says no.
const DECLARED: [(&str, &str); 1] = [("element", "use crate::attention::Job;")];

/// Where `unsafe` may stand.
const UNSAFE: [&str; 3] = ["simd/", "storage/memory.rs", "batch/pool.rs"];

/// Where `std` may stand, beside tests.
const STD: [&str; 6] = [
    "share/lock.rs",
    "share/wait.rs",
    "simd/detect.rs",
    "storage/memory.rs",
    "batch/pool.rs",
    "wire/io.rs",
];

/// Without the documentation of items, whose examples are read one at a time, elsewhere.
const MOST_LINES: usize = 600;

/// A file under `src`: its path there and its text.
struct Source {
    path: String,
    text: String,
}

impl Source {
    /// The first part of the path: `simd`, `error`.
    fn room(&self) -> &str {
        self.path.split(['/', '.']).next().unwrap_or_default()
    }

    fn is_tests(&self) -> bool {
        self.path.ends_with("tests.rs")
    }

    /// Lines of code with their numbers: comments and the tests at the bottom left out.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let end = if self.is_tests() { 0 } else { usize::MAX };
        let lines = self.text.lines().take(end).enumerate();
        let mut cfg_test = false;
        lines
            .take_while(move |(_, line)| {
                let tests = cfg_test && line.starts_with("mod tests {");
                cfg_test = line.starts_with("#[cfg(") && line.contains("test");
                !tests
            })
            .filter(|(_, line)| !line.trim_start().starts_with("//"))
            .map(|(index, line)| (index + 1, line.split(" // ").next().unwrap_or(line)))
    }
}

fn sources() -> Vec<Source> {
    fn collect(dir: &Path, into: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("the sources are there") {
            let path = entry.expect("a directory can be read").path();
            if path.is_dir() {
                collect(&path, into);
            } else if path.extension().is_some_and(|end| end == "rs") {
                into.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    paths.sort();
    let sources: Vec<Source> = paths
        .iter()
        .map(|path| Source {
            path: path.strip_prefix(&root).unwrap().to_string_lossy().replace('\\', "/"),
            text: fs::read_to_string(path).expect("sources are text"),
        })
        .collect();
    assert!(sources.len() > 25, "the walk over the sources found only {}", sources.len());
    sources
}

/// Whether `word` stands in the line as a word.
fn has_word(line: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].ends_with(part_of_word) && !line[at + word.len()..].starts_with(part_of_word)
    })
}

fn report(broken: &[String]) {
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

/// The rooms that a line names: `crate::storage::view::KvView` names `storage`.
fn rooms_named(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("crate::").map(|(at, found)| {
        let rest = &line[at + found.len()..];
        rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
    })
}

#[test]
fn rooms_look_one_way() {
    let mut broken = Vec::new();
    for source in sources() {
        let room = source.room();
        if ["lib", "internal"].contains(&room) {
            continue;
        }
        let allowed = ARROWS.iter().find(|(name, _)| *name == room).map(|(_, allowed)| *allowed);
        let Some(allowed) = allowed else {
            broken.push(format!("{}: the room `{room}` has no arrow; draw one", source.path));
            continue;
        };
        for (number, line) in source.code() {
            if DECLARED.contains(&(room, line.trim())) {
                continue;
            }
            for named in rooms_named(line).filter(|named| *named != room) {
                if !allowed.contains(&named) {
                    let path = &source.path;
                    broken.push(format!("{path}:{number}: `{room}` looks at `{named}`: {line}"));
                }
            }
        }
    }
    report(&broken);
}

/// The oracle would agree with any fault that it shared.
#[test]
fn the_oracle_calls_nothing_it_judges() {
    let mut broken = Vec::new();
    for source in sources() {
        if !["internal/oracle.rs", "internal/real.rs", "internal/numbers.rs"]
            .contains(&source.path.as_str())
        {
            continue;
        }
        for (number, line) in source.code() {
            if line.contains("crate::") || line.contains("super::doors") {
                broken.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    report(&broken);
}

#[test]
fn unsafe_stands_in_its_places() {
    let mut broken = Vec::new();
    for source in sources() {
        if UNSAFE.iter().any(|place| source.path.starts_with(place)) {
            continue;
        }
        for (number, line) in source.code().filter(|(_, line)| has_word(line, "unsafe")) {
            broken.push(format!("{}:{number}: {line}", source.path));
        }
        if source.text.contains("unsafe_code") && source.room() != "lib" {
            broken.push(format!("{}: turns `unsafe_code` off", source.path));
        }
    }
    report(&broken);
}

#[test]
fn std_stands_in_its_places() {
    let mut broken = Vec::new();
    for source in sources() {
        if STD.contains(&source.path.as_str()) {
            continue;
        }
        for (number, line) in source.code() {
            let is_std = line
                .match_indices("std::")
                .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            if is_std {
                broken.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    report(&broken);
}

#[test]
fn files_can_be_read_in_one_sitting() {
    let mut broken = Vec::new();
    for source in sources() {
        let documents = |line: &&str| line.trim_start().starts_with("///");
        let lines = source.text.lines().filter(|line| !documents(line)).count();
        if lines > MOST_LINES {
            broken.push(format!("{}: {lines} lines, the most is {MOST_LINES}", source.path));
        }
        for (index, line) in source.text.lines().enumerate() {
            if has_word(line, "TODO") || has_word(line, "FIXME") || has_word(line, "todo!") {
                // The forged token of `Level`'s example, which must not compile.
                if !line.trim_start().starts_with("/// let level = paged_kv::Level(") {
                    broken.push(format!("{}:{}: {line}", source.path, index + 1));
                }
            }
        }
    }
    report(&broken);
}

/// The type that a line makes an error: `impl Error for PinError {}` makes `PinError` one.
fn error_made(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("Error for ")?;
    rest.split(|c: char| !c.is_alphanumeric()).next()
}

#[test]
fn every_error_is_read() {
    let sources = sources();
    let tests = sources.iter().find(|source| source.path == "error/tests.rs").unwrap();
    let code = sources.iter().flat_map(Source::code);
    let mut errors: Vec<&str> = code.filter_map(|(_, line)| error_made(line)).collect();
    assert!(errors.len() > 10, "{errors:?}");
    errors.retain(|error| !tests.text.lines().any(|line| has_word(line, error)));
    assert!(errors.is_empty(), "{errors:?}: what they say is not in error/tests.rs");
}

/// Rooms open with an essay.
#[test]
fn every_file_says_what_it_is() {
    let silent = |source: &Source| !source.text.starts_with("//! ");
    let silent: Vec<_> = sources().into_iter().filter(silent).map(|source| source.path).collect();
    report(&silent);
}

/// The checks can fail: each finds what it looks for in a line made for it.
#[test]
fn the_checks_see() {
    let text = "use crate::attention::Job;\n// unsafe\nfn f() { unsafe {} } // std::\n#[cfg(test)]\nmod tests {\n    unsafe\n}\n";
    let source = Source { path: "kernel/mod.rs".into(), text: text.into() };
    assert_eq!(source.room(), "kernel");
    let lines: Vec<_> = source.code().collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[1], (3, "fn f() { unsafe {} }"));
    assert_eq!(rooms_named(lines[0].1).collect::<Vec<_>>(), ["attention"]);
    assert!(has_word(lines[1].1, "unsafe") && !has_word("unsafe_code", "unsafe"));
    assert_eq!(error_made("impl<X: Error> Error for WireError<X> {}"), Some("WireError"));
    assert_eq!(error_made("impl From<ShapeError> for KvCacheError {"), None);
}
