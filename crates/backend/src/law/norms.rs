//! Laws of the norms and of what a KDA scan needs of a row.

use super::Session;
use super::exact::{Exact, FUNCTION, TINY, U, depth, rms_factor, sigmoid};
use super::rows::{FEW_ROWS, Port, ROWS, RowCase, RowWords, Temper, Vector, check_rows, reals};
use super::seed::Seed;
use crate::ops::{GatedNorm, KdaPrepare, LayerNorm, RmsNorm};
use crate::{Backend, Result, Rows};

/// A factor that is 1 % off when `mutated`.
fn off(mutated: bool) -> f64 {
    if mutated { 1.01 } else { 1.0 }
}

struct RmsCase<B: Backend> {
    weight: Vector<B>,
    epsilon: f32,
    in_place: bool,
}

impl<B: Backend> RowCase<B> for RmsCase<B> {
    fn label(&self) -> String {
        format!("width {}{}", self.weight.values.len(), if self.in_place { ", in place" } else { "" })
    }

    fn ports(&self) -> Vec<Port> {
        let width = self.weight.values.len();
        if self.in_place {
            vec![Port::in_place(width)]
        } else {
            vec![Port::input(width), Port::output(width)]
        }
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [x, .., out] = &[ports, ports].concat()[..] else { return Ok(()) };
        let (out, x, weight) = (out.clone(), x.clone(), self.weight.buffer.clone());
        backend.rms_norm(&RmsNorm { out, x, weight, epsilon: self.epsilon })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let x = reals(&row[0]);
        let (factor, error) = rms_factor(&x, f64::from(self.epsilon));
        let value = |(i, x): (usize, &f64)| {
            Exact::relative(self.weight.value(i) * x * factor * off(mutated), error + 4.0 * U)
        };
        vec![x.iter().enumerate().map(value).collect()]
    }
}

/// Laws of `rms_norm`.
pub(crate) fn rms_norm<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(31);
    for (width, in_place, counts) in [
        (128, false, ROWS),
        (96, true, ROWS),
        (37, false, ROWS),
        (5, true, FEW_ROWS),
        (1536, true, FEW_ROWS),
        (4096, false, FEW_ROWS),
    ] {
        let weight = Vector::new(backend, seed.uniform(width, 0.5, 1.5))?;
        check_rows(backend, session, &RmsCase { weight, epsilon: 1e-5, in_place }, counts)?;
    }
    Ok(())
}

struct LayerCase<B: Backend> {
    weight: Vector<B>,
    bias: Vector<B>,
    epsilon: f32,
    in_place: bool,
}

impl<B: Backend> RowCase<B> for LayerCase<B> {
    fn label(&self) -> String {
        format!("width {}{}", self.weight.values.len(), if self.in_place { ", in place" } else { "" })
    }

    fn ports(&self) -> Vec<Port> {
        let width = self.weight.values.len();
        if self.in_place {
            vec![Port::in_place(width)]
        } else {
            vec![Port::input(width), Port::output(width)]
        }
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [x, .., out] = &[ports, ports].concat()[..] else { return Ok(()) };
        let (weight, bias) = (self.weight.buffer.clone(), self.bias.buffer.clone());
        let (out, x) = (out.clone(), x.clone());
        backend.layer_norm(&LayerNorm { out, x, weight, bias, epsilon: self.epsilon })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let x = reals(&row[0]);
        let count = x.len() as f64;
        let mean = x.iter().sum::<f64>() / count;
        let mean_error = x.iter().map(|x| x.abs()).sum::<f64>() / count * depth(x.len()) * U;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
        let spread = variance + f64::from(self.epsilon);
        // The variance around a mean that is off by e is off by e², and by the roundings of x - mean.
        let largest = x.iter().fold(0.0f64, |a, x| a.max(x.abs())) + mean.abs();
        let centre_error = mean_error + largest * U;
        let variance_error = variance * (depth(x.len()) + 4.0) * U
            + 2.0 * variance.sqrt() * centre_error
            + centre_error * centre_error;
        let factor = 1.0 / spread.sqrt();
        let factor_error = variance_error / spread + 4.0 * U;
        let value = |(i, x): (usize, &f64)| {
            let (weight, bias) = (self.weight.value(i) * off(mutated), self.bias.value(i));
            let normal = (x - mean) * factor;
            let slack = weight.abs() * (normal.abs() * (factor_error + 3.0 * U) + centre_error * factor);
            Exact::Near { value: normal * weight + bias, slack: slack + TINY }
        };
        vec![x.iter().enumerate().map(value).collect()]
    }
}

