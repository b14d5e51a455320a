//! Decoders in NEON for the fp32 multiply-add. `portable.rs` defines what they give.
//!
//! A step's 16 lanes are four registers. Codes are shifted, masked and converted.

use std::arch::aarch64::*;

use flint_weights::{Form, PlainType};

use super::{Block, Decode, DecodeKernel};
use crate::product::layout::{BLOCK, Unit};

/// The kernel of a form, where there is one better than the portable.
pub(crate) fn kernel(form: &Form) -> Option<DecodeKernel> {
    Some(match form {
        Form::Plain { kind: PlainType::Bf16, .. } => each::<Bf16>,
        Form::Plain { .. } | Form::Exl3(_) => return None,
        Form::Fp8Block { .. } => each::<Fp8>,
        Form::Affine { bits: 2, .. } => each::<Runs2>,
        Form::Affine { bits: 3, .. } => each::<Windows<3>>,
        Form::Affine { bits: 4, .. } => each::<Runs4>,
        Form::Affine { bits: 5, .. } => each::<Windows<5>>,
        Form::Affine { bits: 6, .. } => each::<Windows<6>>,
        Form::Affine { .. } => each::<Bytes8>,
    })
}

unsafe fn each<B: Block>(run: &Decode) {
    // SAFETY: the caller's promise is handed on.
    unsafe { super::each::<B>(run) }
}

/// Writes quarter `quarter` of step `step`.
///
/// # Safety
/// `to` is a decoded block.
#[inline(always)]
unsafe fn write(to: *mut u8, step: usize, quarter: usize, numbers: float32x4_t) {
    // SAFETY: step and quarter lie in the block; every AArch64 CPU has NEON, so in every function of this file.
    unsafe { vst1q_f32(to.add(step * 64 + quarter * 16).cast(), numbers) };
}

/// Four words from memory, which need not be aligned.
#[inline(always)]
unsafe fn load(from: *const u8) -> uint32x4_t {
    // SAFETY: the caller vouches for 16 bytes.
    unsafe { vreinterpretq_u32_u8(vld1q_u8(from)) }
}

/// `v` shifted right by `bits`.
#[inline(always)]
unsafe fn shift(v: uint32x4_t, bits: usize) -> uint32x4_t {
    // SAFETY: as above.
    unsafe { vshlq_u32(v, vdupq_n_s32(-(bits as i32))) }
}

/// The numbers of the codes in bits `bits ..` of four words.
#[inline(always)]
unsafe fn codes(words: uint32x4_t, bits: usize, mask: u32) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vcvtq_f32_u32(vandq_u32(shift(words, bits), vdupq_n_u32(mask))) }
}

struct Bf16;

impl Block for Bf16 {
    const BYTES: usize = BLOCK * 2;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for i in 0..64 {
            // SAFETY: the caller vouches for both blocks; so in every decoder.
            unsafe {
                let halves = vreinterpret_u16_u8(vld1_u8(from.add(i * 8)));
                write(to, i / 4, i % 4, vreinterpretq_f32_u32(vshll_n_u16::<16>(halves)));
            }
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
        for quarter in 0..4 {
            // SAFETY: as above.
            unsafe {
                let words = load(from.add(quarter * 16));
                for step in 0..16 {
                    write(to, step, quarter, codes(words, step * 2, 3));
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
        for quarter in 0..4 {
            // SAFETY: as above.
            unsafe {
                let (even, odd) = (load(from.add(quarter * 16)), load(from.add(64 + quarter * 16)));
                let (first, second) = (vtrn1q_u32(even, odd), vtrn2q_u32(even, odd));
                for step in 0..8 {
                    write(to, step, quarter, codes(first, step * 4, 15));
                    write(to, 8 + step, quarter, codes(second, step * 4, 15));
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
        for part in 0..4 * count {
            let (quarter, w) = (part / count, part % count);
            let bit = w * per_window * BITS;
            // The last window ends with the run: it starts a byte early, or the block's last lane would read beyond it.
            let byte = if w == count - 1 { 2 * BITS - 4 } else { bit / 8 };
            // SAFETY: each lane reads 4 of its run's `2 · BITS` bytes.
            unsafe {
                let at = from.add(quarter * 8 * BITS + byte);
                let mut words = [0u32; 4];
                for (lane, word) in words.iter_mut().enumerate() {
                    *word = at.add(lane * 2 * BITS).cast::<u32>().read_unaligned();
                }
                let words = vld1q_u32(words.as_ptr());
                for i in 0..per_window {
                    let shift = bit - byte * 8 + i * BITS;
                    write(to, w * per_window + i, quarter, codes(words, shift, (1 << BITS) - 1));
                }
            }
        }
    }
}

/// Quarter `quarter` of registers `2 · half` and `2 · half + 1` of `layout::bytes`.
#[inline(always)]
unsafe fn byte_words(from: *const u8, half: usize, quarter: usize) -> [uint32x4_t; 2] {
    // SAFETY: the caller vouches for 256 bytes: at most byte 128 + 96 + 16 + 15 is read.
    unsafe {
        let at = from.add(half * 16 + [0, 64, 32, 96][quarter]);
        let (p, q) = (load(at), load(at.add(128)));
        [vzip1q_u32(p, q), vzip2q_u32(p, q)]
    }
}

struct Bytes8;

impl Block for Bytes8 {
    const BYTES: usize = BLOCK;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        for part in 0..8 {
            let (half, quarter) = (part / 4, part % 4);
            // SAFETY: as above.
            unsafe {
                let words = byte_words(from, half, quarter);
                for step in 0..8 {
                    write(to, half * 8 + step, quarter, codes(words[step / 4], step % 4 * 8, 255));
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
            let (half, quarter) = (part / 4, part % 4);
            // SAFETY: as above.
            unsafe {
                let words = byte_words(from, half, quarter);
                for step in 0..8 {
                    write(to, half * 8 + step, quarter, e4m3(shift(words[step / 4], step % 4 * 8)));
                }
            }
        }
    }
}

/// E4M3 in the low bytes of four words, as `avx2.rs` makes it.
#[inline(always)]
unsafe fn e4m3(words: uint32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe {
        let magnitude = vandq_u32(words, vdupq_n_u32(0x7F));
        let small = vcltq_u32(magnitude, vdupq_n_u32(8));
        let bias = vsubq_u32(vdupq_n_u32(120), small);
        let bits = vshlq_n_u32::<20>(vaddq_u32(magnitude, vshlq_n_u32::<3>(bias)));
        let one = vandq_u32(small, vreinterpretq_u32_f32(vdupq_n_f32(0.015_625)));
        let value = vsubq_f32(vreinterpretq_f32_u32(bits), vreinterpretq_f32_u32(one));
        let sign = vshlq_n_u32::<24>(vandq_u32(words, vdupq_n_u32(0x80)));
        vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(value), sign))
    }
}
