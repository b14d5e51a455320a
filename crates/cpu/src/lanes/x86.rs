//! The lanes in AVX2 (two registers) and AVX-512 (one).
//!
//! SAFETY, for every block here: the types are only named by [`Level::run`](crate::Level::run), which has checked that
//! the CPU has the instructions, and memory is vouched for by the callers of `read` and `write`.

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

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
