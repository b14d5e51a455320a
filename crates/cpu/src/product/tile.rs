//! Register tiles: rows × outputs that share loads of decoded weights and inputs.
//!
//! Every (row, output) of a tile has its own 16 lanes and runs the tree of `layout.rs`; the tile's shape only decides
//! which of these independent sums share a load.

use super::engine::{Engine, Scalar};
use super::layout::{LANES, STEP_BYTES};

/// Rows of the largest tile of any engine.
pub(crate) const TILE_ROWS: usize = 6;

/// Operands of a tile over a run of blocks.
pub(crate) struct Tile {
    pub(crate) blocks: usize,
    /// Decoded weights of the first output: `[blocks, steps, 64 bytes]`.
    pub(crate) weights: *const u8,
    /// Bytes from one output's weights to the next.
    pub(crate) weight_stride: usize,
    /// Scales of the first output's lanes: `[blocks, 16]`.
    pub(crate) scales: *const f32,
    /// Elements from one output's scales to the next.
    pub(crate) scale_stride: usize,
    /// Inputs `[blocks, steps, rows, 64 bytes]`.
    pub(crate) inputs: *const u8,
    /// Sums: 16 lanes of row `m`, output `n` at element `m · row_stride + n · 16`.
    pub(crate) sums: *mut f32,
    /// Elements from one row's sums to the next.
    pub(crate) row_stride: usize,
}

/// Adds a tile's products to its sums.
///
/// # Safety
/// The CPU has the engine's instructions and the tile's pointers cover `M` rows and `N` outputs.
pub(crate) type TileKernel = unsafe fn(&Tile);

#[inline(always)]
unsafe fn multiply<E: Engine, const M: usize, const N: usize>(tile: &Tile) {
    for slice in 0..LANES / E::WIDTH {
        let byte = slice * E::WIDTH * STEP_BYTES / LANES;
        for block in 0..tile.blocks {
            // SAFETY: `block < blocks`, `step < STEPS`, `m < M`, `n < N` and `byte` is inside a step, so every pointer
            // stays in the ranges that the caller vouches for.
            unsafe {
                let mut sums = [[E::zero(); N]; M];
                let weights = tile.weights.add(block * E::STEPS * STEP_BYTES + byte);
                let inputs = tile.inputs.add(block * E::STEPS * M * STEP_BYTES + byte);
                for step in 0..E::STEPS {
                    let mut w = [E::operand(weights.add(step * STEP_BYTES)); N];
                    for n in 1..N {
                        w[n] = E::operand(weights.add(n * tile.weight_stride + step * STEP_BYTES));
                    }
                    for m in 0..M {
                        let x = E::operand(inputs.add((step * M + m) * STEP_BYTES));
                        for n in 0..N {
                            sums[m][n] = E::step(sums[m][n], w[n], x);
                        }
                    }
                }
                for n in 0..N {
                    let lanes = tile.scales.add(n * tile.scale_stride + block * LANES + slice * E::WIDTH);
                    let scale = E::load(lanes);
                    for m in 0..M {
                        let sum = tile.sums.add(m * tile.row_stride + n * LANES + slice * E::WIDTH);
                        E::store(E::scale(scale, sums[m][n], E::load(sum)), sum);
                    }
                }
            }
        }
    }
}

macro_rules! tiles {
    ($table:ident, $engine:ty, $kernel:ident $(, $feature:literal)?) => {
        $(#[target_feature(enable = $feature)])?
        unsafe fn $kernel<const M: usize, const N: usize>(tile: &Tile) {
            // SAFETY: the caller's promise is handed on.
            unsafe { multiply::<$engine, M, N>(tile) }
        }

        /// Kernels by rows - 1 and outputs - 1.
        pub(crate) static $table: [[TileKernel; 4]; TILE_ROWS] = tiles!(@rows $kernel 1 2 3 4 5 6);
    };
    (@rows $kernel:ident $($m:literal)*) => {
        [$([$kernel::<$m, 1>, $kernel::<$m, 2>, $kernel::<$m, 3>, $kernel::<$m, 4>]),*]
    };
}

tiles!(SCALAR, Scalar, scalar);
#[cfg(target_arch = "x86_64")]
tiles!(AVX2, super::engine::x86::Avx2, avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
tiles!(AVX512, super::engine::x86::Avx512, avx512, "avx512f,avx512bw,avx512dq,avx512vl");
#[cfg(target_arch = "x86_64")]
tiles!(DOT, super::engine::x86::Dot, dot, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16");
#[cfg(target_arch = "aarch64")]
tiles!(NEON, super::engine::arm::Neon, neon);
