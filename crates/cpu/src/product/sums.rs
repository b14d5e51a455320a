//! The ends of a sum: biases before the first block, scales of a block's lanes, and the fold after the last.

use flint_weights::PlainType;

use super::input::fold;
use super::layout::{BLOCK, LANES, Layout};
use super::matrix::Scales;
use crate::Level;

/// Widens `count` numbers to fp32 and fills the last vector of 16 with zeros.
///
/// # Safety
/// `from` is valid for `count` numbers, `to` for whole vectors, and the CPU has the kernel's instructions.
pub(crate) type WidenKernel = unsafe fn(kind: PlainType, from: *const u8, count: usize, to: *mut f32);

/// Which of a block's scales each lane has.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct LaneScales {
    /// Index among the block's scales.
    pub(crate) index: [u32; LANES],
    /// The same for a byte shuffle of bf16 scales into upper halves.
    pub(crate) bytes: [u8; LANES * 4],
    pub(crate) kind: PlainType,
    /// Scales of a whole block.
    pub(crate) count: usize,
    /// A power of two that scales are multiplied by.
    pub(crate) factor: f32,
}

impl LaneScales {
    pub(crate) fn new(layout: Layout, scales: &Scales, factor: f32) -> Self {
        let mut lanes = Self {
            index: [0; LANES],
            bytes: [0x80; LANES * 4],
            kind: scales.kind,
            count: BLOCK / scales.group,
            factor,
        };
        for lane in 0..LANES {
            let index = layout.first_input(lane) / scales.group;
            lanes.index[lane] = index as u32;
            lanes.bytes[lane * 4 + 2] = 2 * index as u8;
            lanes.bytes[lane * 4 + 3] = 2 * index as u8 + 1;
        }
        lanes
    }
}

/// Scales of a run of whole blocks of neighbouring outputs.
pub(crate) struct ScaleRun<'a> {
    pub(crate) lanes: &'a LaneScales,
    pub(crate) outputs: usize,
    pub(crate) blocks: usize,
    /// Scales of the first output's first block, as stored.
    pub(crate) scales: *const u8,
    /// Bytes from one output's scales to the next.
    pub(crate) scale_stride: usize,
    /// Scales of the lanes: `[blocks, 16]`.
    pub(crate) to: *mut f32,
    /// Elements from one output's lanes to the next.
    pub(crate) to_stride: usize,
}

/// Writes the scale of each lane of each block.
///
/// # Safety
/// The pointers cover what [`ScaleRun`] says, and the CPU has the kernel's instructions.
pub(crate) type ScaleKernel = unsafe fn(&ScaleRun);

/// Folds the lanes of `outputs` neighbouring outputs of one row and writes them.
///
/// # Safety
/// `lanes` is valid for `outputs` × 16 numbers, `out` for `outputs`, and the CPU has the kernel's instructions.
pub(crate) type FoldKernel = unsafe fn(lanes: *const f32, outputs: usize, out: *mut f32);

/// The kernels of a level.
#[derive(Clone, Copy)]
pub(crate) struct SumKernels {
    pub(crate) widen: WidenKernel,
    pub(crate) scale: ScaleKernel,
    pub(crate) fold: FoldKernel,
}

impl SumKernels {
    pub(crate) fn of(level: Level) -> Self {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => x86::AVX512,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => x86::AVX2,
            _ => PORTABLE,
        }
    }
}

const PORTABLE: SumKernels = SumKernels { widen, scale, fold: fold_outputs };

#[inline(always)]
unsafe fn widen(kind: PlainType, from: *const u8, count: usize, to: *mut f32) {
    for index in 0..count.next_multiple_of(LANES) {
        // SAFETY: the caller vouches for `count` numbers and whole vectors.
        unsafe { to.add(index).write(if index < count { number(kind, from, index) } else { 0.0 }) };
    }
}

