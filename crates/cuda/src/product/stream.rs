//! Products of few rows: how warps and shared memory are dealt out. No bit hangs on it.

use flint_backend::{Error, Result};

use super::groups::Groups;
use super::table::{Family, UNIT};
use crate::kernels::Kernel;
use crate::matrix::{Stack, Units};
use crate::queue::{Args, Grid, Limits, Queue};

static USUAL: Kernel = Kernel::new("product_stream", "product_stream.cu");
static WIDE: Kernel = Kernel::new("product_stream_wide", "product_stream_wide.cu");

/// As in `kernels/product/stream.cuh`.
const STAGES: usize = 4;
const SLICE: usize = 8;
/// Shared memory that the kernels declare themselves, and the driver's.
const STATIC_SHARED: usize = 5 << 10;
/// Share of the warps' turns that must be filled for a larger team not to be tried.
const FILLED: f64 = 0.9;
/// The same for blocks of fewer warps.
const HALF_FILLED: f64 = 0.6;

/// Threads and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plan {
    /// Rows of a group.
    columns: usize,
    warps: usize,
    /// Warps that share a tile.
    team: usize,
    blocks: usize,
    panels: usize,
    shared: usize,
}

/// What a plan needs to know of the parts.
struct Needs {
    units: usize,
    tiles: Vec<usize>,
    chunk: usize,
    summed_64: bool,
    summed_32: bool,
    /// Most warps of a block; as in the kernels' sources.
    most_warps: usize,
}

impl Needs {
    fn of(stack: &Stack, units: &Units) -> Self {
        let summed = |inputs| units.parts.iter().any(|(encoding, _)| encoding.summed() == inputs);
        Self {
            units: stack.inputs.div_ceil(UNIT),
            tiles: units.parts.iter().map(|(_, part)| part.tiles as usize).collect(),
            chunk: units.parts.iter().map(|(encoding, _)| encoding.chunk_bytes()).max().unwrap_or(0),
            summed_64: summed(64),
            summed_32: summed(32),
            most_warps: if units.family == Family::Wide { 8 } else { 16 },
        }
    }

    fn shared(&self, columns: usize, warps: usize, team: usize) -> usize {
        let sums = if self.summed_64 { self.units * 32 } else { 0 }
            + if self.summed_32 { self.units * 64 } else { 0 };
        let slices = if team > 1 { 2 * (warps / team) * self.units.div_ceil(SLICE) * 512 } else { 0 };
        16 + self.units * 128 * columns + sums + slices + warps * STAGES * self.chunk
    }

    /// The plan for `groups(columns)` groups of up to `columns` rows. Blocks have fewer warps only where the matrix is so
    /// small that the device would stand half empty.
    fn plan(&self, limits: Limits, rows: usize, groups: impl Fn(usize) -> usize) -> Option<Plan> {
        let most = (limits.shared_bytes as usize).saturating_sub(STATIC_SHARED);
        let widths = [8, 4, 2, 1].map(|columns: usize| columns.min(rows.max(1)));
        let (columns, most_warps) =
            widths.into_iter().flat_map(|columns| [(columns, 16), (columns, 8)]).find(
                |&(columns, warps)| warps <= self.most_warps && self.shared(columns, warps, warps) <= most,
            )?;
        let groups = groups(columns);
        let mut best: Option<(f64, Plan)> = None;
        for warps in [16, 8, 4].into_iter().filter(|&warps| warps <= most_warps) {
            if best.is_some_and(|(filled, _)| filled >= HALF_FILLED) {
                break;
            }
            for team in [1, 2, 4, 8, 16] {
                let shared = self.shared(columns, warps, team);
                if team > warps || team > self.units.div_ceil(SLICE) || shared > most {
                    continue;
                }
                let teams = warps / team;
                let panels: usize = self.tiles.iter().map(|tiles| tiles.div_ceil(teams)).sum();
                let blocks = (limits.multiprocessors as usize).min(panels * groups).max(1);
                let turns = (panels * groups).div_ceil(blocks) * limits.multiprocessors as usize * teams;
                let filled = (self.tiles.iter().sum::<usize>() * groups) as f64 / turns.max(1) as f64;
                if best.is_none_or(|(other, _)| filled > other) {
                    best = Some((filled, Plan { columns, warps, team, blocks, panels, shared }));
                }
                if filled >= FILLED {
                    break;
                }
            }
        }
        best.map(|(_, plan)| plan)
    }
}

