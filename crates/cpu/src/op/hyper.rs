//! Hyper-connections: several residual streams, mixed by coefficients that each row computes for itself.
//!
//! The root mean square is applied after the product with the matrix, which saves a pass and is the same up to
//! rounding. `reference/glm5_next.md` section 4.

use flint_backend::ops::{HcPost, HcPre, Linear, Rows};
use flint_backend::{Element, Result};

use super::{require, spread, sum_of_squares};
use crate::buffer::RowsF32;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::maths::{exp, sigmoid};
use crate::{Cpu, CpuBuffer, CpuMatrix, product};

/// Streams that the kernels have room for.
const MAX_STREAMS: usize = 8;

pub(crate) fn hc_pre(cpu: &mut Cpu, op: &HcPre<CpuBuffer, CpuMatrix>) -> Result<()> {
    const NAME: &str = "hc_pre";
    let (collapsed, streams) = (RowsF32::new(NAME, &op.collapsed)?, RowsF32::new(NAME, &op.streams)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let count = check(NAME, streams, collapsed, mix)?;
    let wide = 2 * count + count * count;
    // SAFETY: no operation writes weights.
    let (base, scale) = unsafe { (op.base.f32s(NAME, wide)?, op.scale.f32s(NAME, 3)?) };
    let product = Rows::dense(&CpuBuffer::zeros(Element::F32, streams.rows * wide)?, streams.rows, wide);
    product::linear(
        cpu,
        &Linear { out: product.clone(), x: op.streams.clone(), matrix: op.function.clone() },
    )?;
    let products = RowsF32::new(NAME, &product)?;
    let level = cpu.options.level;
    spread(cpu, streams.rows, 3 * streams.width, &|rows| {
        for row in rows {
            // SAFETY: the rows exist and tasks write different rows.
            let pre = unsafe {
                Pre {
                    collapsed: collapsed.at(row),
                    mix: mix.row_mut(row),
                    streams: streams.at(row),
                    product: products.row_mut(row),
                    base,
                    scale,
                    hidden: collapsed.width,
                    count,
                    norm_epsilon: op.norm_epsilon,
                    epsilon: op.hc_epsilon,
                    rounds: op.rounds,
                }
            };
            level.run(pre);
        }
    });
    Ok(())
}

pub(crate) fn hc_post(cpu: &mut Cpu, op: &HcPost<CpuBuffer>) -> Result<()> {
    const NAME: &str = "hc_post";
    let (streams, y) = (RowsF32::new(NAME, &op.streams)?, RowsF32::new(NAME, &op.y)?);
    let mix = RowsF32::new(NAME, &op.mix)?;
    let count = check(NAME, streams, y, mix)?;
    let level = cpu.options.level;
    spread(cpu, y.rows, 2 * streams.width, &|rows| {
        for row in rows {
            // SAFETY: the rows exist and tasks write different rows.
            let (streams, y_row, mix) = unsafe { (streams.at(row), y.at(row), mix.row(row)) };
            let post = Post { streams, y: y_row, mix, hidden: y.width, count };
            level.run(post);
        }
    });
    Ok(())
}

/// Checks the shapes and returns the number of streams.
fn check(op: &'static str, streams: RowsF32, x: RowsF32, mix: RowsF32) -> Result<usize> {
    require(op, x.width > 0 && streams.width.is_multiple_of(x.width), || {
        format!("streams of width {} for rows of width {}", streams.width, x.width)
    })?;
    let count = streams.width / x.width;
    require(op, (1..=MAX_STREAMS).contains(&count), || {
        format!("{count} streams, 1 to {MAX_STREAMS} can be mixed")
    })?;
    require(op, mix.width == count + count * count, || {
        format!("a mix of width {} for {count} streams", mix.width)
    })?;
    require(op, streams.rows == x.rows && mix.rows == x.rows, || {
        format!("{}, {} and {} rows", streams.rows, x.rows, mix.rows)
    })?;
    Ok(count)
}

/// One row before a block.
struct Pre<'a> {
    collapsed: *mut f32,
    mix: &'a mut [f32],
    streams: *const f32,
    /// `function · streams`; normalised and activated in place.
    product: &'a mut [f32],
    base: &'a [f32],
    scale: &'a [f32],
    hidden: usize,
    count: usize,
    norm_epsilon: f32,
    epsilon: f32,
    rounds: usize,
}

