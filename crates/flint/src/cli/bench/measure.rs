//! Tokens that are really fed, and the time that they take.

use std::time::Instant;

use flint_model::{Batch, LanguageModel, Logits, SequenceId, Span, Want};

use crate::error::{Error, Result};

/// A model and what is fed to it.
pub(super) struct Feeder {
    model: Box<dyn LanguageModel>,
    /// Rows of one forward.
    rows: usize,
    /// Tokens of a sequence before it decodes: enough that its rows take different experts, few enough that a batch is
    /// ready soon. Decoding hardly depends on it, since the recurrent state has a fixed size.
    behind: usize,
}

/// A prompt that was read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Prefill {
    pub(super) tokens: usize,
    pub(super) seconds: f64,
    /// Names the tokens that were fed.
    pub(super) prompt_hash: String,
}

impl Prefill {
    /// The faster one.
    pub(super) fn better(self, other: Self) -> Self {
        if other.seconds < self.seconds { other } else { self }
    }
}

/// Sequences that decoded together.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decode {
    pub(super) batch: usize,
    /// Tokens of each sequence.
    pub(super) steps: usize,
    pub(super) seconds: f64,
    /// Names the tokens that were drawn: equal in every round and at every number of threads.
    pub(super) reply_hash: String,
}

impl Decode {
    /// The faster one.
    ///
    /// # Errors
    /// When they drew different tokens.
    pub(super) fn better(self, other: Self) -> Result<Self> {
        if self.reply_hash != other.reply_hash {
            let found = format!("another reply ({} and {})", self.reply_hash, other.reply_hash);
            return Err(flint_engine::Error::Broken {
                found,
                expected: "equal tokens in every round".into(),
            }
            .into());
        }
        Ok(if other.seconds < self.seconds { other } else { self })
    }
}

impl Feeder {
    /// Feeds `model` at most `rows` rows a forward, and decodes behind `behind` tokens.
    pub(super) fn new(model: Box<dyn LanguageModel>, rows: usize, behind: usize) -> Self {
        Self { model, rows, behind }
    }

    /// Reads a prompt of `tokens` tokens; only the last row's logits are wanted.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<Prefill> {
        let prompt = prompt(0, tokens, self.model.limits().vocabulary);
        let sequence = self.model.open()?;
        let began = Instant::now();
        self.read(sequence, &prompt)?;
        let seconds = began.elapsed().as_secs_f64();
        self.model.close(sequence)?;
        Ok(Prefill { tokens, seconds, prompt_hash: hash(&prompt) })
    }

    /// Decodes `steps` tokens of `batch` sequences, one row each in every forward; each row is the token that the last
    /// one made most likely.
    pub(super) fn decode(&mut self, batch: usize, steps: usize) -> Result<Decode> {
        let vocabulary = self.model.limits().vocabulary;
        let (mut sequences, mut next) = (Vec::new(), Vec::new());
        for index in 0..batch {
            let sequence = self.model.open()?;
            let logits = self.read(sequence, &prompt(1 + index as u64, self.behind, vocabulary))?;
            sequences.push(sequence);
            next.push(best(&logits, 0));
        }
        let mut drawn = Vec::with_capacity(batch * steps);
        let began = Instant::now();
        for _ in 0..steps {
            let span = |(&sequence, &token): (&SequenceId, &u32)| Span {
                sequence,
                sure: vec![token],
                drafts: Vec::new(),
                want: Want::Next,
            };
            let drawn_now =
                self.model.forward_best(&Batch { spans: sequences.iter().zip(&next).map(span).collect() })?;
            for ((next, &sequence), best) in next.iter_mut().zip(&sequences).zip(drawn_now) {
                self.model.commit(sequence, 0)?;
                *next = best.token;
            }
            drawn.extend(&next);
        }
        let seconds = began.elapsed().as_secs_f64();
        for sequence in sequences {
            self.model.close(sequence)?;
        }
        Ok(Decode { batch, steps, seconds, reply_hash: hash(&drawn) })
    }

    /// Verifies `steps` blocks of `rows` rows of one sequence: a sure token and drafts, of which none is accepted.
    pub(super) fn block(&mut self, rows: usize, steps: usize) -> Result<Decode> {
        let vocabulary = self.model.limits().vocabulary;
        let sequence = self.model.open()?;
        self.read(sequence, &prompt(1, self.behind, vocabulary))?;
        let proposed = prompt(2, rows * steps, vocabulary);
        let mut drawn = Vec::with_capacity(rows * steps);
        let began = Instant::now();
        for tokens in proposed.chunks(rows) {
            let (sure, drafts) = tokens.split_at(1);
            let span = Span { sequence, sure: sure.to_vec(), drafts: drafts.to_vec(), want: Want::Next };
            let best = self.model.forward_best(&Batch { spans: vec![span] })?;
            self.model.commit(sequence, 0)?;
            drawn.extend(best.iter().map(|best| best.token));
        }
        let seconds = began.elapsed().as_secs_f64();
        self.model.close(sequence)?;
        Ok(Decode { batch: rows, steps, seconds, reply_hash: hash(&drawn) })
    }

    fn read(&mut self, sequence: SequenceId, prompt: &[u32]) -> Result<Logits> {
        let mut last = Logits::default();
        let parts = prompt.chunks(self.rows);
        let count = parts.len();
        for (index, part) in parts.enumerate() {
            let want = if index + 1 == count { Want::Next } else { Want::Nothing };
            let span = Span { sequence, sure: part.to_vec(), drafts: Vec::new(), want };
            last = self.model.forward(&Batch { spans: vec![span] })?;
            self.model.commit(sequence, 0)?;
        }
        if last.rows() == 0 {
            let (found, expected) = ("no logits".into(), "one row for a prompt's end".into());
            return Err(Error::Engine(flint_engine::Error::Broken { found, expected }));
        }
        Ok(last)
    }
}

