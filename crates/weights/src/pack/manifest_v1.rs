//! `expert-manifest.json`: the older record table. Flint needs nothing from it, but where it is there it must say what
//! the newer one says, since another engine may read it.
//!
//! Offsets of segments count from the start of the bank here. Source: `reference/streaming-pack.md` section 4.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::form::Mode;
use super::manifest::{Table, numbering, parse_dtype};
use super::write::Numbering;
use super::{REPACK, Refusal, strict};
use crate::Result;

/// The format that this file reads and writes.
const FORMAT: &str = "mtplx-expert-manifest-v1";

/// The file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct V1 {
    format: String,
    #[serde(default)]
    pub(super) model_key: String,
    #[serde(default)]
    pub(super) source_repo: String,
    #[serde(default)]
    pub(super) manifest_sha256: String,
    quantization: Quantization,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact: Option<Artifact>,
    sidecar: Sidecar,
    #[serde(default)]
    shards: Vec<ShardEntry>,
    #[serde(default)]
    pub(super) resident_tensors: Vec<ResidentTensor>,
    records: Vec<RecordEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Quantization {
    mode: String,
    #[serde(default)]
    bits: serde_json::Value,
    #[serde(default)]
    group_size: serde_json::Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Artifact {
    record_count: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Sidecar {
    file: String,
    alignment: u64,
    size: u64,
    sha256: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ShardEntry {
    name: String,
    size: u64,
}

/// A tensor of the trunk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ResidentTensor {
    pub(super) tensor: String,
    pub(super) shard: String,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RecordEntry {
    layer: u64,
    expert: u64,
    logical_bytes: u64,
    sidecar_offset: u64,
    sidecar_length: u64,
    sha256: Option<String>,
    segments: Vec<SegmentEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SegmentEntry {
    component: String,
    #[serde(default)]
    tensor: String,
    shard: String,
    offset: u64,
    length: u64,
    dtype: String,
    shape: Vec<usize>,
}

/// What a packer knows of a bank besides its table.
pub(super) struct Written<'a> {
    pub(super) sidecar: &'a str,
    /// SHA-256 of the whole bank.
    pub(super) sum: [u8; 32],
    /// SHA-256 of each record without its padding, layer by layer.
    pub(super) logical_sums: &'a [Vec<[u8; 32]>],
    /// The source tensor of each segment: by layer, expert, segment.
    pub(super) tensor: &'a dyn Fn(usize, usize, usize) -> String,
    pub(super) numbering: Numbering,
}

impl V1 {
    /// The manifest of a bank.
    pub(super) fn new(table: &Table, written: &Written<'_>) -> Self {
        let record = |at: usize, expert: usize| {
            let layer = &table.layers[at];
            let offset = table.offset(at, expert);
            let segments = layer.form.segments.iter().enumerate().map(|(number, segment)| SegmentEntry {
                component: segment.component.to_string(),
                tensor: (written.tensor)(at, expert, number),
                shard: written.sidecar.to_owned(),
                offset: offset + segment.offset,
                length: segment.length,
                dtype: segment.dtype.name().to_owned(),
                shape: segment.shape.clone(),
            });
            RecordEntry {
                layer: written.numbering.of(at, layer.layer) as u64,
                expert: expert as u64,
                logical_bytes: layer.form.logical_bytes,
                sidecar_offset: offset,
                sidecar_length: layer.form.logical_bytes,
                sha256: Some(strict::hex(&written.logical_sums[at][expert])),
                segments: segments.collect(),
            }
        };
        let records = (0..table.layers.len())
            .flat_map(|at| (0..table.dims.experts).map(move |expert| (at, expert)))
            .map(|(at, expert)| record(at, expert));
        Self {
            format: FORMAT.to_owned(),
            model_key: String::new(),
            source_repo: String::new(),
            manifest_sha256: String::new(),
            quantization: quantization(table),
            artifact: Some(Artifact { record_count: table.records() as u64 }),
            sidecar: Sidecar {
                file: written.sidecar.to_owned(),
                alignment: table.alignment,
                size: table.size,
                sha256: Some(strict::hex(&written.sum)),
            },
            shards: vec![ShardEntry { name: written.sidecar.to_owned(), size: table.size }],
            resident_tensors: Vec::new(),
            records: records.collect(),
        }
    }
}

/// The older manifest's mode: it has no field for the codebook.
fn mode(mode: Mode) -> String {
    match mode {
        Mode::Exl3(codebook) => format!("exl3-{}", codebook.name()),
        other => other.name().to_owned(),
    }
}

/// Bits and group of the first matrix: information, for readers that print them.
fn quantization(table: &Table) -> Quantization {
    use super::form::MatrixForm;
    let first = table.layers.first().map(|layer| layer.form.matrices[0]);
    let group = match first {
        Some(MatrixForm::Affine { group, .. }) => group,
        Some(MatrixForm::Fp8) => crate::matrix::FP8_BLOCK,
        Some(MatrixForm::Exl3 { .. }) => super::form::TILE,
        _ => 1,
    };
    let bits = first.map_or(0.0, MatrixForm::bits);
    let bits = if bits.fract() == 0.0 { serde_json::json!(bits as u64) } else { serde_json::json!(bits) };
    Quantization { mode: mode(table.mode), bits, group_size: serde_json::json!(group) }
}

/// Compares the older manifest, where it is there, with the table of the newer one.
///
/// # Errors
/// `RuntimeModeNotExl3` for another mode, `RuntimeRecordMismatch` for another record, [`Refusal`]s of reading.
pub(super) fn compare(folder: &Path, file: &str, table: &Table, layers: &[usize]) -> Result<Option<V1>> {
    let Some(json) = strict::read_optional(folder, file)? else { return Ok(None) };
    let manifest: V1 = strict::parse(file, &json)?;
    if manifest.format != FORMAT {
        let what = format!("it has format {:?}; this build reads {FORMAT}", manifest.format);
        return Err(Refusal::ManifestFormat.error(file, what, REPACK));
    }
    let expected = mode(table.mode);
    if manifest.quantization.mode != expected {
        let what = format!(
            "quantization.mode is {:?}, the newer manifest says {expected}",
            manifest.quantization.mode
        );
        return Err(Refusal::RuntimeModeNotExl3.error(file, what, REPACK));
    }
    let mismatch = |what: String| {
        Err(Refusal::RuntimeRecordMismatch.error(file, format!("{what}; the newer manifest differs"), REPACK))
    };
    if manifest.records.len() != table.records() {
        return mismatch(format!("it has {} records, not {}", manifest.records.len(), table.records()));
    }
    let sidecar = &manifest.sidecar;
    if sidecar.size != table.size || sidecar.alignment != table.alignment {
        return mismatch(format!("its bank has {} bytes, alignment {}", sidecar.size, sidecar.alignment));
    }
    let mut numbers: Vec<u64> = manifest.records.iter().map(|record| record.layer).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let Ok(numbering) = numbering(&numbers, layers) else {
        return mismatch(format!("its layers are {numbers:?}"));
    };
    let mut seen = vec![false; table.records()];
    for record in &manifest.records {
        let at = (0..table.layers.len())
            .find(|at| numbering.of(*at, table.layers[*at].layer) as u64 == record.layer)
            .filter(|_| record.expert < table.dims.experts as u64);
        let what = format!("record of layer {}, expert {}", record.layer, record.expert);
        let Some(at) = at else { return mismatch(format!("{what} is no record of the pack")) };
        let expert = record.expert as usize;
        if std::mem::replace(&mut seen[at * table.dims.experts + expert], true) {
            return mismatch(format!("{what} stands twice"));
        }
        if let Err(found) = record.compare(table, at, expert) {
            return mismatch(format!("{what}: {found}"));
        }
    }
    Ok(Some(manifest))
}

impl RecordEntry {
    /// What differs from the table, in words.
    fn compare(&self, table: &Table, at: usize, expert: usize) -> std::result::Result<(), String> {
        let form = &table.layers[at].form;
        let offset = table.offset(at, expert);
        if self.sidecar_offset != offset || self.logical_bytes != form.logical_bytes {
            return Err(format!(
                "offset {} and {} logical bytes, not {offset} and {}",
                self.sidecar_offset, self.logical_bytes, form.logical_bytes
            ));
        }
        // Both lengths were seen called so.
        if ![form.logical_bytes, table.layers[at].record_bytes].contains(&self.sidecar_length) {
            return Err(format!("sidecar_length {}, not {}", self.sidecar_length, form.logical_bytes));
        }
        if self.segments.len() != form.segments.len() {
            return Err(format!("{} segments, not {}", self.segments.len(), form.segments.len()));
        }
        for (entry, segment) in self.segments.iter().zip(&form.segments) {
            let same = entry.component == segment.component.to_string()
                && parse_dtype(&entry.dtype) == Some(segment.dtype)
                && entry.shape == segment.shape
                && entry.offset == offset + segment.offset
                && entry.length == segment.length;
            if !same {
                return Err(format!(
                    "{} is {} {:?} at {}, {} bytes, not {} {} {:?} at {}, {} bytes",
                    entry.component,
                    entry.dtype,
                    entry.shape,
                    entry.offset,
                    entry.length,
                    segment.component,
                    segment.dtype.name(),
                    segment.shape,
                    offset + segment.offset,
                    segment.length
                ));
            }
        }
        Ok(())
    }
}
