//! The forward pass and the sequences.

use std::collections::BTreeMap;

use flint_backend::ops::{Embed, SpreadStreams};
use flint_backend::{Backend, Rows};
use flint_weights::ModelConfig;

use crate::bank::Bank;
use crate::bank::report::{BankReport, Phase};
use crate::dsa::Dsa;
use crate::feed::Feed;
use crate::head::Head;
use crate::hyper::{Site, leave, mix_rows, stream_rows};
use crate::kda::Kda;
use crate::language::{Batch, Best, Error, LanguageModel, Limits, Logits, Result, SequenceId, Span};
use crate::probe::{Nobody, Point, Probe, Seen};
use crate::scratch::Scratch;
use crate::sequence::{CacheShape, Pending, Sequence};

/// Sizes that the user chooses.
#[derive(Clone, Copy, Debug)]
pub struct GlmOptions {
    /// Longest sequence, prompt and reply together.
    pub context: usize,
    /// Sequences that may be open at once.
    pub sequences: usize,
    /// Rows of one forward.
    pub rows: usize,
    /// Drafts of one span.
    pub drafts: usize,
}

/// The first half of a layer.
pub(crate) enum Mixer<B: Backend> {
    Kda(Kda<B>),
    Dsa(Dsa<B>),
}

/// One layer of the trunk.
pub(crate) struct Layer<B: Backend> {
    pub(crate) attention_site: Site<B>,
    pub(crate) mixer: Mixer<B>,
    pub(crate) feed_site: Site<B>,
    pub(crate) feed: Feed<B>,
}

/// All weights on the device.
pub(crate) struct Weights<B: Backend> {
    pub(crate) embedding: B::Matrix,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) norm: B::Buffer,
    pub(crate) head: B::Matrix,
}

/// GLM-5.3-Flash on backend `B`.
pub struct Glm<B: Backend> {
    backend: B,
    config: ModelConfig,
    weights: Weights<B>,
    scratch: Scratch<B>,
    shape: CacheShape,
    options: GlmOptions,
    arithmetic_id: String,
    sequences: BTreeMap<SequenceId, Sequence<B>>,
    opened: u64,
    head: Head<B>,
    /// The slots of experts that are streamed.
    bank: Option<Bank>,
}

impl<B: Backend> Glm<B> {
    /// Puts the parts together; `load.rs` makes them.
    pub(crate) fn assemble(
        mut backend: B,
        config: ModelConfig,
        (weights, bank): (Weights<B>, Option<Bank>),
        options: GlmOptions,
        arithmetic_id: String,
    ) -> Result<Self> {
        let shape = CacheShape::new(&config, options.drafts);
        let scratch = Scratch::new(&mut backend, &config, options.rows)?;
        let head = Head::new(&mut backend, config.vocab_size)?;
        Ok(Self {
            backend,
            config,
            weights,
            scratch,
            shape,
            options,
            arithmetic_id,
            sequences: BTreeMap::new(),
            opened: 0,
            head,
            bank,
        })
    }

    /// The sizes of the network.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// [`LanguageModel::forward`] with somebody looking.
    pub fn forward_probed(&mut self, batch: &Batch, probe: &mut dyn Probe) -> Result<Logits> {
        self.append(batch, probe, |model, wanted| model.head.read(&mut model.backend, wanted))
    }

    /// Appends a batch's rows; `read` takes what is wanted of the logits of so many rows.
    fn append<T>(
        &mut self,
        batch: &Batch,
        probe: &mut dyn Probe,
        read: impl FnOnce(&mut Self, usize) -> Result<T>,
    ) -> Result<T> {
        self.check(batch)?;
        for span in &batch.spans {
            if let Some(sequence) = self.sequences.get_mut(&span.sequence) {
                sequence.reserve(&mut self.backend, &self.config, &self.shape, span.rows())?;
            }
        }
        let result = self.step(batch, probe, read);
        let mut first_row = 0;
        for span in &batch.spans {
            let rows = first_row..first_row + span.rows();
            first_row = rows.end;
            let lost = self.bank.as_ref().and_then(|bank| bank.lost(rows));
            if let Some(sequence) = self.sequences.get_mut(&span.sequence) {
                sequence.pending = Some(Pending { sure: span.sure.len(), drafts: span.drafts.len() });
                let failed = || "its state was lost when the device failed".to_owned();
                sequence.failed = lost.or_else(|| result.is_err().then(failed));
            }
        }
        result
    }

