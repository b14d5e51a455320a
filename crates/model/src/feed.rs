//! The second half of a layer: one SwiGLU block, or routed experts with a shared one. `reference/glm5_next.md` section 7.

use flint_backend::ops::{Combine, ExpertLinear, Linear, Route, SwiGlu};
use flint_backend::{Backend, Rows};
use flint_weights::ModelConfig;

use crate::Result;
use crate::bank::{Bank, ExpertBank};
use crate::probe::{Point, Probe};
use crate::scratch::{Scratch, Slab};

/// A SwiGLU block.
pub(crate) struct Dense<B: Backend> {
    /// Gate and up projections, one below the other.
    pub(crate) gate_up: B::Matrix,
    pub(crate) down: B::Matrix,
    /// Inner width.
    pub(crate) width: usize,
}

/// Routed experts and the shared one.
pub(crate) struct Sparse<B: Backend> {
    pub(crate) router: B::Matrix,
    pub(crate) bias: B::Buffer,
    pub(crate) experts: ExpertBank<B>,
    pub(crate) shared: Dense<B>,
}

/// Either.
pub(crate) enum Feed<B: Backend> {
    Dense(Dense<B>),
    Sparse(Sparse<B>),
}

impl<B: Backend> Feed<B> {
    /// `scratch.x` to `scratch.y`.
    pub(crate) fn run(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        scratch: &Scratch<B>,
        rows: usize,
        bank: Option<&mut Bank>,
        (layer, probe): (usize, &mut dyn Probe),
    ) -> Result<()> {
        let x = Rows::dense(&scratch.x, rows, config.hidden_size);
        let y = Rows::dense(&scratch.y, rows, config.hidden_size);
        let mut slab = scratch.slab();
        match self {
            Self::Dense(dense) => dense.run(backend, config, &mut slab, &x, y),
            Self::Sparse(sparse) => {
                sparse.run(backend, config, (scratch, &mut slab), (x, y), bank, (layer, probe))
            }
        }
    }
}

impl<B: Backend> Dense<B> {
    fn run(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        slab: &mut Slab<'_, B>,
        x: &Rows<B::Buffer>,
        out: Rows<B::Buffer>,
    ) -> Result<()> {
        let both = slab.rows(x.rows, 2 * self.width);
        let inner = slab.rows(x.rows, self.width);
        backend.linear(&Linear { out: both.clone(), x: x.clone(), matrix: self.gate_up.clone() })?;
        swiglu(backend, config, &both, &inner)?;
        Ok(backend.linear(&Linear { out, x: inner, matrix: self.down.clone() })?)
    }
}

impl<B: Backend> Sparse<B> {
    fn run(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        (scratch, slab): (&Scratch<B>, &mut Slab<'_, B>),
        (x, y): (Rows<B::Buffer>, Rows<B::Buffer>),
        bank: Option<&mut Bank>,
        (layer, probe): (usize, &mut dyn Probe),
    ) -> Result<()> {
        let (rows, picks_per_row) = (x.rows, config.experts_per_token);
        let logits = slab.rows(rows, config.experts);
        let weights = slab.rows(rows, picks_per_row);
        let pairs: Pairs<B> = Pairs {
            x: x.clone(),
            both: slab.rows(rows * picks_per_row, 2 * config.moe_intermediate_size),
            inner: slab.rows(rows * picks_per_row, config.moe_intermediate_size),
            out: slab.rows(rows * picks_per_row, config.hidden_size),
            picks: scratch.picks.clone(),
            picks_per_row,
        };
        let shared = slab.rows(rows, config.hidden_size);

        backend.linear(&Linear { out: logits.clone(), x: x.clone(), matrix: self.router.clone() })?;
        backend.route(&Route {
            picks: pairs.picks.clone(),
            weights: weights.clone(),
            logits: logits.clone(),
            bias: self.bias.clone(),
            picks_per_row,
            groups: config.expert_groups,
            groups_kept: config.expert_groups_kept,
            normalise: config.norm_topk_prob,
            scaling: config.routed_scaling_factor,
        })?;
        crate::glm::look(backend, probe, Point::RouterLogits(layer), &logits)?;
        crate::glm::look(backend, probe, Point::PickWeights(layer), &weights)?;
        crate::glm::look_ids(backend, probe, Point::Picks(layer), &pairs.picks, rows * picks_per_row)?;

        match bank {
            None => self.multiply(backend, config, &pairs)?,
            Some(bank) => {
                let mut picks = vec![0; rows * picks_per_row];
                backend.read_u32(&pairs.picks, 0, &mut picks)?;
                bank.serve(backend, (layer, &self.experts), (&picks, picks_per_row), |backend| {
                    self.multiply(backend, config, &pairs)
                })?;
            }
        }
        self.shared.run(backend, config, slab, &x, shared.clone())?;
        crate::glm::look(backend, probe, Point::Shared(layer), &shared)?;
        Ok(backend.combine(&Combine { out: y, pairs: pairs.out, weights, shared })?)
    }

    /// The products of the pairs whose experts the slot table holds.
    fn multiply(&self, backend: &mut B, config: &ModelConfig, pairs: &Pairs<B>) -> Result<()> {
        let product = |out: &Rows<B::Buffer>, x: &Rows<B::Buffer>, stack: &B::Matrix| ExpertLinear {
            out: out.clone(),
            x: x.clone(),
            stack: stack.clone(),
            picks: pairs.picks.clone(),
            picks_per_row: pairs.picks_per_row,
            slots: self.experts.slots.clone(),
        };
        backend.expert_linear(&product(&pairs.both, &pairs.x, &self.experts.gate_up))?;
        swiglu(backend, config, &pairs.both, &pairs.inner)?;
        Ok(backend.expert_linear(&product(&pairs.out, &pairs.inner, &self.experts.down))?)
    }
}

/// What the pairs of rows and experts go through.
struct Pairs<B: Backend> {
    /// `[rows, hidden]`.
    x: Rows<B::Buffer>,
    /// `[pairs, 2 · inner]`.
    both: Rows<B::Buffer>,
    /// `[pairs, inner]`.
    inner: Rows<B::Buffer>,
    /// `[pairs, hidden]`.
    out: Rows<B::Buffer>,
    /// U32 `[pairs]`.
    picks: B::Buffer,
    picks_per_row: usize,
}

/// The activation of a row `[gate, up]`.
fn swiglu<B: Backend>(
    backend: &mut B,
    config: &ModelConfig,
    both: &Rows<B::Buffer>,
    inner: &Rows<B::Buffer>,
) -> Result<()> {
    let width = inner.width;
    Ok(backend.swiglu(&SwiGlu {
        out: inner.clone(),
        gate: both.columns(0, width),
        up: both.columns(width, width),
        limit: config.swiglu_limit,
    })?)
}
