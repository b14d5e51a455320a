//! What this machine can do at best: read bandwidth, the roof of decode, and multiply-add rates, the roof of prefill.
//!
//! `flint bench` measures both beside the model, in one process, so that its figures are shares of what the machine gave
//! in that minute. Nothing here is part of the network's arithmetic.
//!
//! Each figure is the best of several rounds, by wall clock from the first thread's start to the last one's end. The
//! chains are long enough to hide the latency of a fused multiply-add (4 cycles, 2 a cycle: 8 chains; 12 are used).

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::{Arithmetic, Level};

/// Rates of this machine with a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// Threads that worked.
    pub threads: usize,
    /// Bytes a second that the threads read from memory together.
    pub read_bytes_per_second: f64,
    /// fp32 operations a second by fused multiply-adds (two operations each).
    pub fma_per_second: f64,
    /// Operations a second by bf16 dot products with fp32 sums, where the CPU has them.
    pub dot_per_second: Option<f64>,
}

/// Memory that is read: far more than any cache of the machines in question holds.
const READ_BYTES: usize = 512 << 20;
/// Rounds of each measurement; the best counts.
const ROUNDS: usize = 7;
/// Independent chains of multiply-adds.
const CHAINS: usize = 12;
/// Multiply-adds of each chain and round: 13 ms on a core that does 117 GFLOP/s.
const STEPS: usize = 4_000_000;

/// Measures with `threads` threads (at least 1). Takes about a second and 512 MiB.
///
/// Returns `None` when that memory cannot be had.
pub fn measure(threads: usize) -> Option<MachineLimits> {
    let threads = threads.max(1);
    let mut memory: Vec<u64> = Vec::new();
    memory.try_reserve_exact(READ_BYTES / 8).ok()?;
    // Written once, or every page would be the same page of zeros.
    memory.resize(READ_BYTES / 8, 3);
    let part = memory.len() / threads;
    let read = best(threads, |thread| {
        black_box(sum(&memory[thread * part..(thread + 1) * part]));
    });
    drop(memory);
    let wide = Level::Avx512.is_available();
    let lanes = if wide || !Level::Avx2.is_available() { 16 } else { 8 };
    let fma = best(threads, |_| {
        black_box(multiply_add(wide));
    });
    let dot = Arithmetic::dot_is_available().then(|| {
        best(threads, |_| {
            black_box(dot_products());
        })
    });
    let chain_operations = (threads * CHAINS * STEPS) as f64 * 2.0;
    Some(MachineLimits {
        threads,
        read_bytes_per_second: (threads * part * 8) as f64 / read.as_secs_f64(),
        fma_per_second: chain_operations * lanes as f64 / fma.as_secs_f64(),
        // A lane of a dot product takes two pairs.
        dot_per_second: dot.map(|time| chain_operations * 32.0 / time.as_secs_f64()),
    })
}

/// The shortest time in which `threads` threads did `work` together.
fn best(threads: usize, work: impl Fn(usize) + Sync) -> Duration {
    let start = Barrier::new(threads);
    let run = |thread: usize| -> Vec<(Instant, Instant)> {
        (0..ROUNDS)
            .map(|_| {
                start.wait();
                let began = Instant::now();
                work(thread);
                (began, Instant::now())
            })
            .collect()
    };
    let spans: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let run = &run;
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        let mine = run(0);
        // A thread that panicked would have left the barrier waiting; it cannot be here.
        others.into_iter().filter_map(|other| other.join().ok()).chain(std::iter::once(mine)).collect()
    });
    let round = |index: usize| {
        let began = spans.iter().map(|span| span[index].0).min()?;
        let ended = spans.iter().map(|span| span[index].1).max()?;
        Some(ended.duration_since(began))
    };
    (0..ROUNDS).filter_map(round).min().unwrap_or(Duration::MAX)
}

/// Sums words, each 512 bytes as 8 independent lines in flight.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if Level::Avx512.is_available() {
            // SAFETY: the level's instructions were found on this CPU.
            return unsafe { x86::sum_avx512(words) };
        }
        if Level::Avx2.is_available() {
            // SAFETY: as above.
            return unsafe { x86::sum_avx2(words) };
        }
    }
    sum_lanes(words)
}

/// 64 sums side by side; the compiler makes vectors of them.
#[inline(always)]
fn sum_lanes(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 64];
    let (blocks, rest) = words.as_chunks::<64>();
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rest).fold(0, |total, word| total.wrapping_add(*word))
}

