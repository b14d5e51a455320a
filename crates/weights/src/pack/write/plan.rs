//! Where every byte of the source goes, decided from its headers.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value, json};

use super::{Numbering, PackOptions};
use crate::config::ModelConfig;
use crate::pack::bank::dims;
use crate::pack::form::Mode;
use crate::pack::manifest::Table;
use crate::pack::origin::{Origin, OriginFile, read, read_error};
use crate::pack::stored::{self, Listed, Role, StoredExperts, StoredLayer};
use crate::pack::{BLOCK, EXPERTS, MTP_EXPERTS, strict};
use crate::safetensors::{Header, TensorInfo};
use crate::shards::{INDEX, SINGLE};
use crate::{Error, Result};

/// Bytes that `config.json` and the index may have.
const TEXT_BOUND: u64 = 512 << 20;
/// Ends of file names that are weights: of them only those that the index names belong to the checkpoint.
const WEIGHTS: [&str; 7] = ["safetensors", "gguf", "bin", "pt", "pth", "npz", "onnx"];
/// Names that a pack has and that a source must not have.
const OWN: &[&str] = &["receipts", "TD-REPACK-RECEIPT.json", "manifest.sha256", "expert-manifest"];

/// Where every byte of a checkpoint goes in its pack. Made from headers; no weight is read.
#[derive(Debug)]
pub struct PackPlan {
    /// Where the source is, in words.
    pub source: String,
    pub(super) repository: Option<(String, String)>,
    pub(super) numbering: Numbering,
    pub(in crate::pack) banks: Vec<BankPlan>,
    pub(in crate::pack) shards: Vec<ShardPlan>,
    /// Other files, which are copied.
    pub(in crate::pack) copies: Vec<OriginFile>,
    pub(in crate::pack) config_bytes: Vec<u8>,
    pub(in crate::pack) index_bytes: Option<Vec<u8>>,
}

/// One bank.
#[derive(Debug)]
pub(in crate::pack) struct BankPlan {
    pub(in crate::pack) file: &'static str,
    pub(in crate::pack) table: Table,
    /// Shard and piece of each segment: by record in the order of the file, then segment.
    pub(super) pieces: Vec<(u32, u32)>,
}

/// One shard of the source, and of the trunk.
#[derive(Debug)]
pub(in crate::pack) struct ShardPlan {
    pub(in crate::pack) source: OriginFile,
    /// The header's JSON.
    pub(in crate::pack) header: String,
    /// Its tensors, in the order of their data.
    pub(in crate::pack) tensors: Vec<TensorInfo>,
    /// What to do with the data, in the order of the file.
    pub(in crate::pack) pieces: Vec<Piece>,
    /// The trunk's file.
    pub(in crate::pack) trunk: String,
    /// Its first bytes: length and header.
    pub(in crate::pack) trunk_start: Vec<u8>,
    pub(in crate::pack) trunk_bytes: u64,
}

/// A range of a source shard that goes to one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pack) struct Piece {
    /// First byte in the source shard.
    pub(in crate::pack) start: u64,
    pub(in crate::pack) length: u64,
    /// Number of its tensor in the shard.
    pub(in crate::pack) tensor: usize,
    pub(in crate::pack) target: Target,
}

/// Where a piece goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pack) enum Target {
    /// To the trunk's shard, at this offset.
    Trunk(u64),
    /// To a bank, at this offset.
    Bank(usize, u64),
    /// Nowhere: the codebook's marker stands in the manifest, and must have this value.
    Marker(u32),
}

impl PackPlan {
    /// Plans the pack of a checkpoint.
    ///
    /// # Errors
    /// A checkpoint that cannot be read or is a pack already; experts of a layer that are not stored alike; another
    /// format than asked for.
    pub fn new(origin: &dyn Origin, options: &PackOptions) -> Result<Self> {
        let files = origin.files()?;
        let config_bytes = small(origin, &files, "config.json")?;
        let config_json: Map<String, Value> = strict::parse("config.json", &config_bytes)?;
        if config_json.contains_key(BLOCK) || files.iter().any(|file| file.name == EXPERTS) {
            return Err(refused(origin, "it is a streaming pack already", "give a plain checkpoint"));
        }
        let config = ModelConfig::from_json(&config_json)?;
        let index_bytes = files
            .iter()
            .find(|file| file.name == INDEX)
            .map(|file| read(origin, file, TEXT_BOUND))
            .transpose()?;
        let names = shard_names(origin, &files, index_bytes.as_deref())?;
        let mut headers = Vec::with_capacity(names.len());
        for file in &names {
            headers.push(header(origin, file)?);
        }
        let all: Vec<(&TensorInfo, usize)> = headers
            .iter()
            .enumerate()
            .flat_map(|(shard, header)| header.tensors.iter().map(move |info| (info, shard)))
            .collect();
        let listed: Vec<Listed<'_>> =
            all.iter().map(|(info, shard)| (*info, names[*shard].name.as_str())).collect();
        check_names(&listed)?;
        let found = stored::experts(&listed, &config)?;
        let mut banks = vec![bank(origin, &found.trunk, &config, EXPERTS, options)?];
        if !found.mtp.is_empty() {
            banks.push(bank(origin, &found.mtp, &config, MTP_EXPERTS, options)?);
        }
        let mut pieces = pieces(&all, names.len(), &found, &mut banks);
        let shards = names.iter().zip(headers).enumerate().map(|(number, (file, header))| {
            ShardPlan::new(file, header, std::mem::take(&mut pieces[number]), (number, names.len()))
        });
        let shards = shards.collect::<Result<_>>()?;
        let copies = copies(origin, &files)?;
        Ok(Self {
            source: origin.label(),
            repository: origin.repository(),
            numbering: options.numbering,
            banks,
            shards,
            copies,
            config_bytes,
            index_bytes,
        })
    }

