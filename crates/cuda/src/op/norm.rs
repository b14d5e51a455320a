//! Norms: a block for each row, or a warp for each head.

use flint_backend::ops::{GatedNorm, LayerNorm, RmsNorm};
use flint_backend::{Element, Result};

use super::{require, warps};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static RMS_NORM: Kernel = Kernel::new("rms_norm", "norms.cu");
static LAYER_NORM: Kernel = Kernel::new("layer_norm", "norms.cu");
static GATED_NORM: Kernel = Kernel::new("gated_norm", "norms.cu");

pub(crate) fn rms_norm(queue: &mut Queue, op: &RmsNorm<CudaBuffer>) -> Result<()> {
    const NAME: &str = "rms_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    op.weight.expect(NAME, Element::F32, x.width)?;
    let args = Args::new().rows(&out).rows(&x).pointer(&op.weight, 0).u32(x.width).f32(op.epsilon);
    queue.launch(&RMS_NORM, row_blocks(x.rows, x.width), args)
}

pub(crate) fn layer_norm(queue: &mut Queue, op: &LayerNorm<CudaBuffer>) -> Result<()> {
    const NAME: &str = "layer_norm";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    check(NAME, out, x)?;
    op.weight.expect(NAME, Element::F32, x.width)?;
    op.bias.expect(NAME, Element::F32, x.width)?;
    let args = Args::new()
        .rows(&out)
        .rows(&x)
        .pointer(&op.weight, 0)
        .pointer(&op.bias, 0)
        .u32(x.width)
        .f32(op.epsilon);
    queue.launch(&LAYER_NORM, row_blocks(x.rows, x.width), args)
}

pub(crate) fn gated_norm(queue: &mut Queue, op: &GatedNorm<CudaBuffer>) -> Result<()> {
    const NAME: &str = "gated_norm";
    let (out, o) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.o)?);
    let gate = RowsF32::new(NAME, &op.gate)?;
    check(NAME, out, o)?;
    check(NAME, out, gate)?;
    let dim = op.head_dim;
    require(NAME, dim > 0 && o.width.is_multiple_of(dim), || format!("{} channels of {dim}", o.width))?;
    op.weight.expect(NAME, Element::F32, dim)?;
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

/// A block for each row; its threads, and with them the tree of the sums, follow from the width alone.
fn row_blocks(rows: usize, width: usize) -> Grid {
    let threads = (width / 8).next_power_of_two().clamp(32, 512);
    Grid { blocks: [rows as u32, 1, 1], threads: threads as u32, shared: 0 }
}
