//! Experts read from a checkpoint's files one by one, for a bank that holds only some of them.
//!
//! `slab.rs` memory of a record, `layout.rs` which bytes of which files it is, `reader.rs` many reads at once
//! (`ring.rs` io_uring, `threads.rs` a pool), `files.rs` files that may change under us. Nothing here depends on the
//! page cache: files are read directly where the system lets us.

mod files;
mod layout;
mod raw;
mod reader;
#[cfg(target_os = "linux")]
mod ring;
mod slab;
mod threads;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use raw::raw_rate;
pub use reader::{ReadEngine, ReadOptions, VerifyRecords};
pub use slab::Slab;

use crate::checkpoint::Checkpoint;
use crate::config::FeedForward;
use crate::encoding::{Span, Stored};
use crate::matrix::{HostBytes, QuantMatrix};
use crate::pack::ExpertSource;
use crate::source::Source;
use crate::{Error, Result};
use files::ReadFile;
use layout::{Layout, Piece};
use reader::{Done, Job, Reader, Sum};

/// Experts that are on their way at once, unless somebody says otherwise: enough to keep a fast disk busy.
pub const STAGING: usize = 16;

/// The projections of an expert, in the order of its parts.
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// A routed expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// Layer of the model.
    pub layer: usize,
    /// Its number in the layer.
    pub expert: usize,
}

/// An expert's matrices. Their bytes lie in the slab that came with them.
#[derive(Clone, Debug)]
pub struct ExpertMatrices {
    /// Gate and up projections.
    pub gate_up: [QuantMatrix; 2],
    /// Down projection.
    pub down: QuantMatrix,
}

/// An expert that was read, or why it was not.
pub struct Arrival {
    /// Which one.
    pub id: ExpertId,
    /// Its memory: with [`ExpertMatrices`] the only handles of it.
    pub slab: Arc<Slab>,
    /// Bytes that were read.
    pub bytes: u64,
    /// From [`ExpertStream::start`] to here.
    pub time: Duration,
    /// The expert.
    pub matrices: Result<ExpertMatrices>,
}

/// Where one expert lies.
struct Record {
    layout: Arc<Layout>,
    /// The spans of the layout's places, in their order.
    spans: Vec<Span>,
    /// Of a pack: the place behind those of the spans is the whole record.
    sum: Option<Sum>,
}

/// Reads the experts of a checkpoint in the background.
pub struct ExpertStream {
    checkpoint: Arc<Checkpoint>,
    reader: Reader,
    /// By layer (none for layers without routed experts), then by expert.
    records: Vec<Vec<Record>>,
    labels: Vec<String>,
    verify: VerifyRecords,
    /// Records that were compared with their sums.
    verified: HashSet<ExpertId>,
    under_way: HashMap<u64, (ExpertId, Instant)>,
    tickets: u64,
}

impl ExpertStream {
    /// Opens the files for reading experts. Reads nothing.
    ///
    /// # Errors
    /// When a file cannot be opened, or the engine that was asked for is not to be had.
    pub fn open(checkpoint: Arc<Checkpoint>, options: ReadOptions) -> Result<Self> {
        let config = checkpoint.config();
        let sums = checkpoint.record_sums()?;
        let records = (0..config.layers())
            .map(|layer| match config.feed_forward[layer] {
                FeedForward::Dense => Ok(Vec::new()),
                FeedForward::Sparse => (0..config.experts)
                    .map(|expert| checkpoint.record(ExpertId { layer, expert }, sums.as_ref()))
                    .collect(),
            })
            .collect::<Result<Vec<Vec<Record>>>>()?;
        let runs = records.iter().flatten().flat_map(|record| &record.layout.runs);
        let used: HashSet<usize> = runs.map(|run| run.file).collect();
        let files = checkpoint.open_files(&used, options.direct)?;
        let labels = files.iter().map(|file| file.label.clone()).collect();
        let reader = Reader::new(files, options)
            .map_err(|source| Error::Reader { engine: format!("{:?}", options.engine), source })?;
        Ok(Self {
            checkpoint,
            reader,
            records,
            labels,
            verify: options.verify,
            verified: HashSet::new(),
            under_way: HashMap::new(),
            tickets: 0,
        })
    }

