//! Reads by a pool of threads that block.

// Chunks of one slab are filled by several threads at once.
#![allow(unsafe_code)]

use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

use flume::{Receiver, unbounded};

use super::files::{Bytes, ReadFile};
use super::layout::Run;
use super::reader::{Failure, Flight, Job, Landing, Next, ReadOptions};

/// A part of a record for one thread.
struct Chunk {
    flight: Arc<Mutex<Option<Flight>>>,
    run: Run,
    /// Start of the record's slab.
    slab: *mut u8,
}

// SAFETY: the slab lives as long as its flight, which the last chunk ends; chunks of a record name disjoint bytes.
unsafe impl Send for Chunk {}

/// Starts the threads.
pub(crate) fn start(
    files: &Arc<Vec<ReadFile>>,
    options: ReadOptions,
    jobs: Receiver<Job>,
    done: &Landing,
) -> std::io::Result<()> {
    let (chunks, work) = unbounded::<Chunk>();
    for index in 0..options.depth.max(1) {
        let (files, work, done) = (Arc::clone(files), work.clone(), done.clone());
        std::thread::Builder::new().name(format!("flint-read-{index}")).spawn(move || {
            work.iter().for_each(|chunk| chunk.fill(&files, &done));
        })?;
    }
    let most = options.chunk;
    std::thread::Builder::new().name("flint-read".into()).spawn(move || {
        for job in jobs {
            for chunk in split(job, most) {
                _ = chunks.send(chunk);
            }
        }
    })?;
    Ok(())
}

fn split(mut job: Job, most: usize) -> Vec<Chunk> {
    let slab = job.slab.start();
    let runs: Vec<Run> = job.layout.chunks(most).collect();
    let flight = Flight { job, left: runs.len(), failure: None };
    let flight = Arc::new(Mutex::new(Some(flight)));
    runs.into_iter().map(|run| Chunk { flight: Arc::clone(&flight), run, slab }).collect()
}

impl Chunk {
    fn fill(self, files: &[ReadFile], done: &Landing) {
        let failure = read(&files[self.run.file], self.run, self.slab).err();
        let mut flight = self.flight.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut record) = flight.take() else { return };
        record.left -= 1;
        record.failure = record.failure.take().or(failure);
        if record.left > 0 {
            *flight = Some(record);
        } else {
            done.take(record, files);
        }
    }
}

/// Reads a run, however many calls that takes.
pub(super) fn read(file: &ReadFile, mut run: Run, slab: *mut u8) -> Result<(), Failure> {
    loop {
        // SAFETY: the layout's runs lie in the slab (`Reader::start` checked its length), and this thread alone has
        // the run's bytes.
        let to = unsafe { std::slice::from_raw_parts_mut(slab.add(run.to), run.len) };
        let got = match &file.bytes {
            Bytes::Memory(bytes) => copy(bytes.as_slice(), run.start as usize, to),
            Bytes::Disk { file, .. } => match read_at(file, to, run.start) {
                Ok(got) => got,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failure::new(&run, error.to_string())),
            },
        };
        match Next::after(&run, got, file) {
            Next::Done => return Ok(()),
            Next::Rest(rest) => run = rest,
            Next::Failed(failure) => return Err(failure),
        }
    }
}

/// Copies what there is of `bytes` behind `start`.
pub(super) fn copy(bytes: &[u8], start: usize, to: &mut [u8]) -> usize {
    let from = bytes.get(start..).unwrap_or_default();
    let got = from.len().min(to.len());
    to[..got].copy_from_slice(&from[..got]);
    got
}

#[cfg(unix)]
fn read_at(file: &File, to: &mut [u8], at: u64) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, to, at)
}

#[cfg(windows)]
fn read_at(file: &File, to: &mut [u8], at: u64) -> std::io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, to, at)
}
