//! A DSA layer's norms and its append as one launch: see `join.rs`.

use flint_backend::Result;
use flint_backend::ops::{DsaAppend, DsaSpan, LayerNorm, RmsNorm, Rows, SelectPools};

use super::join::{MOST_ROWS, same};
use super::spans::position_room;
use super::{append, norm, select};
use crate::CudaBuffer;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static DSA_ENTER: Kernel = Kernel::new("dsa_enter", "dsa_enter.cu").early();

/// As in `kernels/dsa_enter.cu`: widths of latents and keys, threads of a block, latents of a block.
const RANK: usize = 512;
const KEY: usize = 128;
const THREADS: u32 = 256;
const TEAMS: usize = 4;

/// Whether a norm can be that of a low-rank row.
pub(super) fn begins(op: &RmsNorm<CudaBuffer>) -> bool {
    let few = (1..=MOST_ROWS).contains(&op.x.rows);
    few && norm::row_threads(op.x.width) == THREADS && same(&op.x, &op.out)
}

/// Whether a norm can be that of the latents beside it.
pub(super) fn norms_latents(low_rank: &RmsNorm<CudaBuffer>, op: &RmsNorm<CudaBuffer>) -> bool {
    op.x.width == RANK && same(&op.x, &op.out) && side_by_side(&[&low_rank.x, &op.x])
}

/// Whether a norm can be that of the keys.
pub(super) fn norms_keys(
    low_rank: &RmsNorm<CudaBuffer>,
    latents: &RmsNorm<CudaBuffer>,
    op: &LayerNorm<CudaBuffer>,
) -> bool {
    op.x.width == KEY && same(&op.x, &op.out) && side_by_side(&[&low_rank.x, &latents.x, &op.x])
}

/// Whether these rows go into the cache, all of them.
pub(super) fn appends(
    low_rank: &RmsNorm<CudaBuffer>,
    latents: &RmsNorm<CudaBuffer>,
    keys: Option<&LayerNorm<CudaBuffer>>,
    op: &DsaAppend<CudaBuffer>,
) -> bool {
    let rows: usize = op.spans.iter().map(|span| span.rows).sum();
    let indexed = match (keys, &op.keys, &op.gates) {
        (Some(norm), Some(keys), Some(gates)) => {
            same(&norm.out, keys) && side_by_side(&[&low_rank.x, &latents.x, keys, gates])
        }
        (None, None, None) => true,
        _ => false,
    };
    indexed && same(&latents.out, &op.latents) && rows == op.latents.rows
}

/// Whether all rows that were appended see no more pools than they may pick, so that the choice hangs on positions alone.
pub(super) fn picks_all(append: &DsaAppend<CudaBuffer>, op: &SelectPools<CudaBuffer>) -> bool {
    let place = |span: &DsaSpan<CudaBuffer>| (span.first_row, span.rows, span.position);
    let same_spans = append.spans.iter().map(place).eq(op.spans.iter().map(place));
    let shapes = (append.kpool, append.page_rows) == (op.kpool, op.page_rows) && op.kpool > 0;
    let rows = append.latents.rows == op.q.rows;
    shapes && same_spans && rows && position_room(&op.spans, op.page_rows) / op.kpool <= op.pools_kept
}

/// Whether all are columns of the same rows, and share none.
fn side_by_side(all: &[&Rows<CudaBuffer>]) -> bool {
    let first = all.iter().map(|rows| rows.first).min().unwrap_or(0);
    let mut columns: Vec<(usize, usize)> =
        all.iter().map(|rows| (rows.first, rows.first + rows.width)).collect();
    columns.sort_unstable();
    let apart = columns.windows(2).all(|pair| pair[0].1 <= pair[1].0);
    let alike = all.windows(2).all(|pair| {
        let buffers = pair[0].buffer.at(0) == pair[1].buffer.at(0);
        buffers && (pair[0].stride, pair[0].rows) == (pair[1].stride, pair[1].rows)
    });
    let inside = columns.last().is_some_and(|last| last.1 - first <= all[0].stride);
    alike && apart && (inside || all[0].rows == 1)
}

/// The norms, the append, and picks that hang on positions alone.
pub(super) fn enter(
    queue: &mut Queue,
    low_rank: &RmsNorm<CudaBuffer>,
    latents: &RmsNorm<CudaBuffer>,
    keys: Option<&LayerNorm<CudaBuffer>>,
    op: &DsaAppend<CudaBuffer>,
    picks: Option<&SelectPools<CudaBuffer>>,
) -> Result<()> {
    let (low, _) = norm::check_rms(low_rank)?;
    let (latent_rows, _) = norm::check_rms(latents)?;
    let appended = append::prepare(queue, op)?;
    let args = Args::new()
        .rows(&low)
        .pointer(&low_rank.weight, 0)
        .u32(low.width)
        .f32(low_rank.epsilon)
        .rows(&latent_rows)
        .pointer(&latents.weight, 0)
        .f32(latents.epsilon);
    let args = match (keys, &appended.indexer) {
        (Some(norm), Some((_, gates, ape))) => {
            let (rows, _) = norm::check_layer(norm)?;
            args.rows(&rows)
                .pointer(&norm.weight, 0)
                .pointer(&norm.bias, 0)
                .f32(norm.epsilon)
                .rows(gates)
                .address(*ape)
        }
        _ => args.address(0).u32(0).address(0).address(0).f32(0.0).address(0).u32(0).address(0),
    };
    let args = args
        .u32(low.rows)
        .u32(op.kpool)
        .u32(op.page_rows)
        .u32(op.ring_rows)
        .table(appended.tables.parts)
        .table(appended.tables.row_parts)
        .table(appended.tables.latents)
        .table(appended.tables.pooled);
    let parts = if keys.is_some() { op.spans.len() } else { 0 };
    let (args, picking) = match picks {
        Some(picks) => {
            select::check(picks)?;
            (args.u32(parts).pointer(&picks.picks, 0).u32(picks.pools_kept), low.rows)
        }
        None => (args.u32(parts).address(0).u32(0), 0),
    };
    let blocks = low.rows + low.rows.div_ceil(TEAMS) + parts + picking;
    queue.launch(&DSA_ENTER, Grid { blocks: [blocks as u32, 1, 1], threads: THREADS, shared: 0 }, args)
}
