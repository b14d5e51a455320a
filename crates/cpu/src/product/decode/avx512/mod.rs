//! Decoders in AVX-512 with VBMI. `portable.rs` defines what they give.
//!
//! Codes become numbers by register tables: `vpermw` looks 16-bit numbers up by the low five bits of each word, so that
//! a shifted word needs no mask; `vpermi2w` takes six bits; bytes go through two 128-byte tables (`vpermi2b`), one for
//! each half of a bf16. Where codes do not fill words, `vpmultishiftqb` moves each to its place.
//!
//! `runs.rs` 2 and 4 bits, `windows.rs` 3, 5 and 6, `bytes.rs` 8 bits and FP8; plain numbers are here.

mod bytes;
mod runs;
mod windows;

use std::arch::x86_64::*;
use std::marker::PhantomData;

use flint_weights::{Form, PlainType};

use super::{Block, Decode, DecodeKernel};
use crate::product::layout::{Arrangement, Layout, STEP_BYTES, Unit};

pub(crate) use bytes::{Bytes8, Fp8};
pub(crate) use runs::{Runs2, Runs4};
pub(crate) use windows::{Runs3, Runs5, Runs6};

/// A block's operands of the bf16 dot product, in registers.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ, VL and VBMI; `from` covers [`BYTES`](Self::BYTES) bytes.
pub(crate) trait DotBlock {
    /// Bytes of a block of codes.
    const BYTES: usize;
    /// Codes of half a block in registers.
    type Half: Copy;
    unsafe fn load(from: *const u8, half: usize) -> Self::Half;
    /// Operands of steps `4 · half + 2 · pair` and the one after it.
    unsafe fn pair(codes: &Self::Half, half: usize, pair: usize) -> [__m512i; 2];
}

/// A block's operands of the fp32 multiply-add, in registers. Safety as [`DotBlock`].
trait FmaBlock {
    /// Bytes of a block of codes.
    const BYTES: usize;
    unsafe fn operands(from: *const u8) -> [__m512; 16];
}

/// The kernel of a layout, where there is one better than the portable.
pub(crate) fn kernel(layout: Layout, form: &Form) -> Option<DecodeKernel> {
    Some(match (layout.unit, form, layout.arrangement) {
        (Unit::Dot, _, Arrangement::Runs(2)) => each::<StoreDot<Runs2>>,
        (Unit::Dot, _, Arrangement::Runs(3)) => each::<StoreDot<Runs3>>,
        (Unit::Dot, _, Arrangement::Runs(4)) => each::<StoreDot<Runs4>>,
        (Unit::Dot, _, Arrangement::Runs(5)) => each::<StoreDot<Runs5>>,
        (Unit::Dot, _, Arrangement::Runs(6)) => each::<StoreDot<Runs6>>,
        (Unit::Dot, Form::Affine { .. }, Arrangement::Bytes) => each::<StoreDot<Bytes8>>,
        (Unit::Dot, Form::Fp8Block { .. }, Arrangement::Bytes) => each::<StoreDot<Fp8>>,
        (Unit::Dot, ..) => each::<StoreDot<Bf16>>,
        (Unit::Fma, _, Arrangement::Runs(2)) => each::<StoreFma<Runs2>>,
        (Unit::Fma, _, Arrangement::Runs(3)) => each::<StoreFma<Runs3>>,
        (Unit::Fma, _, Arrangement::Runs(4)) => each::<StoreFma<Runs4>>,
        (Unit::Fma, _, Arrangement::Runs(5)) => each::<StoreFma<Runs5>>,
        (Unit::Fma, _, Arrangement::Runs(6)) => each::<StoreFma<Runs6>>,
        (Unit::Fma, Form::Affine { .. }, Arrangement::Bytes) => each::<StoreFma<Bytes8>>,
        (Unit::Fma, Form::Fp8Block { .. }, Arrangement::Bytes) => each::<StoreFma<Fp8>>,
        (Unit::Fma, Form::Plain { kind: PlainType::Bf16, .. }, _) => each::<StoreFma<Bf16>>,
        (Unit::Fma, Form::Plain { kind: PlainType::F16, .. }, _) => each::<StoreFma<F16>>,
        _ => return None,
    })
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn each<B: Block>(run: &Decode) {
    // SAFETY: the caller's promise is handed on.
    unsafe { super::each::<B>(run) }
}

struct StoreDot<D>(PhantomData<D>);

impl<D: DotBlock> Block for StoreDot<D> {
    const BYTES: usize = D::BYTES;
    const DECODED: usize = Unit::Dot.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for the block, the place and the instructions.
        unsafe {
            for half in 0..2 {
                let codes = D::load(from, half);
                for pair in 0..2 {
                    let [even, odd] = D::pair(&codes, half, pair);
                    let to = to.add((4 * half + 2 * pair) * STEP_BYTES);
                    _mm512_store_si512(to.cast(), even);
                    _mm512_store_si512(to.add(STEP_BYTES).cast(), odd);
                }
            }
        }
    }
}

