//! Launches of rms_norm, layer_norm, gated_norm.

use flint_backend::Result;
use flint_backend::ops::{GatedNorm, LayerNorm, RmsNorm};

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`RmsNorm`].
pub(crate) fn rms_norm(queue: &mut Queue, op: &RmsNorm<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("rms_norm")
}

/// Queues [`LayerNorm`].
pub(crate) fn layer_norm(queue: &mut Queue, op: &LayerNorm<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("layer_norm")
}

/// Queues [`GatedNorm`].
pub(crate) fn gated_norm(queue: &mut Queue, op: &GatedNorm<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("gated_norm")
}
