//! Tokens that are really fed, and the time that they take.

use std::time::Instant;

use flint_model::{Batch, Logits, SequenceId, Span, Want};

use super::subject::{Picks, Subject};
use crate::error::{Error, Result};

/// Tokens of a prompt whose time is kept apart: a long prompt's end costs more than its start.
pub(super) const WINDOW: usize = 8192;
/// Steps behind the measured ones in which picked experts are counted.
pub(super) const COUNTED: usize = 8;

/// A model and what is fed to it.
pub(super) struct Feeder<M> {
    model: M,
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
    /// Seconds of each [`WINDOW`] of it.
    pub(super) windows: Vec<f64>,
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
    /// Different experts that a step's rows picked in a layer, on average over the steps that follow the measured ones.
    pub(super) experts: Option<f64>,
    /// Kernels of a step, where the device counts them.
    pub(super) kernels: Option<f64>,
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

/// A step between a profiler's marks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Marked {
    pub(super) kind: &'static str,
    /// Rows of the step.
    pub(super) rows: usize,
    /// Kernels that ran between the marks.
    pub(super) kernels: u64,
}

impl<M: Subject> Feeder<M> {
    /// Feeds `model` at most `rows` rows a forward, and decodes behind `behind` tokens.
    pub(super) fn new(model: M, rows: usize, behind: usize) -> Self {
        Self { model, rows, behind }
    }

    /// Reads a prompt of `tokens` tokens; only the last row's logits are wanted.
    pub(super) fn prefill(&mut self, tokens: usize) -> Result<Prefill> {
        let prompt = self.prompt(0, tokens);
        let sequence = self.model.open()?;
        let mut windows = Vec::with_capacity(tokens.div_ceil(WINDOW));
        let began = Instant::now();
        for window in prompt.chunks(WINDOW) {
            let began = Instant::now();
            self.read(sequence, window)?;
            windows.push(began.elapsed().as_secs_f64());
        }
        let seconds = began.elapsed().as_secs_f64();
        self.model.close(sequence)?;
        Ok(Prefill { tokens, seconds, windows, prompt_hash: hash(&prompt) })
    }

    /// Decodes `steps` tokens of `batch` sequences, one row each in every forward; each row is the token that the last
    /// one made most likely.
    pub(super) fn decode(&mut self, batch: usize, steps: usize) -> Result<Decode> {
        let (sequences, mut next) = self.decoding(batch)?;
        let mut drawn = Vec::with_capacity(batch * steps);
        let (kernels, began) = (self.model.kernels(), Instant::now());
        for _ in 0..steps {
            next = self.draw(&sequences, &next)?;
            drawn.extend(&next);
        }
        let seconds = began.elapsed().as_secs_f64();
        let kernels = self.kernels_since(kernels, steps);
        let mut picks = Picks::default();
        for _ in 0..COUNTED {
            let logits = self.model.forward_probed(&rows_of(&sequences, &next), &mut picks)?;
            self.commit(&sequences)?;
            next = (0..batch).map(|row| best(&logits, row)).collect();
        }
        self.close(sequences)?;
        let experts = picks.distinct();
        Ok(Decode { batch, steps, seconds, experts, kernels, reply_hash: hash(&drawn) })
    }

    /// Verifies `steps` blocks of `rows` rows of one sequence: a sure token and drafts, of which none is accepted.
    pub(super) fn block(&mut self, rows: usize, steps: usize) -> Result<Decode> {
        let sequence = self.model.open()?;
        let prompt = self.prompt(1, self.behind);
        self.read(sequence, &prompt)?;
        let proposed = self.prompt(2, rows * (steps + COUNTED));
        let (timed, counted) = proposed.split_at(rows * steps);
        let mut drawn = Vec::with_capacity(timed.len());
        let (kernels, began) = (self.model.kernels(), Instant::now());
        for tokens in timed.chunks(rows) {
            let best = self.model.forward_best(&block_of(sequence, tokens))?;
            self.model.commit(sequence, 0)?;
            drawn.extend(best.iter().map(|best| best.token));
        }
        let seconds = began.elapsed().as_secs_f64();
        let kernels = self.kernels_since(kernels, steps);
        let mut picks = Picks::default();
        for tokens in counted.chunks(rows) {
            self.model.forward_probed(&block_of(sequence, tokens), &mut picks)?;
            self.model.commit(sequence, 0)?;
        }
        self.model.close(sequence)?;
        let experts = picks.distinct();
        Ok(Decode { batch: rows, steps, seconds, experts, kernels, reply_hash: hash(&drawn) })
    }

    /// The last forward of a prompt between a profiler's marks.
    pub(super) fn mark_prefill(&mut self, tokens: usize) -> Result<Marked> {
        let prompt = self.prompt(0, tokens);
        let (before, last) = prompt.split_at((tokens - 1) / self.rows * self.rows);
        let sequence = self.model.open()?;
        if !before.is_empty() {
            self.read(sequence, before)?;
        }
        let kernels = self.marked(|feeder| feeder.read(sequence, last).map(|_| ()))?;
        self.model.close(sequence)?;
        Ok(Marked { kind: "prefill", rows: last.len(), kernels })
    }

