//! What makes the copied bytes a pack: manifests, index, config, receipts, sums. Written only after the check.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::check::Checked;
use super::folder::{Partial, failed};
use super::plan::{BankPlan, Target};
use super::receipt::{HEADERS, SOURCE_CONFIG, SOURCE_INDEX, receipt_name};
use super::{Numbering, PackPlan};
use crate::pack::form::{MatrixForm, Mode};
use crate::pack::manifest::V2;
use crate::pack::manifest_v1::{ResidentTensor, V1, Written};
use crate::pack::origin::{Origin, OriginFile, read_error};
use crate::pack::{
    BLOCK, EXPERTS, MANIFEST, MANIFEST_V1, MTP_EXPERTS, MTP_MANIFEST, MTP_MANIFEST_V1, SUMS, strict, sums,
};
use crate::shards::INDEX;
use crate::{Error, Result};

const PLAN: &str = "receipts/plan.json";
const STATE: &str = "receipts/state.json";
const RECEIPT: &str = "TD-REPACK-RECEIPT.json";

/// Writes everything that is left.
pub(super) fn finish(
    plan: &PackPlan,
    origin: &dyn Origin,
    partial: &Partial,
    checked: &Checked,
) -> Result<()> {
    let mut files = Files { partial, sums: BTreeMap::new() };
    for (bank, checked) in plan.banks.iter().zip(&checked.banks) {
        files.sums.insert(bank.file.to_owned(), checked.sum);
    }
    for (shard, sum) in plan.shards.iter().zip(&checked.trunk) {
        files.sums.insert(shard.trunk.clone(), *sum);
    }
    for (shard, receipt) in plan.shards.iter().zip(&checked.receipts) {
        let mut receipt = receipt.clone();
        receipt.pass = true;
        files.json(&receipt_name(shard), &receipt)?;
    }
    for name in [PLAN, HEADERS, SOURCE_CONFIG, SOURCE_INDEX] {
        files.add(name)?;
    }
    for file in &plan.copies {
        files.copy(origin, file)?;
    }
    files.json("config.json", &config(plan)?)?;
    files.json(INDEX, &index(plan))?;
    manifests(plan, checked, &mut files)?;
    files.json(RECEIPT, &receipt(plan, checked))?;
    let state = json!({"format": "flint-pack-state-v1", "copied": plan.shards.len(), "checked": true});
    files.json(STATE, &state)?;
    let text = sums::text(&files.sums);
    partial.write(SUMS, text.as_bytes())
}

/// Files of the pack, with their sums.
struct Files<'a> {
    partial: &'a Partial,
    sums: BTreeMap<String, [u8; 32]>,
}

impl Files<'_> {
    fn write(&mut self, name: &str, bytes: &[u8]) -> Result<[u8; 32]> {
        let sum = super::receipt::digest(bytes);
        self.partial.write(name, bytes)?;
        self.list(name, sum);
        Ok(sum)
    }

    fn json(&mut self, name: &str, value: &impl serde::Serialize) -> Result<()> {
        let bytes = strict::text(name, value)?;
        self.write(name, &bytes).map(|_| ())
    }

    fn list(&mut self, name: &str, sum: [u8; 32]) {
        if sums::is_listed(name) {
            self.sums.insert(name.to_owned(), sum);
        }
    }

    /// Lists a file that is there already, if it is.
    fn add(&mut self, name: &str) -> Result<()> {
        if let Some(bytes) = self.partial.read(name)? {
            self.list(name, super::receipt::digest(&bytes));
        }
        Ok(())
    }

    /// Takes a file over from the source.
    fn copy(&mut self, origin: &dyn Origin, file: &OriginFile) -> Result<()> {
        let mut temporary = self.partial.create(&file.name)?;
        let mut reader = origin.open(file, 0, file.bytes)?;
        let (mut sum, mut copied) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = reader.read(&mut buffer).map_err(|error| read_error(origin, file, error))?;
            if read == 0 {
                break;
            }
            sum.update(&buffer[..read]);
            temporary.file.write_all(&buffer[..read]).map_err(failed(&temporary.path))?;
            copied += read as u64;
        }
        let sum: [u8; 32] = sum.finalize().into();
        let name = format!("{}/{}", origin.label(), file.name);
        if copied != file.bytes {
            return Err(Error::FileSize { file: name, found: copied, expected: file.bytes });
        }
        if let Some(expected) = file.sha256.filter(|expected| *expected != sum) {
            return Err(Error::Sum {
                file: name,
                part: "the whole file".to_owned(),
                offset: 0,
                found: strict::hex(&sum),
                expected: strict::hex(&expected),
                remedy: "what was sent is not the repository's file: run the command again",
            });
        }
        self.partial.keep(temporary)?;
        self.list(&file.name, sum);
        Ok(())
    }
}

