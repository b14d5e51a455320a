//! Decoding a tile with AVX2: two gathers fetch the words that a window of 16 bits may span, for eight states at a time.

use std::arch::x86_64::*;

use flint_weights::exl3::{Codebook, Rate};

use super::decode::{
    DecodeTile, FLIPPED, HALF_TO_FLOAT, KEPT, MUL1, MUL1_MAGIC, SPLIT, by_rate, codebook, mul1_line,
};

pub(super) fn kernel(rate: Rate, codebook: Codebook) -> DecodeTile {
    by_rate!(rate, codebook, decode)
}

/// The word in which a state starts, one word up, and the bit in it: `[t, j]` as `[j, t]`.
#[repr(C, align(32))]
struct Starts {
    word: [[i32; 32]; 8],
    bit: [[i32; 32]; 8],
}

const fn starts(halves: usize) -> Starts {
    let mut starts = Starts { word: [[0; 32]; 8], bit: [[0; 32]; 8] };
    let mut index = 0;
    while index < 256 {
        let (t, j) = (index / 8, index % 8);
        // One word up lies the ring's last word, into which the first states reach back.
        let start = (index + 1) * halves / 2 + 32 - 16;
        starts.word[j][t] = (start / 32) as i32;
        starts.bit[j][t] = (start % 32) as i32;
        index += 1;
    }
    starts
}

struct OfRate<const HALVES: usize>;

impl<const HALVES: usize> OfRate<HALVES> {
    const STARTS: &'static Starts = &starts(HALVES);
    const WORDS: usize = HALVES * 4;
}

#[target_feature(enable = "avx2,fma")]
unsafe fn decode<const HALVES: usize, const CODEBOOK: u8>(tile: *const u8, to: *mut f32) {
    let (starts, words) = (OfRate::<HALVES>::STARTS, OfRate::<HALVES>::WORDS);
    // The last word, the ring, and one word that a window which ends with the ring asks for and does not use.
    let mut ring = [0u32; 1 + 64 + 1];
    // SAFETY: the caller vouches for the tile and for 256 numbers; words 0 to `words + 1` are in the array.
    unsafe {
        ring[1..].as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(tile, words * 4);
        ring[0] = ring[words];
        let ring = ring.as_ptr().cast::<i32>();
        for j in 0..8 {
            for eighth in 0..4 {
                let word = _mm256_load_si256(starts.word[j].as_ptr().add(eighth * 8).cast());
                let bit = _mm256_load_si256(starts.bit[j].as_ptr().add(eighth * 8).cast());
                let high = _mm256_i32gather_epi32::<4>(ring, word);
                let low = _mm256_i32gather_epi32::<4>(ring.add(1), word);
                let low = _mm256_srlv_epi32(low, _mm256_sub_epi32(_mm256_set1_epi32(32), bit));
                let window = _mm256_or_si256(_mm256_sllv_epi32(high, bit), low);
                let register = j % 4 * 4 + eighth / 2 + j / 4 * 2;
                let values = values::<CODEBOOK>(_mm256_srli_epi32::<16>(window));
                _mm256_storeu_ps(to.add(register * 16 + eighth % 2 * 8), values);
            }
        }
    }
}

/// The values of eight states.
#[inline(always)]
unsafe fn values<const CODEBOOK: u8>(states: __m256i) -> __m256 {
    let (factor, addend) = codebook::<CODEBOOK>().congruence();
    // SAFETY: plain AVX2 with FMA.
    unsafe {
        let x = _mm256_mullo_epi32(states, _mm256_set1_epi32(factor as i32));
        let x = if addend == 0 { x } else { _mm256_add_epi32(x, _mm256_set1_epi32(addend as i32)) };
        if CODEBOOK == MUL1 {
            let pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi8(1));
            let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            let sum = _mm256_castsi256_ps(_mm256_add_epi32(sums, _mm256_set1_epi32(MUL1_MAGIC as i32)));
            let (slope, offset) = mul1_line();
            let exact = _mm256_fmadd_ps(sum, _mm256_set1_ps(slope), _mm256_set1_ps(offset));
            let split = _mm256_mul_ps(exact, _mm256_set1_ps(SPLIT));
            return _mm256_sub_ps(split, _mm256_sub_ps(split, exact));
        }
        // 2⁻¹¹² of the value, exactly.
        let small = _mm256_add_ps(half(_mm256_slli_epi32::<16>(x)), half(x));
        let split = _mm256_mul_ps(small, _mm256_set1_ps(SPLIT * HALF_TO_FLOAT));
        let rest = _mm256_fnmadd_ps(small, _mm256_set1_ps(HALF_TO_FLOAT), split);
        _mm256_sub_ps(split, rest)
    }
}

/// The fp16 number in the upper half of a product, 2⁻¹¹² of it.
#[inline(always)]
unsafe fn half(x: __m256i) -> __m256 {
    // SAFETY: plain AVX2.
    unsafe {
        let (kept, flipped) = (_mm256_set1_epi32(KEPT as i32), _mm256_set1_epi32(FLIPPED as i32));
        let kept = _mm256_and_si256(_mm256_srai_epi32::<3>(x), kept);
        _mm256_castsi256_ps(_mm256_xor_si256(kept, flipped))
    }
}
