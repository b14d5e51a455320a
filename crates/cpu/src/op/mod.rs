//! Every operation that is not a product: one file for each concept.
//!
//! An operation checks its shapes, then runs tasks that write disjoint elements. A kernel is written over
//! [`Lanes`](crate::lanes::Lanes) and works on raw rows, because many operations may run in place.

mod append;
mod attend;
mod conv;
mod feed;
mod hyper;
mod norm;
mod pages;
mod panel;
mod prepare;
mod route;
mod scan;
mod select;
mod streams;
mod top;

use std::ops::Range;

use flint_backend::{Error, Result};

use crate::Cpu;
use crate::lanes::{LANES, Lanes};

pub(crate) use append::dsa_append;
pub(crate) use attend::attend;
pub(crate) use conv::kda_conv;
pub(crate) use feed::{combine, swiglu};
pub(crate) use hyper::{hc_post, hc_pre};
pub(crate) use norm::{gated_norm, layer_norm, rms_norm};
pub(crate) use prepare::kda_prepare;
pub(crate) use route::route;
pub(crate) use scan::kda_scan;
pub(crate) use select::select_pools;
pub(crate) use streams::{gather_rows, mean_streams, spread_streams};
pub(crate) use top::top_logits;

/// Elements below which a share of the work is not worth handing to a thread: about 5 µs of simple arithmetic,
/// several times the cost of waking a waiting thread.
const MIN_SHARE: usize = 1 << 15;

/// Refuses an operation whose shapes contradict each other.
fn require(op: &'static str, holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Shape { op, what: what() }) }
}

/// Refuses spans `(first row, rows)` that share a row: their tasks would write it at the same time.
fn require_apart(op: &'static str, spans: impl Iterator<Item = (usize, usize)>) -> Result<()> {
    let mut spans: Vec<(usize, usize)> = spans.filter(|&(_, rows)| rows > 0).collect();
    spans.sort_unstable();
    let shared = spans.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0);
    require(op, shared.is_none(), || format!("two spans hold row {}", shared.map_or(0, |pair| pair[1].0)))
}

/// Runs `task` over ranges that cover `0..items`, on the calling thread when there is little to do.
/// `work` is the number of elements that an item touches (more when each costs much).
fn spread(cpu: &Cpu, items: usize, work: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
    // Four ranges for each thread even out different speeds of the threads.
    let most = cpu.pool.threads() * 4;
    let shares = (items.saturating_mul(work) / MIN_SHARE).min(most).min(items);
    if shares <= 1 || cpu.pool.threads() == 1 {
        task(0..items);
        return;
    }
    cpu.pool.run(shares, &|share| task(items * share / shares..items * (share + 1) / shares));
}

/// `Σ f(x)` over four vectors of chains (element `i` in chain `i mod 64`), folded pairwise; `f(chain, values, count)`
/// takes the next `count` values of a vector of chains, zeros behind them.
///
/// # Safety
/// `x` is valid for reading `width` values.
#[inline(always)]
unsafe fn fold_row<L: Lanes>(x: *const f32, width: usize, f: impl Fn(L, L, usize) -> L) -> f32 {
    let mut chains = [L::zero(); 4];
    let whole = width / (4 * LANES) * (4 * LANES);
    for at in (0..whole).step_by(4 * LANES) {
        for (i, chain) in chains.iter_mut().enumerate() {
            // SAFETY: `at + 64` is at most `width`.
            *chain = f(*chain, unsafe { L::read(x.add(at + i * LANES)) }, LANES);
        }
    }
    for (i, chain) in chains.iter_mut().enumerate() {
        let first = whole + i * LANES;
        if first < width {
            // SAFETY: `first` is below `width`, and no more than what is left is read.
            *chain = f(*chain, unsafe { L::read_some(x.add(first), width - first) }, width - first);
        }
    }
    chains[0].add(chains[1]).add(chains[2].add(chains[3])).sum()
}

/// `Σ x²` in the order of [`fold_row`].
///
/// # Safety
/// `x` is valid for reading `width` values.
#[inline(always)]
unsafe fn sum_of_squares<L: Lanes>(x: *const f32, width: usize) -> f32 {
    // SAFETY: as the caller vouches.
    unsafe { fold_row::<L>(x, width, |chain, values, _| values.fma(values, chain)) }
}

/// The first `count` lanes, zeros in the others.
#[inline(always)]
fn only<L: Lanes>(values: L, count: usize) -> L {
    if count >= LANES {
        return values;
    }
    let mut array = [0.0; LANES];
    values.store(&mut array);
    array[count..].fill(0.0);
    L::load(&array)
}
