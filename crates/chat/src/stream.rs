//! The model's tokens to text, piece by piece: the only way from tokens to text, whole replies included.
//!
//! Four steps, each holding back as little as it can: bytes to characters ([`Utf8`]), thinking apart from the answer
//! (by token), white space before the answer dropped, stop strings ([`StopScanner`]). The pieces of a reply, joined,
//! do not depend on where its tokens were cut.

use std::sync::Arc;

use crate::python;
use crate::tokenizer::Vocabulary;

/// What a reply's text is cut by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Whether the prompt ended inside the thinking ([`Prompt::in_reasoning`](crate::Prompt)).
    pub in_reasoning: bool,
    /// Texts that end the answer; they are not part of it. Empty ones are ignored.
    pub stop: Vec<String>,
    /// Whether thinking is told apart from the answer. Else every token is content, and stop strings end the thinking
    /// as well.
    pub split_reasoning: bool,
}

/// A piece of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Thinking.
    Reasoning(String),
    /// The answer.
    Content(String),
}

/// Turns tokens into pieces of text.
pub struct TextStream {
    vocabulary: Arc<Vocabulary>,
    split_reasoning: bool,
    /// No token has come yet.
    fresh: bool,
    place: Place,
    utf8: Utf8,
    stops: StopScanner,
    stopped: Option<String>,
}

/// Where in the reply the next character falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Thinking,
    /// Only white space has come since the thinking ended.
    BeforeAnswer,
    Answer,
}

impl TextStream {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, options: StreamOptions) -> Self {
        let place = match (options.split_reasoning, options.in_reasoning) {
            (false, _) => Place::Answer,
            (true, true) => Place::Thinking,
            (true, false) => Place::BeforeAnswer,
        };
        Self {
            vocabulary,
            split_reasoning: options.split_reasoning,
            fresh: true,
            place,
            utf8: Utf8::default(),
            stops: StopScanner::new(options.stop),
            stopped: None,
        }
    }

    /// Takes the next token and returns the text that is certain by now, possibly none. A token behind a stop string
    /// gives nothing.
    pub fn push(&mut self, token: u32) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let first = std::mem::take(&mut self.fresh);
        if self.stopped.is_some() {
            return pieces;
        }
        if self.split_reasoning && first && Some(token) == self.vocabulary.open_thinking {
            // The prompt has opened the thinking, or closed it; some models open it once more.
            return pieces;
        }
        if self.place == Place::Thinking && Some(token) == self.vocabulary.close_thinking {
            let rest = self.utf8.finish();
            self.emit(rest, &mut pieces);
            self.place = Place::BeforeAnswer;
            return pieces;
        }
        let vocabulary = Arc::clone(&self.vocabulary);
        let text = self.utf8.push(vocabulary.bytes(token));
        self.emit(text, &mut pieces);
        pieces
    }

    /// Ends the reply and returns what was held back.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.stopped.is_none() {
            let rest = self.utf8.finish();
            self.emit(rest, &mut pieces);
        }
        if self.stopped.is_none() {
            add(&mut pieces, Piece::Content, self.stops.finish());
        }
        pieces
    }

    /// The stop string that ended the answer.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }

    fn emit(&mut self, text: String, pieces: &mut Vec<Piece>) {
        let text = match self.place {
            Place::Thinking => {
                add(pieces, Piece::Reasoning, text);
                return;
            }
            // The template strips answers, so white space before one would not survive to the next turn.
            Place::BeforeAnswer => python::strip(&text, None, true, false),
            Place::Answer => &text,
        };
        if !text.is_empty() {
            self.place = Place::Answer;
        }
        let (certain, stop) = self.stops.push(text);
        add(pieces, Piece::Content, certain);
        self.stopped = stop;
    }
}

/// Adds text to the last piece if it is of the same kind.
fn add(pieces: &mut Vec<Piece>, kind: fn(String) -> Piece, text: String) {
    if text.is_empty() {
        return;
    }
    match (pieces.last_mut(), kind(text)) {
        (Some(Piece::Reasoning(last)), Piece::Reasoning(text))
        | (Some(Piece::Content(last)), Piece::Content(text)) => last.push_str(&text),
        (_, piece) => pieces.push(piece),
    }
}

/// Bytes to characters. An incomplete character waits for its rest; bytes that cannot become one give U+FFFD, one for
/// each maximal invalid part (Unicode 3.9), as soon as that is certain.
#[derive(Debug, Default)]
pub(crate) struct Utf8 {
    /// At most three bytes: the start of one character.
    pending: Vec<u8>,
}

impl Utf8 {
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        let kept = loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break 0;
                }
                Err(error) => {
                    let (valid, broken) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(width) = error.error_len() else { break broken.len() };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &broken[width..];
                }
            }
        };
        self.pending.drain(..self.pending.len() - kept);
        text
    }

    /// What an incomplete character at the end leaves.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Finds the first stop string. Where several end at one character the longest counts, so the outcome is a function of
/// the text alone.
#[derive(Debug)]
struct StopScanner {
    stops: Vec<Stop>,
    /// The text behind the last certain character: the longest end of the text that may begin a stop string.
    held: String,
}

/// One stop string with its progress (Knuth, Morris and Pratt).
#[derive(Debug)]
struct Stop {
    text: String,
    /// For each length of a matched start, the longest shorter start that is also its end.
    fallback: Vec<usize>,
    /// Bytes matched at the end of the text so far.
    matched: usize,
}

impl StopScanner {
    fn new(stops: Vec<String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).map(Stop::new).collect();
        Self { stops, held: String::new() }
    }

    /// Takes text; returns what no stop string can claim any more, and the stop string that was completed.
    fn push(&mut self, text: &str) -> (String, Option<String>) {
        let start = self.held.len();
        self.held.push_str(text);
        for (index, byte) in self.held.bytes().enumerate().skip(start) {
            let completed = self.stops.iter_mut().filter_map(|stop| stop.advance(byte).then_some(&stop.text));
            if let Some(stop) = completed.max_by_key(|stop| stop.len()).cloned() {
                let cut = (index + 1).saturating_sub(stop.len());
                self.held.truncate(self.held.floor_char_boundary(cut));
                return (std::mem::take(&mut self.held), Some(stop));
            }
        }
        let open = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let certain = self.held.floor_char_boundary(self.held.len() - open);
        let held = self.held.split_off(certain);
        (std::mem::replace(&mut self.held, held), None)
    }

    fn finish(&mut self) -> String {
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut matched = 0;
        for end in 1..bytes.len() {
            while matched > 0 && bytes[matched] != bytes[end] {
                matched = fallback[matched];
            }
            matched += usize::from(bytes[matched] == bytes[end]);
            fallback[end + 1] = matched;
        }
        Self { text, fallback, matched: 0 }
    }

    /// Takes a byte of the text; true when the stop string ends with it.
    fn advance(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes.get(self.matched) != Some(&byte) {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

#[cfg(test)]
mod tests;
