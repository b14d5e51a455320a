//! Norms: a block for each row, or a warp for each head.

use flint_backend::ops::{GatedNorm, GatherRows, LayerNorm, RmsNorm};
use flint_backend::{Element, Result};

use super::{require, streams, warps};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static RMS_NORM: Kernel = Kernel::new("rms_norm", "norms.cu").early();
static LAYER_NORM: Kernel = Kernel::new("layer_norm", "norms.cu").early();
static GATHER_NORM: Kernel = Kernel::new("gather_norm", "norms.cu").early();
static GATED_NORM: Kernel = Kernel::new("gated_norm", "norms.cu").early();

/// Checks the operands of [`RmsNorm`]: out and x.
pub(super) fn check_rms(op: &RmsNorm<CudaBuffer>) -> Result<(RowsF32, RowsF32)> {
    const NAME: &str = "rms_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    op.weight.require(NAME, Element::F32, x.width)?;
    Ok((out, x))
}

pub(crate) fn rms_norm(queue: &mut Queue, op: &RmsNorm<CudaBuffer>) -> Result<()> {
    let (out, x) = check_rms(op)?;
    let args = Args::new().rows(&out).rows(&x).pointer(&op.weight, 0).u32(x.width).f32(op.epsilon);
    queue.launch(&RMS_NORM, row_blocks(x.rows, x.width), args)
}

/// Rows that are gathered, and their norm in place.
pub(super) fn gather_norm(
    queue: &mut Queue,
    gather: &GatherRows<CudaBuffer>,
    op: &RmsNorm<CudaBuffer>,
) -> Result<()> {
    let (out, x) = streams::check_gather(gather)?;
    check_rms(op)?;
    let args = Args::new()
        .rows(&out)
        .rows(&x)
        .u32(x.rows)
        .pointer(&gather.index, 0)
        .pointer(&op.weight, 0)
        .u32(x.width)
        .f32(op.epsilon);
    queue.launch(&GATHER_NORM, row_blocks(out.rows, x.width), args)
}

/// Checks the operands of [`LayerNorm`]: out and x.
pub(super) fn check_layer(op: &LayerNorm<CudaBuffer>) -> Result<(RowsF32, RowsF32)> {
    const NAME: &str = "layer_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    op.weight.require(NAME, Element::F32, x.width)?;
    op.bias.require(NAME, Element::F32, x.width)?;
    Ok((out, x))
}

pub(crate) fn layer_norm(queue: &mut Queue, op: &LayerNorm<CudaBuffer>) -> Result<()> {
    let (out, x) = check_layer(op)?;
    let args = Args::new()
        .rows(&out)
        .rows(&x)
        .pointer(&op.weight, 0)
        .pointer(&op.bias, 0)
        .u32(x.width)
        .f32(op.epsilon);
    queue.launch(&LAYER_NORM, row_blocks(x.rows, x.width), args)
}

/// Checks the operands of [`GatedNorm`]: out, o, gate.
pub(super) fn check_gated(op: &GatedNorm<CudaBuffer>) -> Result<[RowsF32; 3]> {
    const NAME: &str = "gated_norm";
    let (out, o) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.o)?);
    let gate = RowsF32::new(NAME, &op.gate)?;
    check(NAME, out, o)?;
    check(NAME, out, gate)?;
    let dim = op.head_dim;
    require(NAME, dim > 0 && o.width.is_multiple_of(dim), || format!("{} channels of {dim}", o.width))?;
    op.weight.require(NAME, Element::F32, dim)?;
    Ok([out, o, gate])
}

pub(crate) fn gated_norm(queue: &mut Queue, op: &GatedNorm<CudaBuffer>) -> Result<()> {
    let [out, o, gate] = check_gated(op)?;
    let dim = op.head_dim;
    let heads = o.width / dim;
    let args = Args::new()
        .rows(&out)
        .rows(&o)
        .rows(&gate)
        .pointer(&op.weight, 0)
        .u32(o.rows)
        .u32(heads)
        .u32(dim)
        .f32(op.epsilon);
    queue.launch(&GATED_NORM, warps(o.rows * heads), args)
}

fn check(op: &'static str, out: RowsF32, x: RowsF32) -> Result<()> {
    require(op, out.width == x.width && out.rows == x.rows && x.width > 0, || {
        format!("{} × {} from {} × {}", out.rows, out.width, x.rows, x.width)
    })
}

/// Threads of a block that norms a row: they, and with them the tree of the sums, follow from the width alone.
pub(super) fn row_threads(width: usize) -> u32 {
    (width / 8).next_power_of_two().clamp(32, 512) as u32
}

/// A block for each row.
fn row_blocks(rows: usize, width: usize) -> Grid {
    Grid { blocks: [rows as u32, 1, 1], threads: row_threads(width), shared: 0 }
}