    /// How the experts are stored.
    pub fn mode(&self) -> Mode {
        self.banks.first().map_or(Mode::Plain, |bank| bank.table.mode)
    }

    /// Bytes of the banks.
    pub fn bank_bytes(&self) -> u64 {
        self.banks.iter().map(|bank| bank.table.size).sum()
    }

    /// Bytes of the trunk's shards.
    pub fn trunk_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.trunk_bytes).sum()
    }

    /// Bytes of the source's shards.
    pub fn source_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.source.bytes).sum()
    }

    /// Records of both banks.
    pub fn records(&self) -> usize {
        self.banks.iter().map(|bank| bank.table.records()).sum()
    }

    /// Bytes that the pack has, its tables estimated.
    pub fn pack_bytes(&self) -> u64 {
        // A segment's entry in the older manifest has about 220 bytes; 300 pays for the records' entries too.
        let tables: u64 = self.banks.iter().map(|bank| bank.pieces.len() as u64 * 300).sum();
        let headers: u64 = self.shards.iter().map(|shard| shard.header.len() as u64 * 2).sum();
        let copies: u64 = self.copies.iter().map(|file| file.bytes).sum();
        self.bank_bytes() + self.trunk_bytes() + copies + tables + headers
    }

    /// The source's shard and the tensor of a segment.
    pub(super) fn tensor_of(&self, bank: &BankPlan, record: usize, segment: usize, segments: usize) -> &str {
        let (shard, piece) = bank.pieces[record * segments + segment];
        let shard = &self.shards[shard as usize];
        &shard.tensors[shard.pieces[piece as usize].tensor].name
    }

    /// The plan as it stands in the pack's receipts: equal for equal sources and choices, other for others.
    pub(super) fn describe(&self) -> Value {
        let shard = |shard: &ShardPlan| {
            json!({
                "name": shard.source.name,
                "bytes": shard.source.bytes,
                "sha256": shard.source.sha256.as_ref().map(strict::hex),
                "header_sha256": strict::hex(&super::receipt::digest(shard.header.as_bytes())),
                "trunk": shard.trunk,
            })
        };
        let bank = |bank: &BankPlan| {
            json!({
                "file": bank.file,
                "bytes": bank.table.size,
                "records": bank.table.records(),
                "mode": bank.table.mode.name(),
            })
        };
        let copy = |file: &OriginFile| json!({ "name": file.name, "bytes": file.bytes });
        json!({
            "format": "flint-pack-plan-v1",
            "source": self.source_entry(),
            "numbering": if self.numbering == Numbering::Bank { "bank" } else { "model" },
            "banks": self.banks.iter().map(bank).collect::<Vec<_>>(),
            "shards": self.shards.iter().map(shard).collect::<Vec<_>>(),
            "files": self.copies.iter().map(copy).collect::<Vec<_>>(),
        })
    }

    /// The source in receipts. A folder's path is its owner's matter.
    pub(super) fn source_entry(&self) -> Value {
        match &self.repository {
            Some((repo, revision)) => json!({ "repo": repo, "revision": revision }),
            None => json!({ "repo": null, "revision": null }),
        }
    }
}

impl BankPlan {
    /// Number of the record that holds a byte of the bank.
    pub(super) fn record_at(&self, offset: u64) -> usize {
        let layers = &self.table.layers;
        let at = layers.partition_point(|layer| layer.base <= offset).saturating_sub(1);
        let inside = layers.get(at).map_or(0, |layer| (offset - layer.base) / layer.record_bytes.max(1));
        at * self.table.dims.experts + inside as usize
    }
}

