//! Some outputs of a part for some rows: the work of one task.
//!
//! Sums start with the biases, take the blocks in chunks and are folded at the end. A chunk is multiplied as it streams
//! by (`stream.rs`, few rows) or decoded once for many rows (`tile.rs`). The order of a sum is that of `layout.rs` either
//! way; chunks and panels only choose what stays in a cache.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::decode::BlockDecoder;
use super::input::Shape;
use super::layout::{LANES, Unit};
use super::matrix::{Part, Scales};
use super::run::Pair;
#[cfg(target_arch = "x86_64")]
use super::stream::{self, Stream, StreamKernel};
use super::sums::{Biases, LaneScales, SumKernels};
use super::tile::{TILE_ROWS, Tile, TileKernel};

/// Outputs of a decoded panel.
pub(crate) const PANEL: usize = 8;
/// Blocks that are decoded at a time: with `PANEL` outputs 16 KiB of bf16, half of a 32 KiB first-level cache.
const CHUNK: usize = 4;
/// Rows that share a decoded panel: their sums fill 30 KiB.
pub(crate) const PANEL_ROWS: usize = 60;
/// Outputs that stream together: with 8 rows their sums fill 16 KiB.
const STREAM: usize = 32;

/// How a chunk is multiplied.
#[derive(Clone, Copy)]
pub(crate) enum Method {
    /// In registers.
    #[cfg(target_arch = "x86_64")]
    Stream(StreamKernel),
    /// Through a decoded panel.
    Panel {
        decoder: BlockDecoder,
        tiles: &'static [[TileKernel; 4]; TILE_ROWS],
        /// Outputs of the widest tile.
        tile_outputs: usize,
    },
}

/// What a task knows of its part.
pub(crate) struct Outputs<'a> {
    pub(crate) part: &'a Part,
    pub(crate) scales: Option<Scales<'a>>,
    pub(crate) lanes: Option<LaneScales>,
    pub(crate) sums: SumKernels,
    pub(crate) method: Method,
    pub(crate) shape: Shape,
    /// The arranged rows.
    pub(crate) inputs: *const u8,
    /// Their places in the call.
    pub(crate) pairs: &'a [Pair],
}

#[repr(C, align(64))]
struct Workspace {
    weights: [u8; PANEL * CHUNK * Unit::Fma.block_bytes()],
    /// `[rows, outputs, 16]` with [`PANEL`] or [`STREAM`] outputs.
    sums: [f32; PANEL_ROWS * PANEL * LANES],
    scales: [f32; PANEL * CHUNK * LANES],
    tail: [u8; Unit::Fma.block_bytes()],
}

