//! The CPU backend.
//!
//! Two arithmetics, both under the same laws: fp32 lanes ([`Arithmetic::Lanes`], the same bits on every machine) and
//! bf16 dot products ([`Arithmetic::Dot`], where the CPU has `vdpbf16ps`; products only, everything else is fp32 lanes).
//! Every reduction is defined over 16 virtual lanes and a fixed fold; instruction sets are implementations of that
//! definition, chosen at run time ([`Level`]).
//!
//! `buffer.rs` memory, `pool.rs` threads, `lanes.rs` the 16 lanes in each instruction set, `maths.rs` exp and sigmoid,
//! `product/` matrices and their products, `op/` one file for each other operation.

#![allow(unsafe_code)]
// The intrinsics of `std::arch` are named by the instruction; a list of them says nothing more.
#![allow(clippy::wildcard_imports)]
// Kernels read packed codes through unaligned loads, and arranged rows that start on cache lines.
#![allow(clippy::cast_ptr_alignment)]
// Between register types of one width; the target is the argument's type.
#![allow(clippy::missing_transmute_annotations)]

mod buffer;
mod lanes;
pub mod limits;
mod maths;
mod op;
mod pool;
mod product;

use flint_backend::ops::{self, Ops};
use flint_backend::{Backend, Element, Precision, Result};
use flint_weights::QuantMatrix;

pub use buffer::CpuBuffer;
pub use pool::Pool;
pub use product::CpuMatrix;

/// How products with matrices are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// fp32 inputs, 16 fp32 lanes, fused multiply-adds. The same bits on every machine and at every [`Level`].
    Lanes,
    /// Inputs rounded to bf16, codes exact in bf16, `vdpbf16ps` into fp32. Needs AVX-512 BF16.
    Dot,
}

/// Instruction set of the kernels. Changes speed, never bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Level {
    /// Portable Rust.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL, VBMI, VBMI2 and VNNI.
    Avx512,
    /// AArch64 NEON.
    Neon,
}

/// What a CPU backend is made with.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that compute, the caller's included. At least 1.
    pub threads: usize,
    /// Arithmetic of products.
    pub arithmetic: Arithmetic,
    /// Instruction set.
    pub level: Level,
}

impl Options {
    /// The fastest choice for this machine with `threads` threads.
    pub fn detect(threads: usize) -> Self {
        let level = Level::detect();
        let arithmetic = if Arithmetic::dot_is_available() { Arithmetic::Dot } else { Arithmetic::Lanes };
        Self { threads: threads.max(1), arithmetic, level }
    }
}

impl Arithmetic {
    /// Whether this CPU has the instructions of [`Arithmetic::Dot`].
    pub fn dot_is_available() -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            Level::Avx512.is_available() && std::arch::is_x86_feature_detected!("avx512bf16")
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            false
        }
    }
}

impl Level {
    /// The best level of this CPU.
    pub fn detect() -> Self {
        [Self::Avx512, Self::Avx2, Self::Neon].into_iter().find(|l| l.is_available()).unwrap_or(Self::Scalar)
    }

    /// Whether this CPU has the level's instructions.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("fma")
                    && std::arch::is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512vbmi")
                    && std::arch::is_x86_feature_detected!("avx512vbmi2")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

/// The CPU as a device.
pub struct Cpu {
    options: Options,
    pool: Pool,
    /// Scratch memory of products.
    run: product::Run,
}

impl Cpu {
    /// A backend with these options.
    ///
    /// # Errors
    /// When the CPU lacks the level's or the arithmetic's instructions.
    pub fn new(options: Options) -> Result<Self> {
        let lacks = |what: String| flint_backend::Error::Device { backend: "cpu", what };
        if !options.level.is_available() {
            return Err(lacks(format!(
                "this CPU has no {:?} instructions; choose another level",
                options.level
            )));
        }
        if options.arithmetic == Arithmetic::Dot && !Arithmetic::dot_is_available() {
            return Err(lacks("this CPU has no AVX-512 BF16; choose the fp32 arithmetic".into()));
        }
        Ok(Self { options, pool: Pool::new(options.threads), run: product::Run::default() })
    }

    /// The options in force.
    pub fn options(&self) -> Options {
        self.options
    }
}

impl Backend for Cpu {
    fn arithmetic(&self) -> String {
        match self.options.arithmetic {
            Arithmetic::Lanes => "cpu-lanes-1".into(),
            Arithmetic::Dot => "cpu-bf16dot-1".into(),
        }
    }

