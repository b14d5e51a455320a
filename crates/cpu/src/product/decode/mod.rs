//! From stored codes to the operands of a step: one block of one output at a time.

mod portable;

use flint_weights::{Form, PlainType};

use super::layout::{BLOCK, LANES, Layout, Unit};
use super::matrix::Scales;
use crate::Level;

/// Decodes a whole block: reads `Part::block_bytes` codes, writes `Unit::block_bytes` operands in the layout's order.
///
/// # Safety
/// The pointers cover these bytes, `to` is aligned to 64, and the CPU has the decoder's instructions.
pub(crate) type BlockDecoder = unsafe fn(from: *const u8, to: *mut u8);

/// The decoder of a form.
pub(crate) fn decoder(_level: Level, layout: Layout, form: &Form) -> BlockDecoder {
    portable::decoder(layout, form)
}

/// The scale of each lane of a block.
pub(crate) fn lane_scales(scales: &Scales, row: &[u8], block: usize, layout: Layout) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    for (lane, scale) in lanes.iter_mut().enumerate() {
        let group = (block * BLOCK + layout.first_input(lane)) / scales.group;
        if group < scales.per_row {
            *scale = scales.kind.read(row, group);
        }
    }
    lanes
}

/// `fma` of 16 biases at a time with the inputs' group sums: lane `i` takes groups `i`, `i + 16`, …. Both are padded
/// with zeros to whole vectors.
pub(crate) fn bias_lanes(kind: PlainType, biases: &[u8], sums: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    let groups = biases.len() / kind.size();
    for (group, sum) in sums.iter().enumerate() {
        let bias = if group < groups { kind.read(biases, group) } else { 0.0 };
        let lane = &mut lanes[group % LANES];
        *lane = bias.mul_add(*sum, *lane);
    }
    lanes
}

const _: () = assert!(Unit::Fma.block_bytes() == BLOCK * 4 && Unit::Dot.block_bytes() == BLOCK * 2);
