//! Products of many rows by warp groups: inputs are rounded once, then tiles of 256 outputs by 64 rows.

use flint_backend::Result;

use super::groups::{Groups, Manner};
use super::table::{Encoding, Family, UNIT};
use crate::kernels::Kernel;
use crate::matrix::Stack;
use crate::queue::{Args, Grid, Queue};

static INPUTS: Kernel = Kernel::new("product_inputs_tiled", "product_inputs_tiled.cu");
static PRODUCT: Kernel = Kernel::new("product_warpgroup", "product_warpgroup.cu");

/// The capability whose devices have these instructions.
const CAPABILITY: u32 = 90;
/// As in `kernels/product/tile_rows.cuh` and `kernels/product/warpgroup.cuh`.
const TILE_ROWS: usize = 64;
const TILE_RUNS: usize = 16;
const THREADS: usize = TILE_RUNS * 32;
const SLICE: usize = 8;
const TOTALS: usize = 8 * THREADS * 16;
/// Units that a warp rounds.
const ROUNDED_UNITS: usize = 4;

/// Whether the device and the kernel take this matrix. Either way the bits are the same.
pub(crate) fn takes(queue: &Queue, stack: &Stack) -> bool {
    let known = |encoding: Encoding| encoding.family() == Family::Usual && encoding != Encoding::Bf16;
    queue.limits().capability == CAPABILITY
        && stack.units.iter().flat_map(|units| &units.parts).all(|(encoding, _)| known(*encoding))
}

/// Bytes of all stages: `Stage` of `kernels/product/warpgroup.cuh`.
fn stages_bytes(encoding: Encoding) -> usize {
    let run = encoding.unit_bytes() + encoding.unit_entries() * encoding.entry_bytes();
    let stage = 2 * TILE_ROWS * 128 + 2 * TILE_RUNS * run;
    let count = match encoding.bits() {
        0..=5 => 4,
        6..=8 => 3,
        _ => 2,
    };
    count * stage.next_multiple_of(1024)
}

/// Queues the products of all parts in units.
pub(crate) fn multiply(queue: &mut Queue, stack: &Stack, groups: &Groups) -> Result<()> {
    if stack.units.is_empty() {
        return Ok(());
    }
    let picked = groups.manner == Manner::Picked;
    let sorted = if picked { Some(groups.sort(queue, TILE_ROWS)?) } else { None };
    let units = stack.inputs.div_ceil(UNIT);
    // Each member's rows begin at a multiple of eight: `find_group` of `kernels/product/tile_rows.cuh`.
    let rows = match groups.manner {
        Manner::Picked => groups.pairs().next_multiple_of(8) + 8 * groups.members,
        Manner::RowsOfOne | Manner::PartAMember => groups.rows.next_multiple_of(8) * groups.members,
    };
    let rounded = queue.scratch("rounded inputs", units * rows * 128)?;
    let tiles = groups.most(TILE_ROWS);
    let warps = units.div_ceil(ROUNDED_UNITS).min(8);
    let grid = Grid {
        blocks: [(TILE_ROWS / 8) as u32, units.div_ceil(ROUNDED_UNITS * warps) as u32, tiles as u32],
        threads: warps as u32 * 32,
        shared: 0,
    };
    let args =
        Args::new().address(groups.x.address).u32(stack.inputs).address(rounded).u32(rows).u32(ROUNDED_UNITS);
    queue.launch(&INPUTS, grid, groups.args(args, TILE_ROWS, sorted))?;
    for part in &stack.units {
        let runs: usize = part.parts.iter().map(|(_, part)| (part.tiles as usize).div_ceil(TILE_RUNS)).sum();
        let stages = part.parts.iter().map(|(encoding, _)| stages_bytes(*encoding)).max().unwrap_or(0);
        let totals = if units > SLICE { TOTALS } else { 0 };
        let grid = Grid {
            blocks: [runs as u32, tiles as u32, 1],
            threads: THREADS as u32,
            shared: (totals + stages) as u32,
        };
        let args = Args::new()
            .address(part.table)
            .u32(part.parts.len())
            .u32(stack.inputs)
            .address(rounded)
            .u32(rows)
            .address(groups.out.address);
        queue.launch(&PRODUCT, grid, groups.args(args, TILE_ROWS, sorted))?;
    }
    Ok(())
}
