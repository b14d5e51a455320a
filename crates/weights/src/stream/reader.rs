//! Records from files to slabs, many reads at once, none on the caller's thread.

use std::sync::Arc;
use std::time::Duration;

use flume::{Receiver, Sender, unbounded};

use super::files::ReadFile;
use super::layout::{Layout, Run};
use super::slab::Slab;

/// Who asks the operating system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadEngine {
    /// io_uring where the kernel lets us, else threads.
    #[default]
    Auto,
    /// One thread with a Linux io_uring.
    Ring,
    /// A pool of threads that block.
    Threads,
}

/// How records are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOptions {
    /// Who asks the operating system.
    pub engine: ReadEngine,
    /// Reads that are under way at once.
    pub depth: usize,
    /// Bytes of one read, a multiple of 4,096.
    pub chunk: usize,
    /// Whether reads go past the page cache where the file system lets them.
    pub direct: bool,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self { engine: ReadEngine::Auto, depth: 32, chunk: 1 << 20, direct: true }
    }
}

/// A record to read.
pub(crate) struct Job {
    pub(crate) ticket: u64,
    pub(crate) layout: Arc<Layout>,
    /// At least as long as the layout asks.
    pub(crate) slab: Slab,
}

/// A record that was read, or why it was not: the run that failed and the reason.
pub(crate) struct Done {
    pub(crate) ticket: u64,
    pub(crate) slab: Slab,
    pub(crate) result: Result<(), Failure>,
}

/// Why a read failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) what: String,
}

impl Failure {
    pub(crate) fn new(run: &Run, what: String) -> Self {
        Self { file: run.file, offset: run.start, what }
    }

    /// A file that ended too early.
    pub(crate) fn ended(run: &Run, got: usize) -> Self {
        let end = run.start + got as u64;
        let missing = run.needed - got;
        Self { file: run.file, offset: end, what: format!("the file ends here, {missing} bytes too early") }
    }
}

/// Reads records in the background.
pub(crate) struct Reader {
    jobs: Sender<Job>,
    done: Receiver<Done>,
    name: &'static str,
}

impl Reader {
    /// Starts the engine over these files.
    pub(crate) fn new(files: Vec<ReadFile>, options: ReadOptions) -> std::io::Result<Self> {
        let files = Arc::new(files);
        let ((jobs, work), (finished, done)) = (unbounded(), unbounded());
        #[cfg(target_os = "linux")]
        if options.engine != ReadEngine::Threads {
            match super::ring::start(&files, options, work.clone(), finished.clone()) {
                Ok(()) => return Ok(Self { jobs, done, name: "io_uring" }),
                Err(error) if options.engine == ReadEngine::Ring => return Err(error),
                Err(_) => {}
            }
        }
        #[cfg(not(target_os = "linux"))]
        if options.engine == ReadEngine::Ring {
            return Err(std::io::Error::other("this system has no io_uring; choose threads"));
        }
        super::threads::start(&files, options, work, finished)?;
        Ok(Self { jobs, done, name: "threads" })
    }

    /// What asks the operating system.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Starts a read. Returns the job when the engine is gone.
    pub(crate) fn start(&self, job: Job) -> Option<Job> {
        self.jobs.send(job).err().map(|unsent| unsent.0)
    }

    /// The next finished record: `None` when `wait` is over without one, or the engine is gone.
    pub(crate) fn next(&self, wait: Duration) -> Option<Done> {
        self.done.recv_timeout(wait).ok()
    }
}

/// A record whose chunks are under way.
pub(crate) struct Flight {
    pub(crate) job: Job,
    /// Chunks that are not done.
    pub(crate) left: usize,
    pub(crate) failure: Option<Failure>,
}

impl Flight {
    /// The record as it left: refused when one of its files changed meanwhile.
    pub(crate) fn land(self, files: &[ReadFile]) -> Done {
        let Self { job, failure, .. } = self;
        let changed = || {
            let of = |run: &Run| Some(Failure::new(run, files.get(run.file)?.change()?));
            job.layout.runs.iter().find_map(of)
        };
        let result = failure.or_else(changed).map_or(Ok(()), Err);
        Done { ticket: job.ticket, slab: job.slab, result }
    }
}

/// What follows a read of a run that gave `got` bytes.
pub(crate) enum Next {
    /// All that is needed is there.
    Done,
    /// The rest must be asked for.
    Rest(Run),
    /// It will not come.
    Failed(Failure),
}

impl Next {
    pub(crate) fn after(run: &Run, got: usize, file: &ReadFile) -> Self {
        if got >= run.needed {
            return Self::Done;
        }
        // A direct read that ends inside a block ended with its file.
        let goes_on = got > 0 && (file.takes_any_place() || got.is_multiple_of(super::slab::BLOCK));
        if !goes_on {
            return Self::Failed(Failure::ended(run, got));
        }
        Self::Rest(Run {
            file: run.file,
            start: run.start + got as u64,
            len: run.len - got,
            needed: run.needed - got,
            to: run.to + got,
        })
    }
}
