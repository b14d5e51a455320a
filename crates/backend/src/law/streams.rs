//! Laws of the operations over residual streams.

use flint_weights::{PlainType, QuantMatrix};

use super::Session;
use super::encoding::{Encoding, Weights};
use super::exact::{Exact, FUNCTION, TINY, U, depth, rms_factor, sigmoid};
use super::rows::{
    FEW_ROWS, Port, ROWS, RowCase, RowWords, Temper, Vector, check_rows, reals, upload_f32, words,
};
use super::seed::Seed;
use crate::ops::{GatherRows, HcPost, HcPre, MeanStreams, SpreadStreams};
use crate::{Backend, Precision, Result, Rows};

struct GatherCase<B: Backend> {
    x: Rows<B::Buffer>,
    values: Vec<f32>,
}

impl<B: Backend> RowCase<B> for GatherCase<B> {
    fn label(&self) -> String {
        format!("{} × {}", self.x.rows, self.x.width)
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(1).words(), Port::output(self.x.width)]
    }

    fn row(&self, seed: &mut Seed, _temper: Temper) -> RowWords {
        vec![vec![seed.below(self.x.rows) as u32]]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [index, out] = ports else { return Ok(()) };
        backend.gather_rows(&GatherRows { out: out.clone(), x: self.x.clone(), index: index.buffer.clone() })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let width = self.x.width;
        let at = (row[0][0] as usize + usize::from(mutated)) % self.x.rows * width;
        vec![self.values[at..at + width].iter().map(|&value| Exact::value(value)).collect()]
    }
}

/// Laws of `gather_rows`.
pub(crate) fn gather_rows<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for width in [16, 37, 1024] {
        let values = Seed::new(21).normals(40 * width, 1.0);
        let x = Rows::dense(&upload_f32(backend, &values)?, 40, width);
        check_rows(backend, session, &GatherCase::<B> { x, values }, ROWS)?;
    }
    Ok(())
}

struct SpreadCase {
    hidden: usize,
    streams: usize,
}

impl<B: Backend> RowCase<B> for SpreadCase {
    fn label(&self) -> String {
        format!("{} streams of {}", self.streams, self.hidden)
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.hidden), Port::output(self.streams * self.hidden)]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [x, streams] = ports else { return Ok(()) };
        backend.spread_streams(&SpreadStreams { streams: streams.clone(), x: x.clone() })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let shift = usize::from(mutated);
        let value = |at: usize| Exact::Bits(row[0][(at + shift) % self.hidden]);
        vec![(0..self.streams * self.hidden).map(value).collect()]
    }
}

/// Laws of `spread_streams`.
pub(crate) fn spread_streams<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    check_rows(backend, session, &SpreadCase { hidden: 24, streams: 4 }, ROWS)?;
    check_rows(backend, session, &SpreadCase { hidden: 512, streams: 2 }, FEW_ROWS)
}

struct MeanCase {
    hidden: usize,
    streams: usize,
}

impl<B: Backend> RowCase<B> for MeanCase {
    fn label(&self) -> String {
        format!("{} streams of {}", self.streams, self.hidden)
    }

    fn ports(&self) -> Vec<Port> {
        vec![Port::input(self.streams * self.hidden), Port::output(self.hidden)]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [streams, out] = ports else { return Ok(()) };
        backend.mean_streams(&MeanStreams { out: out.clone(), streams: streams.clone() })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let x = reals(&row[0]);
        let value = |at: usize| {
            let members = || (0..self.streams).map(|stream| x[stream * self.hidden + at]);
            let count = self.streams as f64;
            let first = if mutated { 0.01 * x[at] } else { 0.0 };
            let magnitude: f64 = members().map(f64::abs).sum();
            let slack = (count + 1.0) * U * magnitude / count;
            Exact::Near { value: (members().sum::<f64>() + first) / count, slack }
        };
        vec![(0..self.hidden).map(value).collect()]
    }
}

/// Laws of `mean_streams`.
pub(crate) fn mean_streams<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    check_rows(backend, session, &MeanCase { hidden: 24, streams: 4 }, ROWS)?;
    check_rows(backend, session, &MeanCase { hidden: 131, streams: 3 }, ROWS)?;
    check_rows(backend, session, &MeanCase { hidden: 4096, streams: 4 }, FEW_ROWS)
}

