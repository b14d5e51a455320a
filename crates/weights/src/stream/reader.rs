//! Records from files to slabs, many reads at once, none on the caller's thread.

use std::sync::Arc;
use std::time::Duration;

use flume::{Receiver, Sender, unbounded};

use sha2::{Digest as _, Sha256};

use super::files::ReadFile;
use super::layout::{Layout, Run};
use super::slab::Slab;
use crate::pack::hex;

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

/// When the records of a pack are compared with their sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VerifyRecords {
    /// At every read.
    Always,
    /// When a record is read for the first time.
    #[default]
    First,
    /// Never.
    Never,
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
    /// When records are compared with their sums, where they have some.
    pub verify: VerifyRecords,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            engine: ReadEngine::Auto,
            depth: 32,
            chunk: 1 << 20,
            direct: true,
            verify: VerifyRecords::First,
        }
    }
}

/// A record to read.
pub(crate) struct Job {
    pub(crate) ticket: u64,
    pub(crate) layout: Arc<Layout>,
    /// At least as long as the layout asks.
    pub(crate) slab: Slab,
    /// What the record's bytes must add up to.
    pub(crate) sum: Option<Sum>,
}

/// The SHA-256 of a record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    /// The layout's place that is the whole record.
    pub(crate) place: usize,
    pub(crate) sha256: [u8; 32],
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

/// Threads that compare records with their sums: one keeps up with a disk of about 2 GB/s.
const CHECKERS: usize = 2;

/// Where landed records go: those with a sum to be compared first.
#[derive(Clone)]
pub(crate) struct Landing {
    done: Sender<Done>,
    checks: Sender<(Done, Arc<Layout>, Sum)>,
}

impl Landing {
    /// Starts the threads that compare.
    fn new(done: Sender<Done>) -> std::io::Result<Self> {
        let (checks, work) = unbounded::<(Done, Arc<Layout>, Sum)>();
        for index in 0..CHECKERS {
            let (work, done) = (work.clone(), done.clone());
            std::thread::Builder::new().name(format!("flint-sums-{index}")).spawn(move || {
                for (mut landed, layout, sum) in work {
                    landed.result = check(&landed.slab, &layout, &sum);
                    _ = done.send(landed);
                }
            })?;
        }
        Ok(Self { done, checks })
    }

    /// Takes a record whose last chunk is done.
    pub(crate) fn take(&self, flight: Flight, files: &[ReadFile]) {
        let (layout, sum) = (Arc::clone(&flight.job.layout), flight.job.sum);
        let done = flight.land(files);
        match sum {
            Some(sum) if done.result.is_ok() => _ = self.checks.send((done, layout, sum)),
            _ => _ = self.done.send(done),
        }
    }
}

fn check(slab: &Slab, layout: &Layout, sum: &Sum) -> Result<(), Failure> {
    let place = layout.places[sum.place].clone();
    let found: [u8; 32] = Sha256::digest(&slab.as_ref()[place.clone()]).into();
    if found == sum.sha256 {
        return Ok(());
    }
    let run = layout.runs.iter().rfind(|run| run.to <= place.start);
    let (file, offset) = run.map_or((0, 0), |run| (run.file, run.start + (place.start - run.to) as u64));
    let what = format!("the record's SHA-256 is {}, the manifest says {}", hex(&found), hex(&sum.sha256));
    Err(Failure { file, offset, what })
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
        let finished = Landing::new(finished)?;
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
        super::threads::start(&files, options, work, &finished)?;
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
