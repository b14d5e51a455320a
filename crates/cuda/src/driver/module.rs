//! Loaded code and its functions.

use std::ffi::{CStr, CString, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::api::{FunctionHandle, ModuleHandle, value};
use super::device::Device;
use crate::CudaError;

/// Bytes for the driver's words on code that it refuses.
const LOG_BYTES: usize = 8 << 10;

/// Code on the device.
pub(crate) struct Module {
    device: Arc<Device>,
    handle: ModuleHandle,
}

// SAFETY: as for streams.
unsafe impl Send for Module {}

impl Module {
    /// Loads a cubin, or PTX that the driver compiles. `file` is its name in errors.
    pub(crate) fn load(device: &Arc<Device>, file: &'static str, code: &[u8]) -> Result<Self, CudaError> {
        // PTX is text that must end with a zero.
        let mut image = code.to_vec();
        image.push(0);
        let mut log = vec![0u8; LOG_BYTES];
        let mut options = [value::JIT_ERROR_LOG, value::JIT_ERROR_LOG_BYTES];
        // The size is passed in the pointer itself, as the driver wants it.
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES - 1)];
        let mut handle = std::ptr::null_mut();
        // SAFETY: the image ends with a zero; both option arrays have two entries; the log has the size given.
        let status = unsafe {
            (device.api.module_load)(
                &raw mut handle,
                image.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        device.check("cuModuleLoadData", status).map_err(|error| {
            let said = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
            CudaError::Code { file, log: format!("{error} {}", said.trim()).trim().to_owned() }
        })?;
        Ok(Self { device: device.clone(), handle })
    }

    /// A function by its name.
    pub(crate) fn function(&self, file: &'static str, name: &str) -> Result<Function, CudaError> {
        let missing = |why: String| CudaError::Code { file, log: format!("kernel {name}: {why}") };
        let text = CString::new(name).map_err(|error| missing(error.to_string()))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the module lives; the name ends with a zero.
        let code = unsafe { (self.device.api.module_function)(&raw mut handle, self.handle, text.as_ptr()) };
        self.device.check("cuModuleGetFunction", code).map_err(|error| missing(error.to_string()))?;
        let mut fixed = 0;
        // SAFETY: writes one integer.
        let code = unsafe {
            (self.device.api.function_attribute)(&raw mut fixed, value::FUNCTION_STATIC_SHARED, handle)
        };
        self.device.check("cuFuncGetAttribute", code)?;
        Ok(Function {
            device: self.device.clone(),
            handle,
            fixed_shared: u32::try_from(fixed).unwrap_or(0),
            granted: AtomicU32::new(0),
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: loaded in `load`; its functions are dropped with the queue that holds both.
        let _ = unsafe { (self.device.api.module_unload)(self.handle) };
    }
}

/// A kernel that can be launched.
pub(crate) struct Function {
    device: Arc<Device>,
    handle: FunctionHandle,
    fixed_shared: u32,
    granted: AtomicU32,
}

// SAFETY: as for streams.
unsafe impl Send for Function {}

impl Function {
    /// Dynamic shared memory of a block that every kernel may have without asking.
    const COMMON_SHARED: u32 = 48 << 10;

    /// The driver's handle.
    pub(super) fn handle(&self) -> FunctionHandle {
        self.handle
    }

    /// Asks for `bytes` of dynamic shared memory, once, where they are more than usual.
    pub(crate) fn grant_shared(&self, bytes: u32) -> Result<(), CudaError> {
        if bytes + self.fixed_shared <= Self::COMMON_SHARED || bytes <= self.granted.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the function lives as long as its module.
        let code = unsafe {
            (self.device.api.function_set)(
                self.handle,
                value::FUNCTION_DYNAMIC_SHARED,
                i32::try_from(bytes).unwrap_or(i32::MAX),
            )
        };
        self.device.check("cuFuncSetAttribute", code)?;
        self.granted.store(bytes, Ordering::Relaxed);
        Ok(())
    }
}
