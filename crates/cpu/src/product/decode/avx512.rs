//! Decoders in AVX-512 with VBMI. `portable.rs` defines what they give.
//!
//! Codes become numbers by register tables: `vpermw` looks 16-bit numbers up by the low five bits of each word, so that
//! a shifted word needs no mask; `vpermi2w` takes six bits; bytes go through two 128-byte tables (`vpermi2b`), one for
//! each half of a bf16. Where codes do not fill words, `vpmultishiftqb` moves each to its place.

use std::arch::x86_64::*;

use super::BlockDecoder;
use crate::product::layout::{Arrangement, Layout, Unit};
use flint_weights::{Form, PlainType};

/// A block's operands of the bf16 dot product, in registers.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ, VL and VBMI; `from` covers [`BYTES`](Self::BYTES) bytes.
pub(crate) trait DotBlock {
    /// Bytes of a block of codes.
    const BYTES: usize;
    unsafe fn operands(from: *const u8) -> [__m512i; 8];
}

/// A block's operands of the fp32 multiply-add, in registers. Safety as [`DotBlock`].
trait FmaBlock {
    unsafe fn operands(from: *const u8) -> [__m512; 16];
}

/// The decoder of a layout, if there is one better than the portable.
pub(crate) fn decoder(layout: Layout, form: &Form) -> Option<BlockDecoder> {
    Some(match (layout.unit, form, layout.arrangement) {
        (Unit::Dot, _, Arrangement::Runs(2)) => store_dot::<Runs2>,
        (Unit::Dot, _, Arrangement::Runs(3)) => store_dot::<Runs3>,
        (Unit::Dot, _, Arrangement::Runs(4)) => store_dot::<Runs4>,
        (Unit::Dot, _, Arrangement::Runs(5)) => store_dot::<Runs5>,
        (Unit::Dot, _, Arrangement::Runs(6)) => store_dot::<Runs6>,
        (Unit::Dot, Form::Affine { .. }, Arrangement::Bytes) => store_dot::<Bytes8>,
        (Unit::Dot, Form::Fp8Block { .. }, Arrangement::Bytes) => store_dot::<Fp8>,
        (Unit::Dot, ..) => store_dot::<Bf16>,
        (Unit::Fma, _, Arrangement::Runs(2)) => store_fma::<Runs2>,
        (Unit::Fma, _, Arrangement::Runs(3)) => store_fma::<Runs3>,
        (Unit::Fma, _, Arrangement::Runs(4)) => store_fma::<Runs4>,
        (Unit::Fma, _, Arrangement::Runs(5)) => store_fma::<Runs5>,
        (Unit::Fma, _, Arrangement::Runs(6)) => store_fma::<Runs6>,
        (Unit::Fma, Form::Affine { .. }, Arrangement::Bytes) => store_fma::<Bytes8>,
        (Unit::Fma, Form::Fp8Block { .. }, Arrangement::Bytes) => store_fma::<Fp8>,
        (Unit::Fma, Form::Plain { kind: PlainType::Bf16, .. }, _) => store_fma::<Bf16>,
        (Unit::Fma, Form::Plain { kind: PlainType::F16, .. }, _) => store_fma::<F16>,
        _ => return None,
    })
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn store_dot<D: DotBlock>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller vouches for the block, the place and the instructions.
    unsafe {
        let operands = D::operands(from);
        for step in 0..8 {
            _mm512_store_si512(to.add(step * 64).cast(), operands[step]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn store_fma<D: FmaBlock>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller vouches for the block, the place and the instructions.
    unsafe {
        let operands = D::operands(from);
        for step in 0..16 {
            _mm512_store_ps(to.add(step * 64).cast(), operands[step]);
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

const fn bf16(value: f32) -> u16 {
    (value.to_bits() >> 16) as u16
}

/// The bf16 of each code below `2^bits`, repeated to 64 entries: a lookup ignores what lies above the code.
const fn code_table(bits: usize) -> Table<u16, 64> {
    let mut table = [0; 64];
    let mut i = 0;
    while i < 64 {
        table[i] = bf16((i & ((1 << bits) - 1)) as f32);
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

static BF16_2: Table<u16, 64> = code_table(2);
static BF16_3: Table<u16, 64> = code_table(3);
static BF16_4: Table<u16, 64> = code_table(4);
static BF16_5: Table<u16, 64> = code_table(5);
static BF16_6: Table<u16, 64> = code_table(6);
static F32_2: Table<f32, 32> = float_table(2);
static F32_3: Table<f32, 32> = float_table(3);
static F32_4: Table<f32, 32> = float_table(4);
static F32_5: Table<f32, 32> = float_table(5);

/// 2-bit codes: a lane's run is its word.
pub(crate) struct Runs2;

impl DotBlock for Runs2 {
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512i; 8] {
        // SAFETY: as the trait says; so in every implementation of this file.
        unsafe {
            let table = BF16_2.register(0);
            let v = _mm512_loadu_si512(from.cast());
            [
                _mm512_permutexvar_epi16(v, table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<2>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<6>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<10>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(v), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<14>(v), table),
            ]
        }
    }
}

impl FmaBlock for Runs2 {
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

/// Words shifted right by an amount that is known when the loop around is unrolled.
#[inline(always)]
unsafe fn shift(v: __m512i, bits: usize) -> __m512i {
    // SAFETY: plain AVX-512 F.
    unsafe { if bits == 0 { v } else { _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits as i32)) } }
}

/// 4-bit codes: a lane's run is two words. The first words of all runs, and the second ones, by a blend of two loads
/// (`layout.rs`): blends run on any vector port, shuffles do not.
pub(crate) struct Runs4;

impl Runs4 {
    #[inline(always)]
    unsafe fn words(from: *const u8) -> [__m512i; 2] {
        const ODD: __mmask16 = 0xAAAA;
        // SAFETY: bytes 0 to 127.
        unsafe {
            [
                _mm512_mask_loadu_epi32(_mm512_loadu_si512(from.cast()), ODD, from.add(60).cast()),
                _mm512_mask_loadu_epi32(_mm512_loadu_si512(from.add(4).cast()), ODD, from.add(64).cast()),
            ]
        }
    }
}

impl DotBlock for Runs4 {
    const BYTES: usize = 128;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512i; 8] {
        // SAFETY: as above.
        unsafe {
            let table = BF16_4.register(0);
            let [a, b] = Self::words(from);
            [
                _mm512_permutexvar_epi16(a, table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(a), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(a), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(a), table),
                _mm512_permutexvar_epi16(b, table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(b), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(b), table),
                _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(b), table),
            ]
        }
    }
}

impl FmaBlock for Runs4 {
    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as above.
        unsafe {
            let table = _mm512_castsi512_ps(F32_4.register(0));
            let words = Self::words(from);
            let mut out = [_mm512_setzero_ps(); 16];
            for (i, out) in out.iter_mut().enumerate() {
                *out = _mm512_permutexvar_ps(shift(words[i / 8], i % 8 * 4), table);
            }
            out
        }
    }
}

/// 3, 5 and 6 bits: a lane's 16 codes lie in 32-bit windows, two of 8 codes or four of 4, each from a byte of its own.
struct Windows<const BITS: usize>;

impl<const BITS: usize> Windows<BITS> {
    const COUNT: usize = if BITS == 3 { 2 } else { 4 };
    const CODES: usize = 16 / Self::COUNT;

    /// Bit of the lane's run at which window `w` starts.
    const fn start(w: usize) -> usize {
        w * Self::CODES * BITS
    }

    /// Bits of window `w` below its first code.
    const fn shift(w: usize) -> usize {
        Self::start(w) % 8
    }

    /// Byte of the block for each byte of the windows. A byte beyond the block would hold no code.
    const BYTES: [Table<u8, 64>; 4] = {
        let mut tables = [const { Table([0; 64]) }; 4];
        let mut w = 0;
        while w < Self::COUNT {
            let mut i = 0;
            while i < 64 {
                let byte = i / 4 * 2 * BITS + Self::start(w) / 8 + i % 4;
                tables[w].0[i] = if byte < 32 * BITS { byte } else { 32 * BITS - 1 } as u8;
                i += 1;
            }
            w += 1;
        }
        tables
    };

    /// Bytes of the windows that lie beyond the first 128 of the block.
    const HIGH: [u64; 4] = {
        let mut masks = [0; 4];
        let mut w = 0;
        while w < Self::COUNT {
            let mut i = 0;
            while i < 64 {
                masks[w] |= ((Self::BYTES[w].0[i] >> 7) as u64) << i;
                i += 1;
            }
            w += 1;
        }
        masks
    };

    /// For dot step `s` of window `w`, the bit of its 64-bit word from which each byte is taken: codes `2s` and `2s + 1`
    /// in the low bytes of a lane's halves.
    const SHIFTS: [[Table<u8, 64>; 4]; 4] = {
        let mut tables = [const { [const { Table([0; 64]) }; 4] }; 4];
        let mut w = 0;
        while w < Self::COUNT {
            let mut s = 0;
            while s < Self::CODES / 2 {
                let mut i = 0;
                while i < 64 {
                    let (lane, half) = (i % 8 / 4, i % 4 / 2);
                    tables[w][s].0[i] = (lane * 32 + Self::shift(w) + (2 * s + half) * BITS) as u8;
                    i += 1;
                }
                s += 1;
            }
            w += 1;
        }
        tables
    };

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [__m512i; 4] {
        // SAFETY: bytes 0 to 32 · BITS - 1.
        unsafe {
            let low = _mm512_loadu_si512(from.cast());
            let (middle, high) = match BITS {
                3 => (_mm512_castsi256_si512(_mm256_loadu_si256(from.add(64).cast())), low),
                5 => (
                    _mm512_loadu_si512(from.add(64).cast()),
                    _mm512_castsi256_si512(_mm256_loadu_si256(from.add(128).cast())),
                ),
                _ => (_mm512_loadu_si512(from.add(64).cast()), _mm512_loadu_si512(from.add(128).cast())),
            };
            let mut windows = [low; 4];
            for w in 0..Self::COUNT {
                let index = (&const { Self::BYTES })[w].register(0);
                windows[w] = _mm512_permutex2var_epi8(low, index, middle);
                if BITS > 4 {
                    windows[w] = _mm512_mask_permutexvar_epi8(windows[w], Self::HIGH[w], index, high);
                }
            }
            windows
        }
    }

    /// The dot operands, each code looked up in 64 numbers (32 below 6 bits).
    #[inline(always)]
    unsafe fn dot(from: *const u8, table: &Table<u16, 64>) -> [__m512i; 8] {
        // SAFETY: as `load`.
        unsafe {
            let windows = Self::load(from);
            let (low, high) = (table.register(0), table.register(1));
            let mut out = [low; 8];
            for (step, out) in out.iter_mut().enumerate() {
                let (w, s) = (step / (Self::CODES / 2), step % (Self::CODES / 2));
                let control = (&const { Self::SHIFTS })[w][s].register(0);
                let codes = _mm512_multishift_epi64_epi8(control, windows[w]);
                *out = if BITS > 5 {
                    _mm512_permutex2var_epi16(low, codes, high)
                } else {
                    _mm512_permutexvar_epi16(codes, low)
                };
            }
            out
        }
    }

    /// The codes in the low bits of 16 words.
    #[inline(always)]
    unsafe fn codes(from: *const u8) -> [__m512i; 16] {
        // SAFETY: as `load`.
        unsafe {
            let windows = Self::load(from);
            let mut out = [windows[0]; 16];
            for (i, out) in out.iter_mut().enumerate() {
                let w = i / Self::CODES;
                *out = shift(windows[w], Self::shift(w) + i % Self::CODES * BITS);
            }
            out
        }
    }
}

macro_rules! windowed {
    ($name:ident, $bits:literal, $table:ident, $lookup:expr) => {
        #[doc = concat!(stringify!($bits), "-bit codes.")]
        pub(crate) struct $name;

        impl DotBlock for $name {
            const BYTES: usize = 32 * $bits;

            #[inline(always)]
            unsafe fn operands(from: *const u8) -> [__m512i; 8] {
                // SAFETY: as the trait says.
                unsafe { Windows::<$bits>::dot(from, &$table) }
            }
        }

        impl FmaBlock for $name {
            #[inline(always)]
            unsafe fn operands(from: *const u8) -> [__m512; 16] {
                // SAFETY: as the trait says.
                unsafe {
                    let codes = Windows::<$bits>::codes(from);
                    let mut out = [_mm512_setzero_ps(); 16];
                    for i in 0..16 {
                        out[i] = $lookup(codes[i]);
                    }
                    out
                }
            }
        }
    };
}

windowed!(Runs3, 3, BF16_3, three_bits);
windowed!(Runs5, 5, BF16_5, five_bits);
windowed!(Runs6, 6, BF16_6, six_bits);

#[inline(always)]
unsafe fn three_bits(codes: __m512i) -> __m512 {
    // SAFETY: plain AVX-512 F; so below.
    unsafe { _mm512_permutexvar_ps(codes, _mm512_castsi512_ps(F32_3.register(0))) }
}

#[inline(always)]
unsafe fn five_bits(codes: __m512i) -> __m512 {
    // SAFETY: as above.
    unsafe {
        let (low, high) = (F32_5.register(0), F32_5.register(1));
        _mm512_permutex2var_ps(_mm512_castsi512_ps(low), codes, _mm512_castsi512_ps(high))
    }
}

#[inline(always)]
unsafe fn six_bits(codes: __m512i) -> __m512 {
    // SAFETY: as above.
    unsafe { _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(63))) }
}

/// Four registers of bytes in the order of `layout::bytes`.
#[inline(always)]
unsafe fn byte_words(from: *const u8) -> [__m512i; 4] {
    /// Quarters 1 and 3.
    const ODD: __mmask8 = 0b1100_1100;
    // SAFETY: bytes 0 to 255.
    unsafe {
        let p0 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.cast()), ODD, from.add(48).cast());
        let p1 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.add(16).cast()), ODD, from.add(64).cast());
        let q0 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.add(128).cast()), ODD, from.add(176).cast());
        let q1 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(from.add(144).cast()), ODD, from.add(192).cast());
        [
            _mm512_unpacklo_epi32(p0, q0),
            _mm512_unpackhi_epi32(p0, q0),
            _mm512_unpacklo_epi32(p1, q1),
            _mm512_unpackhi_epi32(p1, q1),
        ]
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

