//! What is in a folder, from headers and manifests: for people and as JSON.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

use super::bank::Pack;
use super::fit::{self, Fit};
use super::profile::{Phase, Usage, UsageProfile};
use super::source::{ExpertLayer, ExpertSource};
use super::{BLOCK, EXPERTS, strict};
use crate::config::ModelConfig;
use crate::shards::Shards;
use crate::{Error, Result, Source};

/// Bytes between two segments that one read may take along.
const GAP: u64 = 64;

/// A checkpoint's files, layers and experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The folder.
    pub folder: String,
    /// Whether it is a streaming pack.
    pub is_pack: bool,
    /// Shards that hold tensors.
    pub shards: usize,
    /// Tensors in the shards.
    pub tensors: usize,
    /// Bytes of these tensors, routed experts of a plain checkpoint apart.
    pub trunk_bytes: u64,
    /// Bytes of all routed experts.
    pub expert_bytes: u64,
    /// Experts of a layer.
    pub experts: usize,
    /// The routed experts by file (a pack) or all together (a plain checkpoint).
    pub banks: Vec<BankSummary>,
    /// Where a pack came from: repository and revision.
    pub origin: Option<String>,
    /// Which profiles are there, and what they are good for.
    pub profiles: Vec<String>,
    /// What `bank-fit.json` says.
    pub fit: Option<String>,
    /// What a user should know.
    pub notes: Vec<String>,
}

/// Routed experts of some layers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BankSummary {
    /// The bank, or words for all shards.
    pub file: String,
    /// Bytes.
    pub bytes: u64,
    /// What records start at multiples of; 1 in a plain checkpoint.
    pub alignment: u64,
    /// Layers with equal forms, together.
    pub layers: Vec<LayerSummary>,
}

/// Layers whose experts are stored alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerSummary {
    /// The model's numbers of the layers: first and last of each run.
    pub layers: Vec<(usize, usize)>,
    /// How an expert's matrices are stored.
    pub form: String,
    /// Bytes of one expert, padding apart.
    pub expert_bytes: u64,
    /// Reads that one expert takes, at most.
    pub reads: usize,
}

/// Looks at a folder. Headers and manifests are read and checked, no weight is.
///
/// # Errors
/// What [`Pack::open`] and headers are refused for.
pub fn inspect(folder: &Path) -> Result<Summary> {
    let source = Source::Folder(folder.to_owned());
    let keys = keys(&source)?;
    let config = ModelConfig::from_json(&keys)?;
    let is_pack = super::is_pack(&source, &keys)?;
    let shards = Shards::open(&source)?;
    let all: u64 = shards.tensors.iter().map(|tensor| tensor.info.end - tensor.info.start).sum();
    let pack = if is_pack { Some(Pack::open(folder, &config)?) } else { None };
    let experts = match &pack {
        Some(pack) => ExpertSource::of_pack(pack),
        None => ExpertSource::of_shards(&source, &shards, &config)?,
    };
    let bytes = |layer: &ExpertLayer| layer.form().logical_bytes * layer.experts() as u64;
    let expert_bytes: u64 = experts.layers().iter().map(bytes).sum();
    let banks = match &pack {
        Some(pack) => pack
            .banks()
            .map(|bank| BankSummary {
                file: bank.file().to_owned(),
                bytes: bank.bytes(),
                alignment: bank.alignment(),
                layers: layers(&experts, |layer| bank.layers().any(|number| number == layer)),
            })
            .collect(),
        None => vec![BankSummary {
            file: "in the shards".to_owned(),
            bytes: expert_bytes,
            alignment: 1,
            layers: layers(&experts, |_| true),
        }],
    };
    let (profiles, fit) = beside(&source, &config)?;
    let mut notes = pack.as_ref().map_or(Vec::new(), |pack| pack.notes().to_vec());
    notes.extend(hint(is_pack, &banks));
    Ok(Summary {
        folder: folder.display().to_string(),
        is_pack,
        shards: shards.files.len(),
        tensors: shards.tensors.len(),
        trunk_bytes: if is_pack { all } else { all.saturating_sub(expert_bytes) },
        expert_bytes,
        experts: config.experts,
        banks,
        origin: keys.get(BLOCK).and_then(origin),
        profiles,
        fit,
        notes,
    })
}

