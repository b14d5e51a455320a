//! Some outputs of a part for some rows: the work of one task.
//!
//! Sums start with the biases, take the blocks in chunks and are folded at the end. A chunk is multiplied as it streams
//! by (`stream.rs`, few rows) or decoded once for many rows (`tile.rs`). The order of a sum is that of `layout.rs` either
//! way; chunks and panels only choose what stays in a cache.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::decode::{Decode, DecodeKernel};
use super::input::Shape;
use super::layout::{LANES, Unit};
use super::matrix::{Part, Scales};
use super::run::Pair;
#[cfg(target_arch = "x86_64")]
use super::stream::{self, Stream, StreamKernel};
use super::sums::{LaneScales, ScaleRun, SumKernels};
use super::tile::{Start, Tile, Tiles};

/// Outputs of a decoded panel.
pub(crate) const PANEL: usize = 16;
/// Bytes of an output that are decoded at a time: `PANEL` of them fill half of a 32 KiB first-level cache.
const CHUNK_BYTES: usize = 1024;
/// Rows that share a decoded panel: their sums and inputs stay in a second-level cache of 1 MiB.
pub(crate) const PANEL_ROWS: usize = 120;
/// The most outputs that stream together, and about how many bytes of codes they have: as much is asked for ahead.
const STREAM: usize = 32;
const STREAM_BYTES: usize = 32 << 10;
/// Vectors of biases that are widened at a time.
const BIAS_VECTORS: usize = 4;

/// How a chunk is multiplied.
#[derive(Clone, Copy)]
pub(crate) enum Method {
    /// In registers.
    #[cfg(target_arch = "x86_64")]
    Stream(&'static [StreamKernel]),
    /// Through a decoded panel.
    Panel(DecodeKernel),
}

/// What a task knows of its part.
pub(crate) struct Outputs<'a> {
    pub(crate) part: &'a Part,
    pub(crate) scales: Option<Scales<'a>>,
    pub(crate) lanes: Option<LaneScales>,
    pub(crate) sums: SumKernels,
    pub(crate) tiles: &'static Tiles,
    pub(crate) method: Method,
    pub(crate) shape: Shape,
    /// The arranged rows.
    pub(crate) inputs: *const u8,
    /// Their places in the call.
    pub(crate) pairs: &'a [Pair],
}

/// Blocks of a chunk of the smallest unit.
const MOST_BLOCKS: usize = CHUNK_BYTES / Unit::Dot.block_bytes();

