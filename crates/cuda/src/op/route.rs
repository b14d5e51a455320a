//! The router's choice: a warp for each row.

use flint_backend::ops::Route;
use flint_backend::{Element, Result};

use super::require;
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static ROUTE: Kernel = Kernel::new("route", "route.cu").early();
static ROUTE_FLAT: Kernel = Kernel::new("route_flat", "route.cu").early();

/// Experts that fit in the registers of a warp: as in the kernel.
pub(super) const FLAT_EXPERTS: usize = 32 * 12;

/// The operands of [`Route`], checked.
pub(super) struct Routed {
    pub(super) weights: RowsF32,
    pub(super) logits: RowsF32,
    pub(super) groups: usize,
    pub(super) kept: usize,
}

/// Checks the operands of [`Route`].
pub(super) fn check(op: &Route<CudaBuffer>) -> Result<Routed> {
    const NAME: &str = "route";
    let (weights, logits) = (RowsF32::new(NAME, &op.weights)?, RowsF32::new(NAME, &op.logits)?);
    let (experts, picked) = (logits.width, op.picks_per_row);
    op.picks.require(NAME, Element::U32, logits.rows * picked)?;
    op.bias.require(NAME, Element::F32, experts)?;
    require(NAME, weights.rows == logits.rows && weights.width == picked, || {
        format!("weights {} × {} for {} × {picked} picks", weights.rows, weights.width, logits.rows)
    })?;
    let groups = op.groups.max(1);
    let kept = if groups == 1 { 1 } else { op.groups_kept };
    let whole = experts.is_multiple_of(groups) && kept >= 1 && kept <= groups;
    require(NAME, whole && picked <= experts / groups * kept, || {
        format!("{picked} picks of {experts} experts in {groups} groups of which {kept} are kept")
    })?;
    Ok(Routed { weights, logits, groups, kept })
}

pub(crate) fn route(queue: &mut Queue, op: &Route<CudaBuffer>) -> Result<()> {
    let Routed { weights, logits, groups, kept } = check(op)?;
    let (experts, picked) = (logits.width, op.picks_per_row);
    let args = Args::new()
        .pointer(&op.picks, 0)
        .rows(&weights)
        .rows(&logits)
        .pointer(&op.bias, 0)
        .u32(experts)
        .u32(picked);
    if groups == 1 && experts <= FLAT_EXPERTS {
        let args = args.u32(usize::from(op.normalise)).f32(op.scaling);
        let grid = Grid { blocks: [logits.rows as u32, 1, 1], threads: 32, shared: 4 * picked as u32 };
        return queue.launch(&ROUTE_FLAT, grid, args);
    }
    let args = args.u32(groups).u32(kept).u32(usize::from(op.normalise)).f32(op.scaling);
    // Ranks of experts and groups, scores, the picks.
    let shared = 8 * (experts + groups) + 4 * (experts + picked);
    queue.launch(
        &ROUTE,
        Grid { blocks: [logits.rows as u32, 1, 1], threads: 32, shared: shared as u32 },
        args,
    )
}