    /// Refuses a batch before anything is written.
    fn check(&self, batch: &Batch) -> Result<()> {
        let mut rows = 0;
        let mut seen = std::collections::BTreeSet::new();
        for span in &batch.spans {
            let sequence = self.sequence(span.sequence)?;
            if !seen.insert(span.sequence) {
                return Err(Error::RepeatedSequence(span.sequence));
            }
            self.check_span(span, sequence)?;
            rows += span.rows();
        }
        limit("rows of a forward", rows, self.options.rows)
    }

    fn check_span(&self, span: &Span, sequence: &Sequence<B>) -> Result<()> {
        let refused = |what: &str| Error::Commit { sequence: span.sequence, what: what.into() };
        if let Some(why) = &sequence.failed {
            return Err(refused(&format!("{why}; close it")));
        }
        if sequence.pending.is_some() {
            return Err(refused("the last forward waits for its commit"));
        }
        if span.sure.is_empty() {
            return Err(refused("a span needs a sure token"));
        }
        limit("drafts of a span", span.drafts.len(), self.options.drafts)?;
        limit("rows of a sequence", sequence.len + span.rows(), self.options.context)?;
        let vocabulary = self.config.vocab_size;
        match span.sure.iter().chain(&span.drafts).find(|t| **t as usize >= vocabulary) {
            Some(&token) => Err(Error::UnknownToken { token, vocabulary }),
            None => Ok(()),
        }
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence<B>> {
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id))
    }

    /// The spans with the row at which each starts.
    fn placed<'a>(&self, batch: &'a Batch) -> Result<Vec<(usize, &'a Span)>> {
        let mut first_row = 0;
        let mut placed = Vec::with_capacity(batch.spans.len());
        for span in &batch.spans {
            self.sequence(span.sequence)?;
            placed.push((first_row, span));
            first_row += span.rows();
        }
        Ok(placed)
    }

    /// Runs a checked batch as one step of the device, and waits for what `read` takes.
    fn step<T>(
        &mut self,
        batch: &Batch,
        probe: &mut dyn Probe,
        read: impl FnOnce(&mut Self, usize) -> Result<T>,
    ) -> Result<T> {
        self.backend.begin_step()?;
        let result = self.run(batch, probe).and_then(|wanted| read(self, wanted));
        // Ended after an error too: later copies must not wait for a step that never ends.
        let ended = self.backend.end_step();
        let read = result?;
        ended?;
        self.backend.synchronize()?;
        Ok(read)
    }

    /// Embeds the rows, runs the layers and the head. Returns the number of rows whose logits are wanted.
    fn run(&mut self, batch: &Batch, probe: &mut dyn Probe) -> Result<usize> {
        let placed = self.placed(batch)?;
        let rows: usize = batch.spans.iter().map(Span::rows).sum();
        if rows == 0 {
            return Ok(0);
        }
        let tokens: Vec<u32> =
            batch.spans.iter().flat_map(|s| s.sure.iter().chain(&s.drafts)).copied().collect();
        self.backend.write_u32(&self.scratch.tokens, 0, &tokens)?;
        if let Some(bank) = &mut self.bank {
            bank.begin(draft_rows(batch), phase(batch));
        }
        let wanted = self.head.want(&mut self.backend, &self.scratch, &placed)?;
        let x = Rows::dense(&self.scratch.x, rows, self.config.hidden_size);
        let streams = stream_rows(&self.config, &self.scratch, rows);
        self.backend.embed(&Embed {
            out: x.clone(),
            table: self.weights.embedding.clone(),
            tokens: self.scratch.tokens.clone(),
        })?;
        self.backend.spread_streams(&SpreadStreams { streams, x })?;
        let (mut kda, mut dsa) = (0, 0);
        for layer in 0..self.weights.layers.len() {
            self.run_layer(layer, (&mut kda, &mut dsa), &placed, rows, probe)?;
        }
        let Self { backend, config, weights, scratch, head, .. } = self;
        head.run(backend, config, (weights, scratch), (wanted, rows), probe)?;
        Ok(wanted)
    }

    fn run_layer(
        &mut self,
        index: usize,
        (kda, dsa): (&mut usize, &mut usize),
        placed: &[(usize, &Span)],
        rows: usize,
        probe: &mut dyn Probe,
    ) -> Result<()> {
        let Self { backend, config, weights, scratch, shape, sequences, bank, .. } = self;
        let layer = &weights.layers[index];
        let y = Rows::dense(&scratch.y, rows, config.hidden_size);
        let open = present(sequences, placed);

        layer.attention_site.enter(backend, config, scratch, rows)?;
        look(backend, probe, Point::AttentionMix(index), &mix_rows(config, scratch, rows))?;
        match &layer.mixer {
            Mixer::Kda(block) => {
                let part = |(row, span, sequence): &Present<'_, B>| {
                    let rows = Pending { sure: span.sure.len(), drafts: span.drafts.len() };
                    sequence.kda_span(*kda, *row, rows)
                };
                let spans: Vec<_> = open.iter().map(part).collect();
                let first = spans.first().map(|s| (s.state.clone(), s.window.clone()));
                block.run(backend, config, scratch, rows, spans)?;
                if let Some((state, window)) = first {
                    let width = config.linear_width();
                    let state = Rows::dense(&state, 1, width * config.linear_head_dim);
                    look(backend, probe, Point::KdaState(index), &state)?;
                    let window = Rows::dense(&window, config.linear_conv_taps - 1, 3 * width);
                    look(backend, probe, Point::KdaWindow(index), &window)?;
                }
                *kda += 1;
            }
            Mixer::Dsa(block) => {
                let part =
                    |(row, span, sequence): &Present<'_, B>| sequence.dsa_span(*dsa, *row, span.rows());
                let spans = open.iter().map(part).collect();
                block.run(backend, config, scratch, shape, rows, spans, (index, &mut *probe))?;
                *dsa += 1;
            }
        }
        look(backend, probe, Point::Attention(index), &y)?;
        leave(backend, config, scratch, rows)?;
        look(backend, probe, Point::AttentionStreams(index), &stream_rows(config, scratch, rows))?;

        layer.feed_site.enter(backend, config, scratch, rows)?;
        look(backend, probe, Point::FeedMix(index), &mix_rows(config, scratch, rows))?;
        layer.feed.run(backend, config, scratch, rows, bank.as_mut(), (index, &mut *probe))?;
        look(backend, probe, Point::Feed(index), &y)?;
        leave(backend, config, scratch, rows)?;
        look(backend, probe, Point::Streams(index), &stream_rows(config, scratch, rows))
    }
}

