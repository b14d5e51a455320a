//! Tiles with AVX-512: a byte permutation gathers the windows of 16 states, one multiplication and a few steps make them
//! values. One or two rows meet the values in registers; for more they are written once.

use std::arch::x86_64::*;

use flint_weights::exl3::{BLOCK, Codebook, Rate, TILE};

use super::decode::{
    DecodeTile, FLIPPED, HALF_TO_FLOAT, KEPT, MOST_WINDOWS, MUL1, MUL1_MAGIC, SPLIT, StreamTiles, Tiles,
    Windows, by_rate, codebook, mul1_line, windows,
};

use super::{LANES, TILES};

pub(super) fn kernel(rate: Rate, codebook: Codebook) -> DecodeTile {
    by_rate!(rate, codebook, decode)
}

/// The kernel of one or two rows.
pub(super) fn stream(rate: Rate, codebook: Codebook, rows: usize) -> Option<StreamTiles> {
    match rows {
        1 => Some(by_rate!(rate, codebook, stream_one)),
        2 => Some(by_rate!(rate, codebook, stream_two)),
        _ => None,
    }
}

struct OfRate<const HALVES: usize>;

impl<const HALVES: usize> OfRate<HALVES> {
    const WINDOWS: &'static Windows = &windows(HALVES);
    const BYTES: usize = HALVES * 16;
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni")]
unsafe fn decode<const HALVES: usize, const CODEBOOK: u8>(tile: *const u8, to: *mut f32) {
    // SAFETY: the caller vouches for the tile and for 256 numbers.
    unsafe {
        each::<HALVES, CODEBOOK>(tile, |step, a, values| {
            _mm512_storeu_ps(to.add((step * 4 + a) * 16), values);
        });
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni")]
unsafe fn stream_one<const HALVES: usize, const CODEBOOK: u8>(tiles: &Tiles) {
    // SAFETY: the caller's promise is handed on.
    unsafe { multiply::<HALVES, CODEBOOK, 1>(tiles) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512vnni")]
unsafe fn stream_two<const HALVES: usize, const CODEBOOK: u8>(tiles: &Tiles) {
    // SAFETY: the caller's promise is handed on.
    unsafe { multiply::<HALVES, CODEBOOK, 2>(tiles) }
}

/// `M` rows in the order of `multiply.rs`.
#[inline(always)]
unsafe fn multiply<const HALVES: usize, const CODEBOOK: u8, const M: usize>(tiles: &Tiles) {
    // SAFETY: the caller vouches for tiles, inputs and totals.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); 4]; M];
        for tile in 0..TILES {
            let inputs = tiles.inputs.add(tile * TILE);
            each::<HALVES, CODEBOOK>(tiles.first.add(tile * tiles.stride), |step, a, values| {
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm_loadu_ps(inputs.add(m * tiles.input_stride + step * LANES));
                    sums[a] = _mm512_fmadd_ps(values, _mm512_broadcast_f32x4(x), sums[a]);
                }
            });
        }
        for (m, sums) in sums.into_iter().enumerate() {
            for (a, sum) in sums.into_iter().enumerate() {
                let total = tiles.totals.add(m * BLOCK * LANES + a * 16);
                _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum));
            }
        }
    }
}

/// Visits the registers of a tile: of each `a` the steps in ascending order.
#[inline(always)]
unsafe fn each<const HALVES: usize, const CODEBOOK: u8>(
    tile: *const u8,
    mut visit: impl FnMut(usize, usize, __m512),
) {
    let windows = OfRate::<HALVES>::WINDOWS;
    // SAFETY: the caller vouches for the tile.
    unsafe {
        let ring = load::<HALVES>(tile);
        for h in 0..2 {
            let mut gathered = [[_mm512_setzero_si512(); 2]; MOST_WINDOWS];
            for window in 0..windows.count {
                let bytes = _mm512_load_si512(windows.bytes[h][window].as_ptr().cast());
                let low = gather::<HALVES>(&ring, bytes);
                let upper = _mm512_srli_epi32::<16>(low);
                gathered[window] = [_mm512_and_si512(low, _mm512_set1_epi32(0xFFFF)), upper];
            }
            for j in 0..8 {
                let shift = _mm512_load_si512(windows.shift[h][j].as_ptr().cast());
                // The window's upper word is shifted into its lower one; zeros stay above both.
                let [low, high] = gathered[windows.of[j]];
                let states = _mm512_shrdv_epi16(low, high, shift);
                visit(j % 4, h + j / 4 * 2, values::<CODEBOOK>(states));
            }
        }
    }
}

/// The tile's bytes, zeros behind them.
#[inline(always)]
unsafe fn load<const HALVES: usize>(tile: *const u8) -> [__m512i; 4] {
    let mut ring = [const { unsafe { std::mem::zeroed() } }; 4];
    for (index, part) in ring.iter_mut().enumerate() {
        let bytes = OfRate::<HALVES>::BYTES.saturating_sub(index * 64).min(64);
        // SAFETY: the mask leaves out what lies behind the tile.
        unsafe {
            *part = match bytes {
                0 => _mm512_setzero_si512(),
                64 => _mm512_loadu_si512(tile.add(index * 64).cast()),
                _ => _mm512_maskz_loadu_epi8((1 << bytes) - 1, tile.add(index * 64).cast()),
            };
        }
    }
    ring
}

/// Bytes of the ring by their numbers.
#[inline(always)]
unsafe fn gather<const HALVES: usize>(ring: &[__m512i; 4], bytes: __m512i) -> __m512i {
    // SAFETY: plain AVX-512 with VBMI.
    unsafe {
        match HALVES {
            ..=4 => _mm512_permutexvar_epi8(bytes, ring[0]),
            5..=8 => _mm512_permutex2var_epi8(ring[0], bytes, ring[1]),
            // The permutation looks at seven bits of a number; the eighth chooses between two halves.
            _ => {
                let low = _mm512_permutex2var_epi8(ring[0], bytes, ring[1]);
                let high = _mm512_permutex2var_epi8(ring[2], bytes, ring[3]);
                _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(bytes), high)
            }
        }
    }
}

