//! Products with EXL3 matrices: rows are rotated, meet the decoded tiles, and are rotated back.
//!
//! ```text
//! xh = H (x ∘ suh)      fp32, once a call, for parts with one suh together      (blocks of 128 inputs)
//! z  = I · xh           I exact, fp32 inputs, fused multiply-adds
//! y  = (H z) ∘ svh      fp32                                                    (blocks of 128 outputs)
//! ```
//!
//! Values of a trellis are fp16 numbers of 11 bits, so bf16 cannot hold them: as plain fp16 matrices they meet fp32 inputs in
//! every arithmetic, and the bits are the same in all of them. (Two bf16 halves of a value would be exact, but two dot
//! products cost what two fused multiply-adds cost.)
//!
//! The order of a sum follows from the tile's. Each output has four lanes; lane `c` takes, of every 16 inputs, inputs
//! `2c, 2c + 1, 2c + 8, 2c + 9`, in this order: 32 steps for a block of 128 inputs from zero, then `total = total + block`.
//! The output is `(lane 0 + lane 1) + (lane 2 + lane 3)`. A transform is butterflies `(a + b, a − b)` at strides 1 to 64
//! and one product with `1 / √128`. No order depends on rows, threads or the instruction set.
//!
//! A task decodes 128 inputs of 16 outputs at a time into 8 KiB and multiplies all of its rows by them: `decode.rs` and
//! `multiply.rs`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod decode;
mod multiply;

use std::mem::MaybeUninit;
use std::ops::Range;

use flint_weights::exl3::{BLOCK, Exl3, HADAMARD_SCALE, TILE};

use super::outputs::PANEL_ROWS;
use super::run::Pair;
use crate::Level;
use decode::Tiles;
pub(crate) use multiply::TILE_ROWS;

/// Lanes of an output's sum.
const LANES: usize = 4;
/// Tiles of a block's side.
const TILES: usize = BLOCK / TILE;
/// Numbers of a decoded tile: four steps of 16 outputs · 4 lanes.
const TILE_NUMBERS: usize = TILE * TILE;

/// Bytes of a rotated row: its inputs, padded to whole blocks, as fp32.
pub(crate) fn row_bytes(inputs: usize) -> usize {
    inputs.next_multiple_of(BLOCK) * size_of::<f32>()
}

/// Where input `input` of 16 lies in a rotated row: four steps of four lanes.
const fn step_and_lane(input: usize) -> usize {
    let (step, lane) = ((input & 1) + (input >> 3) * 2, input % 8 / 2);
    step * LANES + lane
}

