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

/// Plain numbers as they were stored, row after row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    /// Device address.
    pub(crate) address: u64,
    /// What they are.
    pub(crate) numbers: flint_weights::PlainType,
    /// Outputs.
    pub(crate) rows: usize,
    /// Inputs.
    pub(crate) cols: usize,
}

impl CudaMatrix {
    /// The numbers of a matrix of one part that is kept as it was stored.
    pub(crate) fn plain(&self) -> Option<Plain> {
        None
    }
}
