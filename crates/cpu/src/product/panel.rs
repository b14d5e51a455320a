//! Products by panels: a few outputs are decoded once for many rows.
//!
//! A panel's decoded weights and sums stay in the first two cache levels while the rows' tiles pass over them. The order
//! of a sum is that of `layout.rs` whatever the panel, the chunk of blocks or the tile.

use std::mem::MaybeUninit;

use super::decode::{self, BlockDecoder};
use super::input::{self, Shape};
use super::layout::{BLOCK, LANES, Unit};
use super::matrix::Part;
use super::tile::{TILE_ROWS, Tile, TileKernel};

/// Outputs of a panel.
pub(crate) const PANEL: usize = 8;
/// Blocks that are decoded at a time: with `PANEL` outputs 16 KiB of bf16, half of a 32 KiB first-level cache.
const CHUNK: usize = 4;
/// Rows that share a decoded panel: their sums fill 30 KiB.
pub(crate) const PANEL_ROWS: usize = 60;

/// What a panel product needs to know of its part.
pub(crate) struct Panels<'a> {
    pub(crate) part: &'a Part,
    pub(crate) decoder: BlockDecoder,
    pub(crate) kernels: &'a [[TileKernel; 4]; TILE_ROWS],
    /// Outputs of a tile.
    pub(crate) tile_outputs: usize,
    pub(crate) shape: Shape,
    /// The arranged rows.
    pub(crate) inputs: *const u8,
}

#[repr(C, align(64))]
struct Workspace {
    weights: [u8; PANEL * CHUNK * Unit::Fma.block_bytes()],
    sums: [f32; PANEL_ROWS * PANEL * LANES],
    scales: [f32; PANEL * CHUNK * LANES],
    tail: [u8; Unit::Fma.block_bytes()],
}

