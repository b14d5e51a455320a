//! Where the bytes of each routed expert are: what a bank of slots streams from.
//!
//! A pack gives one range for an expert, with its SHA-256; a plain checkpoint gives several, without sums. The reader of
//! a record need not care which of the two it is, nor how the numbers are stored.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::bank::Pack;
use super::form::{Component, Mode, RecordForm, Segment};
use super::stored::{self, Listed, StoredLayer};
use crate::config::ModelConfig;
use crate::safetensors::Dtype;
use crate::shards::{Shards, Tensor};
use crate::{Checkpoint, Error, HostBytes, Result, Source};

/// The routed experts of a checkpoint, layer by layer.
#[derive(Debug)]
pub struct ExpertSource {
    files: Vec<ExpertFile>,
    layers: Vec<ExpertLayer>,
}

/// A file that holds experts.
#[derive(Clone, Debug)]
pub struct ExpertFile {
    /// Its name in the checkpoint.
    pub name: String,
    /// Where it is.
    pub place: FilePlace,
    /// Its length.
    pub bytes: u64,
}

/// Where a file is.
#[derive(Clone, Debug)]
pub enum FilePlace {
    /// On disk.
    Disk(PathBuf),
    /// In memory: a model that is part of the program.
    Memory(HostBytes),
}

/// The experts of one layer.
#[derive(Debug)]
pub struct ExpertLayer {
    layer: usize,
    mode: Mode,
    form: RecordForm,
    /// File and first byte of each segment of each expert, expert-major.
    places: Vec<(usize, u64)>,
    /// Of a pack: bytes of a record with its padding, and the SHA-256 of each.
    records: Option<(u64, Vec<[u8; 32]>)>,
}

/// One expert of one layer.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRecord<'a> {
    source: &'a ExpertSource,
    layer: &'a ExpertLayer,
    expert: usize,
}

/// One array of an expert, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed<'a> {
    /// Which array.
    pub component: Component,
    /// Number type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: &'a [usize],
    /// Number of the file in [`ExpertSource::files`].
    pub file: usize,
    /// First byte in the file. Of a plain checkpoint it may be any number, aligned to nothing.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// One range of a file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// Number of the file in [`ExpertSource::files`].
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The segments in it: their numbers in the record, and where each starts inside the range.
    pub segments: Vec<(usize, u64)>,
}

impl ExpertSource {
    /// The experts of an open checkpoint, plain or a pack.
    ///
    /// # Errors
    /// Experts of a layer that are not stored alike.
    pub fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match &checkpoint.pack {
            Some(pack) => Ok(Self::of_pack(pack)),
            None => Self::of_shards(checkpoint.source(), &checkpoint.shards, checkpoint.config()),
        }
    }

    /// The experts of a folder, plain or a pack, from headers and manifests alone.
    ///
    /// # Errors
    /// What [`Pack::open`] and headers are refused for; experts of a layer that are not stored alike.
    pub fn open(folder: &Path) -> Result<Self> {
        let source = Source::Folder(folder.to_owned());
        let (config, is_pack) = super::inspect::config(&source)?;
        if is_pack {
            return Ok(Self::of_pack(&Pack::open(folder, &config)?));
        }
        Self::of_shards(&source, &Shards::open(&source)?, &config)
    }

    /// The experts of a plain checkpoint, from its headers.
    pub(super) fn of_shards(source: &Source, shards: &Shards, config: &ModelConfig) -> Result<Self> {
        let file = |tensor: &Tensor| shards.files[tensor.shard].name.as_str();
        let listed: Vec<Listed<'_>> =
            shards.tensors.iter().map(|tensor| (&tensor.info, file(tensor))).collect();
        let found = stored::experts(&listed, config)?;
        let files = shards.files.iter().map(|shard| ExpertFile {
            name: shard.name.clone(),
            place: match source {
                Source::Folder(folder) => FilePlace::Disk(folder.join(&shard.name)),
                _ => FilePlace::Memory(shard.bytes.clone()),
            },
            bytes: shard.bytes.len() as u64,
        });
        let layer = |stored: StoredLayer| ExpertLayer {
            layer: stored.layer,
            mode: stored.mode,
            places: stored
                .places
                .iter()
                .map(|place| (shards.tensors[place.tensor].shard, place.start))
                .collect(),
            form: stored.form,
            records: None,
        };
        Ok(Self {
            files: files.collect(),
            layers: found.trunk.into_iter().chain(found.mtp).map(layer).collect(),
        })
    }

    /// The experts of a pack.
    pub(super) fn of_pack(pack: &Pack) -> Self {
        let (mut files, mut layers) = (Vec::new(), Vec::new());
        for (number, bank) in pack.banks().enumerate() {
            let table = &bank.table;
            files.push(ExpertFile {
                name: bank.file().to_owned(),
                place: FilePlace::Disk(pack.folder().join(bank.file())),
                bytes: table.size,
            });
            for (at, layer) in table.layers.iter().enumerate() {
                let record = |expert| (table.offset(at, expert), &layer.form.segments);
                let segments = |(start, segments): (u64, &Vec<Segment>)| {
                    segments.iter().map(|segment| (number, start + segment.offset)).collect::<Vec<_>>()
                };
                layers.push(ExpertLayer {
                    layer: layer.layer,
                    mode: table.mode,
                    form: layer.form.clone(),
                    places: (0..table.dims.experts).map(record).flat_map(segments).collect(),
                    records: Some((layer.record_bytes, layer.sums.clone())),
                });
            }
        }
        Self { files, layers }
    }

    /// The files that hold experts, and maybe other tensors.
    pub fn files(&self) -> &[ExpertFile] {
        &self.files
    }

    /// The layers with routed experts: the trunk's, then the MTP layers', ascending.
    pub fn layers(&self) -> &[ExpertLayer] {
        &self.layers
    }

    /// One expert; `layer` is the model's number. `None` when the model has no such expert.
    pub fn record(&self, layer: usize, expert: usize) -> Option<ExpertRecord<'_>> {
        let layer = self.layers.iter().find(|of| of.layer == layer)?;
        (expert < layer.experts()).then_some(ExpertRecord { source: self, layer, expert })
    }

    /// Whether each expert is one range with a sum: a pack.
    pub fn has_records(&self) -> bool {
        self.layers.iter().all(|layer| layer.records.is_some())
    }
}

