//! The lanes in AVX2 (two registers) and AVX-512 (one).
//!
//! SAFETY, for every block here: the types are only named by [`Level::run`](crate::Level::run), which has checked that
//! the CPU has the instructions, and memory is vouched for by the callers of `read` and `write`.

#[allow(clippy::wildcard_imports, reason = "a hundred intrinsics")]
use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes};

/// Runs a kernel compiled for AVX2.
///
/// # Safety
/// The CPU has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2>()
}

/// Runs a kernel compiled for AVX-512.
///
/// # Safety
/// The CPU has the instructions of [`Level::Avx512`](crate::Level::Avx512).
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

/// Lanes 0 to 7 and 8 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// One register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Folds lanes `i` and `i + 4` of eight, then `i + 2`, then `i + 1`.
macro_rules! fold_eight {
    ($eight:expr, $op128:ident, $op_one:ident) => {{
        let eight = $eight;
        let four = $op128(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = $op128(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32($op_one(two, _mm_movehdup_ps(two)))
    }};
}

/// Value `j` of eight groups of four, for each `j`.
///
/// # Safety
/// `from` is valid for reading thirty-two values, and the CPU has AVX2.
#[inline(always)]
unsafe fn groups_of_four(from: *const f32) -> [__m256; 4] {
    // SAFETY: as the caller vouches.
    unsafe {
        let [a, b, c, d] = [0, 8, 16, 24].map(|at| _mm256_loadu_ps(from.add(at)));
        // Groups (0, 4), (1, 5), (2, 6), (3, 7): the halves are two transpositions of 4 × 4.
        let (g0, g1) = (_mm256_permute2f128_ps::<0x20>(a, c), _mm256_permute2f128_ps::<0x31>(a, c));
        let (g2, g3) = (_mm256_permute2f128_ps::<0x20>(b, d), _mm256_permute2f128_ps::<0x31>(b, d));
        let (low01, high01) = (_mm256_unpacklo_ps(g0, g1), _mm256_unpackhi_ps(g0, g1));
        let (low23, high23) = (_mm256_unpacklo_ps(g2, g3), _mm256_unpackhi_ps(g2, g3));
        [
            _mm256_shuffle_ps::<0x44>(low01, low23),
            _mm256_shuffle_ps::<0xEE>(low01, low23),
            _mm256_shuffle_ps::<0x44>(high01, high23),
            _mm256_shuffle_ps::<0xEE>(high01, high23),
        ]
    }
}

/// Transposes 8 × 8.
#[inline(always)]
fn transpose_eight(rows: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: see the module.
    unsafe {
        let mut quads = [rows[0]; 8];
        for half in 0..2 {
            let [a, b, c, d] = std::array::from_fn(|i| rows[half * 4 + i]);
            let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            quads[half * 4] = _mm256_shuffle_ps::<0x44>(low_ab, low_cd);
            quads[half * 4 + 1] = _mm256_shuffle_ps::<0xEE>(low_ab, low_cd);
            quads[half * 4 + 2] = _mm256_shuffle_ps::<0x44>(high_ab, high_cd);
            quads[half * 4 + 3] = _mm256_shuffle_ps::<0xEE>(high_ab, high_cd);
        }
        std::array::from_fn(|i| {
            let (top, bottom) = (quads[i % 4], quads[4 + i % 4]);
            if i < 4 {
                _mm256_permute2f128_ps::<0x20>(top, bottom)
            } else {
                _mm256_permute2f128_ps::<0x31>(top, bottom)
            }
        })
    }
}

/// Methods of two operands, lane by lane.
macro_rules! by_halves {
    ($($name:ident = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: see the module.
            unsafe { Self($intrinsic(self.0, other.0), $intrinsic(self.1, other.1)) }
        }
    )* };
}

impl Lanes for Avx2 {
    const MANY_REGISTERS: bool = false;

    by_halves! {
        add = _mm256_add_ps;
        sub = _mm256_sub_ps;
        mul = _mm256_mul_ps;
        div = _mm256_div_ps;
        min = _mm256_min_ps;
        max = _mm256_max_ps;
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn read(from: *const f32) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn read_bf16(from: *const u16) -> Self {
        // SAFETY: see the module.
        unsafe {
            let half = |at: *const u16| {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            };
            Self(half(from), half(from.add(8)))
        }
    }

    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        // SAFETY: see the module.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, term.0), _mm256_fmadd_ps(self.1, factor.1, term.1)) }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: see the module.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, self.1))
        }
    }

    #[inline(always)]
    fn where_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: see the module.
        unsafe {
            let half =
                |a, b, then, otherwise| _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b));
            Self(half(self.0, other.0, then.0, otherwise.0), half(self.1, other.1, then.1, otherwise.1))
        }
    }

    #[inline(always)]
    fn scale(self, exponent: Self) -> Self {
        // SAFETY: see the module.
        unsafe {
            let half = |value, exponent| {
                let exponent = _mm256_cvttps_epi32(exponent);
                let bound = _mm256_set1_epi32(252);
                let exponent = _mm256_min_epi32(_mm256_max_epi32(exponent, _mm256_set1_epi32(-252)), bound);
                let first = _mm256_srai_epi32::<1>(exponent);
                let second = _mm256_sub_epi32(exponent, first);
                let power = |exponent| {
                    let biased = _mm256_add_epi32(exponent, _mm256_set1_epi32(127));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
                };
                _mm256_mul_ps(_mm256_mul_ps(value, power(first)), power(second))
            };
            Self(half(self.0, exponent.0), half(self.1, exponent.1))
        }
    }

    #[inline(always)]
    unsafe fn read_groups_of_four(from: *const f32) -> [Self; 4] {
        // SAFETY: see the module.
        unsafe {
            let (low, high) = (groups_of_four(from), groups_of_four(from.add(32)));
            std::array::from_fn(|j| Self(low[j], high[j]))
        }
    }

    #[inline(always)]
    fn transpose(rows: &mut [Self; LANES]) {
        let half = |first: usize, high: bool| -> [__m256; 8] {
            std::array::from_fn(|i| if high { rows[first + i].1 } else { rows[first + i].0 })
        };
        let [top_left, top_right, bottom_left, bottom_right] =
            [half(0, false), half(0, true), half(8, false), half(8, true)].map(transpose_eight);
        for i in 0..8 {
            rows[i] = Self(top_left[i], bottom_left[i]);
            rows[8 + i] = Self(top_right[i], bottom_right[i]);
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        unsafe { fold_eight!(_mm256_add_ps(self.0, self.1), _mm_add_ps, _mm_add_ss) }
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        // SAFETY: see the module.
        unsafe { fold_eight!(_mm256_max_ps(self.0, self.1), _mm_max_ps, _mm_max_ss) }
    }
}