/// The source's `config.json` with the block that marks a pack.
fn config(plan: &PackPlan) -> Result<Map<String, Value>> {
    let mut config: Map<String, Value> = strict::parse("config.json", &plan.config_bytes)?;
    let mut block = json!({"format": "flint-streaming-pack-v1", "manifest": MANIFEST});
    if plan.banks.iter().any(|bank| bank.file == MTP_EXPERTS) {
        block["mtp_manifest"] = json!(MTP_MANIFEST);
    }
    block["source"] = plan.source_entry();
    config.insert(BLOCK.to_owned(), block);
    Ok(config)
}

/// The trunk's index.
fn index(plan: &PackPlan) -> Value {
    let mut map = BTreeMap::new();
    let mut bytes = 0;
    for shard in &plan.shards {
        for piece in &shard.pieces {
            if let Target::Trunk(_) = piece.target {
                map.insert(shard.tensors[piece.tensor].name.as_str(), shard.trunk.as_str());
                bytes += piece.length;
            }
        }
    }
    json!({"metadata": {"total_size": bytes}, "weight_map": map})
}

fn manifests(plan: &PackPlan, checked: &Checked, files: &mut Files<'_>) -> Result<()> {
    let key = plan.repository.as_ref().map(|(repo, _)| repo.clone()).unwrap_or_default();
    for (bank, sums) in plan.banks.iter().zip(&checked.banks) {
        let (newer, older) =
            if bank.file == EXPERTS { (MANIFEST, MANIFEST_V1) } else { (MTP_MANIFEST, MTP_MANIFEST_V1) };
        let mut table = bank.table.clone();
        for (layer, records) in table.layers.iter_mut().zip(&sums.records) {
            layer.sums.clone_from(records);
        }
        let manifest = strict::text(newer, &V2::new(&table, bank.file, &key, plan.numbering))?;
        let sum = files.write(newer, &manifest)?;
        let experts = table.dims.experts;
        let tensor = |at: usize, expert: usize, segment: usize| {
            let segments = bank.table.layers[at].form.segments.len();
            plan.tensor_of(bank, at * experts + expert, segment, segments).to_owned()
        };
        let written = Written {
            sidecar: bank.file,
            sum: sums.sum,
            logical_sums: &sums.logical,
            tensor: &tensor,
            numbering: plan.numbering,
        };
        let mut manifest = V1::new(&table, &written);
        manifest.model_key.clone_from(&key);
        manifest.source_repo.clone_from(&key);
        manifest.manifest_sha256 = strict::hex(&sum);
        manifest.resident_tensors = resident(plan);
        let text = strict::line(older, &manifest)?;
        files.write(older, &text)?;
    }
    Ok(())
}

/// The trunk's tensors, for readers of the older manifest.
fn resident(plan: &PackPlan) -> Vec<ResidentTensor> {
    let of_shard = plan.shards.iter().flat_map(|shard| shard.pieces.iter().map(move |piece| (shard, piece)));
    let tensors = of_shard.filter_map(|(shard, piece)| {
        let Target::Trunk(offset) = piece.target else { return None };
        let info = &shard.tensors[piece.tensor];
        Some(ResidentTensor {
            tensor: info.name.clone(),
            shard: shard.trunk.clone(),
            offset,
            length: piece.length,
            dtype: info.dtype.name().to_owned(),
            shape: info.shape.clone(),
        })
    });
    tensors.collect()
}

/// What was repacked from where.
fn receipt(plan: &PackPlan, checked: &Checked) -> Value {
    let layers = |bank: &BankPlan| {
        let number = |at: usize| match plan.numbering {
            Numbering::Bank => at,
            Numbering::Model => bank.table.layers[at].layer,
        };
        let layer = |at: usize| {
            let bits = bank.table.layers[at].form.matrices.map(MatrixForm::bits);
            json!({"layer": number(at), "projection_K": bits})
        };
        (0..bank.table.layers.len()).map(layer).collect::<Vec<_>>()
    };
    let files: Map<String, Value> = plan
        .banks
        .iter()
        .zip(&checked.banks)
        .map(|(bank, sums)| {
            let entry = json!({"bytes": bank.table.size, "sha256": strict::hex(&sums.sum)});
            (bank.file.to_owned(), entry)
        })
        .collect();
    let (repo, revision) = plan.repository.clone().map_or((None, None), |(a, b)| (Some(a), Some(b)));
    json!({
        "format": "flint-repack-receipt-v1",
        "source": {"repo": repo, "branch": null, "revision": revision},
        "mode": plan.banks.first().map_or("plain", |bank| Mode::name(bank.table.mode)),
        "layers": plan.banks.first().map(layers),
        "mtp_layers": plan.banks.get(1).map(layers),
        "files": files,
        "shards": plan.shards.len(),
        "all_pass": true,
    })
}
