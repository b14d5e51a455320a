//! Input rows, arranged for the kernels once a call.
//!
//! Rows travel in tiles: `[tile][block][step][row of the tile][64 bytes]`, so that a tile's operands of a step are
//! neighbours (row-major inputs whose rows are a power of two apart fall into the same few cache sets). The tail of the
//! last block is zeros.

use super::layout::{Arrangement, BLOCK, LANES, STEP_BYTES, Unit};
use super::matrix::View;

/// Sizes of one arranged set of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) view: View,
    pub(crate) rows: usize,
    /// Rows of every tile but the last.
    pub(crate) tile_rows: usize,
    pub(crate) inputs: usize,
}

impl Shape {
    pub(crate) fn blocks(&self) -> usize {
        self.inputs.div_ceil(BLOCK)
    }

    /// Bytes of a row's operands.
    pub(crate) fn row_bytes(&self) -> usize {
        if self.view.rotation.is_some() {
            return super::trellis::row_bytes(self.inputs);
        }
        self.blocks() * self.view.layout.unit.block_bytes()
    }

    /// Group sums of a row, in whole vectors.
    pub(crate) fn sums_per_row(&self) -> usize {
        self.view.group.map_or(0, |group| (self.inputs / group).next_multiple_of(LANES))
    }

    /// Bytes of everything.
    pub(crate) fn bytes(&self) -> usize {
        self.rows * (self.row_bytes() + self.sums_per_row() * size_of::<f32>())
    }

    /// Byte at which a tile's operands start.
    pub(crate) fn tile_start(&self, tile: usize) -> usize {
        tile * self.tile_rows * self.row_bytes()
    }

    /// Rows of a tile.
    pub(crate) fn rows_of(&self, tile: usize) -> usize {
        self.tile_rows.min(self.rows - tile * self.tile_rows)
    }

    pub(crate) fn tiles(&self) -> usize {
        self.rows.div_ceil(self.tile_rows)
    }

    /// Byte at which a row's group sums start.
    pub(crate) fn sums_start(&self, row: usize) -> usize {
        self.rows * self.row_bytes() + row * self.sums_per_row() * size_of::<f32>()
    }
}

/// Arranges row `row` of the set.
///
/// # Safety
/// `to` is valid for writing `shape.bytes()`, aligned to 64, and nobody else touches this row's places.
pub(crate) unsafe fn arrange_row(shape: &Shape, row: usize, x: &[f32], to: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    if shape.view.layout.unit == Unit::Dot {
        // SAFETY: the caller's promise is handed on; a CPU with the dot product has the instructions.
        return unsafe { super::arrange::arrange_dot_row(shape, row, x, to) };
    }
    let tile = row / shape.tile_rows;
    let (rows, index) = (shape.rows_of(tile), row % shape.tile_rows);
    let steps = shape.view.layout.unit.steps();
    // SAFETY: the tile and its row lie inside the set.
    let start = unsafe { to.add(shape.tile_start(tile) + index * STEP_BYTES) };
    // SAFETY: as above.
    let sums = unsafe { to.add(shape.sums_start(row)).cast::<f32>() };
    for block in 0..shape.blocks() {
        let from = &x[block * BLOCK..x.len().min((block + 1) * BLOCK)];
        let mut values = [0.0; BLOCK];
        values[..from.len()].copy_from_slice(from);
        // SAFETY: block and steps lie inside the row's places.
        unsafe { write_block(shape, &values, start.add(block * steps * rows * STEP_BYTES), rows) };
        if let Some(group) = shape.view.group {
            let first = block * (BLOCK / group);
            for (i, values) in values[..from.len()].chunks_exact(group).enumerate() {
                // SAFETY: `inputs / group` sums fit in the row's places.
                unsafe { sums.add(first + i).write(group_sum(values)) };
            }
        }
    }
    for padding in shape.view.group.map_or(0, |group| shape.inputs / group)..shape.sums_per_row() {
        // SAFETY: below `sums_per_row`.
        unsafe { sums.add(padding).write(0.0) };
    }
}

/// Writes a block's steps, `rows · 64` bytes apart.
unsafe fn write_block(shape: &Shape, values: &[f32; BLOCK], to: *mut u8, rows: usize) {
    let order = shape.view.layout.order();
    for step in 0..Unit::Fma.steps() {
        let mut lanes = [0.0f32; LANES];
        if shape.view.layout.arrangement == Arrangement::Natural {
            lanes.copy_from_slice(&values[step * LANES..(step + 1) * LANES]);
        } else {
            for (lane, input) in lanes.iter_mut().zip(&order[step * LANES..]) {
                *lane = values[usize::from(*input)];
            }
        }
        // SAFETY: the caller vouches for the block's steps of 64 bytes.
        unsafe { to.add(step * rows * STEP_BYTES).cast::<[f32; LANES]>().write(lanes) };
    }
}

/// Σ of a group: input `i` in lane `i % 16` ascending, then the pairwise fold.
fn group_sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for part in values.chunks_exact(LANES) {
        for (lane, value) in lanes.iter_mut().zip(part) {
            *lane += value;
        }
    }
    fold(&lanes)
}

/// Lane `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
#[inline(always)]
pub(crate) fn fold(lanes: &[f32; LANES]) -> f32 {
    let mut half = [0.0f32; 8];
    for i in 0..8 {
        half[i] = lanes[i] + lanes[i + 8];
    }
    let quarter = [half[0] + half[4], half[1] + half[5], half[2] + half[6], half[3] + half[7]];
    (quarter[0] + quarter[2]) + (quarter[1] + quarter[3])
}