impl Outputs<'_> {
    /// Computes outputs `outputs` of the rows of `tiles` (at most [`PANEL_ROWS`] rows).
    ///
    /// # Safety
    /// `inputs` holds the arranged rows, the ranges lie inside the part and the set, the pairs' outputs are valid and
    /// nobody else touches these, and the CPU has the kernels' instructions.
    pub(crate) unsafe fn run(&self, outputs: Range<usize>, tiles: Range<usize>) {
        let mut workspace = MaybeUninit::<Workspace>::uninit();
        let workspace = workspace.as_mut_ptr();
        let first_row = tiles.start * self.shape.tile_rows;
        let rows = first_row..self.shape.rows.min(tiles.end * self.shape.tile_rows);
        let (width, chunk) = match self.method {
            #[cfg(target_arch = "x86_64")]
            Method::Stream(_) => (STREAM, stream::chunk_blocks(self.shape.tile_rows)),
            Method::Panel { .. } => (PANEL, CHUNK),
        };
        debug_assert!(rows.len() * width <= PANEL_ROWS * PANEL);
        for first in outputs.clone().step_by(width) {
            let some = first..outputs.end.min(first + width);
            // SAFETY: the workspace is written before it is read; ranges as the caller vouches.
            unsafe {
                self.start(workspace, some.clone(), rows.clone(), width);
                for block in (0..self.shape.blocks()).step_by(chunk) {
                    let blocks = block..self.shape.blocks().min(block + chunk);
                    match self.method {
                        #[cfg(target_arch = "x86_64")]
                        Method::Stream(kernel) => {
                            self.stream(workspace, some.clone(), tiles.clone(), blocks, kernel);
                        }
                        Method::Panel { decoder, tiles: kernels, tile_outputs } => {
                            self.decode(workspace, some.clone(), blocks.clone(), decoder);
                            self.multiply(
                                workspace,
                                some.len(),
                                tiles.clone(),
                                blocks,
                                kernels,
                                tile_outputs,
                            );
                        }
                    }
                }
                for (i, row) in rows.clone().enumerate() {
                    let lanes = (&raw const (*workspace).sums).cast::<f32>().add(i * width * LANES);
                    let out = self.pairs[row].out.add(self.part.first_output + some.start);
                    (self.sums.fold)(lanes, some.len(), out);
                }
            }
        }
    }

    /// Zero, or the biases' part of the sums.
    unsafe fn start(
        &self,
        workspace: *mut Workspace,
        outputs: Range<usize>,
        rows: Range<usize>,
        width: usize,
    ) {
        // SAFETY: `rows × width` sums lie in the workspace, the group sums in the arranged set.
        unsafe {
            let sums = (&raw mut (*workspace).sums).cast::<f32>();
            let Some((scales, true)) = self.scales.map(|scales| (scales, scales.bias_row(0).is_some()))
            else {
                sums.write_bytes(0, rows.len() * width * LANES);
                return;
            };
            for (n, output) in outputs.enumerate() {
                let biases = scales.bias_row(output).unwrap_or_default();
                (self.sums.start)(&Biases {
                    kind: scales.kind,
                    biases: biases.as_ptr(),
                    groups: scales.per_row,
                    group_sums: self.inputs.add(self.shape.sums_start(rows.start)).cast(),
                    group_stride: self.shape.sums_per_row(),
                    rows: rows.len(),
                    sums: sums.add(n * LANES),
                    row_stride: width * LANES,
                });
            }
        }
    }

    /// Multiplies a chunk of blocks as it streams by. The rows are one tile.
    #[cfg(target_arch = "x86_64")]
    unsafe fn stream(
        &self,
        workspace: *mut Workspace,
        outputs: Range<usize>,
        tiles: Range<usize>,
        blocks: Range<usize>,
        kernel: StreamKernel,
    ) {
        let (row_bytes, block_bytes) = (self.part.row_bytes(), self.part.block_bytes());
        let whole = blocks.start..blocks.end.min(row_bytes / block_bytes);
        let codes = self.part.codes();
        // Outputs whose scales are neighbours: with FP8 the 128 of a block row share theirs.
        let mut first = outputs.start;
        while first < outputs.end {
            let same = self.scales.map_or(usize::MAX, |scales| scales.outputs_in_step(first));
            let count = (outputs.end - first).min(same);
            let scale_bytes = self.lanes.map_or(0, |lanes| lanes.count * lanes.kind.size());
            let scales = self.scales.map(|scales| (scales.row(first), scales.stride()));
            let (scales, scale_stride) = scales.unwrap_or_default();
            let partial = blocks.end > whole.end;
            // SAFETY: offsets inside the codes, the scales, the arranged set and the workspace.
            unsafe {
                kernel(&Stream {
                    outputs: count,
                    blocks: whole.len(),
                    codes: codes.as_ptr().add(first * row_bytes + blocks.start * block_bytes),
                    code_stride: row_bytes,
                    tail_codes: if partial { row_bytes - whole.end * block_bytes } else { 0 },
                    scales: scales.as_ptr().wrapping_add(blocks.start * scale_bytes),
                    scale_stride,
                    tail_scales: if partial { scales.len() - whole.end * scale_bytes } else { 0 },
                    lanes: self.lanes.as_ref(),
                    inputs: self.tile_inputs(tiles.start, blocks.start),
                    sums: (&raw mut (*workspace).sums).cast::<f32>().add((first - outputs.start) * LANES),
                    row_stride: STREAM * LANES,
                });
            }
            first += count;
        }
    }

    /// The operands of a tile from a block on.
    unsafe fn tile_inputs(&self, tile: usize, block: usize) -> *const u8 {
        let before = block * self.shape.rows_of(tile) * self.part.layout.unit.block_bytes();
        // SAFETY: the tile and the block lie in the arranged set.
        unsafe { self.inputs.add(self.shape.tile_start(tile) + before) }
    }

    /// Decodes a chunk of blocks of the panel.
    unsafe fn decode(
        &self,
        workspace: *mut Workspace,
        panel: Range<usize>,
        blocks: Range<usize>,
        decoder: BlockDecoder,
    ) {
        let (row_bytes, block_bytes) = (self.part.row_bytes(), self.part.block_bytes());
        let decoded = self.part.layout.unit.block_bytes();
        for (n, output) in panel.enumerate() {
            let row = &self.part.codes()[output * row_bytes..(output + 1) * row_bytes];
            let scales = self.scales.map(|scales| scales.row(output));
            for (i, block) in blocks.clone().enumerate() {
                let codes = &row[block * block_bytes..row_bytes.min((block + 1) * block_bytes)];
                // SAFETY: a whole block of codes, in place or padded; the decoded block lies in the workspace.
                unsafe {
                    let tail = (&raw mut (*workspace).tail).cast::<u8>();
                    let to = (&raw mut (*workspace).weights).cast::<u8>().add((n * CHUNK + i) * decoded);
                    decoder(whole(codes, block_bytes, tail), to);
                    let to = (&raw mut (*workspace).scales).cast::<f32>().add((n * CHUNK + i) * LANES);
                    match (&self.lanes, scales) {
                        (Some(lanes), Some(row)) => {
                            let bytes = lanes.count * lanes.kind.size();
                            let scales = &row[block * bytes..row.len().min((block + 1) * bytes)];
                            (self.sums.scale)(lanes, whole(scales, bytes, tail), to);
                        }
                        _ => to.cast::<[f32; LANES]>().write([1.0; LANES]),
                    }
                }
            }
        }
    }

    /// Adds the products of a decoded chunk.
    unsafe fn multiply(
        &self,
        workspace: *mut Workspace,
        outputs: usize,
        tiles: Range<usize>,
        blocks: Range<usize>,
        kernels: &[[TileKernel; 4]; TILE_ROWS],
        tile_outputs: usize,
    ) {
        let decoded = self.part.layout.unit.block_bytes();
        for (i, index) in tiles.enumerate() {
            let rows = self.shape.rows_of(index);
            for n in (0..outputs).step_by(tile_outputs) {
                let width = tile_outputs.min(outputs - n);
                // SAFETY: offsets inside the workspace and the arranged set.
                unsafe {
                    let sum = (i * self.shape.tile_rows * PANEL + n) * LANES;
                    let tile = Tile {
                        blocks: blocks.len(),
                        weights: (&raw const (*workspace).weights).cast::<u8>().add(n * CHUNK * decoded),
                        weight_stride: CHUNK * decoded,
                        scales: (&raw const (*workspace).scales).cast::<f32>().add(n * CHUNK * LANES),
                        scale_stride: CHUNK * LANES,
                        inputs: self.tile_inputs(index, blocks.start),
                        sums: (&raw mut (*workspace).sums).cast::<f32>().add(sum),
                        row_stride: PANEL * LANES,
                    };
                    (kernels[rows - 1][width - 1])(&tile);
                }
            }
        }
    }
}

/// A whole block's bytes: in place, or padded with zeros in `tail`.
unsafe fn whole(bytes: &[u8], size: usize, tail: *mut u8) -> *const u8 {
    if bytes.len() == size {
        return bytes.as_ptr();
    }
    // SAFETY: the caller's tail holds the largest block.
    unsafe {
        tail.write_bytes(0, size);
        tail.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
    }
    tail
}
