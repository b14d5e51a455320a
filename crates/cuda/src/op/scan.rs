//! The delta-rule recurrence of a KDA layer.

use flint_backend::ops::KdaScan;
use flint_backend::{Element, Result};

use super::require;
use super::spans::{KdaPart, kda_parts};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static KDA_SCAN_128: Kernel = Kernel::new("kda_scan_128", "scan.cu");
static KDA_SCAN: Kernel = Kernel::new("kda_scan", "scan.cu");
static KDA_LOG: Kernel = Kernel::new("kda_log", "scan.cu");

/// Widest head: 32 columns of its state must fit in shared memory.
const MAX_HEAD_DIM: usize = 256;

/// The rows of a scan, checked.
pub(super) struct Scanned {
    pub(super) out: RowsF32,
    pub(super) qkv: RowsF32,
    pub(super) decay: RowsF32,
    pub(super) beta: RowsF32,
}

/// Checks the operands of [`KdaScan`].
pub(super) fn check(op: &KdaScan<CudaBuffer>) -> Result<Scanned> {
    const NAME: &str = "kda_scan";
    let (out, qkv) = (RowsF32::new(NAME, &op.out)?, RowsF32::new(NAME, &op.qkv)?);
    let (decay, beta) = (RowsF32::new(NAME, &op.decay)?, RowsF32::new(NAME, &op.beta)?);
    let (dim, channels, heads) = (op.head_dim, out.width, beta.width);
    require(NAME, (1..=MAX_HEAD_DIM).contains(&dim) && heads * dim == channels, || {
        format!("{heads} heads of {dim} (at most {MAX_HEAD_DIM}) for {channels} channels")
    })?;
    require(NAME, qkv.width == 3 * channels && decay.width == channels, || {
        format!("{channels} channels, q, k, v of {}, decay of {}", qkv.width, decay.width)
    })?;
    let rows = out.rows;
    require(NAME, qkv.rows == rows && decay.rows == rows && beta.rows == rows, || {
        format!("{rows}, {}, {} and {} rows", qkv.rows, decay.rows, beta.rows)
    })?;
    for span in &op.spans {
        span.state.require(NAME, Element::F32, heads * dim * dim)?;
        span.log.require(NAME, Element::F32, span.logged.max(span.drafts) * (3 * channels + heads))?;
    }
    Ok(Scanned { out, qkv, decay, beta })
}

pub(crate) fn kda_scan(queue: &mut Queue, op: &KdaScan<CudaBuffer>) -> Result<()> {
    let Scanned { out, qkv, decay, beta } = check(op)?;
    let (dim, channels, heads) = (op.head_dim, out.width, beta.width);
    let parts = kda_parts("kda_scan", &op.spans, out.rows)?;
    let table = queue.table(&parts, parts.len() * size_of::<KdaPart>())?;
    let args = Args::new().rows(&out).rows(&qkv).rows(&decay).rows(&beta).u32(heads).u32(dim).table(table);
    let spans = parts.len() as u32;
    if dim == 128 {
        queue.launch(
            &KDA_SCAN_128,
            Grid { blocks: [2, heads as u32, spans], threads: 256, shared: 0 },
            args,
        )?;
    } else {
        let blocks = [dim.div_ceil(32) as u32, heads as u32, spans];
        queue.launch(&KDA_SCAN, Grid { blocks, threads: 32, shared: (dim * 32 * 4) as u32 }, args)?;
    }
    let drafts = op.spans.iter().map(|span| span.drafts).max().unwrap_or(0);
    let args = Args::new().rows(&qkv).rows(&decay).rows(&beta).u32(channels).u32(heads).table(table);
    let blocks = [(3 * channels + heads).div_ceil(1024) as u32, drafts as u32, spans];
    queue.launch(&KDA_LOG, Grid { blocks, threads: 256, shared: 0 }, args)
}
