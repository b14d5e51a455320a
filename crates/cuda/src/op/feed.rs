//! Launches of swiglu, combine.

use flint_backend::Result;
use flint_backend::ops::{Combine, SwiGlu};

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`SwiGlu`].
pub(crate) fn swiglu(queue: &mut Queue, op: &SwiGlu<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("swiglu")
}

/// Queues [`Combine`].
pub(crate) fn combine(queue: &mut Queue, op: &Combine<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("combine")
}
