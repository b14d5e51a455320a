//! Hyper-connection sites: four residual streams into a block's row and back. `reference/glm5_next.md` section 4.

use flint_backend::ops::{HcPost, HcPre, RmsNorm};
use flint_backend::{Backend, Rows};
use flint_weights::ModelConfig;

use crate::Result;
use crate::scratch::Scratch;

/// One site's weights, with the norm of the block that it feeds.
pub(crate) struct Site<B: Backend> {
    pub(crate) function: B::Matrix,
    pub(crate) base: B::Buffer,
    pub(crate) scale: B::Buffer,
    pub(crate) norm: B::Buffer,
}

impl<B: Backend> Site<B> {
    /// Collapses the streams into `scratch.x` (normed, ready for the block) and leaves the coefficients in `scratch.mix`.
    pub(crate) fn enter(
        &self,
        backend: &mut B,
        config: &ModelConfig,
        scratch: &Scratch<B>,
        rows: usize,
    ) -> Result<()> {
        let x = Rows::dense(&scratch.x, rows, config.hidden_size);
        backend.hc_pre(&HcPre {
            collapsed: x.clone(),
            mix: mix_rows(config, scratch, rows),
            streams: stream_rows(config, scratch, rows),
            function: self.function.clone(),
            base: self.base.clone(),
            scale: self.scale.clone(),
            norm_epsilon: config.rms_norm_eps,
            hc_epsilon: config.hc_eps,
            rounds: config.sinkhorn_rounds,
        })?;
        let norm = RmsNorm { out: x.clone(), x, weight: self.norm.clone(), epsilon: config.rms_norm_eps };
        Ok(backend.rms_norm(&norm)?)
    }
}

/// Mixes the streams and adds the block's output `scratch.y`.
pub(crate) fn leave<B: Backend>(
    backend: &mut B,
    config: &ModelConfig,
    scratch: &Scratch<B>,
    rows: usize,
) -> Result<()> {
    Ok(backend.hc_post(&HcPost {
        streams: stream_rows(config, scratch, rows),
        y: Rows::dense(&scratch.y, rows, config.hidden_size),
        mix: mix_rows(config, scratch, rows),
    })?)
}

/// The coefficients of the site that was entered last.
pub(crate) fn mix_rows<B: Backend>(
    config: &ModelConfig,
    scratch: &Scratch<B>,
    rows: usize,
) -> Rows<B::Buffer> {
    Rows::dense(&scratch.mix, rows, config.streams * (1 + config.streams))
}

/// The residual streams.
pub(crate) fn stream_rows<B: Backend>(
    config: &ModelConfig,
    scratch: &Scratch<B>,
    rows: usize,
) -> Rows<B::Buffer> {
    Rows::dense(&scratch.streams, rows, config.streams * config.hidden_size)
}
