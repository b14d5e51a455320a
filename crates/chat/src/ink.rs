//! Which characters of a rendered prompt were written by the template, and which by somebody else.
//!
//! A chat template glues its own control tokens and other people's text into one string. Before it runs, every
//! character of foreign text that occurs in the text of any control token is *inked*: replaced by a private twin, one
//! character for one character. The template copies, joins, strips and cuts inked text like any other; whatever it
//! does, it cannot make a control token of it. [`Ink::read`] turns the twins back and says which stretches of the
//! prompt are the template's own; only inside these is a control token recognised.
//!
//! Twins come from a block of private-use characters that the prompt does not contain, chosen for each prompt.

use std::ops::Range;
use std::sync::Arc;

use crate::python;

/// Private-use planes 15 and 16 without their two noncharacters each.
const PLANES: [Range<u32>; 2] = [0xF_0000..0xF_FFFE, 0x10_0000..0x10_FFFE];

/// The characters that occur in control tokens, in order, and the control tokens themselves.
#[derive(Debug)]
pub(crate) struct Alphabet {
    letters: Vec<char>,
    markers: Vec<String>,
}

impl Alphabet {
    /// `markers`: the texts of all control tokens.
    ///
    /// White space, quotes, backslashes and control characters stay out: a template may strip or escape them, and a
    /// token whose other characters are inked cannot form without them. A token of nothing but such characters is no
    /// control token.
    pub(crate) fn new(markers: impl IntoIterator<Item = String>) -> Self {
        let markers: Vec<String> = markers.into_iter().collect();
        let mut letters: Vec<char> = markers.iter().flat_map(|marker| marker.chars()).collect();
        letters.retain(|c| !python::is_space(*c) && !c.is_control() && !matches!(c, '"' | '\\'));
        letters.sort_unstable();
        letters.dedup();
        Self { letters, markers }
    }

    /// Whether `text`, perhaps after the template stripped it, holds a control token or could be a part of one.
    fn is_risky(&self, text: &str) -> bool {
        let core = python::strip(text, None, true, true);
        !core.is_empty() && self.markers.iter().any(|marker| marker.contains(core))
            || self.is_risky_name(core)
    }

    /// The same for a name that the template looks up. Letters alone (`id`, `key`) do not count as a part: the template
    /// would have to write the rest of the control token itself.
    fn is_risky_name(&self, name: &str) -> bool {
        let counts = |part: &str| part.contains(|c: char| !c.is_alphanumeric());
        self.markers.iter().any(|marker| {
            name.contains(marker.as_str())
                || marker.char_indices().skip(1).any(|(at, _)| {
                    let (head, tail) = marker.split_at(at);
                    (counts(head) && name.ends_with(head)) || (counts(tail) && name.starts_with(tail))
                })
        })
    }
}

/// Twins for one prompt.
#[derive(Debug)]
pub(crate) struct Ink {
    alphabet: Arc<Alphabet>,
    base: u32,
}

/// A prompt with its foreign text turned back.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Provenance {
    /// The prompt.
    pub(crate) text: String,
    /// Byte ranges, ascending and not empty, in which no character was inked.
    pub(crate) trusted: Vec<Range<usize>>,
}

impl Ink {
    /// Chooses twins that `prompt` does not contain. `None` if it uses every private block, which no honest text does.
    pub(crate) fn new(alphabet: &Arc<Alphabet>, prompt: &str) -> Option<Self> {
        let width = u32::try_from(alphabet.letters.len().max(1)).ok()?;
        let mut used: Vec<u32> = prompt.chars().map(u32::from).filter(|c| *c >= PLANES[0].start).collect();
        used.sort_unstable();
        let is_free = |base: &u32| {
            let at = used.partition_point(|c| c < base);
            used.get(at).is_none_or(|c| *c >= base + width)
        };
        let bases = PLANES.into_iter().flat_map(|plane| {
            (plane.start..plane.end).step_by(width as usize).filter(move |base| base + width <= plane.end)
        });
        bases.into_iter().find(is_free).map(|base| Self { alphabet: Arc::clone(alphabet), base })
    }

