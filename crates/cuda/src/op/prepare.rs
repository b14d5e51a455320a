//! Launches of kda_prepare.

use flint_backend::Result;
use flint_backend::ops::KdaPrepare;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`KdaPrepare`].
pub(crate) fn kda_prepare(queue: &mut Queue, op: &KdaPrepare<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("kda_prepare")
}
