//! Devices: what the driver lists, and one that is in use.

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock};

use super::api::{Address, Api, Code, Context, MemoryPool, OUT_OF_MEMORY, StreamHandle, value};
use crate::CudaError;

/// Devices that know programmatic dependent launches, and drivers that keep them in graphs (CUDA 12.3).
const EARLY_CAPABILITY: u32 = 90;
const EARLY_DRIVER: c_int = 12_030;

/// A device that the driver lists.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its number.
    pub ordinal: usize,
    /// The maker's name.
    pub name: String,
    /// All of its memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability, major times ten plus minor: 90.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// CUDA version of the driver: `12.8`.
    pub driver: String,
}

/// The driver's calls: loaded once in a process, since a library that was refused stays refused.
fn api() -> Result<&'static Api, CudaError> {
    static API: OnceLock<Result<Api, CudaError>> = OnceLock::new();
    API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
}

/// All devices that the driver lists. Uses no device memory.
///
/// # Errors
/// Without a driver, with one that is too old, or without a device.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    let api = api()?;
    let mut count = 0;
    // SAFETY: writes one integer.
    api.check("cuDeviceGetCount", unsafe { (api.device_count)(&raw mut count) })?;
    if count <= 0 {
        return Err(CudaError::NoDevice);
    }
    (0..count as usize).map(|ordinal| info(api, ordinal)).collect()
}

fn handle(api: &Api, ordinal: usize) -> Result<c_int, CudaError> {
    let mut device = 0;
    // SAFETY: writes one integer.
    api.check("cuDeviceGet", unsafe { (api.device)(&raw mut device, ordinal as c_int) })?;
    Ok(device)
}

fn attribute(api: &Api, device: c_int, attribute: c_int) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (api.device_attribute)(&raw mut value, attribute, device) };
    api.check("cuDeviceGetAttribute", code)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn info(api: &Api, ordinal: usize) -> Result<DeviceInfo, CudaError> {
    let device = handle(api, ordinal)?;
    let mut name: [c_char; 128] = [0; 128];
    // SAFETY: writes at most 128 bytes, a terminating zero among them.
    api.check("cuDeviceGetName", unsafe { (api.device_name)(name.as_mut_ptr(), 127, device) })?;
    // SAFETY: the last byte is zero in any case.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0usize;
    // SAFETY: writes one size.
    api.check("cuDeviceTotalMem", unsafe { (api.device_memory)(&raw mut memory_bytes, device) })?;
    Ok(DeviceInfo {
        ordinal,
        name,
        memory_bytes: memory_bytes as u64,
        capability: attribute(api, device, value::DEVICE_CAPABILITY_MAJOR)? * 10
            + attribute(api, device, value::DEVICE_CAPABILITY_MINOR)?,
        multiprocessors: attribute(api, device, value::DEVICE_MULTIPROCESSORS)?,
        shared_bytes: attribute(api, device, value::DEVICE_SHARED_OPT_IN)?,
        driver: super::api::version_text(api.version()?),
    })
}

/// `90` as `9.0`.
pub(crate) fn capability_text(capability: u32) -> String {
    format!("{}.{}", capability / 10, capability % 10)
}

/// Memory that nobody holds any more, to be freed when nothing that is queued can reach it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) address: Address,
    /// Whether it came from the stream's pool.
    pub(crate) queued: bool,
}

/// A device in use: its context, kept until the last handle of its memory is gone.
pub(crate) struct Device {
    pub(crate) api: &'static Api,
    info: DeviceInfo,
    handle: c_int,
    context: Context,
    /// Whether allocations can be ordered in a stream.
    pub(crate) pools: bool,
    /// Whether a kernel can begin while the one before it ends, in graphs too.
    pub(crate) early: bool,
    /// Handles may be dropped on any thread and at any time, so they only leave their address here.
    freed: Mutex<Vec<Freed>>,
}

// SAFETY: a context may be used from any thread that makes it current; the list of freed memory is behind a lock.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {})", self.info.ordinal, self.info.name)
    }
}

impl Device {
    /// Opens device `ordinal`.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let listed = devices()?;
        let count = listed.len();
        let info = listed.into_iter().nth(ordinal).ok_or(CudaError::NoSuchDevice { ordinal, count })?;
        if info.capability < 80 {
            let found = capability_text(info.capability);
            return Err(CudaError::OldDevice { name: info.name, found });
        }
        let api = api()?;
        let handle = handle(api, ordinal)?;
        let pools = attribute(api, handle, value::DEVICE_MEMORY_POOLS)? != 0;
        let early = info.capability >= EARLY_CAPABILITY && api.version()? >= EARLY_DRIVER;
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; released when the device is dropped.
        api.check("cuDevicePrimaryCtxRetain", unsafe { (api.context_retain)(&raw mut context, handle) })?;
        let opened = Self { api, info, handle, context, pools, early, freed: Mutex::default() };
        opened.bind()?;
        if pools {
            opened.keep_pool()?;
        }
        Ok(Arc::new(opened))
    }

    /// Tells the pool to keep what was freed: sequences come and go, and giving pages back to the system costs more
    /// than a token.
    fn keep_pool(&self) -> Result<(), CudaError> {
        let mut pool: MemoryPool = std::ptr::null_mut();
        let mut threshold = u64::MAX;
        // SAFETY: writes one handle.
        self.check("cuDeviceGetDefaultMemPool", unsafe {
            (self.api.device_pool)(&raw mut pool, self.handle)
        })?;
        // SAFETY: the attribute's value is one 64-bit integer.
        self.check("cuMemPoolSetAttribute", unsafe {
            (self.api.pool_set)(pool, value::POOL_RELEASE_THRESHOLD, (&raw mut threshold).cast())
        })
    }

    /// What the driver says of it.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Makes the context current on this thread; every entry from outside does.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuCtxSetCurrent", unsafe { (self.api.context_set)(self.context) })
    }

    /// An error of a call that did not return success.
    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        self.api.check(call, code)
    }

    /// Free and all memory in bytes, as the driver sees it now.
    pub(crate) fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        self.check("cuMemGetInfo", unsafe { (self.api.memory_info)(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// Names the memory where an allocation failed for want of it.
    pub(crate) fn check_allocation(
        &self,
        call: &'static str,
        code: Code,
        bytes: usize,
        what: &str,
    ) -> Result<(), CudaError> {
        if code != OUT_OF_MEMORY {
            return self.check(call, code);
        }
        let (free, total) = self.memory().unwrap_or((0, 0));
        Err(CudaError::Memory { bytes, what: what.to_owned(), free, total })
    }

    /// Leaves memory to be freed.
    pub(super) fn leave(&self, freed: Freed) {
        self.freed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(freed);
    }

    /// Frees what was left. The caller has queued on `stream` all work that may still reach it.
    pub(crate) fn free_left(&self, stream: StreamHandle) -> Result<(), CudaError> {
        let left = std::mem::take(&mut *self.freed.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        for Freed { address, queued } in left {
            // SAFETY: the address came from the matching allocation and its only handle is gone. A queued release is
            // ordered behind the work on the stream; the other waits for the device.
            let code = unsafe {
                if queued {
                    (self.api.memory_free_queued)(address, stream)
                } else {
                    (self.api.memory_free)(address)
                }
            };
            self.check("cuMemFree", code)?;
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Errors have nobody to go to here; after a fault every call fails and the process is about to end.
        let _ = self.bind();
        let _ = self.free_left(std::ptr::null_mut());
        // SAFETY: retained once in `open`; nothing that needs it is left.
        let _ = unsafe { (self.api.context_release)(self.handle) };
    }
}
