//! What is read and what is asked.
//!
//! Every request reads the same prefix of pairs, then its own: the same keys as every other
//! request in the same places, each with another value. So a row taken from a neighbour matches
//! the question perfectly and answers it wrongly. Every key is asked, those of the prefix too, and
//! after each answer the question is taken back, so that a list is as long at the end as before
//! the first question.

use alloc::vec::Vec;

use crate::decoder::{BEGIN, Config, Decoder, Memory, StepError, Token, Workspace, mix};

/// One question in this many is asked after a draft that is rolled back.
///
/// The draft says the key and a wrong value. If one of its rows outlives the rollback, the wrong
/// value stands behind the key a second time and takes half of the answer's weight.
const DRAFT_EVERY: usize = 8;

/// Positions a question can take past the end of its list: a draft of two tokens.
pub(crate) const QUESTION_ROOM: usize = 2;

/// How many pairs are read, shared and alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    /// Pairs of the prefix that all requests share.
    pub(crate) shared_pairs: usize,
    /// Pairs that each request reads alone.
    pub(crate) own_pairs: usize,
    /// Tokens that can stand for a value; more than there are requests.
    pub(crate) values: usize,
}

impl Task {
    /// Keys, and so questions.
    pub(crate) fn keys(&self) -> usize {
        self.shared_pairs + self.own_pairs
    }

    /// Tokens of the shared prefix: the beginning, then its pairs.
    pub(crate) fn prefix_len(&self) -> usize {
        1 + 2 * self.shared_pairs
    }

    /// Tokens of a whole list.
    pub(crate) fn list_len(&self) -> usize {
        1 + 2 * self.keys()
    }

    /// Positions a request can reach while it is asked.
    pub(crate) fn positions(&self) -> usize {
        self.list_len() + QUESTION_ROOM
    }

    /// A decoder that can read this.
    pub(crate) fn config(&self) -> Config {
        Config::wide(self.keys(), self.values, self.positions())
    }

    /// The list of `request`; its first [`prefix_len`](Task::prefix_len) tokens are everybody's.
    pub(crate) fn list(&self, config: &Config, request: usize) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(self.list_len());
        tokens.push(BEGIN);
        for key in 0..self.keys() {
            tokens.push(config.key(key));
            tokens.push(config.value(self.value_of(request, key)));
        }
        tokens
    }

    /// The value behind `key` in the list of `request`.
    ///
    /// Requests are steps around the ring of values from where the key's hash begins, so two of
    /// them never agree as long as there are more values than requests.
    pub(crate) fn value_of(&self, request: usize, key: usize) -> usize {
        let begin = (mix(key as u64) % self.values as u64) as usize;
        let steps = if key < self.shared_pairs { 0 } else { request };
        (begin + steps) % self.values
    }

    /// The key of question `index`: all keys once, far from the order in which they were read.
    pub(crate) fn question(&self, index: usize) -> usize {
        let keys = self.keys();
        // About the golden section of the list, moved up until it shares no factor with it.
        let mut stride = (keys * 5 / 8).max(1);
        while common_factor(stride, keys) != 1 {
            stride += 1;
        }
        index * stride % keys
    }
}

fn common_factor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// What the decoder said to one question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Answer {
    /// The key that was asked.
    pub(crate) key: Token,
    /// The value behind it in the list.
    pub(crate) expected: Token,
    /// The token with the highest logit.
    pub(crate) said: Token,
    /// Its logit, as a part of what a whole code would give.
    pub(crate) weight: f32,
    /// The second highest, on the same scale.
    pub(crate) runner_up: f32,
}

impl Answer {
    /// The least weight of an answer that counts. Four heads carry a quarter each: one that read
    /// from a wrong row would leave the right token ahead of all others, and is caught by this.
    pub(crate) const LEAST_WEIGHT: f32 = 0.875;

    fn new(config: &Config, key: Token, expected: Token, logits: &[f32]) -> Answer {
        let (mut said, mut best, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
        for (token, &logit) in logits.iter().enumerate() {
            if logit > best {
                (said, best, second) = (token, logit, best);
            } else if logit > second {
                second = logit;
            }
        }
        let whole = config.code_width() as f32;
        Answer {
            key,
            expected,
            said: Token(said as u32),
            weight: best / whole,
            runner_up: second / whole,
        }
    }

    /// Whether it is the value in the list, and said with the weight of all heads.
    pub(crate) fn is_right(&self) -> bool {
        self.said == self.expected && self.weight >= Answer::LEAST_WEIGHT
    }
}

/// The buffers of one request.
#[derive(Debug)]
pub(crate) struct Desk {
    /// The decoder's activations.
    pub(crate) work: Workspace,
    /// The logits after the last question.
    pub(crate) logits: Vec<f32>,
}

impl Desk {
    /// Buffers for lists read in chunks of `rows` tokens.
    pub(crate) fn new(config: &Config, rows: usize) -> Desk {
        Desk { work: Workspace::new(config, rows), logits: alloc::vec![0.0; config.vocabulary()] }
    }
}

/// Asks question `index` of `request`, whose list is in `memory`, and takes it back. Returns the
/// answer and how many tokens went through the decoder for it.
pub(crate) fn ask<M: Memory>(
    decoder: &Decoder,
    task: &Task,
    request: usize,
    index: usize,
    memory: &mut M,
    desk: &mut Desk,
) -> Result<(Answer, usize), StepError<M::Error>> {
    let config = decoder.config();
    let key = task.question(index);
    let value = task.value_of(request, key);
    let list_len = memory.len();
    let mut tokens = 1;
    if index.is_multiple_of(DRAFT_EVERY) {
        let wrong = config.value((value + 1) % task.values);
        decoder.forward(memory, &[config.key(key), wrong], &mut desk.work)?;
        memory.truncate(list_len).map_err(StepError::Memory)?;
        tokens += 2;
    }
    decoder.forward(memory, &[config.key(key)], &mut desk.work)?;
    decoder.logits(&desk.work, &mut desk.logits);
    memory.truncate(list_len).map_err(StepError::Memory)?;
    let answer = Answer::new(config, config.key(key), config.value(value), &desk.logits);
    Ok((answer, tokens))
}

/// A hash of every bit of every logit, in the order in which they were computed.
///
/// Not a checksum against malice: it shows whether two runs did the same arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) u64);

impl Digest {
    /// Of nothing.
    pub(crate) const EMPTY: Digest = Digest(0xcbf2_9ce4_8422_2325);

    /// Takes in numbers by their bits.
    pub(crate) fn numbers(&mut self, numbers: &[f32]) {
        for number in numbers {
            self.word(u64::from(number.to_bits()));
        }
    }

    /// Takes in one word, such as the digest of a request.
    pub(crate) fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
