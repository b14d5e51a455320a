//! Operations of a step that wait for the next one, to run with it as one launch. It changes speed, never bits: a joined
//! kernel has the formulas and the orders of its parts, and leaves in memory what they leave.

use flint_backend::Result;
use flint_backend::ops::{self, Rows};

use super::step::Before;
use super::{append, conv, enter, feed, hyper, norm, prepare, route, router, scan, select, step, streams};
use crate::queue::Queue;
use crate::{CudaBuffer, CudaMatrix, product};

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
    LayerNorm(ops::LayerNorm<CudaBuffer>),
    DsaAppend(ops::DsaAppend<CudaBuffer>),
    Linear(ops::Linear<CudaBuffer, CudaMatrix>),
    Route(ops::Route<CudaBuffer>),
    SwiGlu(ops::SwiGlu<CudaBuffer>),
    SelectPools(ops::SelectPools<CudaBuffer>),
    SpreadStreams(ops::SpreadStreams<CudaBuffer>),
    MeanStreams(ops::MeanStreams<CudaBuffer>),
    GatherRows(ops::GatherRows<CudaBuffer>),
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
        self.held.push(op);
        if ends(&self.held) { self.flush(queue) } else { Ok(()) }
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
    use Joinable as J;
    match (held, op) {
        ([], J::Combine(op)) => op.out.rows <= MOST_ROWS,
        ([], J::HcPost(op)) => step::mixes(op),
        ([], J::HcPre(op)) => step::enters(op),
        ([], J::KdaConv(op)) => step::convolves(op),
        ([], J::RmsNorm(op)) => enter::begins(op),
        ([], J::Linear(op)) => router::multiplies(op) || step::makes_heads(op),
        ([], J::SwiGlu(_) | J::GatherRows(_)) => true,
        ([], J::SpreadStreams(op)) => step::spreads(op),
        ([J::SpreadStreams(last)], J::HcPre(op)) => {
            step::enters(op) && same(&last.streams, &op.streams) && step::spreads_apart(last, op)
        }
        ([J::HcPost(post)], J::MeanStreams(op)) => step::means(None, post, op),
        ([J::Combine(combine), J::HcPost(post)], J::MeanStreams(op)) => step::means(Some(combine), post, op),
        ([J::GatherRows(last)], J::RmsNorm(op)) => {
            same(&last.out, &op.x) && same(&op.x, &op.out) && !step::in_one_row(&last.out, &last.x)
        }
        ([J::Combine(last)], J::HcPost(op)) => {
            step::mixes(op) && same(&last.out, &op.y) && step::apart(last, op)
        }
        ([.., J::HcPost(last)], J::HcPre(op)) => {
            step::enters(op) && same(&last.streams, &op.streams) && step::collapses_apart(held, op)
        }
        ([.., J::HcPre(last)], J::RmsNorm(op)) => same(&last.collapsed, &op.x) && same(&op.x, &op.out),
        ([J::Linear(f)], J::Linear(op)) => step::makes_both(f, op),
        ([J::Linear(f), J::Linear(gate)], J::KdaConv(op)) => {
            step::convolves(op) && op.out.rows == f.out.rows && step::multiplies_apart(&[f, gate], &op.out)
        }
        ([J::Linear(f), _, J::KdaConv(last)], J::KdaPrepare(op)) => {
            let made = same(&f.out, &op.decay);
            made && same(&last.out, &op.qkv) && op.head_dim == step::HEAD_DIM
        }
        ([J::KdaConv(last)], J::KdaPrepare(op)) => same(&last.out, &op.qkv) && op.head_dim == step::HEAD_DIM,
        ([.., J::KdaConv(first), J::KdaPrepare(last)], J::KdaScan(op)) => {
            let same_rows =
                same(&last.qkv, &op.qkv) && same(&last.decay, &op.decay) && same(&last.beta, &op.beta);
            same_rows && step::same_spans(&first.spans, &op.spans) && op.head_dim == step::HEAD_DIM
        }
        ([before @ .., J::KdaScan(last)], J::GatedNorm(op)) => {
            let made = match before {
                [J::Linear(f), J::Linear(gate), ..] => {
                    same(&gate.out, &op.gate) && step::multiplies_apart(&[f, gate], &op.out)
                }
                _ => true,
            };
            made && same(&last.out, &op.o) && same(&op.o, &op.out) && op.head_dim == step::HEAD_DIM
        }
        ([J::RmsNorm(low)], J::RmsNorm(op)) => enter::norms_latents(low, op),
        ([J::RmsNorm(low), J::RmsNorm(latents)], J::LayerNorm(op)) => enter::norms_keys(low, latents, op),
        ([J::RmsNorm(low), J::RmsNorm(latents)], J::DsaAppend(op)) => enter::appends(low, latents, None, op),
        ([J::RmsNorm(low), J::RmsNorm(latents), J::LayerNorm(keys)], J::DsaAppend(op)) => {
            enter::appends(low, latents, Some(keys), op)
        }
        // The product of the queries may come before a choice that reads none of them.
        ([J::RmsNorm(low), .., J::DsaAppend(_)], J::Linear(op)) => same(&low.out, &op.x),
        ([.., J::DsaAppend(append), J::Linear(_)], J::SelectPools(op)) => enter::picks_all(append, op),
        ([J::Linear(product)], J::Route(op)) => router::chooses(product, op),
        ([J::SwiGlu(last)], J::SwiGlu(op)) => {
            let reads = [&op.gate, &op.up];
            let apart =
                |written: &Rows<CudaBuffer>, rows: &Rows<CudaBuffer>| !step::in_one_row(written, rows);
            let others = [&last.out, &last.gate, &last.up];
            others.into_iter().all(|rows| apart(&op.out, rows))
                && reads.into_iter().all(|rows| apart(&last.out, rows))
        }
        _ => false,
    }
}

