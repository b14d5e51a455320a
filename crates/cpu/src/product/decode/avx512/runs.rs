//! 2- and 4-bit codes, which fill words.

use std::arch::x86_64::*;

use super::{DotBlock, FmaBlock, Table, code_table, float_table, select, shift, shift_halves};

static BF16_2: Table<u16, 64> = code_table(2);
static BF16_4: Table<u16, 64> = code_table(4);
static F32_2: Table<f32, 32> = float_table(2);
static F32_4: Table<f32, 32> = float_table(4);

/// 2-bit codes: a lane's run is its word.
pub(crate) struct Runs2;

impl DotBlock for Runs2 {
    const BYTES: usize = 64;
    type Half = __m512i;

    #[inline(always)]
    unsafe fn load(from: *const u8, _: usize) -> __m512i {
        // SAFETY: as the trait says; so in every implementation of this file.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn pair(codes: &__m512i, half: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let (table, bits) = (BF16_2.register(0), 8 * half + 4 * pair);
            [
                _mm512_permutexvar_epi16(shift_halves(*codes, bits), table),
                _mm512_permutexvar_epi16(shift_halves(*codes, bits + 2), table),
            ]
        }
    }
}

impl FmaBlock for Runs2 {
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as above.
        unsafe {
            let table = _mm512_castsi512_ps(F32_2.register(0));
            let v = _mm512_loadu_si512(from.cast());
            let mut out = [_mm512_setzero_ps(); 16];
            for (i, out) in out.iter_mut().enumerate() {
                *out = _mm512_permutexvar_ps(shift(v, 2 * i), table);
            }
            out
        }
    }
}

/// 4-bit codes: a lane's run is two words. The first words of all runs, and the second ones, by a blend of two loads
/// (`layout.rs`): blends run on any vector port, shuffles do not.
pub(crate) struct Runs4;

impl Runs4 {
    /// The first (0) or second (1) words of the lanes' runs.
    #[inline(always)]
    unsafe fn words(from: *const u8, second: usize) -> __m512i {
        // SAFETY: bytes 0 to 127.
        unsafe {
            let from = from.add(4 * second);
            select(_mm512_set1_epi64(0xFFFF_FFFF_0000_0000u64 as i64), from.add(60), from)
        }
    }
}

impl DotBlock for Runs4 {
    const BYTES: usize = 128;
    type Half = __m512i;

    #[inline(always)]
    unsafe fn load(from: *const u8, half: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { Self::words(from, half) }
    }

    #[inline(always)]
    unsafe fn pair(codes: &__m512i, _: usize, pair: usize) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let (table, bits) = (BF16_4.register(0), 8 * pair);
            [
                _mm512_permutexvar_epi16(shift_halves(*codes, bits), table),
                _mm512_permutexvar_epi16(shift_halves(*codes, bits + 4), table),
            ]
        }
    }
}

impl FmaBlock for Runs4 {
    const BYTES: usize = 128;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as above.
        unsafe {
            let table = _mm512_castsi512_ps(F32_4.register(0));
            let words = [Self::words(from, 0), Self::words(from, 1)];
            let mut out = [_mm512_setzero_ps(); 16];
            for (i, out) in out.iter_mut().enumerate() {
                *out = _mm512_permutexvar_ps(shift(words[i / 8], i % 8 * 4), table);
            }
            out
        }
    }
}
