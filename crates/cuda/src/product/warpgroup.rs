//! Products of many rows by warp groups: inputs are rounded once, then tiles of 128 outputs by 128 rows.

use flint_backend::Result;

use super::groups::{Groups, Manner};
use super::table::{Encoding, Family, UNIT};
use crate::kernels::Kernel;
use crate::matrix::Stack;
use crate::queue::{Args, Grid, Limits, Queue};

static INPUTS: Kernel = Kernel::new("product_inputs_tiled", "product_inputs_tiled.cu");
static PRODUCT: Kernel = Kernel::new("product_warpgroup", "product_warpgroup.cu");

/// The capability whose devices have these instructions.
const CAPABILITY: u32 = 90;
/// As in `kernels/product/tile_rows.cuh` and `kernels/product/warpgroup.cuh`.
const TILE_ROWS: usize = 128;
const TILE_RUNS: usize = 8;
const THREADS: usize = 384;
const MOST_STAGES: usize = 6;
const RUN_SCALES: usize = 256;
const TOTALS: usize = 64 * TILE_RUNS * 32 * 4;
/// Shared memory that is not for stages: what the kernel declares itself, and the driver's.
const STATIC_SHARED: usize = 2 << 10;
/// Units that a warp rounds.
const ROUNDED_UNITS: usize = 4;

/// Whether the device and the kernel take this matrix. Either way the bits are the same.
pub(crate) fn takes(queue: &Queue, stack: &Stack) -> bool {
    queue.limits().capability == CAPABILITY && stack.units.iter().all(|units| units.family == Family::Usual)
}

/// How a launch deals out shared memory.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ring {
    stages: usize,
    stage_bytes: usize,
    /// Bytes of the totals of parts whose sums are folded.
    totals: usize,
}

impl Ring {
    fn of(limits: Limits, encodings: impl Iterator<Item = Encoding> + Clone) -> Self {
        let run = |encoding: Encoding| 2 * encoding.unit_bytes() + RUN_SCALES;
        let codes = encodings.clone().map(run).max().unwrap_or(0);
        let stage_bytes = 2 * TILE_ROWS * 128 + TILE_RUNS * codes;
        let totals = if encodings.clone().any(|encoding| encoding == Encoding::Fp8) { TOTALS } else { 0 };
        let room = (limits.shared_bytes as usize).saturating_sub(STATIC_SHARED + totals);
        Self { stages: (room / stage_bytes).min(MOST_STAGES), stage_bytes, totals }
    }

    fn bytes(self) -> usize {
        self.totals + self.stages * self.stage_bytes
    }
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
    let (taken, rows) = match groups.manner {
        Manner::Picked => (groups.pairs(), groups.pairs().next_multiple_of(8) + 8 * groups.members),
        Manner::RowsOfOne | Manner::PartAMember => {
            (groups.rows * groups.members, groups.rows.next_multiple_of(8) * groups.members)
        }
    };
    let rounded = queue.scratch("rounded inputs", units * rows * 128)?;
    let tiles = groups.most(TILE_ROWS);
    let warps = units.div_ceil(ROUNDED_UNITS).min(8);
    let down = units.div_ceil(ROUNDED_UNITS * warps);
    let grid =
        Grid { blocks: [taken.div_ceil(8) as u32, down as u32, 1], threads: warps as u32 * 32, shared: 0 };
    let args =
        Args::new().address(groups.x.address).u32(stack.inputs).address(rounded).u32(rows).u32(ROUNDED_UNITS);
    queue.launch(&INPUTS, grid, groups.args(args, TILE_ROWS, sorted))?;
    for units in &stack.units {
        let (limits, parts) = (queue.limits(), &units.parts);
        let ring = Ring::of(limits, parts.iter().map(|(encoding, _)| *encoding));
        let runs: usize = parts.iter().map(|(_, part)| (part.tiles as usize).div_ceil(TILE_RUNS)).sum();
        let blocks = (runs * tiles).min(limits.multiprocessors as usize);
        let grid =
            Grid { blocks: [blocks as u32, 1, 1], threads: THREADS as u32, shared: ring.bytes() as u32 };
        let args = Args::new()
            .address(units.table)
            .u32(parts.len())
            .u32(runs)
            .u32(stack.inputs)
            .address(rounded)
            .u32(rows)
            .u32(ring.stages)
            .u32(ring.stage_bytes)
            .u32(ring.totals)
            .address(groups.out.address);
        queue.launch(&PRODUCT, grid, groups.args(args, TILE_ROWS, sorted))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_encoding_has_stages_to_copy_ahead() {
        let h200 = Limits { multiprocessors: 132, shared_bytes: 227 << 10, capability: CAPABILITY };
        let affine = [2, 3, 4, 5, 6, 8].map(|bits| Encoding::Affine { bits, group: 64, wide: false });
        for encoding in affine.into_iter().chain([Encoding::Bf16, Encoding::Fp8]) {
            let ring = Ring::of(h200, std::iter::once(encoding));
            assert!(ring.stages >= 3 && ring.bytes() + STATIC_SHARED <= 227 << 10, "{encoding:?}: {ring:?}");
            // The tensor cores' pattern repeats after 1 KiB.
            assert_eq!(ring.stage_bytes % 1024, 0, "{encoding:?}: {ring:?}");
        }
        let mixed = Ring::of(h200, [Encoding::Bf16, Encoding::Fp8].into_iter());
        assert!(mixed.stages >= 2, "{mixed:?}");
    }
}
