//! The ends of a sum: biases before the first block, scales of a block's lanes, and the fold after the last.

use flint_weights::PlainType;

use super::input::fold;
use super::layout::{BLOCK, LANES, Layout};
use super::matrix::Scales;
use crate::Level;

/// Starts the sums of one output's rows with `Σ bias · (group sum)`: 16 groups at a time, group `i` in lane `i % 16`.
///
/// # Safety
/// The pointers of [`Biases`] are valid for what it says, and the CPU has the kernel's instructions.
pub(crate) type StartKernel = unsafe fn(&Biases);

/// One output's biases and the rows that they meet.
pub(crate) struct Biases {
    pub(crate) kind: PlainType,
    /// `groups` numbers.
    pub(crate) biases: *const u8,
    pub(crate) groups: usize,
    /// Group sums of the first row, in whole vectors that end with zeros.
    pub(crate) group_sums: *const f32,
    /// Elements of a row's group sums.
    pub(crate) group_stride: usize,
    pub(crate) rows: usize,
    /// The first row's 16 lanes.
    pub(crate) sums: *mut f32,
    /// Elements from one row's lanes to the next.
    pub(crate) row_stride: usize,
}

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
}

impl LaneScales {
    pub(crate) fn new(layout: Layout, scales: &Scales) -> Self {
        let mut lanes = Self {
            index: [0; LANES],
            bytes: [0x80; LANES * 4],
            kind: scales.kind,
            count: BLOCK / scales.group,
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

/// Writes the scale of each lane of a block, given the block's scales as stored.
///
/// # Safety
/// `from` is valid for `count` scales, `to` for 16 numbers, and the CPU has the kernel's instructions.
pub(crate) type ScaleKernel = unsafe fn(scales: &LaneScales, from: *const u8, to: *mut f32);

/// Folds the lanes of `outputs` neighbouring outputs of one row and writes them.
///
/// # Safety
/// `lanes` is valid for `outputs` × 16 numbers, `out` for `outputs`, and the CPU has the kernel's instructions.
pub(crate) type FoldKernel = unsafe fn(lanes: *const f32, outputs: usize, out: *mut f32);

/// The kernels of a level.
#[derive(Clone, Copy)]
pub(crate) struct SumKernels {
    pub(crate) start: StartKernel,
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

const PORTABLE: SumKernels = SumKernels { start, scale, fold: fold_outputs };

#[inline(always)]
unsafe fn start(from: &Biases) {
    for row in 0..from.rows {
        // SAFETY: the caller vouches for every row's sums and lanes, and for the biases.
        unsafe {
            let group_sums = from.group_sums.add(row * from.group_stride);
            let mut lanes = [0.0f32; LANES];
            for group in (0..from.groups).step_by(LANES) {
                for (lane, sum) in lanes.iter_mut().enumerate() {
                    // Padding takes part, as it does where a vector is loaded with zeros.
                    let bias = if group + lane < from.groups {
                        number(from.kind, from.biases, group + lane)
                    } else {
                        0.0
                    };
                    *sum = bias.mul_add(*group_sums.add(group + lane), *sum);
                }
            }
            from.sums.add(row * from.row_stride).cast::<[f32; LANES]>().write_unaligned(lanes);
        }
    }
}

#[inline(always)]
unsafe fn scale(scales: &LaneScales, from: *const u8, to: *mut f32) {
    let mut block = [0.0f32; 8];
    for (i, scale) in block[..scales.count.min(8)].iter_mut().enumerate() {
        // SAFETY: the caller vouches for `count` scales.
        *scale = unsafe { number(scales.kind, from, i) };
    }
    for (lane, index) in scales.index.iter().enumerate() {
        // SAFETY: the caller vouches for 16 numbers.
        unsafe { to.add(lane).write(block[*index as usize % 8]) };
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
mod x86 {
    use std::arch::x86_64::*;

    use super::{Biases, LANES, LaneScales, PlainType, SumKernels};

    pub(super) const AVX2: SumKernels = SumKernels { start, scale, fold };

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn start(from: &Biases) {
        // SAFETY: the caller's promise is handed on; so in the next two.
        unsafe { super::start(from) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale(scales: &LaneScales, from: *const u8, to: *mut f32) {
        // SAFETY: as above.
        unsafe { super::scale(scales, from, to) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn fold(lanes: *const f32, outputs: usize, out: *mut f32) {
        // SAFETY: as above.
        unsafe { super::fold_outputs(lanes, outputs, out) }
    }

    pub(super) const AVX512: SumKernels =
        SumKernels { start: start_wide, scale: scale_wide, fold: fold_wide };

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
    unsafe fn start_wide(from: &Biases) {
        // SAFETY: the caller vouches for every row's sums and lanes, and for the biases.
        unsafe {
            for row in 0..from.rows {
                let group_sums = from.group_sums.add(row * from.group_stride);
                let mut sum = _mm512_setzero_ps();
                for group in (0..from.groups).step_by(LANES) {
                    let at = from.biases.add(group * from.kind.size());
                    let bias = numbers(from.kind, at, from.groups - group);
                    sum = _mm512_fmadd_ps(bias, _mm512_loadu_ps(group_sums.add(group)), sum);
                }
                _mm512_storeu_ps(from.sums.add(row * from.row_stride), sum);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn scale_wide(scales: &LaneScales, from: *const u8, to: *mut f32) {
        // SAFETY: the caller vouches for the scales and the lanes.
        unsafe {
            let block = numbers(scales.kind, from, scales.count);
            let index = _mm512_loadu_si512(scales.index.as_ptr().cast());
            _mm512_storeu_ps(to, _mm512_permutexvar_ps(index, block));
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
    unsafe fn fold_eight(lanes: *const f32) -> __m256 {
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
    fn every_instruction_set_folds_and_starts_as_portable_code_does() {
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
                for groups in [1, 15, 16, 40] {
                    let run = |kernels: &SumKernels| {
                        let mut sums = vec![0.0f32; 3 * 20];
                        let bytes: Vec<u8> =
                            numbers[..groups].iter().flat_map(|x| number_bytes(kind, *x)).collect();
                        let group_sums: Vec<f32> =
                            (0..3 * 48).map(|i| if i % 48 < groups { numbers[i] } else { 0.0 }).collect();
                        let biases = Biases {
                            kind,
                            biases: bytes.as_ptr(),
                            groups,
                            group_sums: group_sums.as_ptr(),
                            group_stride: 48,
                            rows: 3,
                            sums: sums.as_mut_ptr(),
                            row_stride: 20,
                        };
                        // SAFETY: the vectors hold three rows; the level is available.
                        unsafe { (kernels.start)(&biases) };
                        sums
                    };
                    assert_eq!(run(&kernels), run(&PORTABLE), "{level:?} {kind:?} {groups} groups");
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
