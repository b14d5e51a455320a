//! Uploaded matrices.

use flint_backend::{Error, Precision, Result};
use flint_weights::QuantMatrix;

use crate::queue::Queue;

/// A handle of a matrix or a stack on the device.
#[derive(Clone, Debug)]
pub struct CudaMatrix;

impl CudaMatrix {
    /// Uploads parts over one input.
    pub(crate) fn single(queue: &mut Queue, parts: &[QuantMatrix], precision: Precision) -> Result<Self> {
        let _ = (queue, parts, precision);
        Err(Error::Device { backend: "cuda", what: "upload: not yet".into() })
    }

    /// Uploads a stack.
    pub(crate) fn stack(
        queue: &mut Queue,
        members: &[Vec<QuantMatrix>],
        precision: Precision,
    ) -> Result<Self> {
        let _ = (queue, members, precision);
        Err(Error::Device { backend: "cuda", what: "upload_stack: not yet".into() })
    }
}
