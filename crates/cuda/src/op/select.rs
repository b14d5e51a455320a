//! Which pools a row attends to: scores of many rows at once, then a block for each row that picks the best.

use flint_backend::ops::SelectPools;
use flint_backend::{Element, Result};

use super::require;
use super::spans::{DsaTables, PageShape};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static SCORE_POOLS: Kernel = Kernel::new("score_pools", "select.cu").early();
static SCORE_POOLS_WARPGROUP: Kernel = Kernel::new("score_pools_warpgroup", "select_warpgroup.cu");
static PICK_POOLS: Kernel = Kernel::new("pick_pools", "select.cu").early();

/// Pools of a block that scores.
const BLOCK_POOLS: usize = 256;
/// Widest key: it stands in registers.
const MAX_KEY: usize = 128;
/// The capability with warp groups, the only heads and keys that their kernel takes, rows from which it is the faster one, pools
/// and rows of a block, and its shared memory: as in `kernels/select_warpgroup.cu`.
const CAPABILITY: u32 = 90;
const WARPGROUP_HEADS: usize = 32;
const WARPGROUP_KEY: usize = 128;
const WARPGROUP_LEAST_ROWS: usize = 256;
const WARPGROUP_POOLS: usize = 128;
const WARPGROUP_ROWS: usize = 64;
const WARPGROUP_ROOM: u32 = 2 * 3 * 32 * 128 * 2 + 2 * 64 * 4;
/// Scores that stand in memory at once: 64 MB.
const SCORES: usize = 1 << 24;

const NAME: &str = "select_pools";

/// Checks the operands of [`SelectPools`]: q and weights.
pub(super) fn check(op: &SelectPools<CudaBuffer>) -> Result<(RowsF32, RowsF32)> {
    let (q, weights) = (RowsF32::new(NAME, &op.q)?, RowsF32::new(NAME, &op.weights)?);
    let (heads, dim) = (weights.width, op.head_dim);
    require(NAME, heads > 0 && q.width == heads * dim && q.rows == weights.rows, || {
        format!("q {} × {}, weights {} × {heads}, head {dim}", q.rows, q.width, weights.rows)
    })?;
    require(NAME, (1..=MAX_KEY).contains(&dim), || {
        format!("heads of {dim}, at most {MAX_KEY} are possible")
    })?;
    op.picks.require(NAME, Element::U32, q.rows * op.pools_kept)?;
    Ok((q, weights))
}

pub(crate) fn select_pools(queue: &mut Queue, op: &SelectPools<CudaBuffer>) -> Result<()> {
    let (q, weights) = check(op)?;
    let (heads, dim) = (weights.width, op.head_dim);
    let shape = PageShape { kpool: op.kpool, page_rows: op.page_rows, latent_width: 0, key_width: dim };
    let tables = DsaTables::new(queue, NAME, &op.spans, q.rows, shape)?;
    let room = tables.position_room / op.kpool;
    let at_once = (SCORES / room).clamp(1, q.rows.max(1));
    // Where every visible pool is picked there is nothing to score.
    let scored = room > op.pools_kept;
    let scores = queue.scratch(NAME, if scored { at_once * room * 4 } else { 4 })?;
    // Fragments of a row's queries: three terms of two registers for each lane, step and tile of heads.
    let shared = heads.div_ceil(8) * dim.div_ceil(32) * 2 * 3 * 32 * 8;
    let pieces = q.address.is_multiple_of(16) && q.stride.is_multiple_of(4);
    let pairs = weights.address.is_multiple_of(8) && weights.stride.is_multiple_of(2);
    let warpgroup = queue.limits().capability == CAPABILITY
        && (heads, dim) == (WARPGROUP_HEADS, WARPGROUP_KEY)
        && q.rows >= WARPGROUP_LEAST_ROWS
        && pieces
        && pairs;
    for first in (0..q.rows).step_by(at_once) {
        let rows = at_once.min(q.rows - first) as u32;
        if scored && warpgroup {
            let score = Args::new()
                .address(scores)
                .u32(room)
                .rows(&q)
                .rows(&weights)
                .u32(op.pools_kept)
                .u32(op.kpool)
                .u32(op.page_rows)
                .u32(first)
                .u32(rows as usize)
                .table(tables.parts)
                .table(tables.row_parts)
                .table(tables.pooled);
            let blocks = [room.div_ceil(WARPGROUP_POOLS) as u32, rows.div_ceil(WARPGROUP_ROWS as u32), 1];
            let grid = Grid { blocks, threads: 256, shared: WARPGROUP_ROOM };
            queue.launch(&SCORE_POOLS_WARPGROUP, grid, score)?;
        }
        let score = Args::new()
            .address(scores)
            .u32(room)
            .rows(&q)
            .rows(&weights)
            .u32(heads)
            .u32(dim)
            .u32(op.pools_kept)
            .u32(op.kpool)
            .u32(op.page_rows)
            .u32(first)
            .table(tables.parts)
            .table(tables.row_parts)
            .table(tables.pooled);
        if scored && !warpgroup {
            let blocks = [room.div_ceil(BLOCK_POOLS) as u32, rows, 1];
            queue.launch(&SCORE_POOLS, Grid { blocks, threads: 256, shared: shared as u32 }, score)?;
        }
        let pick = Args::new()
            .pointer(&op.picks, 0)
            .address(scores)
            .u32(room)
            .u32(op.pools_kept)
            .u32(op.kpool)
            .u32(first)
            .table(tables.parts)
            .table(tables.row_parts);
        queue.launch(&PICK_POOLS, Grid { blocks: [rows, 1, 1], threads: 512, shared: 0 }, pick)?;
    }
    Ok(())
}