const NORM_EPSILON: f32 = 1e-5;
const HC_EPSILON: f32 = 1e-6;

struct PreCase<B: Backend> {
    hidden: usize,
    n: usize,
    rounds: usize,
    function: B::Matrix,
    weights: Weights,
    base: Vector<B>,
    scale: Vector<B>,
}

impl<B: Backend> PreCase<B> {
    fn new(backend: &mut B, hidden: usize, n: usize, rounds: usize) -> Result<Self> {
        let mut seed = Seed::new(24);
        let wide = 2 * n + n * n;
        // The release stores the function in bf16; of order 1 / width, so that the coefficients are not saturated.
        let matrix: QuantMatrix =
            Encoding::Plain(PlainType::Bf16).matrix("test.function", wide, n * hidden, &mut seed);
        let parts = [matrix];
        let base = seed.normals(wide, 0.5);
        let width = ((n * hidden) as f32).sqrt();
        let scale = seed.uniform(3, 0.2 / width, 0.6 / width);
        Ok(Self {
            hidden,
            n,
            rounds,
            function: backend.upload(&parts, Precision::Full)?,
            weights: Weights::new(&parts),
            base: Vector::new(backend, base)?,
            scale: Vector::new(backend, scale)?,
        })
    }

    /// The scaled products `m · scale + base` and the error of each.
    fn coefficients(&self, streams: &[f64], mutated: bool) -> Vec<(f64, f64)> {
        let (factor, factor_error) = rms_factor(streams, f64::from(NORM_EPSILON));
        let coefficient = |i: usize| {
            let (mut value, mut magnitude) = (0.0, 0.0);
            for (col, x) in streams.iter().enumerate() {
                value += self.weights.value(i, col, false) * x * factor;
                magnitude += (self.weights.value(i, col, false) * x * factor).abs();
            }
            let scale = self.scale.value((i / self.n).min(2)) * if mutated { 1.01 } else { 1.0 };
            let error = magnitude * (depth(streams.len()) + 4.0) * U + value.abs() * factor_error;
            let out = value * scale + self.base.value(i);
            (out, error * scale.abs() + (out.abs() + self.base.value(i).abs()) * 2.0 * U)
        };
        (0..self.weights.rows()).map(coefficient).collect()
    }

    /// The balanced matrix, and the relative error of its entries.
    fn balanced(&self, coefficients: &[(f64, f64)]) -> (Vec<f64>, f64) {
        let n = self.n;
        let epsilon = f64::from(HC_EPSILON);
        let mut c = vec![0.0; n * n];
        for (row, from) in c.chunks_mut(n).zip(coefficients.chunks(n)) {
            let total: f64 = from.iter().map(|(value, _)| value.exp()).sum();
            row.iter_mut().zip(from).for_each(|(out, (value, _))| *out = value.exp() / total + epsilon);
        }
        for round in 0..self.rounds {
            if round > 0 {
                for row in c.chunks_mut(n) {
                    let divisor = row.iter().sum::<f64>() + epsilon;
                    for value in row {
                        *value /= divisor;
                    }
                }
            }
            for j in 0..n {
                let divisor = (0..n).map(|i| c[i * n + j]).sum::<f64>() + epsilon;
                (0..n).for_each(|i| c[i * n + j] /= divisor);
            }
        }
        // A softmax takes an absolute error of its inputs as a relative one, twice; every division adds its sum's and
        // its own roundings. Balancing does not amplify relative errors of the matrix beyond four times.
        let inputs = coefficients.iter().map(|(_, error)| *error).fold(0.0, f64::max);
        let each = (n as f64 + 2.0) * U;
        (c, 4.0 * (2.0 * inputs + 2.0 * FUNCTION + each + 2.0 * self.rounds as f64 * each))
    }
}

impl<B: Backend> RowCase<B> for PreCase<B> {
    fn label(&self) -> String {
        format!("{} streams of {}, {} rounds", self.n, self.hidden, self.rounds)
    }

