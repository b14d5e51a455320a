//! Rows for the bf16 dot product, arranged in registers.
//!
//! A block is 256 numbers. They are rounded to eight registers of bf16; each register of the arranged block takes its
//! words from four pairs of these. Group sums are dot products with ones, so they are sums of the rounded numbers.

use std::arch::x86_64::*;

use super::engine::x86::dot;
use super::input::Shape;
use super::layout::{Arrangement, BLOCK, LANES, Layout, Order, STEP_BYTES, Unit};
use super::sums::fold_eight;

/// Where the 32 words of each step come from.
#[repr(C, align(64))]
struct Words {
    /// Word among the 64 of a pair of registers.
    index: [[u16; 32]; 8],
    /// Words that come from each pair.
    from: [[u32; 4]; 8],
}

const fn words(order: &Order) -> Words {
    let mut words = Words { index: [[0; 32]; 8], from: [[0; 4]; 8] };
    let mut position = 0;
    while position < BLOCK {
        let (step, word, input) = (position / 32, position % 32, order[position] as usize);
        words.index[step][word] = (input % 64) as u16;
        words.from[step][input / 64] |= 1 << word;
        position += 1;
    }
    words
}

/// `None` for numbers that stay where they are.
fn words_of(arrangement: Arrangement) -> Option<&'static Words> {
    const fn table(arrangement: Arrangement) -> Words {
        words(Layout { unit: Unit::Dot, arrangement }.order())
    }
    static BYTES: Words = table(Arrangement::Bytes);
    static RUNS_2: Words = table(Arrangement::Runs(2));
    static RUNS_4: Words = table(Arrangement::Runs(4));
    static RUNS_ODD: Words = table(Arrangement::Runs(3));
    match arrangement {
        Arrangement::Natural => None,
        Arrangement::Bytes => Some(&BYTES),
        Arrangement::Runs(2) => Some(&RUNS_2),
        Arrangement::Runs(4) => Some(&RUNS_4),
        Arrangement::Runs(_) => Some(&RUNS_ODD),
    }
}

/// As [`arrange_row`](super::input::arrange_row).
///
/// # Safety
/// As there, and the CPU has AVX-512 with BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn arrange_dot_row(shape: &Shape, row: usize, x: &[f32], to: *mut u8) {
    let tile = row / shape.tile_rows;
    let (rows, index) = (shape.rows_of(tile), row % shape.tile_rows);
    let words = words_of(shape.view.layout.arrangement);
    // SAFETY: the tile and its row, and the row's group sums, lie inside the set.
    unsafe {
        let start = to.add(shape.tile_start(tile) + index * STEP_BYTES);
        let mut sums = GroupSums::new(to.add(shape.sums_start(row)).cast(), shape.sums_per_row());
        let mut padded = [0.0f32; BLOCK];
        for block in 0..shape.blocks() {
            let from = &x[block * BLOCK..x.len().min((block + 1) * BLOCK)];
            let rounded = if from.len() == BLOCK {
                round(from.as_ptr())
            } else {
                padded[..from.len()].copy_from_slice(from);
                round(padded.as_ptr())
            };
            write(words, &rounded, start.add(block * 8 * rows * STEP_BYTES), rows * STEP_BYTES);
            if let Some(group) = shape.view.group {
                for group in rounded[..from.len() / 32].chunks_exact(group / 32) {
                    sums.push(group);
                }
            }
        }
        sums.finish();
    }
}

/// 256 numbers as bf16: nearest, ties to even; subnormals become zeros, as the dot product takes them.
#[inline(always)]
unsafe fn round(from: *const f32) -> [__m512i; 8] {
    // SAFETY: the caller vouches for 256 numbers.
    unsafe {
        let mut out = [_mm512_setzero_si512(); 8];
        for (i, out) in out.iter_mut().enumerate() {
            let (low, high) = (_mm512_loadu_ps(from.add(i * 32)), _mm512_loadu_ps(from.add(i * 32 + 16)));
            *out = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        }
        out
    }
}

/// Writes the eight steps of a block, `stride` bytes apart.
#[inline(always)]
unsafe fn write(words: Option<&Words>, block: &[__m512i; 8], to: *mut u8, stride: usize) {
    // SAFETY: the caller vouches for the steps' places.
    unsafe {
        let Some(words) = words else {
            for (step, numbers) in block.iter().enumerate() {
                _mm512_store_si512(to.add(step * stride).cast(), *numbers);
            }
            return;
        };
        for step in 0..8 {
            let index = _mm512_load_si512(words.index[step].as_ptr().cast());
            let mut numbers = _mm512_permutex2var_epi16(block[0], index, block[1]);
            for pair in 1..4 {
                let more = _mm512_permutex2var_epi16(block[2 * pair], index, block[2 * pair + 1]);
                numbers = _mm512_mask_mov_epi16(numbers, words.from[step][pair], more);
            }
            _mm512_store_si512(to.add(step * stride).cast(), numbers);
        }
    }
}

/// Collects the lanes of eight groups and folds them together.
struct GroupSums {
    lanes: [__m512; 8],
    pending: usize,
    to: *mut f32,
    left: usize,
}

impl GroupSums {
    #[inline(always)]
    unsafe fn new(to: *mut f32, count: usize) -> Self {
        // SAFETY: plain AVX-512.
        Self { lanes: unsafe { [_mm512_setzero_ps(); 8] }, pending: 0, to, left: count }
    }

    /// Adds a group: its numbers times one, from zero.
    #[inline(always)]
    unsafe fn push(&mut self, group: &[__m512i]) {
        // SAFETY: plain AVX-512 with BF16.
        unsafe {
            let ones = _mm512_set1_epi16(0x3F80);
            let mut sum = _mm512_setzero_ps();
            for numbers in group {
                sum = dot(sum, *numbers, ones);
            }
            self.lanes[self.pending] = sum;
            self.pending += 1;
            if self.pending == 8 {
                self.flush();
            }
        }
    }

    /// Folds what is pending and fills the last vector with zeros.
    #[inline(always)]
    unsafe fn finish(&mut self) {
        // SAFETY: `left` places remain.
        unsafe {
            while self.left > 0 {
                self.flush();
            }
        }
    }

    #[inline(always)]
    unsafe fn flush(&mut self) {
        debug_assert!(self.left >= 8 && LANES == 16);
        // SAFETY: whole vectors of 16 sums were allotted, so eight more fit.
        unsafe {
            for lane in self.pending..8 {
                self.lanes[lane] = _mm512_setzero_ps();
            }
            _mm256_storeu_ps(self.to, fold_eight(self.lanes.as_ptr().cast()));
            self.to = self.to.add(8);
        }
        (self.left, self.pending) = (self.left - 8, 0);
    }
}
