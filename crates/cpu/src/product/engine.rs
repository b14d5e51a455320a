//! The multiply-add steps of each instruction set.
//!
//! An [`Engine`] computes a slice of the 16 lanes at a time: lanes are independent until the fold, so a narrow register
//! file takes two or four slices and gives the same bits.

/// One instruction set's way to run the lanes. Methods are `#[inline(always)]` so that they are compiled with the
/// features of the function that names the engine.
///
/// # Safety
/// Every method may only run on a CPU with the engine's instructions; pointers must be valid for a slice.
pub(crate) trait Engine {
    /// fp32 sums of the slice's lanes.
    type Sums: Copy;
    /// Weights or inputs of one step of the slice.
    type Operand: Copy;
    /// Lanes of a slice.
    const WIDTH: usize;
    /// Steps of a block.
    const STEPS: usize;

    unsafe fn zero() -> Self::Sums;
    unsafe fn load(from: *const f32) -> Self::Sums;
    unsafe fn store(sums: Self::Sums, to: *mut f32);
    /// `scale · sums + acc`, rounded once.
    unsafe fn scale(scale: Self::Sums, sums: Self::Sums, acc: Self::Sums) -> Self::Sums;
    unsafe fn operand(from: *const u8) -> Self::Operand;
    /// `sums + w · x`.
    unsafe fn step(sums: Self::Sums, w: Self::Operand, x: Self::Operand) -> Self::Sums;
}

/// An engine of fp32 numbers whose lanes may share four inputs: lane `l` takes number `l % 4`.
///
/// # Safety
/// As for [`Engine`].
pub(crate) trait Quad: Engine {
    /// Four numbers, repeated over the slice.
    unsafe fn quad(from: *const f32) -> Self::Operand;
    unsafe fn add(a: Self::Sums, b: Self::Sums) -> Self::Sums;
}

/// Portable Rust.
pub(crate) struct Scalar;

