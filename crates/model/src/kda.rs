//! Kimi delta attention: a recurrent state of fixed size. `reference/glm5_next.md` section 5.

use flint_backend::ops::{GatedNorm, KdaConv, KdaPrepare, KdaScan, KdaSpan, Linear};
use flint_backend::{Backend, Rows};
use flint_weights::ModelConfig;

use crate::Result;
use crate::scratch::{Scratch, kda_projection_width};

/// A KDA layer's weights.
pub(crate) struct Kda<B: Backend> {
    /// q, k, v, f_a, b, g_a over the same input.
    pub(crate) input: B::Matrix,
    pub(crate) forget: B::Matrix,
    pub(crate) gate: B::Matrix,
    pub(crate) output: B::Matrix,
    pub(crate) taps: B::Buffer,
    pub(crate) dt_bias: B::Buffer,
    pub(crate) a_log: B::Buffer,
    pub(crate) norm: B::Buffer,
}

impl<B: Backend> Kda<B> {
    /// `scratch.x` to `scratch.y`; the spans' states move on.
    pub(crate) fn run(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        scratch: &Scratch<B>,
        rows: usize,
        spans: Vec<KdaSpan<B::Buffer>>,
    ) -> Result<()> {
        let (channels, head_dim) = (config.linear_width(), config.linear_head_dim);
        let mut slab = scratch.slab();
        let projected = slab.rows(rows, kda_projection_width(config));
        let qkv = slab.rows(rows, 3 * channels);
        let decay = slab.rows(rows, channels);
        let gate = slab.rows(rows, channels);
        let out = slab.rows(rows, channels);
        let f_a = projected.columns(3 * channels, head_dim);
        let beta = projected.columns(3 * channels + head_dim, config.linear_heads);
        let g_a = projected.columns(3 * channels + head_dim + config.linear_heads, head_dim);

        let x = Rows::dense(&scratch.x, rows, config.hidden_size);
        backend.linear(&Linear { out: projected.clone(), x, matrix: self.input.clone() })?;
        backend.linear(&Linear { out: decay.clone(), x: f_a, matrix: self.forget.clone() })?;
        backend.linear(&Linear { out: gate.clone(), x: g_a, matrix: self.gate.clone() })?;
        backend.kda_conv(&KdaConv {
            out: qkv.clone(),
            u: projected.columns(0, 3 * channels),
            taps: self.taps.clone(),
            tap_count: config.linear_conv_taps,
            spans: spans.clone(),
        })?;
        backend.kda_prepare(&KdaPrepare {
            qkv: qkv.clone(),
            decay: decay.clone(),
            beta: beta.clone(),
            dt_bias: self.dt_bias.clone(),
            a_log: self.a_log.clone(),
            head_dim,
            lower_bound: config.linear_lower_bound,
        })?;
        backend.kda_scan(&KdaScan { out: out.clone(), qkv, decay, beta, head_dim, spans })?;
        backend.gated_norm(&GatedNorm {
            out: out.clone(),
            o: out.clone(),
            gate,
            weight: self.norm.clone(),
            head_dim,
            epsilon: config.rms_norm_eps,
        })?;
        let y = Rows::dense(&scratch.y, rows, config.hidden_size);
        Ok(backend.linear(&Linear { out: y, x: out, matrix: self.output.clone() })?)
    }
}
