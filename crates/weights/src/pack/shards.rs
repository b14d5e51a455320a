//! A pack as a checkpoint's tensors: the trunk's shards, and each segment of each record as the tensor that it was.
//!
//! So everything that reads a plain checkpoint reads a pack, every expert included.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::bank::{Bank, Pack, open_sidecar};
use super::form::Mode;
use super::stored::{self, Listed, Role};
use super::{BLOCK, EXPERTS, MTP_EXPERTS, REPACK, Refusal};
use crate::config::ModelConfig;
use crate::map::map;
use crate::names::place_of_tensor;
use crate::safetensors::{Dtype, TensorInfo};
use crate::shards::{Shard, Shards, Tensor};
use crate::{Error, HostBytes, Result, Source};

/// Whether a checkpoint is a pack.
///
/// # Errors
/// `BankMissing` when only one of the two marks is there: the block of `config.json`, or the bank.
pub(crate) fn is_pack(source: &Source, config: &Map<String, Value>) -> Result<bool> {
    let has_block = config.contains_key(BLOCK);
    let has_bank = source.files()?.iter().any(|name| name == EXPERTS);
    let (file, what) = match (has_block, has_bank) {
        (false, false) => return Ok(false),
        (true, true) => return Ok(true),
        (true, false) => {
            (EXPERTS, format!("config.json has {BLOCK}, but this is a streaming pack without its bank"))
        }
        (false, true) => ("config.json", format!("{EXPERTS} is there, but the file has no {BLOCK}")),
    };
    Err(Refusal::BankMissing.error(file, what, "download the missing file of the same version"))
}

/// The tensors of a pack.
///
/// # Errors
/// Everything that [`Pack::open`] refuses, `ExpertInTrunk`, and what the trunk's shards are refused for.
pub(crate) fn shards(source: &Source, config: &ModelConfig) -> Result<(Shards, Pack)> {
    let Source::Folder(folder) = source else {
        let (at, what) = (source.label(), "a streaming pack that is no folder on disk".to_owned());
        return Err(Error::Unsupported { at, what, remedy: "give the pack's folder" });
    };
    let pack = Pack::open(folder, config)?;
    let mut shards = Shards::open(source)?;
    refuse_experts(&shards, config)?;
    if pack.mtp_experts().is_none() {
        refuse_half_mtp(&shards, config)?;
    }
    for bank in pack.banks() {
        add(&mut shards, &pack, bank)?;
    }
    Ok((shards, pack))
}

/// Refuses a routed expert that stands in the trunk beside the bank.
fn refuse_experts(shards: &Shards, config: &ModelConfig) -> Result<()> {
    for tensor in &shards.tensors {
        let file = shards.files[tensor.shard].name.as_str();
        let listed: [Listed<'_>; 1] = [(&tensor.info, file)];
        if stored::role(listed[0], config) != Role::Trunk {
            let what = format!("{} is a routed expert's, which the bank holds", tensor.info.name);
            return Err(Refusal::ExpertInTrunk.error(file, what, REPACK));
        }
    }
    Ok(())
}

/// Refuses a trunk that has an MTP layer whose experts are nowhere.
fn refuse_half_mtp(shards: &Shards, config: &ModelConfig) -> Result<()> {
    for tensor in &shards.tensors {
        let module = place_of_tensor(&tensor.info.name, config.layers()).module;
        let layer =
            module.strip_prefix("layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        if layer.is_some_and(|layer| layer >= config.layers()) {
            let what = format!(
                "the trunk has {} of an MTP layer, but the bank of its experts is missing",
                tensor.info.name
            );
            return Err(Refusal::BankMissing.error(MTP_EXPERTS, what, REPACK));
        }
    }
    Ok(())
}

fn add(shards: &mut Shards, pack: &Pack, bank: &Bank) -> Result<()> {
    let table = &bank.table;
    let file = open_sidecar(pack.folder(), bank.file(), table.size)?;
    let failed = |source| Error::Io { path: pack.folder().join(bank.file()), source };
    let bytes = if table.size == 0 {
        HostBytes::from_vec(Vec::new())
    } else {
        HostBytes::new(Arc::new(map(&file).map_err(failed)?))
    };
    let mut sums = blake3::Hasher::new();
    for sum in table.layers.iter().flat_map(|layer| &layer.sums) {
        sums.update(sum);
    }
    let shard = shards.files.len();
    shards.files.push(Shard { name: bank.file().to_owned(), bytes, header: sums.finalize() });
    let marker = marker(shards, bank);
    for (at, layer) in table.layers.iter().enumerate() {
        for expert in 0..table.dims.experts {
            let path = format!("model.language_model.layers.{}.mlp.experts.{expert}", layer.layer);
            let record = table.offset(at, expert);
            for segment in &layer.form.segments {
                let component = segment.component;
                let start = record + segment.offset;
                let name = format!("{path}.{}.{}", component.projection.name(), component.part.tensor());
                let (dtype, shape) = (segment.dtype, segment.shape.clone());
                let info = TensorInfo { name, dtype, shape, start, end: start + segment.length };
                shards.tensors.push(Tensor { info, shard });
            }
            if let Some((shard, end)) = marker {
                let marker = |projection: super::Projection| TensorInfo {
                    name: format!("{path}.{}.{end}", projection.name()),
                    dtype: Dtype::I32,
                    shape: Vec::new(),
                    start: 0,
                    end: 4,
                };
                shards.tensors.extend(super::Projection::ALL.map(|p| Tensor { info: marker(p), shard }));
            }
        }
    }
    Ok(())
}

/// The codebook's marker, which stands once in the manifest and not in the records, as a file in memory.
fn marker(shards: &mut Shards, bank: &Bank) -> Option<(usize, &'static str)> {
    let Mode::Exl3(codebook) = bank.mode() else { return None };
    let end = codebook.marker()?;
    let bytes = codebook.multiplier().to_le_bytes().to_vec();
    let header = blake3::hash(&bytes);
    let name = format!("{} (codebook)", bank.file());
    shards.files.push(Shard { name, bytes: HostBytes::from_vec(bytes), header });
    Some((shards.files.len() - 1, end))
}
