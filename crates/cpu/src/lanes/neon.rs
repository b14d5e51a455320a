//! The lanes in NEON: four registers.
//!
//! SAFETY, for every block here: every AArch64 CPU has NEON, and memory is vouched for by the callers of `read` and
//! `write`.

#![allow(unused_unsafe, reason = "which intrinsics are unsafe to call differs between compilers")]

#[allow(clippy::wildcard_imports, reason = "dozens of intrinsics")]
use std::arch::aarch64::*;

use super::Lanes;

/// Lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
#[derive(Clone, Copy)]
pub(crate) struct Neon([float32x4_t; 4]);

impl Neon {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self([
            f(self.0[0], other.0[0]),
            f(self.0[1], other.0[1]),
            f(self.0[2], other.0[2]),
            f(self.0[3], other.0[3]),
        ])
    }

    /// Folds lane `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    #[inline(always)]
    fn fold(self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> f32 {
        let four = f(f(self.0[0], self.0[2]), f(self.0[1], self.0[3]));
        // SAFETY: see the module.
        unsafe {
            let two = f(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(f(two, vextq_f32::<1>(two, two)))
        }
    }
}

/// Methods of two operands.
macro_rules! by_registers {
    ($($name:ident = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            // SAFETY: see the module.
            self.zip(other, |a, b| unsafe { $intrinsic(a, b) })
        }
    )* };
}

/// `a` where `a < b`, else `b`: NEON's own minimum treats NaN and zeros otherwise.
#[inline(always)]
fn min_four(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: see the module.
    unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// `a` where `a > b`, else `b`.
#[inline(always)]
fn max_four(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: see the module.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// `value · 2^exponent` in two exact factors.
#[inline(always)]
fn scale_four(value: float32x4_t, exponent: float32x4_t) -> float32x4_t {
    // SAFETY: see the module.
    unsafe {
        let exponent = vcvtq_s32_f32(exponent);
        let exponent = vminq_s32(vmaxq_s32(exponent, vdupq_n_s32(-252)), vdupq_n_s32(252));
        let first = vshrq_n_s32::<1>(exponent);
        let second = vsubq_s32(exponent, first);
        let power =
            |exponent| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(exponent, vdupq_n_s32(127))));
        vmulq_f32(vmulq_f32(value, power(first)), power(second))
    }
}

impl Lanes for Neon {
    const MANY_REGISTERS: bool = false;

    by_registers! {
        add = vaddq_f32;
        sub = vsubq_f32;
        mul = vmulq_f32;
        div = vdivq_f32;
    }

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see the module.
        Self([unsafe { vdupq_n_f32(value) }; 4])
    }

    #[inline(always)]
    unsafe fn read(from: *const f32) -> Self {
        // SAFETY: see the module.
        unsafe { Self([0, 4, 8, 12].map(|at| vld1q_f32(from.add(at)))) }
    }

    #[inline(always)]
    unsafe fn read_bf16(from: *const u16) -> Self {
        // SAFETY: see the module.
        unsafe {
            Self(
                [0, 4, 8, 12]
                    .map(|at| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(from.add(at)))))),
            )
        }
    }

    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        for (i, four) in self.0.into_iter().enumerate() {
            // SAFETY: see the module.
            unsafe { vst1q_f32(to.add(4 * i), four) }
        }
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        let mut out = term.0;
        for (i, four) in out.iter_mut().enumerate() {
            // SAFETY: see the module.
            *four = unsafe { vfmaq_f32(*four, self.0[i], factor.0[i]) };
        }
        Self(out)
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, min_four)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, max_four)
    }

    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: see the module.
        Self(self.0.map(|four| unsafe { vabsq_f32(four) }))
    }

    #[inline(always)]
    fn where_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        let mut out = otherwise.0;
        for (i, four) in out.iter_mut().enumerate() {
            // SAFETY: see the module.
            *four = unsafe { vbslq_f32(vcltq_f32(self.0[i], other.0[i]), then.0[i], *four) };
        }
        Self(out)
    }

    #[inline(always)]
    fn scale(self, exponent: Self) -> Self {
        self.zip(exponent, scale_four)
    }

    #[inline(always)]
    unsafe fn read_groups_of_four(from: *const f32) -> [Self; 4] {
        // SAFETY: see the module.
        let fours = [0, 16, 32, 48].map(|at| unsafe { vld4q_f32(from.add(at)) });
        [
            Self(fours.map(|four| four.0)),
            Self(fours.map(|four| four.1)),
            Self(fours.map(|four| four.2)),
            Self(fours.map(|four| four.3)),
        ]
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see the module.
        self.fold(|a, b| unsafe { vaddq_f32(a, b) })
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        self.fold(max_four)
    }
}