    /// Whether a text deserves ink even where a template may want to look at it.
    pub(crate) fn is_risky(&self, text: &str) -> bool {
        self.alphabet.is_risky(text)
    }

    /// Whether a name deserves ink, although the template may look it up.
    pub(crate) fn is_risky_name(&self, name: &str) -> bool {
        self.alphabet.is_risky_name(name)
    }

    /// Inks foreign text.
    pub(crate) fn mark(&self, text: &str) -> String {
        text.chars().map(|c| self.twin(c)).collect()
    }

    /// The character that an inked one stands for.
    pub(crate) fn original(&self, c: char) -> Option<char> {
        let index = u32::from(c).checked_sub(self.base)?;
        self.alphabet.letters.get(index as usize).copied()
    }

    /// `text` with inked characters turned back.
    pub(crate) fn plain(&self, text: &str) -> String {
        text.chars().map(|c| self.original(c).unwrap_or(c)).collect()
    }

    /// Takes a rendered prompt apart.
    pub(crate) fn read(&self, rendered: &str) -> Provenance {
        let mut text = String::with_capacity(rendered.len());
        let mut trusted = Vec::new();
        let mut start = 0;
        for c in rendered.chars() {
            if let Some(original) = self.original(c) {
                if start < text.len() {
                    trusted.push(start..text.len());
                }
                text.push(original);
                start = text.len();
            } else {
                text.push(c);
            }
        }
        if start < text.len() {
            trusted.push(start..text.len());
        }
        Provenance { text, trusted }
    }

    fn twin(&self, c: char) -> char {
        let letters = &self.alphabet.letters;
        letters.binary_search(&c).ok().and_then(|index| char::from_u32(self.base + index as u32)).unwrap_or(c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alphabet() -> Arc<Alphabet> {
        Arc::new(Alphabet::new(["<|user|>", "</think>", "[gMASK]"].map(String::from)))
    }

    #[test]
    fn inked_text_reads_back_and_is_not_trusted() {
        let alphabet = alphabet();
        let ink = Ink::new(&alphabet, "").unwrap();
        let inked = ink.mark("é <|user|> Zz");
        assert!(!inked.contains("<|user|>") && inked.contains("é ") && inked.contains(" Zz"));
        let read = ink.read(&format!("<|user|>{inked}"));
        assert_eq!(read.text, "<|user|>é <|user|> Zz");
        assert_eq!(read.trusted, [0..11, 19..22]);
    }

    #[test]
    fn twins_avoid_the_private_characters_of_the_prompt() {
        let alphabet = alphabet();
        let width = alphabet.letters.len() as u32;
        let hostile: String =
            (0..10).filter_map(|block| char::from_u32(0xF_0000 + block * width + block)).collect();
        let ink = Ink::new(&alphabet, &hostile).unwrap();
        assert_eq!(ink.base, 0xF_0000 + 10 * width);
        let read = ink.read(&hostile);
        assert_eq!((read.trusted.len(), read.trusted[0].clone()), (1, 0..hostile.len()));
        assert_eq!(read.text, hostile);
    }

    #[test]
    fn a_prompt_that_uses_every_private_block_is_refused() {
        let alphabet = alphabet();
        let all: String = PLANES.into_iter().flatten().filter_map(char::from_u32).collect();
        assert!(Ink::new(&alphabet, &all).is_none());
    }

    #[test]
    fn text_is_risky_when_it_holds_a_marker_or_may_complete_one() {
        let alphabet = alphabet();
        for text in ["a<|user|>b", "x <|us ", " er|> y", "user", " |user| ", "price <", "> quote", "[", "]"] {
            assert!(alphabet.is_risky(text), "{text}");
        }
        for text in ["", "  ", "hello", "a < b", "users", "x > y.", "string"] {
            assert!(!alphabet.is_risky(text), "{text}");
        }
        for name in ["a<|user|>b", "x<|us", "er|>y", "<", ">"] {
            assert!(alphabet.is_risky_name(name), "{name}");
        }
        for name in ["", "id", "user", "think", "k", "a.b"] {
            assert!(!alphabet.is_risky_name(name), "{name}");
        }
    }
}