impl ExpertLayer {
    /// The model's number of the layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// How its experts are stored.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The arrays of an expert: types, shapes, and their places in a buffer that holds them back to back.
    pub fn form(&self) -> &RecordForm {
        &self.form
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.places.len() / self.form.segments.len().max(1)
    }
}

impl<'a> ExpertRecord<'a> {
    /// The model's number of the layer.
    pub fn layer(&self) -> usize {
        self.layer.layer
    }

    /// The expert's number.
    pub fn expert(&self) -> usize {
        self.expert
    }

    /// Its arrays, in the order of a record.
    pub fn segments(&self) -> impl Iterator<Item = Placed<'a>> + use<'a> {
        let segments = &self.layer.form.segments;
        let places = &self.layer.places[self.expert * segments.len()..][..segments.len()];
        segments.iter().zip(places).map(|(segment, (file, offset))| Placed {
            component: segment.component,
            dtype: segment.dtype,
            shape: &segment.shape,
            file: *file,
            offset: *offset,
            length: segment.length,
        })
    }

    /// The record as one range with its padding; `None` in a plain checkpoint.
    pub fn whole(&self) -> Option<Read> {
        let (bytes, _) = self.layer.records.as_ref()?;
        let mut segments = self.segments();
        let first = segments.next()?;
        let starts = self.layer.form.segments.iter().enumerate().map(|(at, segment)| (at, segment.offset));
        Some(Read { file: first.file, offset: first.offset, length: *bytes, segments: starts.collect() })
    }

    /// The ranges that hold the expert, in ascending order. Ranges with at most `gap` bytes between them become one: an
    /// expert of a plain EXL3 checkpoint is one range with the codebook's markers in it.
    pub fn reads(&self, gap: u64) -> Vec<Read> {
        if let Some(whole) = self.whole() {
            return vec![whole];
        }
        let mut placed: Vec<(usize, Placed<'_>)> = self.segments().enumerate().collect();
        placed.sort_by_key(|(_, segment)| (segment.file, segment.offset));
        let mut reads: Vec<Read> = Vec::new();
        for (number, segment) in placed {
            let end = segment.offset + segment.length;
            match reads.last_mut() {
                Some(last)
                    if last.file == segment.file && segment.offset <= last.offset + last.length + gap =>
                {
                    last.segments.push((number, segment.offset - last.offset));
                    last.length = last.length.max(end - last.offset);
                }
                _ => reads.push(Read {
                    file: segment.file,
                    offset: segment.offset,
                    length: segment.length,
                    segments: vec![(number, 0)],
                }),
            }
        }
        reads
    }

    /// SHA-256 of the record with its padding; `None` in a plain checkpoint, which has no sums.
    pub fn sha256(&self) -> Option<[u8; 32]> {
        self.layer.records.as_ref().and_then(|(_, sums)| sums.get(self.expert).copied())
    }

    /// Checks the bytes of [`whole`](Self::whole).
    ///
    /// # Errors
    /// Bytes whose sum is not the manifest's, with file, record and offset.
    pub fn check(&self, bytes: &[u8]) -> Result<()> {
        let (Some(expected), Some(whole)) = (self.sha256(), self.whole()) else { return Ok(()) };
        let found: [u8; 32] = Sha256::digest(bytes).into();
        if found == expected {
            return Ok(());
        }
        Err(Error::Sum {
            file: self.source.files[whole.file].name.clone(),
            part: format!("record of layer {}, expert {}", self.layer.layer, self.expert),
            offset: whole.offset,
            found: super::strict::hex(&found),
            expected: super::strict::hex(&expected),
            remedy: "the file is damaged: download it again, or make the pack anew with flint pack",
        })
    }
}
