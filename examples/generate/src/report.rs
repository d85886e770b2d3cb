//! What a person sees: the text on stdout, how far it is on stderr, the figures at the end.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::plan::Plan;
use crate::serve::{Event, Outcome};
use crate::step::Spent;
use crate::tokenizer::{TextStream, Vocabulary};

/// Least time between two lines of progress.
const PAUSE: Duration = Duration::from_secs(1);

/// Where a request is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Waiting,
    Prompt,
    Generating,
    Ended,
}

/// Turns events into text.
///
/// A single request is written as it speaks. Several would talk across each other, so each is
/// written when it has ended, under a line with its number.
#[derive(Debug)]
pub struct Report<'a, O, P> {
    vocabulary: &'a Vocabulary,
    out: O,
    progress: P,
    requests: Vec<Request<'a>>,
    tokens: usize,
    last_line: Option<Instant>,
}

#[derive(Debug)]
struct Request<'a> {
    stage: Stage,
    stream: TextStream<'a>,
    text: String,
}

impl<'a, O: Write, P: Write> Report<'a, O, P> {
    /// A report on this many requests: text to `out`, lines of progress to `progress`.
    pub fn new(vocabulary: &'a Vocabulary, requests: usize, out: O, progress: P) -> Self {
        let request = || Request {
            stage: Stage::Waiting,
            stream: TextStream::new(vocabulary),
            text: String::new(),
        };
        let requests = (0..requests).map(|_| request()).collect();
        Report { vocabulary, out, progress, requests, tokens: 0, last_line: None }
    }

    /// Takes notice of an event.
    ///
    /// # Errors
    ///
    /// Where the text cannot be written, or a token has none.
    pub fn event(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Prefix { done, of } => {
                self.line(done == of, format_args!("common prefix: {done} of {of} positions"))
            }
            Event::Waits { request, need, free } => self.line(
                true,
                format_args!("request {request} waits: it needs {need} blocks, {free} are free"),
            ),
            Event::Prefill { request, done, of } => {
                self.requests[request].stage = Stage::Prompt;
                if self.requests.len() == 1 {
                    return self.line(done == of, format_args!("prompt: {done} of {of} positions"));
                }
                self.overview()
            }
            Event::Token { request, token } => self.token(request, token),
            Event::Ended { request } => self.ended(request),
        }
    }

    fn token(&mut self, request: usize, token: u32) -> Result<(), Error> {
        self.tokens += 1;
        let alone = self.requests.len() == 1;
        let of = &mut self.requests[request];
        of.stage = Stage::Generating;
        let text = of.stream.push(token)?;
        if alone {
            return write(&mut self.out, format_args!("{text}"));
        }
        of.text.push_str(&text);
        self.overview()
    }

    fn ended(&mut self, request: usize) -> Result<(), Error> {
        let alone = self.requests.len() == 1;
        let of = &mut self.requests[request];
        of.stage = Stage::Ended;
        let stream = std::mem::replace(&mut of.stream, TextStream::new(self.vocabulary));
        let rest = stream.finish()?;
        if alone {
            return write(&mut self.out, format_args!("{rest}\n"));
        }
        let text = std::mem::take(&mut of.text);
        write(&mut self.out, format_args!("--- request {request}\n{text}{rest}\n"))
    }

    fn overview(&mut self) -> Result<(), Error> {
        let count = |stage| self.requests.iter().filter(|request| request.stage == stage).count();
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
    let refused = outcome.answers.iter().filter(|answer| answer.is_err()).count();
    let adopted = outcome.answers.len() - refused;
    let mut lines = format!(
        "{tokens} tokens in {:.2} s, {:.1} tokens per second",
        outcome.generating.as_secs_f64(),
        per_second(tokens, outcome.generating)
    );
    lines += &format!("; {:.2} s in all\n", outcome.elapsed.as_secs_f64());
    lines += &spent("prompts", &outcome.prompt);
    lines += &spent("new tokens alone", &outcome.decode);
    lines += &format!("keys and values: {} bytes per token\n", outcome.bytes_per_token);
    lines += &format!(
        "blocks in each layer: {} used, of them {} shared by {}; peak {} of {}; {} free at the end\n",
        outcome.handed_out,
        if adopted > 0 { plan.prefix_blocks } else { 0 },
        if plan.prefix > 0 { adopted } else { 0 },
        outcome.peak,
        plan.pool_blocks,
        outcome.free
    );
    lines
}

fn spent(what: &str, spent: &Spent) -> String {
    let Spent { steps, rows, whole, attention } = *spent;
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
