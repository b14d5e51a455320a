//! Products with matrices.

use flint_backend::ops::{Embed, ExpertLinear, HeadLinear, Linear};
use flint_backend::{Error, Result};

use crate::queue::Queue;
use crate::{CudaBuffer, CudaMatrix};

/// Queues [`Embed`].
pub(crate) fn embed(queue: &mut Queue, op: &Embed<CudaBuffer, CudaMatrix>) -> Result<()> {
    let _ = (queue, op);
    not_yet("embed")
}

/// Queues [`Linear`].
pub(crate) fn linear(queue: &mut Queue, op: &Linear<CudaBuffer, CudaMatrix>) -> Result<()> {
    let _ = (queue, op);
    not_yet("linear")
}

/// Queues [`HeadLinear`].
pub(crate) fn head_linear(queue: &mut Queue, op: &HeadLinear<CudaBuffer, CudaMatrix>) -> Result<()> {
    let _ = (queue, op);
    not_yet("head_linear")
}

/// Queues [`ExpertLinear`].
pub(crate) fn expert_linear(queue: &mut Queue, op: &ExpertLinear<CudaBuffer, CudaMatrix>) -> Result<()> {
    let _ = (queue, op);
    not_yet("expert_linear")
}

fn not_yet(op: &'static str) -> Result<()> {
    Err(Error::Device { backend: "cuda", what: format!("{op}: not yet") })
}
