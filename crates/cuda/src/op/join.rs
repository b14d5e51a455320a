//! Operations of a step that wait for the next one, to run with it as one launch. It changes speed, never bits: a joined
//! kernel has the formulas and the orders of its parts, and leaves in memory what they leave.

use flint_backend::Result;
use flint_backend::ops::{self, Rows};

use super::{conv, feed, hyper, norm, prepare, scan, step};
use crate::queue::Queue;
use crate::{CudaBuffer, CudaMatrix};

/// Rows up to which joined kernels are the faster ones.
pub(super) const MOST_ROWS: usize = 32;

/// Operations that can be joined with others.
#[derive(Clone)]
pub(crate) enum Joinable {
    Combine(ops::Combine<CudaBuffer>),
    HcPost(ops::HcPost<CudaBuffer>),
    HcPre(ops::HcPre<CudaBuffer, CudaMatrix>),
    RmsNorm(ops::RmsNorm<CudaBuffer>),
    KdaConv(ops::KdaConv<CudaBuffer>),
    KdaPrepare(ops::KdaPrepare<CudaBuffer>),
    KdaScan(ops::KdaScan<CudaBuffer>),
    GatedNorm(ops::GatedNorm<CudaBuffer>),
}

/// What waits.
#[derive(Default)]
pub(crate) struct Joiner {
    held: Vec<Joinable>,
}

impl Joiner {
    /// Takes an operation of a step: it waits, or completes what waits, or runs behind it.
    pub(crate) fn take(&mut self, queue: &mut Queue, op: Joinable) -> Result<()> {
        if !follows(&self.held, &op) {
            self.flush(queue)?;
            if !follows(&[], &op) {
                return op.run(queue);
            }
        }
        let ends = matches!(op, Joinable::RmsNorm(_) | Joinable::GatedNorm(_));
        self.held.push(op);
        if ends { self.flush(queue) } else { Ok(()) }
    }

    /// Runs what waits.
    pub(crate) fn flush(&mut self, queue: &mut Queue) -> Result<()> {
        let held = std::mem::take(&mut self.held);
        let ran = run(queue, &held);
        self.held = held;
        self.held.clear();
        ran
    }
}

/// Whether an operation can be joined with those that wait (none: whether it can be the first).
fn follows(held: &[Joinable], op: &Joinable) -> bool {
    match (held.last(), op) {
        (None, Joinable::Combine(op)) => op.out.rows <= MOST_ROWS,
        (None, Joinable::HcPost(op)) => step::mixes(op),
        (None, Joinable::HcPre(op)) => step::enters(op),
        (None, Joinable::KdaConv(op)) => step::convolves(op),
        (Some(Joinable::Combine(last)), Joinable::HcPost(op)) => {
            step::mixes(op) && same(&last.out, &op.y) && step::apart(last, op)
        }
        (Some(Joinable::HcPost(last)), Joinable::HcPre(op)) => {
            step::enters(op) && same(&last.streams, &op.streams) && step::collapses_apart(held, op)
        }
        (Some(Joinable::HcPre(last)), Joinable::RmsNorm(op)) => {
            same(&last.collapsed, &op.x) && same(&op.x, &op.out)
        }
        (Some(Joinable::KdaConv(last)), Joinable::KdaPrepare(op)) => {
            same(&last.out, &op.qkv) && op.head_dim == step::HEAD_DIM
        }
        (Some(Joinable::KdaPrepare(last)), Joinable::KdaScan(op)) => {
            let same_rows =
                same(&last.qkv, &op.qkv) && same(&last.decay, &op.decay) && same(&last.beta, &op.beta);
            let same_spans = matches!(held.first(), Some(Joinable::KdaConv(first)) if step::same_spans(&first.spans, &op.spans));
            same_rows && same_spans && op.head_dim == step::HEAD_DIM
        }
        (Some(Joinable::KdaScan(last)), Joinable::GatedNorm(op)) => {
            same(&last.out, &op.o) && same(&op.o, &op.out) && op.head_dim == step::HEAD_DIM
        }
        _ => false,
    }
}

/// Runs operations that were found to follow each other.
fn run(queue: &mut Queue, held: &[Joinable]) -> Result<()> {
    use Joinable as J;
    match held {
        [J::Combine(combine), J::HcPost(post), J::HcPre(pre), J::RmsNorm(norm)] => {
            step::between(queue, Some(combine), Some(post), pre, Some(norm))
        }
        [J::Combine(combine), J::HcPost(post), J::HcPre(pre)] => {
            step::between(queue, Some(combine), Some(post), pre, None)
        }
        [J::HcPost(post), J::HcPre(pre), J::RmsNorm(norm)] => {
            step::between(queue, None, Some(post), pre, Some(norm))
        }
        [J::HcPost(post), J::HcPre(pre)] => step::between(queue, None, Some(post), pre, None),
        [J::HcPre(pre), J::RmsNorm(norm)] => step::between(queue, None, None, pre, Some(norm)),
        [J::KdaConv(conv), J::KdaPrepare(prepare), J::KdaScan(scan), J::GatedNorm(norm)] => {
            step::kda(queue, conv, prepare, scan, norm)
        }
        others => others.iter().try_for_each(|op| op.run(queue)),
    }
}

impl Joinable {
    /// Runs it alone.
    pub(crate) fn run(&self, queue: &mut Queue) -> Result<()> {
        match self {
            Self::Combine(op) => feed::combine(queue, op),
            Self::HcPost(op) => hyper::hc_post(queue, op),
            Self::HcPre(op) => hyper::hc_pre(queue, op),
            Self::RmsNorm(op) => norm::rms_norm(queue, op),
            Self::KdaConv(op) => conv::kda_conv(queue, op),
            Self::KdaPrepare(op) => prepare::kda_prepare(queue, op),
            Self::KdaScan(op) => scan::kda_scan(queue, op),
            Self::GatedNorm(op) => norm::gated_norm(queue, op),
        }
    }
}

/// Whether two are the same rows of the same buffer.
pub(super) fn same(a: &Rows<CudaBuffer>, b: &Rows<CudaBuffer>) -> bool {
    a.buffer.at(a.first) == b.buffer.at(b.first) && (a.stride, a.width, a.rows) == (b.stride, b.width, b.rows)
}