    /// What asks the operating system: `io_uring` or `threads`.
    pub fn engine(&self) -> &'static str {
        self.reader.name()
    }

    /// Bytes of a slab that holds any expert of a layer; 0 for a layer without experts.
    pub fn slab_bytes(&self, layer: usize) -> usize {
        self.records.get(layer).into_iter().flatten().map(|record| record.layout.bytes).max().unwrap_or(0)
    }

    /// Matrices like those of a layer's experts, for allocating slots.
    ///
    /// # Errors
    /// A layer without experts.
    pub fn like(&self, layer: usize) -> Result<ExpertMatrices> {
        let id = ExpertId { layer, expert: 0 };
        self.checkpoint.expert(id, &|span| self.checkpoint.mapped(span))
    }

    /// Starts to read an expert into `slab`, which is at least [`slab_bytes`](Self::slab_bytes) long.
    ///
    /// # Errors
    /// No such expert, a slab that is too short, or a reader that is gone.
    pub fn start(&mut self, id: ExpertId, slab: Slab) -> Result<()> {
        let record = self.records.get(id.layer).and_then(|layer| layer.get(id.expert));
        let (layout, sum) = match record {
            Some(record) if slab.len() >= record.layout.bytes => (Arc::clone(&record.layout), record.sum),
            _ => return Err(no_expert(id)),
        };
        let sum = sum.filter(|_| match self.verify {
            VerifyRecords::Always => true,
            VerifyRecords::First => !self.verified.contains(&id),
            VerifyRecords::Never => false,
        });
        self.tickets += 1;
        let job = Job { ticket: self.tickets, layout, slab, sum };
        if self.reader.start(job).is_some() {
            return Err(Error::Expert {
                layer: id.layer,
                expert: id.expert,
                file: self.checkpoint.source().label(),
                offset: 0,
                what: "the reading thread has ended".to_owned(),
            });
        }
        self.under_way.insert(self.tickets, (id, Instant::now()));
        Ok(())
    }

    /// Experts that were started and have not arrived.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// The next expert to arrive, in any order; `None` when none does within `wait`.
    pub fn next(&mut self, wait: Duration) -> Option<Arrival> {
        let Done { ticket, slab, result } = self.reader.next(wait)?;
        let (id, started) = self.under_way.remove(&ticket)?;
        let record = &self.records[id.layer][id.expert];
        let bytes = record.layout.needed();
        let slab = Arc::new(slab);
        let matrices = match result {
            Ok(()) => {
                self.verified.insert(id);
                self.matrices(id, &slab)
            }
            Err(failure) => Err(Error::Expert {
                layer: id.layer,
                expert: id.expert,
                file: self.labels[failure.file].clone(),
                offset: failure.offset,
                what: failure.what,
            }),
        };
        Some(Arrival { id, slab, bytes, time: started.elapsed(), matrices })
    }

    /// The matrices of an expert that lies in a slab.
    fn matrices(&self, id: ExpertId, slab: &Arc<Slab>) -> Result<ExpertMatrices> {
        let record = &self.records[id.layer][id.expert];
        let bytes = HostBytes::new(Arc::clone(slab) as Arc<dyn AsRef<[u8]> + Send + Sync>);
        self.checkpoint.expert(id, &|span| {
            let place = record.spans.iter().position(|known| *known == span)?;
            bytes.slice(record.layout.places[place].clone())
        })
    }
}

impl Checkpoint {
    /// Whether experts can be read one by one: the files are on a disk.
    pub(crate) fn streams(&self) -> bool {
        matches!(self.source(), Source::Folder(_))
    }

