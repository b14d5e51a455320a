//! The driver's library, loaded at run time: the calls that this crate makes, with the driver's own names and types.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::CudaError;

pub(crate) type Address = u64;
pub(crate) type Context = *mut c_void;
pub(crate) type StreamHandle = *mut c_void;
pub(crate) type EventHandle = *mut c_void;
pub(crate) type ModuleHandle = *mut c_void;
pub(crate) type FunctionHandle = *mut c_void;
pub(crate) type GraphHandle = *mut c_void;
pub(crate) type GraphExecHandle = *mut c_void;
pub(crate) type MemoryPool = *mut c_void;

/// What a call returns; 0 is success. Kept as a number: newer drivers have values that no list here knows.
pub(crate) type Code = c_uint;

/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_NO_DEVICE`.
pub(crate) const NO_DEVICE: Code = 100;

/// Values of the driver's enumerations that are used.
pub(crate) mod value {
    use std::ffi::{c_int, c_uint};

    pub(crate) const DEVICE_MULTIPROCESSORS: c_int = 16;
    pub(crate) const DEVICE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const DEVICE_CAPABILITY_MINOR: c_int = 76;
    pub(crate) const DEVICE_SHARED_OPT_IN: c_int = 97;
    pub(crate) const DEVICE_MEMORY_POOLS: c_int = 115;
    pub(crate) const POOL_RELEASE_THRESHOLD: c_int = 4;
    pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
    pub(crate) const EVENT_NO_TIMING: c_uint = 2;
    pub(crate) const CAPTURE_THREAD_LOCAL: c_int = 1;
    pub(crate) const FUNCTION_DYNAMIC_SHARED: c_int = 8;
    pub(crate) const FUNCTION_STATIC_SHARED: c_int = 1;
    pub(crate) const JIT_ERROR_LOG: c_uint = 5;
    pub(crate) const LAUNCH_EARLY: c_uint = 6;
    pub(crate) const JIT_ERROR_LOG_BYTES: c_uint = 6;
}

/// `CUlaunchAttribute`: an attribute whose value is one integer.
#[repr(C)]
pub(crate) struct LaunchAttribute {
    pub(crate) id: c_uint,
    pub(crate) padding: c_uint,
    pub(crate) value: c_int,
    /// The driver's union of all values takes 64 bytes, aligned to 8.
    pub(crate) rest: [c_int; 15],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    pub(crate) blocks: [c_uint; 3],
    pub(crate) threads: [c_uint; 3],
    pub(crate) shared: c_uint,
    pub(crate) stream: StreamHandle,
    pub(crate) attributes: *mut LaunchAttribute,
    pub(crate) attribute_count: c_uint,
}

macro_rules! driver_calls {
    ($( $call:ident as $symbol:literal ($($name:ident: $kind:ty),*); )*) => {
        /// The driver's calls.
        pub(crate) struct Api {
            $( pub(crate) $call: unsafe extern "C" fn($($name: $kind),*) -> Code, )*
            /// Keeps the library loaded.
            _library: Library,
        }

        impl Api {
            /// Finds every call in a loaded library.
            fn find(library: Library) -> Result<Self, CudaError> {
                $(
                    // SAFETY: the type is the one that the driver's documentation gives for the symbol.
                    let $call = *unsafe {
                        library.get::<unsafe extern "C" fn($($kind),*) -> Code>(concat!($symbol, "\0").as_bytes())
                    }
                    .map_err(|_| CudaError::MissingCall { call: $symbol })?;
                )*
                Ok(Self { $( $call, )* _library: library })
            }
        }
    };
}

driver_calls! {
    init as "cuInit" (flags: c_uint);
    driver_version as "cuDriverGetVersion" (version: *mut c_int);
    error_name as "cuGetErrorName" (code: Code, text: *mut *const c_char);
    error_text as "cuGetErrorString" (code: Code, text: *mut *const c_char);
    device_count as "cuDeviceGetCount" (count: *mut c_int);
    device as "cuDeviceGet" (device: *mut c_int, ordinal: c_int);
    device_name as "cuDeviceGetName" (name: *mut c_char, bytes: c_int, device: c_int);
    device_attribute as "cuDeviceGetAttribute" (value: *mut c_int, attribute: c_int, device: c_int);
    device_memory as "cuDeviceTotalMem_v2" (bytes: *mut usize, device: c_int);
    device_pool as "cuDeviceGetDefaultMemPool" (pool: *mut MemoryPool, device: c_int);
    pool_set as "cuMemPoolSetAttribute" (pool: MemoryPool, attribute: c_int, value: *mut c_void);
    context_retain as "cuDevicePrimaryCtxRetain" (context: *mut Context, device: c_int);
    context_release as "cuDevicePrimaryCtxRelease_v2" (device: c_int);
    context_set as "cuCtxSetCurrent" (context: Context);
    memory_info as "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    memory_allocate as "cuMemAlloc_v2" (address: *mut Address, bytes: usize);
    memory_free as "cuMemFree_v2" (address: Address);
    memory_allocate_queued as "cuMemAllocAsync" (address: *mut Address, bytes: usize, stream: StreamHandle);
    memory_free_queued as "cuMemFreeAsync" (address: Address, stream: StreamHandle);
    host_allocate as "cuMemHostAlloc" (start: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free as "cuMemFreeHost" (start: *mut c_void);
    copy_in as "cuMemcpyHtoDAsync_v2" (to: Address, from: *const c_void, bytes: usize, stream: StreamHandle);
    copy_out as "cuMemcpyDtoHAsync_v2" (to: *mut c_void, from: Address, bytes: usize, stream: StreamHandle);
    copy_within as "cuMemcpyDtoDAsync_v2" (to: Address, from: Address, bytes: usize, stream: StreamHandle);
    fill_bytes as "cuMemsetD8Async" (to: Address, byte: u8, bytes: usize, stream: StreamHandle);
    stream_create as "cuStreamCreate" (stream: *mut StreamHandle, flags: c_uint);
    stream_destroy as "cuStreamDestroy_v2" (stream: StreamHandle);
    stream_wait as "cuStreamSynchronize" (stream: StreamHandle);
    capture_begin as "cuStreamBeginCapture_v2" (stream: StreamHandle, mode: c_int);
    capture_end as "cuStreamEndCapture" (stream: StreamHandle, graph: *mut GraphHandle);
    event_create as "cuEventCreate" (event: *mut EventHandle, flags: c_uint);
    event_destroy as "cuEventDestroy_v2" (event: EventHandle);
    event_record as "cuEventRecord" (event: EventHandle, stream: StreamHandle);
    event_wait as "cuEventSynchronize" (event: EventHandle);
    module_load as "cuModuleLoadDataEx" (module: *mut ModuleHandle, image: *const c_void, count: c_uint, options: *mut c_uint, values: *mut *mut c_void);
    module_unload as "cuModuleUnload" (module: ModuleHandle);
    module_function as "cuModuleGetFunction" (function: *mut FunctionHandle, module: ModuleHandle, name: *const c_char);
    function_attribute as "cuFuncGetAttribute" (value: *mut c_int, attribute: c_int, function: FunctionHandle);
    function_set as "cuFuncSetAttribute" (function: FunctionHandle, attribute: c_int, value: c_int);
    launch as "cuLaunchKernel" (function: FunctionHandle, x: c_uint, y: c_uint, z: c_uint, threads_x: c_uint, threads_y: c_uint, threads_z: c_uint, shared: c_uint, stream: StreamHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    launch_with as "cuLaunchKernelEx" (config: *const LaunchConfig, function: FunctionHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void);
    graph_instantiate as "cuGraphInstantiateWithFlags" (exec: *mut GraphExecHandle, graph: GraphHandle, flags: u64);
    graph_destroy as "cuGraphDestroy" (graph: GraphHandle);
    graph_exec_destroy as "cuGraphExecDestroy" (exec: GraphExecHandle);
    graph_launch as "cuGraphLaunch" (exec: GraphExecHandle, stream: StreamHandle);
}

/// Names of the driver's library.
pub(crate) const LIBRARIES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Oldest driver, as `cuDriverGetVersion` counts: CUDA 12.0.
const OLDEST: c_int = 12_000;

impl Api {
    /// Loads the driver and initialises it.
    pub(crate) fn load() -> Result<Self, CudaError> {
        let mut said = String::new();
        let mut loaded = None;
        for name in LIBRARIES {
            // SAFETY: the system's own driver library; its initialisers are meant to run in any process.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    loaded = Some(library);
                    break;
                }
                // The first name's message is the telling one.
                Err(error) if said.is_empty() => said = error.to_string(),
                Err(_) => {}
            }
        }
        let library = loaded.ok_or(CudaError::NoDriver { said })?;
        Self::check_version(&library)?;
        let api = Self::find(library)?;
        // SAFETY: no argument but the flags, which must be zero.
        let code = unsafe { (api.init)(0) };
        if code == NO_DEVICE {
            return Err(CudaError::NoDevice);
        }
        api.check("cuInit", code)?;
        Ok(api)
    }

    /// Asks for the version before anything else, so that an old driver is named and not one of its missing calls.
    fn check_version(library: &Library) -> Result<(), CudaError> {
        const CALL: &str = "cuDriverGetVersion";
        // SAFETY: the type is the documented one.
        let call =
            unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"cuDriverGetVersion\0") }
                .map_err(|_| CudaError::MissingCall { call: CALL })?;
        let mut found = 0;
        // SAFETY: writes one integer; needs no initialisation.
        let code = unsafe { call(&raw mut found) };
        if code != 0 {
            return Err(CudaError::Call { call: CALL, code: format!("error {code}"), during: String::new() });
        }
        if found < OLDEST {
            return Err(CudaError::OldDriver { found: version_text(found), needed: version_text(OLDEST) });
        }
        Ok(())
    }

    /// The driver's CUDA version: 12080 for 12.8.
    pub(crate) fn version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        self.check("cuDriverGetVersion", unsafe { (self.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    /// An error of a call that did not return success.
    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        Err(CudaError::Call { call, code: self.describe(code), during: String::new() })
    }

    /// A code's name and the driver's sentence on it.
    fn describe(&self, code: Code) -> String {
        let text = |call: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut start = std::ptr::null();
            // SAFETY: the driver writes a pointer to a string of its own, or null for a code that it does not know.
            unsafe {
                if call(code, &raw mut start) == 0 && !start.is_null() {
                    return Some(CStr::from_ptr(start).to_string_lossy().into_owned());
                }
            }
            None
        };
        match (text(self.error_name), text(self.error_text)) {
            (Some(name), Some(sentence)) => format!("{name} ({sentence})"),
            (Some(name), None) => name,
            _ => format!("error {code}"),
        }
    }
}

/// `12080` as `12.8`.
pub(crate) fn version_text(version: c_int) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