/// Laws of `layer_norm`.
pub(crate) fn layer_norm<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(32);
    for (width, in_place, counts) in [(128, true, ROWS), (64, false, ROWS), (37, true, FEW_ROWS)] {
        let weight = Vector::new(backend, seed.uniform(width, 0.5, 1.5))?;
        let bias = Vector::new(backend, seed.normals(width, 0.3))?;
        check_rows(backend, session, &LayerCase { weight, bias, epsilon: 1e-6, in_place }, counts)?;
    }
    Ok(())
}

struct GatedCase<B: Backend> {
    weight: Vector<B>,
    heads: usize,
    epsilon: f32,
    in_place: bool,
}

impl<B: Backend> RowCase<B> for GatedCase<B> {
    fn label(&self) -> String {
        let place = if self.in_place { ", in place" } else { "" };
        format!("{} heads of {}{place}", self.heads, self.weight.values.len())
    }

    fn ports(&self) -> Vec<Port> {
        let width = self.heads * self.weight.values.len();
        let mut ports = vec![Port::input(width), Port::input(width), Port::output(width)];
        if self.in_place {
            ports.truncate(2);
            ports[0] = Port::in_place(width);
        }
        ports
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let (Some(o), Some(gate)) = (ports.first(), ports.get(1)) else { return Ok(()) };
        backend.gated_norm(&GatedNorm {
            out: ports.get(2).unwrap_or(o).clone(),
            o: o.clone(),
            gate: gate.clone(),
            weight: self.weight.buffer.clone(),
            head_dim: self.weight.values.len(),
            epsilon: self.epsilon,
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let (o, gate) = (reals(&row[0]), reals(&row[1]));
        let dim = self.weight.values.len();
        let mut out = Vec::new();
        for (o, gate) in o.chunks(dim).zip(gate.chunks(dim)) {
            let (factor, error) = rms_factor(o, f64::from(self.epsilon));
            for (i, (o, gate)) in o.iter().zip(gate).enumerate() {
                let value = self.weight.value(i) * o * factor * sigmoid(*gate) * off(mutated);
                out.push(Exact::relative(value, error + 5.0 * U + FUNCTION));
            }
        }
        vec![out]
    }
}

/// Laws of `gated_norm`.
pub(crate) fn gated_norm<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(33);
    for (dim, heads, in_place, counts) in
        [(32, 3, false, ROWS), (24, 2, true, ROWS), (128, 8, true, FEW_ROWS)]
    {
        let weight = Vector::new(backend, seed.uniform(dim, 0.5, 1.5))?;
        check_rows(backend, session, &GatedCase { weight, heads, epsilon: 1e-5, in_place }, counts)?;
    }
    Ok(())
}

struct PrepareCase<B: Backend> {
    dim: usize,
    heads: usize,
    bound: Option<f32>,
    dt_bias: Vector<B>,
    a_log: Vector<B>,
}

impl<B: Backend> PrepareCase<B> {
    /// The decay factor of a channel and its error.
    fn decay(&self, f: f64, channel: usize, mutated: bool) -> Exact {
        let z = f + self.dt_bias.value(channel);
        let rate = self.a_log.value(channel / self.dim).exp();
        let z_error = z.abs() * U;
        let (g, error) = if let Some(bound) = self.bound {
            let (bound, inner) = (f64::from(bound), rate * z);
            let inner_error = rate * z_error + inner.abs() * (FUNCTION + U);
            let gate = sigmoid(inner);
            (bound * gate, bound.abs() * (inner_error / 4.0 + gate * (FUNCTION + U)))
        } else {
            let soft = z.max(0.0) + (-z.abs()).exp().ln_1p();
            (-rate * soft, rate * (z_error + soft * (2.0 * FUNCTION + U)))
        };
        let g = g * off(mutated);
        Exact::relative(g.exp(), error + FUNCTION)
    }

