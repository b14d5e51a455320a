//! A model whose logits are a hash of the tokens seen.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use flint_model::{Batch, Error, LanguageModel, Limits, Logits, Result, SequenceId, Span, Want};

use crate::noise::mix;

/// Called before each forward: to count, to hold the engine at a known place, to fail or to panic.
pub type ForwardHook = Box<dyn FnMut(&Batch) -> Result<()> + Send>;

/// Called for each wanted row with the tokens up to it: to change its logits.
pub type RowHook = Box<dyn FnMut(&[u32], &mut [f32]) + Send>;

/// A [`LanguageModel`] without weights. The logits of a row are a hash of its sequence's tokens up to it, on a coarse grid so
/// that ties are common. Everything that breaks the contract of the trait is an error that says so.
pub struct ToyLm {
    limits: Limits,
    seed: u64,
    name: String,
    sequences: BTreeMap<SequenceId, Sequence>,
    next: u64,
    open: Arc<AtomicUsize>,
    before_forward: Option<ForwardHook>,
    alter_rows: Option<RowHook>,
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    tokens: Vec<u32>,
    /// Sure and draft tokens of a forward that waits for its commit.
    span: Option<(Vec<u32>, Vec<u32>)>,
}

impl fmt::Debug for ToyLm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ToyLm")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl ToyLm {
    /// A model of these sizes. Another seed is another model.
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            limits,
            seed,
            name: format!("toy-{seed:016x}"),
            sequences: BTreeMap::new(),
            next: 0,
            open: Arc::default(),
            before_forward: None,
            alter_rows: None,
        }
    }

    /// Sets what is called before each forward. An error of it is the forward's error.
    #[must_use]
    pub fn before_forward(mut self, hook: ForwardHook) -> Self {
        self.before_forward = Some(hook);
        self
    }

    /// Sets what may change the logits of wanted rows.
    #[must_use]
    pub fn alter_rows(mut self, hook: RowHook) -> Self {
        self.alter_rows = Some(hook);
        self
    }

    /// The number of open sequences, which stays visible when the model is given away.
    pub fn open_sequences(&self) -> Arc<AtomicUsize> {
        Arc::clone(&self.open)
    }

    /// The logits after these tokens, `[vocabulary]`.
    pub fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let state = tokens.iter().fold(mix(self.seed), |state, &token| mix(state ^ (u64::from(token) + 1)));
        // 97 steps of 1/8: a peaked distribution at temperature 1, with equal logits in most rows.
        (0..self.limits.vocabulary as u64)
            .map(|token| (mix(state ^ (token << 32)) % 97) as f32 / 8.0)
            .collect()
    }

    fn sequence(&mut self, sequence: SequenceId) -> Result<&mut Sequence> {
        self.sequences.get_mut(&sequence).ok_or(Error::UnknownSequence(sequence))
    }

    fn insert(&mut self, sequence: Sequence) -> Result<SequenceId> {
        within("open sequences", self.sequences.len() + 1, self.limits.sequences)?;
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        self.open.store(self.sequences.len(), Ordering::SeqCst);
        Ok(id)
    }

    /// Everything that a span may do wrong, given the spans before it.
    fn check(&mut self, span: &Span, before: &[Span]) -> Result<()> {
        let Limits { vocabulary, context, drafts, .. } = self.limits;
        if before.iter().any(|other| other.sequence == span.sequence) {
            return Err(Error::RepeatedSequence(span.sequence));
        }
        for &token in span.sure.iter().chain(&span.drafts) {
            if token as usize >= vocabulary {
                return Err(Error::UnknownToken { token, vocabulary });
            }
        }
        within("drafts of a span", span.drafts.len(), drafts)?;
        let sequence = self.sequence(span.sequence)?;
        if sequence.span.is_some() {
            return Err(misuse(span.sequence, "a forward follows a forward that was not committed"));
        }
        if span.sure.is_empty() {
            return Err(misuse(span.sequence, "a span has no sure token"));
        }
        within("rows of a sequence", sequence.tokens.len() + span.rows(), context)
    }
}

impl LanguageModel for ToyLm {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn arithmetic_id(&self) -> &str {
        &self.name
    }

    fn open(&mut self) -> Result<SequenceId> {
        self.insert(Sequence::default())
    }

    fn length(&self, sequence: SequenceId) -> Result<usize> {
        self.sequences.get(&sequence).map(|found| found.tokens.len()).ok_or(Error::UnknownSequence(sequence))
    }

    fn forward(&mut self, batch: &Batch) -> Result<Logits> {
        if let Some(hook) = &mut self.before_forward {
            hook(batch)?;
        }
        within("rows of a forward", batch.spans.iter().map(Span::rows).sum(), self.limits.rows)?;
        for (index, span) in batch.spans.iter().enumerate() {
            self.check(span, &batch.spans[..index])?;
        }
        let mut values = Vec::new();
        for span in &batch.spans {
            let sequence = self.sequence(span.sequence)?;
            sequence.span = Some((span.sure.clone(), span.drafts.clone()));
            let mut tokens = sequence.tokens.clone();
            let first_wanted = match span.want {
                Want::Nothing => span.rows(),
                Want::Next => span.sure.len() - 1,
                Want::All => 0,
            };
            for (row, &token) in span.sure.iter().chain(&span.drafts).enumerate() {
                tokens.push(token);
                if row >= first_wanted {
                    let mut logits = self.logits(&tokens);
                    if let Some(hook) = &mut self.alter_rows {
                        hook(&tokens, &mut logits);
                    }
                    values.extend(logits);
                }
            }
        }
        Ok(Logits { vocabulary: self.limits.vocabulary, values })
    }