/// `STEPS` multiply-adds in each of `CHAINS` chains of vectors.
fn multiply_add(wide: bool) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        if wide {
            // SAFETY: the caller found AVX-512 on this CPU.
            return unsafe { x86::multiply_add_avx512() };
        }
        if Level::Avx2.is_available() {
            // SAFETY: AVX2 and FMA were found on this CPU.
            return unsafe { x86::multiply_add_avx2() };
        }
    }
    let _ = wide;
    multiply_add_lanes()
}

/// The portable chains: 16 lanes each.
fn multiply_add_lanes() -> f32 {
    let mut chains = [[1.0_f32; 16]; CHAINS];
    let (factor, term) = (black_box(1.000_1_f32), black_box(1e-7_f32));
    for _ in 0..STEPS {
        for chain in &mut chains {
            for lane in chain {
                *lane = lane.mul_add(factor, term);
            }
        }
    }
    chains.iter().flatten().sum()
}

/// `STEPS` dot-product steps in each chain; 0 where the CPU has none.
fn dot_products() -> f32 {
    #[cfg(target_arch = "x86_64")]
    if Arithmetic::dot_is_available() {
        // SAFETY: AVX-512 BF16 was found on this CPU.
        return unsafe { x86::dot_products() };
    }
    0.0
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256, __m512, __m512bh, __m512i, _mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps,
        _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_epi16, _mm512_set1_ps,
    };
    use std::hint::black_box;

    use super::{CHAINS, STEPS, sum_lanes};

    #[target_feature(enable = "avx512f")]
    pub(super) fn sum_avx512(words: &[u64]) -> u64 {
        sum_lanes(words)
    }

    #[target_feature(enable = "avx2")]
    pub(super) fn sum_avx2(words: &[u64]) -> u64 {
        sum_lanes(words)
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_add_avx512() -> f32 {
        let mut chains: [__m512; CHAINS] = std::array::from_fn(|chain| _mm512_set1_ps(chain as f32));
        let (factor, term) = (_mm512_set1_ps(black_box(1.000_1)), _mm512_set1_ps(black_box(1e-7)));
        for _ in 0..STEPS {
            for chain in &mut chains {
                *chain = _mm512_fmadd_ps(*chain, factor, term);
            }
        }
        chains.into_iter().map(|chain| _mm512_reduce_add_ps(chain)).sum()
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn multiply_add_avx2() -> f32 {
        let mut chains: [__m256; CHAINS] = std::array::from_fn(|chain| _mm256_set1_ps(chain as f32));
        let (factor, term) = (_mm256_set1_ps(black_box(1.000_1)), _mm256_set1_ps(black_box(1e-7)));
        for _ in 0..STEPS {
            for chain in &mut chains {
                *chain = _mm256_fmadd_ps(*chain, factor, term);
            }
        }
        chains.into_iter().map(|chain| _mm256_cvtss_f32(chain)).sum()
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn dot_products() -> f32 {
        let mut chains: [__m512; CHAINS] = std::array::from_fn(|chain| _mm512_set1_ps(chain as f32));
        // 1.0 and a number near 2^-22 as bf16.
        let (left, right) = (_mm512_set1_epi16(black_box(0x3f80)), _mm512_set1_epi16(black_box(0x3480)));
        // SAFETY: both types are 512 bits without invalid values.
        let as_bf16 = |bits: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) };
        let (left, right) = (as_bf16(left), as_bf16(right));
        for _ in 0..STEPS {
            for chain in &mut chains {
                *chain = _mm512_dpbf16_ps(*chain, left, right);
            }
        }
        chains.into_iter().map(|chain| _mm512_reduce_add_ps(chain)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vector_sums_equal_the_plain_sum() {
        let words: Vec<u64> = (0..1000_u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        let plain = words.iter().fold(0_u64, |total, word| total.wrapping_add(*word));
        assert_eq!(sum(&words), plain);
        assert_eq!(sum_lanes(&words), plain);
    }

    #[test]
    fn a_machine_has_rates_that_a_machine_can_have() {
        let limits = measure(1).unwrap();
        assert!(limits.read_bytes_per_second > 1e8 && limits.read_bytes_per_second < 1e13, "{limits:?}");
        assert!(limits.fma_per_second > 1e8 && limits.fma_per_second < 1e15, "{limits:?}");
        assert_eq!(limits.dot_per_second.is_some(), Arithmetic::dot_is_available());
    }
}
