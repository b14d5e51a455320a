//! `expert-manifest-v2.json`: the record table that decides where every byte of a bank is.
//!
//! [`read`] turns it into a [`Table`] only when each number in it is what sizes and widths give; [`V2::new`] writes one.
//! Source: `reference/streaming-pack.md` sections 3 and 8.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::form::{Codebook, Component, Dims, MatrixForm, Mode, RecordForm, Segment, TILE, is_exl3_width};
use super::write::Numbering;
use super::{REPACK, Refusal, strict};
use crate::Result;
use crate::safetensors::Dtype;

/// The format that this file reads and writes.
const FORMAT: &str = "mtplx-expert-manifest-v2";
/// Bounds that no model reaches, so that a hostile file cannot ask for unbounded tables.
const LAYER_BOUND: usize = 4096;
const EXPERT_BOUND: usize = 65_536;
const RECORD_BOUND: usize = 1_048_576;
const SIDE_BOUND: usize = 1 << 21;
const ALIGNMENT_BOUND: u64 = 1 << 30;

/// What the model's config asks of a bank.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    /// Sizes of the experts.
    pub(super) dims: Dims,
    /// The model's numbers of the layers that the bank holds, ascending.
    pub(super) layers: Vec<usize>,
    /// The bank's file.
    pub(super) sidecar: &'static str,
}

/// A bank's record table, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) mode: Mode,
    pub(super) dims: Dims,
    pub(super) alignment: u64,
    /// Bytes of the bank.
    pub(super) size: u64,
    /// The layers, ascending.
    pub(super) layers: Vec<LayerTable>,
}

/// The records of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LayerTable {
    /// The model's number of the layer.
    pub(super) layer: usize,
    pub(super) form: RecordForm,
    /// Where the first record starts.
    pub(super) base: u64,
    /// Bytes of a record with its padding.
    pub(super) record_bytes: u64,
    /// SHA-256 of each record with its padding; empty in a table that is not yet written.
    pub(super) sums: Vec<[u8; 32]>,
}

impl Table {
    /// The table of these layers' records, back to back.
    pub(super) fn new(mode: Mode, dims: Dims, forms: Vec<(usize, RecordForm)>) -> Self {
        let alignment = mode.alignment();
        let mut base = 0;
        let mut layers = Vec::with_capacity(forms.len());
        for (layer, form) in forms {
            let record_bytes = form.record_bytes(alignment);
            layers.push(LayerTable { layer, form, base, record_bytes, sums: Vec::new() });
            base += record_bytes * dims.experts as u64;
        }
        Self { mode, dims, alignment, size: base, layers }
    }

    /// Where a record starts.
    pub(super) fn offset(&self, at: usize, expert: usize) -> u64 {
        self.layers[at].base + self.layers[at].record_bytes * expert as u64
    }

    /// Records of all layers.
    pub(super) fn records(&self) -> usize {
        self.layers.len() * self.dims.experts
    }
}

/// Reads and checks a manifest.
///
/// # Errors
/// The first contradiction, by its [`Refusal`].
pub(super) fn read(folder: &Path, file: &str, expected: &Expected) -> Result<(Table, V2)> {
    let json = strict::read(folder, file)?;
    let tag: Tag = strict::parse(file, &json)?;
    if tag.format.as_ref().and_then(Value::as_str) != Some(FORMAT) {
        let found = tag.format.map_or("no format".to_owned(), |format| format!("format {format}"));
        let what = format!("it has {found}; this build reads {FORMAT}");
        return Err(Refusal::ManifestFormat.error(file, what, REPACK));
    }
    let manifest: V2 = strict::parse(file, &json)?;
    let table = manifest.check(file, expected)?;
    Ok((table, manifest))
}

/// Only the format, so that another version is named before its fields are missed.
#[derive(Deserialize)]
struct Tag {
    format: Option<Value>,
}