impl ShardPlan {
    fn new(file: &OriginFile, header: Header, pieces: Vec<Piece>, place: (usize, usize)) -> Result<Self> {
        let malformed = |what: String| Error::Malformed { file: file.name.clone(), what };
        let text = String::from_utf8(header.json).map_err(|error| malformed(error.to_string()))?;
        let mut shard = Self {
            source: file.clone(),
            trunk: trunk_name(&file.name, place),
            header: text,
            tensors: header.tensors,
            pieces,
            trunk_start: Vec::new(),
            trunk_bytes: 0,
        };
        shard.plan_trunk().map_err(|error| malformed(error.to_string()))?;
        Ok(shard)
    }

    /// Lays the trunk's tensors out one behind the other, in the source's order.
    fn plan_trunk(&mut self) -> serde_json::Result<()> {
        let source: Map<String, Value> = serde_json::from_str(&self.header)?;
        let mut entries = Map::new();
        if let Some(metadata) = source.get("__metadata__") {
            entries.insert("__metadata__".to_owned(), metadata.clone());
        }
        let mut at = 0;
        for piece in &mut self.pieces {
            if let Target::Trunk(offset) = &mut piece.target {
                let info = &self.tensors[piece.tensor];
                *offset = at;
                at += piece.length;
                let entry =
                    json!({"dtype": info.dtype.name(), "shape": info.shape, "data_offsets": [*offset, at]});
                entries.insert(info.name.clone(), entry);
            }
        }
        let mut json = serde_json::to_vec(&entries)?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut start = (json.len() as u64).to_le_bytes().to_vec();
        start.extend(json);
        let data = start.len() as u64;
        for piece in &mut self.pieces {
            if let Target::Trunk(offset) = &mut piece.target {
                *offset += data;
            }
        }
        self.trunk_bytes = data + at;
        self.trunk_start = start;
        Ok(())
    }
}

/// `model-00003-of-00062.safetensors` as `model-00003-of-00062-nonexpert.safetensors`.
fn trunk_name(name: &str, (number, all): (usize, usize)) -> String {
    if name == SINGLE {
        return format!("model-{:05}-of-{all:05}-nonexpert.safetensors", number + 1);
    }
    format!("{}-nonexpert.safetensors", name.strip_suffix(".safetensors").unwrap_or(name))
}

fn refused(origin: &dyn Origin, what: impl Into<String>, remedy: &'static str) -> Error {
    Error::Packing { place: origin.label(), what: what.into(), remedy }
}

fn small(origin: &dyn Origin, files: &[OriginFile], name: &str) -> Result<Vec<u8>> {
    let Some(file) = files.iter().find(|file| file.name == name) else {
        let found = format!("there is no {name}");
        let remedy = "give the folder or the repository of a GLM-5.3-Flash checkpoint";
        return Err(Error::NoCheckpoint { place: origin.label(), found, remedy });
    };
    read(origin, file, TEXT_BOUND)
}

/// The shards, in the order of their names.
fn shard_names(origin: &dyn Origin, files: &[OriginFile], index: Option<&[u8]>) -> Result<Vec<OriginFile>> {
    let find = |name: &str| files.iter().find(|file| file.name == name).cloned();
    let Some(index) = index else {
        let found = format!("there is neither {INDEX} nor {SINGLE}");
        let remedy = "download the checkpoint again, with all of its files";
        return find(SINGLE).map(|file| vec![file]).ok_or(Error::NoCheckpoint {
            place: origin.label(),
            found,
            remedy,
        });
    };
    let index: Value = strict::parse(INDEX, index)?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let Some(map) = map else {
        return Err(Error::Malformed { file: INDEX.to_owned(), what: "it has no weight_map".to_owned() });
    };
    let names: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
    let (mut shards, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        match find(name).filter(|file| !file.name.contains('/')) {
            Some(file) => shards.push(file),
            None => missing.push(name.to_owned()),
        }
    }
    if missing.is_empty() {
        Ok(shards)
    } else {
        Err(Error::MissingFiles { index: INDEX.to_owned(), files: missing })
    }
}

/// Reads a shard's header and nothing else.
fn header(origin: &dyn Origin, file: &OriginFile) -> Result<Header> {
    Header::read_with(&file.name, file.bytes, &mut |at, wanted| {
        let mut bytes = Vec::new();
        let wanted = wanted.min(file.bytes.saturating_sub(at));
        let mut reader = origin.open(file, at, wanted)?;
        std::io::Read::read_to_end(&mut reader, &mut bytes)
            .map_err(|error| read_error(origin, file, error))?;
        Ok(bytes)
    })
}

