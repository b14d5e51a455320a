//! Graphs: a list of launches that the driver starts at once.

use std::sync::Arc;

use super::api::{GraphExecHandle, value};
use super::device::Device;
use super::stream::Stream;
use crate::CudaError;

/// Launches that were captured from a stream.
pub(crate) struct Graph {
    device: Arc<Device>,
    handle: GraphExecHandle,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures what `work` puts on the stream; nothing of it runs.
    pub(crate) fn capture(
        stream: &Stream,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let api = device.api;
        // SAFETY: the stream lives and is not capturing: captures end below before anything else can begin one.
        let code = unsafe { (api.capture_begin)(stream.handle(), value::CAPTURE_THREAD_LOCAL) };
        device.check("cuStreamBeginCapture", code)?;
        let queued = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whatever `work` did.
        let ended =
            device.check("cuStreamEndCapture", unsafe { (api.capture_end)(stream.handle(), &raw mut graph) });
        queued?;
        ended?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle. The graph is not needed once it is instantiated.
        let code = unsafe { (api.graph_instantiate)(&raw mut handle, graph, 0) };
        // SAFETY: made by the capture.
        let _ = unsafe { (api.graph_destroy)(graph) };
        device.check("cuGraphInstantiate", code)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Puts its launches on a stream.
    ///
    /// # Safety
    /// Every address in its launches' arguments is valid.
    pub(crate) unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: as the caller vouches.
        let code = unsafe { (self.device.api.graph_launch)(self.handle, stream.handle()) };
        self.device.check("cuGraphLaunch", code)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: made in `capture`; the driver keeps what still runs.
        let _ = unsafe { (self.device.api.graph_exec_destroy)(self.handle) };
    }
}
