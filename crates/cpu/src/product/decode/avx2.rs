//! Decoders in AVX2 for the fp32 multiply-add. `portable.rs` defines what they give.
//!
//! A step's 16 lanes are two registers, lanes 0 to 7 and 8 to 15. Codes are shifted, masked and converted: there are no
//! lookups as wide as a code here.

use std::arch::x86_64::*;

use flint_weights::{Form, PlainType};

use super::{Block, Decode, DecodeKernel};
use crate::product::layout::{BLOCK, Unit};

/// The kernel of a form, where there is one better than the portable.
pub(crate) fn kernel(form: &Form) -> Option<DecodeKernel> {
    Some(match form {
        Form::Plain { kind: PlainType::F32, .. } | Form::Exl3(_) => return None,
        Form::Plain { kind: PlainType::F16, .. } => each::<F16>,
        Form::Plain { kind: PlainType::Bf16, .. } => each::<Bf16>,
        Form::Fp8Block { .. } => each::<Fp8>,
        Form::Affine { bits: 2, .. } => each::<Runs2>,
        Form::Affine { bits: 3, .. } => each::<Windows<3>>,
        Form::Affine { bits: 4, .. } => each::<Runs4>,
        Form::Affine { bits: 5, .. } => each::<Windows<5>>,
        Form::Affine { bits: 6, .. } => each::<Windows<6>>,
        Form::Affine { .. } => each::<Bytes8>,
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn each<B: Block>(run: &Decode) {
    // SAFETY: the caller's promise is handed on.
    unsafe { super::each::<B>(run) }
}

/// Writes half `half` of step `step`.
///
/// # Safety
/// `to` is a decoded block, aligned to 64.
#[inline(always)]
unsafe fn write(to: *mut u8, step: usize, half: usize, numbers: __m256) {
    // SAFETY: step and half lie in the block.
    unsafe { _mm256_store_ps(to.add(step * 64 + half * 32).cast(), numbers) };
}

/// `v` shifted right by `bits`, a constant once the loop around is unrolled.
#[inline(always)]
unsafe fn shift(v: __m256i, bits: usize) -> __m256i {
    // SAFETY: plain AVX2; so in every function of this file.
    unsafe { _mm256_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)) }
}

/// The numbers of the codes in bits `bits ..` of eight words.
#[inline(always)]
unsafe fn codes(words: __m256i, bits: usize, mask: i32) -> __m256 {
    // SAFETY: as above.
    unsafe { _mm256_cvtepi32_ps(_mm256_and_si256(shift(words, bits), _mm256_set1_epi32(mask))) }
}

struct Bf16;

impl Block for Bf16 {
    const BYTES: usize = BLOCK * 2;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for i in 0..32 {
            // SAFETY: the caller vouches for both blocks; so in every decoder.
            unsafe {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(i * 16).cast()));
                write(to, i / 2, i % 2, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words)));
            }
        }
    }
}

struct F16;

impl Block for F16 {
    const BYTES: usize = BLOCK * 2;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for i in 0..32 {
            // SAFETY: as above.
            unsafe { write(to, i / 2, i % 2, _mm256_cvtph_ps(_mm_loadu_si128(from.add(i * 16).cast()))) };
        }
    }
}

/// A lane's run is its word.
struct Runs2;

impl Block for Runs2 {
    const BYTES: usize = BLOCK / 4;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for half in 0..2 {
            // SAFETY: as above.
            unsafe {
                let words = _mm256_loadu_si256(from.add(half * 32).cast());
                for step in 0..16 {
                    write(to, step, half, codes(words, step * 2, 3));
                }
            }
        }
    }
}

/// A lane's run is two words: even lanes own the first half of the block, odd lanes the second.
struct Runs4;

impl Block for Runs4 {
    const BYTES: usize = BLOCK / 2;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for part in 0..4 {
            let (half, second) = (part / 2, part % 2);
            // SAFETY: as above.
            unsafe {
                let at = from.add(half * 32 + second * 4);
                let (even, odd) = (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(60).cast()));
                let words = _mm256_blend_epi32::<0b1010_1010>(even, odd);
                for step in 0..8 {
                    write(to, second * 8 + step, half, codes(words, step * 4, 15));
                }
            }
        }
    }
}

