//! How far attention is from double precision, as a table in Markdown.
//!
//! ```text
//! cargo run --release --example accuracy                        # inputs that are made up
//! cargo run --release --example accuracy -- --capture FILE      # and a real model's
//! cargo run --release --example accuracy -- --check src/manual/accuracy.md
//! ```
//!
//! FILE is what `examples/generate --capture FILE` wrote. `src/manual/accuracy.md` holds the table
//! and says how to read it. The figures of what is made up are the same on every machine, so
//! `--check` compares them digit by digit, as `tests/accuracy.rs` does.

mod capture;
mod families;
mod measure;
mod table;

use std::process::ExitCode;

use paged_kv::internal::oracle::{Case, Rules, Sizes};

use capture::Capture;
use measure::{Figures, measure};

const HELP: &str = "\
How far attention is from double precision, as a table in Markdown.

usage: accuracy [--capture FILE] [--check FILE]

  --capture FILE    measure a model's queries, keys and values as well, which
                    `generate --capture` wrote
  --check FILE      print nothing but what this document says otherwise
  --help            this text

Exit code 0: done. 1: the document says otherwise. 2: options or files that make no sense.
";

/// Query rows that are asked of a captured request: its last ones, which see the most.
const ROWS: usize = 16;

fn main() -> ExitCode {
    match run(std::env::args().skip(1)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("accuracy: {error}\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

fn run(mut args: impl Iterator<Item = String>) -> Result<bool, String> {
    let (mut captured, mut document) = (None, None);
    while let Some(arg) = args.next() {
        let mut file = || args.next().ok_or_else(|| format!("{arg} needs a file"));
        match arg.as_str() {
            "--capture" => captured = Some(cases(&file()?)?),
            "--check" => {
                let path = file()?;
                let text = std::fs::read_to_string(&path);
                document = Some(text.map_err(|error| format!("{path}: {error}"))?);
            }
            "--help" | "-h" => {
                print!("{HELP}");
                return Ok(true);
            }
            _ => return Err(format!("there is no option {arg}")),
        }
    }
    let (mut names, mut figures) = (Vec::new(), Vec::<Figures>::new());
    for family in families::made_up() {
        names.push(family.name);
        figures.push(measure(&family.cases));
    }
    if let Some(cases) = captured {
        names.push("a real model");
        figures.push(measure(&cases));
    }
    let tables = table::tables(&figures);
    let Some(document) = document else {
        print!("{}", table::markdown(&names, &tables));
        for (name, figures) in names.iter().zip(&figures) {
            let exact = figures
                .levels
                .iter()
                .filter(|it| paged_kv::Level::available().any(|level| level == it.level));
            let worst = exact.map(|it| it.of_bound).fold(0.0, f64::max);
            println!("{name}: exact levels stay within {worst:.2} of 1e-6 + 2^-22 S");
        }
        return Ok(true);
    };
    let (wrong, not_looked_at) = table::differences(&document, &tables);
    not_looked_at.iter().for_each(|line| println!("this processor cannot say: {line}"));
    wrong.iter().for_each(|line| println!("{line}"));
    Ok(wrong.is_empty())
}

/// A case for each layer of a captured request.
fn cases(path: &str) -> Result<Vec<Case>, String> {
    let named = |error: String| format!("{path}: {error}");
    let bytes = std::fs::read(path).map_err(|error| named(error.to_string()))?;
    let Capture { n_heads, n_kv_heads, width, len, layers } =
        Capture::read(&bytes).map_err(named)?;
    let n_q = len.min(ROWS);
    let group = n_heads / n_kv_heads;
    let sizes = Sizes { n_kv_heads, group, k_width: width, v_width: width, n_q, len };
    let last = (len - n_q) * n_heads * width;
    let case = |layer: capture::Layer| {
        let q = layer.q[last..].to_vec();
        Case { sizes, rules: Rules::PLAIN, q, k: layer.k, v: layer.v }
    };
    Ok(layers.into_iter().map(case).collect())
}