    /// Bytes of a slab for any expert of each layer that has some.
    pub(crate) fn slab_bytes(&self) -> Result<Vec<usize>> {
        let config = self.config();
        let sums = self.record_sums()?;
        let sparse = (0..config.layers()).filter(|layer| config.feed_forward[*layer] == FeedForward::Sparse);
        let largest = |layer| {
            let bytes = |expert| {
                Ok(Slab::rounded(self.record(ExpertId { layer, expert }, sums.as_ref())?.layout.bytes))
            };
            let all = (0..config.experts).map(bytes).collect::<Result<Vec<_>>>()?;
            Ok(all.into_iter().max().unwrap_or(0))
        };
        sparse.map(largest).collect()
    }

    /// The shards; those that are used are open for reading.
    fn open_files(&self, used: &HashSet<usize>, direct: bool) -> Result<Vec<ReadFile>> {
        let shards = self.shards().files.iter().enumerate();
        let open = |(at, shard): (usize, &crate::shards::Shard)| match self.source() {
            Source::Folder(folder) if used.contains(&at) => ReadFile::open(&folder.join(&shard.name), direct),
            _ => Ok(ReadFile::memory(shard.name.clone(), shard.bytes.clone())),
        };
        shards.map(open).collect()
    }

    /// The sums of a pack's records; a plain checkpoint has none.
    fn record_sums(&self) -> Result<Option<ExpertSource>> {
        self.pack.as_ref().map(|_| ExpertSource::of_checkpoint(self)).transpose()
    }

    /// Where an expert lies.
    fn record(&self, id: ExpertId, sums: Option<&ExpertSource>) -> Result<Record> {
        let mut spans: Vec<Span> = Vec::new();
        for (_, stored) in self.projections(id)? {
            for span in stored.spans() {
                if !spans.contains(&span) {
                    spans.push(span);
                }
            }
        }
        let mut pieces: Vec<Piece> = spans.iter().map(|span| self.piece(*span)).collect();
        let mut sum = None;
        if let Some(record) = sums.and_then(|sums| sums.record(id.layer, id.expert))
            && let (Some(whole), Some(sha256)) = (record.whole(), record.sha256())
        {
            // With its padding, which the sum covers.
            let file = pieces.first().map_or(0, |piece| piece.file);
            pieces.push(Piece { file, start: whole.offset, len: whole.length as usize });
            sum = Some(Sum { place: spans.len(), sha256 });
        }
        Ok(Record { layout: Arc::new(Layout::new(&pieces)), spans, sum })
    }

    fn piece(&self, span: Span) -> Piece {
        let tensor = &self.shards().tensors[span.tensor];
        Piece { file: tensor.shard, start: tensor.info.start + span.start as u64, len: span.len }
    }

    /// An expert's projections: canonical names and how they are stored.
    fn projections(&self, id: ExpertId) -> Result<Vec<(String, &Stored)>> {
        let projection = |part: &&str| {
            let stack = format!("layers.{}.mlp.experts.{part}", id.layer);
            let stored = self.find(&stack).and_then(|(_, members)| members.get(id.expert));
            stored.map(|stored| (format!("{stack}#{}", id.expert), stored)).ok_or_else(|| no_expert(id))
        };
        PROJECTIONS.iter().map(projection).collect()
    }

    /// An expert whose bytes come from `bytes`.
    fn expert(&self, id: ExpertId, bytes: &dyn Fn(Span) -> Option<HostBytes>) -> Result<ExpertMatrices> {
        let mut loaded = Vec::with_capacity(PROJECTIONS.len());
        for (name, stored) in self.projections(id)? {
            loaded.push(self.load_from(&name, stored, bytes)?);
        }
        match <[QuantMatrix; 3]>::try_from(loaded) {
            Ok([gate, up, down]) => Ok(ExpertMatrices { gate_up: [gate, up], down }),
            Err(_) => Err(no_expert(id)),
        }
    }
}

fn no_expert(id: ExpertId) -> Error {
    let name = format!("layers.{}.mlp.experts#{}", id.layer, id.expert);
    Error::NoSuchModule { name, what: "routed expert" }
}
