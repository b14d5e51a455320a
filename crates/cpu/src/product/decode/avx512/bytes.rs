//! Codes of a byte: 8-bit affine codes and E4M3.

use std::arch::x86_64::*;

use super::{DotBlock, FmaBlock, Table, bf16_of, shift};

/// Bytes whose words interleave to registers `2 · half` and `2 · half + 1` of the four in the order of `layout::bytes`.
#[inline(always)]
unsafe fn byte_runs(from: *const u8, half: usize) -> [__m512i; 2] {
    /// Quarters 1 and 3.
    const ODD: __mmask8 = 0b1100_1100;
    // SAFETY: bytes 0 to 255.
    unsafe {
        let from = from.add(half * 16);
        [
            _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.cast()), ODD, from.add(48).cast()),
            _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.add(128).cast()), ODD, from.add(176).cast()),
        ]
    }
}

/// The first or the second of these registers.
#[inline(always)]
unsafe fn interleave(runs: &[__m512i; 2], second: usize) -> __m512i {
    // SAFETY: plain AVX-512.
    unsafe {
        if second == 0 {
            _mm512_unpacklo_epi32(runs[0], runs[1])
        } else {
            _mm512_unpackhi_epi32(runs[0], runs[1])
        }
    }
}

/// Low and high bytes of the bf16 of 128 codes.
struct ByteTables {
    low: Table<u8, 128>,
    high: Table<u8, 128>,
}

const fn byte_tables(numbers: [u16; 128]) -> ByteTables {
    let mut tables = ByteTables { low: Table([0; 128]), high: Table([0; 128]) };
    let mut i = 0;
    while i < 128 {
        tables.low.0[i] = numbers[i] as u8;
        tables.high.0[i] = (numbers[i] >> 8) as u8;
        i += 1;
    }
    tables
}

/// Twice the codes below 128.
static BYTES_8: ByteTables = {
    let mut numbers = [0; 128];
    let mut i = 0;
    while i < 128 {
        numbers[i] = bf16_of(2.0 * i as f32);
        i += 1;
    }
    byte_tables(numbers)
};

/// The magnitudes of E4M3; the sign is the code's own top bit.
static BYTES_FP8: ByteTables = {
    let mut numbers = [0; 128];
    let mut i = 0;
    while i < 128 {
        let (exponent, mantissa) = ((i >> 3) as u32, (i & 7) as u32);
        // m / 8 · 2^-6, or (1 + m / 8) · 2^(e - 7): with 2^-9 = 0x3B00_0000 the fp32 bits of the second follow from the code.
        let value = if exponent == 0 {
            mantissa as f32 * f32::from_bits(0x3B00_0000)
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        numbers[i] = if i == 127 { 0x7FC0 } else { bf16_of(value) };
        i += 1;
    }
    byte_tables(numbers)
};

/// Low and high bytes of the codes' bf16.
trait ByteCode {
    unsafe fn halves(codes: __m512i) -> (__m512i, __m512i);
}

/// 8-bit affine codes, doubled: then the low byte of a code from 128 on is the code itself. The scales are halved.
pub(crate) struct Bytes8;

impl ByteCode for Bytes8 {
    #[inline(always)]
    unsafe fn halves(codes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: plain AVX-512 with VBMI.
        unsafe {
            let small = _mm512_testn_epi8_mask(codes, _mm512_set1_epi8(-128));
            let (low, high) = (&BYTES_8.low, &BYTES_8.high);
            let high = _mm512_permutex2var_epi8(high.register(0), codes, high.register(1));
            (
                _mm512_mask2_permutex2var_epi8(low.register(0), codes, small, low.register(1)),
                _mm512_mask_mov_epi8(_mm512_set1_epi8(0x43), small, high),
            )
        }
    }
}

/// E4M3 codes.
pub(crate) struct Fp8;

impl ByteCode for Fp8 {
    #[inline(always)]
    unsafe fn halves(codes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: plain AVX-512 with VBMI.
        unsafe {
            let low = _mm512_permutex2var_epi8(BYTES_FP8.low.register(0), codes, BYTES_FP8.low.register(1));
            let high =
                _mm512_permutex2var_epi8(BYTES_FP8.high.register(0), codes, BYTES_FP8.high.register(1));
            let sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
            (low, _mm512_or_si512(high, sign))
        }
    }
}

macro_rules! byte_codes {
    ($($name:ident)*) => {$(
        impl DotBlock for $name {
            const BYTES: usize = 256;
            type Half = [__m512i; 2];

            #[inline(always)]
            unsafe fn load(from: *const u8, half: usize) -> [__m512i; 2] {
                // SAFETY: as the trait says.
                unsafe { byte_runs(from, half) }
            }

            #[inline(always)]
            unsafe fn pair(codes: &[__m512i; 2], _: usize, pair: usize) -> [__m512i; 2] {
                // SAFETY: as the trait says.
                unsafe {
                    let (low, high) = <$name as ByteCode>::halves(interleave(codes, pair));
                    [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
                }
            }
        }
    )*};
}

byte_codes!(Bytes8 Fp8);

impl FmaBlock for Bytes8 {
    const BYTES: usize = 256;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as the trait says.
        unsafe {
            let (first, second) = (byte_runs(from, 0), byte_runs(from, 1));
            let words = [
                interleave(&first, 0),
                interleave(&first, 1),
                interleave(&second, 0),
                interleave(&second, 1),
            ];
            let mut out = [_mm512_setzero_ps(); 16];
            for (i, out) in out.iter_mut().enumerate() {
                let code = shift(words[i / 4], i % 4 * 8);
                *out = _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32(0xFF)));
            }
            out
        }
    }
}

impl FmaBlock for Fp8 {
    const BYTES: usize = 256;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        /// The upper byte of each 16-bit half, and the upper half of each word.
        const UPPER: __mmask64 = 0xAAAA_AAAA_AAAA_AAAA;
        // SAFETY: as the trait says.
        unsafe {
            let upper = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
            let mut out = [_mm512_setzero_ps(); 16];
            for z in 0..4 {
                let (low, high) = <Self as ByteCode>::halves(interleave(&byte_runs(from, z / 2), z % 2));
                // bf16 of bytes 0 and 2, and of bytes 1 and 3, of each word.
                let even = _mm512_mask_mov_epi8(low, UPPER, _mm512_slli_epi16::<8>(high));
                let odd = _mm512_mask_mov_epi8(_mm512_srli_epi16::<8>(low), UPPER, high);
                out[4 * z] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(even));
                out[4 * z + 1] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(odd));
                out[4 * z + 2] = _mm512_castsi512_ps(_mm512_and_si512(even, upper));
                out[4 * z + 3] = _mm512_castsi512_ps(_mm512_and_si512(odd, upper));
            }
            out
        }
    }
}
