//! The head on the wanted rows, and what of it is handed out.

use flint_backend::ops::{GatherRows, Linear, MeanStreams, RmsNorm, TopLogits};
use flint_backend::{Backend, Element, Rows};
use flint_weights::ModelConfig;

use crate::Result;
use crate::glm::{Weights, look};
use crate::hyper::stream_rows;
use crate::language::{Best, Logits, Span, Want};
use crate::probe::{Point, Probe};
use crate::scratch::Scratch;

/// Memory for the wanted rows' logits. Grows.
pub(crate) struct Head<B: Backend> {
    vocabulary: usize,
    /// Rows that fit.
    rows: usize,
    /// F32 `[rows, vocabulary]`.
    logits: B::Buffer,
    /// U32 `[rows]`: the best tokens.
    tokens: B::Buffer,
    /// F32 `[rows]`: their logits.
    best: B::Buffer,
}

impl<B: Backend> Head<B> {
    /// Room for one row.
    pub(crate) fn new(backend: &mut B, vocabulary: usize) -> Result<Self> {
        Self::of_rows(backend, vocabulary, 1)
    }

    fn of_rows(backend: &mut B, vocabulary: usize, rows: usize) -> Result<Self> {
        Ok(Self {
            vocabulary,
            rows,
            logits: backend.allocate(Element::F32, rows * vocabulary)?,
            tokens: backend.allocate(Element::U32, rows)?,
            best: backend.allocate(Element::F32, rows)?,
        })
    }

    /// Puts the numbers of the wanted rows on the device, before the layers: no copy stands between the last one and the head.
    /// Returns how many there are.
    pub(crate) fn want(
        &mut self,
        backend: &mut B,
        scratch: &Scratch<B>,
        placed: &[(usize, &Span)],
    ) -> Result<usize> {
        let wanted: Vec<u32> = placed.iter().flat_map(wanted_rows).collect();
        if wanted.is_empty() {
            return Ok(0);
        }
        if self.rows < wanted.len() {
            *self = Self::of_rows(backend, self.vocabulary, wanted.len())?;
        }
        backend.write_u32(&scratch.wanted, 0, &wanted)?;
        Ok(wanted.len())
    }

    /// Queues the logits of the `wanted` ones of `rows` rows, whose streams have left the last layer.
    pub(crate) fn run(
        &mut self,
        backend: &mut B,
        config: &ModelConfig,
        (weights, scratch): (&Weights<B>, &Scratch<B>),
        (wanted, rows): (usize, usize),
        probe: &mut dyn Probe,
    ) -> Result<()> {
        if wanted == 0 {
            return Ok(());
        }
        let mean = Rows::dense(&scratch.y, rows, config.hidden_size);
        let streams = stream_rows(config, scratch, rows);
        backend.mean_streams(&MeanStreams { out: mean.clone(), streams })?;
        let x = Rows::dense(&scratch.x, wanted, config.hidden_size);
        backend.gather_rows(&GatherRows { out: x.clone(), x: mean, index: scratch.wanted.clone() })?;
        let (weight, epsilon) = (weights.norm.clone(), config.rms_norm_eps);
        backend.rms_norm(&RmsNorm { out: x.clone(), x: x.clone(), weight, epsilon })?;
        look(backend, probe, Point::FinalNorm, &x)?;
        let out = Rows::dense(&self.logits, wanted, self.vocabulary);
        Ok(backend.linear(&Linear { out, x, matrix: weights.head.clone() })?)
    }

    /// Waits for the logits of `wanted` rows.
    pub(crate) fn read(&self, backend: &mut B, wanted: usize) -> Result<Logits> {
        let mut values = vec![0.0; wanted * self.vocabulary];
        backend.read_f32(&self.logits, 0, &mut values)?;
        Ok(Logits { vocabulary: self.vocabulary, values })
    }

    /// Waits for the best logit of each of `wanted` rows.
    pub(crate) fn read_best(&self, backend: &mut B, wanted: usize) -> Result<Vec<Best>> {
        let logits = Rows::dense(&self.logits, wanted, self.vocabulary);
        let values = Rows::dense(&self.best, wanted, 1);
        backend.top_logits(&TopLogits { ids: self.tokens.clone(), values, logits, count: 1 })?;
        let (mut tokens, mut best) = (vec![0; wanted], vec![0.0; wanted]);
        backend.read_u32(&self.tokens, 0, &mut tokens)?;
        backend.read_f32(&self.best, 0, &mut best)?;
        Ok(tokens.into_iter().zip(best).map(|(token, logit)| Best { token, logit }).collect())
    }
}

/// Rows of the batch whose logits a placed span wants.
fn wanted_rows((first, span): &(usize, &Span)) -> std::ops::Range<u32> {
    let rows = match span.want {
        Want::Nothing => 0..0,
        Want::Next => span.sure.len() - 1..span.rows(),
        Want::All => 0..span.rows(),
    };
    (first + rows.start) as u32..(first + rows.end) as u32
}
