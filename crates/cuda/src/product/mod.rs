//! Matrices and their products.
//!
//! `table.rs` what kernels know of a matrix, `arrange.rs` uploads, `groups.rs` which rows meet which member, `stream.rs` products
//! of few rows, `tile.rs` of many (`warpgroup.rs`
//! where the device has warp groups), `rows.rs` those in fp32, `embed.rs` rows of a table.
//!
//! The order of every sum follows from inputs and encoding alone (`kernels/product/`): one chain of tensor-core products from
//! zero for each slice of 512 inputs, slices added in ascending order. Where scales are fp32, each group's products start from
//! zero and are folded into the slice's sum in ascending order.

pub(crate) mod arrange;
mod embed;
mod groups;
mod rows;
mod stream;
pub(crate) mod table;
mod tile;
mod warpgroup;

use flint_backend::ops::{ExpertLinear, HeadLinear, Linear};
use flint_backend::{Element, Error, Result};

use crate::buffer::RowsF32;
use crate::queue::Queue;
use crate::{CudaBuffer, CudaMatrix};

pub(crate) use embed::embed;
use groups::{Groups, Manner};

fn shape_error<T>(op: &'static str, what: String) -> Result<T> {
    Err(Error::Shape { op, what })
}

/// Queues [`Linear`].
pub(crate) fn linear(queue: &mut Queue, op: &Linear<CudaBuffer, CudaMatrix>) -> Result<()> {
    const OP: &str = "linear";
    let (x, out, stack) = (RowsF32::new(OP, &op.x)?, RowsF32::new(OP, &op.out)?, op.matrix.stacked());
    if stack.members != 1 || x.width != stack.inputs || out.width != stack.outputs || x.rows != out.rows {
        let what = format!("[{}, {}] = {:?} · [{}, {}]", out.rows, out.width, op.matrix, x.rows, x.width);
        return shape_error(OP, what);
    }
    multiply(queue, stack, &Groups::new(Manner::RowsOfOne, x, out, stack))
}

/// Queues [`HeadLinear`].
pub(crate) fn head_linear(queue: &mut Queue, op: &HeadLinear<CudaBuffer, CudaMatrix>) -> Result<()> {
    const OP: &str = "head_linear";
    let (x, out, stack) = (RowsF32::new(OP, &op.x)?, RowsF32::new(OP, &op.out)?, op.stack.stacked());
    let heads = stack.members;
    if x.width != heads * stack.inputs || out.width != heads * stack.outputs || x.rows != out.rows {
        let what = format!("[{}, {}] = {:?} · [{}, {}]", out.rows, out.width, op.stack, x.rows, x.width);
        return shape_error(OP, what);
    }
    multiply(queue, stack, &Groups::new(Manner::PartAMember, x, out, stack))
}

/// Queues [`ExpertLinear`].
pub(crate) fn expert_linear(queue: &mut Queue, op: &ExpertLinear<CudaBuffer, CudaMatrix>) -> Result<()> {
    const OP: &str = "expert_linear";
    let (x, out, stack) = (RowsF32::new(OP, &op.x)?, RowsF32::new(OP, &op.out)?, op.stack.stacked());
    let (pairs, picks_per_row) = (out.rows, op.picks_per_row);
    let shared = x.rows * picks_per_row == pairs;
    if x.width != stack.inputs || out.width != stack.outputs || !(shared || x.rows == pairs) || pairs == 0 {
        let what = format!(
            "[{pairs}, {}] = {:?} · [{}, {}] with {picks_per_row} picks a row",
            out.width, op.stack, x.rows, x.width
        );
        return if pairs == 0 { Ok(()) } else { shape_error(OP, what) };
    }
    op.picks.require(OP, Element::U32, pairs)?;
    op.slots.require(OP, Element::U32, 1)?;
    let mut groups = Groups::new(Manner::Picked, x, out, stack);
    groups.rows = pairs / picks_per_row.max(1);
    groups.picks = op.picks.at(0);
    groups.slots = op.slots.at(0);
    groups.experts = op.slots.len();
    groups.picks_per_row = picks_per_row;
    groups.paired = !shared;
    multiply(queue, stack, &groups)
}

/// Queues the products of all parts.
fn multiply(queue: &mut Queue, stack: &crate::matrix::Stack, groups: &Groups) -> Result<()> {
    if groups.rows == 0 {
        return Ok(());
    }
    if tile::takes(groups) && warpgroup::takes(queue, stack) {
        warpgroup::multiply(queue, stack, groups)?;
    } else if tile::takes(groups) {
        tile::multiply(queue, stack, groups)?;
    } else {
        for units in &stack.units {
            stream::multiply(queue, stream::Job { stack, units, groups }, None)?;
        }
    }
    if let Some(parts) = &stack.rows {
        rows::multiply(queue, stack, parts, groups)?;
    }
    Ok(())
}