/// Methods of two operands.
macro_rules! by_register {
    ($($name:ident = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: see the module.
            unsafe { Self($intrinsic(self.0, other.0)) }
        }
    )* };
}

impl Lanes for Avx512 {
    const MANY_REGISTERS: bool = true;

    by_register! {
        add = _mm512_add_ps;
        sub = _mm512_sub_ps;
        mul = _mm512_mul_ps;
        div = _mm512_div_ps;
        min = _mm512_min_ps;
        max = _mm512_max_ps;
        scale = _mm512_scalef_ps;
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm512_set1_ps(value)) }
    }

    #[inline(always)]
    unsafe fn read(from: *const f32) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm512_loadu_ps(from)) }
    }

    #[inline(always)]
    unsafe fn read_bf16(from: *const u16) -> Self {
        // SAFETY: see the module.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        // SAFETY: see the module.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
    }

    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: see the module.
        unsafe { Self(_mm512_abs_ps(self.0)) }
    }

    #[inline(always)]
    fn where_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        // SAFETY: see the module.
        unsafe {
            let less = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, other.0);
            Self(_mm512_mask_blend_ps(less, otherwise.0, then.0))
        }
    }

    #[inline(always)]
    unsafe fn read_groups_of_four(from: *const f32) -> [Self; 4] {
        // SAFETY: see the module.
        unsafe {
            let [a, b, c, d] = [0, 16, 32, 48].map(|at| _mm512_loadu_ps(from.add(at)));
            // Values j of the eight groups of two registers, then values j + 1.
            let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
            let second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
            let (ab01, cd01) = (_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(c, first, d));
            let (ab23, cd23) = (_mm512_permutex2var_ps(a, second, b), _mm512_permutex2var_ps(c, second, d));
            [
                Self(_mm512_shuffle_f32x4::<0x44>(ab01, cd01)),
                Self(_mm512_shuffle_f32x4::<0xEE>(ab01, cd01)),
                Self(_mm512_shuffle_f32x4::<0x44>(ab23, cd23)),
                Self(_mm512_shuffle_f32x4::<0xEE>(ab23, cd23)),
            ]
        }
    }

    #[inline(always)]
    fn transpose(rows: &mut [Self; LANES]) {
        // SAFETY: see the module.
        unsafe {
            // Quarters of 4 × 4 inside each four rows, then quarters across rows.
            let mut quads = [rows[0].0; LANES];
            for four in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|i| rows[four * 4 + i].0);
                let (low_ab, high_ab) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (low_cd, high_cd) = (_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                quads[four * 4] = _mm512_shuffle_ps::<0x44>(low_ab, low_cd);
                quads[four * 4 + 1] = _mm512_shuffle_ps::<0xEE>(low_ab, low_cd);
                quads[four * 4 + 2] = _mm512_shuffle_ps::<0x44>(high_ab, high_cd);
                quads[four * 4 + 3] = _mm512_shuffle_ps::<0xEE>(high_ab, high_cd);
            }
            for column in 0..4 {
                let [a, b, c, d] = std::array::from_fn(|four| quads[four * 4 + column]);
                let (even_ab, odd_ab) =
                    (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b));
                let (even_cd, odd_cd) =
                    (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xDD>(c, d));
                rows[column] = Self(_mm512_shuffle_f32x4::<0x88>(even_ab, even_cd));
                rows[8 + column] = Self(_mm512_shuffle_f32x4::<0xDD>(even_ab, even_cd));
                rows[4 + column] = Self(_mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd));
                rows[12 + column] = Self(_mm512_shuffle_f32x4::<0xDD>(odd_ab, odd_cd));
            }
        }
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        unsafe {
            let halves = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            fold_eight!(halves, _mm_add_ps, _mm_add_ss)
        }
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        // SAFETY: see the module.
        unsafe {
            let halves = _mm256_max_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            fold_eight!(halves, _mm_max_ps, _mm_max_ss)
        }
    }
}
