//! Launches of gather_rows, spread_streams, mean_streams.

use flint_backend::Result;
use flint_backend::ops::{GatherRows, MeanStreams, SpreadStreams};

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`GatherRows`].
pub(crate) fn gather_rows(queue: &mut Queue, op: &GatherRows<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("gather_rows")
}

/// Queues [`SpreadStreams`].
pub(crate) fn spread_streams(queue: &mut Queue, op: &SpreadStreams<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("spread_streams")
}

/// Queues [`MeanStreams`].
pub(crate) fn mean_streams(queue: &mut Queue, op: &MeanStreams<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("mean_streams")
}
