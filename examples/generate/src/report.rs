//! What a person sees: the text on stdout, how far it is on stderr, the figures at the end.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::plan::Plan;
use crate::serve::{Account, Event, Outcome};
use crate::step::Spent;
use crate::tokenizer::{TextStream, Vocabulary};

/// Least time between two lines of progress.
const PAUSE: Duration = Duration::from_secs(1);

/// Where an answer is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Waiting,
    Prompt,
    Generating,
    Ended,
}

/// Turns events into text.
///
/// A single answer is written as it comes. Several would talk across each other, so each is written
/// when it has ended, under a line with its name.
#[derive(Debug)]
pub struct Report<'a, O, P> {
    vocabulary: &'a Vocabulary,
    plan: &'a Plan,
    out: O,
    progress: P,
    answers: Vec<Answer<'a>>,
    tokens: usize,
    last_line: Option<Instant>,
}

#[derive(Debug)]
struct Answer<'a> {
    stage: Stage,
    stream: TextStream<'a>,
    text: String,
}

impl<'a, O: Write, P: Write> Report<'a, O, P> {
    /// A report on the answers of a plan: text to `out`, lines of progress to `progress`.
    pub fn new(vocabulary: &'a Vocabulary, plan: &'a Plan, out: O, progress: P) -> Self {
        let answer = || Answer {
            stage: Stage::Waiting,
            stream: TextStream::new(vocabulary),
            text: String::new(),
        };
        let answers = (0..plan.answers()).map(|_| answer()).collect();
        Report { vocabulary, plan, out, progress, answers, tokens: 0, last_line: None }
    }

    /// Takes notice of an event.
    ///
    /// # Errors
    ///
    /// Where the text cannot be written, or a token has none.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        let plan = self.plan;
        match event {
            Event::Waits { answer, need, free } => {
                let name = plan.name(answer);
                let line = format_args!("{name} waits: it needs {need} blocks, {free} are free");
                self.line(true, line)
            }
            Event::Follows { answer, first } => {
                let (name, first) = (plan.name(answer), plan.name(first));
                let line = format_args!("{name} waits: {first} computes what both begin with");
                self.line(true, line)
            }
            Event::Prefill { answer, done, of } => {
                self.answers[answer].stage = Stage::Prompt;
                if self.answers.len() == 1 {
                    return self.line(done == of, format_args!("prompt: {done} of {of} positions"));
                }
                self.overview()
            }
            Event::Token { answer, token } => self.token(answer, token),
            Event::Preempted { answer, positions } => {
                self.answers[answer].stage = Stage::Waiting;
                let name = plan.name(answer);
                let line = format_args!("{name} gives its {positions} positions back and waits");
                self.line(true, line)
            }
            Event::Ended { answer } => self.ended(answer),
        }
    }

    fn token(&mut self, answer: usize, token: u32) -> Result<(), Error> {
        self.tokens += 1;
        let alone = self.answers.len() == 1;
        let of = &mut self.answers[answer];
        of.stage = Stage::Generating;
        let text = of.stream.push(token)?;
        if alone {
            return write(&mut self.out, format_args!("{text}"));
        }
        of.text.push_str(&text);
        self.overview()
    }

    fn ended(&mut self, answer: usize) -> Result<(), Error> {
        let alone = self.answers.len() == 1;
        let of = &mut self.answers[answer];
        of.stage = Stage::Ended;
        let stream = std::mem::replace(&mut of.stream, TextStream::new(self.vocabulary));
        let rest = stream.finish()?;
        if alone {
            return write(&mut self.out, format_args!("{rest}\n"));
        }
        let (text, name) = (std::mem::take(&mut of.text), self.plan.name(answer));
        write(&mut self.out, format_args!("--- {name}\n{text}{rest}\n"))
    }

    fn overview(&mut self) -> Result<(), Error> {
        let count = |stage| self.answers.iter().filter(|answer| answer.stage == stage).count();
        let line = format!(
            "{} waiting, {} in the prompt, {} generating, {} ended; {} tokens",
            count(Stage::Waiting),
            count(Stage::Prompt),
            count(Stage::Generating),
            count(Stage::Ended),
            self.tokens
        );
        self.line(false, format_args!("{line}"))
    }

    fn line(&mut self, now: bool, line: std::fmt::Arguments<'_>) -> Result<(), Error> {
        let due = self.last_line.is_none_or(|last| last.elapsed() >= PAUSE);
        if now || due {
            self.last_line = Some(Instant::now());
            write(&mut self.progress, format_args!("{line}\n"))?;
        }
        Ok(())
    }
}

/// The figures of a run, a line each.
pub fn figures(plan: &Plan, outcome: &Outcome) -> String {
    let tokens: usize = outcome.answers.iter().flatten().map(Vec::len).sum();
    let mut lines = format!(
        "{tokens} tokens in {:.2} s, {:.1} tokens per second",
        outcome.generating.as_secs_f64(),
        per_second(tokens, outcome.generating)
    );
    lines += &format!("; {:.2} s in all\n", outcome.elapsed.as_secs_f64());
    lines += &spent("prompts", &outcome.prompt);
    lines += &spent("new tokens alone", &outcome.decode);
    lines += &format!("keys and values: {} bytes per token\n", outcome.bytes_per_token);
    let Account { admissions, hits, tokens_saved, evictions, preemptions } = outcome.account;
    lines += &format!(
        "prompts found in the cache: {hits} of {admissions}, {tokens_saved} tokens saved; \
         {evictions} blocks evicted, {preemptions} preemptions\n"
    );
    lines += &format!(
        "blocks in each layer: {} used; peak {} of {}; {} free at the end\n",
        outcome.handed_out, outcome.peak, plan.pool_blocks, outcome.free
    );
    lines
}

fn spent(what: &str, spent: &Spent) -> String {
    let Spent { steps, rows, whole, attention, .. } = *spent;
    if steps == 0 {
        return String::new();
    }
    let share = 100.0 * attention.as_secs_f64() / whole.as_secs_f64().max(1e-9);
    let rate = per_second(rows, whole);
    format!(
        "steps of {what}: {steps} of {rows} positions in {:.2} s, {rate:.1} per second; \
         {share:.1} % in attention\n",
        whole.as_secs_f64()
    )
}

fn per_second(many: usize, time: Duration) -> f64 {
    many as f64 / time.as_secs_f64().max(1e-9)
}

fn write(to: &mut impl Write, what: std::fmt::Arguments<'_>) -> Result<(), Error> {
    let written = to.write_fmt(what).and_then(|()| to.flush());
    written.map_err(|error: io::Error| Error::Output(error.to_string()))
}
