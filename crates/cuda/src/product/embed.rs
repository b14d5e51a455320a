//! Rows of a table.

use flint_backend::ops::Embed;
use flint_backend::{Element, Result};

use super::shape_error;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};
use crate::{CudaBuffer, CudaMatrix};

static EMBED_UNITS: Kernel = Kernel::new("product_embed_units", "product_embed.cu");
static EMBED_ROWS: Kernel = Kernel::new("product_embed_rows", "product_embed.cu");

/// Queues [`Embed`].
pub(crate) fn embed(queue: &mut Queue, op: &Embed<CudaBuffer, CudaMatrix>) -> Result<()> {
    const OP: &str = "embed";
    let (out, table) = (RowsF32::new(OP, &op.out)?, op.table.stacked());
    op.tokens.require(OP, Element::U32, out.rows)?;
    let (kernel, address, count) = match (table.units.as_slice(), &table.rows) {
        ([units], None) => (&EMBED_UNITS, units.table, units.parts.len()),
        ([], Some(rows)) => (&EMBED_ROWS, rows.table, rows.count),
        _ => return shape_error(OP, format!("{:?} whose parts have unlike encodings", op.table)),
    };
    if out.width != table.inputs || table.members != 1 {
        return shape_error(OP, format!("rows of {} from {:?}", out.width, op.table));
    }
    let args = Args::new()
        .address(address)
        .u32(count)
        .u32(table.inputs)
        .pointer(&op.tokens, 0)
        .address(out.address)
        .u64(out.stride as u64)
        .u32(table.outputs);
    // A few elements a thread: their codes and scales are read one after the other.
    let blocks = [out.rows as u32, out.width.div_ceil(256) as u32, 1];
    queue.launch(kernel, Grid { blocks, threads: 256, shared: 0 }, args)
}
