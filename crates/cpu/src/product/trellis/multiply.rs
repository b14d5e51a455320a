//! Rows times the decoded tiles of 128 inputs and 16 outputs.

use super::{LANES, TILE, TILES};
use crate::Level;
use crate::product::engine::{Quad, Scalar};

/// Rows that share the loads of weights at most.
pub(crate) const TILE_ROWS: usize = 6;

/// Adds the products of some rows, by their number less one.
///
/// `weights` `[32 steps, 16 outputs, 4 lanes]`; `inputs` `[32 steps, 4 lanes]` of the first row, `input_stride` numbers from
/// row to row; `totals` `[16 outputs, 4 lanes]` of the first row, 512 numbers from row to row.
///
/// # Safety
/// The pointers cover that, and the CPU has the level's instructions.
pub(super) type Multiply =
    unsafe fn(weights: *const f32, inputs: *const f32, input_stride: usize, totals: *mut f32);

/// Steps of a block of 128 inputs.
const STEPS: usize = TILES * TILE / LANES;
/// Numbers of a step: 16 outputs · 4 lanes.
const WIDTH: usize = TILE * LANES;
/// Numbers from one row's totals to the next.
const TOTAL_STRIDE: usize = super::BLOCK * LANES;

/// The kernels of a level.
pub(super) fn kernels(level: Level) -> &'static [Multiply; TILE_ROWS] {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => &AVX512,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => &AVX2,
        #[cfg(target_arch = "aarch64")]
        Level::Neon => &NEON,
        _ => &SCALAR,
    }
}

/// `M` rows, `G` slices of the step's lanes at a time: as many sums as registers hold.
#[inline(always)]
unsafe fn multiply<E: Quad, const M: usize, const G: usize>(
    weights: *const f32,
    inputs: *const f32,
    input_stride: usize,
    totals: *mut f32,
) {
    for first in (0..WIDTH).step_by(G * E::WIDTH) {
        // SAFETY: the caller vouches for weights, inputs and totals.
        unsafe {
            let mut sums = [[E::zero(); G]; M];
            for step in 0..STEPS {
                let mut w = [E::operand(weights.cast()); G];
                for (g, w) in w.iter_mut().enumerate() {
                    *w = E::operand(weights.add(step * WIDTH + first + g * E::WIDTH).cast());
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = E::quad(inputs.add(m * input_stride + step * LANES));
                    for (sum, w) in sums.iter_mut().zip(w) {
                        *sum = E::step(*sum, w, x);
                    }
                }
            }
            for (m, sums) in sums.into_iter().enumerate() {
                for (g, sum) in sums.into_iter().enumerate() {
                    let total = totals.add(m * TOTAL_STRIDE + first + g * E::WIDTH);
                    E::store(E::add(E::load(total), sum), total);
                }
            }
        }
    }
}

macro_rules! kernels {
    ($table:ident, $engine:ty, $slices:literal, $kernel:ident $(, $feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn $kernel<const M: usize>(
            weights: *const f32,
            inputs: *const f32,
            input_stride: usize,
            totals: *mut f32,
        ) {
            // SAFETY: the caller's promise is handed on.
            unsafe { multiply::<$engine, M, $slices>(weights, inputs, input_stride, totals) }
        }

        static $table: [Multiply; TILE_ROWS] =
            [$kernel::<1>, $kernel::<2>, $kernel::<3>, $kernel::<4>, $kernel::<5>, $kernel::<6>];
    };
}

kernels!(SCALAR, Scalar, 4, scalar);
#[cfg(target_arch = "x86_64")]
kernels!(AVX2, crate::product::engine::x86::Avx2, 2, avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
kernels!(AVX512, crate::product::engine::x86::Avx512, 4, avx512, "avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "aarch64")]
kernels!(NEON, crate::product::engine::arm::Neon, 4, neon);