static BYTES_8: ByteTables = {
    let mut numbers = [0; 128];
    let mut i = 0;
    while i < 128 {
        numbers[i] = bf16(i as f32);
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
        numbers[i] = if i == 127 { 0x7FC0 } else { bf16(value) };
        i += 1;
    }
    byte_tables(numbers)
};

/// Low and high bytes of the codes' bf16.
trait ByteCode {
    unsafe fn halves(codes: __m512i) -> (__m512i, __m512i);
}

/// 8-bit affine codes.
pub(crate) struct Bytes8;

impl ByteCode for Bytes8 {
    #[inline(always)]
    unsafe fn halves(codes: __m512i) -> (__m512i, __m512i) {
        // SAFETY: plain AVX-512 with VBMI.
        unsafe {
            let low = _mm512_permutex2var_epi8(BYTES_8.low.register(0), codes, BYTES_8.low.register(1));
            let high = _mm512_permutex2var_epi8(BYTES_8.high.register(0), codes, BYTES_8.high.register(1));
            // From 128 on: 0x4300 + the seven bits below.
            let large = _mm512_movepi8_mask(codes);
            let seven = _mm512_and_si512(codes, _mm512_set1_epi8(0x7F));
            (
                _mm512_mask_mov_epi8(low, large, seven),
                _mm512_mask_mov_epi8(high, large, _mm512_set1_epi8(0x43)),
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

            #[inline(always)]
            unsafe fn operands(from: *const u8) -> [__m512i; 8] {
                // SAFETY: as the trait says.
                unsafe {
                    let words = byte_words(from);
                    let mut out = [words[0]; 8];
                    for z in 0..4 {
                        let (low, high) = <$name as ByteCode>::halves(words[z]);
                        out[2 * z] = _mm512_unpacklo_epi8(low, high);
                        out[2 * z + 1] = _mm512_unpackhi_epi8(low, high);
                    }
                    out
                }
            }
        }
    )*};
}

byte_codes!(Bytes8 Fp8);

impl FmaBlock for Bytes8 {
    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        // SAFETY: as the trait says.
        unsafe {
            let words = byte_words(from);
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
    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512; 16] {
        /// The upper byte of each 16-bit half, and the upper half of each word.
        const UPPER: __mmask64 = 0xAAAA_AAAA_AAAA_AAAA;
        // SAFETY: as the trait says.
        unsafe {
            let words = byte_words(from);
            let upper = _mm512_set1_epi32(0xFFFF_0000u32 as i32);
            let mut out = [_mm512_setzero_ps(); 16];
            for z in 0..4 {
                let (low, high) = <Self as ByteCode>::halves(words[z]);
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

/// bf16 numbers as they are.
pub(crate) struct Bf16;

impl DotBlock for Bf16 {
    const BYTES: usize = 512;

    #[inline(always)]
    unsafe fn operands(from: *const u8) -> [__m512i; 8] {
        // SAFETY: as the trait says.
        unsafe {
            let mut out = [_mm512_setzero_si512(); 8];
            for (step, out) in out.iter_mut().enumerate() {
                *out = _mm512_loadu_si512(from.add(step * 64).cast());
            }
            out
        }
    }
}

impl FmaBlock for Bf16 {
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