#[inline(always)]
unsafe fn scale(run: &ScaleRun) {
    let lanes = run.lanes;
    for output in 0..run.outputs {
        for block in 0..run.blocks {
            let mut scales = [0.0f32; 8];
            // SAFETY: the caller vouches for `count` scales and 16 numbers a block.
            unsafe {
                let from =
                    run.scales.add(output * run.scale_stride + block * lanes.count * lanes.kind.size());
                let to = run.to.add(output * run.to_stride + block * LANES);
                for (i, scale) in scales[..lanes.count.min(8)].iter_mut().enumerate() {
                    *scale = number(lanes.kind, from, i) * lanes.factor;
                }
                for (lane, index) in lanes.index.iter().enumerate() {
                    to.add(lane).write(scales[*index as usize % 8]);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn fold_outputs(lanes: *const f32, outputs: usize, out: *mut f32) {
    for output in 0..outputs {
        // SAFETY: the caller vouches for both.
        unsafe { out.add(output).write(fold(&*lanes.add(output * LANES).cast::<[f32; LANES]>())) };
    }
}

/// Number `index` at `from`, which need not be aligned.
#[inline(always)]
unsafe fn number(kind: PlainType, from: *const u8, index: usize) -> f32 {
    // SAFETY: the caller vouches for the number.
    unsafe {
        match kind {
            PlainType::F32 => from.cast::<f32>().add(index).read_unaligned(),
            PlainType::F16 => half::f16::from_bits(from.cast::<u16>().add(index).read_unaligned()).to_f32(),
            PlainType::Bf16 => {
                f32::from_bits(u32::from(from.cast::<u16>().add(index).read_unaligned()) << 16)
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::fold_eight;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, PlainType, ScaleRun, SumKernels};

    pub(super) const AVX2: SumKernels = SumKernels { widen, scale, fold };

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn widen(kind: PlainType, from: *const u8, count: usize, to: *mut f32) {
        // SAFETY: the caller's promise is handed on; so in the next two.
        unsafe { super::widen(kind, from, count, to) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale(run: &ScaleRun) {
        // SAFETY: as above.
        unsafe { super::scale(run) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fold(lanes: *const f32, outputs: usize, out: *mut f32) {
        // SAFETY: as above.
        unsafe { super::fold_outputs(lanes, outputs, out) }
    }

    pub(super) const AVX512: SumKernels =
        SumKernels { widen: widen_wide, scale: scale_wide, fold: fold_wide };

    /// Up to 16 numbers as fp32, then zeros.
    #[inline(always)]
    unsafe fn numbers(kind: PlainType, from: *const u8, count: usize) -> __m512 {
        let mask = if count >= LANES { 0xFFFF } else { (1u16 << count) - 1 };
        // SAFETY: the caller vouches for `count` numbers and AVX-512.
        unsafe {
            match kind {
                PlainType::F32 => _mm512_maskz_loadu_ps(mask, from.cast()),
                PlainType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())),
                PlainType::Bf16 => {
                    let words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn widen_wide(kind: PlainType, from: *const u8, count: usize, to: *mut f32) {
        for first in (0..count).step_by(LANES) {
            // SAFETY: the caller vouches for `count` numbers and whole vectors.
            unsafe {
                let vector = numbers(kind, from.add(first * kind.size()), count - first);
                _mm512_storeu_ps(to.add(first), vector);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn scale_wide(run: &ScaleRun) {
        let lanes = run.lanes;
        // SAFETY: the caller vouches for the scales and the lanes.
        unsafe {
            let index = _mm512_loadu_si512(lanes.index.as_ptr().cast());
            let factor = _mm512_set1_ps(lanes.factor);
            for output in 0..run.outputs {
                for block in 0..run.blocks {
                    let from = output * run.scale_stride + block * lanes.count * lanes.kind.size();
                    let scales = numbers(lanes.kind, run.scales.add(from), lanes.count);
                    let scales = _mm512_mul_ps(_mm512_permutexvar_ps(index, scales), factor);
                    _mm512_storeu_ps(run.to.add(output * run.to_stride + block * LANES), scales);
                }
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn fold_wide(lanes: *const f32, outputs: usize, out: *mut f32) {
        let mut output = 0;
        // SAFETY: the caller vouches for `outputs` sums and places.
        unsafe {
            while output + 8 <= outputs {
                _mm256_storeu_ps(out.add(output), fold_eight(lanes.add(output * LANES)));
                output += 8;
            }
            super::fold_outputs(lanes.add(output * LANES), outputs - output, out.add(output));
        }
    }

    /// The folds of eight outputs, each in the order of `input::fold`: halves of two outputs are added side by side.
    #[inline(always)]
    pub(crate) unsafe fn fold_eight(lanes: *const f32) -> __m256 {
        // SAFETY: the caller vouches for eight sums and AVX-512.
        unsafe {
            let mut eights = [_mm512_setzero_ps(); 4];
            for i in 0..4 {
                let (a, b) = (_mm512_loadu_ps(lanes.add(i * 16)), _mm512_loadu_ps(lanes.add((i + 4) * 16)));
                // Lane i with i + 8: [output i | output i + 4].
                eights[i] =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            }
            // i with i + 4: quarters of outputs [0, 4, 2, 6] and [1, 5, 3, 7].
            let mut fours = [_mm512_setzero_ps(); 2];
            for i in 0..2 {
                let (a, b) = (eights[i], eights[i + 2]);
                fours[i] =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
            }
            // i with i + 2: in each quarter two lanes of the first output, two of the second.
            let (a, b) = (fours[0], fours[1]);
            let twos = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xEE>(a, b));
            // i with i + 1: quarter q has outputs (0, 1), (4, 5), (2, 3), (6, 7) in its lanes 0 and 2.
            let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b11_11_01_01>(twos));
            let order = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
            _mm512_castps512_ps256(_mm512_permutexvar_ps(order, ones))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_folds_and_widens_as_portable_code_does() {
        let numbers: Vec<f32> =
            (0..1024u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 * 1e-5 - 80.0).collect();
        for level in [Level::Avx2, Level::Avx512].into_iter().filter(|level| level.is_available()) {
            let kernels = SumKernels::of(level);
            for outputs in [1, 7, 8, 9, 31] {
                let (mut found, mut expected) = (vec![0.0f32; outputs], vec![0.0f32; outputs]);
                // SAFETY: 31 outputs of 16 lanes lie in the numbers; the level is available.
                unsafe {
                    (kernels.fold)(numbers.as_ptr(), outputs, found.as_mut_ptr());
                    (PORTABLE.fold)(numbers.as_ptr(), outputs, expected.as_mut_ptr());
                }
                assert_eq!(found, expected, "{level:?}, {outputs} outputs");
            }
            for kind in [PlainType::F32, PlainType::F16, PlainType::Bf16] {
                for count in [1, 15, 16, 40] {
                    let bytes: Vec<u8> =
                        numbers[..count].iter().flat_map(|x| number_bytes(kind, *x)).collect();
                    let (mut found, mut expected) = (vec![1.0f32; 48], vec![1.0f32; 48]);
                    // SAFETY: 40 numbers fill three vectors at most; the level is available.
                    unsafe {
                        (kernels.widen)(kind, bytes.as_ptr(), count, found.as_mut_ptr());
                        (PORTABLE.widen)(kind, bytes.as_ptr(), count, expected.as_mut_ptr());
                    }
                    assert_eq!(found, expected, "{level:?} {kind:?} {count} numbers");
                }
            }
        }
    }

    fn number_bytes(kind: PlainType, value: f32) -> Vec<u8> {
        match kind {
            PlainType::F32 => value.to_le_bytes().to_vec(),
            PlainType::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
            PlainType::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        }
    }
}
