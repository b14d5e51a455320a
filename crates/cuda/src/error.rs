//! Why a CUDA device cannot be used, or failed.

/// Why there is no CUDA device, or what it refused. Each names what was found and the remedy.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error("no NVIDIA driver answers ({said}); install one for CUDA 12.0 or newer, or use --device cpu")]
    NoDriver {
        /// The loader's message.
        said: String,
    },
    /// The driver is too old.
    #[error(
        "the NVIDIA driver is for CUDA {found}, and {needed} or newer is needed; update the driver, or use --device cpu"
    )]
    OldDriver {
        /// Its version.
        found: String,
        /// The oldest that would do.
        needed: String,
    },
    /// The driver lacks a call.
    #[error("the NVIDIA driver has no {call}; update the driver, or use --device cpu")]
    MissingCall {
        /// The call.
        call: &'static str,
    },
    /// No device.
    #[error(
        "the NVIDIA driver finds no device; check that one is visible to this process (nvidia-smi), or use --device cpu"
    )]
    NoDevice,
    /// No device of this number.
    #[error("there is no CUDA device {ordinal}: the driver lists {count}, from 0")]
    NoSuchDevice {
        /// Asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is too old.
    #[error(
        "{name} has compute capability {found}, and 8.0 or newer is needed (Ampere); choose another device, or use --device cpu"
    )]
    OldDevice {
        /// The device.
        name: String,
        /// Its capability.
        found: String,
    },
    /// Memory ran out.
    #[error(
        "the device could not give {bytes} bytes for {what}: {free} of {total} bytes are free; close other programs on it, or lower --context or --parallel"
    )]
    Memory {
        /// Asked for.
        bytes: usize,
        /// What for.
        what: String,
        /// Free bytes.
        free: usize,
        /// All of the device's bytes.
        total: usize,
    },
    /// No code of a kernel suits the device.
    #[error(
        "no code of {file} for compute capability {capability} is in the program, and it could not be compiled: {why}; install NVRTC (package nvidia-cuda-nvrtc-cu12, or the CUDA toolkit), or use a release of the program"
    )]
    NoCode {
        /// The kernels' file.
        file: &'static str,
        /// The device's.
        capability: String,
        /// What was tried.
        why: String,
    },
    /// A file does not compile, or the driver refused its code.
    #[error("{file}: {log}")]
    Code {
        /// The kernels' file.
        file: &'static str,
        /// The compiler's words.
        log: String,
    },
    /// A call failed.
    #[error("{call}: {code}{during}")]
    Call {
        /// The driver's call.
        call: &'static str,
        /// Its error.
        code: String,
        /// What was going on, empty or with its own separator.
        during: String,
    },
}

impl CudaError {
    /// Adds the names of the kernels that were queued last: the likely culprits of a failure that a wait reports.
    pub(crate) fn after<'a>(self, kernels: impl Iterator<Item = &'a str>) -> Self {
        match self {
            Self::Call { call, code, during } if during.is_empty() => {
                let names: Vec<&str> = kernels.collect();
                let during = if names.is_empty() {
                    String::new()
                } else {
                    format!("; the last kernels queued were {}", names.join(", "))
                };
                Self::Call { call, code, during }
            }
            other => other,
        }
    }
}

impl From<CudaError> for flint_backend::Error {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Memory { bytes, what, .. } => Self::OutOfMemory { backend: "cuda", bytes, what },
            other => Self::Device { backend: "cuda", what: other.to_string() },
        }
    }
}
