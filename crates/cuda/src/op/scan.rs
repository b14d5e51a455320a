//! Launches of kda_scan.

use flint_backend::Result;
use flint_backend::ops::KdaScan;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`KdaScan`].
pub(crate) fn kda_scan(queue: &mut Queue, op: &KdaScan<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("kda_scan")
}
