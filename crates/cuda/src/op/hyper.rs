//! Hyper-connections: slices of the products with the streams in many blocks. A row's last block does the rest, or a launch
//! of its own when there are many rows.

use flint_backend::ops::{HcPost, HcPre};
use flint_backend::{Element, Error, Result};
use flint_weights::PlainType;

use super::streams::stream_count;
use super::{elementwise, require};
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};
use crate::{CudaBuffer, CudaMatrix};

static HC_PRE: Kernel = Kernel::new("hc_pre", "hyper.cu");
static HC_PRODUCTS: Kernel = Kernel::new("hc_products", "hyper.cu");
static HC_FINISH: Kernel = Kernel::new("hc_finish", "hyper.cu");
static HC_POST: Kernel = Kernel::new("hc_post", "hyper.cu");
static HC_ROWS_PRODUCTS: Kernel = Kernel::new("hc_rows_products", "hyper_rows.cu");
static HC_ROWS_COEFFICIENTS: Kernel = Kernel::new("hc_rows_coefficients", "hyper_rows.cu");
static HC_ROWS_COLLAPSE: Kernel = Kernel::new("hc_rows_collapse", "hyper_rows.cu");

/// Streams that the kernels have room for.
const MAX_STREAMS: usize = 8;
/// Columns of a slice, and chains of one: as in the kernel.
const SLICE: usize = 512;
const CHAINS: usize = 8;
/// Rows from which products have a launch of their own, and rows of its blocks: they share the function's numbers.
const MANY_ROWS: usize = 64;
const SHARED_ROWS: usize = 16;
/// Threads of a block that finishes a row: its registers allow no more.
const FINISH_THREADS: usize = 512;
/// As in `kernels/hyper_rows.cu`: streams, rows of a group, bytes of shared memory, columns of a block that collapses.
const ROWS_STREAMS: usize = 4;
const ROWS_GROUP: usize = 64;
const ROWS_ROOM: u32 = 24 * 512 * 4 + 8 * 2 * 64 * 32 * 4 + 8 * 25 * 64 * 4;
const COLLAPSED: usize = 1024;

/// The operands of a site's begin, checked.
pub(super) struct Pre {
    pub(super) collapsed: RowsF32,
    pub(super) mix: RowsF32,
    pub(super) streams: RowsF32,
    /// Address of the function.
    pub(super) function: u64,
    /// The kind of its numbers, as the kernels count.
    pub(super) numbers: usize,
    pub(super) outputs: usize,
    streams_count: usize,
}