/// The values of 16 states.
#[inline(always)]
unsafe fn values<const CODEBOOK: u8>(states: __m512i) -> __m512 {
    let (factor, addend) = codebook::<CODEBOOK>().congruence();
    // SAFETY: plain AVX-512 with VNNI.
    unsafe {
        let x = _mm512_mullo_epi32(states, _mm512_set1_epi32(factor as i32));
        let x = if addend == 0 { x } else { _mm512_add_epi32(x, _mm512_set1_epi32(addend as i32)) };
        if CODEBOOK == MUL1 {
            let magic = _mm512_set1_epi32(MUL1_MAGIC as i32);
            let sum = _mm512_castsi512_ps(_mm512_dpbusd_epi32(magic, x, _mm512_set1_epi8(1)));
            let (slope, offset) = mul1_line();
            let exact = _mm512_fmadd_ps(sum, _mm512_set1_ps(slope), _mm512_set1_ps(offset));
            // (2¹³ + 1) · v as a sum: multipliers are what this loop is short of.
            let large = _mm512_add_epi32(_mm512_castps_si512(exact), _mm512_set1_epi32(13 << 23));
            let split = _mm512_add_ps(_mm512_castsi512_ps(large), exact);
            return _mm512_sub_ps(split, _mm512_sub_ps(split, exact));
        }
        // 2⁻¹¹² of the value, exactly.
        let small = _mm512_add_ps(half(_mm512_slli_epi32::<16>(x)), half(x));
        let split = _mm512_mul_ps(small, _mm512_set1_ps(SPLIT * HALF_TO_FLOAT));
        let rest = _mm512_fnmadd_ps(small, _mm512_set1_ps(HALF_TO_FLOAT), split);
        _mm512_sub_ps(split, rest)
    }
}

/// The fp16 number in the upper half of a product, 2⁻¹¹² of it.
#[inline(always)]
unsafe fn half(x: __m512i) -> __m512 {
    // SAFETY: plain AVX-512.
    unsafe {
        let (kept, flipped) = (_mm512_set1_epi32(KEPT as i32), _mm512_set1_epi32(FLIPPED as i32));
        // (x & kept) ^ flipped
        _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0x6A>(_mm512_srai_epi32::<3>(x), kept, flipped))
    }
}
