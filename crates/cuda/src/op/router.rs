//! A router's logits and its choice as one launch: see `join.rs`.

use flint_backend::Result;
use flint_backend::ops::{Linear, Route};
use flint_weights::PlainType;

use super::join::{MOST_ROWS, same};
use super::route::{self, FLAT_EXPERTS, Routed};
use super::step::in_one_row;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::matrix::Plain;
use crate::queue::{Args, Grid, Queue};
use crate::{CudaBuffer, CudaMatrix};

static ROUTER_16: Kernel = Kernel::new("router_16", "router.cu").early();
static ROUTER_32: Kernel = Kernel::new("router_32", "router.cu").early();

/// As in `kernels/router.cu`: inputs of a chain, chains of a logit, logits and rows of a block, picks of a row.
const CHAIN: usize = 64;
const MOST_CHAINS: usize = 64;
const OUTPUTS: usize = 4;
const GROUP: usize = 4;
const MOST_PICKS: usize = 32;
/// Floats of a chain's inputs in shared memory.
const ROOM: usize = CHAIN + 4;

/// The matrix, where the joined kernel has its numbers.
fn function(op: &Linear<CudaBuffer, CudaMatrix>) -> Option<Plain> {
    let known = |plain: &Plain| matches!(plain.numbers, PlainType::Bf16 | PlainType::F32);
    op.matrix.plain().filter(known).filter(|plain| plain.address.is_multiple_of(16))
}

/// Whether a product can be that of a router.
pub(super) fn multiplies(op: &Linear<CudaBuffer, CudaMatrix>) -> bool {
    let Some(function) = function(op) else { return false };
    let (experts, inputs) = (function.rows, function.cols);
    let fits = experts <= FLAT_EXPERTS && inputs.is_multiple_of(CHAIN) && inputs <= CHAIN * MOST_CHAINS;
    let aligned = op.x.stride.is_multiple_of(4) && op.x.buffer.at(op.x.first).is_multiple_of(16);
    let shapes = op.x.width == inputs && op.out.width == experts && op.x.rows == op.out.rows;
    fits && aligned && shapes && (1..=MOST_ROWS).contains(&op.x.rows)
}

/// Whether a choice is made from a product's logits alone.
pub(super) fn chooses(product: &Linear<CudaBuffer, CudaMatrix>, op: &Route<CudaBuffer>) -> bool {
    let apart = !in_one_row(&product.x, &op.logits)
        && !in_one_row(&product.x, &op.weights)
        && !in_one_row(&op.logits, &op.weights);
    same(&product.out, &op.logits) && apart && op.groups <= 1 && op.picks_per_row <= MOST_PICKS
}

/// The product and the choice.
pub(super) fn route_rows(
    queue: &mut Queue,
    product: &Linear<CudaBuffer, CudaMatrix>,
    op: &Route<CudaBuffer>,
) -> Result<()> {
    let Some(function) = function(product) else { return Ok(()) };
    let x = RowsF32::new("linear", &product.x)?;
    let Routed { weights, logits, .. } = route::check(op)?;
    let groups = x.rows.div_ceil(GROUP);
    let args = Args::new()
        .pointer(&op.picks, 0)
        .rows(&weights)
        .rows(&logits)
        .rows(&x)
        .address(function.address)
        .pointer(&op.bias, 0)
        .address(queue.counters("router groups", MOST_ROWS.div_ceil(GROUP))?)
        .u32(logits.width)
        .u32(x.width)
        .u32(x.rows)
        .u32(op.picks_per_row)
        .u32(usize::from(op.normalise))
        .f32(op.scaling);
    let shared = x.rows.min(GROUP) * (x.width / CHAIN) * ROOM * 4;
    let grid = Grid {
        blocks: [logits.width.div_ceil(OUTPUTS) as u32, groups as u32, 1],
        threads: (MOST_CHAINS * OUTPUTS) as u32,
        shared: shared as u32,
    };
    let kernel = if function.numbers == PlainType::F32 { &ROUTER_32 } else { &ROUTER_16 };
    queue.launch(kernel, grid, args)
}
