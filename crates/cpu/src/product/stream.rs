//! Products of few rows: codes become operands in registers as they stream by.
//!
//! One row is bound by reading the weights, so nothing is written that need not be: a block of codes is loaded, looked
//! up, multiplied with each row and forgotten. Up to eight rows share the lookups. The order of a sum is that of
//! `layout.rs`.

use std::arch::x86_64::*;

use super::decode::avx512::{Bf16, Bytes8, DotBlock, Fp8, Runs2, Runs3, Runs4, Runs5, Runs6};
use super::layout::{LANES, STEP_BYTES, Unit};
use super::matrix::View;
use super::sums::LaneScales;
use flint_weights::{Form, PlainType};

/// The most rows that a kernel takes.
pub(crate) const STREAM_ROWS: usize = 8;

/// Bytes of inputs that stay in the first-level cache beside the codes: half of 32 KiB.
const INPUT_BYTES: usize = 16 << 10;

/// Blocks that a kernel passes over at a time for `rows` rows.
pub(crate) fn chunk_blocks(rows: usize) -> usize {
    INPUT_BYTES / (rows * Unit::Dot.block_bytes())
}

/// Operands of a call: some outputs over a run of whole blocks, and what is left of a block after them.
pub(crate) struct Stream<'a> {
    pub(crate) outputs: usize,
    pub(crate) blocks: usize,
    /// Codes of the first output's first block.
    pub(crate) codes: *const u8,
    /// Bytes from one output's codes to the next.
    pub(crate) code_stride: usize,
    /// Bytes of codes after the last whole block; 0 when there is no such block in this run.
    pub(crate) tail_codes: usize,
    /// Scales of the first output's first block.
    pub(crate) scales: *const u8,
    /// Bytes from one output's scales to the next.
    pub(crate) scale_stride: usize,
    /// Bytes of scales after the last whole block.
    pub(crate) tail_scales: usize,
    pub(crate) lanes: Option<&'a LaneScales>,
    /// Inputs of the rows from the first block on: `[blocks, 8, rows, 64 bytes]`.
    pub(crate) inputs: *const u8,
    /// Sums: 16 lanes of row `m`, output `n` at element `m · row_stride + n · 16`.
    pub(crate) sums: *mut f32,
    /// Elements from one row's sums to the next.
    pub(crate) row_stride: usize,
}

/// Adds the products of a run of blocks to the sums.
///
/// # Safety
/// The pointers cover what [`Stream`] says, and the CPU has AVX-512 with VBMI and BF16.
pub(crate) type StreamKernel = unsafe fn(&Stream);

/// The kernel of a part for a number of rows, where there is one.
pub(crate) fn kernel(view: &View, form: &Form, rows: usize) -> Option<StreamKernel> {
    if view.layout.unit != Unit::Dot || rows == 0 || rows > STREAM_ROWS {
        return None;
    }
    match form {
        Form::Affine { bits, group, kind: PlainType::Bf16, .. } => match group {
            32 => affine::<Bf16Scales<8>>(*bits, rows),
            64 => affine::<Bf16Scales<4>>(*bits, rows),
            _ => affine::<Bf16Scales<2>>(*bits, rows),
        },
        // Scales of two types in one checkpoint do not occur with these; panels take them.
        Form::Affine { .. } => None,
        Form::Fp8Block { .. } => eight::<Fp8, F32Scales>(rows),
        Form::Plain { kind: PlainType::Bf16, .. } => eight::<Bf16, NoScales>(rows),
        Form::Plain { .. } => None,
    }
}

fn affine<S: BlockScales>(bits: u8, rows: usize) -> Option<StreamKernel> {
    match bits {
        2 => some::<Runs2, S>(rows),
        3 => some::<Runs3, S>(rows),
        4 => eight::<Runs4, S>(rows),
        5 => some::<Runs5, S>(rows),
        6 => some::<Runs6, S>(rows),
        _ => eight::<Bytes8, S>(rows),
    }
}

fn eight<D: DotBlock, S: BlockScales>(rows: usize) -> Option<StreamKernel> {
    let kernels: [StreamKernel; STREAM_ROWS] = [
        stream::<D, S, 1, 1>,
        stream::<D, S, 2, 2>,
        stream::<D, S, 3, 2>,
        stream::<D, S, 4, 2>,
        stream::<D, S, 5, 2>,
        stream::<D, S, 6, 2>,
        stream::<D, S, 7, 2>,
        stream::<D, S, 8, 2>,
    ];
    kernels.get(rows - 1).copied()
}

/// Widths whose lookups cost more: decode alone and in small batches, panels otherwise.
fn some<D: DotBlock, S: BlockScales>(rows: usize) -> Option<StreamKernel> {
    match rows {
        1 => Some(stream::<D, S, 1, 1>),
        2 => Some(stream::<D, S, 2, 2>),
        4 => Some(stream::<D, S, 4, 2>),
        _ => None,
    }
}

/// How a block's scales are stored.
trait BlockScales {
    /// Bytes of a whole block's scales.
    const BYTES: usize;
    /// The scale of each lane.
    unsafe fn lanes(from: *const u8, control: __m512i) -> __m512;
    /// What `lanes` needs of the layout.
    unsafe fn control(lanes: Option<&LaneScales>) -> __m512i;
}

/// `COUNT` bf16 scales: one broadcast load and one byte shuffle.
struct Bf16Scales<const COUNT: usize>;

impl<const COUNT: usize> BlockScales for Bf16Scales<COUNT> {
    const BYTES: usize = COUNT * 2;

