//! Device memory and pinned host memory.

use std::ffi::c_void;
use std::sync::Arc;

use super::device::{Device, Freed};
use super::stream::Stream;
use crate::CudaError;

/// Bytes on the device. When dropped they are freed behind everything that was queued before.
#[derive(Debug)]
pub(crate) struct Memory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
    queued: bool,
}

impl Memory {
    /// Uncleared memory from the device itself: for weights, which stay.
    pub(crate) fn lasting(device: &Arc<Device>, bytes: usize, what: &str) -> Result<Self, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: writes one address.
            let code = unsafe { (device.api.memory_allocate)(&raw mut address, bytes) };
            device.check_allocation("cuMemAlloc", code, bytes, what)?;
        }
        Ok(Self { device: device.clone(), address, bytes, queued: false })
    }

    /// Uncleared memory from the stream's pool: for what comes and goes. Usable by work on that stream alone.
    pub(crate) fn passing(stream: &Stream, bytes: usize, what: &str) -> Result<Self, CudaError> {
        let device = stream.device();
        if !device.pools || bytes == 0 {
            return Self::lasting(device, bytes, what);
        }
        let mut address = 0;
        // SAFETY: writes one address; the stream lives.
        let code = unsafe { (device.api.memory_allocate_queued)(&raw mut address, bytes, stream.handle()) };
        device.check_allocation("cuMemAllocAsync", code, bytes, what)?;
        Ok(Self { device: device.clone(), address, bytes, queued: true })
    }

    /// Device address of a byte of it (or just behind it).
    pub(crate) fn at(&self, byte: usize) -> u64 {
        debug_assert!(byte <= self.bytes, "byte {byte} of {}", self.bytes);
        self.address + byte as u64
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.address != 0 {
            self.device.leave(Freed { address: self.address, queued: self.queued });
        }
    }
}

/// Host memory that the device copies from and to without help.
pub(crate) struct Pinned {
    device: Arc<Device>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeroed pinned memory.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (device.api.host_allocate)(&raw mut start, bytes.max(1), 0) };
        device.check("cuMemHostAlloc", code).map_err(|error| match error {
            CudaError::Call { call, code, .. } => CudaError::Call {
                call,
                code,
                during: format!(", asked for {bytes} bytes of pinned host memory"),
            },
            other => other,
        })?;
        let start = start.cast::<u8>();
        // SAFETY: the driver gave that many bytes; a slice of them needs them initialised.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { device: device.clone(), start, bytes })
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where byte `first` lies.
    pub(super) fn address(&self, first: usize) -> *const u8 {
        self.start.wrapping_add(first)
    }

    /// The bytes. No copy to or from them may be under way.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: owned and initialised; callers wait for copies by events.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: allocated in `new`. The driver waits for copies that use it.
        let _ = unsafe { (self.device.api.host_free)(self.start.cast()) };
    }
}
