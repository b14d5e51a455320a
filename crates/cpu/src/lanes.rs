//! Sixteen virtual fp32 lanes, and the same arithmetic in every instruction set.
//!
//! A kernel is written once over [`Lanes`] and compiled for each [`Level`] by [`Level::run`]. Every operation here is
//! exactly rounded (or moves data only), and [`Lanes::sum`] folds in one fixed order, so a kernel gives the same bits
//! at every level. The bits of a NaN are the exception: instruction sets make different ones.
//!
//! The types are only named by [`Level::run`], which runs them inside a function that has their instructions.

use crate::Level;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Asks for the cache line at `address` to be brought near; any address will do.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing as far as the program can tell, and every x86-64 CPU has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Code that runs with the instructions of a level.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// The code. Must be `#[inline(always)]`, and so must every function over [`Lanes`] that it calls: only then is it
    /// compiled with the level's instructions.
    fn run<L: Lanes>(self) -> Self::Output;
}

impl Level {
    /// Runs a kernel with this level's instructions. The level must be available, which `Cpu::new` checks.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        debug_assert!(self.is_available());
        match self {
            // SAFETY: the CPU has the instructions: `Cpu::new` refuses a level that is not available.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86::run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86::run_avx512(kernel) },
            #[cfg(target_arch = "aarch64")]
            Self::Neon => kernel.run::<neon::Neon>(),
            _ => kernel.run::<Scalar>(),
        }
    }
}

/// Sixteen fp32 values.
///
/// Comparisons with NaN are false; `min` and `max` say which operand they return then.
pub(crate) trait Lanes: Copy {
    /// Whether thirty-two vectors fit in registers; kernels choose tile sizes by it, never sums.
    const MANY_REGISTERS: bool;

    /// `value` in every lane.
    fn splat(value: f32) -> Self;

    /// Sixteen values from memory.
    ///
    /// # Safety
    /// `from` is valid for reading sixteen values.
    unsafe fn read(from: *const f32) -> Self;

    /// Sixteen bf16 values from memory, exactly.
    ///
    /// # Safety
    /// `from` is valid for reading sixteen values.
    unsafe fn read_bf16(from: *const u16) -> Self;

    /// Sixteen values to memory.
    ///
    /// # Safety
    /// `to` is valid for writing sixteen values.
    unsafe fn write(self, to: *mut f32);

    /// `self + other`.
    fn add(self, other: Self) -> Self;
    /// `self - other`.
    fn sub(self, other: Self) -> Self;
    /// `self · other`.
    fn mul(self, other: Self) -> Self;
    /// `self / other`.
    fn div(self, other: Self) -> Self;
    /// `self · factor + term`, rounded once.
    fn fma(self, factor: Self, term: Self) -> Self;
    /// `self` where `self < other`, else `other` (also for NaN in either).
    fn min(self, other: Self) -> Self;
    /// `self` where `self > other`, else `other` (also for NaN in either).
    fn max(self, other: Self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;
    /// `then` where `self < other`, else `otherwise`.
    fn where_less(self, other: Self, then: Self, otherwise: Self) -> Self;
    /// `self · 2^exponent`, rounded once, for `self` in 0.25..4 and an integral `exponent` in -240..=240.
    fn scale(self, exponent: Self) -> Self;

    /// Folds the lanes by addition: lane `i` with `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    fn sum(self) -> f32;
    /// Folds the lanes by [`max`](Self::max) in the order of [`sum`](Self::sum).
    fn maximum(self) -> f32;

    /// Sixteen groups of four values from memory: vector `j` has value `j` of each group.
    ///
    /// # Safety
    /// `from` is valid for reading sixty-four values.
    #[inline(always)]
    unsafe fn read_groups_of_four(from: *const f32) -> [Self; 4] {
        let mut columns = [[0.0f32; LANES]; 4];
        for lane in 0..LANES {
            for (j, column) in columns.iter_mut().enumerate() {
                // SAFETY: at most value 63, which the caller vouches for.
                column[lane] = unsafe { *from.add(lane * 4 + j) };
            }
        }
        columns.map(|column| Self::load(&column))
    }

    /// Transposes a 16 × 16 block.
    #[inline(always)]
    fn transpose(rows: &mut [Self; LANES]) {
        let mut from = [[0.0f32; LANES]; LANES];
        for (row, values) in rows.iter().zip(&mut from) {
            row.store(values);
        }
        for (i, row) in rows.iter_mut().enumerate() {
            let mut column = [0.0f32; LANES];
            for (value, source) in column.iter_mut().zip(&from) {
                *value = source[i];
            }
            *row = Self::load(&column);
        }
    }

    /// Sixteen zeros.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    /// The values of an array.
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: the array has sixteen values.
        unsafe { Self::read(from.as_ptr()) }
    }

