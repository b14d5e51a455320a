//! Launches of kda_conv.

use flint_backend::Result;
use flint_backend::ops::KdaConv;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`KdaConv`].
pub(crate) fn kda_conv(queue: &mut Queue, op: &KdaConv<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("kda_conv")
}
