//! Products of many rows: inputs are rounded once, then tiles of 128 outputs by 128 rows.

use flint_backend::Result;

use super::groups::{Groups, Manner};
use super::table::{Encoding, Family, UNIT};
use crate::kernels::Kernel;
use crate::matrix::Stack;
use crate::queue::{Args, Grid, Queue};

static INPUTS: Kernel = Kernel::new("product_inputs", "product_inputs.cu");
static USUAL: Kernel = Kernel::new("product_tile", "product_tile.cu");
static WIDE: Kernel = Kernel::new("product_tile_wide", "product_tile_wide.cu");

/// As in `kernels/product/tile.cuh`.
const TILE_ROWS: usize = 128;
const STAGES: usize = 3;
const THREADS: usize = 256;
const SLICE: usize = 8;
/// Runs of 16 outputs of a tile.
const RUNS: usize = 8;
/// Rows of a matrix above which tiles are faster than streams of eight.
const MANY_ROWS: usize = 64;
/// The same for an expert's rows on average.
const MANY_PAIRS: usize = 32;
/// Units that a warp rounds.
const ROUNDED_UNITS: usize = 4;

/// Whether tiles take these rows. Either way the bits are the same.
pub(crate) fn takes(groups: &Groups) -> bool {
    match groups.manner {
        Manner::RowsOfOne | Manner::PartAMember => groups.rows > MANY_ROWS,
        Manner::Picked => groups.needs_sorting() && groups.pairs() > MANY_PAIRS * groups.members,
    }
}

/// Inputs in device memory, rounded.
#[derive(Clone, Copy)]
struct Rounded {
    numbers: u64,
    sums_64: u64,
    sums_32: u64,
    rows: usize,
}

/// Bytes of a stage: `Stage` of `kernels/product/tile.cuh`.
fn stage_bytes(encoding: Encoding) -> usize {
    let sums = match encoding.summed() {
        32 => 2 * TILE_ROWS * 4,
        64 => TILE_ROWS * 4,
        _ => 0,
    };
    TILE_ROWS * 128 + sums + RUNS * (encoding.unit_bytes() + encoding.unit_entries() * encoding.entry_bytes())
}

/// Queues the products of all parts in units.
pub(crate) fn multiply(queue: &mut Queue, stack: &Stack, groups: &Groups) -> Result<()> {
    if stack.units.is_empty() {
        return Ok(());
    }
    let rounded = round(queue, stack, groups)?;
    let sorted = if groups.manner == Manner::Picked { Some(groups.sort(queue, TILE_ROWS)?) } else { None };
    for units in &stack.units {
        let runs: usize = units.parts.iter().map(|(_, part)| (part.tiles as usize).div_ceil(RUNS)).sum();
        let stage = units.parts.iter().map(|(encoding, _)| stage_bytes(*encoding)).max().unwrap_or(0);
        let totals = if stack.inputs.div_ceil(UNIT) > SLICE { 16 * THREADS * 16 } else { 0 };
        let grid = Grid {
            blocks: [runs as u32, groups.most(TILE_ROWS) as u32, 1],
            threads: THREADS as u32,
            shared: (totals + STAGES * stage) as u32,
        };
        let args = Args::new()
            .address(units.table)
            .u32(units.parts.len())
            .u32(stack.inputs)
            .address(rounded.numbers)
            .address(rounded.sums_64)
            .address(rounded.sums_32)
            .u32(rounded.rows)
            .address(groups.out.address);
        let kernel = match units.family {
            Family::Usual => &USUAL,
            Family::Wide => &WIDE,
        };
        queue.launch(kernel, grid, groups.args(args, TILE_ROWS, sorted))?;
    }
    Ok(())
}

/// Rounds all inputs into scratch memory.
fn round(queue: &mut Queue, stack: &Stack, groups: &Groups) -> Result<Rounded> {
    let parts = if groups.manner == Manner::PartAMember { stack.members } else { 1 };
    let (units, rows) = (stack.inputs.div_ceil(UNIT), groups.x.rows * parts);
    let summed = |inputs| {
        stack.units.iter().flat_map(|units| &units.parts).any(|(encoding, _)| encoding.summed() == inputs)
    };
    let numbers = units * rows * 128;
    let sums_64 = if summed(64) { (units * rows * 4).next_multiple_of(256) } else { 0 };
    let sums_32 = if summed(32) { units * rows * 8 } else { 0 };
    let address = queue.scratch("rounded inputs", numbers.next_multiple_of(256) + sums_64 + sums_32)?;
    let place = address + numbers.next_multiple_of(256) as u64;
    let rounded = Rounded {
        numbers: address,
        sums_64: if sums_64 > 0 { place } else { 0 },
        sums_32: if sums_32 > 0 { place + sums_64 as u64 } else { 0 },
        rows,
    };
    let warps = units.div_ceil(ROUNDED_UNITS).min(THREADS / 32);
    let down = units.div_ceil(ROUNDED_UNITS * warps);
    let grid =
        Grid { blocks: [rows.div_ceil(8) as u32, down as u32, 1], threads: warps as u32 * 32, shared: 0 };
    let args = Args::new()
        .address(groups.x.address)
        .u64(groups.x.stride as u64)
        .u32(groups.x.rows)
        .u32(parts)
        .u32(stack.inputs)
        .address(rounded.numbers)
        .address(rounded.sums_64)
        .address(rounded.sums_32)
        .u32(ROUNDED_UNITS);
    queue.launch(&INPUTS, grid, args)?;
    Ok(rounded)
}
