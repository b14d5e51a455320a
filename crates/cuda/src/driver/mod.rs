//! The driver behind typed, safe wrappers. Nothing outside this folder calls it.

mod api;
mod device;
mod graph;
mod memory;
mod module;
mod nvrtc;
mod stream;

pub(crate) use api::LIBRARIES;
pub(crate) use device::{Device, capability_text};
pub use device::{DeviceInfo, devices};
pub(crate) use graph::Graph;
pub(crate) use memory::{Memory, Pinned};
pub(crate) use module::{Function, Module};
pub(crate) use nvrtc::compile;
pub(crate) use stream::{Event, Stream};
