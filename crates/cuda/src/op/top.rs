//! The best logits of a row: pieces of a row in many blocks, then a block for each row.

use flint_backend::ops::TopLogits;
use flint_backend::{Element, Result};

use super::require;
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static TOP_PIECES: Kernel = Kernel::new("top_pieces", "top.cu").early();
static TOP_MERGE: Kernel = Kernel::new("top_merge", "top.cu").early();

/// Most logits of a row that can be asked for.
const MOST: usize = 64;
/// Keys that a block sorts at once: the kernel's `KEYS`.
const KEYS: usize = 2048;

pub(crate) fn top_logits(queue: &mut Queue, op: &TopLogits<CudaBuffer>) -> Result<()> {
    const NAME: &str = "top_logits";
    let (values, logits) = (RowsF32::new(NAME, &op.values)?, RowsF32::new(NAME, &op.logits)?);
    let (count, rows) = (op.count, logits.rows);
    require(NAME, (1..=MOST).contains(&count) && count <= logits.width, || {
        format!("{count} of {} logits, 1 to {MOST} are possible", logits.width)
    })?;
    require(NAME, values.width == count && values.rows == rows, || {
        format!("values {} × {} for {count} of {rows} rows", values.rows, values.width)
    })?;
    op.ids.require(NAME, Element::U32, rows * count)?;
    let piece = KEYS - MOST;
    let pieces = logits.width.div_ceil(piece);
    let found = queue.scratch(NAME, rows * pieces * count * 8)?;
    let args = Args::new().address(found).rows(&logits).u32(logits.width).u32(piece).u32(count);
    let blocks = [pieces as u32, rows as u32, 1];
    queue.launch(&TOP_PIECES, Grid { blocks, threads: 256, shared: 0 }, args)?;
    let args = Args::new()
        .pointer(&op.ids, 0)
        .rows(&values)
        .rows(&logits)
        .address(found)
        .u32(pieces * count)
        .u32(count);
    queue.launch(&TOP_MERGE, Grid { blocks: [rows as u32, 1, 1], threads: 256, shared: 0 }, args)
}
