//! 3-, 5- and 6-bit codes, which cross bytes and words.

use std::arch::x86_64::*;

use super::{DotBlock, FmaBlock, Table, code_table, float_table, shift};

static BF16_3: Table<u16, 64> = code_table(3);
static BF16_5: Table<u16, 64> = code_table(5);
static BF16_6: Table<u16, 64> = code_table(6);
static F32_3: Table<f32, 32> = float_table(3);
static F32_5: Table<f32, 32> = float_table(5);

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

    /// All bits of the windows' bytes that lie beyond the first 128 of the block.
    const HIGH: [Table<u8, 64>; 4] = {
        let mut masks = [const { Table([0; 64]) }; 4];
        let mut w = 0;
        while w < Self::COUNT {
            let mut i = 0;
            while i < 64 {
                masks[w].0[i] = if Self::BYTES[w].0[i] < 128 { 0 } else { 0xFF };
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
    unsafe fn window(from: *const u8, w: usize) -> __m512i {
        // SAFETY: bytes 0 to 32 · BITS - 1.
        unsafe {
            let low = _mm512_loadu_si512(from.cast());
            let middle = match BITS {
                3 => _mm512_castsi256_si512(_mm256_loadu_si256(from.add(64).cast())),
                _ => _mm512_loadu_si512(from.add(64).cast()),
            };
            let index = (&const { Self::BYTES })[w].register(0);
            let window = _mm512_permutex2var_epi8(low, index, middle);
            let high = match BITS {
                3 => return window,
                5 => _mm512_castsi256_si512(_mm256_loadu_si256(from.add(128).cast())),
                _ => _mm512_loadu_si512(from.add(128).cast()),
            };
            let mask = (&const { Self::HIGH })[w].register(0);
            _mm512_ternarylogic_epi32::<0xD8>(window, _mm512_permutexvar_epi8(index, high), mask)
        }
    }

    /// The operand of a dot step, each code looked up in 64 numbers (32 below 6 bits).
    #[inline(always)]
    unsafe fn dot(windows: &[__m512i; 2], step: usize, table: &Table<u16, 64>) -> __m512i {
        let (w, s) = (step / (Self::CODES / 2), step % (Self::CODES / 2));
        // SAFETY: as `window`.
        unsafe {
            let (low, high) = (table.register(0), table.register(1));
            let control = (&const { Self::SHIFTS })[w][s].register(0);
            let codes = _mm512_multishift_epi64_epi8(control, windows[w % (Self::COUNT / 2)]);
            if BITS > 5 {
                _mm512_permutex2var_epi16(low, codes, high)
            } else {
                _mm512_permutexvar_epi16(codes, low)
            }
        }
    }

    /// The codes in the low bits of 16 words.
    #[inline(always)]
    unsafe fn codes(from: *const u8) -> [__m512i; 16] {
        // SAFETY: as `window`.
        unsafe {
            let mut windows = [_mm512_setzero_si512(); 4];
            for (w, window) in windows[..Self::COUNT].iter_mut().enumerate() {
                *window = Self::window(from, w);
            }
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

            type Half = [__m512i; 2];

            #[inline(always)]
            unsafe fn load(from: *const u8, half: usize) -> [__m512i; 2] {
                // SAFETY: as the trait says.
                unsafe {
                    let count = Windows::<$bits>::COUNT / 2;
                    let first = Windows::<$bits>::window(from, half * count);
                    [first, if count == 2 { Windows::<$bits>::window(from, half * count + 1) } else { first }]
                }
            }

            #[inline(always)]
            unsafe fn pair(codes: &[__m512i; 2], half: usize, pair: usize) -> [__m512i; 2] {
                let step = 4 * half + 2 * pair;
                // SAFETY: as the trait says.
                unsafe {
                    [
                        Windows::<$bits>::dot(codes, step, &$table),
                        Windows::<$bits>::dot(codes, step + 1, &$table),
                    ]
                }
            }
        }

        impl FmaBlock for $name {
            const BYTES: usize = 32 * $bits;

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
