//! Launches of hc_pre, hc_post.

use flint_backend::Result;
use flint_backend::ops::{HcPost, HcPre};

use super::not_yet;
use crate::queue::Queue;
use crate::{CudaBuffer, CudaMatrix};

/// Queues [`HcPre`].
pub(crate) fn hc_pre(queue: &mut Queue, op: &HcPre<CudaBuffer, CudaMatrix>) -> Result<()> {
    let _ = (queue, op);
    not_yet("hc_pre")
}

/// Queues [`HcPost`].
pub(crate) fn hc_post(queue: &mut Queue, op: &HcPost<CudaBuffer>) -> Result<()> {
    let _ = (queue, op);
    not_yet("hc_post")
}
