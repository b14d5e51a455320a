//! The causal depthwise convolution of a KDA layer.

use flint_backend::ops::KdaConv;
use flint_backend::{Element, Result};

use super::require;
use super::spans::{Chunk, KdaPart, chunks, kda_parts};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static KDA_CONV: Kernel = Kernel::new("kda_conv", "conv.cu");

/// Taps that the kernel has room for.
const MAX_TAPS: usize = 8;
/// Rows of a block: the taps are read once for all of them. At least `MAX_TAPS - 1`; the kernel's `CHUNK_ROWS`.
const CHUNK_ROWS: usize = 32;
/// Channels of a block.
const CHANNELS: usize = 256;

/// Checks the operands of [`KdaConv`]: out and u.
pub(super) fn check(op: &KdaConv<CudaBuffer>) -> Result<(RowsF32, RowsF32)> {
    const NAME: &str = "kda_conv";
    let (out, u) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.u)?);
    let (width, taps) = (u.width, op.tap_count);
    require(NAME, out.width == width && out.rows == u.rows, || {
        format!("{} × {} from {} × {width}", out.rows, out.width, u.rows)
    })?;
    require(NAME, (1..=MAX_TAPS).contains(&taps), || format!("{taps} taps, 1 to {MAX_TAPS} are possible"))?;
    op.taps.require(NAME, Element::F32, width * taps)?;
    for span in &op.spans {
        let rows = taps - 1 + span.logged.max(span.drafts);
        span.window.require(NAME, Element::F32, rows * width)?;
    }
    Ok((out, u))
}

pub(crate) fn kda_conv(queue: &mut Queue, op: &KdaConv<CudaBuffer>) -> Result<()> {
    let (out, u) = check(op)?;
    let (width, taps) = (u.width, op.tap_count);
    let parts = kda_parts("kda_conv", &op.spans, u.rows)?;
    let rows: Vec<usize> = op.spans.iter().map(|span| span.sure + span.drafts).collect();
    let chunks = chunks(&rows, u.rows, CHUNK_ROWS);
    let blocks = [chunks.len() as u32, width.div_ceil(CHANNELS) as u32, 1];
    let args = Args::new()
        .rows(&out)
        .rows(&u)
        .pointer(&op.taps, 0)
        .u32(taps)
        .u32(width)
        .table(queue.table(&parts, parts.len() * size_of::<KdaPart>())?)
        .table(queue.table(&chunks, chunks.len() * size_of::<Chunk>())?);
    queue.launch(&KDA_CONV, Grid { blocks, threads: CHANNELS as u32, shared: 0 }, args)
}