    /// A decoding step of `batch` sequences between a profiler's marks.
    pub(super) fn mark_decode(&mut self, batch: usize) -> Result<Marked> {
        let (sequences, next) = self.decoding(batch)?;
        let next = self.draw(&sequences, &next)?;
        let kernels = self.marked(|feeder| feeder.draw(&sequences, &next).map(|_| ()))?;
        self.close(sequences)?;
        Ok(Marked { kind: "decode", rows: batch, kernels })
    }

    /// A block of `rows` rows of one sequence between a profiler's marks.
    pub(super) fn mark_block(&mut self, rows: usize) -> Result<Marked> {
        let sequence = self.model.open()?;
        let prompt = self.prompt(1, self.behind);
        self.read(sequence, &prompt)?;
        let proposed = self.prompt(2, rows);
        let batch = block_of(sequence, &proposed);
        let kernels = self.marked(|feeder| Ok(feeder.model.forward_best(&batch).map(|_| ())?))?;
        self.model.commit(sequence, 0)?;
        self.model.close(sequence)?;
        Ok(Marked { kind: "block", rows, kernels })
    }

    /// Runs `work` between marks; the kernels that it took.
    fn marked(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<u64> {
        let before = self.model.kernels().unwrap_or_default();
        self.model.mark(true);
        let worked = work(self);
        self.model.mark(false);
        worked?;
        Ok(self.model.kernels().unwrap_or_default() - before)
    }

    /// Sequences that have read their prompts, each with its next token.
    fn decoding(&mut self, batch: usize) -> Result<(Vec<SequenceId>, Vec<u32>)> {
        let (mut sequences, mut next) = (Vec::new(), Vec::new());
        for index in 0..batch {
            let sequence = self.model.open()?;
            let prompt = self.prompt(1 + index as u64, self.behind);
            let logits = self.read(sequence, &prompt)?;
            sequences.push(sequence);
            next.push(best(&logits, 0));
        }
        Ok((sequences, next))
    }

    /// Feeds each sequence a token and returns the likeliest next ones.
    fn draw(&mut self, sequences: &[SequenceId], tokens: &[u32]) -> Result<Vec<u32>> {
        let drawn = self.model.forward_best(&rows_of(sequences, tokens))?;
        self.commit(sequences)?;
        Ok(drawn.iter().map(|best| best.token).collect())
    }

    fn commit(&mut self, sequences: &[SequenceId]) -> Result<()> {
        sequences.iter().try_for_each(|&sequence| Ok(self.model.commit(sequence, 0)?))
    }

    fn close(&mut self, sequences: Vec<SequenceId>) -> Result<()> {
        sequences.into_iter().try_for_each(|sequence| Ok(self.model.close(sequence)?))
    }

    fn prompt(&self, seed: u64, tokens: usize) -> Vec<u32> {
        prompt(seed, tokens, self.model.limits().vocabulary)
    }

    fn kernels_since(&self, before: Option<u64>, steps: usize) -> Option<f64> {
        Some((self.model.kernels()? - before?) as f64 / steps as f64)
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

/// One row for each sequence.
fn rows_of(sequences: &[SequenceId], tokens: &[u32]) -> Batch {
    let span = |(&sequence, &token): (&SequenceId, &u32)| Span {
        sequence,
        sure: vec![token],
        drafts: Vec::new(),
        want: Want::Next,
    };
    Batch { spans: sequences.iter().zip(tokens).map(span).collect() }
}

/// A sure token of one sequence and drafts behind it.
fn block_of(sequence: SequenceId, tokens: &[u32]) -> Batch {
    let (sure, drafts) = tokens.split_at(1);
    let span = Span { sequence, sure: sure.to_vec(), drafts: drafts.to_vec(), want: Want::Next };
    Batch { spans: vec![span] }
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

    fn feeder(rows: usize) -> Feeder<ToyLm> {
        let limits = Limits { vocabulary: 50, context: 200, rows: 64, drafts: 7, sequences: 8 };
        Feeder::new(ToyLm::new(limits, 1), rows, 32)
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
        assert_eq!(long.windows.len(), 1);
    }

    #[test]
    fn a_block_feeds_all_its_rows_and_keeps_one() {
        let one = feeder(64).block(8, 5).unwrap();
        assert_eq!((one.batch, one.steps), (8, 5));
        assert_eq!(one.reply_hash, feeder(3).block(8, 5).unwrap().reply_hash);
    }

    #[test]
    fn rounds_that_draw_different_tokens_are_an_error() {
        let round = |seconds, hash: &str| Decode {
            batch: 1,
            steps: 1,
            seconds,
            experts: None,
            kernels: None,
            reply_hash: hash.into(),
        };
        assert!(round(1.0, "a").better(round(2.0, "b")).is_err());
        assert!((round(1.0, "a").better(round(0.5, "a")).unwrap().seconds - 0.5).abs() < 1e-9);
    }
}
