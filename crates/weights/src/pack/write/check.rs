//! Everything that was written is read back from the disk and compared with the source's sums.

use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use sha2::{Digest as _, Sha256};

use super::folder::{Partial, failed};
use super::plan::{BankPlan, ShardPlan, Target};
use super::receipt::{Receipt, digest, receipt_name};
use super::{PackPlan, Progress, Stage};
use crate::pack::form::Segment;
use crate::pack::strict;
use crate::{Error, Result};

const CHUNK: usize = 1 << 20;
/// Records that may wait for the whole file's sum.
const WAITING: usize = 4;
/// What to do when the disk gives back other bytes than were written.
const AGAIN: &str = "the disk or the memory of this machine is not reliable: check both, and run the command again to copy this part anew";

/// What the check found out besides that all is equal.
#[derive(Debug)]
pub(super) struct Checked {
    pub(super) receipts: Vec<Receipt>,
    /// Of each bank.
    pub(super) banks: Vec<CheckedBank>,
    /// SHA-256 of each trunk shard.
    pub(super) trunk: Vec<[u8; 32]>,
}

/// The sums of one bank.
#[derive(Debug)]
pub(super) struct CheckedBank {
    pub(super) sum: [u8; 32],
    /// Of each record with its padding, layer by layer.
    pub(super) records: Vec<Vec<[u8; 32]>>,
    /// Of each record without its padding.
    pub(super) logical: Vec<Vec<[u8; 32]>>,
}

/// Reads everything back.
pub(super) fn check(
    plan: &PackPlan,
    partial: &Partial,
    progress: &mut dyn FnMut(Progress),
) -> Result<Checked> {
    let mut receipts = Vec::with_capacity(plan.shards.len());
    for shard in &plan.shards {
        let missing = || Error::Packing {
            place: receipt_name(shard),
            what: "the receipt of this shard is gone".to_owned(),
            remedy: "run the command again, and let nothing else write into its folder",
        };
        receipts.push(Receipt::read(partial, shard)?.ok_or_else(missing)?);
    }
    let all = plan.bank_bytes() + plan.trunk_bytes();
    let mut done = 0;
    let mut on_bytes = |bytes: u64| {
        done += bytes;
        progress(Progress { stage: Stage::Checking, done, all });
    };
    let mut banks = Vec::with_capacity(plan.banks.len());
    for bank in &plan.banks {
        banks.push(check_bank(plan, partial, bank, &receipts, &mut on_bytes)?);
    }
    let mut trunk = Vec::with_capacity(plan.shards.len());
    for (shard, receipt) in plan.shards.iter().zip(&receipts) {
        trunk.push(check_trunk(partial, shard, receipt, &mut on_bytes)?);
    }
    Ok(Checked { receipts, banks, trunk })
}

/// Opens a file so that its bytes come from the disk and not from what the system remembers of writing them.
fn open(partial: &Partial, name: &str) -> Result<File> {
    let path = partial.path(name);
    let file = File::open(&path).map_err(failed(&path))?;
    #[cfg(target_os = "linux")]
    let _refused = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(file)
}

fn check_bank(
    plan: &PackPlan,
    partial: &Partial,
    bank: &BankPlan,
    receipts: &[Receipt],
    on_bytes: &mut dyn FnMut(u64),
) -> Result<CheckedBank> {
    let mut file = open(partial, bank.file)?;
    let path = partial.path(bank.file);
    std::thread::scope(|scope| {
        let (sender, chunks) = sync_channel::<Arc<Vec<u8>>>(WAITING);
        let whole = scope.spawn(move || {
            let mut sum = Sha256::new();
            for chunk in chunks {
                sum.update(chunk.as_slice());
            }
            <[u8; 32]>::from(sum.finalize())
        });
        let (mut records, mut logical) = (Vec::new(), Vec::new());
        let mut number = 0;
        for (at, layer) in bank.table.layers.iter().enumerate() {
            let (mut of_records, mut of_logical) = (Vec::new(), Vec::new());
            for expert in 0..bank.table.dims.experts {
                let mut bytes = vec![0; layer.record_bytes as usize];
                file.read_exact(&mut bytes).map_err(failed(&path))?;
                let record = Record { bank, at, expert, number, bytes: &bytes };
                record.check(plan, partial, receipts)?;
                let (used, padding) = bytes.split_at(layer.form.logical_bytes as usize);
                of_logical.push(digest(used));
                of_records.push(if padding.is_empty() { digest(used) } else { digest(&bytes) });
                on_bytes(layer.record_bytes);
                number += 1;
                let stopped = || Error::Packing {
                    place: bank.file.to_owned(),
                    what: "the thread that computes its sum has stopped".to_owned(),
                    remedy: "run the command again",
                };
                sender.send(Arc::new(bytes)).map_err(|_| stopped())?;
            }
            records.push(of_records);
            logical.push(of_logical);
        }
        drop(sender);
        let stopped = |_| Error::Packing {
            place: bank.file.to_owned(),
            what: "the thread that computes its sum has stopped".to_owned(),
            remedy: "run the command again",
        };
        Ok(CheckedBank { sum: whole.join().map_err(stopped)?, records, logical })
    })
}