impl Panels<'_> {
    /// Computes outputs `outputs` of the rows of tiles `tiles` (at most [`PANEL_ROWS`] rows) and hands each to `write`
    /// as (row, output, value).
    ///
    /// # Safety
    /// `inputs` holds the arranged rows, the ranges lie inside the part and the set, and the CPU has the instructions
    /// of decoder and kernels.
    pub(crate) unsafe fn run(
        &self,
        outputs: std::ops::Range<usize>,
        tiles: std::ops::Range<usize>,
        write: &mut dyn FnMut(usize, usize, f32),
    ) {
        let mut workspace = MaybeUninit::<Workspace>::uninit();
        let first_row = tiles.start * self.shape.tile_rows;
        let rows = self.shape.rows.min(tiles.end * self.shape.tile_rows) - first_row;
        debug_assert!(rows <= PANEL_ROWS);
        for first in outputs.clone().step_by(PANEL) {
            let panel = first..outputs.end.min(first + PANEL);
            let count = panel.len();
            // SAFETY: the workspace is only written before it is read; ranges as the caller vouches.
            unsafe {
                let workspace = workspace.as_mut_ptr();
                self.start_sums(workspace, panel.clone(), first_row, rows);
                for block in (0..self.shape.blocks()).step_by(CHUNK) {
                    let blocks = block..self.shape.blocks().min(block + CHUNK);
                    self.decode(workspace, panel.clone(), blocks.clone());
                    self.multiply(workspace, count, tiles.clone(), blocks);
                }
                let sums = (&raw const (*workspace).sums).cast::<[f32; LANES]>();
                for row in 0..rows {
                    for n in 0..count {
                        write(first_row + row, first + n, input::fold(&*sums.add(row * PANEL + n)));
                    }
                }
            }
        }
    }

    /// Zero, or the biases' part of the sums.
    unsafe fn start_sums(
        &self,
        workspace: *mut Workspace,
        panel: std::ops::Range<usize>,
        first_row: usize,
        rows: usize,
    ) {
        let scales = self.part.scales();
        for (n, output) in panel.enumerate() {
            let biases = scales.as_ref().and_then(|scales| Some((scales.kind, scales.bias_row(output)?)));
            for row in 0..rows {
                // SAFETY: the sums of a row lie in the arranged set, the lanes in the workspace.
                unsafe {
                    let lanes = (&raw mut (*workspace).sums).cast::<[f32; LANES]>().add(row * PANEL + n);
                    lanes.write(match biases {
                        None => [0.0; LANES],
                        Some((kind, biases)) => {
                            let sums = self.inputs.add(self.shape.sums_start(first_row + row)).cast::<f32>();
                            let sums = std::slice::from_raw_parts(sums, self.shape.sums_per_row());
                            decode::bias_lanes(kind, biases, sums)
                        }
                    });
                }
            }
        }
    }

    /// Decodes a chunk of blocks of the panel.
    unsafe fn decode(
        &self,
        workspace: *mut Workspace,
        panel: std::ops::Range<usize>,
        blocks: std::ops::Range<usize>,
    ) {
        let (row_bytes, block_bytes) = (self.part.row_bytes(), self.part.block_bytes());
        let decoded = self.part.layout.unit.block_bytes();
        let scales = self.part.scales();
        for (n, output) in panel.enumerate() {
            let row = &self.part.codes()[output * row_bytes..(output + 1) * row_bytes];
            for (i, block) in blocks.clone().enumerate() {
                let codes = &row[block * block_bytes..row_bytes.min((block + 1) * block_bytes)];
                // SAFETY: a whole block of codes, in place or padded; the decoded block lies in the workspace.
                unsafe {
                    let to = (&raw mut (*workspace).weights).cast::<u8>().add((n * CHUNK + i) * decoded);
                    if codes.len() == block_bytes {
                        (self.decoder)(codes.as_ptr(), to);
                    } else {
                        let tail = (&raw mut (*workspace).tail).cast::<u8>();
                        tail.write_bytes(0, block_bytes);
                        tail.copy_from_nonoverlapping(codes.as_ptr(), codes.len());
                        (self.decoder)(tail, to);
                    }
                    let lanes = (&raw mut (*workspace).scales).cast::<[f32; LANES]>().add(n * CHUNK + i);
                    lanes.write(match &scales {
                        None => [1.0; LANES],
                        Some(scales) => {
                            decode::lane_scales(scales, scales.row(output), block, self.part.layout)
                        }
                    });
                }
            }
        }
    }

    /// Adds the products of a chunk of blocks.
    unsafe fn multiply(
        &self,
        workspace: *mut Workspace,
        outputs: usize,
        tiles: std::ops::Range<usize>,
        blocks: std::ops::Range<usize>,
    ) {
        let decoded = self.part.layout.unit.block_bytes();
        for (i, index) in tiles.enumerate() {
            let rows = self.shape.rows_of(index);
            for n in (0..outputs).step_by(self.tile_outputs) {
                let width = self.tile_outputs.min(outputs - n);
                // SAFETY: offsets inside the workspace and the arranged set.
                unsafe {
                    let start = self.shape.tile_start(index) + blocks.start * rows * decoded;
                    let sum = (i * self.shape.tile_rows * PANEL + n) * LANES;
                    let tile = Tile {
                        blocks: blocks.len(),
                        weights: (&raw const (*workspace).weights).cast::<u8>().add(n * CHUNK * decoded),
                        weight_stride: CHUNK * decoded,
                        scales: (&raw const (*workspace).scales).cast::<f32>().add(n * CHUNK * LANES),
                        scale_stride: CHUNK * LANES,
                        inputs: self.inputs.add(start),
                        sums: (&raw mut (*workspace).sums).cast::<f32>().add(sum),
                        row_stride: PANEL * LANES,
                    };
                    (self.kernels[rows - 1][width - 1])(&tile);
                }
            }
        }
    }
}

const _: () = assert!(BLOCK == LANES * 16 && PANEL.is_multiple_of(4));