/// Tokens from all over the vocabulary, the same in every run.
fn prompt(seed: u64, tokens: usize, vocabulary: usize) -> Vec<u32> {
    (0..tokens as u64)
        .map(|index| {
            // SplitMix64.
            let mut x = (seed << 40 | index).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((x ^ (x >> 31)) % vocabulary.max(1) as u64) as u32
        })
        .collect()
}

/// The most likely token, the lowest id among equals.
fn best(logits: &Logits, row: usize) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, &logit) in logits.row(row).iter().enumerate() {
        if logit > best.0 {
            best = (logit, token as u32);
        }
    }
    best.1
}

/// A short name for tokens.
fn hash(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    blake3::hash(&bytes).to_hex()[..12].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flint_engine::testing::ToyLm;
    use flint_model::Limits;

    fn feeder(rows: usize) -> Feeder {
        let limits = Limits { vocabulary: 50, context: 200, rows: 64, drafts: 7, sequences: 8 };
        Feeder::new(Box::new(ToyLm::new(limits, 1)), rows, 32)
    }

    #[test]
    fn the_tokens_drawn_do_not_depend_on_how_prompts_are_cut() {
        let one = feeder(64).decode(3, 10).unwrap();
        let other = feeder(5).decode(3, 10).unwrap();
        assert_eq!(one.reply_hash, other.reply_hash);
        assert_eq!((one.batch, one.steps), (3, 10));
    }

    #[test]
    fn a_prompt_is_fed_whole_and_named_by_its_tokens() {
        let long = feeder(64).prefill(150).unwrap();
        assert_eq!((long.tokens, long.prompt_hash), (150, hash(&prompt(0, 150, 50))));
        assert_ne!(hash(&prompt(0, 150, 50)), hash(&prompt(1, 150, 50)));
    }

    #[test]
    fn a_block_feeds_all_its_rows_and_keeps_one() {
        let one = feeder(64).block(8, 5).unwrap();
        assert_eq!((one.batch, one.steps), (8, 5));
        assert_eq!(one.reply_hash, feeder(3).block(8, 5).unwrap().reply_hash);
    }

    #[test]
    fn rounds_that_draw_different_tokens_are_an_error() {
        let round = |seconds, hash: &str| Decode { batch: 1, steps: 1, seconds, reply_hash: hash.into() };
        assert!(round(1.0, "a").better(round(2.0, "b")).is_err());
        assert!((round(1.0, "a").better(round(0.5, "a")).unwrap().seconds - 0.5).abs() < 1e-9);
    }
}