/// A lane's run lies in 32-bit windows, two of 8 codes (3 bits) or four of 4.
struct Windows<const BITS: usize>;

impl<const BITS: usize> Block for Windows<BITS> {
    const BYTES: usize = BLOCK * BITS / 8;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        let count = if BITS == 3 { 2 } else { 4 };
        let per_window = 16 / count;
        for part in 0..2 * count {
            let (half, w) = (part / count, part % count);
            let bit = w * per_window * BITS;
            // The last window ends with the run: it starts a byte early, or the block's last lane would read beyond it.
            let byte = if w == count - 1 { 2 * BITS - 4 } else { bit / 8 };
            // SAFETY: each lane reads 4 of its run's `2 · BITS` bytes.
            unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let offsets = _mm256_mullo_epi32(lanes, _mm256_set1_epi32(2 * BITS as i32));
                let at = from.add(half * 16 * BITS + byte).cast();
                let words = _mm256_i32gather_epi32::<1>(at, offsets);
                for i in 0..per_window {
                    let shift = bit - byte * 8 + i * BITS;
                    write(to, w * per_window + i, half, codes(words, shift, (1 << BITS) - 1));
                }
            }
        }
    }
}

/// Register `z` of `layout::bytes`, lanes of `half`.
#[inline(always)]
unsafe fn byte_words(from: *const u8, z: usize, half: usize) -> __m256i {
    // SAFETY: the caller vouches for 256 bytes: at most byte 128 + 32 + 16 + 64 + 15 is read.
    unsafe {
        let at = from.add(half * 32 + z / 2 * 16);
        let (p, q) = (two_quarters(at), two_quarters(at.add(128)));
        if z.is_multiple_of(2) { _mm256_unpacklo_epi32(p, q) } else { _mm256_unpackhi_epi32(p, q) }
    }
}

/// 16 bytes, and the 16 bytes 64 after them.
#[inline(always)]
unsafe fn two_quarters(at: *const u8) -> __m256i {
    // SAFETY: the caller vouches for both.
    unsafe { _mm256_set_m128i(_mm_loadu_si128(at.add(64).cast()), _mm_loadu_si128(at.cast())) }
}

struct Bytes8;

impl Block for Bytes8 {
    const BYTES: usize = BLOCK;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for part in 0..8 {
            let (z, half) = (part / 2, part % 2);
            // SAFETY: as above.
            unsafe {
                let words = byte_words(from, z, half);
                for byte in 0..4 {
                    write(to, z * 4 + byte, half, codes(words, byte * 8, 255));
                }
            }
        }
    }
}

struct Fp8;

impl Block for Fp8 {
    const BYTES: usize = BLOCK;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for part in 0..8 {
            let (z, half) = (part / 2, part % 2);
            // SAFETY: as above.
            unsafe {
                let words = byte_words(from, z, half);
                for byte in 0..4 {
                    write(to, z * 4 + byte, half, e4m3(shift(words, byte * 8)));
                }
            }
        }
    }
}

/// E4M3 in the low bytes of eight words. `(1 + m / 8) · 2^(e - 7)` has the code's bits at another place and bias;
/// `m / 8 · 2^-6` is made as `(1 + m / 8) · 2^-6 - 2^-6`, which is exact and takes no subnormal.
#[inline(always)]
unsafe fn e4m3(words: __m256i) -> __m256 {
    // SAFETY: as above.
    unsafe {
        let magnitude = _mm256_and_si256(words, _mm256_set1_epi32(0x7F));
        let small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
        let bias = _mm256_sub_epi32(_mm256_set1_epi32(120), small);
        let bits = _mm256_slli_epi32::<20>(_mm256_add_epi32(magnitude, _mm256_slli_epi32::<3>(bias)));
        let one = _mm256_and_ps(_mm256_castsi256_ps(small), _mm256_set1_ps(0.015_625));
        let value = _mm256_sub_ps(_mm256_castsi256_ps(bits), one);
        let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(words, _mm256_set1_epi32(0x80)));
        _mm256_or_ps(value, _mm256_castsi256_ps(sign))
    }
}