    /// The values, to an array.
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: the array has sixteen values.
        unsafe { self.write(to.as_mut_ptr()) }
    }

    /// The first `count` values from memory (sixteen when there are more), zeros after them.
    ///
    /// # Safety
    /// `from` is valid for reading `min(count, 16)` values.
    #[inline(always)]
    unsafe fn read_some(from: *const f32, count: usize) -> Self {
        if count >= LANES {
            // SAFETY: the caller vouches for sixteen values.
            return unsafe { Self::read(from) };
        }
        let mut values = [0.0; LANES];
        // SAFETY: the caller vouches for `count` values, fewer than the array holds.
        unsafe { std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count) };
        Self::load(&values)
    }

    /// As [`read_some`](Self::read_some) from bf16 values.
    ///
    /// # Safety
    /// `from` is valid for reading `min(count, 16)` values.
    #[inline(always)]
    unsafe fn read_some_bf16(from: *const u16, count: usize) -> Self {
        if count >= LANES {
            // SAFETY: the caller vouches for sixteen values.
            return unsafe { Self::read_bf16(from) };
        }
        let mut values = [0; LANES];
        // SAFETY: the caller vouches for `count` values, and the array has sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
            Self::read_bf16(values.as_ptr())
        }
    }

    /// The first `count` lanes to memory (sixteen when `count` is more).
    ///
    /// # Safety
    /// `to` is valid for writing `min(count, 16)` values.
    #[inline(always)]
    unsafe fn write_some(self, to: *mut f32, count: usize) {
        if count >= LANES {
            // SAFETY: the caller vouches for sixteen values.
            unsafe { self.write(to) };
            return;
        }
        let mut values = [0.0; LANES];
        self.store(&mut values);
        // SAFETY: the caller vouches for `count` values, fewer than the array holds.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, count) };
    }
}

/// The lanes in portable Rust: the definition.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }

    #[inline(always)]
    fn fold(self, f: impl Fn(f32, f32) -> f32) -> f32 {
        let mut lanes = self.0;
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = f(lanes[i], lanes[i + half]);
            }
        }
        lanes[0]
    }
}

impl Lanes for Scalar {
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn read(from: *const f32) -> Self {
        // SAFETY: the caller vouches for sixteen values.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn read_bf16(from: *const u16) -> Self {
        // SAFETY: the caller vouches for sixteen values.
        let values = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(values.map(|value| f32::from_bits(u32::from(value) << 16)))
    }

    #[inline(always)]
    unsafe fn write(self, to: *mut f32) {
        // SAFETY: the caller vouches for sixteen values.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], term.0[i])))
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }

    #[inline(always)]
    fn where_less(self, other: Self, then: Self, otherwise: Self) -> Self {
        Self(std::array::from_fn(|i| if self.0[i] < other.0[i] { then.0[i] } else { otherwise.0[i] }))
    }

    #[inline(always)]
    fn scale(self, exponent: Self) -> Self {
        self.zip(exponent, |value, exponent| {
            let exponent = (exponent as i32).clamp(-252, 252);
            let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
            // The first factor keeps a normal value normal, so only the second product rounds.
            value * power(exponent >> 1) * power(exponent - (exponent >> 1))
        })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        self.fold(|a, b| a + b)
    }

