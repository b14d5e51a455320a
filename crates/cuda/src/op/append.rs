//! Launches of dsa_append.

use flint_backend::Result;
use flint_backend::ops::DsaAppend;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`DsaAppend`].
pub(crate) fn dsa_append(queue: &mut Queue, op: &DsaAppend<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("dsa_append")
}
