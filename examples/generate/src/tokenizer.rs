//! The vocabulary in the file, as a byte-level BPE of `tokenizers`.
//!
//! How a text is cut before the merges run is not in the file, only the name of the way
//! (`tokenizer.ggml.pre`). A wrong guess still gives tokens, and the model answers to them a
//! little worse than it could, so a name that is not known here is refused.

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};

use crate::error::Error;
use crate::gguf::Gguf;

/// `llama_token_type` of tokens that stand for no text.
const CONTROL: usize = 3;
/// `llama_token_type` of tokens that are never cut.
const USER_DEFINED: usize = 4;

/// Text to tokens and back.
#[derive(Debug)]
pub struct Vocabulary {
    tokenizer: Tokenizer,
    len: usize,
    begin: Option<u32>,
    end: Option<u32>,
}

impl Vocabulary {
    /// The vocabulary of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for another kind of tokenizer, [`Error::File`] for a broken one.
    pub fn new(file: &Gguf) -> Result<Self, Error> {
        match file.text("tokenizer.ggml.model") {
            Some("gpt2") => (),
            other => {
                let name = other.unwrap_or("none");
                return Err(Error::Unsupported(format!("tokenizer {name}, only gpt2 is known")));
            }
        }
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let vocab: Vocab =
            tokens.iter().enumerate().map(|(id, token)| (token.clone(), id as u32)).collect();
        let mut merges = Vec::new();
        for merge in file.texts("tokenizer.ggml.merges")? {
            let Some((left, right)) = merge.split_once(' ') else {
                return Err(file.wrong(format!("the merge {merge:?} has one part")));
            };
            merges.push((left.to_owned(), right.to_owned()));
        }
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).build();
        let mut tokenizer = Tokenizer::new(bpe.map_err(|error| file.wrong(error.to_string()))?);
        tokenizer.with_pre_tokenizer(Some(cutting(file.text("tokenizer.ggml.pre"))?));
        tokenizer.with_decoder(Some(ByteLevel::new(false, false, false)));
        add_uncut(&mut tokenizer, file, &tokens)?;
        let id = |key: &str| -> Result<Option<u32>, Error> {
            match file.count_or_none(key)? {
                Some(id) if id < tokens.len() => Ok(Some(id as u32)),
                Some(id) => Err(file.wrong(format!("{key} is {id}, beyond the vocabulary"))),
                None => Ok(None),
            }
        };
        let begin = id("tokenizer.ggml.bos_token_id")?;
        Ok(Vocabulary {
            tokenizer,
            len: tokens.len(),
            begin: begin.filter(|_| file.flag("tokenizer.ggml.add_bos_token")),
            end: id("tokenizer.ggml.eos_token_id")?,
        })
    }

    /// Tokens there are.
    #[expect(clippy::len_without_is_empty, reason = "a vocabulary is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        self.end
    }

    /// The tokens of a text, control tokens in it being taken as such.
    ///
    /// # Errors
    ///
    /// [`Error::Prompt`] for a text of no token at all.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        if text.is_empty() {
            return Err(Error::Prompt("the prompt is empty".into()));
        }
        let encoded = self
            .tokenizer
            .encode(text, false)
            .map_err(|error| Error::Prompt(format!("the prompt cannot be encoded: {error}")))?;
        let tokens: Vec<u32> = self.begin.into_iter().chain(encoded.get_ids().to_vec()).collect();
        if tokens.is_empty() {
            return Err(Error::Prompt("the prompt has no token".into()));
        }
        Ok(tokens)
    }

    /// The text of some tokens, control tokens left out. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    ///
    /// [`Error::Prompt`] for a token of another vocabulary.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.tokenizer
            .decode(tokens, true)
            .map_err(|error| Error::Prompt(format!("{tokens:?} cannot be decoded: {error}")))
    }
}

/// The way a text is cut before the merges run.
fn cutting(name: Option<&str>) -> Result<PreTokenizerWrapper, Error> {
    let gpt2 = ByteLevel::new(false, false, true);
    match name {
        None | Some("gpt-2" | "default") => Ok(gpt2.into()),
        // As GPT-2, but no two digits share a token.
        Some("smollm") => Ok(Sequence::new(vec![Digits::new(true).into(), gpt2.into()]).into()),
        Some(other) => Err(Error::Unsupported(format!("the text cutting named {other}"))),
    }
}

/// Tells the tokenizer which tokens stand whole in a text, and which of them stand for none.
fn add_uncut(tokenizer: &mut Tokenizer, file: &Gguf, tokens: &[String]) -> Result<(), Error> {
    let kinds = file.counts("tokenizer.ggml.token_type")?;
    if kinds.len() != tokens.len() {
        return Err(file.wrong("the lists of tokens and of their types differ in length".into()));
    }
    let of_kind = |kind: usize| {
        tokens
            .iter()
            .zip(&kinds)
            .filter(move |&(_, &have)| have == kind)
            .map(move |(token, _)| AddedToken::from(token.clone(), kind == CONTROL))
            .collect::<Vec<_>>()
    };
    tokenizer
        .add_special_tokens(of_kind(CONTROL))
        .and_then(|_| tokenizer.add_tokens(of_kind(USER_DEFINED)))
        .map(|_| ())
        .map_err(|error| file.wrong(error.to_string()))
}

/// Turns tokens into text one by one, holding back a character until its last byte is there.
#[derive(Debug)]
pub struct TextStream<'a> {
    vocabulary: &'a Vocabulary,
    pending: Vec<u32>,
}

impl<'a> TextStream<'a> {
    /// An empty stream.
    pub fn new(vocabulary: &'a Vocabulary) -> Self {
        TextStream { vocabulary, pending: Vec::new() }
    }

    /// Adds a token and gives the text that is now whole.
    ///
    /// # Errors
    ///
    /// As [`Vocabulary::decode`].
    pub fn push(&mut self, token: u32) -> Result<String, Error> {
        self.pending.push(token);
        let text = self.vocabulary.decode(&self.pending)?;
        // A character has four bytes at most and a token one at least: what is still broken after
        // four tokens will not mend.
        if text.ends_with('\u{fffd}') && self.pending.len() < 4 {
            return Ok(String::new());
        }
        self.pending.clear();
        Ok(text)
    }

    /// What is left, whole or not.
    ///
    /// # Errors
    ///
    /// As [`Vocabulary::decode`].
    pub fn finish(self) -> Result<String, Error> {
        self.vocabulary.decode(&self.pending)
    }
}