    #[inline(always)]
    fn maximum(self) -> f32 {
        self.fold(|a, b| if a > b { a } else { b })
    }
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "moved data is compared exactly")]
mod tests {
    use super::*;

    /// Every operation on two vectors, the values it must not mix up included.
    struct Everything<'a>(&'a [[f32; LANES]; 3]);

    impl Kernel for Everything<'_> {
        type Output = Vec<u32>;

        #[inline(always)]
        fn run<L: Lanes>(self) -> Vec<u32> {
            let [a, b, c] = self.0.map(|values| L::load(&values));
            let near_one = a.where_less(b, L::splat(0.75), L::splat(-1.5));
            let vectors = [
                a.add(b),
                a.sub(b),
                a.mul(b),
                a.div(b),
                a.fma(b, c),
                a.abs(),
                a.min(b),
                a.max(b),
                a.where_less(b, b, c),
                near_one.scale(L::splat(-130.0)),
                near_one.scale(L::splat(100.0)),
                near_one.scale(L::splat(-149.0)),
            ];
            let mut out: Vec<u32> = Vec::new();
            for vector in vectors {
                let mut values = [0.0; LANES];
                vector.store(&mut values);
                out.extend(values.map(f32::to_bits));
                out.push(vector.sum().to_bits());
                out.push(vector.maximum().to_bits());
            }
            let bits: [u16; LANES] = std::array::from_fn(|i| (self.0[0][i].to_bits() >> 16) as u16);
            let mut some = [0.0; LANES];
            // SAFETY: both arrays have sixteen values.
            unsafe {
                L::read_some_bf16(bits.as_ptr(), 11).store(&mut some);
                L::read_some(self.0[1].as_ptr(), 5).write_some(some.as_mut_ptr(), 7);
            }
            out.extend(some.map(f32::to_bits));
            out
        }
    }

    struct Moves<'a>(&'a [f32; 256]);

    impl Kernel for Moves<'_> {
        type Output = ([[f32; LANES]; 4], [[f32; LANES]; LANES]);

        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let (rows, _) = self.0.as_chunks::<LANES>();
            let mut block: [L; LANES] = std::array::from_fn(|i| L::load(&rows[i]));
            L::transpose(&mut block);
            // SAFETY: the array has 256 values.
            let groups = unsafe { L::read_groups_of_four(self.0.as_ptr()) };
            let store = |vector: L| {
                let mut out = [0.0; LANES];
                vector.store(&mut out);
                out
            };
            (groups.map(store), block.map(store))
        }
    }

    fn levels() -> impl Iterator<Item = Level> {
        [Level::Avx2, Level::Avx512, Level::Neon].into_iter().filter(|level| level.is_available())
    }

    #[test]
    fn every_operation_has_the_same_bits_at_every_level() {
        let special =
            [0.0, -0.0, 1.0, -1.5, 1e-40, -1e-38, 3.0e38, f32::MIN_POSITIVE, 0.1, 1e20, 7.25, -3e-5];
        let mut state = 1u64;
        for round in 0..2000 {
            let mut draw = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let pick = (state >> 40) as usize;
                if round % 2 == 0 { special[pick % special.len()] } else { (state >> 33) as f32 / 1e9 - 1.0 }
            };
            let operands: [[f32; LANES]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| draw()));
            let scalar = Level::Scalar.run(Everything(&operands));
            for level in levels() {
                let found = level.run(Everything(&operands));
                let nan = |bits: u32| f32::from_bits(bits).is_nan();
                for (i, (a, b)) in scalar.iter().zip(&found).enumerate() {
                    assert!(
                        a == b || (nan(*a) && nan(*b)),
                        "{level:?}, value {i}: {a:x} {b:x} from {operands:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn data_moves_the_same_way_at_every_level() {
        let values: [f32; 256] = std::array::from_fn(|i| i as f32);
        let (groups, block) = Level::Scalar.run(Moves(&values));
        assert_eq!(groups[1][2], 9.0);
        assert_eq!(block[1][2], 33.0);
        for level in levels() {
            assert_eq!(level.run(Moves(&values)), (groups, block), "{level:?}");
        }
    }
}
