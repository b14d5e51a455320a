//! Launches of attend.

use flint_backend::Result;
use flint_backend::ops::Attend;

use super::not_yet;
use crate::CudaBuffer;
use crate::queue::Queue;

/// Queues [`Attend`].
pub(crate) fn attend(queue: &mut Queue, op: &Attend<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("attend")
}