impl Quad for Scalar {
    #[inline(always)]
    unsafe fn quad(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller vouches for four numbers.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
}

impl Engine for Scalar {
    type Sums = [f32; 4];
    type Operand = [f32; 4];
    const WIDTH: usize = 4;
    const STEPS: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> [f32; 4] {
        [0.0; 4]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 4] {
        // SAFETY: the caller vouches for a slice.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(sums: [f32; 4], to: *mut f32) {
        // SAFETY: as above.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(sums) }
    }
    #[inline(always)]
    unsafe fn scale(scale: [f32; 4], sums: [f32; 4], acc: [f32; 4]) -> [f32; 4] {
        let mut out = acc;
        for i in 0..4 {
            out[i] = scale[i].mul_add(sums[i], acc[i]);
        }
        out
    }
    #[inline(always)]
    unsafe fn operand(from: *const u8) -> [f32; 4] {
        // SAFETY: as above.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn step(sums: [f32; 4], w: [f32; 4], x: [f32; 4]) -> [f32; 4] {
        let mut out = sums;
        for i in 0..4 {
            out[i] = w[i].mul_add(x[i], sums[i]);
        }
        out
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use std::arch::x86_64::*;

    use super::{Engine, Quad};

    /// `sum + w · x` of bf16 pairs.
    ///
    /// # Safety
    /// The CPU has AVX-512 BF16.
    #[inline(always)]
    pub(crate) unsafe fn dot(sum: __m512, w: __m512i, x: __m512i) -> __m512 {
        // SAFETY: as the caller vouches; both types are 512 bits without invalid values.
        unsafe {
            let w = std::mem::transmute::<__m512i, __m512bh>(w);
            _mm512_dpbf16_ps(sum, w, std::mem::transmute::<__m512i, __m512bh>(x))
        }
    }

    /// fp32 in 256-bit registers.
    pub(crate) struct Avx2;

    impl Engine for Avx2 {
        type Sums = __m256;
        type Operand = __m256;
        const WIDTH: usize = 8;
        const STEPS: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> __m256 {
            // SAFETY: the caller's CPU has the instruction; so in every method of this file.
            unsafe { _mm256_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m256 {
            // SAFETY: the caller vouches for a slice.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(sums: __m256, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(to, sums) }
        }
        #[inline(always)]
        unsafe fn scale(scale: __m256, sums: __m256, acc: __m256) -> __m256 {
            // SAFETY: as above.
            unsafe { _mm256_fmadd_ps(scale, sums, acc) }
        }
        #[inline(always)]
        unsafe fn operand(from: *const u8) -> __m256 {
            // SAFETY: as above.
            unsafe { _mm256_loadu_ps(from.cast()) }
        }
        #[inline(always)]
        unsafe fn step(sums: __m256, w: __m256, x: __m256) -> __m256 {
            // SAFETY: as above.
            unsafe { _mm256_fmadd_ps(w, x, sums) }
        }
    }

    impl Quad for Avx2 {
        #[inline(always)]
        unsafe fn quad(from: *const f32) -> __m256 {
            // SAFETY: the caller vouches for four numbers.
            unsafe { _mm256_broadcast_ps(&from.cast::<__m128>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn add(a: __m256, b: __m256) -> __m256 {
            // SAFETY: as above.
            unsafe { _mm256_add_ps(a, b) }
        }
    }

    impl Quad for Avx512 {
        #[inline(always)]
        unsafe fn quad(from: *const f32) -> __m512 {
            // SAFETY: the caller vouches for four numbers.
            unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn add(a: __m512, b: __m512) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_add_ps(a, b) }
        }
    }

    /// fp32 in 512-bit registers.
    pub(crate) struct Avx512;

    impl Engine for Avx512 {
        type Sums = __m512;
        type Operand = __m512;
        const WIDTH: usize = 16;
        const STEPS: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the caller's CPU has the instruction.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            // SAFETY: the caller vouches for a slice.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(sums: __m512, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to, sums) }
        }
        #[inline(always)]
        unsafe fn scale(scale: __m512, sums: __m512, acc: __m512) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_fmadd_ps(scale, sums, acc) }
        }
        #[inline(always)]
        unsafe fn operand(from: *const u8) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_loadu_ps(from.cast()) }
        }
        #[inline(always)]
        unsafe fn step(sums: __m512, w: __m512, x: __m512) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_fmadd_ps(w, x, sums) }
        }
    }

    /// bf16 pairs into fp32 in 512-bit registers.
    pub(crate) struct Dot;

    impl Engine for Dot {
        type Sums = __m512;
        type Operand = __m512i;
        const WIDTH: usize = 16;
        const STEPS: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the caller's CPU has the instruction.
            unsafe { _mm512_setzero_ps() }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> __m512 {
            // SAFETY: the caller vouches for a slice.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(sums: __m512, to: *mut f32) {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(to, sums) }
        }
        #[inline(always)]
        unsafe fn scale(scale: __m512, sums: __m512, acc: __m512) -> __m512 {
            // SAFETY: as above.
            unsafe { _mm512_fmadd_ps(scale, sums, acc) }
        }
        #[inline(always)]
        unsafe fn operand(from: *const u8) -> __m512i {
            // SAFETY: as above.
            unsafe { _mm512_loadu_si512(from.cast()) }
        }
        #[inline(always)]
        unsafe fn step(sums: __m512, w: __m512i, x: __m512i) -> __m512 {
            // SAFETY: as above.
            unsafe { dot(sums, w, x) }
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) mod arm {
    use std::arch::aarch64::*;

    use super::{Engine, Quad};

    impl Quad for Neon {
        #[inline(always)]
        unsafe fn quad(from: *const f32) -> float32x4_t {
            // SAFETY: the caller vouches for four numbers.
            unsafe { vld1q_f32(from) }
        }
        #[inline(always)]
        unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vaddq_f32(a, b) }
        }
    }

    /// fp32 in 128-bit registers.
    pub(crate) struct Neon;

    impl Engine for Neon {
        type Sums = float32x4_t;
        type Operand = float32x4_t;
        const WIDTH: usize = 4;
        const STEPS: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> float32x4_t {
            // SAFETY: every AArch64 CPU that Rust targets has NEON; so in every method.
            unsafe { vdupq_n_f32(0.0) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> float32x4_t {
            // SAFETY: the caller vouches for a slice.
            unsafe { vld1q_f32(from) }
        }
        #[inline(always)]
        unsafe fn store(sums: float32x4_t, to: *mut f32) {
            // SAFETY: as above.
            unsafe { vst1q_f32(to, sums) }
        }
        #[inline(always)]
        unsafe fn scale(scale: float32x4_t, sums: float32x4_t, acc: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vfmaq_f32(acc, scale, sums) }
        }
        #[inline(always)]
        unsafe fn operand(from: *const u8) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vld1q_f32(from.cast()) }
        }
        #[inline(always)]
        unsafe fn step(sums: float32x4_t, w: float32x4_t, x: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vfmaq_f32(sums, w, x) }
        }
    }
}
