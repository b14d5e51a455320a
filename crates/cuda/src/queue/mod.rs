//! The queue: launches, the tables that they read, copies, and the graphs of steps that come again.
//!
//! Outside a step a launch goes to the stream at once. Inside a step launches and tables are collected and run at its
//! end, or when the host reads: by a graph when the same list of launches came before. The list holds kernels, grids
//! and arguments; what moves from step to step (positions, pages, token ids) stands in tables.

mod graphs;
mod launch;
mod staging;
mod tables;

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use bytemuck::NoUninit;
use flint_backend::{Element, Error, Result};

use crate::driver::{Device, DeviceInfo, Graph, Memory, Stream};
use crate::kernels::{Kernel, Kernels};
use crate::{CudaBuffer, CudaError};
use graphs::{Graphs, Plan};
use launch::Script;
pub(crate) use launch::{Args, Grid};
use staging::Staging;
use tables::Tables;

/// Bytes of a write that is collected in a step; larger ones end the launches collected so far.
const COLLECTED_WRITE: usize = 64 << 10;
/// Most blocks of a grid in y and z; x has room for any.
const MOST_BLOCKS_YZ: u32 = 65_535;
/// Kernels that an error names.
const NAMED: usize = 6;

static COPY_WORDS: Kernel = Kernel::new("copy_words", "copy.cu").early();

/// Values that a launch reads in device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    /// Where they lie; 256-byte aligned.
    pub(crate) address: u64,
}

/// Sizes of the device that launches may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Most shared memory of a block in bytes.
    pub(crate) shared_bytes: u32,
    /// Compute capability, major times ten plus minor.
    pub(crate) capability: u32,
}

/// What the queue did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels that ran, those of graphs too.
    pub kernels: u64,
    /// Graphs that were made.
    pub graphs_made: u64,
    /// Graphs that were launched.
    pub graphs_launched: u64,
    /// Bytes of tables that were uploaded.
    pub table_bytes: u64,
}

/// Work for the device, in program order. Fields are dropped in their order: whatever uses the stream before it.
pub(crate) struct Queue {
    graphs: Graphs,
    script: Script,
    /// Whether launches are collected.
    step: bool,
    use_graphs: bool,
    /// Whether kernels may begin while the one before them ends.
    early: bool,
    /// Numbers of the last kernels.
    last: VecDeque<u32>,
    counts: Counts,
    scratch: HashMap<&'static str, Memory>,
    tables: Tables,
    staging: Staging,
    kernels: Kernels,
    stream: Stream,
    device: Arc<Device>,
}

impl Queue {
    /// A queue on device `ordinal`; compiled kernels are kept in `cache`.
    pub(crate) fn new(
        ordinal: usize,
        use_graphs: bool,
        early: bool,
        cache: Option<PathBuf>,
    ) -> std::result::Result<Self, CudaError> {
        let device = Device::open(ordinal)?;
        let stream = Stream::new(&device)?;
        Ok(Self {
            graphs: Graphs::default(),
            script: Script::default(),
            step: false,
            use_graphs,
            early: early && device.early,
            last: VecDeque::with_capacity(NAMED),
            counts: Counts::default(),
            scratch: HashMap::new(),
            tables: Tables::new(&device)?,
            staging: Staging::new(&device),
            kernels: Kernels::new(&device, cache),
            stream,
            device,
        })
    }

