//! Streams and events.

use std::ffi::c_void;
use std::sync::Arc;

use super::api::{EventHandle, LaunchAttribute, LaunchConfig, StreamHandle, value};
use super::device::Device;
use super::memory::{Memory, Pinned};
use super::module::Function;
use crate::CudaError;
use crate::queue::Grid;

/// Work in order.
pub(crate) struct Stream {
    device: Arc<Device>,
    handle: StreamHandle,
}

// SAFETY: a stream may be used from any thread whose context is current; callers bind it.
unsafe impl Send for Stream {}

impl Stream {
    /// A new stream.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (device.api.stream_create)(&raw mut handle, value::STREAM_NON_BLOCKING) };
        device.check("cuStreamCreate", code)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Frees memory whose handles are gone, behind the stream's work.
    pub(crate) fn free_left(&self) -> Result<(), CudaError> {
        self.device.free_left(self.handle)
    }

    /// Waits for everything on it.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        self.device.check("cuStreamSynchronize", unsafe { (self.device.api.stream_wait)(self.handle) })
    }

    /// Fills device memory with zeros.
    pub(crate) fn clear(&self, to: &Memory) -> Result<(), CudaError> {
        if to.bytes() == 0 {
            return Ok(());
        }
        // SAFETY: the range is the whole allocation, which outlives the work (see `Memory`).
        let code = unsafe { (self.device.api.fill_bytes)(to.at(0), 0, to.bytes(), self.handle) };
        self.device.check("cuMemsetD8Async", code)
    }

    /// Copies one allocation over the start of another.
    pub(crate) fn copy_within(&self, to: &Memory, from: &Memory) -> Result<(), CudaError> {
        let bytes = to.bytes().min(from.bytes());
        // SAFETY: both ranges lie in their allocations, which outlive the work (see `Memory`).
        let code = unsafe { (self.device.api.copy_within)(to.at(0), from.at(0), bytes, self.handle) };
        self.device.check("cuMemcpyDtoDAsync", code)
    }

    /// Copies the first `bytes` of pinned memory behind `first` to a device address.
    ///
    /// # Safety
    /// The device range lies inside one allocation, and nobody changes the pinned bytes before the copy has run.
    pub(crate) unsafe fn copy_in(
        &self,
        to: u64,
        from: &Pinned,
        first: usize,
        bytes: usize,
    ) -> Result<(), CudaError> {
        debug_assert!(first + bytes <= from.bytes());
        // SAFETY: the host range was checked, the caller vouches for the rest.
        let code = unsafe {
            (self.device.api.copy_in)(to, from.address(first).cast::<c_void>(), bytes, self.handle)
        };
        self.device.check("cuMemcpyHtoDAsync", code)
    }

    /// Copies `bytes` from a device address to the start of pinned memory.
    ///
    /// # Safety
    /// The device range lies inside one allocation, and nobody reads the pinned bytes before the copy has run.
    pub(crate) unsafe fn copy_out(&self, to: &mut Pinned, from: u64, bytes: usize) -> Result<(), CudaError> {
        debug_assert!(bytes <= to.bytes());
        // SAFETY: the host range was checked, the caller vouches for the rest.
        let code = unsafe {
            (self.device.api.copy_out)(to.address(0).cast::<c_void>().cast_mut(), from, bytes, self.handle)
        };
        self.device.check("cuMemcpyDtoHAsync", code)
    }

    /// Launches a kernel. Each cell holds one argument in its first bytes. An `early` one may begin while the launch before
    /// it ends (programmatic dependent launch).
    ///
    /// # Safety
    /// The cells are the kernel's parameters, and every address in them is valid for what the kernel does. The launch
    /// before an early one is a kernel of this stream, and the early kernel waits for it where it must.
    pub(crate) unsafe fn launch(
        &self,
        function: &Function,
        grid: &Grid,
        cells: &[u64],
        early: bool,
    ) -> Result<(), CudaError> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); crate::queue::Args::MOST];
        for (pointer, cell) in pointers.iter_mut().zip(cells) {
            *pointer = std::ptr::from_ref(cell).cast_mut().cast();
        }
        if early {
            let mut attribute =
                LaunchAttribute { id: value::LAUNCH_EARLY, padding: 0, value: 1, rest: [0; 15] };
            let config = LaunchConfig {
                blocks: grid.blocks,
                threads: [grid.threads, 1, 1],
                shared: grid.shared,
                stream: self.handle,
                attributes: &raw mut attribute,
                attribute_count: 1,
            };
            // SAFETY: the driver copies configuration and parameters before it returns; the caller vouches for the rest.
            let code = unsafe {
                (self.device.api.launch_with)(
                    &raw const config,
                    function.handle(),
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            return self.device.check("cuLaunchKernelEx", code);
        }
        let [x, y, z] = grid.blocks;
        // SAFETY: the driver copies the parameters before it returns; the caller vouches for their meaning.
        let code = unsafe {
            (self.device.api.launch)(
                function.handle(),
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                self.handle,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.device.check("cuLaunchKernel", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // Memory of handles that are gone is freed in the stream's order, while there is a stream.
        let _ = self.free_left();
        let _ = self.wait();
        // SAFETY: created in `new`.
        let _ = unsafe { (self.device.api.stream_destroy)(self.handle) };
    }
}

/// A point in a stream's work.
pub(crate) struct Event {
    device: Arc<Device>,
    handle: EventHandle,
}

// SAFETY: as for streams.
unsafe impl Send for Event {}

impl Event {
    /// An event that has happened.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { (device.api.event_create)(&raw mut handle, value::EVENT_NO_TIMING) };
        device.check("cuEventCreate", code)?;
        Ok(Self { device: device.clone(), handle })
    }

    /// Moves it behind everything that is on the stream now.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live.
        let code = unsafe { (self.device.api.event_record)(self.handle, stream.handle) };
        self.device.check("cuEventRecord", code)
    }

    /// Waits until it has happened.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the event lives.
        self.device.check("cuEventSynchronize", unsafe { (self.device.api.event_wait)(self.handle) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: created in `new`.
        let _ = unsafe { (self.device.api.event_destroy)(self.handle) };
    }
}