/// Rotates a row: `H (x ∘ suh)`, in the order of the steps.
///
/// # Safety
/// `to` is valid for [`row_bytes`], `suh` holds an fp16 number for each padded input, and the CPU has the level's
/// instructions.
pub(crate) unsafe fn rotate_row(level: Level, x: &[f32], suh: &[u8], to: *mut f32) {
    // SAFETY: the caller's promise is handed on.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => rotate_wide(x, suh, to),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => rotate_avx2(x, suh, to),
            _ => rotate(x, suh, to),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn rotate_wide(x: &[f32], suh: &[u8], to: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe { rotate(x, suh, to) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rotate_avx2(x: &[f32], suh: &[u8], to: *mut f32) {
    // SAFETY: as the caller vouches.
    unsafe { rotate(x, suh, to) }
}

#[inline(always)]
unsafe fn rotate(x: &[f32], suh: &[u8], to: *mut f32) {
    for (index, part) in x.chunks(BLOCK).enumerate() {
        let mut block = [0.0f32; BLOCK];
        let scales = suh[index * BLOCK * 2..].chunks_exact(2);
        for ((value, x), scale) in block.iter_mut().zip(part).zip(scales) {
            *value = x * half(scale);
        }
        hadamard(&mut block);
        for (input, value) in block.iter().enumerate() {
            let place = input / TILE * TILE + step_and_lane(input % TILE);
            // SAFETY: the caller vouches for the padded row.
            unsafe { to.add(index * BLOCK + place).write(*value) };
        }
    }
}

#[inline(always)]
fn half(bytes: &[u8]) -> f32 {
    half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

/// The scaled transform of a block.
#[inline(always)]
fn hadamard(block: &mut [f32; BLOCK]) {
    butterflies::<1>(block);
    butterflies::<2>(block);
    butterflies::<4>(block);
    butterflies::<8>(block);
    butterflies::<16>(block);
    butterflies::<32>(block);
    butterflies::<64>(block);
    for value in block {
        *value *= HADAMARD_SCALE;
    }
}

#[inline(always)]
fn butterflies<const STRIDE: usize>(block: &mut [f32; BLOCK]) {
    for pair in block.chunks_exact_mut(2 * STRIDE) {
        let (low, high) = pair.split_at_mut(STRIDE);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// One task: outputs of one block of 128 for some rows.
pub(crate) struct Outputs<'a> {
    pub(crate) exl3: &'a Exl3,
    pub(crate) level: Level,
    /// Rows of a tile but the last.
    pub(crate) tile_rows: usize,
    /// The rotated rows.
    pub(crate) inputs: *const f32,
    /// Their places in the call, at most [`PANEL_ROWS`].
    pub(crate) pairs: &'a [Pair],
    /// The member's output that is the part's output 0.
    pub(crate) first_output: usize,
}

#[repr(C, align(64))]
struct Workspace {
    /// 128 inputs of 16 outputs: `[tile, step, output, lane]`.
    weights: [f32; TILES * TILE_NUMBERS],
    /// `[rows, output, lane]`.
    totals: [f32; PANEL_ROWS * BLOCK * LANES],
}

impl Outputs<'_> {
    /// Outputs `outputs` of the part, which lie in one block of the trellis.
    ///
    /// # Safety
    /// The rotated rows are there, the pairs' outputs are valid and nobody else touches these, and the CPU has the
    /// level's instructions.
    pub(crate) unsafe fn run(&self, outputs: Range<usize>) {
        let mut workspace = MaybeUninit::<Workspace>::uninit();
        let workspace = workspace.as_mut_ptr();
        let rows = self.pairs.len();
        debug_assert!(rows <= PANEL_ROWS);
        let first = self.exl3.first_row + outputs.start;
        let (rate, codebook) = (self.exl3.rate, self.exl3.codebook);
        let stream = decode::stream(self.level, rate, codebook, rows);
        let decode = decode::kernel(self.level, rate, codebook);
        // SAFETY: totals of at most `PANEL_ROWS` rows lie in the workspace; tiles of the block lie in the trellis, whose
        // size was checked at upload; weights are written before they are read.
        unsafe {
            let totals = (&raw mut (*workspace).totals).cast::<f32>();
            totals.write_bytes(0, rows * BLOCK * LANES);
            for input_block in 0..self.exl3.inputs / BLOCK {
                for tile in 0..TILES {
                    let tiles = self.tiles(input_block, first / BLOCK, tile, totals.add(tile * TILE * LANES));
                    if let Some(stream) = stream {
                        stream(&tiles);
                        continue;
                    }
                    let weights = (&raw mut (*workspace).weights).cast::<f32>();
                    for row in 0..TILES {
                        decode(tiles.first.add(row * tiles.stride), weights.add(row * TILE_NUMBERS));
                    }
                    self.multiply(weights, &tiles);
                }
            }
            for (row, pair) in self.pairs.iter().enumerate() {
                let totals = &*totals.add(row * BLOCK * LANES).cast::<[f32; BLOCK * LANES]>();
                let out = pair.out.add(self.first_output + outputs.start);
                let out = std::slice::from_raw_parts_mut(out, outputs.len());
                self.finish(totals, first, out);
            }
        }
    }

    /// The tiles of 128 inputs and 16 outputs with the rows' inputs. Asks for a part of the next 128 inputs.
    fn tiles(&self, inputs: usize, block: usize, tile: usize, totals: *mut f32) -> Tiles {
        let (bytes, across) = (self.exl3.rate.tile_bytes(), self.exl3.outputs / TILE);
        let at = |row: usize, column: usize| {
            self.exl3.trellis.as_slice().as_ptr().wrapping_add((row * across + column) * bytes)
        };
        super::decode::ask(at((inputs + 1) * TILES + tile, block * TILES), TILES * bytes);
        Tiles {
            first: at(inputs * TILES, block * TILES + tile),
            stride: across * bytes,
            inputs: self.inputs.wrapping_add(inputs * BLOCK),
            input_stride: self.exl3.inputs,
            totals,
        }
    }

    /// Adds the products of the decoded tiles to the totals of every row.
    unsafe fn multiply(&self, weights: *const f32, tiles: &Tiles) {
        let (kernels, stride) = (multiply::kernels(self.level), tiles.input_stride);
        for row in (0..self.pairs.len()).step_by(self.tile_rows) {
            let rows = self.tile_rows.min(self.pairs.len() - row);
            // SAFETY: the rows' inputs and totals were allotted.
            unsafe {
                let (inputs, totals) =
                    (tiles.inputs.add(row * stride), tiles.totals.add(row * BLOCK * LANES));
                kernels[rows - 1](weights, inputs, stride, totals);
            }
        }
    }

    /// Folds a row's lanes, rotates them back and writes the outputs from trellis output `first` on.
    unsafe fn finish(&self, totals: &[f32; BLOCK * LANES], first: usize, out: &mut [f32]) {
        let scales = &self.exl3.output_scales.as_slice()[first * 2..(first + out.len()) * 2];
        // SAFETY: the caller vouches for the level.
        unsafe {
            match self.level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => finish_wide(totals, scales, first % BLOCK, out),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => finish_avx2(totals, scales, first % BLOCK, out),
                _ => finish(totals, scales, first % BLOCK, out),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn finish_wide(totals: &[f32; BLOCK * LANES], svh: &[u8], first: usize, out: &mut [f32]) {
    finish(totals, svh, first, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn finish_avx2(totals: &[f32; BLOCK * LANES], svh: &[u8], first: usize, out: &mut [f32]) {
    finish(totals, svh, first, out);
}

#[inline(always)]
fn finish(totals: &[f32; BLOCK * LANES], svh: &[u8], first: usize, out: &mut [f32]) {
    let mut block = [0.0f32; BLOCK];
    for (value, lanes) in block.iter_mut().zip(totals.chunks_exact(LANES)) {
        *value = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
    hadamard(&mut block);
    for ((out, value), scale) in out.iter_mut().zip(&block[first..]).zip(svh.chunks_exact(2)) {
        *out = value * half(scale);
    }
}