    /// The device.
    pub(crate) fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The stream on which everything runs.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Free and all memory of the device in bytes.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.device.bind()?;
        Ok(self.device.memory()?)
    }

    /// What it did so far.
    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Sizes of the device. They may choose grids, never the order of a sum.
    pub(crate) fn limits(&self) -> Limits {
        let &DeviceInfo { multiprocessors, shared_bytes, capability, .. } = self.device.info();
        Limits { multiprocessors, shared_bytes, capability }
    }

    /// Queues one kernel. A grid without blocks queues nothing.
    pub(crate) fn launch(&mut self, kernel: &'static Kernel, grid: Grid, args: Args) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        if grid.blocks[1..].iter().any(|&blocks| blocks > MOST_BLOCKS_YZ) {
            return Err(Error::Shape {
                op: kernel.name,
                what: format!("a grid of {:?} blocks", grid.blocks),
            });
        }
        let number = self.kernels.number(kernel)?;
        self.kernels.function(number).grant_shared(grid.shared)?;
        self.script.push(number, grid, args);
        if self.step { Ok(()) } else { self.flush() }
    }

    /// Puts metadata in device memory, readable by the launches that follow in this operation. Inside a step the
    /// address depends on the sequence of calls and their `capacity` (bytes, rounded up to a power of two), never on
    /// the values.
    pub(crate) fn table<T: NoUninit>(&mut self, values: &[T], capacity: usize) -> Result<Table> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if self.tables.is_full_for(bytes.len(), capacity) {
            self.flush()?;
            self.tables.restart();
        }
        self.tables.push(bytes, capacity).ok_or_else(|| Error::Device {
            backend: "cuda",
            what: format!(
                "a table of {} bytes for one operation; lower --context or --parallel",
                bytes.len()
            ),
        })
    }

    /// Scratch memory of at least `bytes`, kept by its name: not cleared, shared by all that use the name, so written
    /// before it is read inside one operation.
    pub(crate) fn scratch(&mut self, name: &'static str, bytes: usize) -> Result<u64> {
        if let Some(memory) = self.scratch.get(name).filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.at(0));
        }
        self.device.bind()?;
        let memory = Memory::passing(&self.stream, bytes.next_power_of_two().max(256), name)?;
        let address = memory.at(0);
        self.scratch.insert(name, memory);
        Ok(address)
    }

    /// `count` numbers (U32) that are zero when they are made, kept by their name. A kernel leaves them zero, so that the
    /// next one finds them so.
    pub(crate) fn counters(&mut self, name: &'static str, count: usize) -> Result<u64> {
        let bytes = count * size_of::<u32>();
        if let Some(memory) = self.scratch.get(name).filter(|memory| memory.bytes() >= bytes) {
            return Ok(memory.at(0));
        }
        self.device.bind()?;
        let memory = Memory::passing(&self.stream, bytes.next_power_of_two().max(256), name)?;
        self.stream.clear(&memory)?;
        let address = memory.at(0);
        self.scratch.insert(name, memory);
        Ok(address)
    }

    /// Uncleared memory for weights.
    pub(crate) fn reserve(&mut self, bytes: usize, what: &str) -> Result<Memory> {
        self.device.bind()?;
        Ok(Memory::lasting(&self.device, bytes, what)?)
    }

    /// Copies bytes into reserved memory (asynchronously through pinned staging; `bytes` may be reused at once).
    pub(crate) fn fill(&mut self, memory: &Memory, first_byte: usize, bytes: &[u8]) -> Result<()> {
        if first_byte + bytes.len() > memory.bytes() {
            let what = format!("{} bytes at {first_byte} of {}", bytes.len(), memory.bytes());
            return Err(Error::Shape { op: "fill", what });
        }
        self.device.bind()?;
        // SAFETY: the range was checked.
        unsafe { self.staging.copy_in(&self.stream, memory.at(first_byte), bytes) }?;
        Ok(())
    }

    /// A buffer of zeros.
    pub(crate) fn allocate(&mut self, element: Element, len: usize) -> Result<CudaBuffer> {
        self.device.bind()?;
        if self.script.is_empty() {
            self.stream.free_left()?;
        }
        let bytes = len * element.size();
        let memory = Memory::passing(&self.stream, bytes, &format!("a buffer of {len} elements"))?;
        self.stream.clear(&memory)?;
        Ok(CudaBuffer::new(memory, element, len))
    }

    /// Copies bytes to elements `first..`.
    pub(crate) fn write(
        &mut self,
        buffer: &CudaBuffer,
        element: Element,
        first: usize,
        bytes: &[u8],
    ) -> Result<()> {
        buffer.check_range(element, first, bytes.len())?;
        if bytes.is_empty() {
            return Ok(());
        }
        let to = buffer.at(first);
        if self.step
            && bytes.len() <= COLLECTED_WRITE
            && bytes.len().is_multiple_of(4)
            && to.is_multiple_of(4)
        {
            let words = bytes.len() / 4;
            let table = self.table(bytes, bytes.len())?;
            let grid = Grid { blocks: [words.div_ceil(256) as u32, 1, 1], threads: 256, shared: 0 };
            return self.launch(&COPY_WORDS, grid, Args::new().address(to).table(table).u32(words));
        }
        self.flush()?;
        // SAFETY: the range was checked.
        unsafe { self.staging.copy_in(&self.stream, to, bytes) }?;
        Ok(())
    }

    /// Waits, then copies elements `first..` out.
    pub(crate) fn read(
        &mut self,
        buffer: &CudaBuffer,
        element: Element,
        first: usize,
        out: &mut [u8],
    ) -> Result<()> {
        buffer.check_range(element, first, out.len())?;
        self.flush()?;
        // SAFETY: the range was checked.
        let read = unsafe { self.staging.copy_out(&self.stream, out, buffer.at(first)) };
        self.named(read)
    }

    /// Waits for everything queued.
    pub(crate) fn synchronize(&mut self) -> Result<()> {
        self.flush()?;
        let waited = self.stream.wait();
        self.named(waited)
    }

    /// Whether launches are collected.
    pub(crate) fn in_step(&self) -> bool {
        self.step
    }

    /// Collects what follows.
    pub(crate) fn begin_step(&mut self) -> Result<()> {
        self.flush()?;
        self.tables.restart();
        self.step = true;
        Ok(())
    }

    /// Runs what was collected.
    pub(crate) fn end_step(&mut self) -> Result<()> {
        self.step = false;
        self.flush()
    }

    /// Puts everything that waits on the stream.
    fn flush(&mut self) -> Result<()> {
        self.device.bind()?;
        self.counts.table_bytes += self.tables.waiting() as u64;
        let uploaded = self.tables.upload(&self.stream);
        let script = std::mem::take(&mut self.script);
        let run = uploaded.and_then(|()| self.run(&script));
        if run.is_err() {
            self.tables.forget();
        }
        self.script = script;
        self.script.clear();
        self.named(run)?;
        self.stream.free_left()?;
        Ok(())
    }

    /// Launches a script, by its graph where it has one.
    fn run(&mut self, script: &Script) -> std::result::Result<(), CudaError> {
        if script.is_empty() {
            return Ok(());
        }
        self.counts.kernels += script.len() as u64;
        for (launch, _) in script.iter().skip(script.len().saturating_sub(NAMED)) {
            if self.last.len() == NAMED {
                self.last.pop_front();
            }
            self.last.push_back(launch.kernel);
        }
        let Self { graphs, kernels, stream, counts, use_graphs, early, .. } = self;
        let plan = if *use_graphs { graphs.plan(script) } else { Plan::Run };
        let graph = match plan {
            Plan::Run => return launch_all(stream, kernels, script, *early),
            Plan::Launch(graph) => graph,
            Plan::Capture(digest) => {
                let graph = Graph::capture(stream, || launch_all(stream, kernels, script, *early))?;
                counts.graphs_made += 1;
                graphs.keep(digest, script.clone(), graph)
            }
        };
        counts.graphs_launched += 1;
        // SAFETY: the script was made by this step's operations, whose memory lives until it has run.
        unsafe { graph.launch(stream) }
    }

    /// Adds the last kernels' names to an error of the device.
    fn named<T>(&self, result: std::result::Result<T, CudaError>) -> Result<T> {
        let names = self.last.iter().map(|&number| self.kernels.name(number as usize));
        result.map_err(|error| error.after(names).into())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // Code, graphs and pinned memory must not go while the device uses them. A fault has nobody to go to here.
        let _ = self.device.bind();
        let _ = self.stream.wait();
    }
}

/// Puts a script's launches on the stream, one by one. The first is never early: before it stands the copy of its tables,
/// or work of another kind.
fn launch_all(
    stream: &Stream,
    kernels: &Kernels,
    script: &Script,
    early: bool,
) -> std::result::Result<(), CudaError> {
    for (index, (launch, cells)) in script.iter().enumerate() {
        let kernel = launch.kernel as usize;
        let early = early && index > 0 && kernels.begins_early(kernel);
        // SAFETY: operations give the arguments that their kernels declare, over memory whose ranges they checked; it
        // is freed behind this work only. Kernels that are declared early wait for the launch before them.
        unsafe { stream.launch(kernels.function(kernel), &launch.grid, cells, early) }?;
    }
    Ok(())
}
