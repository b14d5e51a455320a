//! Receipts: what was copied from where, with the source's sums. They tell a later run what is done, the check what to
//! find, and unpacking how the source looked.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::PackPlan;
use super::folder::Partial;
use super::plan::{ShardPlan, Target};
use crate::Result;
use crate::pack::strict;

/// The headers of the source's shards, byte for byte.
pub(in crate::pack) const HEADERS: &str = "receipts/source-headers.json";
/// The source's `config.json`, byte for byte.
pub(in crate::pack) const SOURCE_CONFIG: &str = "receipts/source-config.json";
/// The source's index, byte for byte.
pub(in crate::pack) const SOURCE_INDEX: &str = "receipts/source-index.json";
const FORMAT: &str = "flint-pack-receipt-v1";

/// What was copied of one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::pack) struct Receipt {
    format: String,
    pub(in crate::pack) shard: String,
    pub(in crate::pack) bytes: u64,
    pub(in crate::pack) source_sha256: String,
    /// Tensors of the shard.
    pub(in crate::pack) tensors: usize,
    /// Arrays of records that it has.
    pub(in crate::pack) segments: usize,
    /// Records of which it has a part.
    pub(in crate::pack) records: usize,
    /// Whether everything was read back and found equal.
    pub(in crate::pack) pass: bool,
    /// SHA-256 of each piece, in the order of the shard's data.
    pub(in crate::pack) pieces: Vec<String>,
}

impl Receipt {
    /// The receipt of a shard that was copied.
    pub(super) fn new(plan: &PackPlan, shard: &ShardPlan, source: [u8; 32], pieces: &[[u8; 32]]) -> Self {
        let targets = shard.pieces.iter().filter_map(|piece| match piece.target {
            Target::Bank(bank, offset) => Some((bank, offset)),
            _ => None,
        });
        let records: HashSet<(usize, usize)> =
            targets.clone().map(|(bank, offset)| (bank, plan.banks[bank].record_at(offset))).collect();
        Self {
            format: FORMAT.to_owned(),
            shard: shard.source.name.clone(),
            bytes: shard.source.bytes,
            source_sha256: strict::hex(&source),
            tensors: shard.tensors.len(),
            segments: targets.count(),
            records: records.len(),
            pass: false,
            pieces: pieces.iter().map(strict::hex).collect(),
        }
    }

    /// The receipt of a shard that an earlier run copied; `None` when there is none that can be used.
    pub(super) fn read(partial: &Partial, shard: &ShardPlan) -> Result<Option<Self>> {
        let Some(bytes) = partial.read(&receipt_name(shard))? else { return Ok(None) };
        let Ok(receipt) = serde_json::from_slice::<Self>(&bytes) else { return Ok(None) };
        let trunk = std::fs::metadata(partial.path(&shard.trunk)).map_or(0, |file| file.len());
        let fits = receipt.format == FORMAT
            && receipt.shard == shard.source.name
            && receipt.bytes == shard.source.bytes
            && receipt.pieces.len() == shard.pieces.len()
            && receipt.pieces.iter().all(|sum| strict::sha256(sum).is_some())
            && trunk == shard.trunk_bytes;
        Ok(fits.then_some(receipt))
    }

    /// Writes it.
    pub(super) fn write(&self, partial: &Partial, shard: &ShardPlan) -> Result<()> {
        let name = receipt_name(shard);
        partial.write(&name, &strict::text(&name, self)?)
    }

    /// The sum of a piece.
    pub(in crate::pack) fn piece(&self, number: usize) -> Option<[u8; 32]> {
        self.pieces.get(number).and_then(|sum| strict::sha256(sum))
    }
}

/// `receipts/model-00003-of-00062.json`.
pub(in crate::pack) fn receipt_name(shard: &ShardPlan) -> String {
    let name = shard.source.name.strip_suffix(".safetensors").unwrap_or(&shard.source.name);
    format!("receipts/{name}.json")
}

/// The headers of all shards of a source.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::pack) struct Headers {
    format: String,
    pub(in crate::pack) shards: Vec<SourceHeader>,
}

/// One shard's header.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::pack) struct SourceHeader {
    pub(in crate::pack) name: String,
    pub(in crate::pack) bytes: u64,
    pub(in crate::pack) trunk: String,
    pub(in crate::pack) header: String,
}

impl Headers {
    pub(super) fn new(plan: &PackPlan) -> Self {
        let shards = plan.shards.iter().map(|shard| SourceHeader {
            name: shard.source.name.clone(),
            bytes: shard.source.bytes,
            trunk: shard.trunk.clone(),
            header: shard.header.clone(),
        });
        Self { format: "flint-source-headers-v1".to_owned(), shards: shards.collect() }
    }
}

/// SHA-256 of bytes in memory.
pub(in crate::pack) fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}