impl<B: Backend> LanguageModel for Glm<B> {
    fn limits(&self) -> Limits {
        Limits {
            vocabulary: self.config.vocab_size,
            context: self.options.context,
            rows: self.options.rows,
            drafts: self.options.drafts,
            sequences: self.options.sequences,
        }
    }

    fn arithmetic_id(&self) -> &str {
        &self.arithmetic_id
    }

    fn bank_report(&self) -> Option<&BankReport> {
        self.bank.as_ref().map(Bank::report)
    }

    fn open(&mut self) -> Result<SequenceId> {
        limit("open sequences", self.sequences.len() + 1, self.options.sequences)?;
        let sequence = Sequence::open(&mut self.backend, &self.config, &self.shape)?;
        Ok(self.insert(sequence))
    }

    fn length(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.sequence(sequence)?.len)
    }

    fn forward(&mut self, batch: &Batch) -> Result<Logits> {
        self.forward_probed(batch, &mut Nobody)
    }

    fn forward_best(&mut self, batch: &Batch) -> Result<Vec<Best>> {
        self.append(batch, &mut Nobody, |model, wanted| model.head.read_best(&mut model.backend, wanted))
    }

    fn commit(&mut self, sequence: SequenceId, accepted: usize) -> Result<()> {
        let found = self.sequences.get_mut(&sequence).ok_or(Error::UnknownSequence(sequence))?;
        found.commit(sequence, accepted)
    }

    fn close(&mut self, sequence: SequenceId) -> Result<()> {
        self.sequences.remove(&sequence).map(|_| ()).ok_or(Error::UnknownSequence(sequence))
    }

    fn save(&mut self, sequence: SequenceId) -> Result<Vec<u8>> {
        let found = self.sequences.get(&sequence).ok_or(Error::UnknownSequence(sequence))?;
        crate::saved::write(&mut self.backend, &self.config, &self.shape, &self.arithmetic_id, found)
    }

    fn load(&mut self, saved: &[u8]) -> Result<SequenceId> {
        limit("open sequences", self.sequences.len() + 1, self.options.sequences)?;
        let (backend, config, shape) = (&mut self.backend, &self.config, &self.shape);
        let sequence =
            crate::saved::read(backend, config, shape, &self.arithmetic_id, self.options.context, saved)?;
        Ok(self.insert(sequence))
    }
}

