//! What the engine needs of a model, with the backend erased.
//!
//! Two things happen to a sequence: [`LanguageModel::forward`] appends rows, [`LanguageModel::commit`] makes them part
//! of it. There is no way back and none is needed: rows that were never committed leave no trace.

use crate::bank::report::BankReport;

/// What every call on a model returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a model refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Weights(#[from] flint_weights::Error),
    /// The device refused or failed.
    #[error(transparent)]
    Backend(#[from] flint_backend::Error),
    /// Experts that could not be brought to the device.
    #[error("{0}")]
    Experts(String),
    /// A sequence that is not open.
    #[error("sequence {0:?} is not open")]
    UnknownSequence(SequenceId),
    /// A sequence that is named twice in one batch.
    #[error("sequence {0:?} has two spans in one batch")]
    RepeatedSequence(SequenceId),
    /// More rows than a sequence or a forward can hold.
    #[error("{what}: {asked} asked for, {limit} is the limit")]
    Limit {
        /// Which limit.
        what: &'static str,
        /// What was asked for.
        asked: usize,
        /// What is possible.
        limit: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocabulary: usize,
    },
    /// A commit that does not follow a forward, or of more drafts than the forward had.
    #[error("sequence {sequence:?}: {what}")]
    Commit {
        /// The sequence.
        sequence: SequenceId,
        /// What is wrong.
        what: String,
    },
    /// A saved sequence of another model, arithmetic or version, or a damaged one.
    #[error("saved sequence: {0}")]
    Saved(String),
    /// A checkpoint or configuration that the network cannot run.
    #[error("{0}")]
    Unsupported(String),
}

/// Names an open sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// Which rows of a span need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: more of the prompt follows.
    Nothing,
    /// The last sure row and every draft row: `1 + drafts` rows.
    Next,
    /// Every row of the span.
    All,
}

/// Rows to append to one sequence.
#[derive(Clone, Debug)]
pub struct Span {
    /// The sequence.
    pub sequence: SequenceId,
    /// Decided tokens, at least one.
    pub sure: Vec<u32>,
    /// Proposals, at most [`Limits::drafts`].
    pub drafts: Vec<u32>,
    /// Rows whose logits are wanted.
    pub want: Want,
}

impl Span {
    /// Rows of the span.
    pub fn rows(&self) -> usize {
        self.sure.len() + self.drafts.len()
    }

    /// Rows of the span whose logits are wanted.
    pub fn wanted_rows(&self) -> usize {
        match self.want {
            Want::Nothing => 0,
            Want::Next => 1 + self.drafts.len(),
            Want::All => self.rows(),
        }
    }
}

/// The rows of one forward: a ragged list of spans, one for each sequence at most.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The spans.
    pub spans: Vec<Span>,
}

/// Logits of the wanted rows, in the order of spans and rows.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// `[wanted rows, vocabulary]`.
    pub values: Vec<f32>,
}

impl Logits {
    /// Logits of wanted row `row`.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocabulary..(row + 1) * self.vocabulary]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len().checked_div(self.vocabulary).unwrap_or(0)
    }
}

/// The best logit of a row: a NaN if there is one, else the largest, and the lowest token among equals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// The token.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

impl Best {
    /// That of a row.
    pub fn of(row: &[f32]) -> Option<Self> {
        (0..).zip(row).map(|(token, &logit)| Self { token, logit }).reduce(|best, other| {
            let stays = best.logit.is_nan() || best.logit >= other.logit;
            if stays { best } else { other }
        })
    }
}

/// Sizes that a caller must respect.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Longest sequence, prompt and reply together.
    pub context: usize,
    /// Rows of one forward.
    pub rows: usize,
    /// Drafts of one span.
    pub drafts: usize,
    /// Sequences that may be open at once.
    pub sequences: usize,
}

/// A model that appends rows to sequences.
///
/// Contract, by bits: the logits of a row depend on the tokens of its own sequence up to that row and on the weights,
/// not on the batch, the cut into forwards, drafts that were proposed, or where the state was saved and loaded.
pub trait LanguageModel: Send {
    /// The sizes.
    fn limits(&self) -> Limits;

    /// Names checkpoint and arithmetic: equal ids give equal bits. Also the API's `system_fingerprint`.
    fn arithmetic_id(&self) -> &str;

    /// What the bank of streamed experts is and did; `None` when all experts are on the device.
    fn bank_report(&self) -> Option<&BankReport> {
        None
    }

    /// Opens an empty sequence.
    fn open(&mut self) -> Result<SequenceId>;

    /// Committed rows of a sequence.
    fn length(&self, sequence: SequenceId) -> Result<usize>;

    /// Appends the batch's rows and returns the wanted logits. Each span must be committed before its sequence is in
    /// another batch. On an error no sequence of the batch has changed as far as later calls can tell. Where an expert
    /// that a span's rows need cannot be read, only that span is lost: its logits mean nothing, and its commit says why.
    fn forward(&mut self, batch: &Batch) -> Result<Logits>;

    /// [`forward`](Self::forward) for callers who need only the best logit of each wanted row: a device need not hand out
    /// the others.
    fn forward_best(&mut self, batch: &Batch) -> Result<Vec<Best>> {
        let logits = self.forward(batch)?;
        Ok((0..logits.rows()).filter_map(|row| Best::of(logits.row(row))).collect())
    }

    /// Makes the last span's sure rows and its first `accepted` drafts part of the sequence.
    fn commit(&mut self, sequence: SequenceId, accepted: usize) -> Result<()>;

    /// Frees a sequence.
    fn close(&mut self, sequence: SequenceId) -> Result<()>;

    /// A sequence's state, complete and checksummed.
    fn save(&mut self, sequence: SequenceId) -> Result<Vec<u8>>;

    /// Opens a sequence from [`save`](Self::save)'s bytes.
    fn load(&mut self, saved: &[u8]) -> Result<SequenceId>;
}
