//! Requests on threads: each waits for its place, reads its list, answers, and leaves.

use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::panic::catch_unwind;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};

use crate::decoder::{Decoder, Memory};
use crate::pool::Pool;
use crate::task::{Answer, Desk, Digest, Task, ask};

/// Rows read at once. More would help attention little and cost activations of 3 KiB a row.
pub(crate) const ROWS: usize = 256;

/// Answers of each request that are kept to be shown.
const SHOWN: usize = 3;

/// Where a request stands.
#[derive(Debug)]
pub(crate) enum Stage {
    /// Too few blocks are free of promises.
    Waiting,
    /// It has its place and reads its list.
    Reading,
    /// It has read it and is asked.
    Asking,
    /// It has left.
    Done(Box<Result<Outcome, String>>),
}

/// What a request that came to its end said.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Questions.
    pub(crate) asked: usize,
    /// Right answers.
    pub(crate) right: usize,
    /// Of all its logits.
    pub(crate) digest: Digest,
    /// The least weight of an answer.
    pub(crate) least_weight: f32,
    /// Some of the answers; the wrong ones first.
    pub(crate) shown: Vec<Answer>,
}

/// Counters that all workers add to, for progress and for the rate.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Tokens through the decoder.
    pub(crate) tokens: AtomicUsize,
    /// Questions answered.
    pub(crate) answers: AtomicUsize,
}

/// What is served, and by how many threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Service<'a> {
    /// The weights.
    pub(crate) decoder: &'a Decoder,
    /// The lists and the questions.
    pub(crate) task: &'a Task,
    /// The memory.
    pub(crate) pool: &'a Pool,
    /// Requests to serve, numbered from 0.
    pub(crate) requests: usize,
    /// Threads that serve them.
    pub(crate) threads: usize,
}

/// Serves all requests; `watch` sees each change of stage, and `None` when a while has passed
/// without one. Returns what each request came to.
pub(crate) fn serve(
    service: Service<'_>,
    counters: &Counters,
    mut watch: impl FnMut(Option<(usize, &Stage)>),
) -> Vec<Result<Outcome, String>> {
    let next = AtomicUsize::new(0);
    let mut outcomes: Vec<_> = (0..service.requests).map(|_| None).collect();
    std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        for _ in 0..service.threads {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let request = next.fetch_add(1, Ordering::Relaxed);
                    if request >= service.requests {
                        break;
                    }
                    let outcome = guarded(service, request, counters, &sender);
                    // Nobody listens only when the watcher itself has failed.
                    let _ = sender.send((request, Stage::Done(Box::new(outcome))));
                }
            });
        }
        drop(sender);
        listen(&receiver, &mut outcomes, &mut watch);
    });
    let lost = || Err(String::from("its thread ended without a word"));
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(lost)).collect()
}

fn listen(
    receiver: &Receiver<(usize, Stage)>,
    outcomes: &mut [Option<Result<Outcome, String>>],
    watch: &mut impl FnMut(Option<(usize, &Stage)>),
) {
    loop {
        match receiver.recv_timeout(Duration::from_millis(250)) {
            Ok((request, stage)) => {
                watch(Some((request, &stage)));
                if let Stage::Done(outcome) = stage {
                    outcomes[request] = Some(*outcome);
                }
            }
            Err(RecvTimeoutError::Timeout) => watch(None),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// One request; a panic in it is its own end and nobody else's.
fn guarded(
    service: Service<'_>,
    request: usize,
    counters: &Counters,
    sender: &Sender<(usize, Stage)>,
) -> Result<Outcome, String> {
    let say = |stage| {
        let _ = sender.send((request, stage));
    };
    let served = AssertUnwindSafe(|| one(service, request, counters, &say));
    catch_unwind(served).unwrap_or_else(|_| Err(String::from("it panicked; the pool goes on")))
}

fn one(
    service: Service<'_>,
    request: usize,
    counters: &Counters,
    say: &impl Fn(Stage),
) -> Result<Outcome, String> {
    let Service { decoder, task, pool, .. } = service;
    let mut lease = pool
        .admit(request, task.positions(), || say(Stage::Waiting))
        .map_err(|error| error.to_string())?;
    say(Stage::Reading);
    let mut desk = Desk::new(decoder.config(), ROWS);
    let list = task.list(decoder.config(), request);
    for chunk in list[pool.prefix_len()..].chunks(ROWS) {
        decoder.forward(&mut lease, chunk, &mut desk.work).map_err(|error| error.to_string())?;
        counters.tokens.fetch_add(chunk.len(), Ordering::Relaxed);
    }
    lease.report();
    say(Stage::Asking);
    let mut outcome = Outcome {
        asked: task.keys(),
        right: 0,
        digest: Digest::EMPTY,
        least_weight: f32::INFINITY,
        shown: Vec::new(),
    };
    for index in 0..task.keys() {
        let (answer, tokens) = ask(decoder, task, request, index, &mut lease, &mut desk)
            .map_err(|error| error.to_string())?;
        if lease.len() != list.len() {
            return Err(format!("question {index} left its rows behind"));
        }
        outcome.digest.numbers(&desk.logits);
        outcome.least_weight = outcome.least_weight.min(answer.weight);
        if answer.is_right() {
            outcome.right += 1;
        } else {
            outcome.shown.insert(0, answer);
        }
        if outcome.shown.len() < SHOWN && answer.is_right() {
            outcome.shown.push(answer);
        }
        outcome.shown.truncate(SHOWN);
        counters.tokens.fetch_add(tokens, Ordering::Relaxed);
        counters.answers.fetch_add(1, Ordering::Relaxed);
    }
    Ok(outcome)
}

/// The digest of a whole run: those of its requests, in their order. None if one is missing.
pub(crate) fn digest(outcomes: &[Result<Outcome, String>]) -> Option<Digest> {
    let mut digest = Digest::EMPTY;
    for outcome in outcomes {
        digest.word(outcome.as_ref().ok()?.digest.0);
    }
    Some(digest)
}
