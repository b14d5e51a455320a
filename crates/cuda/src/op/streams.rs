//! Rows that are gathered, copied into streams, and averaged over streams.

use flint_backend::ops::{GatherRows, MeanStreams, SpreadStreams};
use flint_backend::{Element, Result};

use super::{elementwise, require};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Queue};

static GATHER_ROWS: Kernel = Kernel::new("gather_rows", "streams.cu").early();
static SPREAD_STREAMS: Kernel = Kernel::new("spread_streams", "streams.cu").early();
static MEAN_STREAMS: Kernel = Kernel::new("mean_streams", "streams.cu").early();

/// Checks the operands of [`GatherRows`]: out and x.
pub(super) fn check_gather(op: &GatherRows<CudaBuffer>) -> Result<(RowsF32, RowsF32)> {
    const NAME: &str = "gather_rows";
    let (out, x) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.x)?);
    require(NAME, out.width == x.width, || format!("out has width {}, x {}", out.width, x.width))?;
    op.index.require(NAME, Element::U32, out.rows)?;
    Ok((out, x))
}

pub(crate) fn gather_rows(queue: &mut Queue, op: &GatherRows<CudaBuffer>) -> Result<()> {
    let (out, x) = check_gather(op)?;
    let args = Args::new().rows(&out).rows(&x).u32(x.rows).pointer(&op.index, 0).u32(out.width);
    queue.launch(&GATHER_ROWS, elementwise(out.rows, out.width), args)
}

pub(crate) fn spread_streams(queue: &mut Queue, op: &SpreadStreams<CudaBuffer>) -> Result<()> {
    const NAME: &str = "spread_streams";
    let (streams, x) = (RowsF32::new(NAME, &op.streams)?, RowsF32::new(NAME, &op.x)?);
    let count = stream_count(NAME, streams, x)?;
    let args = Args::new().rows(&streams).rows(&x).u32(x.width).u32(count);
    queue.launch(&SPREAD_STREAMS, elementwise(x.rows, x.width), args)
}

pub(crate) fn mean_streams(queue: &mut Queue, op: &MeanStreams<CudaBuffer>) -> Result<()> {
    const NAME: &str = "mean_streams";
    let (out, streams) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.streams)?);
    let count = stream_count(NAME, streams, out)?;
    let args = Args::new().rows(&out).rows(&streams).u32(out.width).u32(count);
    queue.launch(&MEAN_STREAMS, elementwise(out.rows, out.width), args)
}

/// How many whole streams of `x`'s width `streams` holds.
pub(super) fn stream_count(op: &'static str, streams: RowsF32, x: RowsF32) -> Result<usize> {
    require(op, x.width > 0 && streams.width > 0 && streams.width.is_multiple_of(x.width), || {
        format!("streams of width {} for rows of width {}", streams.width, x.width)
    })?;
    require(op, streams.rows == x.rows, || format!("{} and {} rows", streams.rows, x.rows))?;
    Ok(streams.width / x.width)
}
