//! Text to tokens and back, by the checkpoint's `tokenizer.json`.
//!
//! The encoding is Hugging Face's, with one difference: control tokens (the file's added tokens) are recognised only
//! inside the stretches of a text that the caller trusts. Everything between two recognised tokens is one piece for
//! the pre-tokenizer, as in the original, so a text without foreign control tokens gets exactly the original's ids.
//! Decoding is a table from tokens to bytes; text is made of bytes by `stream.rs`.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use tokenizers::{
    DecoderWrapper, Model, NormalizedString, Normalizer, OffsetType, PreTokenizedString, PreTokenizer, Token,
    normalizer,
};

use crate::error::{Error, Result};
use crate::ink::Alphabet;
use crate::reasoning;

const FILE: &str = "tokenizer.json";

/// Encodes text.
pub(crate) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Control tokens by the first byte of their text, longer ones first.
    markers: HashMap<u8, Vec<Marker>>,
    alphabet: Arc<Alphabet>,
    vocabulary: Arc<Vocabulary>,
}

#[derive(Clone, Debug)]
struct Marker {
    text: String,
    id: u32,
}

/// The bytes of every token.
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each token's bytes start; one more entry than tokens.
    starts: Vec<u32>,
    /// Opens the thinking, where the vocabulary has such a token.
    pub(crate) open_thinking: Option<u32>,
    /// Ends the thinking.
    pub(crate) close_thinking: Option<u32>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`.
    pub(crate) fn open(json: &[u8]) -> Result<Self> {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| refused(error.to_string(), "download the file again"))?;
        // A prompt that does not fit is the server's business; it is never cut silently.
        inner.with_truncation(None).map_err(|error| Error::Tokenizer(error.to_string()))?;
        inner.with_padding(None);
        if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(refused(
                "the decoder is not ByteLevel".into(),
                "only the byte-level tokenizers of GLM checkpoints are read",
            ));
        }
        let markers = markers(&inner)?;
        let alphabet = Alphabet::new(markers.iter().map(|marker| marker.text.clone()));
        let vocabulary = Vocabulary::new(&inner, &markers)?;
        let mut by_first: HashMap<u8, Vec<Marker>> = HashMap::new();
        for marker in markers {
            let first = marker.text.as_bytes()[0];
            by_first.entry(first).or_default().push(marker);
        }
        for group in by_first.values_mut() {
            group.sort_by_key(|marker| std::cmp::Reverse(marker.text.len()));
        }
        Ok(Self { inner, markers: by_first, alphabet: Arc::new(alphabet), vocabulary: Arc::new(vocabulary) })
    }

    /// The characters of control tokens.
    pub(crate) fn alphabet(&self) -> &Arc<Alphabet> {
        &self.alphabet
    }

    /// The bytes of every token.
    pub(crate) fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// The id of the token with this text.
    pub(crate) fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Encodes `text`, recognising control tokens inside `trusted` (ascending byte ranges at character boundaries).
    pub(crate) fn encode(&self, text: &str, trusted: &[Range<usize>]) -> Result<Vec<u32>> {
        let failed = |error: tokenizers::Error| Error::Tokenizer(error.to_string());
        let cuts = self.control_tokens(text, trusted);
        let mut pieces = PreTokenizedString::from(text);
        pieces.split(|_, whole| cut(&whole, &cuts)).map_err(failed)?;
        if let Some(normalizer) = self.inner.get_normalizer() {
            pieces.normalize(|piece| normalizer.normalize(piece)).map_err(failed)?;
        }
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
        }
        let model = self.inner.get_model();
        pieces.tokenize(|piece| model.tokenize(piece.get())).map_err(failed)?;
        let encoding = pieces.into_encoding(None, 0, OffsetType::None).map_err(failed)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Control tokens from left to right, the longest where several start.
    fn control_tokens(&self, text: &str, trusted: &[Range<usize>]) -> Vec<(Range<usize>, u32)> {
        let mut found = Vec::new();
        for range in trusted {
            let mut at = range.start;
            while at < range.end {
                let rest = &text.as_bytes()[at..range.end];
                let starting = rest.first().and_then(|first| self.markers.get(first));
                let marker =
                    starting.and_then(|group| group.iter().find(|m| rest.starts_with(m.text.as_bytes())));
                match marker {
                    Some(marker) => {
                        found.push((at..at + marker.text.len(), marker.id));
                        at += marker.text.len();
                    }
                    None => at += 1,
                }
            }
        }
        found
    }
}

/// Cuts the text at its control tokens, which carry their ids from here on.
fn cut(
    whole: &NormalizedString,
    tokens: &[(Range<usize>, u32)],
) -> tokenizers::Result<Vec<(NormalizedString, Option<Vec<Token>>)>> {
    // Nothing is normalised yet, so both ranges are the same; a range of the original would be searched from the start.
    let slice = |range: Range<usize>| {
        whole.slice(normalizer::Range::Normalized(range)).ok_or("a cut inside a character")
    };
    let mut pieces = Vec::with_capacity(2 * tokens.len() + 1);
    let mut end = 0;
    for (range, id) in tokens {
        if end < range.start {
            pieces.push((slice(end..range.start)?, None));
        }
        let piece = slice(range.clone())?;
        let token = Token::new(*id, piece.get().to_owned(), (0, range.len()));
        pieces.push((piece, Some(vec![token])));
        end = range.end;
    }
    if end < whole.get().len() {
        pieces.push((slice(end..whole.get().len())?, None));
    }
    Ok(pieces)
}

/// The added tokens, checked to be of the kind that is recognised by its text alone.
fn markers(inner: &tokenizers::Tokenizer) -> Result<Vec<Marker>> {
    let mut markers = Vec::new();
    for (id, token) in inner.get_added_tokens_decoder() {
        let plain = !token.single_word && !token.lstrip && !token.rstrip;
        if token.content.is_empty() || !plain || (token.normalized && inner.get_normalizer().is_some()) {
            return Err(refused(
                format!(
                    "added token {id} ({:?}) is empty, or recognised by its surroundings (single_word, lstrip, rstrip, \
                     normalized)",
                    token.content
                ),
                "only added tokens that are recognised by their text are read",
            ));
        }
        markers.push(Marker { text: token.content, id });
    }
    markers.sort_by_key(|marker| marker.id);
    Ok(markers)
}

impl Vocabulary {
    fn new(inner: &tokenizers::Tokenizer, markers: &[Marker]) -> Result<Self> {
        let bytes_of = byte_alphabet();
        let mut tokens: Vec<(u32, Vec<u8>)> = inner
            .get_vocab(false)
            .into_iter()
            .map(|(text, id)| {
                // A text with a character outside the byte alphabet stands for itself, as in the original decoder.
                let bytes: Option<Vec<u8>> = text.chars().map(|c| bytes_of.get(&c).copied()).collect();
                (id, bytes.unwrap_or_else(|| text.into_bytes()))
            })
            .collect();
        tokens.extend(markers.iter().map(|marker| (marker.id, marker.text.clone().into_bytes())));
        // Stable, so a control token stands behind a plain entry of the same id and wins.
        tokens.sort_by_key(|(id, _)| *id);
        let mut vocabulary =
            Self { bytes: Vec::new(), starts: vec![0], open_thinking: None, close_thinking: None };
        for (index, (id, bytes)) in tokens.iter().enumerate() {
            if tokens.get(index + 1).is_some_and(|(next, _)| next == id) {
                continue;
            }
            if *id > 1 << 24 {
                return Err(refused(format!("token id {id}"), "ids of a vocabulary are below 16,777,216"));
            }
            // Ids that no token has stay empty.
            vocabulary.starts.resize(*id as usize + 1, vocabulary.bytes.len() as u32);
            vocabulary.bytes.extend_from_slice(bytes);
            vocabulary.starts.push(vocabulary.bytes.len() as u32);
        }
        let named = |text| markers.iter().find(|marker| marker.text == text).map(|marker| marker.id);
        vocabulary.open_thinking = named(reasoning::OPEN);
        vocabulary.close_thinking = named(reasoning::CLOSE);
        Ok(vocabulary)
    }

    /// The bytes of a token; none for an id that the vocabulary does not have.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        match self.starts.get(token as usize..) {
            Some([start, end, ..]) => &self.bytes[*start as usize..*end as usize],
            _ => &[],
        }
    }
}

/// The character that byte-level vocabularies write for each byte: printable Latin-1 stands for itself, the other
/// bytes are numbered from U+0100.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 0x100;
    let mut alphabet = HashMap::new();
    for byte in 0..=u8::MAX {
        let c = match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or_default()
            }
        };
        alphabet.insert(c, byte);
    }
    alphabet
}

fn refused(problem: String, remedy: &'static str) -> Error {
    Error::File { file: FILE, problem, remedy }
}
