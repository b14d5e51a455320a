//! Products of few rows: codes become operands in registers as they stream by.
//!
//! One row is bound by reading the weights, so nothing is written that need not be: a block of codes is loaded, looked
//! up, multiplied with each row and forgotten. Up to six rows share the lookups. The order of a sum is that of
//! `layout.rs`.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::decode::avx512::{Bf16, Bytes8, DotBlock, Fp8, Runs2, Runs3, Runs4, Runs5, Runs6};
use super::engine::x86::dot;
use super::layout::{LANES, STEP_BYTES, Unit};
use super::sums::LaneScales;
use flint_weights::{Form, PlainType};

/// Bytes of inputs that stay in the first-level cache beside the codes: half of 32 KiB.
const INPUT_BYTES: usize = 16 << 10;

/// Blocks that a kernel passes over at a time for `rows` rows. One or two rows use their inputs for four outputs at a
/// time, so these may come from the second-level cache.
pub(crate) fn chunk_blocks(rows: usize) -> usize {
    if rows <= 2 { usize::MAX } else { INPUT_BYTES / (rows * Unit::Dot.block_bytes()) }
}

/// Operands of a call: some outputs over a run of whole blocks, and what is left of a block after them.
pub(crate) struct Stream<'a> {
    pub(crate) outputs: usize,
    pub(crate) blocks: usize,
    /// Codes of the first output's first block.
    pub(crate) codes: *const u8,
    /// Bytes from one output's codes to the next.
    pub(crate) code_stride: usize,
    /// Codes to ask for meanwhile: as many bytes as this run's whole blocks have. May point anywhere.
    pub(crate) ahead: *const u8,
    /// Bytes of codes after the last whole block; 0 when there is no such block in this run.
    pub(crate) tail_codes: usize,
    /// Scales of the first output's first block.
    pub(crate) scales: *const u8,
    /// Bytes from one output's scales to the next.
    pub(crate) scale_stride: usize,
    /// Bytes of scales after the last whole block.
    pub(crate) tail_scales: usize,
    pub(crate) lanes: Option<&'a LaneScales>,
    /// What the sums start with, when the run has the first block.
    pub(crate) start: Option<Biases>,
    /// Inputs of the rows from the first block on: `[blocks, 8, rows, 64 bytes]`.
    pub(crate) inputs: *const u8,
    /// Sums: 16 lanes of row `m`, output `n` at element `m · row_stride + n · 16`.
    pub(crate) sums: *mut f32,
    /// Elements from one row's sums to the next.
    pub(crate) row_stride: usize,
}

/// bf16 biases and the group sums that they multiply.
#[derive(Clone, Copy)]
pub(crate) struct Biases {
    /// The first output's; nothing where `groups` is 0.
    pub(crate) numbers: *const u8,
    pub(crate) groups: usize,
    /// Group sums of the first row: whole vectors that end with zeros.
    pub(crate) group_sums: *const f32,
    /// Elements from one row's group sums to the next.
    pub(crate) group_stride: usize,
}

/// Adds the products of a run of blocks to the sums.
///
/// # Safety
/// The pointers cover what [`Stream`] says, and the CPU has AVX-512 with VBMI and BF16.
pub(crate) type StreamKernel = unsafe fn(&Stream);

/// The kernels of a form, and how far they reach.
#[derive(Clone, Copy)]
pub(crate) struct StreamKernels {
    /// By rows of a tile - 1.
    pub(crate) tiles: &'static [StreamKernel],
    /// Rows from which on a decoded panel is faster.
    pub(crate) most_rows: usize,
}

/// The kernels of a part, where it has some.
pub(crate) fn kernels(unit: Unit, form: &Form) -> Option<StreamKernels> {
    match (unit, form) {
        (Unit::Dot, Form::Affine { bits, group, kind: PlainType::Bf16, .. }) => Some(match group {
            32 => affine::<Bf16Scales<8>>(*bits),
            64 => affine::<Bf16Scales<4>>(*bits),
            _ => affine::<Bf16Scales<2>>(*bits),
        }),
        (Unit::Dot, Form::Fp8Block { .. }) => Some(Four::<Fp8, F32Scales>::up_to(20)),
        (Unit::Dot, Form::Plain { kind: PlainType::Bf16, .. }) => Some(Six::<Bf16, NoScales>::up_to(40)),
        // Scales of other types are rare: panels take them.
        _ => None,
    }
}

/// Where panels overtake was measured on Zen 4 from the second-level cache, in cycles of a block of an output and row:
/// 4 bits 10.2 against 9.4 + 40 / rows; 8 bits 12.8, FP8 11.7, bf16 10.7, 3 bits 12.5, 5 and 6 bits 14.
fn affine<S: BlockScales>(bits: u8) -> StreamKernels {
    match bits {
        2 => Six::<Runs2, S>::up_to(40),
        3 => Four::<Runs3, S>::up_to(12),
        4 => Six::<Runs4, S>::up_to(40),
        5 => Four::<Runs5, S>::up_to(8),
        6 => Four::<Runs6, S>::up_to(8),
        _ => Four::<Bytes8, Halved<S>>::up_to(16),
    }
}