impl<B: Backend> Glm<B> {
    fn insert(&mut self, sequence: Sequence<B>) -> SequenceId {
        self.opened += 1;
        let id = SequenceId(self.opened);
        self.sequences.insert(id, sequence);
        id
    }
}

/// A span, the row at which it starts, and its sequence.
type Present<'a, B> = (usize, &'a Span, &'a Sequence<B>);

fn present<'a, B: Backend>(
    sequences: &'a BTreeMap<SequenceId, Sequence<B>>,
    placed: &[(usize, &'a Span)],
) -> Vec<Present<'a, B>> {
    placed.iter().filter_map(|(row, span)| Some((*row, *span, sequences.get(&span.sequence)?))).collect()
}

/// Which rows of a batch are drafts.
fn draft_rows(batch: &Batch) -> Vec<bool> {
    let rows = |span: &Span| (0..span.rows()).map(|row| row >= span.sure.len()).collect::<Vec<_>>();
    batch.spans.iter().flat_map(rows).collect()
}

fn phase(batch: &Batch) -> Phase {
    if batch.spans.iter().any(|span| span.sure.len() > 1) { Phase::Prompt } else { Phase::Decode }
}

fn limit(what: &'static str, asked: usize, limit: usize) -> Result<()> {
    if asked > limit { Err(Error::Limit { what, asked, limit }) } else { Ok(()) }
}

/// Shows rows to a probe that wants them.
pub(crate) fn look<B: Backend>(
    backend: &mut B,
    probe: &mut dyn Probe,
    point: Point,
    rows: &Rows<B::Buffer>,
) -> Result<()> {
    if !probe.wants(point) {
        return Ok(());
    }
    let mut values = vec![0.0; rows.rows * rows.width];
    for (row, out) in values.chunks_mut(rows.width).enumerate() {
        backend.read_f32(&rows.buffer, rows.first + row * rows.stride, out)?;
    }
    probe.take(point, Seen::Floats(values));
    Ok(())
}

/// Shows ids to a probe that wants them.
pub(crate) fn look_ids<B: Backend>(
    backend: &mut B,
    probe: &mut dyn Probe,
    point: Point,
    ids: &B::Buffer,
    count: usize,
) -> Result<()> {
    if probe.wants(point) {
        let mut values = vec![0; count];
        backend.read_u32(ids, 0, &mut values)?;
        probe.take(point, Seen::Ids(values));
    }
    Ok(())
}
