//! Launches of route.

use flint_backend::Result;
use flint_backend::ops::Route;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`Route`].
pub(crate) fn route(queue: &mut Queue, op: &Route<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("route")
}