/// Checks the operands of [`HcPre`].
pub(super) fn check_pre(op: &HcPre<CudaBuffer, CudaMatrix>) -> Result<Pre> {
    const NAME: &str = "hc_pre";
    let (collapsed, streams) = (RowsF32::new(NAME, &op.collapsed)?, RowsF32::new(NAME, &op.streams)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let n = check(NAME, streams, collapsed, mix)?;
    let (outputs, width) = (2 * n + n * n, streams.width);
    op.base.require(NAME, Element::F32, outputs)?;
    op.scale.require(NAME, Element::F32, 3)?;
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
    Ok(Pre { collapsed, mix, streams, function: function.address, numbers, outputs, streams_count: n })
}

pub(crate) fn hc_pre(queue: &mut Queue, op: &HcPre<CudaBuffer, CudaMatrix>) -> Result<()> {
    if super::step::enters(op) {
        return super::step::between(queue, &super::step::Before::Nothing, op, None);
    }
    let Pre { collapsed, mix, streams, function, numbers, outputs, streams_count: n } = check_pre(op)?;
    let (width, rows) = (streams.width, streams.rows);
    let slices = width.div_ceil(SLICE);
    let fits = n == ROWS_STREAMS && width.is_multiple_of(SLICE) && queue.limits().shared_bytes >= ROWS_ROOM;
    if rows >= MANY_ROWS && fits && takes_pieces(&[collapsed, streams]) {
        return many_rows(queue, op);
    }
    let sums = queue.scratch("hc_pre", rows * slices * (outputs + 1) * 4)?;
    let threads = ((outputs + 1) * CHAINS).next_multiple_of(32);
    if rows < MANY_ROWS && threads <= FINISH_THREADS {
        let args = Args::new()
            .rows(&collapsed)
            .rows(&mix)
            .rows(&streams)
            .address(function)
            .u32(numbers)
            .address(sums)
            .address(queue.counters("hc_pre rows", MANY_ROWS)?)
            .u32(collapsed.width)
            .u32(n)
            .u32(rows);
        // The last block of a row collapses it: that wants more threads than the products.
        let blocks = [slices as u32, rows as u32, 1];
        let grid = Grid { blocks, threads: FINISH_THREADS as u32, shared: 0 };
        return queue.launch(&HC_PRE, grid, coefficients(args, op));
    }
    let args = Args::new()
        .address(sums)
        .rows(&streams)
        .address(function)
        .u32(numbers)
        .u32(width)
        .u32(outputs)
        .u32(rows)
        .u32(SHARED_ROWS);
    let blocks = [slices as u32, rows.div_ceil(SHARED_ROWS) as u32, 1];
    queue.launch(&HC_PRODUCTS, Grid { blocks, threads: threads as u32, shared: 0 }, args)?;
    let args = Args::new()
        .rows(&collapsed)
        .rows(&mix)
        .rows(&streams)
        .address(sums)
        .u32(slices)
        .u32(collapsed.width)
        .u32(n);
    let grid = Grid { blocks: [rows as u32, 1, 1], threads: FINISH_THREADS as u32, shared: 0 };
    queue.launch(&HC_FINISH, grid, coefficients(args, op))
}

/// Whether rows can be read in pieces of four columns.
fn takes_pieces(rows: &[RowsF32]) -> bool {
    rows.iter().all(|rows| rows.address.is_multiple_of(16) && rows.stride.is_multiple_of(4))
}

/// Four streams of many rows: products, coefficients and collapsed rows are launches of their own.
fn many_rows(queue: &mut Queue, op: &HcPre<CudaBuffer, CudaMatrix>) -> Result<()> {
    let Pre { collapsed, mix, streams, function, numbers, outputs, .. } = check_pre(op)?;
    let (rows, slices) = (streams.rows, streams.width / SLICE);
    let groups = rows.div_ceil(ROWS_GROUP);
    let room_rows = groups * ROWS_GROUP;
    let sums = queue.scratch("hc_pre", slices * (outputs + 1) * room_rows * 4)?;
    let pre = queue.scratch("hc_pre factors", rows * ROWS_STREAMS * 4)?;
    let args = Args::new()
        .address(sums)
        .u32(room_rows)
        .rows(&streams)
        .address(function)
        .u32(numbers)
        .u32(streams.width)
        .u32(rows);
    // A block has a multiprocessor to itself; those of a slice share the groups.
    let shares = (queue.limits().multiprocessors as usize / slices).clamp(1, groups);
    let blocks = [slices as u32, shares as u32, 1];
    queue.launch(&HC_ROWS_PRODUCTS, Grid { blocks, threads: 256, shared: ROWS_ROOM }, args)?;
    let args = Args::new()
        .address(pre)
        .rows(&mix)
        .address(sums)
        .u32(room_rows)
        .u32(slices)
        .u32(collapsed.width)
        .u32(rows);
    let threads = 32 * (outputs as u32 + 1);
    let grid = Grid { blocks: [rows.div_ceil(32) as u32, 1, 1], threads, shared: 0 };
    queue.launch(&HC_ROWS_COEFFICIENTS, grid, coefficients(args, op))?;
    let args = Args::new().rows(&collapsed).address(pre).rows(&streams).u32(collapsed.width);
    let blocks = [rows as u32, collapsed.width.div_ceil(COLLAPSED) as u32, 1];
    queue.launch(&HC_ROWS_COLLAPSE, Grid { blocks, threads: 256, shared: 0 }, args)
}

/// The arguments that a row's coefficients need.
pub(super) fn coefficients(args: Args, op: &HcPre<CudaBuffer, CudaMatrix>) -> Args {
    args.pointer(&op.base, 0).pointer(&op.scale, 0).f32(op.norm_epsilon).f32(op.hc_epsilon).u32(op.rounds)
}

/// Checks the operands of [`HcPost`]: streams, y, the mix, and how many streams there are.
pub(super) fn check_post(op: &HcPost<CudaBuffer>) -> Result<(RowsF32, RowsF32, RowsF32, usize)> {
    const NAME: &str = "hc_post";
    let (streams, y) = (RowsF32::new(NAME, &op.streams)?, RowsF32::new(NAME, &op.y)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let n = check(NAME, streams, y, mix)?;
    Ok((streams, y, mix, n))
}

pub(crate) fn hc_post(queue: &mut Queue, op: &HcPost<CudaBuffer>) -> Result<()> {
    let (streams, y, mix, n) = check_post(op)?;
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
