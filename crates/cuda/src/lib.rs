//! The CUDA backend.
//!
//! One arithmetic, `cuda-mma-1`: inputs of products rounded to bf16, codes exact in bf16, tensor cores into fp32 with an
//! order of sums that a matrix's shape fixes; everything else fp32 over fixed trees. The driver is loaded at run time.
//!
//! `driver/` the driver's calls, `kernels.rs` how a kernel's code is found, `queue.rs` launches, tables and graphs,
//! `buffer.rs` memory, `product/` matrices and their products, `op/` one file for each other operation.

#![allow(unsafe_code)]

mod backend;
mod buffer;
mod driver;
mod error;
mod kernels;
mod limits;
mod matrix;
mod op;
mod product;
pub mod profiler;
mod queue;

pub use backend::{Cuda, Options};
pub use buffer::CudaBuffer;
pub use driver::{DeviceInfo, devices};
pub use error::CudaError;
pub use limits::DeviceLimits;
pub use matrix::CudaMatrix;
pub use queue::Counts;
