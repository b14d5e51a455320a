//! Launches of select_pools.

use flint_backend::Result;
use flint_backend::ops::SelectPools;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`SelectPools`].
pub(crate) fn select_pools(queue: &mut Queue, op: &SelectPools<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("select_pools")
}
