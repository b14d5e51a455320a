//! The device: memory, uploads, and the named host reads.

use std::fmt::Debug;

use flint_weights::QuantMatrix;

use crate::ops::Ops;

/// What every call on a backend returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a backend refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The backend has no kernel for a matrix.
    #[error("{name}: the {backend} backend has no kernel for {what}; {remedy}")]
    Unsupported {
        /// Canonical module name.
        name: String,
        /// The backend.
        backend: &'static str,
        /// What it cannot do.
        what: String,
        /// What the user can do.
        remedy: &'static str,
    },
    /// The host matrix is inconsistent.
    #[error(transparent)]
    Weights(#[from] flint_weights::Error),
    /// Memory ran out.
    #[error(
        "the {backend} backend could not allocate {bytes} bytes for {what}; lower --context or --parallel"
    )]
    OutOfMemory {
        /// The backend.
        backend: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// What for.
        what: String,
    },
    /// An operation's shapes or ranges contradict each other: a bug in the caller.
    #[error("{op}: {what}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The contradiction.
        what: String,
    },
    /// The device failed.
    #[error("the {backend} device failed: {what}")]
    Device {
        /// The backend.
        backend: &'static str,
        /// Its message.
        what: String,
    },
}

/// Type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// fp32: activations and recurrent states.
    F32,
    /// bf16: cached rows of an arithmetic that rounds them.
    Bf16,
    /// Unsigned 32-bit: tokens, picks, slots, row numbers.
    U32,
}

impl Element {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Which arithmetic products with a matrix use. A property of the matrix, fixed at upload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// The backend's product arithmetic (fp32 lanes or bf16 dot on a CPU).
    Product,
    /// fp32 inputs and sums whatever the product arithmetic is: the router and the hyper-connections.
    /// Small errors there change discrete choices.
    Full,
}

/// A device that can run the network.
///
/// Operations are queued in program order and may run later; only [`read_f32`](Self::read_f32),
/// [`read_u32`](Self::read_u32), [`read_bytes`](Self::read_bytes) and [`synchronize`](Self::synchronize) wait.
/// Buffers and matrices are handles: a clone names the same memory, which is freed with the last handle.
pub trait Backend: Ops + Send + 'static {
    /// The arithmetic's name. Two runs with equal names and equal weights give equal bits.
    fn arithmetic(&self) -> String;

    /// Type to which products round their inputs, [`Precision::Full`] ones and those with fp16 or fp32 numbers aside.
    /// Part of the arithmetic.
    fn product_element(&self) -> Element {
        Element::F32
    }

    /// Type to which products round affine weights whose scales and biases are bf16 ([`Precision::Full`] ones aside), once:
    /// `Element::F32` where they multiply codes and fold scales, so that no weight is rounded. Part of the arithmetic.
    fn affine_element(&self) -> Element {
        Element::F32
    }

    /// Element type in which latents and pooled keys are cached. Part of the arithmetic.
    fn cache_element(&self) -> Element;

    /// A new buffer of `len` zeros.
    fn allocate(&mut self, element: Element, len: usize) -> Result<Self::Buffer>;

    /// Copies `values` to elements `first..` of an F32 buffer (queued; the slice may be reused at once).
    fn write_f32(&mut self, buffer: &Self::Buffer, first: usize, values: &[f32]) -> Result<()>;

    /// Copies `values` to elements `first..` of a U32 buffer (queued).
    fn write_u32(&mut self, buffer: &Self::Buffer, first: usize, values: &[u32]) -> Result<()>;

    /// Replaces a buffer's bytes, as read by [`read_bytes`](Self::read_bytes) (queued).
    fn write_bytes(&mut self, buffer: &Self::Buffer, bytes: &[u8]) -> Result<()>;

    /// Waits, then copies elements `first..first + out.len()` of an F32 buffer.
    fn read_f32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [f32]) -> Result<()>;

    /// Waits, then copies elements of a U32 buffer.
    fn read_u32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [u32]) -> Result<()>;

    /// Waits, then copies the whole buffer's bytes, bit-exact, in the host's order.
    fn read_bytes(&mut self, buffer: &Self::Buffer) -> Result<Vec<u8>>;

    /// The operations that follow, up to [`end_step`](Self::end_step), are one forward of a network whose like comes
    /// again: a device may collect them and start them at once. Changes speed, never bits. Steps do not nest; a second
    /// call, and an end without a beginning, are harmless.
    fn begin_step(&mut self) -> Result<()> {
        Ok(())
    }

    /// Ends what [`begin_step`](Self::begin_step) began (queued: does not wait).
    fn end_step(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits until every queued operation has run.
    fn synchronize(&mut self) -> Result<()>;

    /// Uploads a matrix made of `parts` over one input, one below the other. Parts may differ in form and width:
    /// the result has `Σ rows` outputs, and each output is the one that its part alone gives.
    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<Self::Matrix>;

    /// Uploads a stack of matrices of one shape (experts, heads); each member is a list of parts as in
    /// [`upload`](Self::upload).
    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<Self::Matrix>;
}

/// Bounds that every handle type of a backend meets.
pub trait Handle: Clone + Debug + Send + Sync + 'static {}
impl<T: Clone + Debug + Send + Sync + 'static> Handle for T {}
