//! Products of few rows: how work, warps and shared memory are dealt out. No bit hangs on it.

use flint_backend::{Error, Result};

use super::groups::{Groups, Manner};
use super::table::{Encoding, Family, UNIT};
use crate::kernels::Kernel;
use crate::matrix::{Stack, Units};
use crate::queue::{Args, Grid, Limits, Queue};

static ROWS_1: Kernel = Kernel::new("product_stream_1", "product_stream.cu").early();
static ROWS_4: Kernel = Kernel::new("product_stream_4", "product_stream_4.cu").early();
static ROWS_8: Kernel = Kernel::new("product_stream_8", "product_stream_8.cu").early();
static GROUPS_32: Kernel = Kernel::new("product_stream_32", "product_stream_32.cu").early();
static WIDE: Kernel = Kernel::new("product_stream_wide", "product_stream_wide.cu").early();

/// As in `kernels/product/stream.cuh`: chunks of a warp, units of a slice.
const STAGES: usize = 4;
const SLICE: usize = 8;
/// Shared memory that the kernels declare themselves, and the driver's.
const STATIC_SHARED: usize = 6 << 10;
/// Most bytes that all blocks together ask for before their inputs are there: part of the second cache.
const AHEAD: usize = 24 << 20;
/// As in `kernels/product/stream.cuh`: pieces in which they are asked for.
const AHEAD_PIECE: usize = 16 << 10;
/// Cells that may be at hand beside those that warps work on, as a multiple of these: a slow warp holds up none.
const SPARE_CELLS: usize = 3;

/// A product: a family's parts of a matrix, and which rows meet them.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) stack: &'a Stack,
    pub(crate) units: &'a Units,
    pub(crate) groups: &'a Groups,
}

/// Which kernel takes an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Usual,
    Groups32,
    Wide,
}

/// What a plan needs to know of a matrix.
#[derive(Clone, Debug)]
struct Needs {
    units: usize,
    tiles: usize,
    stage: usize,
    summed_64: bool,
    summed_32: bool,
    kind: Kind,
}

/// Threads and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    /// Rows of a group.
    columns: usize,
    warps: usize,
    /// Tiles that may be at hand; a power of two.
    slots: usize,
    /// Where the slices' sums, the counters and the stages begin.
    sums_at: usize,
    counters_at: usize,
    stages_at: usize,
    shared: usize,
}

/// Bytes of a stage: as `Chunk::STAGE` in `kernels/product/stream.cuh`.
fn stage_bytes(encoding: Encoding, kind: Kind) -> usize {
    let units = match encoding.bits() {
        2 => 4,
        3..=5 => 2,
        _ => 1,
    };
    let entries = match encoding {
        Encoding::Bf16 => 0,
        Encoding::Affine { .. } if kind == Kind::Groups32 => 2,
        Encoding::Affine { group: 32, wide: true, .. } => 2,
        _ => 1,
    };
    units * (encoding.unit_bytes() + entries * encoding.entry_bytes())
}

impl Needs {
    fn of(stack: &Stack, units: &Units) -> Self {
        let encodings = || units.parts.iter().map(|(encoding, _)| *encoding);
        let kind = match units.family {
            Family::Wide => Kind::Wide,
            Family::Usual if encodings().any(|encoding| encoding.share() == 0) => Kind::Groups32,
            Family::Usual => Kind::Usual,
        };
        Self {
            units: stack.inputs.div_ceil(UNIT),
            tiles: units.parts.iter().map(|(_, part)| part.tiles as usize).sum(),
            stage: encodings().map(|encoding| stage_bytes(encoding, kind)).max().unwrap_or(0),
            summed_64: encodings().any(|encoding| encoding.summed() == 64),
            summed_32: encodings().any(|encoding| encoding.summed() == 32),
            kind,
        }
    }

    /// What both of two matrices need.
    fn with(&self, other: &Self) -> Self {
        Self {
            units: self.units,
            tiles: self.tiles + other.tiles,
            stage: self.stage.max(other.stage),
            summed_64: self.summed_64 || other.summed_64,
            summed_32: self.summed_32 || other.summed_32,
            kind: self.kind,
        }
    }

