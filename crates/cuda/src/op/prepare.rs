//! What a KDA scan needs of a row: a warp for each head.

use flint_backend::ops::KdaPrepare;
use flint_backend::{Element, Result};

use super::{require, warps};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Queue};

static KDA_PREPARE: Kernel = Kernel::new("kda_prepare", "norms.cu").early();

/// Checks the operands of [`KdaPrepare`]: q, k and v, decay, beta.
pub(super) fn check(op: &KdaPrepare<CudaBuffer>) -> Result<[RowsF32; 3]> {
    const NAME: &str = "kda_prepare";
    let (qkv, decay) = (RowsF32::new(NAME, &op.qkv)?, RowsF32::new(NAME, &op.decay)?);
    let beta = RowsF32::new(NAME, &op.beta)?;
    let (dim, channels, heads) = (op.head_dim, decay.width, beta.width);
    require(NAME, dim > 0 && heads * dim == channels && qkv.width == 3 * channels, || {
        format!("{heads} heads of {dim}, {channels} channels of decay, q, k, v of {}", qkv.width)
    })?;
    require(NAME, qkv.rows == decay.rows && qkv.rows == beta.rows, || {
        format!("{}, {} and {} rows", qkv.rows, decay.rows, beta.rows)
    })?;
    op.dt_bias.require(NAME, Element::F32, channels)?;
    op.a_log.require(NAME, Element::F32, heads)?;
    Ok([qkv, decay, beta])
}

pub(crate) fn kda_prepare(queue: &mut Queue, op: &KdaPrepare<CudaBuffer>) -> Result<()> {
    let [qkv, decay, beta] = check(op)?;
    let (dim, heads) = (op.head_dim, beta.width);
    let args = Args::new()
        .rows(&qkv)
        .rows(&decay)
        .rows(&beta)
        .pointer(&op.dt_bias, 0)
        .pointer(&op.a_log, 0)
        .u32(qkv.rows)
        .u32(heads)
        .u32(dim)
        .u32(usize::from(op.lower_bound.is_some()))
        .f32(op.lower_bound.unwrap_or(0.0));
    queue.launch(&KDA_PREPARE, warps(qkv.rows * heads), args)
}