/// The file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct V2 {
    format: String,
    #[serde(default)]
    pub(super) model_key: String,
    quantization: Quantization,
    dims: DimsEntry,
    sidecar: Sidecar,
    layers: Vec<LayerEntry>,
    records: Vec<RecordEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact: Option<Artifact>,
    parity: Option<Parity>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Quantization {
    mode: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    codebook: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    codebook_multiplier: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tile: Option<Tile>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Tile {
    size: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct DimsEntry {
    hidden: u64,
    inter: u64,
    n_experts: u64,
    n_layers: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Sidecar {
    file: String,
    alignment: u64,
    size: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct LayerEntry {
    layer: u64,
    #[serde(rename = "K", skip_serializing_if = "Option::is_none")]
    k: Option<Number>,
    #[serde(rename = "projection_K", skip_serializing_if = "Option::is_none")]
    projection_k: Option<[Number; 3]>,
    record_bytes: u64,
    logical_bytes: u64,
    base_offset: u64,
    segments: Vec<SegmentEntry>,
}

/// A width: whole where it is whole, so that older readers see `3` and not `3.0`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Whole(u32),
    Half(f64),
}

impl Number {
    fn new(bits: f64) -> Self {
        if bits.fract() == 0.0 { Self::Whole(bits as u32) } else { Self::Half(bits) }
    }

    fn value(self) -> f64 {
        match self {
            Self::Whole(whole) => f64::from(whole),
            Self::Half(half) => half,
        }
    }
}

/// One array of a record.
#[derive(Debug, Serialize, Deserialize)]
struct SegmentEntry {
    component: String,
    dtype: String,
    shape: Vec<usize>,
    offset: u64,
    length: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct RecordEntry {
    layer: u64,
    expert: u64,
    sidecar_offset: u64,
    record_bytes: u64,
    logical_bytes: u64,
    sha256: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Artifact {
    record_count: u64,
    routed_expert_bytes: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Parity {
    receipts: Option<String>,
    all_pass: Option<Value>,
}

impl V2 {
    /// The manifest of a bank whose records were read back and found equal to their source.
    pub(super) fn new(table: &Table, sidecar: &str, model_key: &str, numbering: Numbering) -> Self {
        let number = |at: usize| numbering.of(at, table.layers[at].layer) as u64;
        let codebook = if let Mode::Exl3(codebook) = table.mode { Some(codebook) } else { None };
        let layers = table.layers.iter().enumerate().map(|(at, layer)| LayerEntry::new(number(at), layer));
        let records = (0..table.layers.len()).flat_map(|at| {
            let LayerTable { form, record_bytes, sums, .. } = &table.layers[at];
            sums.iter().enumerate().map(move |(expert, sum)| RecordEntry {
                layer: number(at),
                expert: expert as u64,
                sidecar_offset: table.offset(at, expert),
                record_bytes: *record_bytes,
                logical_bytes: form.logical_bytes,
                sha256: Some(strict::hex(sum)),
            })
        });
        Self {
            format: FORMAT.to_owned(),
            model_key: model_key.to_owned(),
            quantization: Quantization {
                mode: table.mode.name().to_owned(),
                codebook: codebook.map(|codebook| codebook.name().to_owned()),
                codebook_multiplier: codebook.map(|codebook| u64::from(codebook.multiplier())),
                tile: codebook.map(|_| Tile { size: TILE as u64 }),
            },
            dims: DimsEntry {
                hidden: table.dims.hidden as u64,
                inter: table.dims.inter as u64,
                n_experts: table.dims.experts as u64,
                n_layers: table.layers.len() as u64,
            },
            sidecar: Sidecar { file: sidecar.to_owned(), alignment: table.alignment, size: table.size },
            layers: layers.collect(),
            records: records.collect(),
            artifact: Some(Artifact {
                record_count: table.records() as u64,
                routed_expert_bytes: Some(table.size),
            }),
            parity: Some(Parity { receipts: Some("receipts".to_owned()), all_pass: Some(Value::Bool(true)) }),
        }
    }

    /// The table, if every number is what sizes and widths give.
    fn check(&self, file: &str, expected: &Expected) -> Result<Table> {
        let mode = self.mode(file)?;
        let dims = self.check_dims(file, expected)?;
        self.check_sidecar(file, expected)?;
        let numbers: Vec<u64> = self.layers.iter().map(|layer| layer.layer).collect();
        let numbering = numbering(&numbers, &expected.layers)
            .map_err(|what| Refusal::LayerGeometry.error(file, what, REPACK))?;
        let mut entries: Vec<&LayerEntry> = self.layers.iter().collect();
        entries.sort_by_key(|entry| entry.layer);
        let mut layers = Vec::with_capacity(entries.len());
        let mut base = 0_u64;
        for (at, entry) in entries.iter().enumerate() {
            let form = entry.check(file, mode, &dims)?;
            let wrong = |what: String| {
                let what = format!("layer {}: {what}", entry.layer);
                Refusal::LayerGeometry.error(file, what, REPACK)
            };
            let record_bytes = form.record_bytes(self.sidecar.alignment);
            if (entry.record_bytes, entry.logical_bytes) != (record_bytes, form.logical_bytes) {
                return Err(wrong(format!(
                    "record_bytes {} and logical_bytes {}, but its segments give {record_bytes} and {}",
                    entry.record_bytes, entry.logical_bytes, form.logical_bytes
                )));
            }
            if entry.base_offset != base {
                return Err(wrong(format!(
                    "base_offset {}, but the layers before it end at {base}",
                    entry.base_offset
                )));
            }
            layers.push(LayerTable {
                layer: expected.layers[at],
                form,
                base,
                record_bytes,
                sums: Vec::new(),
            });
            base = record_bytes
                .checked_mul(dims.experts as u64)
                .and_then(|bytes| base.checked_add(bytes))
                .ok_or_else(|| wrong("its records would end beyond every file".to_owned()))?;
        }
        if self.sidecar.size != base {
            let what = format!("sidecar.size is {}, but the records have {base} bytes", self.sidecar.size);
            return Err(Refusal::SidecarGeometry.error(file, what, REPACK));
        }
        let mut table = Table { mode, dims, alignment: self.sidecar.alignment, size: base, layers };
        self.check_records(file, &mut table, numbering)?;
        match self.parity.as_ref().and_then(|parity| parity.all_pass.as_ref()) {
            Some(Value::Bool(true)) => Ok(table),
            found => {
                let found = found.map_or("missing".to_owned(), ToString::to_string);
                let what = format!(
                    "parity.all_pass is {found}: the pack was not compared with its source, or differs"
                );
                Err(Refusal::ParityNotPassed.error(file, what, "make the pack anew with flint pack"))
            }
        }
    }

    fn mode(&self, file: &str) -> Result<Mode> {
        let Quantization { mode, codebook, codebook_multiplier, tile } = &self.quantization;
        let mode = match mode.as_str() {
            "exl3" => {
                let name = codebook.as_deref().unwrap_or("missing");
                let Some(codebook) = Codebook::ALL.into_iter().find(|codebook| codebook.name() == name)
                else {
                    let what = format!("quantization.codebook is {name}; Flint decodes 3inst, mcg and mul1");
                    return Err(Refusal::CodebookNotImplemented.error(
                        file,
                        what,
                        "use a checkpoint of one of them",
                    ));
                };
                // 3inst has no marker, and a file without its multiplier says nothing wrong.
                let expected = u64::from(codebook.multiplier());
                let given = codebook_multiplier.or((codebook == Codebook::ThreeInst).then_some(expected));
                if given != Some(expected) {
                    let found = given.map_or("missing".to_owned(), |value| value.to_string());
                    let what = format!("quantization.codebook_multiplier is {found}, {name} has {expected}");
                    return Err(Refusal::CodebookMultiplier.error(file, what, REPACK));
                }
                Mode::Exl3(codebook)
            }
            "affine" => Mode::Affine,
            "fp8" => Mode::Fp8,
            "plain" => Mode::Plain,
            other => {
                let what = format!("quantization.mode is {other:?}, expected exl3, affine, fp8 or plain");
                return Err(Refusal::RuntimeModeNotExl3.error(
                    file,
                    what,
                    "use a pack of one of these modes",
                ));
            }
        };
        match tile {
            Some(Tile { size }) if *size != TILE as u64 => {
                let what = format!("quantization.tile.size is {size}, Flint decodes tiles of {TILE}");
                Err(Refusal::LayerGeometry.error(file, what, REPACK))
            }
            _ => Ok(mode),
        }
    }

    fn check_dims(&self, file: &str, expected: &Expected) -> Result<Dims> {
        let DimsEntry { hidden, inter, n_experts, n_layers } = self.dims;
        let within = |value: u64, bound: usize| value >= 1 && value <= bound as u64;
        let shown = format!("hidden {hidden}, inter {inter}, n_experts {n_experts}, n_layers {n_layers}");
        let records = n_experts.saturating_mul(n_layers);
        if !(within(hidden, SIDE_BOUND)
            && within(inter, SIDE_BOUND)
            && within(n_experts, EXPERT_BOUND)
            && within(n_layers, LAYER_BOUND)
            && within(records, RECORD_BOUND))
        {
            return Err(Refusal::DimsInvalid.error(
                file,
                format!("dims are {shown}, which no model has"),
                REPACK,
            ));
        }
        let Expected { dims, layers, .. } = expected;
        let wanted = [dims.hidden, dims.inter, dims.experts, layers.len()].map(|value| value as u64);
        if [hidden, inter, n_experts, n_layers] != wanted {
            let [hidden, inter, experts, layers] = wanted;
            let what = format!(
                "dims are {shown}, but config.json asks for hidden {hidden}, inter {inter}, n_experts {experts}, \
                 n_layers {layers}"
            );
            let remedy = "manifest and config.json are of different models: download both again";
            return Err(Refusal::DimsNotImplemented.error(file, what, remedy));
        }
        Ok(*dims)
    }

    fn check_sidecar(&self, file: &str, expected: &Expected) -> Result<()> {
        let Sidecar { file: name, alignment, .. } = &self.sidecar;
        let refused = |what: String| Err(Refusal::SidecarGeometry.error(file, what, REPACK));
        if name != expected.sidecar {
            return refused(format!(
                "sidecar.file is {name:?}, expected {:?}, without a path",
                expected.sidecar
            ));
        }
        if !alignment.is_power_of_two() || !(512..=ALIGNMENT_BOUND).contains(alignment) {
            return refused(format!(
                "sidecar.alignment is {alignment}, expected a power of two of at least 512"
            ));
        }
        Ok(())
    }

    fn check_records(&self, file: &str, table: &mut Table, numbering: Numbering) -> Result<()> {
        let declared =
            self.artifact.as_ref().map_or(table.records() as u64, |artifact| artifact.record_count);
        if self.records.len() != table.records() || declared != table.records() as u64 {
            let what = format!(
                "{} records stand in it and artifact.record_count is {declared}, but {} layers of {} experts have {}",
                self.records.len(),
                table.layers.len(),
                table.dims.experts,
                table.records()
            );
            return Err(Refusal::RecordCount.error(file, what, REPACK));
        }
        let experts = table.dims.experts;
        let mut sums: Vec<Option<[u8; 32]>> = vec![None; table.records()];
        for record in &self.records {
            let RecordEntry { layer, expert, sidecar_offset, record_bytes, logical_bytes, sha256 } = record;
            let refused = |refusal: Refusal, what: String| {
                Err(refusal.error(file, format!("record of layer {layer}, expert {expert}: {what}"), REPACK))
            };
            let numbers = |at: &usize| numbering.of(*at, table.layers[*at].layer) as u64 == *layer;
            let Some(at) = (0..table.layers.len()).find(numbers).filter(|_| *expert < experts as u64) else {
                return refused(Refusal::RecordGeometry, "the pack has no such layer or expert".to_owned());
            };
            let expert = *expert as usize;
            let LayerTable { form, record_bytes: whole, .. } = &table.layers[at];
            let expected = (table.offset(at, expert), *whole, form.logical_bytes);
            if (*sidecar_offset, *record_bytes, *logical_bytes) != expected {
                return refused(
                    Refusal::RecordGeometry,
                    format!(
                        "offset {sidecar_offset}, {record_bytes} bytes, {logical_bytes} of them logical, but its layer \
                         gives {}, {} and {}",
                        expected.0, expected.1, expected.2
                    ),
                );
            }
            let Some(sum) = sha256.as_deref().and_then(strict::sha256) else {
                let found = sha256.as_deref().unwrap_or("missing");
                return refused(
                    Refusal::RecordSha256,
                    format!("sha256 is {found:?}, expected 64 hexadecimal digits"),
                );
            };
            if sums[at * experts + expert].replace(sum).is_some() {
                return refused(Refusal::RecordDuplicate, "it stands twice".to_owned());
            }
        }
        for (layer, sums) in table.layers.iter_mut().zip(sums.chunks(experts)) {
            layer.sums = sums.iter().copied().flatten().collect();
        }
        Ok(())
    }
}

/// Which of the two numberings a list of layers has: 0, 1, 2, … or the model's.
pub(super) fn numbering(found: &[u64], model: &[usize]) -> std::result::Result<Numbering, String> {
    let set: BTreeSet<u64> = found.iter().copied().collect();
    if set.len() == found.len() && set.iter().copied().eq(0..model.len() as u64) {
        return Ok(Numbering::Bank);
    }
    if set.len() == found.len() && set.iter().copied().eq(model.iter().map(|layer| *layer as u64)) {
        return Ok(Numbering::Model);
    }
    Err(format!(
        "its layers are {found:?}, expected 0 to {} or the model's {model:?}",
        model.len().saturating_sub(1)
    ))
}

impl LayerEntry {
    fn new(number: u64, layer: &LayerTable) -> Self {
        let [gate, up, down] = layer.form.matrices.map(MatrixForm::bits);
        let one = gate.total_cmp(&up).is_eq() && up.total_cmp(&down).is_eq();
        Self {
            layer: number,
            k: one.then(|| Number::new(gate)),
            projection_k: (!one).then(|| [gate, up, down].map(Number::new)),
            record_bytes: layer.record_bytes,
            logical_bytes: layer.form.logical_bytes,
            base_offset: layer.base,
            segments: layer.form.segments.iter().map(SegmentEntry::new).collect(),
        }
    }

    /// The layer's form, if its segments are what sizes and width give.
    fn check(&self, file: &str, mode: Mode, dims: &Dims) -> Result<RecordForm> {
        let refused = |refusal: Refusal, what: String| {
            Err(refusal.error(file, format!("layer {}: {what}", self.layer), REPACK))
        };
        let declared = match (self.k, self.projection_k) {
            (Some(k), None) => [k; 3],
            (None, Some(of_projections)) => of_projections,
            (None, None) => {
                return refused(Refusal::KNotImplemented, "it has neither K nor projection_K".to_owned());
            }
            (Some(_), Some(_)) => {
                return refused(Refusal::KNotImplemented, "it has both K and projection_K".to_owned());
            }
        }
        .map(Number::value);
        if let Some(k) = declared.iter().find(|k| !is_width(mode, **k)) {
            return refused(
                Refusal::KNotImplemented,
                format!("K is {k}, which is no width of {}", mode.name()),
            );
        }
        let mut arrays = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            let SegmentEntry { component, dtype, shape, .. } = segment;
            let (Ok(component), Some(dtype)) = (component.parse::<Component>(), parse_dtype(dtype)) else {
                let what = format!("segment {component:?} of type {dtype:?} is none that Flint knows");
                return refused(Refusal::LayerGeometry, what);
            };
            arrays.push((component, dtype, shape.clone()));
        }
        let form = match RecordForm::read(dims, &arrays) {
            Ok(form) if form.matrices.iter().all(|matrix| matrix.is_of(mode)) => form,
            Ok(form) => {
                let what = format!("its segments are {}, quantization.mode is {}", form.label(), mode.name());
                return refused(Refusal::LayerGeometry, what);
            }
            Err(what) => return refused(Refusal::LayerGeometry, what),
        };
        let bits = form.matrices.map(MatrixForm::bits);
        if declared.iter().zip(bits).any(|(declared, bits)| declared.total_cmp(&bits).is_ne()) {
            return refused(
                Refusal::LayerGeometry,
                format!("K is {declared:?}, but its shapes give {bits:?}"),
            );
        }
        for (entry, segment) in self.segments.iter().zip(&form.segments) {
            if (entry.offset, entry.length) != (segment.offset, segment.length) {
                let what = format!(
                    "{}: offset {} and length {}, but sizes and width give {} and {}",
                    entry.component, entry.offset, entry.length, segment.offset, segment.length
                );
                return refused(Refusal::LayerGeometry, what);
            }
        }
        Ok(form)
    }
}

/// Whether a mode has matrices of this width.
fn is_width(mode: Mode, k: f64) -> bool {
    let doubled = k * 2.0;
    if doubled.fract() != 0.0 || !(2.0..=64.0).contains(&doubled) {
        return false;
    }
    let half_bits = doubled as usize;
    match mode {
        Mode::Exl3(codebook) => {
            is_exl3_width(half_bits) && (half_bits.is_multiple_of(2) || codebook == Codebook::Mul1)
        }
        Mode::Affine => matches!(half_bits, 4 | 6 | 8 | 10 | 12 | 16),
        Mode::Fp8 => half_bits == 16,
        Mode::Plain => matches!(half_bits, 32 | 64),
    }
}

impl SegmentEntry {
    fn new(segment: &Segment) -> Self {
        Self {
            component: segment.component.to_string(),
            dtype: segment.dtype.name().to_owned(),
            shape: segment.shape.clone(),
            offset: segment.offset,
            length: segment.length,
        }
    }
}

/// A number type by its name in a safetensors header.
pub(super) fn parse_dtype(name: &str) -> Option<Dtype> {
    serde_json::from_value(Value::String(name.to_owned())).ok()
}
