//! Appends rows to a DSA layer's cache: a block for each row.

use flint_backend::ops::{DsaAppend, Rows};
use flint_backend::{Element, Result};

use super::require;
use super::spans::{DsaTables, PageShape};
use crate::CudaBuffer;
use crate::buffer::RowsF32;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static DSA_APPEND: Kernel = Kernel::new("dsa_append", "append.cu").early();

const NAME: &str = "dsa_append";

/// The operands of [`DsaAppend`], checked, and its tables.
pub(super) struct Appended {
    pub(super) latents: RowsF32,
    /// Keys, gates and the address of ape; `None` for a layer without an indexer of its own.
    pub(super) indexer: Option<(RowsF32, RowsF32, u64)>,
    pub(super) tables: DsaTables,
}

/// Checks the operands of [`DsaAppend`] and writes its tables.
pub(super) fn prepare(queue: &mut Queue, op: &DsaAppend<CudaBuffer>) -> Result<Appended> {
    let latents = RowsF32::new(NAME, &op.latents)?;
    let indexer = indexer(op, latents.rows)?;
    let key_width = indexer.map_or(0, |(keys, ..)| keys.width);
    let shape =
        PageShape { kpool: op.kpool, page_rows: op.page_rows, latent_width: latents.width, key_width };
    let tables = DsaTables::new(queue, NAME, &op.spans, latents.rows, shape)?;
    Ok(Appended { latents, indexer, tables })
}

pub(crate) fn dsa_append(queue: &mut Queue, op: &DsaAppend<CudaBuffer>) -> Result<()> {
    let Appended { latents, indexer, tables } = prepare(queue, op)?;
    let width = indexer.map_or(0, |(keys, ..)| keys.width);
    let mut args = Args::new().rows(&latents);
    args = match &indexer {
        Some((keys, gates, ape)) => args.rows(keys).rows(gates).address(*ape),
        None => args.address(0).u32(0).address(0).u32(0).address(0),
    };
    let args = args
        .u32(latents.width)
        .u32(width)
        .u32(op.kpool)
        .u32(op.page_rows)
        .u32(op.ring_rows)
        .table(tables.parts)
        .table(tables.row_parts)
        .table(tables.latents)
        .table(tables.pooled);
    queue.launch(&DSA_APPEND, Grid { blocks: [latents.rows as u32, 1, 1], threads: 128, shared: 0 }, args)
}

/// Keys, gates and the address of ape, checked; `None` for a layer without an indexer of its own.
fn indexer(op: &DsaAppend<CudaBuffer>, rows: usize) -> Result<Option<(RowsF32, RowsF32, u64)>> {
    let (Some(keys), Some(gates), Some(ape)) = (&op.keys, &op.gates, &op.ape) else {
        let none = op.keys.is_none() && op.gates.is_none() && op.ape.is_none();
        require(NAME, none, || "keys, gates and ape come together".into())?;
        return Ok(None);
    };
    let rows_of = |of: &Rows<CudaBuffer>| RowsF32::new(NAME, of);
    let (keys, gates) = (rows_of(keys)?, rows_of(gates)?);
    require(
        NAME,
        keys.width == gates.width && keys.width > 0 && keys.rows == rows && gates.rows == rows,
        || {
            format!(
                "keys {} × {}, gates {} × {}, {rows} rows",
                keys.rows, keys.width, gates.rows, gates.width
            )
        },
    )?;
    require(NAME, op.ring_rows >= op.kpool, || {
        format!("a ring of {} rows for pools of {}", op.ring_rows, op.kpool)
    })?;
    ape.require(NAME, Element::F32, op.kpool * keys.width)?;
    for span in &op.spans {
        span.ring.require(NAME, Element::F32, op.ring_rows * 2 * keys.width)?;
    }
    Ok(Some((keys, gates, ape.at(0))))
}
