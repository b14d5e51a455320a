//! The recurrence of a delta-attention layer alone: rows of one sequence through its state.

use std::time::Instant;

use flint_backend::ops::{KdaPrepare, KdaScan, KdaSpan};
use flint_backend::{Backend, Element, Rows};

use crate::error::Result;

/// Measurements, of which the median counts.
const ROUNDS: usize = 11;

/// One layer's scan of so many rows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Scan {
    pub(super) rows: usize,
    pub(super) heads: usize,
    /// Key and value width of a head.
    pub(super) head_dim: usize,
    /// Seconds of the scan.
    pub(super) seconds: f64,
    /// Seconds of the norms and gates before it and the scan together.
    pub(super) prepared_seconds: f64,
}

impl Scan {
    /// Bytes that the scan must move: queries, keys, values, decay factors and gates in, outputs out, all fp32, and the
    /// state in and out.
    pub(super) fn bytes(&self) -> f64 {
        let channels = self.heads * self.head_dim;
        (4 * (self.rows * (5 * channels + self.heads) + 2 * channels * self.head_dim)) as f64
    }
}

/// Measures a scan on random rows, with heads of the model's size.
pub(super) fn measure<B: Backend>(
    backend: &mut B,
    (heads, head_dim): (usize, usize),
    rows: usize,
) -> Result<Scan> {
    let channels = heads * head_dim;
    let qkv = random(backend, rows, 3 * channels, 1)?;
    let decay = random(backend, rows, channels, 2)?;
    let beta = random(backend, rows, heads, 3)?;
    let out = random(backend, rows, channels, 4)?;
    let vector = |backend: &mut B, len| backend.allocate(Element::F32, len);
    let prepare = KdaPrepare {
        qkv: qkv.clone(),
        decay: decay.clone(),
        beta: beta.clone(),
        dt_bias: vector(backend, channels)?,
        a_log: vector(backend, heads)?,
        head_dim,
        lower_bound: Some(-5.0),
    };
    let span = KdaSpan {
        first_row: 0,
        logged: 0,
        sure: rows,
        drafts: 0,
        window: vector(backend, 3 * 3 * channels)?,
        state: vector(backend, channels * head_dim)?,
        log: vector(backend, 1)?,
    };
    let scan = KdaScan { out, qkv, decay, beta, head_dim, spans: vec![span] };
    let prepared_seconds = median(backend, |backend| {
        backend.kda_prepare(&prepare)?;
        backend.kda_scan(&scan)
    })?;
    let seconds = median(backend, |backend| backend.kda_scan(&scan))?;
    Ok(Scan { rows, heads, head_dim, seconds, prepared_seconds })
}

/// The median time of `work`, once it has warmed up.
fn median<B: Backend>(
    backend: &mut B,
    mut work: impl FnMut(&mut B) -> flint_backend::Result<()>,
) -> Result<f64> {
    work(backend)?;
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        backend.synchronize()?;
        let began = Instant::now();
        work(backend)?;
        backend.synchronize()?;
        times.push(began.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

/// Rows of numbers between -1 and 1.
fn random<B: Backend>(backend: &mut B, rows: usize, width: usize, seed: u64) -> Result<Rows<B::Buffer>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let buffer = backend.allocate(Element::F32, rows * width)?;
    let values: Vec<f32> = (0..rows * width).map(|_| next()).collect();
    backend.write_f32(&buffer, 0, &values)?;
    Ok(Rows::dense(&buffer, rows, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scan_runs_on_rows_that_stay_finite() {
        let mut cpu = flint_cpu::Cpu::new(flint_cpu::Options::detect(1)).unwrap();
        let scan = measure(&mut cpu, (2, 16), 20).unwrap();
        assert_eq!((scan.rows, scan.heads, scan.head_dim), (20, 2, 16));
        assert!(scan.seconds > 0.0 && scan.prepared_seconds > 0.0);
        assert!((scan.bytes() - f64::from(4 * (20 * 162 + 2 * 32 * 16))).abs() < 1e-9);
    }
}
