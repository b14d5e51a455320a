//! A checkpoint that is open: every header read, every name, shape and width checked, no tensor data touched.

use std::fmt;

use serde_json::{Map, Value};

use crate::assemble::{assemble, member_name};
use crate::config::{ModelConfig, VisionConfig};
use crate::encoding::dense::narrow;
use crate::encoding::exl3::Marker;
use crate::encoding::scheme::Scheme;
use crate::encoding::{Encoding, Span, Stored};
use crate::exl3::{BLOCK, Exl3, unpack_signs};
use crate::matrix::{FP8_BLOCK, Form, HostBytes, PlainType, QuantMatrix, e4m3};
use crate::pack::{self, Pack};
use crate::shards::Shards;
use crate::source::Source;
use crate::table::{Shape, Table};
use crate::values::{first_nan_code, first_not_finite};
use crate::{Error, Result};

/// An open checkpoint.
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
    config_json: Value,
    config_bytes: HostBytes,
    pub(crate) table: Table,
    pub(crate) stored: Vec<Vec<Stored>>,
    pub(crate) shards: Shards,
    /// The pack that it is, if it is one.
    pub(crate) pack: Option<Pack>,
    warnings: Vec<String>,
    /// Whether members of stacks are drawn instead of read.
    drawn: bool,
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checkpoint({}, {} tensors)", self.source.label(), self.shards.tensors.len())
    }
}

impl Checkpoint {
    /// Opens a checkpoint: reads `config.json`, the index and the headers, and checks all of them against each other.
    ///
    /// # Errors
    /// Whatever is missing, damaged, contradictory or of a format that this build does not read, by name and with the
    /// remedy. No tensor data is read before all of it holds.
    pub fn open(source: Source) -> Result<Self> {
        let (config_bytes, config_json) = read_config(&source)?;
        let empty = Map::new();
        let keys = config_json.as_object().unwrap_or(&empty);
        let is_pack = pack::is_pack(&source, keys)?;
        let config = ModelConfig::from_json(keys)?;
        let vision = VisionConfig::from_json(keys)?;
        let table = Table::new(&config, vision.as_ref());
        let scheme = Scheme::read(keys, &table, config.layers())?;
        let (shards, pack) = if is_pack {
            let (shards, pack) = pack::shards(&source, &config)?;
            (shards, Some(pack))
        } else {
            (Shards::open(&source)?, None)
        };
        let stored = assemble(&table, &scheme, &shards, config.layers())?;
        let mut warnings = scheme.warnings();
        warnings.extend(pack.iter().flat_map(|pack| pack.notes().iter().cloned()));
        if matches!(scheme, Scheme::Exl3) {
            warnings.extend(crate::storage::warnings(&source, &shards)?);
        }
        Ok(Self {
            source,
            config,
            config_json,
            config_bytes,
            table,
            stored,
            shards,
            pack,
            warnings,
            drawn: false,
        })
    }

    /// Draws the numbers of routed experts from now on instead of reading them: for measuring speed. The files may then
    /// have holes where these numbers would be.
    pub fn draw_experts(&mut self) {
        self.drawn = true;
    }

    /// Where the files come from.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The text network's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// `config.json` as it is.
    pub fn config_json(&self) -> &Value {
        &self.config_json
    }

    /// What a user should know and what changes nothing, such as a table's keys that name no module.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Number of stored tensors.
    pub fn tensors(&self) -> usize {
        self.shards.tensors.len()
    }

