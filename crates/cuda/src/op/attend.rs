//! Absorbed latent attention: a block for all heads of a row where warp groups multiply, else for each group of heads, or of
//! each segment of a row's list when there are few rows. All give the same bits.

use flint_backend::ops::Attend;
use flint_backend::{Element, Result};

use super::require;
use super::spans::{DsaTables, PageShape};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static ATTEND_ROWS_1: Kernel = Kernel::new("attend_rows_1", "attend.cu");
static ATTEND_ROWS_2: Kernel = Kernel::new("attend_rows_2", "attend.cu");
static ATTEND_SEGMENTS_1: Kernel = Kernel::new("attend_segments_1", "attend.cu");
static ATTEND_SEGMENTS_2: Kernel = Kernel::new("attend_segments_2", "attend.cu");
static ATTEND_FOLD: Kernel = Kernel::new("attend_fold", "attend.cu");
static ATTEND_ANY: Kernel = Kernel::new("attend_any", "attend.cu");
static ATTEND_ROWS_WARPGROUP: Kernel = Kernel::new("attend_rows_warpgroup", "attend_warpgroup.cu");

/// Heads of a block, and entries of a segment: as in the kernel.
const HEADS: usize = 16;
const SEGMENT: usize = 512;
/// Widest latent: eight warps with 64 values each.
const MAX_RANK: usize = 512;
/// Shared memory of a block of latents, and of a group of heads: the kernel's `Room`.
const LATENTS_ROOM: usize = 64 * 512 * 2;
const GROUP_ROOM: usize = 2 * 16 * 520 * 2 + 2 * 16 * 72 * 4 + 2 * 16 * 72 * 2 + 16 * 4 + 16 * 8;
const PLACES_ROOM: usize = 2 * 64 * 8;
/// The capability with warp groups, their kernel's heads of two blocks, the only latents that it takes, rows from which it is
/// the faster one, and its shared memory: as in `kernels/attend_warpgroup.cu`.
const CAPABILITY: u32 = 90;
const WARPGROUP_HEADS: usize = 64;
const WARPGROUP_RANK: usize = 512;
const WARPGROUP_ROWS: usize = 64;
const WARPGROUP_ROOM: usize = 3 * 64 * 256 * 2 + 64 * 64 * 4 + 64 * 8 + 2 * 8;

pub(crate) fn attend(queue: &mut Queue, op: &Attend<CudaBuffer>) -> Result<()> {
    const NAME: &str = "attend";
    let (out, q) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.q)?);
    let rank = op.kv_lora_rank;
    require(NAME, rank > 0 && q.width.is_multiple_of(rank) && q.width > 0, || {
        format!("q of {} for latents of {rank}", q.width)
    })?;
    require(NAME, out.width == q.width && out.rows == q.rows, || {
        format!("{} × {} from {} × {}", out.rows, out.width, q.rows, q.width)
    })?;
    op.picks.require(NAME, Element::U32, q.rows * op.pools_kept)?;
    let shape = PageShape { kpool: op.kpool, page_rows: op.page_rows, latent_width: rank, key_width: 0 };
    let tables = DsaTables::new(queue, NAME, &op.spans, q.rows, shape)?;
    let (rows, heads) = (q.rows, q.width / rank);
    let of = |args: Args| {
        args.rows(&q)
            .pointer(&op.picks, 0)
            .u32(heads)
            .u32(op.pools_kept)
            .u32(rank)
            .u32(op.kpool)
            .u32(op.page_rows)
            .f32(op.scale)
            .table(tables.parts)
            .table(tables.row_parts)
            .table(tables.latents)
    };
    if !rank.is_multiple_of(8) || rank > MAX_RANK {
        let grid = Grid { blocks: [heads as u32, rows as u32, 1], threads: 128, shared: (8 * rank) as u32 };
        return queue.launch(&ATTEND_ANY, grid, of(Args::new().rows(&out)));
    }
    let limits = queue.limits();
    let pieces = q.address.is_multiple_of(16) && q.stride.is_multiple_of(4);
    let pairs = out.address.is_multiple_of(8) && out.stride.is_multiple_of(2);
    if limits.capability == CAPABILITY && rank == WARPGROUP_RANK && rows >= WARPGROUP_ROWS && pieces && pairs
    {
        let blocks = [2 * heads.div_ceil(WARPGROUP_HEADS) as u32, rows as u32, 1];
        let grid = Grid { blocks, threads: 128, shared: WARPGROUP_ROOM as u32 };
        return queue.launch(&ATTEND_ROWS_WARPGROUP, grid, of(Args::new().rows(&out)));
    }
    let room = |groups: usize, buffers: usize| buffers * LATENTS_ROOM + groups * GROUP_ROOM + PLACES_ROOM;
    let shared_bytes = limits.shared_bytes as usize;
    let buffers = if shared_bytes >= room(2, 2) { 2 } else { 1 };
    require(NAME, shared_bytes >= room(1, 1), || {
        format!("{shared_bytes} bytes of shared memory in a block, {} are needed", room(1, 1))
    })?;
    let grid =
        |blocks, groups| Grid { blocks, threads: 256 * groups as u32, shared: room(groups, buffers) as u32 };
    let segments = ((op.pools_kept + 1) * op.kpool - 1).div_ceil(SEGMENT);
    // Enough rows for every multiprocessor: no other kernel has to fold.
    let blocks = heads.div_ceil(buffers * HEADS);
    if segments == 1 || rows * blocks >= 2 * limits.multiprocessors as usize {
        let kernel = if buffers == 2 { &ATTEND_ROWS_2 } else { &ATTEND_ROWS_1 };
        // With two buffers, two groups of heads share them.
        let grid = grid([blocks as u32, rows as u32, 1], buffers);
        return queue.launch(kernel, grid, of(Args::new().rows(&out)));
    }
    let sums = queue.scratch("attend", rows * heads * segments * rank * 4)?;
    let states = queue.scratch("attend states", rows * heads * segments * 8)?;
    let kernel = if buffers == 2 { &ATTEND_SEGMENTS_2 } else { &ATTEND_SEGMENTS_1 };
    let blocks = [segments as u32, heads.div_ceil(HEADS) as u32, rows as u32];
    queue.launch(kernel, grid(blocks, 1), of(Args::new().address(sums).address(states)))?;
    let fold = Args::new()
        .rows(&out)
        .address(sums)
        .address(states)
        .u32(segments)
        .u32(heads)
        .u32(op.pools_kept)
        .u32(rank)
        .u32(op.kpool)
        .pointer(&op.picks, 0)
        .table(tables.parts)
        .table(tables.row_parts);
    queue.launch(&ATTEND_FOLD, Grid { blocks: [heads as u32, rows as u32, 1], threads: 128, shared: 0 }, fold)
}
