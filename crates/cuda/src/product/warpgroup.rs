//! Products of many rows by warp groups: inputs are rounded once, then tiles of 128 outputs by 128 rows.

use flint_backend::Result;

use super::groups::{Groups, Manner};
use super::table::{Encoding, Family, UNIT, UnitPart};
use crate::kernels::Kernel;
use crate::matrix::{Stack, Units};
use crate::queue::{Args, Grid, Limits, Queue};

const FILE: &str = "product_warpgroup.cu";
static INPUTS: Kernel = Kernel::new("product_inputs_tiled", "product_inputs_tiled.cu");
static BF16: Kernel = Kernel::new("product_warpgroup_bf16", FILE);
static FP8: Kernel = Kernel::new("product_warpgroup_fp8", FILE);
static AFFINE_2: Kernel = Kernel::new("product_warpgroup_2", FILE);
static AFFINE_3: Kernel = Kernel::new("product_warpgroup_3", FILE);
static AFFINE_4: Kernel = Kernel::new("product_warpgroup_4", FILE);
static AFFINE_5: Kernel = Kernel::new("product_warpgroup_5", FILE);
static AFFINE_6: Kernel = Kernel::new("product_warpgroup_6", FILE);
static AFFINE_8: Kernel = Kernel::new("product_warpgroup_8", FILE);

/// Each encoding's kernel, by the low bits of its number.
static KERNELS: [(u32, &Kernel); 8] = [
    (0, &BF16),
    (1, &FP8),
    (2, &AFFINE_2),
    (3, &AFFINE_3),
    (4, &AFFINE_4),
    (5, &AFFINE_5),
    (6, &AFFINE_6),
    (8, &AFFINE_8),
];

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
const STATIC_SHARED: usize = 6 << 10;
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
    fn of(limits: Limits, encoding: Encoding) -> Self {
        let stage_bytes = 2 * TILE_ROWS * 128 + TILE_RUNS * (2 * encoding.unit_bytes() + RUN_SCALES);
        let totals = if encoding == Encoding::Fp8 { TOTALS } else { 0 };
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
        for (index, kernel) in KERNELS {
            let of_kernel = |part: &&(Encoding, UnitPart)| part.0.number() & 15 == index;
            let Some((encoding, _)) = units.parts.iter().find(of_kernel) else { continue };
            let runs = |(_, part): &(Encoding, UnitPart)| (part.tiles as usize).div_ceil(TILE_RUNS);
            let runs: usize = units.parts.iter().filter(of_kernel).map(runs).sum();
            let ring = Ring::of(queue.limits(), *encoding);
            let blocks = (runs * tiles).min(queue.limits().multiprocessors as usize);
            let grid =
                Grid { blocks: [blocks as u32, 1, 1], threads: THREADS as u32, shared: ring.bytes() as u32 };
            let args = product_args(stack, units, runs, ring).address(rounded).u32(rows);
            let args = args.address(groups.out.address);
            queue.launch(kernel, grid, groups.args(args, TILE_ROWS, sorted))?;
        }
    }
    Ok(())
}

fn product_args(stack: &Stack, units: &Units, runs: usize, ring: Ring) -> Args {
    Args::new()
        .address(units.table)
        .u32(units.parts.len())
        .u32(runs)
        .u32(stack.inputs)
        .u32(ring.stages)
        .u32(ring.stage_bytes)
        .u32(ring.totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_encoding_has_stages_to_copy_ahead() {
        let h200 = Limits { multiprocessors: 132, shared_bytes: 227 << 10, capability: CAPABILITY };
        let affine = [2, 3, 4, 5, 6, 8].map(|bits| Encoding::Affine { bits, group: 64, wide: false });
        for encoding in affine.into_iter().chain([Encoding::Bf16, Encoding::Fp8]) {
            let ring = Ring::of(h200, encoding);
            assert!(ring.stages >= 3 && ring.bytes() + STATIC_SHARED <= 227 << 10, "{encoding:?}: {ring:?}");
            // The tensor cores' pattern repeats after 1 KiB.
            assert_eq!(ring.stage_bytes % 1024, 0, "{encoding:?}: {ring:?}");
        }
    }
}