impl Kernel for Pre<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (n, width) = (self.count, self.count * self.hidden);
        // SAFETY: `streams` has `width` values.
        let mean = unsafe { sum_of_squares::<L>(self.streams, width) } / width as f32;
        let factor = 1.0 / (mean + self.norm_epsilon).sqrt();
        for (i, value) in self.product.iter_mut().enumerate() {
            let part = (i / n).min(2);
            *value = (*value * factor).mul_add(self.scale[part], self.base[i]);
        }
        let (gates, comb) = self.product.split_at_mut(2 * n);
        in_place::<L>(gates, sigmoid);
        softmax_rows::<L>(comb, n, self.epsilon);
        balance(comb, n, self.rounds, self.epsilon);
        let (post, mixed) = self.mix.split_at_mut(n);
        for (out, gate) in post.iter_mut().zip(&gates[n..]) {
            *out = 2.0 * gate;
        }
        mixed.copy_from_slice(comb);
        let mut pre = [0.0; MAX_STREAMS];
        for (out, gate) in pre.iter_mut().zip(&gates[..n]) {
            *out = gate + self.epsilon;
        }
        // SAFETY: `collapsed` has `hidden` values, `streams` `n` times as many.
        unsafe {
            if n == 4 {
                collapse::<L, 4>(self.collapsed, self.streams, self.hidden, &pre[..n]);
            } else {
                collapse::<L, MAX_STREAMS>(self.collapsed, self.streams, self.hidden, &pre[..n]);
            }
        }
    }
}

/// `Σ_s pre[s] · S[s]`, ascending; `N` bounds the number of streams, so that factors stay in registers.
///
/// # Safety
/// `out` has `hidden` values, `streams` as many for each factor.
#[inline(always)]
unsafe fn collapse<L: Lanes, const N: usize>(out: *mut f32, streams: *const f32, hidden: usize, pre: &[f32]) {
    let mut factors = [L::zero(); N];
    for (factor, value) in factors.iter_mut().zip(pre) {
        *factor = L::splat(*value);
    }
    let n = if N == 4 { 4 } else { pre.len() };
    for at in (0..hidden).step_by(LANES) {
        let left = hidden - at;
        let mut total = L::zero();
        for (stream, factor) in factors[..n].iter().enumerate() {
            // SAFETY: as the caller vouches.
            total = factor.fma(unsafe { L::read_some(streams.add(stream * hidden + at), left) }, total);
        }
        // SAFETY: as the caller vouches.
        unsafe { total.write_some(out.add(at), left) };
    }
}

/// Applies `f` to every value.
#[inline(always)]
fn in_place<L: Lanes>(values: &mut [f32], f: impl Fn(L) -> L) {
    for at in (0..values.len()).step_by(LANES) {
        let left = values.len() - at;
        let start = values.as_mut_ptr();
        // SAFETY: no more than what is left is read and written.
        unsafe { f(L::read_some(start.add(at), left)).write_some(start.add(at), left) };
    }
}

/// Softmax over each row of an `n × n` matrix, plus `epsilon`.
#[inline(always)]
fn softmax_rows<L: Lanes>(matrix: &mut [f32], n: usize, epsilon: f32) {
    for row in matrix.chunks_exact_mut(n) {
        let highest = row.iter().fold(f32::NEG_INFINITY, |a, &b| if a > b { a } else { b });
        for value in row {
            *value -= highest;
        }
    }
    in_place::<L>(matrix, exp);
    for row in matrix.chunks_exact_mut(n) {
        let total: f32 = row.iter().fold(0.0, |a, &b| a + b);
        for value in row {
            *value = *value / total + epsilon;
        }
    }
}

