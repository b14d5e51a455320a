//! What the disk gives to plain reads of experts: the measure for a bank's reads.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::layout::Run;
use super::slab::Slab;
use super::{ExpertStream, ReadOptions};
use crate::Result;

/// Steps of a number that shares no factor with most counts: far jumps, no record twice in a round.
const STEP: usize = 1_000_003;

/// Bytes a second of reading experts in an order of chance, `readers` at once, with nothing else done to them.
///
/// Each reader asks for one read of an expert after the other, as large as the expert lies together.
///
/// # Errors
/// When a file cannot be opened or memory is short. Reads that fail count nothing.
pub fn raw_rate(stream: &ExpertStream, options: ReadOptions, readers: usize, time: Duration) -> Result<f64> {
    let records: Vec<&[Run]> =
        stream.records.iter().flatten().map(|record| record.layout.runs.as_slice()).collect();
    let largest = stream.records.iter().flatten().map(|record| record.layout.bytes).max().unwrap_or(0);
    if records.is_empty() {
        return Ok(0.0);
    }
    let used: HashSet<usize> = records.iter().flat_map(|runs| runs.iter().map(|run| run.file)).collect();
    let files = stream.checkpoint.open_files(&used, options.direct)?;
    let slabs = (0..readers.max(1)).map(|_| Slab::new(largest)).collect::<Result<Vec<_>>>()?;
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for mut slab in slabs {
            let (next, done, records, files) = (&next, &done, &records, &files);
            scope.spawn(move || {
                while began.elapsed() < time {
                    let at = next.fetch_add(1, Ordering::Relaxed).wrapping_mul(STEP) % records.len();
                    for run in records[at] {
                        let start = slab.start();
                        if super::threads::read(&files[run.file], *run, start).is_ok() {
                            done.fetch_add(run.needed as u64, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    Ok(done.into_inner() as f64 / began.elapsed().as_secs_f64())
}