/// Whether nothing can follow what waits.
fn ends(held: &[Joinable]) -> bool {
    use Joinable as J;
    matches!(
        held,
        [.., J::HcPre(_) | J::GatherRows(_), J::RmsNorm(_)]
            | [.., J::GatedNorm(_) | J::Route(_) | J::MeanStreams(_) | J::SelectPools(_)]
            | [J::SwiGlu(_), J::SwiGlu(_)]
    )
}

/// Runs operations that were found to follow each other.
fn run(queue: &mut Queue, held: &[Joinable]) -> Result<()> {
    use Joinable as J;
    match held {
        [before @ .., J::HcPre(pre), J::RmsNorm(norm)] => enter_site(queue, before, pre, Some(norm)),
        [before @ .., J::HcPre(pre)] => enter_site(queue, before, pre, None),
        [J::Combine(combine), J::HcPost(post), J::MeanStreams(mean)] => {
            step::leave(queue, Some(combine), post, mean)
        }
        [J::HcPost(post), J::MeanStreams(mean)] => step::leave(queue, None, post, mean),
        [J::GatherRows(gather), J::RmsNorm(norm)] => norm::gather_norm(queue, gather, norm),
        [J::KdaConv(conv), J::KdaPrepare(prepare), J::KdaScan(scan), J::GatedNorm(norm)] => {
            step::kda(queue, None, conv, prepare, scan, norm)
        }
        [
            J::Linear(f),
            J::Linear(gate),
            J::KdaConv(conv),
            J::KdaPrepare(prepare),
            J::KdaScan(scan),
            J::GatedNorm(norm),
        ] => step::kda(queue, Some((f, gate)), conv, prepare, scan, norm),
        [J::RmsNorm(low), J::RmsNorm(latents), rest @ ..] => enter_dsa(queue, (low, latents), rest),
        [J::Linear(product), J::Route(route)] => router::route_rows(queue, product, route),
        [J::SwiGlu(one), J::SwiGlu(other)] => feed::activate(queue, one, Some(other)),
        others => others.iter().try_for_each(|op| op.run(queue)),
    }
}

/// The begin of a site behind what waits before it.
fn enter_site(
    queue: &mut Queue,
    before: &[Joinable],
    pre: &ops::HcPre<CudaBuffer, CudaMatrix>,
    norm: Option<&ops::RmsNorm<CudaBuffer>>,
) -> Result<()> {
    use Joinable as J;
    let before = match before {
        [J::Combine(combine), J::HcPost(post)] => Before::Site(Some(combine), post),
        [J::HcPost(post)] => Before::Site(None, post),
        [J::SpreadStreams(spread)] => Before::Spread(spread),
        _ => Before::Nothing,
    };
    step::between(queue, &before, pre, norm)
}

/// Two norms, and what of a DSA layer's append waits behind them.
fn enter_dsa(
    queue: &mut Queue,
    (low, latents): (&ops::RmsNorm<CudaBuffer>, &ops::RmsNorm<CudaBuffer>),
    rest: &[Joinable],
) -> Result<()> {
    use Joinable as J;
    let (keys, rest) = match rest {
        [J::LayerNorm(keys), rest @ ..] => (Some(keys), rest),
        rest => (None, rest),
    };
    let [J::DsaAppend(append), rest @ ..] = rest else {
        norm::rms_norm(queue, low)?;
        norm::rms_norm(queue, latents)?;
        keys.map_or(Ok(()), |keys| norm::layer_norm(queue, keys))?;
        return rest.iter().try_for_each(|op| op.run(queue));
    };
    let picks = match rest {
        [J::Linear(_), J::SelectPools(picks)] => Some(picks),
        _ => None,
    };
    enter::enter(queue, low, latents, keys, append, picks)?;
    rest.iter().filter(|op| !matches!(op, J::SelectPools(_))).try_for_each(|op| op.run(queue))
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
            Self::LayerNorm(op) => norm::layer_norm(queue, op),
            Self::DsaAppend(op) => append::dsa_append(queue, op),
            Self::Linear(op) => product::linear(queue, op),
            Self::Route(op) => route::route(queue, op),
            Self::SwiGlu(op) => feed::swiglu(queue, op),
            Self::SelectPools(op) => select::select_pools(queue, op),
            Self::SpreadStreams(op) => streams::spread_streams(queue, op),
            Self::MeanStreams(op) => streams::mean_streams(queue, op),
            Self::GatherRows(op) => streams::gather_rows(queue, op),
        }
    }
}

/// Whether two are the same rows of the same buffer.
pub(super) fn same(a: &Rows<CudaBuffer>, b: &Rows<CudaBuffer>) -> bool {
    a.buffer.at(a.first) == b.buffer.at(b.first) && (a.stride, a.width, a.rows) == (b.stride, b.width, b.rows)
}
