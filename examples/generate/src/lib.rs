//! Text from a Llama GGUF, all keys and values in a
//! [`SharedPagedKv`](paged_kv::cache::SharedPagedKv) and all attention by paged-kv.
//!
//! The question this program answers is whether the crate can carry a real model: not random
//! numbers against an oracle, but sentences, eight of them at once, finding what others have
//! computed, forking, and giving way to each other where blocks are short. Everything that is not KV memory or attention is somebody else's well-kept work
//! (the file and the products candle's, the vocabulary `tokenizers`') or too small to borrow.
//!
//! Rooms, each using those above it:
//!
//! ```text
//! error      what can stop a run
//! options    the command line
//! sample     logits to a token
//! gguf       the file
//! tokenizer  text to tokens and back
//! model      tokens of many requests to logits; knows a trait `Memory`, no blocks
//! pool       the shared store, and how blocks are taken from it
//! memory     one request's keys and values in it
//! prefixes   beginnings of prompts that are in the store already
//! capture    what attention is given, into a file
//! step       a step of many requests, their attention by one plan
//! plan       who needs how many blocks: numbers, nothing taken
//! house      who runs, who waits, who gives way
//! serve      a whole run, told as events
//! report     events as text
//! ```

pub mod capture;
pub mod error;
pub mod gguf;
mod house;
pub mod memory;
pub mod model;
pub mod options;
pub mod plan;
pub mod pool;
pub mod prefixes;
pub mod report;
pub mod sample;
pub mod serve;
pub mod step;
pub mod tokenizer;
