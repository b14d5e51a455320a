//! Hyper-connections: slices of the products with the streams in many blocks, then a block for each row.

use flint_backend::ops::{HcPost, HcPre};
use flint_backend::{Element, Error, Result};
use flint_weights::PlainType;

use super::streams::stream_count;
use super::{elementwise, require};
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};
use crate::{CudaBuffer, CudaMatrix};

static HC_PRODUCTS: Kernel = Kernel::new("hc_products", "hyper.cu");
static HC_FINISH: Kernel = Kernel::new("hc_finish", "hyper.cu");
static HC_POST: Kernel = Kernel::new("hc_post", "hyper.cu");

/// Streams that the kernels have room for.
const MAX_STREAMS: usize = 8;
/// Columns of a slice, and chains of one: as in the kernel.
const SLICE: usize = 512;
const CHAINS: usize = 8;

pub(crate) fn hc_pre(queue: &mut Queue, op: &HcPre<CudaBuffer, CudaMatrix>) -> Result<()> {
    const NAME: &str = "hc_pre";
    let (collapsed, streams) = (RowsF32::new(NAME, &op.collapsed)?, RowsF32::new(NAME, &op.streams)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let n = check(NAME, streams, collapsed, mix)?;
    let (outputs, width, rows) = (2 * n + n * n, streams.width, streams.rows);
    op.base.expect(NAME, Element::F32, outputs)?;
    op.scale.expect(NAME, Element::F32, 3)?;
    let function = op.function.plain().ok_or_else(|| Error::Unsupported {
        name: NAME.into(),
        backend: "cuda",
        what: "a hyper-connection function of codes, or of several parts".into(),
        remedy: "convert the checkpoint with these tensors in bf16 or fp32",
    })?;
    require(NAME, function.rows == outputs && function.cols == width, || {
        format!("a function {} × {} for {outputs} coefficients of {width}", function.rows, function.cols)
    })?;
    let numbers = match function.numbers {
        PlainType::Bf16 => 0,
        PlainType::F16 => 1,
        PlainType::F32 => 2,
    };
    let slices = width.div_ceil(SLICE);
    let sums = queue.scratch(NAME, rows * slices * (outputs + 1) * 4)?;
    let args = Args::new()
        .address(sums)
        .rows(&streams)
        .address(function.address)
        .u32(numbers)
        .u32(width)
        .u32(outputs);
    // Rows of a block share the function's numbers; few rows want many blocks.
    let each = if rows < 64 { 1 } else { 16 };
    let args = args.u32(rows).u32(each);
    let threads = ((outputs + 1) * CHAINS).next_multiple_of(32) as u32;
    queue.launch(
        &HC_PRODUCTS,
        Grid { blocks: [slices as u32, rows.div_ceil(each) as u32, 1], threads, shared: 0 },
        args,
    )?;
    let args = Args::new()
        .rows(&collapsed)
        .rows(&mix)
        .rows(&streams)
        .address(sums)
        .u32(slices)
        .u32(collapsed.width)
        .u32(n)
        .pointer(&op.base, 0)
        .pointer(&op.scale, 0)
        .f32(op.norm_epsilon)
        .f32(op.hc_epsilon)
        .u32(op.rounds);
    queue.launch(&HC_FINISH, Grid { blocks: [rows as u32, 1, 1], threads: 512, shared: 0 }, args)
}

pub(crate) fn hc_post(queue: &mut Queue, op: &HcPost<CudaBuffer>) -> Result<()> {
    const NAME: &str = "hc_post";
    let (streams, y) = (RowsF32::new(NAME, &op.streams)?, RowsF32::new(NAME, &op.y)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let n = check(NAME, streams, y, mix)?;
    let args = Args::new().rows(&streams).rows(&y).rows(&mix).u32(y.width).u32(n);
    queue.launch(&HC_POST, elementwise(y.rows, y.width), args)
}

/// Checks the shapes and returns the number of streams.
fn check(op: &'static str, streams: RowsF32, x: RowsF32, mix: RowsF32) -> Result<usize> {
    let n = stream_count(op, streams, x)?;
    require(op, (1..=MAX_STREAMS).contains(&n), || format!("{n} streams, 1 to {MAX_STREAMS} can be mixed"))?;
    require(op, mix.width == n + n * n, || format!("a mix of width {} for {n} streams", mix.width))?;
    require(op, mix.rows == x.rows, || format!("{} and {} rows", mix.rows, x.rows))?;
    Ok(n)
}