    fn ports(&self) -> Vec<Port> {
        let n = self.n;
        vec![Port::input(n * self.hidden), Port::output(self.hidden), Port::output(n + n * n)]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [streams, collapsed, mix] = ports else { return Ok(()) };
        backend.hc_pre(&HcPre {
            collapsed: collapsed.clone(),
            mix: mix.clone(),
            streams: streams.clone(),
            function: self.function.clone(),
            base: self.base.buffer.clone(),
            scale: self.scale.buffer.clone(),
            norm_epsilon: NORM_EPSILON,
            hc_epsilon: HC_EPSILON,
            rounds: self.rounds,
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let n = self.n;
        let streams = reals(&row[0]);
        let coefficients = self.coefficients(&streams, mutated);
        // The slope of a sigmoid is at most a quarter.
        let gate = |(value, error): (f64, f64)| {
            let gate = sigmoid(value);
            (gate, error / 4.0 + gate * FUNCTION)
        };
        let pre: Vec<(f64, f64)> = coefficients[..n].iter().map(|&c| gate(c)).collect();
        let collapse = |at: usize| {
            let (mut value, mut slack) = (0.0, TINY);
            for (stream, (gate, error)) in pre.iter().enumerate() {
                let x = streams[stream * self.hidden + at];
                let gate = gate + f64::from(HC_EPSILON);
                value += gate * x;
                slack += x.abs() * (error + gate * (n as f64 + 2.0) * U);
            }
            Exact::Near { value, slack }
        };
        let post = coefficients[n..2 * n].iter().map(|&c| {
            let (gate, error) = gate(c);
            Exact::Near { value: 2.0 * gate, slack: 2.0 * error }
        });
        let (balanced, error) = self.balanced(&coefficients[2 * n..]);
        let mix = post.chain(balanced.iter().map(|&value| Exact::relative(value, error))).collect();
        vec![(0..self.hidden).map(collapse).collect(), mix]
    }
}

/// Laws of `hc_pre`.
pub(crate) fn hc_pre<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    for (hidden, n, rounds, counts) in [
        (64, 4, 20, ROWS),
        (40, 2, 3, ROWS),
        (256, 4, 20, ROWS),
        (48, 3, 1, FEW_ROWS),
        (4096, 4, 20, FEW_ROWS),
    ] {
        let case = PreCase::new(backend, hidden, n, rounds)?;
        check_rows(backend, session, &case, counts)?;
    }
    Ok(())
}

struct PostCase {
    hidden: usize,
    n: usize,
}

impl<B: Backend> RowCase<B> for PostCase {
    fn label(&self) -> String {
        format!("{} streams of {}", self.n, self.hidden)
    }

    fn ports(&self) -> Vec<Port> {
        let n = self.n;
        vec![Port::in_place(n * self.hidden), Port::input(self.hidden), Port::input(n + n * n)]
    }

    fn row(&self, seed: &mut Seed, temper: Temper) -> RowWords {
        let n = self.n;
        let (streams, y) = (temper.values(seed, n * self.hidden), temper.values(seed, self.hidden));
        vec![words(&streams), words(&y), words(&seed.uniform(n + n * n, 0.0, 1.0))]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [streams, y, mix] = ports else { return Ok(()) };
        backend.hc_post(&HcPost { streams: streams.clone(), y: y.clone(), mix: mix.clone() })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let (streams, y, mix) = (reals(&row[0]), reals(&row[1]), reals(&row[2]));
        let (n, hidden) = (self.n, self.hidden);
        let out = |place: usize| {
            let (j, at) = (place / hidden, place % hidden);
            let first = mix[j] * y[at] * if mutated { 1.01 } else { 1.0 };
            let terms = (0..n).map(|i| mix[n + i * n + j] * streams[i * hidden + at]);
            let (value, magnitude) =
                terms.fold((first, first.abs()), |(v, m), term| (v + term, m + term.abs()));
            Exact::Near { value, slack: magnitude * (n as f64 + 2.0) * U }
        };
        vec![(0..n * hidden).map(out).collect()]
    }
}

/// Laws of `hc_post`.
pub(crate) fn hc_post<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    check_rows(backend, session, &PostCase { hidden: 56, n: 4 }, ROWS)?;
    check_rows(backend, session, &PostCase { hidden: 40, n: 2 }, ROWS)?;
    check_rows(backend, session, &PostCase { hidden: 4096, n: 4 }, FEW_ROWS)
}