    fn slices(&self) -> usize {
        self.units.div_ceil(SLICE)
    }

    fn laid_out(&self, columns: usize, warps: usize, slots: usize) -> Plan {
        let sums = if self.summed_64 { self.units * 32 } else { 0 }
            + if self.summed_32 { self.units * 64 } else { 0 };
        let sums_at = self.units * 128 * columns + sums;
        let counters_at = sums_at + slots * self.slices() * columns.div_ceil(2) * 128;
        let stages_at = counters_at + (2 * slots * 4).next_multiple_of(16);
        let shared = stages_at + warps * STAGES * self.stage;
        Plan { columns, warps, slots, sums_at, counters_at, stages_at, shared }
    }

    /// The plan for groups of up to `rows` rows: as many rows as shared memory holds, then as many warps; at least four, whose
    /// threads group pairs.
    fn plan(&self, limits: Limits, rows: usize) -> Option<Plan> {
        let most = (limits.shared_bytes as usize).saturating_sub(STATIC_SHARED);
        let (columns, warps): (&[usize], &[usize]) = match self.kind {
            Kind::Usual if rows <= 1 => (&[1], &[16, 8, 4]),
            Kind::Usual if rows <= 4 => (&[4, 1], &[16, 8]),
            Kind::Usual => (&[8, 4, 1], &[16, 8]),
            Kind::Groups32 => (&[4], &[16, 8, 4]),
            Kind::Wide => (&[4], &[8, 4]),
        };
        for &columns in columns {
            for &warps in warps {
                let wanted = (warps * SPARE_CELLS / self.slices() + 1).next_power_of_two();
                let slots = if self.slices() == 1 { 1 } else { wanted.max(2) };
                for slots in [slots, slots / 2, 2].into_iter().filter(|&slots| slots >= 1) {
                    let plan = self.laid_out(columns, warps, slots);
                    if plan.shared <= most && (slots >= 2 || self.slices() == 1) {
                        return Some(plan);
                    }
                }
            }
        }
        None
    }
}

/// Bytes of a tile on average, in steps of 64.
fn weight(units: &Units) -> usize {
    let tiles: usize = units.parts.iter().map(|(_, part)| part.tiles as usize).sum();
    let bytes: u64 = units.parts.iter().map(|(_, part)| part.code_stride + part.scale_stride).sum();
    (bytes as usize / tiles.max(1) / 64).max(1)
}