/// The Sinkhorn normalisation: columns, then `rounds - 1` times rows and columns. Sums ascend.
#[inline(always)]
fn balance(matrix: &mut [f32], n: usize, rounds: usize, epsilon: f32) {
    // The release has four streams: a fixed size lets the compiler keep the matrix in registers.
    if n == 4 {
        balance_fixed::<4>(matrix, rounds, epsilon);
        return;
    }
    balance_columns(matrix, n, epsilon);
    for _ in 1..rounds {
        for row in matrix.chunks_exact_mut(n) {
            let divisor = row.iter().fold(0.0, |a, &b| a + b) + epsilon;
            for value in row {
                *value /= divisor;
            }
        }
        balance_columns(matrix, n, epsilon);
    }
}

#[inline(always)]
fn balance_columns(matrix: &mut [f32], n: usize, epsilon: f32) {
    let mut divisors = [0.0; MAX_STREAMS];
    for row in matrix.chunks_exact(n) {
        divisors.iter_mut().zip(row).for_each(|(divisor, value)| *divisor += value);
    }
    for divisor in &mut divisors {
        *divisor += epsilon;
    }
    for row in matrix.chunks_exact_mut(n) {
        row.iter_mut().zip(&divisors).for_each(|(value, divisor)| *value /= divisor);
    }
}

/// [`balance`] for a fixed size: the same sums and divisions in the same order.
#[inline(always)]
fn balance_fixed<const N: usize>(matrix: &mut [f32], rounds: usize, epsilon: f32) {
    let mut c = [[0.0f32; N]; N];
    for (row, values) in c.iter_mut().zip(matrix.chunks_exact(N)) {
        row.copy_from_slice(values);
    }
    for round in 0..rounds.max(1) {
        if round > 0 {
            for row in &mut c {
                let divisor = row.iter().fold(0.0, |a, &b| a + b) + epsilon;
                *row = row.map(|value| value / divisor);
            }
        }
        let mut divisors = [0.0f32; N];
        for row in &c {
            divisors = std::array::from_fn(|j| divisors[j] + row[j]);
        }
        let divisors = divisors.map(|divisor| divisor + epsilon);
        for row in &mut c {
            *row = std::array::from_fn(|j| row[j] / divisors[j]);
        }
    }
    for (row, values) in c.iter().zip(matrix.chunks_exact_mut(N)) {
        values.copy_from_slice(row);
    }
}

/// One row after a block.
struct Post<'a> {
    streams: *mut f32,
    y: *const f32,
    mix: &'a [f32],
    hidden: usize,
    count: usize,
}

impl Kernel for Post<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        if self.count == 4 {
            self.mix_streams::<L, 4>();
        } else {
            self.mix_streams::<L, MAX_STREAMS>();
        }
    }
}

impl Post<'_> {
    /// `N` bounds the number of streams, so that they stay in registers.
    #[inline(always)]
    fn mix_streams<L: Lanes, const N: usize>(self) {
        let n = if N == 4 { 4 } else { self.count };
        let (post, comb) = self.mix.split_at(n);
        for at in (0..self.hidden).step_by(LANES) {
            let left = self.hidden - at;
            // SAFETY: `y` has `hidden` values, `streams` `n` times as many; a chunk is read whole before it is written.
            unsafe {
                let y = L::read_some(self.y.add(at), left);
                let mut before = [L::zero(); N];
                for (stream, values) in before[..n].iter_mut().enumerate() {
                    *values = L::read_some(self.streams.add(stream * self.hidden + at), left);
                }
                for j in 0..n {
                    let mut total = L::splat(post[j]).mul(y);
                    for (i, values) in before[..n].iter().enumerate() {
                        total = L::splat(comb[i * n + j]).fma(*values, total);
                    }
                    total.write_some(self.streams.add(j * self.hidden + at), left);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_streams_balance_as_any_number_does() {
        let start: [f32; 16] = std::array::from_fn(|i| 0.01 + (i * 7 % 16) as f32 / 5.0);
        let mut fixed = start;
        balance(&mut fixed, 4, 20, 1e-6);
        let mut general = start;
        balance_columns(&mut general, 4, 1e-6);
        for _ in 1..20 {
            for row in general.chunks_exact_mut(4) {
                let divisor = row.iter().fold(0.0, |a, &b| a + b) + 1e-6;
                for value in row {
                    *value /= divisor;
                }
            }
            balance_columns(&mut general, 4, 1e-6);
        }
        assert_eq!(fixed.map(f32::to_bits), general.map(f32::to_bits));
    }
}
