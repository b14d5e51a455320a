//! The backend: memory, copies, and the operations' table.

use std::path::PathBuf;

use flint_backend::ops::{self, Ops};
use flint_backend::{Backend, Element, Precision, Result};
use flint_weights::QuantMatrix;

use crate::op::join::{Joinable, Joiner};
use crate::queue::{Counts, Queue};
use crate::{CudaBuffer, CudaError, CudaMatrix, DeviceInfo, op, product};

/// What a CUDA backend is made with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the device, as the driver counts.
    pub ordinal: usize,
    /// Whether steps that come again run as graphs. Changes speed, never bits.
    pub graphs: bool,
    /// Whether operations of a step are joined into fewer kernels. Changes speed, never bits.
    pub joins: bool,
    /// Whether a kernel may begin while the one before it ends, on devices that can. Changes speed, never bits.
    pub early: bool,
    /// Folder for code that was compiled for this device, when the program has none.
    pub code_cache: Option<PathBuf>,
}

impl Options {
    /// Device `ordinal`, with graphs, joined operations and early kernels, without a cache.
    pub fn device(ordinal: usize) -> Self {
        Self { ordinal, graphs: true, joins: true, early: true, code_cache: None }
    }
}

/// A CUDA device.
pub struct Cuda {
    queue: Queue,
    joiner: Joiner,
    joins: bool,
}

impl Cuda {
    /// A backend on a device.
    ///
    /// # Errors
    /// Without a driver or a device, with one that is too old, or when the device refuses memory.
    pub fn new(options: Options) -> std::result::Result<Self, CudaError> {
        let queue = Queue::new(options.ordinal, options.graphs, options.early, options.code_cache)?;
        Ok(Self { queue, joiner: Joiner::default(), joins: options.joins })
    }

    /// The queue, for what is measured beside the network.
    pub(crate) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
    }

    /// The queue, when nothing waits to be joined.
    fn settled(&mut self) -> Result<&mut Queue> {
        self.joiner.flush(&mut self.queue)?;
        Ok(&mut self.queue)
    }

    /// Queues an operation that can be joined with others: in a step it may wait for the next one.
    fn join(&mut self, op: Joinable) -> Result<()> {
        if self.joins && self.queue.in_step() {
            self.joiner.take(&mut self.queue, op)
        } else {
            op.run(&mut self.queue)
        }
    }

    /// The device.
    pub fn info(&self) -> &DeviceInfo {
        self.queue.info()
    }

    /// Free and all memory of the device in bytes.
    ///
    /// # Errors
    /// When the device fails.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.queue.memory()
    }

    /// What it did so far.
    pub fn counts(&self) -> Counts {
        self.queue.counts()
    }
}

impl Backend for Cuda {
    fn arithmetic(&self) -> String {
        "cuda-mma-2".into()
    }

    fn product_element(&self) -> Element {
        Element::Bf16
    }

    fn affine_element(&self) -> Element {
        Element::Bf16
    }

    fn cache_element(&self) -> Element {
        Element::Bf16
    }

    fn allocate(&mut self, element: Element, len: usize) -> Result<CudaBuffer> {
        self.queue.allocate(element, len)
    }

    fn write_f32(&mut self, buffer: &CudaBuffer, first: usize, values: &[f32]) -> Result<()> {
        self.settled()?.write(buffer, Element::F32, first, bytemuck::cast_slice(values))
    }

    fn write_u32(&mut self, buffer: &CudaBuffer, first: usize, values: &[u32]) -> Result<()> {
        self.settled()?.write(buffer, Element::U32, first, bytemuck::cast_slice(values))
    }

    fn write_bytes(&mut self, buffer: &CudaBuffer, bytes: &[u8]) -> Result<()> {
        self.settled()?.write(buffer, buffer.element(), 0, bytes)
    }

