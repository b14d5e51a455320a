//! Shards are streamed once from end to end: each piece goes to its place, hashed on the way.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use sha2::{Digest as _, Sha256};

use super::folder::{Partial, failed};
use super::plan::{ShardPlan, Target};
use super::receipt::Receipt;
use super::{PackPlan, Progress, Stage};
use crate::pack::origin::{Origin, read_error};
use crate::pack::strict;
use crate::{Error, Result};

/// Bytes that are read, hashed and written at a time.
const CHUNK: usize = 1 << 20;
/// Chunks that may wait for the whole file's sum.
const WAITING: usize = 8;

/// Copies every shard that has no receipt yet; says how many had one.
pub(super) fn copy(
    plan: &PackPlan,
    origin: &dyn Origin,
    partial: &Partial,
    progress: &mut dyn FnMut(Progress),
) -> Result<usize> {
    let banks = plan.banks.iter().map(|bank| open_bank(partial, bank.file, bank.table.size));
    let banks: Vec<File> = banks.collect::<Result<_>>()?;
    let (mut done, mut resumed) = (0, 0);
    let all = plan.source_bytes();
    for shard in &plan.shards {
        if Receipt::read(partial, shard)?.is_some() {
            resumed += 1;
            done += shard.source.bytes;
            progress(Progress { stage: Stage::Copying, done, all });
            continue;
        }
        let mut on_bytes = |bytes: u64| {
            done += bytes;
            progress(Progress { stage: Stage::Copying, done, all });
        };
        copy_shard(plan, origin, partial, shard, &banks, &mut on_bytes)?;
    }
    Ok(resumed)
}

/// A bank with its whole length: what is not written yet reads as zeros, and so does padding.
fn open_bank(partial: &Partial, name: &str, size: u64) -> Result<File> {
    let path = partial.path(name);
    let file =
        OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(failed(&path))?;
    file.set_len(size).map_err(failed(&path))?;
    Ok(file)
}

fn copy_shard(
    plan: &PackPlan,
    origin: &dyn Origin,
    partial: &Partial,
    shard: &ShardPlan,
    banks: &[File],
    on_bytes: &mut dyn FnMut(u64),
) -> Result<()> {
    let trunk = partial.create(&shard.trunk)?;
    write_at(&trunk.file, &shard.trunk_start, 0).map_err(failed(&trunk.path))?;
    trunk.file.set_len(shard.trunk_bytes).map_err(failed(&trunk.path))?;
    let reader = origin.open(&shard.source, 0, shard.source.bytes)?;
    let (pieces, whole) = std::thread::scope(|scope| -> Result<_> {
        let (sender, chunks) = sync_channel::<Arc<Vec<u8>>>(WAITING);
        let whole = scope.spawn(move || {
            let mut sum = Sha256::new();
            for chunk in chunks {
                sum.update(chunk.as_slice());
            }
            <[u8; 32]>::from(sum.finalize())
        });
        let mut stream = Stream { origin, shard, reader, sender, at: 0, on_bytes };
        let mut pieces = Vec::with_capacity(shard.pieces.len());
        for piece in &shard.pieces {
            stream.skip_to(piece.start)?;
            let sum = match piece.target {
                Target::Trunk(offset) => {
                    stream.copy(piece.length, Some((&trunk.file, &shard.trunk, offset)))?
                }
                Target::Bank(bank, offset) => {
                    stream.copy(piece.length, Some((&banks[bank], plan.banks[bank].file, offset)))?
                }
                Target::Marker(expected) => {
                    let sum = stream.copy(piece.length, None)?;
                    if sum != super::receipt::digest(&expected.to_le_bytes()) {
                        return Err(wrong_marker(shard, piece.tensor, expected));
                    }
                    sum
                }
            };
            pieces.push(sum);
        }
        stream.skip_to(shard.source.bytes)?;
        drop(stream);
        let whole = whole.join().map_err(|_| stopped(shard))?;
        Ok((pieces, whole))
    })?;
    if let Some(expected) = shard.source.sha256.filter(|expected| *expected != whole) {
        return Err(Error::Sum {
            file: format!("{}/{}", origin.label(), shard.source.name),
            part: "the whole file".to_owned(),
            offset: 0,
            found: strict::hex(&whole),
            expected: strict::hex(&expected),
            remedy: "what was sent is not the repository's file: run the command again",
        });
    }
    for (file, bank) in banks.iter().zip(&plan.banks) {
        file.sync_data().map_err(failed(&partial.path(bank.file)))?;
    }
    partial.keep(trunk)?;
    Receipt::new(plan, shard, whole, &pieces).write(partial, shard)
}

/// A shard on its way.
struct Stream<'a> {
    origin: &'a dyn Origin,
    shard: &'a ShardPlan,
    reader: Box<dyn Read + Send + 'a>,
    /// To the whole file's sum.
    sender: SyncSender<Arc<Vec<u8>>>,
    at: u64,
    on_bytes: &'a mut dyn FnMut(u64),
}

impl Stream<'_> {
    /// The next bytes, at most so many, and at least one.
    fn next(&mut self, most: u64) -> Result<Arc<Vec<u8>>> {
        let mut chunk = vec![0; most.min(CHUNK as u64) as usize];
        let mut filled = 0;
        while filled < chunk.len() {
            match self.reader.read(&mut chunk[filled..]) {
                Ok(0) => {
                    return Err(Error::FileSize {
                        file: format!("{}/{}", self.origin.label(), self.shard.source.name),
                        found: self.at + filled as u64,
                        expected: self.shard.source.bytes,
                    });
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(read_error(self.origin, &self.shard.source, error)),
            }
        }
        let chunk = Arc::new(chunk);
        self.at += filled as u64;
        (self.on_bytes)(filled as u64);
        self.sender.send(Arc::clone(&chunk)).map_err(|_| stopped(self.shard))?;
        Ok(chunk)
    }

    /// Passes over the header and what lies between tensors.
    fn skip_to(&mut self, start: u64) -> Result<()> {
        while self.at < start {
            self.next(start - self.at)?;
        }
        Ok(())
    }

    /// Copies a piece and gives its sum.
    fn copy(&mut self, length: u64, to: Option<(&File, &str, u64)>) -> Result<[u8; 32]> {
        let (mut sum, mut left) = (Sha256::new(), length);
        while left > 0 {
            let chunk = self.next(left)?;
            sum.update(chunk.as_slice());
            if let Some((file, name, offset)) = to {
                write_at(file, &chunk, offset + (length - left)).map_err(failed(name.as_ref()))?;
            }
            left -= chunk.len() as u64;
        }
        Ok(sum.finalize().into())
    }
}

fn wrong_marker(shard: &ShardPlan, tensor: usize, expected: u32) -> Error {
    Error::BadTensor {
        file: shard.source.name.clone(),
        tensor: shard.tensors[tensor].name.clone(),
        what: format!("the codebook's marker is not {expected:#010x}"),
    }
}

fn stopped(shard: &ShardPlan) -> Error {
    let what = "the thread that computes its sum has stopped".to_owned();
    Error::Packing { place: shard.source.name.clone(), what, remedy: "run the command again" }
}

/// Writes all bytes at a place of a file.
#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> std::io::Result<()> {
    use std::os::windows::fs::FileExt as _;
    while !bytes.is_empty() {
        let written = file.seek_write(bytes, offset)?;
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        offset += written as u64;
    }
    Ok(())
}