    /// Bytes of all stored tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.shards.tensors.iter().map(|tensor| tensor.info.end - tensor.info.start).sum()
    }

    /// Whether the checkpoint has a module of this canonical name.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// A plain array as fp32, exactly, row-major. `….self_attn.conv1d` gives the taps of q, k and v one behind the
    /// other, `[3 · channels, taps]`.
    ///
    /// # Errors
    /// A name that the model does not have as an array, or a value that is not finite.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>> {
        let name = name.strip_suffix(".weight").unwrap_or(name);
        if let Some(layer) = name.strip_suffix(".conv1d") {
            let mut taps = Vec::new();
            for side in ["q", "k", "v"] {
                taps.extend(self.vector(&format!("{layer}.{side}_conv1d"))?);
            }
            return Ok(taps);
        }
        match self.find(name) {
            Some((at, members))
                if matches!(self.table.specs[at].shape, Shape::Array(_) | Shape::Values(_)) =>
            {
                let matrix = self.load(name, &members[0])?;
                let Form::Plain { kind, values } = &matrix.form else { return Err(no_such(name, "array")) };
                let span = members[0].weight;
                let first = members[0].cut.as_ref().map_or(0, |cut| cut.start * members[0].cols);
                self.check_finite(span, values.as_slice(), *kind, first)?;
                Ok((0..values.len() / kind.size()).map(|index| kind.read(values.as_slice(), index)).collect())
            }
            _ => Err(no_such(name, "array")),
        }
    }

    /// One matrix, in the bytes that the checkpoint stores.
    ///
    /// # Errors
    /// A name that the model does not have as a matrix, or scales that are not finite.
    pub fn matrix(&self, name: &str) -> Result<QuantMatrix> {
        let name = name.strip_suffix(".weight").unwrap_or(name);
        match self.find(name) {
            Some((at, members)) if matches!(self.table.specs[at].shape, Shape::Matrix { .. }) => {
                self.load(name, &members[0])
            }
            _ => Err(no_such(name, "matrix")),
        }
    }

    /// A plain matrix as numbers of type `kind`, exactly.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix); a quantised matrix; a value that `kind` cannot hold, with its tensor, shard,
    /// offset and shape.
    pub fn matrix_as(&self, name: &str, kind: PlainType) -> Result<QuantMatrix> {
        let matrix = self.matrix(name)?;
        let Form::Plain { kind: from, values } = &matrix.form else {
            return Err(no_such(name, "plain matrix"));
        };
        if *from == kind {
            return Ok(matrix);
        }
        let narrowed = narrow(values.as_slice(), *from, kind).map_err(|(index, value)| {
            let stored = self.find(&matrix.name).map(|(_, members)| &members[0]);
            let first = stored.and_then(|stored| Some(stored.cut.as_ref()?.start * stored.cols)).unwrap_or(0);
            match stored {
                Some(stored) => self.value_error(stored.weight, first + index, value, TOO_WIDE),
                None => no_such(name, "matrix"),
            }
        })?;
        let form = Form::Plain { kind, values: HostBytes::from_vec(narrowed) };
        Ok(QuantMatrix { form, ..matrix })
    }

    /// The members of a stack, in order.
    ///
    /// # Errors
    /// As [`matrix`](Self::matrix).
    pub fn stack(&self, name: &str) -> Result<Vec<QuantMatrix>> {
        match self.find(name) {
            Some((at, members)) if matches!(self.table.specs[at].shape, Shape::Stack { .. }) => {
                let shape = &self.table.specs[at].shape;
                members
                    .iter()
                    .enumerate()
                    .map(|(i, stored)| {
                        let name = member_name(name, shape, i);
                        if self.drawn {
                            // Other numbers for each member of each stack.
                            let seed = (at as u64) << 16 | i as u64;
                            return Ok(crate::drawn::draw(
                                view(&name, stored, &|span| self.mapped(span))?,
                                seed,
                            ));
                        }
                        self.load(&name, stored)
                    })
                    .collect()
            }
            _ => Err(no_such(name, "stack")),
        }
    }

    /// Names these weights: equal for equal checkpoints, different, as far as a cheap look can tell, for others.
    ///
    /// A BLAKE3 hash of `config.json`, of every shard's name, length and header, and of 64 bytes in the middle of every
    /// module. A change that spares all of these bytes goes unseen.
    pub fn manifest_digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        add(self.config_bytes.as_slice());
        for shard in &self.shards.files {
            add(shard.name.as_bytes());
            add(&(shard.bytes.len() as u64).to_le_bytes());
            add(shard.header.as_bytes());
        }
        for members in &self.stored {
            if let Some(bytes) = members.get(members.len() / 2).and_then(|stored| self.mapped(stored.weight))
            {
                let middle = bytes.len() / 2;
                add(&bytes.as_slice()[middle..(middle + 64).min(bytes.len())]);
            }
        }
        hasher.finalize().to_hex().to_string()
    }

    /// A module that the checkpoint has, and its members.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &[Stored])> {
        let at = self.table.find(name)?;
        let members = self.stored[at].as_slice();
        (!members.is_empty()).then_some((at, members))
    }

    /// The shards and their tensors.
    pub(crate) fn shards(&self) -> &Shards {
        &self.shards
    }

    /// The bytes of a span, in the mapped file.
    pub(crate) fn mapped(&self, span: Span) -> Option<HostBytes> {
        let tensor = &self.shards.tensors[span.tensor];
        let start = tensor.info.start as usize + span.start;
        self.shards.files[tensor.shard].bytes.slice(start..start + span.len)
    }

    /// A stored matrix with its bytes, its scales checked.
    fn load(&self, name: &str, stored: &Stored) -> Result<QuantMatrix> {
        self.load_from(name, stored, &|span| self.mapped(span))
    }

    /// The same with the bytes of its spans from elsewhere.
    pub(crate) fn load_from(
        &self,
        name: &str,
        stored: &Stored,
        bytes: &dyn Fn(Span) -> Option<HostBytes>,
    ) -> Result<QuantMatrix> {
        let matrix = view(name, stored, bytes)?;
        self.check_data(stored, &matrix)?;
        Ok(matrix)
    }

    /// Refuses numbers that no checkpoint has: scales that are not finite, FP8 factors that are not positive, NaN codes.
    fn check_data(&self, stored: &Stored, matrix: &QuantMatrix) -> Result<()> {
        let first_row = stored.cut.as_ref().map_or(0, |cut| cut.start);
        match &matrix.form {
            Form::Plain { .. } => Ok(()),
            Form::Affine { group, kind, scales, biases, .. } => {
                let first = first_row * (matrix.cols / group);
                for (span, bytes) in [(stored.scales, scales), (stored.biases, biases)] {
                    let Some(span) = span else { continue };
                    self.check_finite(span, bytes.as_slice(), *kind, first)?;
                }
                Ok(())
            }
            Form::Fp8Block { codes, scales, .. } => {
                if let Some(span) = stored.scales {
                    let first = first_row / FP8_BLOCK * matrix.cols.div_ceil(FP8_BLOCK);
                    self.check_factors(span, scales.as_slice(), first)?;
                }
                match first_nan_code(codes.as_slice()) {
                    None => Ok(()),
                    Some(at) => {
                        let value = e4m3(codes.as_slice()[at]);
                        Err(self.value_error(stored.weight, first_row * matrix.cols + at, value, NOT_FINITE))
                    }
                }
            }
            Form::Exl3(exl3) => {
                for (span, scales) in
                    [(stored.scales, &exl3.input_scales), (stored.biases, &exl3.output_scales)]
                {
                    let Some(span) = span else { continue };
                    self.check_finite(span, scales.as_slice(), PlainType::F16, 0)?;
                }
                stored.marker.map_or(Ok(()), |marker| self.check_marker(&marker))
            }
        }
    }

    /// Refuses numbers that are not finite. `first` is the index of the first number in its span.
    fn check_finite(&self, span: Span, bytes: &[u8], kind: PlainType, first: usize) -> Result<()> {
        match first_not_finite(bytes, kind) {
            None => Ok(()),
            Some(at) => Err(self.value_error(span, first + at, kind.read(bytes, at), NOT_FINITE)),
        }
    }

    /// Refuses FP8 factors that are not finite and positive.
    fn check_factors(&self, span: Span, bytes: &[u8], first: usize) -> Result<()> {
        let factor = |at: usize| PlainType::F32.read(bytes, at);
        match (0..bytes.len() / 4).find(|at| !(factor(*at).is_finite() && factor(*at) > 0.0)) {
            None => Ok(()),
            Some(at) => Err(self.value_error(span, first + at, factor(at), NOT_POSITIVE)),
        }
    }

    /// Refuses a codebook's marker that holds another factor than the codebook's.
    fn check_marker(&self, marker: &Marker) -> Result<()> {
        let bytes = self.mapped(marker.span).and_then(|bytes| <[u8; 4]>::try_from(bytes.as_slice()).ok());
        match bytes.map(i32::from_le_bytes) {
            Some(found) if found == marker.value as i32 => Ok(()),
            found => {
                let tensor = &self.shards.tensors[marker.span.tensor];
                Err(Error::Marker {
                    tensor: tensor.info.name.clone(),
                    file: self.shards.files[tensor.shard].name.clone(),
                    offset: tensor.info.start,
                    found: found.unwrap_or_default() as u32,
                    expected: marker.value,
                })
            }
        }
    }

    /// The error of a number that cannot be used. `index` counts from the start of the span.
    fn value_error(&self, span: Span, index: usize, value: f32, what: &'static str) -> Error {
        let tensor = &self.shards.tensors[span.tensor];
        Error::Value {
            tensor: tensor.info.name.clone(),
            file: self.shards.files[tensor.shard].name.clone(),
            offset: tensor.info.start,
            shape: tensor.info.shape.clone(),
            value: f64::from(value),
            index: span.start / tensor.info.dtype.size() + index,
            what,
        }
    }
}

