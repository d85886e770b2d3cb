//! Generates text from a Llama GGUF; `--help` lists the options.

use std::io::{self, Write};
use std::process::ExitCode;

use generate::capture::Capture;
use generate::error::Error;
use generate::gguf::Gguf;
use generate::model::Model;
use generate::options::{self, Command, HELP, Options};
use generate::plan::Plan;
use generate::report::{self, Report};
use generate::serve;
use generate::step::Steps;
use generate::tokenizer::Vocabulary;
use paged_kv::Level;

fn main() -> ExitCode {
    match options::parse(std::env::args().skip(1)).and_then(|command| match command {
        Command::Help => {
            print!("{HELP}");
            Ok(())
        }
        Command::Run(options) => run(&options),
    }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::from(if matches!(error, Error::Usage(_)) { 2 } else { 1 })
        }
    }
}

fn run(options: &Options) -> Result<(), Error> {
    let mut progress: Box<dyn Write> =
        if options.quiet { Box::new(io::sink()) } else { Box::new(io::stderr()) };
    let level = level(options)?;
    let threads = match options.threads {
        Some(threads) => threads,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    // Everything that needs no weights is looked at before they are read.
    let mut file = Gguf::open(&options.model)?;
    let sizes = generate::model::Sizes::new(&file)?;
    let vocabulary = Vocabulary::new(&file)?;
    let prompts = options
        .prompts
        .iter()
        .map(|prompt| vocabulary.encode(prompt))
        .collect::<Result<Vec<_>, _>>()?;
    let plan = Plan::new(&prompts, options, &sizes)?;
    if let Some(refusal) = plan.refusal_of_all() {
        return Err(refusal);
    }
    say(&mut progress, format_args!("loading {}", options.model.display()));
    let model = Model::load(&mut file, threads)?;
    say(
        &mut progress,
        format_args!(
            "{} layers, {} query heads over {} KV heads of {}; attention by {} over {}; \
             threads: {threads}",
            sizes.layers,
            sizes.n_heads,
            sizes.n_kv_heads,
            sizes.head_dim,
            level.name(),
            options.kv_type.name()
        ),
    );
    let mut report = Report::new(&vocabulary, &plan, io::stdout(), &mut progress);
    let mut told = Ok(());
    let mut steps = Steps::new(level, threads);
    if let Some(path) = &options.capture {
        steps.capture(Capture::create(path, &sizes)?);
    }
    let outcome = serve::run(&model, &plan, options, steps, vocabulary.end(), &mut |event| {
        if told.is_ok() {
            told = report.event(event);
        }
    })?;
    say(&mut progress, format_args!("{}", report::figures(&plan, &outcome).trim_end()));
    told?;
    verdict(&plan, outcome)
}

/// Names every answer that failed; the last one's reason is the program's.
fn verdict(plan: &Plan, outcome: serve::Outcome) -> Result<(), Error> {
    let alone = outcome.answers.len() == 1;
    let mut last = Ok(());
    for (index, answer) in outcome.answers.into_iter().enumerate() {
        if let Err(error) = answer {
            if !alone {
                eprintln!("{}: {error}", plan.name(index));
            }
            last = Err(error);
        }
    }
    last
}

fn level(options: &Options) -> Result<Level, Error> {
    let Some(name) = &options.level else {
        return Ok(Level::detect());
    };
    Level::from_name(name).ok_or_else(|| {
        let inexact = [Level::avx512_bf16(), Level::avx512_vnni()].into_iter().flatten();
        let names: Vec<_> = Level::available().chain(inexact).map(Level::name).collect();
        Error::Usage(format!("--level {name} is not to be had here; {} are", names.join(", ")))
    })
}

/// Progress is a courtesy: where it cannot be written the run goes on.
fn say(progress: &mut dyn Write, what: std::fmt::Arguments<'_>) {
    drop(writeln!(progress, "{what}"));
}
