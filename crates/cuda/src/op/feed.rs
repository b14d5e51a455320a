//! The clamped SwiGLU and the sum over a row's experts.

use flint_backend::Result;
use flint_backend::ops::{Combine, SwiGlu};

use super::{elementwise, require};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Queue};

static SWIGLU: Kernel = Kernel::new("swiglu", "feed.cu").early();
static COMBINE: Kernel = Kernel::new("combine", "feed.cu").early();

/// Checks the operands of [`SwiGlu`]: out, gate, up.
fn check_swiglu(op: &SwiGlu<CudaBuffer>) -> Result<[RowsF32; 3]> {
    const NAME: &str = "swiglu";
    let (out, gate) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.gate)?);
    let up = RowsF32::new(NAME, &op.up)?;
    for (what, other) in [("gate", gate), ("up", up)] {
        require(NAME, out.width == other.width && out.rows == other.rows, || {
            format!("{} × {} from {what} {} × {}", out.rows, out.width, other.rows, other.width)
        })?;
    }
    Ok([out, gate, up])
}

pub(crate) fn swiglu(queue: &mut Queue, op: &SwiGlu<CudaBuffer>) -> Result<()> {
    activate(queue, op, None)
}

/// One activation, or two that do not touch each other's rows.
pub(super) fn activate(
    queue: &mut Queue,
    op: &SwiGlu<CudaBuffer>,
    other: Option<&SwiGlu<CudaBuffer>>,
) -> Result<()> {
    let [out, gate, up] = check_swiglu(op)?;
    let args = Args::new().rows(&out).rows(&gate).rows(&up).u32(out.rows).u32(out.width).f32(op.limit);
    let (args, rows, width) = if let Some(other) = other {
        let [other_out, gate, up] = check_swiglu(other)?;
        let args = args.rows(&other_out).rows(&gate).rows(&up).u32(other_out.width).f32(other.limit);
        (args, out.rows + other_out.rows, out.width.max(other_out.width))
    } else {
        let args = (0..3).fold(args, |args, _| args.address(0).u32(0)).u32(0).f32(0.0);
        (args, out.rows, out.width)
    };
    queue.launch(&SWIGLU, elementwise(rows, width), args)
}

/// Checks the operands of [`Combine`]: out, pairs, weights, shared.
pub(super) fn check_combine(op: &Combine<CudaBuffer>) -> Result<(RowsF32, RowsF32, RowsF32, RowsF32)> {
    const NAME: &str = "combine";
    let (out, pairs) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.pairs)?);
    let (weights, shared) = (RowsF32::new(NAME, &op.weights)?, RowsF32::new(NAME, &op.shared)?);
    let picks = weights.width;
    require(NAME, pairs.width == out.width && shared.width == out.width, || {
        format!("widths {}, {} and {} differ", out.width, pairs.width, shared.width)
    })?;
    let rows_agree = weights.rows == out.rows && shared.rows == out.rows && pairs.rows == out.rows * picks;
    require(NAME, rows_agree, || {
        let (pairs, weights, shared) = (pairs.rows, weights.rows, shared.rows);
        format!("{} rows from {pairs} pairs, {weights} weights × {picks}, {shared} shared rows", out.rows)
    })?;
    Ok((out, pairs, weights, shared))
}

pub(crate) fn combine(queue: &mut Queue, op: &Combine<CudaBuffer>) -> Result<()> {
    let (out, pairs, weights, shared) = check_combine(op)?;
    let picks = weights.width;
    let args = Args::new().rows(&out).rows(&pairs).rows(&weights).rows(&shared).u32(out.width).u32(picks);
    queue.launch(&COMBINE, elementwise(out.rows, out.width), args)
}
