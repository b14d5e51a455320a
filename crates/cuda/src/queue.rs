//! The queue: launches, and the tables that they read.

use bytemuck::NoUninit;
use flint_backend::{Element, Error, Result};

use crate::CudaBuffer;
use crate::buffer::{Memory, RowsF32};
use crate::kernels::Kernel;

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Grid {
    /// Blocks in x, y and z.
    pub(crate) blocks: [u32; 3],
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block in bytes; above 48 KiB too (up to what the device grants).
    pub(crate) shared: u32,
}

/// Arguments of a launch, in the order of the kernel's parameters. At most [`Args::MOST`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Args {
    cells: [u64; Args::MOST],
    count: usize,
}

impl Args {
    /// Most parameters of a kernel.
    pub(crate) const MOST: usize = 32;

    /// No arguments.
    pub(crate) fn new() -> Self {
        Self { cells: [0; Self::MOST], count: 0 }
    }

    /// A pointer to an element of a buffer.
    pub(crate) fn pointer(self, buffer: &CudaBuffer, first: usize) -> Self {
        self.u64(buffer.at(first))
    }

    /// A pointer by its device address; 0 is a null pointer.
    pub(crate) fn address(self, address: u64) -> Self {
        self.u64(address)
    }

    /// A pointer to rows: two parameters, `float*` and the `u32` stride in elements.
    pub(crate) fn rows(self, rows: &RowsF32) -> Self {
        self.u64(rows.address).u32(rows.stride)
    }

    /// A pointer to a table.
    pub(crate) fn table(self, table: Table) -> Self {
        self.u64(table.address)
    }

    /// A `u32` parameter (sizes come as `usize`).
    pub(crate) fn u32(self, value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok(), "{value} is no u32");
        self.u64(u64::from(value as u32))
    }

    /// A `float` parameter.
    pub(crate) fn f32(self, value: f32) -> Self {
        self.u64(u64::from(value.to_bits()))
    }

    /// A `u64` parameter.
    pub(crate) fn u64(mut self, value: u64) -> Self {
        debug_assert!(self.count < Self::MOST, "more than {} parameters", Self::MOST);
        if let Some(cell) = self.cells.get_mut(self.count) {
            *cell = value;
        }
        self.count += 1;
        self
    }
}

/// Values that a launch reads in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    /// Where they lie; 256-byte aligned.
    pub(crate) address: u64,
}

/// Sizes of the device that launches may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Compute capability, major times ten plus minor: 90.
    pub(crate) capability: u32,
    /// Multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Most shared memory of a block in bytes.
    pub(crate) shared_bytes: u32,
}

/// Work for the device, in program order.
pub(crate) struct Queue {
    limits: Limits,
}

fn not_yet<T>(op: &'static str) -> Result<T> {
    Err(Error::Device { backend: "cuda", what: format!("{op}: not yet") })
}

impl Queue {
    /// Sizes of the device. They may choose grids, never the order of a sum.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// Queues one kernel.
    pub(crate) fn launch(&mut self, kernel: &'static Kernel, grid: Grid, args: Args) -> Result<()> {
        let _ = (grid, args);
        not_yet(kernel.name)
    }

    /// Puts this step's metadata in device memory, readable by every later launch of the operation. Inside a step the
    /// address depends on the sequence of calls and their `capacity` (bytes, rounded up to a power of two), never on
    /// the values.
    pub(crate) fn table<T: NoUninit>(&mut self, values: &[T], capacity: usize) -> Result<Table> {
        let _ = (values, capacity);
        not_yet("table")
    }

    /// Scratch memory of at least `bytes`, kept by its name: not cleared, shared by all that use the name, so written
    /// before it is read inside one operation.
    pub(crate) fn scratch(&mut self, name: &'static str, bytes: usize) -> Result<u64> {
        let _ = (name, bytes);
        not_yet("scratch")
    }

    /// Uncleared memory for weights.
    pub(crate) fn reserve(&mut self, bytes: usize, what: &str) -> Result<Memory> {
        let _ = (bytes, what);
        not_yet("reserve")
    }

    /// Copies bytes into reserved memory (asynchronously through pinned staging; `bytes` may be reused at once).
    pub(crate) fn fill(&mut self, memory: &Memory, first_byte: usize, bytes: &[u8]) -> Result<()> {
        let _ = (memory, first_byte, bytes);
        not_yet("fill")
    }

    /// A buffer of zeros.
    pub(crate) fn allocate(&mut self, element: Element, len: usize) -> Result<CudaBuffer> {
        let _ = (element, len);
        not_yet("allocate")
    }

    /// Copies bytes to elements `first..`.
    pub(crate) fn write(
        &mut self,
        buffer: &CudaBuffer,
        element: Element,
        first: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let _ = (buffer, element, first, bytes);
        not_yet("write")
    }

    /// Waits, then copies elements `first..` out.
    pub(crate) fn read(
        &mut self,
        buffer: &CudaBuffer,
        element: Element,
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let _ = (buffer, element, first, out);
        not_yet("read")
    }

    /// Waits for everything queued.
    pub(crate) fn synchronize(&mut self) -> Result<()> {
        not_yet("synchronize")
    }
}
