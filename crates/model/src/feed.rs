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

/// The rows inside a SwiGLU block.
struct Inner<Buf> {
    /// Gate, then up.
    both: Rows<Buf>,
    activated: Rows<Buf>,
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
        let inner = self.inner(slab, x.rows);
        self.widen(backend, x, &inner)?;
        swiglu(backend, config, &inner)?;
        self.narrow(backend, &inner, out)
    }

    fn inner(&self, slab: &mut Slab<'_, B>, rows: usize) -> Inner<B::Buffer> {
        Inner { both: slab.rows(rows, 2 * self.width), activated: slab.rows(rows, self.width) }
    }

    fn widen(&self, backend: &mut B, x: &Rows<B::Buffer>, to: &Inner<B::Buffer>) -> Result<()> {
        let matrix = self.gate_up.clone();
        Ok(backend.linear(&Linear { out: to.both.clone(), x: x.clone(), matrix })?)
    }

    fn narrow(&self, backend: &mut B, from: &Inner<B::Buffer>, out: Rows<B::Buffer>) -> Result<()> {
        let matrix = self.down.clone();
        Ok(backend.linear(&Linear { out, x: from.activated.clone(), matrix })?)
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
            inner: Inner {
                both: slab.rows(rows * picks_per_row, 2 * config.moe_intermediate_size),
                activated: slab.rows(rows * picks_per_row, config.moe_intermediate_size),
            },
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
            None => {
                // Routed and shared experts step by step beside each other: a device may take two neighbours at once.
                let shared_inner = self.shared.inner(slab, rows);
                self.widen(backend, &pairs)?;
                self.shared.widen(backend, &x, &shared_inner)?;
                swiglu(backend, config, &pairs.inner)?;
                swiglu(backend, config, &shared_inner)?;
                self.narrow(backend, &pairs)?;
                self.shared.narrow(backend, &shared_inner, shared.clone())?;
            }
            Some(bank) => {
                let mut picks = vec![0; rows * picks_per_row];
                backend.read_u32(&pairs.picks, 0, &mut picks)?;
                bank.serve(backend, (layer, &self.experts), (&picks, picks_per_row), |backend| {
                    self.widen(backend, &pairs)?;
                    swiglu(backend, config, &pairs.inner)?;
                    self.narrow(backend, &pairs)
                })?;
                self.shared.run(backend, config, slab, &x, shared.clone())?;
            }
        }
        crate::glm::look(backend, probe, Point::Shared(layer), &shared)?;
        Ok(backend.combine(&Combine { out: y, pairs: pairs.out, weights, shared })?)
    }

    /// Gate and up projections of the pairs whose experts the slot table holds.
    fn widen(&self, backend: &mut B, pairs: &Pairs<B>) -> Result<()> {
        self.multiply(backend, pairs, (&pairs.inner.both, &pairs.x, &self.experts.gate_up))
    }

    /// Down projections of the same pairs.
    fn narrow(&self, backend: &mut B, pairs: &Pairs<B>) -> Result<()> {
        self.multiply(backend, pairs, (&pairs.out, &pairs.inner.activated, &self.experts.down))
    }

    fn multiply(
        &self,
        backend: &mut B,
        pairs: &Pairs<B>,
        (out, x, stack): (&Rows<B::Buffer>, &Rows<B::Buffer>, &B::Matrix),
    ) -> Result<()> {
        Ok(backend.expert_linear(&ExpertLinear {
            out: out.clone(),
            x: x.clone(),
            stack: stack.clone(),
            picks: pairs.picks.clone(),
            picks_per_row: pairs.picks_per_row,
            slots: self.experts.slots.clone(),
        })?)
    }
}

/// What the pairs of rows and experts go through.
struct Pairs<B: Backend> {
    /// `[rows, hidden]`.
    x: Rows<B::Buffer>,
    inner: Inner<B::Buffer>,
    /// `[pairs, hidden]`.
    out: Rows<B::Buffer>,
    /// U32 `[pairs]`.
    picks: B::Buffer,
    picks_per_row: usize,
}

/// The activation of a row `[gate, up]`.
fn swiglu<B: Backend>(backend: &mut B, config: &ModelConfig, inner: &Inner<B::Buffer>) -> Result<()> {
    let width = inner.activated.width;
    Ok(backend.swiglu(&SwiGlu {
        out: inner.activated.clone(),
        gate: inner.both.columns(0, width),
        up: inner.both.columns(width, width),
        limit: config.swiglu_limit,
    })?)
}