/// Kernels of up to six rows. The fewer rows, the more outputs share their inputs: as many as registers hold.
struct Six<D, S>(PhantomData<(D, S)>);

impl<D: DotBlock, S: BlockScales> Six<D, S> {
    const TILES: &'static [StreamKernel] = &[
        rows::<D, S, 1, 4>,
        rows::<D, S, 2, 4>,
        rows::<D, S, 3, 2>,
        rows::<D, S, 4, 2>,
        rows::<D, S, 5, 2>,
        rows::<D, S, 6, 2>,
    ];

    fn up_to(most_rows: usize) -> StreamKernels {
        StreamKernels { tiles: Self::TILES, most_rows }
    }
}

/// Kernels of up to four rows, for widths whose lookups take more registers.
struct Four<D, S>(PhantomData<(D, S)>);

impl<D: DotBlock, S: BlockScales> Four<D, S> {
    const TILES: &'static [StreamKernel] =
        &[rows::<D, S, 1, 4>, rows::<D, S, 2, 2>, rows::<D, S, 3, 2>, rows::<D, S, 4, 2>];

    fn up_to(most_rows: usize) -> StreamKernels {
        StreamKernels { tiles: Self::TILES, most_rows }
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

/// Scales of doubled codes.
struct Halved<S>(PhantomData<S>);

impl<S: BlockScales> BlockScales for Halved<S> {
    const BYTES: usize = S::BYTES;

    #[inline(always)]
    unsafe fn lanes(from: *const u8, control: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(S::lanes(from, control), _mm512_set1_ps(0.5)) }
    }

    #[inline(always)]
    unsafe fn control(lanes: Option<&LaneScales>) -> __m512i {
        // SAFETY: as above.
        unsafe { S::control(lanes) }
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

/// Asks for codes that come soon. Into the second-level cache: they would push the inputs out of the first.
#[inline(always)]
unsafe fn prefetch(from: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch reads nothing, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
    }
}

/// Outputs whose scales and biases are asked for ahead: they lie apart from the codes, and waiting for them would cost
/// as much as the products of an output.
const SCALES_AHEAD: usize = 8;

/// Asks for the scales and biases of `N` coming outputs.
#[inline(always)]
unsafe fn prefetch_scales<S: BlockScales, const N: usize>(run: &Stream, first: usize) {
    let first = first + SCALES_AHEAD;
    // SAFETY: a prefetch reads nothing, wherever it points.
    unsafe {
        for n in 0..N {
            let from = run.scales.wrapping_add((first + n) * run.scale_stride);
            prefetch(from, run.blocks * S::BYTES);
        }
        if let Some(start) = &run.start {
            prefetch(start.numbers.wrapping_add(first * start.groups * 2), N * start.groups * 2);
        }
    }
}

/// The biases' part of the sums of `N` outputs from `first` on: 16 groups at a time, group `i` in lane `i % 16`.
#[inline(always)]
unsafe fn add_biases<const M: usize, const N: usize>(
    start: &Biases,
    first: usize,
    acc: &mut [[__m512; N]; M],
) {
    for group in (0..start.groups).step_by(LANES) {
        let rest = start.groups - group;
        let mask = if rest >= LANES { 0xFFFF } else { (1 << rest) - 1 };
        // SAFETY: the caller vouches for the outputs' biases and the rows' group sums.
        unsafe {
            let mut biases = [_mm512_setzero_ps(); N];
            for n in 0..N {
                let from = start.numbers.wrapping_add(((first + n) * start.groups + group) * 2);
                let words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                biases[n] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
            }
            for m in 0..M {
                let group_sums =
                    _mm512_loadu_ps(start.group_sums.wrapping_add(m * start.group_stride + group));
                for n in 0..N {
                    acc[m][n] = _mm512_fmadd_ps(biases[n], group_sums, acc[m][n]);
                }
            }
        }
    }
}

/// The last blocks of `N` outputs, padded with zeros.
#[repr(C, align(64))]
struct Tails<const N: usize> {
    codes: [[u8; 512]; N],
    scales: [[u8; 64]; N],
}

impl<const N: usize> Tails<N> {
    #[inline(always)]
    unsafe fn new<D: DotBlock, S: BlockScales>(run: &Stream, first: usize) -> Self {
        let mut tails = Self { codes: [[0; 512]; N], scales: [[0; 64]; N] };
        for n in 0..N {
            // SAFETY: the caller vouches for the tails' codes and scales, which are shorter than a block.
            unsafe {
                let from = run.codes.add((first + n) * run.code_stride + run.blocks * D::BYTES);
                copy_padded(&mut tails.codes[n], from, run.tail_codes);
                let from = run.scales.wrapping_add((first + n) * run.scale_stride + run.blocks * S::BYTES);
                copy_padded(&mut tails.scales[n], from, run.tail_scales);
            }
        }
        tails
    }
}

/// Copies `bytes` bytes to the front of `to`; no call, since short rows are nothing but tails.
#[inline(always)]
unsafe fn copy_padded<const SIZE: usize>(to: &mut [u8; SIZE], from: *const u8, bytes: usize) {
    for at in (0..bytes.min(SIZE)).step_by(64) {
        let mask = if bytes - at >= 64 { u64::MAX } else { (1 << (bytes - at)) - 1 };
        // SAFETY: the mask leaves out what the caller does not vouch for; `SIZE` is a multiple of 64.
        unsafe {
            let part = _mm512_maskz_loadu_epi8(mask, from.wrapping_add(at).cast());
            _mm512_storeu_si512(to.as_mut_ptr().add(at).cast(), part);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn rows<D: DotBlock, S: BlockScales, const M: usize, const N: usize>(run: &Stream) {
    let mut output = 0;
    // SAFETY: outputs stay below `run.outputs`.
    unsafe {
        while output + N <= run.outputs {
            rows_outputs::<D, S, M, N>(run, output);
            output += N;
        }
        while output < run.outputs {
            rows_outputs::<D, S, M, 1>(run, output);
            output += 1;
        }
    }
}

/// Each lookup meets all rows at once, so that lookups and dot products alternate and run side by side.
#[inline(always)]
unsafe fn rows_outputs<D: DotBlock, S: BlockScales, const M: usize, const N: usize>(
    run: &Stream,
    first: usize,
) {
    // SAFETY: the caller vouches for the pointers of `N` outputs, the run's blocks and `M` rows.
    unsafe {
        let control = S::control(run.lanes);
        let ahead = run.ahead.wrapping_add(first * run.blocks * D::BYTES);
        prefetch_scales::<S, N>(run, first);
        let mut acc = [[_mm512_setzero_ps(); N]; M];
        match &run.start {
            Some(start) => add_biases(start, first, &mut acc),
            None => {
                for m in 0..M {
                    for n in 0..N {
                        acc[m][n] = _mm512_loadu_ps(run.sums.add(m * run.row_stride + (first + n) * LANES));
                    }
                }
            }
        }
        for block in 0..run.blocks {
            prefetch(ahead.wrapping_add(block * N * D::BYTES), N * D::BYTES);
            let inputs = run.inputs.add(block * Unit::Dot.steps() * M * STEP_BYTES);
            let codes = run.codes.add(first * run.code_stride + block * D::BYTES);
            let scales = run.scales.wrapping_add(first * run.scale_stride + block * S::BYTES);
            let sums = multiply::<D, M, N>(codes, run.code_stride, inputs);
            scale::<S, M, N>(scales, run.scale_stride, control, &sums, &mut acc);
        }
        if run.tail_codes > 0 {
            let inputs = run.inputs.add(run.blocks * Unit::Dot.steps() * M * STEP_BYTES);
            let tails = Tails::<N>::new::<D, S>(run, first);
            let sums = multiply::<D, M, N>(tails.codes.as_ptr().cast(), 512, inputs);
            scale::<S, M, N>(tails.scales.as_ptr().cast(), 64, control, &sums, &mut acc);
        }
        for m in 0..M {
            for n in 0..N {
                _mm512_storeu_ps(run.sums.add(m * run.row_stride + (first + n) * LANES), acc[m][n]);
            }
        }
    }
}

/// One block: eight dot products from zero for each row and output.
#[inline(always)]
unsafe fn multiply<D: DotBlock, const M: usize, const N: usize>(
    codes: *const u8,
    stride: usize,
    inputs: *const u8,
) -> [[__m512; N]; M] {
    // SAFETY: the caller vouches for the blocks of codes, and for the inputs of `M` rows.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; M];
        let mut loaded = [D::load(codes, 0); N];
        let mut w = [[_mm512_setzero_si512(); 2]; N];
        for step in 0..8 {
            let (half, pair, odd) = (step / 4, step / 2 % 2, step % 2);
            for n in 0..N {
                if step % 4 == 0 {
                    loaded[n] = D::load(codes.add(n * stride), half);
                }
                if odd == 0 {
                    w[n] = D::pair(&loaded[n], half, pair);
                }
            }
            for m in 0..M {
                let x = _mm512_loadu_si512(inputs.add((step * M + m) * STEP_BYTES).cast());
                for n in 0..N {
                    sums[m][n] = dot(sums[m][n], w[n][odd], x);
                }
            }
        }
        sums
    }
}

/// Adds a block's sums times their lanes' scales.
#[inline(always)]
unsafe fn scale<S: BlockScales, const M: usize, const N: usize>(
    scales: *const u8,
    stride: usize,
    control: __m512i,
    sums: &[[__m512; N]; M],
    acc: &mut [[__m512; N]; M],
) {
    for n in 0..N {
        // SAFETY: the caller vouches for the blocks' scales.
        unsafe {
            let lanes = S::lanes(scales.wrapping_add(n * stride), control);
            for m in 0..M {
                acc[m][n] = _mm512_fmadd_ps(lanes, sums[m][n], acc[m][n]);
            }
        }
    }
}