    fn read_f32(&mut self, buffer: &CudaBuffer, first: usize, out: &mut [f32]) -> Result<()> {
        self.settled()?.read(buffer, Element::F32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_u32(&mut self, buffer: &CudaBuffer, first: usize, out: &mut [u32]) -> Result<()> {
        self.settled()?.read(buffer, Element::U32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_bytes(&mut self, buffer: &CudaBuffer) -> Result<Vec<u8>> {
        let mut out = vec![0; buffer.len() * buffer.element().size()];
        self.settled()?.read(buffer, buffer.element(), 0, &mut out)?;
        Ok(out)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.settled()?.begin_step()
    }

    fn end_step(&mut self) -> Result<()> {
        let settled = self.joiner.flush(&mut self.queue);
        // Ended after an error too.
        settled.and(self.queue.end_step())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.settled()?.synchronize()
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<CudaMatrix> {
        CudaMatrix::single(&mut self.queue, parts, precision)
    }

    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<CudaMatrix> {
        CudaMatrix::stack(&mut self.queue, members, precision)
    }

    fn allocate_stack(
        &mut self,
        like: &[QuantMatrix],
        _slots: usize,
        _precision: Precision,
    ) -> Result<CudaMatrix> {
        Err(flint_backend::Error::Unsupported {
            name: like.first().map(|part| part.name.clone()).unwrap_or_default(),
            backend: "cuda",
            what: "expert slots".into(),
            remedy: "use --device cpu",
        })
    }

    fn write_member(&mut self, stack: &CudaMatrix, slot: usize, _parts: &[QuantMatrix]) -> Result<()> {
        Err(flint_backend::Error::Shape { op: "write_member", what: format!("slot {slot} of {stack:?}") })
    }
}

macro_rules! forward {
    (
        alone { $( $name:ident($args:ty) => $path:path; )* }
        joined { $( $joined:ident($joined_args:ty) => $kind:ident; )* }
    ) => {
        impl Ops for Cuda {
            type Buffer = CudaBuffer;
            type Matrix = CudaMatrix;
            $( fn $name(&mut self, op: &$args) -> Result<()> { $path(self.settled()?, op) } )*
            $( fn $joined(&mut self, op: &$joined_args) -> Result<()> { self.join(Joinable::$kind(op.clone())) } )*
        }
    };
}

forward! {
    alone {
        embed(ops::Embed<CudaBuffer, CudaMatrix>) => product::embed;
        head_linear(ops::HeadLinear<CudaBuffer, CudaMatrix>) => product::head_linear;
        expert_linear(ops::ExpertLinear<CudaBuffer, CudaMatrix>) => product::expert_linear;
        attend(ops::Attend<CudaBuffer>) => op::attend::attend;
        top_logits(ops::TopLogits<CudaBuffer>) => op::top::top_logits;
    }
    joined {
        hc_pre(ops::HcPre<CudaBuffer, CudaMatrix>) => HcPre;
        hc_post(ops::HcPost<CudaBuffer>) => HcPost;
        rms_norm(ops::RmsNorm<CudaBuffer>) => RmsNorm;
        combine(ops::Combine<CudaBuffer>) => Combine;
        kda_conv(ops::KdaConv<CudaBuffer>) => KdaConv;
        kda_prepare(ops::KdaPrepare<CudaBuffer>) => KdaPrepare;
        kda_scan(ops::KdaScan<CudaBuffer>) => KdaScan;
        gated_norm(ops::GatedNorm<CudaBuffer>) => GatedNorm;
        gather_rows(ops::GatherRows<CudaBuffer>) => GatherRows;
        mean_streams(ops::MeanStreams<CudaBuffer>) => MeanStreams;
        spread_streams(ops::SpreadStreams<CudaBuffer>) => SpreadStreams;
        select_pools(ops::SelectPools<CudaBuffer>) => SelectPools;
        dsa_append(ops::DsaAppend<CudaBuffer>) => DsaAppend;
        route(ops::Route<CudaBuffer>) => Route;
        swiglu(ops::SwiGlu<CudaBuffer>) => SwiGlu;
        layer_norm(ops::LayerNorm<CudaBuffer>) => LayerNorm;
        linear(ops::Linear<CudaBuffer, CudaMatrix>) => Linear;
    }
}