/// A stored matrix, its numbers unseen.
fn view(name: &str, stored: &Stored, find: &dyn Fn(Span) -> Option<HostBytes>) -> Result<QuantMatrix> {
    let bytes =
        |span: Option<Span>| span.and_then(find).ok_or_else(|| no_such(name, "matrix inside its shard"));
    let values = bytes(Some(stored.weight))?;
    let form = match stored.encoding {
        Encoding::Plain(kind) => Form::Plain { kind, values },
        Encoding::Affine { bits, group, kind } => {
            let (scales, biases) = (bytes(stored.scales)?, bytes(stored.biases)?);
            Form::Affine { bits, group, kind, codes: values, scales, biases }
        }
        Encoding::Fp8Block => Form::Fp8Block { codes: values, scales: bytes(stored.scales)?, first_row: 0 },
        Encoding::Exl3 { rate, codebook } => {
            let (inputs, outputs) =
                (stored.cols.next_multiple_of(BLOCK), stored.rows.next_multiple_of(BLOCK));
            Form::Exl3(Exl3 {
                rate,
                codebook,
                inputs,
                outputs,
                first_row: 0,
                trellis: values,
                input_scales: exl3_scales(bytes(stored.scales)?, inputs),
                output_scales: exl3_scales(bytes(stored.biases)?, outputs),
            })
        }
    };
    let whole = QuantMatrix { name: name.to_owned(), rows: stored.rows, cols: stored.cols, form };
    whole.check()?;
    match &stored.cut {
        None => Ok(whole),
        Some(cut) => whole.cut_rows(cut.clone()).ok_or_else(|| no_such(name, "matrix of so many rows")),
    }
}