    #[inline(always)]
    unsafe fn lanes(from: *const u8, control: __m512i) -> __m512 {
        // SAFETY: the caller vouches for `BYTES` bytes and the instructions.
        unsafe {
            let scales = match COUNT {
                8 => _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast())),
                4 => _mm512_set1_epi64(from.cast::<i64>().read_unaligned()),
                _ => _mm512_set1_epi32(from.cast::<i32>().read_unaligned()),
            };
            _mm512_castsi512_ps(_mm512_shuffle_epi8(scales, control))
        }
    }

    #[inline(always)]
    unsafe fn control(lanes: Option<&LaneScales>) -> __m512i {
        // SAFETY: as above.
        unsafe {
            lanes.map_or(_mm512_setzero_si512(), |lanes| _mm512_loadu_si512(lanes.bytes.as_ptr().cast()))
        }
    }
}

/// Two fp32 scales, those of FP8.
struct F32Scales;

impl BlockScales for F32Scales {
    const BYTES: usize = 8;

    #[inline(always)]
    unsafe fn lanes(from: *const u8, control: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let scales = _mm512_set1_epi64(from.cast::<i64>().read_unaligned());
            _mm512_permutexvar_ps(control, _mm512_castsi512_ps(scales))
        }
    }

    #[inline(always)]
    unsafe fn control(lanes: Option<&LaneScales>) -> __m512i {
        // SAFETY: as above.
        unsafe {
            lanes.map_or(_mm512_setzero_si512(), |lanes| _mm512_loadu_si512(lanes.index.as_ptr().cast()))
        }
    }
}

/// Numbers that are their own values.
struct NoScales;

impl BlockScales for NoScales {
    const BYTES: usize = 0;

    #[inline(always)]
    unsafe fn lanes(_: *const u8, _: __m512i) -> __m512 {
        // SAFETY: plain AVX-512.
        unsafe { _mm512_set1_ps(1.0) }
    }

    #[inline(always)]
    unsafe fn control(_: Option<&LaneScales>) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_setzero_si512() }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn stream<D: DotBlock, S: BlockScales, const M: usize, const N: usize>(run: &Stream) {
    let mut output = 0;
    // SAFETY: outputs stay below `run.outputs`.
    unsafe {
        while output + N <= run.outputs {
            outputs::<D, S, M, N>(run, output);
            output += N;
        }
        while output < run.outputs {
            outputs::<D, S, M, 1>(run, output);
            output += 1;
        }
    }
}

/// `N` outputs from `first` on.
#[inline(always)]
unsafe fn outputs<D: DotBlock, S: BlockScales, const M: usize, const N: usize>(run: &Stream, first: usize) {
    // SAFETY: the caller vouches for the pointers of `N` outputs, the run's blocks and `M` rows.
    unsafe {
        let control = S::control(run.lanes);
        let sums = run.sums.add(first * LANES);
        let mut acc = [[_mm512_setzero_ps(); N]; M];
        for m in 0..M {
            for n in 0..N {
                acc[m][n] = _mm512_loadu_ps(sums.add(m * run.row_stride + n * LANES));
            }
        }
        let codes = run.codes.add(first * run.code_stride);
        let scales = run.scales.wrapping_add(first * run.scale_stride);
        for block in 0..run.blocks {
            let inputs = run.inputs.add(block * Unit::Dot.steps() * M * STEP_BYTES);
            let mut w = [[_mm512_setzero_si512(); 8]; N];
            let mut scale = [_mm512_setzero_ps(); N];
            for n in 0..N {
                w[n] = D::operands(codes.add(n * run.code_stride + block * D::BYTES));
                scale[n] = S::lanes(scales.wrapping_add(n * run.scale_stride + block * S::BYTES), control);
            }
            multiply::<M, N>(&w, &scale, inputs, &mut acc);
        }
        if run.tail_codes > 0 {
            let inputs = run.inputs.add(run.blocks * Unit::Dot.steps() * M * STEP_BYTES);
            let mut w = [[_mm512_setzero_si512(); 8]; N];
            let mut scale = [_mm512_setzero_ps(); N];
            for n in 0..N {
                let mut padded = [0u8; 512];
                let from = codes.add(n * run.code_stride + run.blocks * D::BYTES);
                padded.as_mut_ptr().copy_from_nonoverlapping(from, run.tail_codes);
                w[n] = D::operands(padded.as_ptr());
                let mut padded = [0u8; 32];
                let from = scales.wrapping_add(n * run.scale_stride + run.blocks * S::BYTES);
                padded.as_mut_ptr().copy_from_nonoverlapping(from, run.tail_scales);
                scale[n] = S::lanes(padded.as_ptr(), control);
            }
            multiply::<M, N>(&w, &scale, inputs, &mut acc);
        }
        for m in 0..M {
            for n in 0..N {
                _mm512_storeu_ps(sums.add(m * run.row_stride + n * LANES), acc[m][n]);
            }
        }
    }
}

/// One block: eight dot products from zero for each row and output, then one multiply-add with the scales.
#[inline(always)]
unsafe fn multiply<const M: usize, const N: usize>(
    w: &[[__m512i; 8]; N],
    scale: &[__m512; N],
    inputs: *const u8,
    acc: &mut [[__m512; N]; M],
) {
    // SAFETY: the caller vouches for the inputs of `M` rows.
    unsafe {
        for m in 0..M {
            let mut sums = [_mm512_setzero_ps(); N];
            for step in 0..8 {
                let x = _mm512_loadu_si512(inputs.add((step * M + m) * STEP_BYTES).cast());
                for n in 0..N {
                    // Both types are 512 bits without invalid values.
                    sums[n] =
                        _mm512_dpbf16_ps(sums[n], std::mem::transmute(w[n][step]), std::mem::transmute(x));
                }
            }
            for n in 0..N {
                acc[m][n] = _mm512_fmadd_ps(scale[n], sums[n], acc[m][n]);
            }
        }
    }
}