    fn product_element(&self) -> Element {
        self.cache_element()
    }

    fn cache_element(&self) -> Element {
        match self.options.arithmetic {
            Arithmetic::Lanes => Element::F32,
            Arithmetic::Dot => Element::Bf16,
        }
    }

    fn allocate(&mut self, element: Element, len: usize) -> Result<CpuBuffer> {
        CpuBuffer::zeros(element, len)
    }

    fn write_f32(&mut self, buffer: &CpuBuffer, first: usize, values: &[f32]) -> Result<()> {
        buffer.write(Element::F32, first, bytemuck::cast_slice(values))
    }

    fn write_u32(&mut self, buffer: &CpuBuffer, first: usize, values: &[u32]) -> Result<()> {
        buffer.write(Element::U32, first, bytemuck::cast_slice(values))
    }

    fn write_bytes(&mut self, buffer: &CpuBuffer, bytes: &[u8]) -> Result<()> {
        buffer.write(buffer.element(), 0, bytes)
    }

    fn read_f32(&mut self, buffer: &CpuBuffer, first: usize, out: &mut [f32]) -> Result<()> {
        buffer.read(Element::F32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_u32(&mut self, buffer: &CpuBuffer, first: usize, out: &mut [u32]) -> Result<()> {
        buffer.read(Element::U32, first, bytemuck::cast_slice_mut(out))
    }

    fn read_bytes(&mut self, buffer: &CpuBuffer) -> Result<Vec<u8>> {
        let mut out = vec![0; buffer.len() * buffer.element().size()];
        buffer.read(buffer.element(), 0, &mut out)?;
        Ok(out)
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<CpuMatrix> {
        CpuMatrix::single(self, parts, precision)
    }

    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<CpuMatrix> {
        CpuMatrix::stack(self, members, precision)
    }

    fn allocate_stack(
        &mut self,
        like: &[QuantMatrix],
        slots: usize,
        precision: Precision,
    ) -> Result<CpuMatrix> {
        CpuMatrix::slots(self, like, slots, precision)
    }

    fn write_member(&mut self, stack: &CpuMatrix, slot: usize, parts: &[QuantMatrix]) -> Result<()> {
        stack.write_member(slot, parts)
    }
}

macro_rules! forward {
    ($( $name:ident($args:ty) => $path:path; )*) => {
        impl Ops for Cpu {
            type Buffer = CpuBuffer;
            type Matrix = CpuMatrix;
            $( fn $name(&mut self, op: &$args) -> Result<()> { $path(self, op) } )*
        }
    };
}

forward! {
    embed(ops::Embed<CpuBuffer, CpuMatrix>) => product::embed;
    linear(ops::Linear<CpuBuffer, CpuMatrix>) => product::linear;
    head_linear(ops::HeadLinear<CpuBuffer, CpuMatrix>) => product::head_linear;
    expert_linear(ops::ExpertLinear<CpuBuffer, CpuMatrix>) => product::expert_linear;
    gather_rows(ops::GatherRows<CpuBuffer>) => op::gather_rows;
    spread_streams(ops::SpreadStreams<CpuBuffer>) => op::spread_streams;
    mean_streams(ops::MeanStreams<CpuBuffer>) => op::mean_streams;
    hc_pre(ops::HcPre<CpuBuffer, CpuMatrix>) => op::hc_pre;
    hc_post(ops::HcPost<CpuBuffer>) => op::hc_post;
    rms_norm(ops::RmsNorm<CpuBuffer>) => op::rms_norm;
    layer_norm(ops::LayerNorm<CpuBuffer>) => op::layer_norm;
    swiglu(ops::SwiGlu<CpuBuffer>) => op::swiglu;
    route(ops::Route<CpuBuffer>) => op::route;
    combine(ops::Combine<CpuBuffer>) => op::combine;
    kda_conv(ops::KdaConv<CpuBuffer>) => op::kda_conv;
    kda_prepare(ops::KdaPrepare<CpuBuffer>) => op::kda_prepare;
    kda_scan(ops::KdaScan<CpuBuffer>) => op::kda_scan;
    gated_norm(ops::GatedNorm<CpuBuffer>) => op::gated_norm;
    dsa_append(ops::DsaAppend<CpuBuffer>) => op::dsa_append;
    select_pools(ops::SelectPools<CpuBuffer>) => op::select_pools;
    attend(ops::Attend<CpuBuffer>) => op::attend;
    top_logits(ops::TopLogits<CpuBuffer>) => op::top_logits;
}