#[repr(C, align(64))]
struct Workspace {
    weights: [u8; PANEL * CHUNK_BYTES],
    /// `[rows, outputs, 16]` with [`PANEL`] or [`STREAM`] outputs.
    sums: [f32; PANEL_ROWS * PANEL * LANES],
    scales: [f32; PANEL * MOST_BLOCKS * LANES],
    biases: [f32; PANEL * BIAS_VECTORS * LANES],
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
            Method::Stream(_) => {
                let fitting = STREAM_BYTES / self.part.row_bytes().max(1);
                (fitting.next_multiple_of(8).clamp(8, STREAM), stream::chunk_blocks(self.shape.tile_rows))
            }
            Method::Panel(_) => (PANEL, CHUNK_BYTES / self.part.layout.unit.block_bytes()),
        };
        debug_assert!(rows.len() * width <= PANEL_ROWS * PANEL);
        for first in outputs.clone().step_by(width) {
            let some = first..outputs.end.min(first + width);
            // SAFETY: the workspace is written before it is read; ranges as the caller vouches.
            unsafe {
                if let Method::Panel(_) = self.method {
                    self.start(workspace, some.clone(), rows.clone(), width);
                }
                for block in (0..self.shape.blocks()).step_by(chunk.min(self.shape.blocks())) {
                    let blocks = block..self.shape.blocks().min(block.saturating_add(chunk));
                    match self.method {
                        #[cfg(target_arch = "x86_64")]
                        Method::Stream(kernels) => {
                            self.stream(workspace, some.clone(), width, tiles.clone(), blocks, kernels);
                        }
                        Method::Panel(decoder) => {
                            self.decode(workspace, some.clone(), blocks.clone(), decoder);
                            self.multiply(workspace, some.len(), tiles.clone(), blocks);
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
        // SAFETY: `rows × width` sums lie in the workspace, the group sums in the arranged set; `vectors` of the widened
        // biases are written before they are read.
        unsafe {
            let sums = (&raw mut (*workspace).sums).cast::<f32>();
            let biases = (&raw mut (*workspace).biases).cast::<f32>();
            sums.write_bytes(0, rows.len() * width * LANES);
            let Some(scales) = self.scales.filter(|scales| scales.bias_row(0).is_some()) else { return };
            let (tile_rows, tile_outputs) = self.tiles.best;
            for first in (0..scales.per_row).step_by(BIAS_VECTORS * LANES) {
                let groups = (scales.per_row - first).min(BIAS_VECTORS * LANES);
                for (n, output) in outputs.clone().enumerate() {
                    let row = scales.bias_row(output).unwrap_or_default();
                    let from = row.as_ptr().add(first * scales.kind.size());
                    (self.sums.widen)(scales.kind, from, groups, biases.add(n * BIAS_VECTORS * LANES));
                }
                for row in rows.clone().step_by(tile_rows) {
                    let m = tile_rows.min(rows.end - row);
                    for n in (0..outputs.len()).step_by(tile_outputs) {
                        let count = tile_outputs.min(outputs.len() - n);
                        (self.tiles.start[m - 1][count - 1])(&Start {
                            vectors: groups.div_ceil(LANES),
                            biases: biases.add(n * BIAS_VECTORS * LANES),
                            bias_stride: BIAS_VECTORS * LANES,
                            group_sums: self.inputs.add(self.shape.sums_start(row)).cast::<f32>().add(first),
                            group_stride: self.shape.sums_per_row(),
                            sums: sums.add(((row - rows.start) * width + n) * LANES),
                            row_stride: width * LANES,
                        });
                    }
                }
            }
        }
    }

    /// Multiplies a chunk of blocks as it streams by. Later tiles of rows find the codes in a cache.
    #[cfg(target_arch = "x86_64")]
    unsafe fn stream(
        &self,
        workspace: *mut Workspace,
        outputs: Range<usize>,
        width: usize,
        tiles: Range<usize>,
        blocks: Range<usize>,
        kernels: &[StreamKernel],
    ) {
        let (row_bytes, block_bytes) = (self.part.row_bytes(), self.part.block_bytes());
        let whole = blocks.start..blocks.end.min(row_bytes / block_bytes);
        let partial = blocks.end > whole.end;
        let scale_bytes = self.lanes.map_or(0, |lanes| lanes.count * lanes.kind.size());
        // Outputs whose scales are neighbours: with FP8 the 128 of a block row share theirs.
        let mut first = outputs.start;
        while first < outputs.end {
            let same = self.scales.map_or(usize::MAX, |scales| scales.outputs_in_step(first));
            let count = (outputs.end - first).min(same);
            let scales = self.scales.map(|scales| (scales.row(first), scales.stride()));
            let (scales, scale_stride) = scales.unwrap_or_default();
            for (i, tile) in tiles.clone().enumerate() {
                let rows = i * self.shape.tile_rows;
                // SAFETY: offsets inside the codes, the scales, the arranged set and the workspace; `ahead` may leave
                // the codes.
                unsafe {
                    let codes =
                        self.part.codes().as_ptr().add(first * row_bytes + blocks.start * block_bytes);
                    // The next outputs' codes in one stream, whatever the order in which they will be used.
                    let behind = (first - outputs.start) * (row_bytes - whole.len() * block_bytes);
                    let next = width * row_bytes + blocks.start * (width - 1) * block_bytes;
                    let sums = (&raw mut (*workspace).sums).cast::<f32>();
                    kernels[self.shape.rows_of(tile) - 1](&Stream {
                        outputs: count,
                        blocks: whole.len(),
                        codes,
                        code_stride: row_bytes,
                        ahead: if i == 0 { codes.wrapping_add(next).wrapping_sub(behind) } else { codes },
                        tail_codes: if partial { row_bytes - whole.end * block_bytes } else { 0 },
                        scales: scales.as_ptr().wrapping_add(blocks.start * scale_bytes),
                        scale_stride,
                        tail_scales: if partial { scales.len() - whole.end * scale_bytes } else { 0 },
                        lanes: self.lanes.as_ref(),
                        start: (blocks.start == 0).then(|| self.biases(first, tile)),
                        inputs: self.tile_inputs(tile, blocks.start),
                        sums: sums.add((rows * width + first - outputs.start) * LANES),
                        row_stride: width * LANES,
                    });
                }
            }
            first += count;
        }
    }

    /// Biases from an output on and the group sums of a tile's rows.
    #[cfg(target_arch = "x86_64")]
    fn biases(&self, output: usize, tile: usize) -> stream::Biases {
        let row = self.scales.and_then(|scales| Some((scales.bias_row(output)?, scales.per_row)));
        let (biases, groups) = row.unwrap_or_default();
        let group_sums = self.inputs.wrapping_add(self.shape.sums_start(tile * self.shape.tile_rows));
        let group_stride = self.shape.sums_per_row();
        stream::Biases { numbers: biases.as_ptr(), groups, group_sums: group_sums.cast(), group_stride }
    }

    /// The operands of a tile from a block on.
    unsafe fn tile_inputs(&self, tile: usize, block: usize) -> *const u8 {
        let before = block * self.shape.rows_of(tile) * self.part.layout.unit.block_bytes();
        // SAFETY: the tile and the block lie in the arranged set.
        unsafe { self.inputs.add(self.shape.tile_start(tile) + before) }
    }

    /// Decodes a chunk of blocks of the panel, and spreads their scales.
    unsafe fn decode(
        &self,
        workspace: *mut Workspace,
        panel: Range<usize>,
        blocks: Range<usize>,
        kernel: DecodeKernel,
    ) {
        let (row_bytes, block_bytes) = (self.part.row_bytes(), self.part.block_bytes());
        let decoded = self.part.layout.unit.block_bytes();
        let whole = blocks.start..blocks.end.min(row_bytes / block_bytes);
        let last = blocks.end == self.shape.blocks();
        // SAFETY: whole blocks of codes, in place or padded; decoded blocks and lanes lie in the workspace.
        unsafe {
            let at = |output: usize, block: usize| {
                self.part.codes().as_ptr().add(output * row_bytes + block * block_bytes)
            };
            let weights = (&raw mut (*workspace).weights).cast::<u8>();
            let mut run = Decode {
                outputs: panel.len(),
                blocks: whole.len(),
                codes: at(panel.start, whole.start),
                code_stride: row_bytes,
                // After the last chunk comes the next panel's first.
                ahead: if last {
                    at(panel.start, 0).wrapping_add(PANEL * row_bytes)
                } else {
                    at(panel.start, whole.end)
                },
                to: weights,
                to_stride: CHUNK_BYTES,
            };
            kernel(&run);
            if blocks.end > whole.end {
                (run.outputs, run.blocks) = (1, 1);
                run.codes = (&raw const (*workspace).tail).cast();
                for (n, output) in panel.clone().enumerate() {
                    let bytes = row_bytes - whole.end * block_bytes;
                    pad(workspace, at(output, whole.end), bytes, block_bytes);
                    run.to = weights.add(n * CHUNK_BYTES + whole.len() * decoded);
                    kernel(&run);
                }
            }
            self.spread_scales(workspace, panel, blocks);
        }
    }

    /// Writes the scales of a chunk's lanes.
    unsafe fn spread_scales(&self, workspace: *mut Workspace, panel: Range<usize>, blocks: Range<usize>) {
        // SAFETY: whole blocks of scales, in place or padded; the lanes lie in the workspace.
        unsafe {
            let to = (&raw mut (*workspace).scales).cast::<f32>();
            let (Some(scales), Some(lanes)) = (self.scales, &self.lanes) else {
                for lane in 0..panel.len() * MOST_BLOCKS * LANES {
                    to.add(lane).write(1.0);
                }
                return;
            };
            let bytes = lanes.count * lanes.kind.size();
            let whole = blocks.start..blocks.end.min(scales.per_row / lanes.count);
            let mut first = panel.start;
            while first < panel.end {
                let outputs = (panel.end - first).min(scales.outputs_in_step(first));
                let mut run = ScaleRun {
                    lanes,
                    outputs,
                    blocks: whole.len(),
                    scales: scales.row(first).as_ptr().wrapping_add(whole.start * bytes),
                    scale_stride: scales.stride(),
                    to: to.add((first - panel.start) * MOST_BLOCKS * LANES),
                    to_stride: MOST_BLOCKS * LANES,
                };
                (self.sums.scale)(&run);
                if blocks.end > whole.end {
                    (run.outputs, run.blocks) = (1, 1);
                    run.scales = (&raw const (*workspace).tail).cast();
                    for output in first..first + outputs {
                        let rest = &scales.row(output)[whole.end * bytes..];
                        pad(workspace, rest.as_ptr(), rest.len(), bytes);
                        run.to = to.add(((output - panel.start) * MOST_BLOCKS + whole.len()) * LANES);
                        (self.sums.scale)(&run);
                    }
                }
                first += outputs;
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
    ) {
        for (i, index) in tiles.enumerate() {
            let rows = self.shape.rows_of(index);
            for n in (0..outputs).step_by(self.tiles.best.1) {
                let width = self.tiles.best.1.min(outputs - n);
                // SAFETY: offsets inside the workspace and the arranged set.
                unsafe {
                    let sum = (i * self.shape.tile_rows * PANEL + n) * LANES;
                    let tile = Tile {
                        blocks: blocks.len(),
                        weights: (&raw const (*workspace).weights).cast::<u8>().add(n * CHUNK_BYTES),
                        weight_stride: CHUNK_BYTES,
                        scales: (&raw const (*workspace).scales).cast::<f32>().add(n * MOST_BLOCKS * LANES),
                        scale_stride: MOST_BLOCKS * LANES,
                        inputs: self.tile_inputs(index, blocks.start),
                        sums: (&raw mut (*workspace).sums).cast::<f32>().add(sum),
                        row_stride: PANEL * LANES,
                    };
                    (self.tiles.multiply[rows - 1][width - 1])(&tile);
                }
            }
        }
    }
}

/// Copies the start of a block into the workspace and fills the rest with zeros.
unsafe fn pad(workspace: *mut Workspace, from: *const u8, bytes: usize, block_bytes: usize) {
    // SAFETY: the caller vouches for the bytes; the tail holds the largest block.
    unsafe {
        let tail = (&raw mut (*workspace).tail).cast::<u8>();
        tail.copy_from_nonoverlapping(from, bytes);
        tail.add(bytes).write_bytes(0, block_bytes - bytes);
    }
}