struct StoreFma<D>(PhantomData<D>);

impl<D: FmaBlock> Block for StoreFma<D> {
    const BYTES: usize = D::BYTES;
    const DECODED: usize = Unit::Fma.block_bytes();

    #[inline(always)]
    unsafe fn decode(from: *const u8, to: *mut u8) {
        // SAFETY: the caller vouches for the block, the place and the instructions.
        unsafe {
            let operands = D::operands(from);
            for step in 0..16 {
                _mm512_store_ps(to.add(step * STEP_BYTES).cast(), operands[step]);
            }
        }
    }
}

/// A register's worth of constants.
#[repr(C, align(64))]
struct Table<T, const N: usize>([T; N]);

impl<T, const N: usize> Table<T, N> {
    /// Register `index` of the table.
    #[inline(always)]
    unsafe fn register(&self, index: usize) -> __m512i {
        debug_assert!((index + 1) * 64 <= size_of::<Self>());
        // SAFETY: the table holds whole registers and is aligned.
        unsafe { _mm512_load_si512((&raw const self.0).cast::<__m512i>().add(index)) }
    }
}

const fn bf16_of(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// Words shifted right by an amount that is known when the loop around is unrolled.
#[inline(always)]
unsafe fn shift(v: __m512i, bits: usize) -> __m512i {
    // SAFETY: plain AVX-512 F.
    unsafe { if bits == 0 { v } else { _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)) } }
}

/// The same for the 16-bit halves of words.
#[inline(always)]
unsafe fn shift_halves(v: __m512i, bits: usize) -> __m512i {
    // SAFETY: plain AVX-512 BW.
    unsafe { if bits == 0 { v } else { _mm512_srl_epi16(v, _mm_cvtsi32_si128(bits as i32)) } }
}

/// Two loads in one register: `ones` where the mask's bits are set, else `zeros`.
///
/// The mask is a register of bits on purpose: one of the eight mask registers would be filled anew for each block, which
/// cost 4 of 44 cycles.
#[inline(always)]
unsafe fn select(mask: __m512i, ones: *const u8, zeros: *const u8) -> __m512i {
    // SAFETY: the caller vouches for 64 bytes at both.
    unsafe {
        let (ones, zeros) = (_mm512_loadu_si512(ones.cast()), _mm512_loadu_si512(zeros.cast()));
        _mm512_ternarylogic_epi32::<0xD8>(zeros, ones, mask)
    }
}

/// bf16 numbers as they are.
pub(crate) struct Bf16;

impl DotBlock for Bf16 {
    const BYTES: usize = 512;
    type Half = *const u8;

    #[inline(always)]
    unsafe fn load(from: *const u8, half: usize) -> *const u8 {
        // SAFETY: as the trait says.
        unsafe { from.add(half * 256) }
    }

    #[inline(always)]
    unsafe fn pair(codes: &*const u8, _: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as the trait says.
        unsafe {
            let from = codes.add(pair * 128);
            [_mm512_loadu_si512(from.cast()), _mm512_loadu_si512(from.add(64).cast())]
        }
    }
}

impl FmaBlock for Bf16 {
    const BYTES: usize = 512;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as the trait says.
        unsafe {
            let mut out = [_mm512_setzero_ps(); 16];
            for (step, out) in out.iter_mut().enumerate() {
                let numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(step * 32).cast()));
                *out = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(numbers));
            }
            out
        }
    }
}

/// f16 numbers, exact in fp32.
struct F16;

impl FmaBlock for F16 {
    const BYTES: usize = 512;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as the trait says.
        unsafe {
            let mut out = [_mm512_setzero_ps(); 16];
            for (step, out) in out.iter_mut().enumerate() {
                *out = _mm512_cvtph_ps(_mm256_loadu_si256(from.add(step * 32).cast()));
            }
            out
        }
    }
}

/// The bf16 of each code below `2^bits`, repeated to 64 entries: a lookup ignores what lies above the code.
const fn code_table(bits: usize) -> Table<u16, 64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = bf16_of((i & ((1 << bits) - 1)) as f32);
        i += 1;
    }
    Table(table)
}

/// The fp32 of each code, repeated.
const fn float_table(bits: usize) -> Table<f32, 32> {
    let mut table = [0.0; 32];
    let mut i = 0;
    while i < 32 {
        table[i] = (i & ((1 << bits) - 1)) as f32;
        i += 1;
    }
    Table(table)
}
