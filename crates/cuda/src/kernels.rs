//! Which kernels there are and where their code comes from.

/// A kernel: an `extern "C" __global__` function of a file of `kernels/`. Declared as a `static` next to its launch.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The function's name, unique in the crate.
    pub(crate) name: &'static str,
    /// The file of `kernels/` that defines it: `norms.cu`.
    pub(crate) file: &'static str,
}

impl Kernel {
    /// The kernel `name` of `kernels/<file>`.
    pub(crate) const fn new(name: &'static str, file: &'static str) -> Self {
        Self { name, file }
    }
}