/// A record that was read back.
struct Record<'a> {
    bank: &'a BankPlan,
    at: usize,
    expert: usize,
    /// Its number in the bank.
    number: usize,
    bytes: &'a [u8],
}

impl Record<'_> {
    fn check(&self, plan: &PackPlan, partial: &Partial, receipts: &[Receipt]) -> Result<()> {
        let layer = &self.bank.table.layers[self.at];
        let segments = &layer.form.segments;
        for (place, segment) in segments.iter().enumerate() {
            let bytes = &self.bytes[segment.offset as usize..][..segment.length as usize];
            let (shard, piece) = self.bank.pieces[self.number * segments.len() + place];
            let found = digest(bytes);
            let expected = receipts[shard as usize].piece(piece as usize);
            if expected != Some(found) {
                // Without its receipt the shard is copied anew.
                partial.remove(&receipt_name(&plan.shards[shard as usize]))?;
                return Err(self.differs(segment, found, expected));
            }
        }
        match self.bytes[layer.form.logical_bytes as usize..].iter().position(|byte| *byte != 0) {
            None => Ok(()),
            Some(at) => Err(Error::Packing {
                place: format!("{}, layer {}, expert {}", self.bank.file, layer.layer, self.expert),
                what: format!("byte {at} of the padding is not 0"),
                remedy: "remove the unfinished pack and begin anew",
            }),
        }
    }

    fn differs(&self, segment: &Segment, found: [u8; 32], expected: Option<[u8; 32]>) -> Error {
        let table = &self.bank.table;
        Error::Sum {
            file: self.bank.file.to_owned(),
            part: format!(
                "record of layer {}, expert {}, {}",
                table.layers[self.at].layer, self.expert, segment.component
            ),
            offset: table.offset(self.at, self.expert) + segment.offset,
            found: strict::hex(&found),
            expected: expected.as_ref().map_or("missing".to_owned(), strict::hex),
            remedy: AGAIN,
        }
    }
}

/// Reads a trunk shard back and gives its sum.
fn check_trunk(
    partial: &Partial,
    shard: &ShardPlan,
    receipt: &Receipt,
    on_bytes: &mut dyn FnMut(u64),
) -> Result<[u8; 32]> {
    let mut file = open(partial, &shard.trunk)?;
    let path = partial.path(&shard.trunk);
    let mut whole = Sha256::new();
    let mut start = vec![0; shard.trunk_start.len()];
    file.read_exact(&mut start).map_err(failed(&path))?;
    whole.update(&start);
    on_bytes(start.len() as u64);
    let differs = |part: String, offset: u64, found: [u8; 32], expected: Option<[u8; 32]>| {
        partial.remove(&receipt_name(shard))?;
        let expected = expected.as_ref().map_or("missing".to_owned(), strict::hex);
        let (file, found) = (shard.trunk.clone(), strict::hex(&found));
        Err(Error::Sum { file, part, offset, found, expected, remedy: AGAIN })
    };
    if start != shard.trunk_start {
        return differs("the header".to_owned(), 0, digest(&start), Some(digest(&shard.trunk_start)));
    }
    let mut buffer = vec![0; CHUNK];
    for (number, piece) in shard.pieces.iter().enumerate() {
        let Target::Trunk(offset) = piece.target else { continue };
        let (mut sum, mut left) = (Sha256::new(), piece.length);
        while left > 0 {
            let chunk = &mut buffer[..left.min(CHUNK as u64) as usize];
            file.read_exact(chunk).map_err(failed(&path))?;
            sum.update(&*chunk);
            whole.update(&*chunk);
            left -= chunk.len() as u64;
            on_bytes(chunk.len() as u64);
        }
        let (found, expected) = (sum.finalize().into(), receipt.piece(number));
        if expected != Some(found) {
            return differs(format!("tensor {}", shard.tensors[piece.tensor].name), offset, found, expected);
        }
    }
    Ok(whole.finalize().into())
}