/// Refuses a tensor that two shards have.
fn check_names(listed: &[Listed<'_>]) -> Result<()> {
    let mut seen = HashSet::with_capacity(listed.len());
    match listed.iter().find(|(info, _)| !seen.insert(info.name.as_str())) {
        None => Ok(()),
        Some((info, file)) => {
            let what = format!("{} is in {file} and in another shard", info.name);
            Err(Error::Index { index: INDEX.to_owned(), what })
        }
    }
}

fn bank(
    origin: &dyn Origin,
    layers: &[StoredLayer],
    config: &ModelConfig,
    file: &'static str,
    options: &PackOptions,
) -> Result<BankPlan> {
    let Some(first) = layers.first() else {
        return Err(refused(
            origin,
            "the model has no routed experts",
            "a checkpoint without them needs no pack",
        ));
    };
    if let Some(other) = layers.iter().find(|layer| layer.mode != first.mode) {
        let what = format!(
            "experts of layer {} are stored as {}, those of layer {} as {}; a pack has one format",
            first.layer,
            first.form.label(),
            other.layer,
            other.form.label()
        );
        return Err(refused(origin, what, "convert the checkpoint anew"));
    }
    if let Some(format) = options.format.as_deref().filter(|format| *format != first.mode.name()) {
        let what = format!("--format {format} was asked for, but its experts are {}", first.form.label());
        return Err(refused(
            origin,
            what,
            "flint pack copies bytes and converts nothing: leave --format out",
        ));
    }
    let forms = layers.iter().map(|layer| (layer.layer, layer.form.clone())).collect();
    let table = Table::new(first.mode, dims(config), forms);
    Ok(BankPlan { file, table, pieces: Vec::new() })
}

/// The pieces of every shard, in the order of the file, and for the banks the way back.
fn pieces(
    all: &[(&TensorInfo, usize)],
    shards: usize,
    found: &StoredExperts,
    banks: &mut [BankPlan],
) -> Vec<Vec<Piece>> {
    let mut firsts = vec![usize::MAX; shards];
    for (at, (_, shard)) in all.iter().enumerate() {
        firsts[*shard] = firsts[*shard].min(at);
    }
    let mut pieces: Vec<Vec<Piece>> = vec![Vec::new(); shards];
    for (at, ((info, shard), role)) in all.iter().zip(&found.roles).enumerate() {
        let target = match role {
            Role::Trunk => Target::Trunk(0),
            Role::Marker(codebook) => Target::Marker(codebook.multiplier()),
            Role::Expert => continue,
        };
        let (start, length, tensor) = (info.start, info.end - info.start, at - firsts[*shard]);
        pieces[*shard].push(Piece { start, length, tensor, target });
    }
    for (number, (bank, layers)) in banks.iter_mut().zip([&found.trunk, &found.mtp]).enumerate() {
        for (at, layer) in layers.iter().enumerate() {
            let segments = &layer.form.segments;
            for (place, index) in layer.places.iter().zip(0..) {
                let (expert, segment) = (index / segments.len(), &segments[index % segments.len()]);
                let shard = all[place.tensor].1;
                let target = Target::Bank(number, bank.table.offset(at, expert) + segment.offset);
                let tensor = place.tensor - firsts[shard];
                pieces[shard].push(Piece { start: place.start, length: segment.length, tensor, target });
            }
        }
    }
    let mut places: Vec<Vec<(u64, (u32, u32))>> = vec![Vec::new(); banks.len()];
    for (shard, of_shard) in pieces.iter_mut().enumerate() {
        of_shard.sort_by_key(|piece| (piece.start, piece.length));
        for (number, piece) in of_shard.iter().enumerate() {
            if let Target::Bank(bank, offset) = piece.target {
                places[bank].push((offset, (shard as u32, number as u32)));
            }
        }
    }
    for (bank, mut places) in banks.iter_mut().zip(places) {
        places.sort_unstable();
        bank.pieces = places.into_iter().map(|(_, place)| place).collect();
    }
    pieces
}

/// The files that a pack takes over as they are.
fn copies(origin: &dyn Origin, files: &[OriginFile]) -> Result<Vec<OriginFile>> {
    let is_weight = |name: &str| {
        let end = name.rsplit_once('.').map_or("", |(_, end)| end);
        !name.contains('/') && WEIGHTS.iter().any(|weight| end.eq_ignore_ascii_case(weight))
    };
    let is_own = |name: &str| OWN.iter().any(|own| name.starts_with(own));
    let others = files.iter().filter(|file| {
        !["config.json", INDEX].contains(&file.name.as_str())
            && !is_weight(&file.name)
            && !file.name.starts_with('.')
    });
    let mut copies = Vec::new();
    for file in others {
        if is_own(&file.name) {
            let what = format!("{} is a file that packs have", file.name);
            return Err(refused(origin, what, "give a plain checkpoint, or take the file away"));
        }
        let leaves =
            file.name.split('/').any(|part| matches!(part, "" | "." | "..")) || file.name.contains('\\');
        if leaves {
            return Err(refused(
                origin,
                format!("{:?} is no name of a file inside it", file.name),
                "use another source",
            ));
        }
        copies.push(file.clone());
    }
    Ok(copies)
}