/// Queues the products of a family's parts, and with them those of a second matrix, of as many inputs, with all rows.
/// Whether one kernel takes both: else nothing is queued.
pub(crate) fn multiply(queue: &mut Queue, first: Job<'_>, second: Option<Job<'_>>) -> Result<bool> {
    let Job { stack, units, groups } = first;
    let mut needs = Needs::of(stack, units);
    if let Some(second) = second {
        let other = Needs::of(second.stack, second.units);
        let alike = other.kind == needs.kind
            && second.stack.inputs == stack.inputs
            && second.groups.manner == Manner::RowsOfOne
            && second.groups.rows == groups.rows
            && second.groups.activated == groups.activated;
        if !alike {
            return Ok(false);
        }
        needs = needs.with(&other);
    }
    let Some(plan) = needs.plan(queue.limits(), groups.rows) else {
        let what = format!("{} inputs: more than shared memory holds", stack.inputs);
        return Err(Error::Shape { op: "product", what });
    };
    let sorted = if groups.needs_sorting() { Some(groups.sort(queue, plan.columns)?) } else { None };
    let own_tiles: usize = units.parts.iter().map(|(_, part)| part.tiles as usize).sum();
    let most_tiles = own_tiles * groups.most(plan.columns)
        + second.map_or(0, |job| Needs::of(job.stack, job.units).tiles * groups.rows.div_ceil(plan.columns));
    let blocks = (queue.limits().multiprocessors as usize).min(most_tiles).max(1);
    let kernel = match (needs.kind, plan.columns) {
        (Kind::Usual, 1) => &ROWS_1,
        (Kind::Usual, 4) => &ROWS_4,
        (Kind::Usual, _) => &ROWS_8,
        (Kind::Groups32, _) => &GROUPS_32,
        (Kind::Wide, _) => &WIDE,
    };
    // Where rows meet which member follows from picks, which the launch before may have made.
    let known = groups.manner != Manner::Picked || groups.picks_known;
    let slices = needs.slices();
    let args = Args::new()
        .address(units.table)
        .u32(units.parts.len())
        .u32(own_tiles)
        .u32(weight(units))
        .u32(stack.inputs)
        .u32(needs.units)
        .u32(slices)
        .u32(plan.warps / slices)
        .u32(plan.warps % slices)
        .u32(plan.slots)
        .u32(plan.sums_at)
        .u32(plan.counters_at)
        .u32(plan.stages_at)
        .u32(needs.stage)
        .u32(if needs.summed_64 { 64 } else { 0 } + if needs.summed_32 { 32 } else { 0 })
        .u32(AHEAD / blocks / AHEAD_PIECE * AHEAD_PIECE)
        .u32(usize::from(known && sorted.is_none()))
        .u32(usize::from(groups.activated.is_some()))
        .f32(groups.activated.unwrap_or(0.0))
        .address(groups.x.address)
        .address(groups.out.address);
    let args = groups.args(args, plan.columns, sorted);
    let args = match second {
        Some(Job { stack: _, units, groups }) => args
            .address(units.table)
            .u32(units.parts.len())
            .u32(units.parts.iter().map(|(_, part)| part.tiles as usize).sum())
            .u32(weight(units))
            .address(groups.x.address)
            .u64(groups.x.stride as u64)
            .address(groups.out.address)
            .u64(groups.out.stride as u64),
        None => args.address(0).u32(0).u32(0).u32(1).address(0).u64(0).address(0).u64(0),
    };
    let grid =
        Grid { blocks: [blocks as u32, 1, 1], threads: plan.warps as u32 * 32, shared: plan.shared as u32 };
    queue.launch(kernel, grid, args)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Limits = Limits { multiprocessors: 132, shared_bytes: 227 << 10, capability: 90 };

    fn plan(inputs: usize, encoding: Encoding, rows: usize) -> Plan {
        let kind = match encoding {
            Encoding::Affine { wide: true, .. } => Kind::Wide,
            Encoding::Affine { group: 32, .. } => Kind::Groups32,
            _ => Kind::Usual,
        };
        let needs = Needs {
            units: inputs.div_ceil(UNIT),
            tiles: 256,
            stage: stage_bytes(encoding, kind),
            summed_64: encoding.summed() == 64,
            summed_32: encoding.summed() == 32,
            kind,
        };
        needs.plan(H200, rows).unwrap()
    }

    #[test]
    fn every_matrix_of_the_release_has_a_plan() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        let eight = Encoding::Affine { bits: 8, group: 32, wide: true };
        for encoding in [Encoding::Bf16, Encoding::Fp8, four, eight] {
            for inputs in [128, 256, 2048, 4096, 8192, 12288, 16384] {
                for rows in [1, 4, 8, 16] {
                    let plan = plan(inputs, encoding, rows);
                    assert!(plan.shared + STATIC_SHARED <= H200.shared_bytes as usize, "{plan:?}");
                    assert!(plan.slots.is_power_of_two(), "{plan:?}");
                    assert!(plan.columns <= rows.max(4), "{plan:?}");
                }
            }
        }
    }

    #[test]
    fn one_row_leaves_room_for_a_kernel_beside_it() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        for inputs in [2048, 4096, 8192] {
            let plan = plan(inputs, four, 1);
            assert!((plan.columns, plan.warps) == (1, 16) && plan.shared <= 112 << 10, "{inputs}: {plan:?}");
        }
    }

    #[test]
    fn wide_inputs_take_fewer_rows_at_once() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        assert_eq!(plan(4096, four, 8).columns, 8);
        assert_eq!(plan(8192, four, 8).columns, 8);
        assert_eq!(plan(12288, four, 8).columns, 4);
    }
}
