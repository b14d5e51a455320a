//! Products in fp32: [`Precision::Full`](flint_backend::Precision::Full), and plain numbers of fp16 or fp32.

use flint_backend::Result;

use super::groups::{Groups, Manner};
use crate::kernels::Kernel;
use crate::matrix::{RowParts, Stack};
use crate::queue::{Args, Grid, Queue};

static ROWS_FEW: Kernel = Kernel::new("product_rows_few", "product_rows.cu");
static ROWS_MANY: Kernel = Kernel::new("product_rows_many", "product_rows.cu");

/// As in `kernels/product_rows.cu`: inputs of a slice, rows of a warp, rows and outputs of a tile.
const SLICE: usize = 64;
const FEW: usize = 4;
const TILE: usize = 64;
/// Rows from which tiles pay.
const MANY: usize = 512;
/// Warps of a block for few rows.
const WARPS: usize = 4;
/// Most groups side by side.
const SIDE_BY_SIDE: usize = 4096;

pub(crate) fn multiply(queue: &mut Queue, stack: &Stack, parts: &RowParts, groups: &Groups) -> Result<()> {
    let args = Args::new().address(parts.table).u32(parts.count).u32(stack.inputs).address(groups.x.address);
    if groups.manner == Manner::RowsOfOne && groups.rows >= MANY {
        let (across, down) = (stack.outputs.div_ceil(TILE), groups.rows.div_ceil(TILE));
        let grid = Grid { blocks: [across as u32, down as u32, 1], threads: 256, shared: 0 };
        let args = args
            .u64(groups.x.stride as u64)
            .address(groups.out.address)
            .u64(groups.out.stride as u64)
            .u32(groups.rows)
            .u32(stack.outputs);
        return queue.launch(&ROWS_MANY, grid, args);
    }
    let sorted = if groups.needs_sorting() { Some(groups.sort(queue, FEW)?) } else { None };
    let across = stack.outputs.div_ceil(WARPS);
    let grid = Grid {
        blocks: [across as u32, groups.most(FEW).min(SIDE_BY_SIDE) as u32, 1],
        threads: 32 * WARPS as u32,
        shared: (WARPS * stack.inputs.div_ceil(SLICE) * FEW * 4) as u32,
    };
    queue.launch(&ROWS_FEW, grid, groups.args(args.address(groups.out.address), FEW, sorted))
}
