//! Matrices and their products.
//!
//! `layout.rs` defines the order of every sum, and so the bits of every output. The rest is about speed:
//! `matrix.rs` what an upload keeps, `input.rs` and `arrange.rs` rows arranged once a call, `decode/` codes to operands, `engine.rs` and
//! `tile.rs` the multiply-adds of each instruction set, `stream.rs` those of few rows, `sums.rs` where a sum starts and ends,
//! `outputs.rs` the work of a task, `trellis/` that of EXL3 matrices, `run.rs` the tasks of a call, `embed.rs` table rows.

#[cfg(target_arch = "x86_64")]
mod arrange;
mod decode;
mod embed;
mod engine;
mod input;
mod layout;
mod matrix;
mod outputs;
mod run;
#[cfg(target_arch = "x86_64")]
mod stream;
mod sums;
mod tile;
mod trellis;

use flint_backend::{Error, Result, ops};

use crate::buffer::RowsF32;
use crate::{Cpu, CpuBuffer};

pub(crate) use embed::embed;
pub use matrix::CpuMatrix;
use run::Pair;
pub(crate) use run::Run;

fn shape_error<T>(op: &'static str, what: String) -> Result<T> {
    Err(Error::Shape { op, what })
}

pub(crate) fn linear(cpu: &mut Cpu, op: &ops::Linear<CpuBuffer, CpuMatrix>) -> Result<()> {
    let (x, out) = (RowsF32::new("linear", &op.x)?, RowsF32::new("linear", &op.out)?);
    if op.matrix.members() != 1 {
        return shape_error("linear", format!("a stack ({:?}) where one matrix is needed", op.matrix));
    }
    product_rows(cpu, "linear", &op.matrix, 0, x, out)
}

/// `out[r] = W · x[r]` with one member of a matrix.
pub(crate) fn product_rows(
    cpu: &mut Cpu,
    op: &'static str,
    matrix: &CpuMatrix,
    member: usize,
    x: RowsF32,
    out: RowsF32,
) -> Result<()> {
    let (inputs, outputs) = (matrix.inputs(), matrix.outputs());
    if x.width != inputs || out.width != outputs || x.rows != out.rows || member >= matrix.members() {
        let what = format!("[{}, {}] = {matrix:?} · [{}, {}]", out.rows, out.width, x.rows, x.width);
        return shape_error(op, what);
    }
    call(cpu, matrix, |run| {
        for row in 0..x.rows {
            // SAFETY: both rows exist; the slices end here, only their places are kept.
            run.pairs.push(unsafe { Pair { x: x.row(row).as_ptr(), out: out.row_mut(row).as_mut_ptr() } });
        }
        run.group(member, 0);
        Ok(())
    })
}

pub(crate) fn head_linear(cpu: &mut Cpu, op: &ops::HeadLinear<CpuBuffer, CpuMatrix>) -> Result<()> {
    let (x, out) = (RowsF32::new("head_linear", &op.x)?, RowsF32::new("head_linear", &op.out)?);
    let (inputs, outputs, heads) = (op.stack.inputs(), op.stack.outputs(), op.stack.members());
    if x.width != heads * inputs || out.width != heads * outputs || x.rows != out.rows {
        let what = format!("[{}, {}] = {:?} · [{}, {}]", out.rows, out.width, op.stack, x.rows, x.width);
        return shape_error("head_linear", what);
    }
    call(cpu, &op.stack, |run| {
        for head in 0..heads {
            let first = run.pairs.len();
            for row in 0..x.rows {
                // SAFETY: both rows exist and hold `heads` parts; only the places are kept.
                run.pairs.push(unsafe {
                    Pair {
                        x: x.row(row).as_ptr().add(head * inputs),
                        out: out.row_mut(row).as_mut_ptr().add(head * outputs),
                    }
                });
            }
            run.group(head, first);
        }
        Ok(())
    })
}

pub(crate) fn expert_linear(cpu: &mut Cpu, op: &ops::ExpertLinear<CpuBuffer, CpuMatrix>) -> Result<()> {
    const OP: &str = "expert_linear";
    let (x, out) = (RowsF32::new(OP, &op.x)?, RowsF32::new(OP, &op.out)?);
    let pairs = out.rows;
    let shared = x.rows * op.picks_per_row == pairs;
    if x.width != op.stack.inputs() || out.width != op.stack.outputs() || !(shared || x.rows == pairs) {
        let what = format!(
            "[{pairs}, {}] = {:?} · [{}, {}] with {} picks a row",
            out.width, op.stack, x.rows, x.width, op.picks_per_row
        );
        return shape_error(OP, what);
    }
    // SAFETY: nothing writes picks and slots while this operation runs: its output has another element type.
    let (picks, slots) = unsafe { (op.picks.u32s(OP, pairs)?, op.slots.u32s(OP, 0)?) };
    let stack = op.stack.stacked();
    let filled = |slot: usize| stack.members.get(slot).is_some_and(|member| !member.parts.is_empty());
    let mut by_slot = Vec::with_capacity(pairs);
    for (pair, pick) in picks[..pairs].iter().enumerate() {
        match slots.get(*pick as usize) {
            Some(&ops::ABSENT) => {}
            Some(slot) if filled(*slot as usize) => by_slot.push((*slot as usize, pair)),
            slot => {
                let what = format!("pick {pick} is in slot {slot:?} of {:?}", op.stack);
                return shape_error(OP, what);
            }
        }
    }
    // One expert's pairs together: its weights are read once for all of them.
    by_slot.sort_unstable();
    call(cpu, &op.stack, |run| {
        for group in by_slot.chunk_by(|a, b| a.0 == b.0) {
            let first = run.pairs.len();
            for (_, pair) in group {
                let row = if shared { pair / op.picks_per_row } else { *pair };
                // SAFETY: both rows exist; only the places are kept.
                run.pairs
                    .push(unsafe { Pair { x: x.row(row).as_ptr(), out: out.row_mut(*pair).as_mut_ptr() } });
            }
            run.group(group[0].0, first);
        }
        Ok(())
    })
}

/// Runs a call whose pairs and groups `fill` names.
fn call(cpu: &mut Cpu, matrix: &CpuMatrix, fill: impl FnOnce(&mut Run) -> Result<()>) -> Result<()> {
    let mut run = std::mem::take(&mut cpu.run);
    run.clear();
    let result = fill(&mut run).and_then(|()| {
        // SAFETY: every pair was made from checked rows of the matrix's widths; operations write rows that overlap
        // nothing else (the contract of `ops`).
        unsafe { run.multiply(cpu, &matrix.stacked()) }
    });
    cpu.run = run;
    result
}
