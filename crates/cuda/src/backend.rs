//! The backend: memory, copies, and the operations' table.

use std::path::PathBuf;

use flint_backend::ops::{self, Ops};
use flint_backend::{Backend, Element, Precision, Result};
use flint_weights::QuantMatrix;

use crate::queue::{Counts, Queue};
use crate::{CudaBuffer, CudaError, CudaMatrix, DeviceInfo, op, product};

/// What a CUDA backend is made with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of the device, as the driver counts.
    pub ordinal: usize,
    /// Whether steps that come again run as graphs. Changes speed, never bits.
    pub graphs: bool,
    /// Folder for code that was compiled for this device, when the program has none.
    pub code_cache: Option<PathBuf>,
}

impl Options {
    /// Device `ordinal`, with graphs and without a cache.
    pub fn device(ordinal: usize) -> Self {
        Self { ordinal, graphs: true, code_cache: None }
    }
}

/// A CUDA device.
pub struct Cuda {
    queue: Queue,
}

impl Cuda {
    /// A backend on a device.
    ///
    /// # Errors
    /// Without a driver or a device, with one that is too old, or when the device refuses memory.
    pub fn new(options: Options) -> std::result::Result<Self, CudaError> {
        Ok(Self { queue: Queue::new(options.ordinal, options.graphs, options.code_cache)? })
    }

    /// The queue, for what is measured beside the network.
    pub(crate) fn queue(&mut self) -> &mut Queue {
        &mut self.queue
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
        "cuda-mma-1".into()
    }

    fn product_element(&self) -> Element {
        Element::Bf16
    }

    fn cache_element(&self) -> Element {
        Element::Bf16
    }

    fn allocate(&mut self, element: Element, len: usize) -> Result<CudaBuffer> {
        self.queue.allocate(element, len)
    }

    fn write_f32(&mut self, buffer: &CudaBuffer, first: usize, values: &[f32]) -> Result<()> {
        self.queue.write(buffer, Element::F32, first, bytemuck::cast_slice(values))
    }

    fn write_u32(&mut self, buffer: &CudaBuffer, first: usize, values: &[u32]) -> Result<()> {
        self.queue.write(buffer, Element::U32, first, bytemuck::cast_slice(values))
    }

    fn write_bytes(&mut self, buffer: &CudaBuffer, bytes: &[u8]) -> Result<()> {
        self.queue.write(buffer, buffer.element(), 0, bytes)
    }

    fn read_f32(&mut self, buffer: &CudaBuffer, first: usize, out: &mut [f32]) -> Result<()> {
        self.queue.read(buffer, Element::F32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_u32(&mut self, buffer: &CudaBuffer, first: usize, out: &mut [u32]) -> Result<()> {
        self.queue.read(buffer, Element::U32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_bytes(&mut self, buffer: &CudaBuffer) -> Result<Vec<u8>> {
        let mut out = vec![0; buffer.len() * buffer.element().size()];
        self.queue.read(buffer, buffer.element(), 0, &mut out)?;
        Ok(out)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.queue.begin_step()
    }

    fn end_step(&mut self) -> Result<()> {
        self.queue.end_step()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.queue.synchronize()
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<CudaMatrix> {
        CudaMatrix::single(&mut self.queue, parts, precision)
    }

    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<CudaMatrix> {
        CudaMatrix::stack(&mut self.queue, members, precision)
    }
}

macro_rules! forward {
    ($( $name:ident($args:ty) => $path:path; )*) => {
        impl Ops for Cuda {
            type Buffer = CudaBuffer;
            type Matrix = CudaMatrix;
            $( fn $name(&mut self, op: &$args) -> Result<()> { $path(&mut self.queue, op) } )*
        }
    };
}

forward! {
    embed(ops::Embed<CudaBuffer, CudaMatrix>) => product::embed;
    linear(ops::Linear<CudaBuffer, CudaMatrix>) => product::linear;
    head_linear(ops::HeadLinear<CudaBuffer, CudaMatrix>) => product::head_linear;
    expert_linear(ops::ExpertLinear<CudaBuffer, CudaMatrix>) => product::expert_linear;
    gather_rows(ops::GatherRows<CudaBuffer>) => op::streams::gather_rows;
    spread_streams(ops::SpreadStreams<CudaBuffer>) => op::streams::spread_streams;
    mean_streams(ops::MeanStreams<CudaBuffer>) => op::streams::mean_streams;
    hc_pre(ops::HcPre<CudaBuffer, CudaMatrix>) => op::hyper::hc_pre;
    hc_post(ops::HcPost<CudaBuffer>) => op::hyper::hc_post;
    rms_norm(ops::RmsNorm<CudaBuffer>) => op::norm::rms_norm;
    layer_norm(ops::LayerNorm<CudaBuffer>) => op::norm::layer_norm;
    swiglu(ops::SwiGlu<CudaBuffer>) => op::feed::swiglu;
    route(ops::Route<CudaBuffer>) => op::route::route;
    combine(ops::Combine<CudaBuffer>) => op::feed::combine;
    kda_conv(ops::KdaConv<CudaBuffer>) => op::conv::kda_conv;
    kda_prepare(ops::KdaPrepare<CudaBuffer>) => op::prepare::kda_prepare;
    kda_scan(ops::KdaScan<CudaBuffer>) => op::scan::kda_scan;
    gated_norm(ops::GatedNorm<CudaBuffer>) => op::norm::gated_norm;
    dsa_append(ops::DsaAppend<CudaBuffer>) => op::append::dsa_append;
    select_pools(ops::SelectPools<CudaBuffer>) => op::select::select_pools;
    attend(ops::Attend<CudaBuffer>) => op::attend::attend;
    top_logits(ops::TopLogits<CudaBuffer>) => op::top::top_logits;
}