/// Scales of a trellis's side of `len` as fp16: as they are stored, or unpacked from signs.
fn exl3_scales(stored: HostBytes, len: usize) -> HostBytes {
    if stored.len() == len * 2 { stored } else { HostBytes::from_vec(unpack_signs(stored.as_slice())) }
}

const NOT_FINITE: &str = "is not a finite number; the file is damaged: download it again";
const TOO_WIDE: &str = "cannot be held exactly by the narrower type that is needed here; use a checkpoint that stores this \
                        tensor in that type";
const NOT_POSITIVE: &str =
    "is no positive number, as an FP8 factor must be; the file is damaged: download it again";

fn no_such(name: &str, what: &'static str) -> Error {
    Error::NoSuchModule { name: name.to_owned(), what }
}

/// Reads and parses `config.json`.
fn read_config(source: &Source) -> Result<(HostBytes, Value)> {
    const CONFIG: &str = "config.json";
    if let Source::Folder(path) = source
        && path.is_file()
    {
        return Err(refuse_file(path));
    }
    let Some(bytes) = source.read(CONFIG)? else { return Err(no_config(source)?) };
    let malformed = |what: String| Error::Malformed { file: CONFIG.to_owned(), what };
    let json: Value =
        serde_json::from_slice(bytes.as_slice()).map_err(|error| malformed(error.to_string()))?;
    if json.is_object() { Ok((bytes, json)) } else { Err(malformed("it holds no object".to_owned())) }
}

fn refuse_file(path: &std::path::Path) -> Error {
    let at = path.display().to_string();
    if path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) {
        let remedy = "download a safetensors version of the model (official, BF16 or MLX)";
        return Error::Unsupported { at, what: "the GGUF format".to_owned(), remedy };
    }
    let found = "this is a file, a checkpoint is a folder".to_owned();
    Error::NoCheckpoint { place: at, found, remedy: "give the folder that holds config.json" }
}

fn no_config(source: &Source) -> Result<Error> {
    let files = source.files()?;
    if let Some(name) = files.iter().find(|name| name.to_lowercase().ends_with(".gguf")) {
        return Ok(Error::Unsupported {
            at: name.clone(),
            what: "the GGUF format".to_owned(),
            remedy: "download a safetensors version of the model (official, BF16 or MLX)",
        });
    }
    Ok(Error::NoCheckpoint {
        place: source.label(),
        found: "there is no config.json".to_owned(),
        remedy: "give the folder of a downloaded GLM-5.3-Flash checkpoint",
    })
}
