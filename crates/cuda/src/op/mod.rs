//! Every operation that is not a product: one file for each concept.
//!
//! An operation checks its shapes, computes the grid, and queues its launches. Grids follow from rows, widths and the
//! number of spans; what moves from step to step (positions, pages) goes through tables.

pub(crate) mod append;
pub(crate) mod attend;
pub(crate) mod conv;
mod enter;
pub(crate) mod feed;
pub(crate) mod hyper;
pub(crate) mod join;
pub(crate) mod norm;
pub(crate) mod prepare;
pub(crate) mod route;
mod router;
pub(crate) mod scan;
pub(crate) mod select;
mod spans;
mod step;
pub(crate) mod streams;
pub(crate) mod top;

use flint_backend::{Error, Result};

use crate::queue::Grid;

/// Refuses an operation whose shapes contradict each other.
fn require(op: &'static str, holds: bool, what: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Shape { op, what: what() }) }
}

/// Refuses spans `(first row, rows)` that share a row: their blocks would write it at the same time.
fn require_apart(op: &'static str, spans: impl Iterator<Item = (usize, usize)>) -> Result<()> {
    let mut spans: Vec<(usize, usize)> = spans.filter(|&(_, rows)| rows > 0).collect();
    spans.sort_unstable();
    let shared = spans.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0);
    require(op, shared.is_none(), || format!("two spans hold row {}", shared.map_or(0, |pair| pair[1].0)))
}

/// Threads of a block of an elementwise kernel.
const THREADS: u32 = 256;
/// Elements that such a thread takes at least, where a row is long enough.
const EACH: usize = 4;

/// Rows × pieces of a row of `width` elements.
fn elementwise(rows: usize, width: usize) -> Grid {
    let pieces = width.div_ceil(THREADS as usize * EACH).max(1);
    Grid { blocks: [rows as u32, pieces as u32, 1], threads: THREADS, shared: 0 }
}

/// A warp for each of `items`.
fn warps(items: usize) -> Grid {
    const WARPS: usize = 8;
    Grid { blocks: [items.div_ceil(WARPS) as u32, 1, 1], threads: 32 * WARPS as u32, shared: 0 }
}