/// Queues the products of a family's parts.
pub(crate) fn multiply(queue: &mut Queue, stack: &Stack, units: &Units, groups: &Groups) -> Result<()> {
    let needs = Needs::of(stack, units);
    let rows = if groups.picks_per_row > 1 { groups.pairs() } else { groups.rows };
    let Some(plan) = needs.plan(queue.limits(), rows, |columns| groups.most(columns)) else {
        let what = format!("{} inputs: more than shared memory holds", stack.inputs);
        return Err(Error::Shape { op: "product", what });
    };
    let sorted = if groups.needs_sorting() { Some(groups.sort(queue, plan.columns)?) } else { None };
    let args = Args::new()
        .address(units.table)
        .u32(units.parts.len())
        .u32(plan.panels)
        .u32(stack.inputs)
        .u32(plan.team)
        .u32(needs.chunk)
        .u32(if needs.summed_64 { 64 } else { 0 } + if needs.summed_32 { 32 } else { 0 })
        .address(groups.x.address)
        .address(groups.out.address);
    let kernel = match units.family {
        Family::Usual => &USUAL,
        Family::Wide => &WIDE,
    };
    let grid = Grid {
        blocks: [plan.blocks as u32, 1, 1],
        threads: plan.warps as u32 * 32,
        shared: plan.shared as u32,
    };
    queue.launch(kernel, grid, groups.args(args, plan.columns, sorted))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::table::Encoding;

    const H200: Limits = Limits { multiprocessors: 132, shared_bytes: 227 << 10, capability: 90 };

    fn plan(outputs: usize, inputs: usize, encoding: Encoding, rows: usize, groups: usize) -> Plan {
        let needs = Needs {
            units: inputs.div_ceil(UNIT),
            tiles: vec![outputs.div_ceil(16)],
            chunk: encoding.chunk_bytes(),
            summed_64: encoding.summed() == 64,
            summed_32: encoding.summed() == 32,
            most_warps: 16,
        };
        needs.plan(H200, rows, |_| groups).unwrap()
    }

    #[test]
    fn every_matrix_of_the_release_has_a_plan_that_fills_the_device() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        let eight = Encoding::Affine { bits: 8, group: 32, wide: true };
        for encoding in [Encoding::Bf16, Encoding::Fp8, four, eight] {
            for (outputs, inputs, groups) in
                [(4096, 4096, 8), (4096, 2048, 8), (4096, 8192, 1), (24704, 4096, 1), (154_880, 4096, 1)]
            {
                for rows in [1, 8] {
                    let plan = plan(outputs, inputs, encoding, rows, groups);
                    assert!(plan.shared + STATIC_SHARED <= H200.shared_bytes as usize, "{plan:?}");
                    assert_eq!(plan.warps % plan.team, 0, "{plan:?}");
                    let tiles = outputs / 16 * groups;
                    let turns = (plan.panels * groups).div_ceil(plan.blocks) * 132 * plan.warps / plan.team;
                    assert!(turns * 7 <= tiles * 10, "{outputs} × {inputs}, {rows} rows: {plan:?}");
                }
            }
        }
    }

    #[test]
    fn small_matrices_use_every_multiprocessor() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        for (outputs, inputs) in [(4096, 2048), (8192, 128), (4096, 4096)] {
            let plan = plan(outputs, inputs, four, 1, 1);
            assert_eq!(plan.blocks, 128, "{outputs} × {inputs}: {plan:?}");
        }
    }

    #[test]
    fn wide_inputs_take_fewer_rows_at_once() {
        let plan = plan(4096, 12288, Encoding::Bf16, 8, 1);
        assert_eq!(plan.columns, 4);
    }

    #[test]
    fn one_row_asks_for_no_more_inputs_than_its_own() {
        let four = Encoding::Affine { bits: 4, group: 64, wide: false };
        assert_eq!(plan(4096, 4096, four, 1, 1).columns, 1);
    }
}