/// The sizes of a folder's model, and whether it is a pack.
pub(super) fn config(source: &Source) -> Result<(ModelConfig, bool)> {
    let keys = keys(source)?;
    Ok((ModelConfig::from_json(&keys)?, super::is_pack(source, &keys)?))
}

fn keys(source: &Source) -> Result<Map<String, Value>> {
    let Some(json) = source.read("config.json")? else {
        let (place, found) = (source.label(), "there is no config.json".to_owned());
        let remedy = "give the folder of a checkpoint or of a streaming pack";
        return Err(Error::NoCheckpoint { place, found, remedy });
    };
    strict::parse("config.json", json.as_slice())
}

/// Layers with equal forms, in the order of their first one.
fn layers(experts: &ExpertSource, is_of: impl Fn(usize) -> bool) -> Vec<LayerSummary> {
    let mut summaries: Vec<LayerSummary> = Vec::new();
    for layer in experts.layers().iter().filter(|layer| is_of(layer.layer())) {
        let records = (0..layer.experts()).filter_map(|expert| experts.record(layer.layer(), expert));
        let reads = records.map(|record| record.reads(GAP).len()).max().unwrap_or(0);
        let (form, number) = (layer.form().label(), layer.layer());
        match summaries.iter_mut().find(|other| other.form == form && other.reads == reads) {
            Some(other) => match other.layers.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => other.layers.push((number, number)),
            },
            None => summaries.push(LayerSummary {
                layers: vec![(number, number)],
                form,
                expert_bytes: layer.form().logical_bytes,
                reads,
            }),
        }
    }
    summaries
}

/// Profiles and fit beside the weights.
fn beside(source: &Source, config: &ModelConfig) -> Result<(Vec<String>, Option<String>)> {
    let layers = super::bank::trunk_layers(config);
    let mut profiles = Vec::new();
    for phase in [Phase::Prompt, Phase::Decode] {
        let Some(json) = source.read(phase.file())? else { continue };
        let what = match UsageProfile::read(json.as_slice(), phase, &layers, config.experts) {
            Usage::Understood(profile) => format!("{} tokens counted", profile.tokens),
            Usage::NotUnderstood(why) => format!("left aside: {why}"),
        };
        profiles.push(format!("{}: {what}", phase.file()));
    }
    let fit = source.read(fit::FILE)?.map(|json| match Fit::read(json.as_slice()) {
        Ok(Fit::One(fit)) => format!("measured under a ceiling of {} bytes", fit.ceiling_bytes),
        Ok(Fit::Device(fit)) => format!("measured on {}", fit.device),
        Err(reason) => format!("not applied: {reason}"),
    });
    Ok((profiles, fit))
}

/// `owner/name@revision`, where the block names them.
fn origin(block: &Value) -> Option<String> {
    let source = block.get("source")?;
    let repo = source.get("repo")?.as_str()?;
    let revision = source.get("revision").and_then(Value::as_str).unwrap_or("no revision");
    Some(format!("{repo}@{revision}"))
}

/// What a pack would gain.
fn hint(is_pack: bool, banks: &[BankSummary]) -> Option<String> {
    if is_pack {
        return None;
    }
    let reads = banks.iter().flat_map(|bank| &bank.layers).map(|layer| layer.reads).max()?;
    let before = if reads == 1 { "one read at any offset".to_owned() } else { format!("{reads} reads") };
    Some(format!(
        "an expert takes {before} here; a streaming pack makes it one aligned read with a checksum: flint pack, then \
         {EXPERTS} holds them"
    ))
}