    fn commit(&mut self, id: SequenceId, accepted: usize) -> Result<()> {
        let sequence = self.sequence(id)?;
        let Some((sure, drafts)) = sequence.span.take() else {
            return Err(misuse(id, "a commit does not follow a forward"));
        };
        let Some(kept) = drafts.get(..accepted) else {
            return Err(misuse(id, "a commit of more drafts than the forward had"));
        };
        sequence.tokens.extend(sure);
        sequence.tokens.extend(kept);
        Ok(())
    }

    fn close(&mut self, sequence: SequenceId) -> Result<()> {
        self.sequences.remove(&sequence).ok_or(Error::UnknownSequence(sequence))?;
        self.open.store(self.sequences.len(), Ordering::SeqCst);
        Ok(())
    }

    /// The model's name, a hash of the tokens, the tokens: 8 bytes, 8 bytes, 4 bytes each, little endian.
    fn save(&mut self, id: SequenceId) -> Result<Vec<u8>> {
        let seed = self.seed;
        let sequence = self.sequence(id)?;
        if sequence.span.is_some() {
            return Err(misuse(id, "a save follows a forward that was not committed"));
        }
        let mut saved = [seed, digest(&sequence.tokens)].map(u64::to_le_bytes).concat();
        saved.extend(sequence.tokens.iter().flat_map(|token| token.to_le_bytes()));
        Ok(saved)
    }

    fn load(&mut self, saved: &[u8]) -> Result<SequenceId> {
        let damaged = || Error::Saved("the bytes are damaged".to_owned());
        let (seed, rest) = saved.split_first_chunk::<8>().ok_or_else(damaged)?;
        let (hash, rest) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
        let (tokens, odd) = rest.as_chunks::<4>();
        let tokens: Vec<u32> = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        if !odd.is_empty() || digest(&tokens) != u64::from_le_bytes(*hash) {
            return Err(damaged());
        }
        if u64::from_le_bytes(*seed) != self.seed {
            return Err(Error::Saved("it is of another model".to_owned()));
        }
        self.insert(Sequence { tokens, span: None })
    }
}

fn digest(tokens: &[u32]) -> u64 {
    tokens.iter().fold(tokens.len() as u64, |state, &token| mix(state ^ (u64::from(token) + 1)))
}

fn within(what: &'static str, asked: usize, limit: usize) -> Result<()> {
    if asked > limit { Err(Error::Limit { what, asked, limit }) } else { Ok(()) }
}

fn misuse(sequence: SequenceId, what: &str) -> Error {
    Error::Commit { sequence, what: what.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocabulary: 16, context: 12, rows: 10, drafts: 3, sequences: 2 };

    fn span(sequence: SequenceId, sure: &[u32], drafts: &[u32]) -> Batch {
        Batch {
            spans: vec![Span { sequence, sure: sure.to_vec(), drafts: drafts.to_vec(), want: Want::Next }],
        }
    }

    #[test]
    fn drafts_that_were_not_committed_leave_no_trace() {
        let mut toy = ToyLm::new(LIMITS, 5);
        let id = toy.open().unwrap();
        toy.forward(&span(id, &[1, 2], &[3, 4])).unwrap();
        toy.commit(id, 1).unwrap();
        assert_eq!(toy.length(id).unwrap(), 3);
        let logits = toy.forward(&span(id, &[9], &[])).unwrap();
        assert_eq!(logits.row(0), toy.logits(&[1, 2, 3, 9]));
    }

    #[test]
    fn misuse_is_an_error() {
        let mut toy = ToyLm::new(LIMITS, 5);
        let id = toy.open().unwrap();
        assert!(matches!(toy.commit(id, 0), Err(Error::Commit { .. })), "commit first");
        assert!(matches!(toy.forward(&span(id, &[], &[])), Err(Error::Commit { .. })), "no sure token");
        assert!(matches!(toy.forward(&span(id, &[16], &[])), Err(Error::UnknownToken { token: 16, .. })));
        assert!(matches!(toy.forward(&span(id, &[1], &[1; 4])), Err(Error::Limit { asked: 4, .. })));
        assert!(matches!(toy.forward(&span(id, &[1; 11], &[])), Err(Error::Limit { asked: 11, .. })));
        let twice = Batch { spans: [span(id, &[1], &[]).spans, span(id, &[1], &[]).spans].concat() };
        assert!(matches!(toy.forward(&twice), Err(Error::RepeatedSequence(_))));
        toy.forward(&span(id, &[1], &[2])).unwrap();
        assert!(matches!(toy.forward(&span(id, &[1], &[])), Err(Error::Commit { .. })), "forward twice");
        assert!(matches!(toy.commit(id, 2), Err(Error::Commit { .. })), "too many drafts");
        toy.open().unwrap();
        assert!(matches!(toy.open(), Err(Error::Limit { .. })));
        toy.close(id).unwrap();
        assert!(matches!(toy.close(id), Err(Error::UnknownSequence(_))));
    }

    #[test]
    fn a_saved_sequence_goes_on_and_a_damaged_one_is_refused() {
        let mut toy = ToyLm::new(LIMITS, 5);
        let id = toy.open().unwrap();
        toy.forward(&span(id, &[1, 2], &[])).unwrap();
        toy.commit(id, 0).unwrap();
        let mut saved = toy.save(id).unwrap();
        let loaded = toy.load(&saved).unwrap();
        assert_eq!(toy.forward(&span(loaded, &[3], &[])).unwrap().row(0), toy.logits(&[1, 2, 3]));
        assert!(ToyLm::new(LIMITS, 6).load(&saved).is_err());
        for cut in 0..saved.len() {
            assert!(toy.load(&saved[..cut]).is_err());
        }
        saved[17] ^= 1;
        assert!(toy.load(&saved).is_err());
    }
}