    /// A normalised head.
    fn normal(x: &[f64], scale: f64, mutated: bool) -> Vec<Exact> {
        let squares: f64 = x.iter().map(|x| x * x).sum();
        let factor = scale / (squares + f64::from(1e-6f32)).sqrt();
        let error = (depth(x.len()) + 8.0) * U;
        x.iter().map(|x| Exact::relative(x * factor * off(mutated), error)).collect()
    }
}

impl<B: Backend> RowCase<B> for PrepareCase<B> {
    fn label(&self) -> String {
        format!("{} heads of {}, bound {:?}", self.heads, self.dim, self.bound)
    }

    fn ports(&self) -> Vec<Port> {
        let channels = self.heads * self.dim;
        vec![Port::in_place(3 * channels), Port::in_place(channels), Port::in_place(self.heads)]
    }

    fn tempers(&self) -> &'static [Temper] {
        &[Temper::Zero, Temper::Tied]
    }

    fn launch(&self, backend: &mut B, ports: &[Rows<B::Buffer>], _rows: usize) -> Result<()> {
        let [qkv, decay, beta] = ports else { return Ok(()) };
        backend.kda_prepare(&KdaPrepare {
            qkv: qkv.clone(),
            decay: decay.clone(),
            beta: beta.clone(),
            dt_bias: self.dt_bias.buffer.clone(),
            a_log: self.a_log.buffer.clone(),
            head_dim: self.dim,
            lower_bound: self.bound,
        })
    }

    fn exact(&self, row: &RowWords, _reading: usize, mutated: bool) -> Vec<Vec<Exact>> {
        let (qkv, f, beta) = (reals(&row[0]), reals(&row[1]), reals(&row[2]));
        let channels = self.heads * self.dim;
        let q_scale = 1.0 / (self.dim as f64).sqrt();
        let mut qkv_out = Vec::new();
        for head in qkv[..channels].chunks(self.dim) {
            qkv_out.extend(Self::normal(head, q_scale, mutated));
        }
        for head in qkv[channels..2 * channels].chunks(self.dim) {
            qkv_out.extend(Self::normal(head, 1.0, mutated));
        }
        qkv_out.extend(row[0][2 * channels..].iter().map(|&word| Exact::Bits(word)));
        let decay = f.iter().enumerate().map(|(channel, &f)| self.decay(f, channel, mutated)).collect();
        let beta = beta.iter().map(|&x| Exact::relative(sigmoid(x), FUNCTION)).collect();
        vec![qkv_out, decay, beta]
    }
}

/// Laws of `kda_prepare`.
pub(crate) fn kda_prepare<B: Backend>(backend: &mut B, session: &mut Session) -> Result<()> {
    let mut seed = Seed::new(34);
    for (dim, heads, bound, counts) in
        [(32, 3, Some(-5.0), ROWS), (24, 2, None, ROWS), (128, 4, Some(-5.0), FEW_ROWS)]
    {
        let dt_bias = Vector::new(backend, seed.normals(dim * heads, 1.0))?;
        let a_log = Vector::new(backend, seed.uniform(heads, -1.0, 1.0))?;
        check_rows(backend, session, &PrepareCase { dim, heads, bound, dt_bias, a_log }, counts)?;
    }
    Ok(())
}
