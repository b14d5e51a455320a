//! Reads by one thread with a Linux io_uring.

// The kernel writes into slabs while this thread keeps them.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use flume::Receiver;
use io_uring::{IoUring, opcode, types};

use super::files::{Bytes, ReadFile};
use super::layout::Run;
use super::reader::{Failure, Flight, Job, Landing, Next, ReadOptions};

/// A read that is asked for or waits to be.
#[derive(Clone, Copy)]
struct Read {
    flight: usize,
    run: Run,
}

struct Ring {
    queue: IoUring,
    files: Arc<Vec<ReadFile>>,
    options: ReadOptions,
    /// Records under way; `None` where a place is free.
    flights: Vec<Option<Flight>>,
    waiting: VecDeque<Read>,
    /// By user data of the ring.
    asked: Vec<Option<Read>>,
    under_way: usize,
    done: Landing,
}

/// Starts the thread; fails where the kernel has no io_uring for us.
pub(crate) fn start(
    files: &Arc<Vec<ReadFile>>,
    options: ReadOptions,
    jobs: Receiver<Job>,
    done: Landing,
) -> std::io::Result<()> {
    let depth = options.depth.clamp(1, 1024);
    let mut ring = Ring {
        queue: IoUring::new(depth.next_power_of_two() as u32)?,
        files: Arc::clone(files),
        options,
        flights: Vec::new(),
        waiting: VecDeque::new(),
        asked: vec![None; depth],
        under_way: 0,
        done,
    };
    std::thread::Builder::new().name("flint-read".into()).spawn(move || ring.run(&jobs))?;
    Ok(())
}

impl Ring {
    /// Until nobody can ask any more and nothing is under way.
    fn run(&mut self, jobs: &Receiver<Job>) {
        loop {
            if self.under_way == 0 && self.waiting.is_empty() {
                let Ok(job) = jobs.recv() else { return };
                self.take(job);
            }
            jobs.try_iter().for_each(|job| self.take(job));
            self.ask();
            if self.under_way > 0 {
                // Interrupted waits are as good as finished ones: whatever came is looked at.
                _ = self.queue.submit_and_wait(1);
                self.collect();
            }
        }
    }

    fn take(&mut self, job: Job) {
        let runs: Vec<Run> = job.layout.chunks(self.options.chunk).collect();
        let flight = Flight { job, left: runs.len(), failure: None };
        let free = self.flights.iter().position(Option::is_none);
        let place = free.unwrap_or(self.flights.len());
        match self.flights.get_mut(place) {
            Some(free) => *free = Some(flight),
            None => self.flights.push(Some(flight)),
        }
        self.waiting.extend(runs.into_iter().map(|run| Read { flight: place, run }));
    }

    /// Fills the ring.
    fn ask(&mut self) {
        while let Some(place) = self.asked.iter().position(Option::is_none) {
            let Some(read) = self.waiting.pop_front() else { return };
            let Some(flight) = self.flights[read.flight].as_mut() else { continue };
            // SAFETY: the layout's runs lie in the slab (`Reader::start` checked its length).
            let to = unsafe { flight.job.slab.start().add(read.run.to) };
            match &self.files[read.run.file].bytes {
                Bytes::Memory(bytes) => {
                    // SAFETY: as above; nobody else has the run's bytes.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, read.run.len) };
                    let got = super::threads::copy(bytes.as_slice(), read.run.start as usize, to);
                    self.finish(read, Ok(got));
                }
                Bytes::Disk { file, .. } => {
                    let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), to, read.run.len as u32)
                        .offset(read.run.start)
                        .build()
                        .user_data(place as u64);
                    // SAFETY: file and slab stay until the entry has come back: `run` ends only when none is under way.
                    if unsafe { self.queue.submission().push(&entry) }.is_err() {
                        self.waiting.push_front(read);
                        return;
                    }
                    self.asked[place] = Some(read);
                    self.under_way += 1;
                }
            }
        }
    }

    /// Looks at what came back.
    fn collect(&mut self) {
        let back: Vec<(u64, i32)> =
            self.queue.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (place, result) in back {
            let Some(read) = self.asked.get_mut(place as usize).and_then(Option::take) else { continue };
            self.under_way -= 1;
            let got = if result >= 0 {
                Ok(result as usize)
            } else {
                Err(std::io::Error::from_raw_os_error(-result))
            };
            self.finish(read, got);
        }
    }

    fn finish(&mut self, read: Read, got: std::io::Result<usize>) {
        use std::io::ErrorKind::{Interrupted, WouldBlock};
        let next = match got {
            Ok(got) => Next::after(&read.run, got, &self.files[read.run.file]),
            Err(error) if matches!(error.kind(), Interrupted | WouldBlock) => Next::Rest(read.run),
            Err(error) => Next::Failed(Failure::new(&read.run, error.to_string())),
        };
        let failure = match next {
            Next::Rest(run) => return self.waiting.push_back(Read { run, ..read }),
            Next::Done => None,
            Next::Failed(failure) => Some(failure),
        };
        let Some(mut flight) = self.flights[read.flight].take() else { return };
        flight.left -= 1;
        flight.failure = flight.failure.take().or(failure);
        if flight.left > 0 {
            self.flights[read.flight] = Some(flight);
        } else {
            self.done.take(flight, &self.files);
        }
    }
}
