//! The reverse of packing: the source's files again, byte for byte, from a pack that Flint made.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::bank::open_sidecar;
use super::origin::{Folder, Origin, OriginFile};
use super::write::{
    HEADERS, Headers, PackOptions, PackPlan, Partial, Receipt, SOURCE_CONFIG, SOURCE_INDEX, ShardPlan,
    Target, failed, receipt_name,
};
use super::{Refusal, strict};
use crate::safetensors::HEADER_BOUND;
use crate::shards::INDEX;
use crate::{Error, Result};

const CHUNK: usize = 1 << 20;
/// What to do about a pack whose receipts do not tell how its source looked.
const NO_RECEIPTS: &str = "only packs that flint pack made, with their receipts, can be unpacked";

/// Writes the source of a pack into `folder`, which must not exist. `progress` gets bytes done and all bytes.
///
/// # Errors
/// A pack without receipts; bytes whose SHA-256 is not the source's, by file, tensor and offset.
pub fn unpack(pack: &Path, folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
    let receipts = Receipts::open(pack)?;
    let plan = PackPlan::new(&receipts, &PackOptions::default())?;
    let banks = plan.banks.iter().map(|bank| open_sidecar(pack, bank.file, bank.table.size));
    let mut banks: Vec<File> = banks.collect::<Result<_>>()?;
    let partial = Partial::begun(folder)?;
    let (mut done, all) = (0, plan.source_bytes());
    for shard in &plan.shards {
        let mut on_bytes = |bytes: u64| {
            done += bytes;
            progress(done, all);
        };
        write_shard(pack, &partial, shard, &mut banks, &mut on_bytes)?;
    }
    partial.write("config.json", &plan.config_bytes)?;
    if let Some(index) = &plan.index_bytes {
        partial.write(INDEX, index)?;
    }
    copy_others(pack, &receipts, &partial)?;
    partial.complete(folder)
}

fn write_shard(
    pack: &Path,
    partial: &Partial,
    shard: &ShardPlan,
    banks: &mut [File],
    on_bytes: &mut dyn FnMut(u64),
) -> Result<()> {
    let name = receipt_name(shard);
    let receipt: Receipt = strict::parse(&name, &strict::read(pack, &name)?)?;
    let trunk_path = pack.join(&shard.trunk);
    let mut trunk = File::open(&trunk_path).map_err(failed(&trunk_path))?;
    let mut temporary = partial.create(&shard.source.name)?;
    let path = temporary.path.clone();
    let mut out = Hashed { file: &mut temporary.file, sum: Sha256::new(), at: 0, path: &path };
    out.write(&(shard.header.len() as u64).to_le_bytes())?;
    out.write(shard.header.as_bytes())?;
    for (number, piece) in shard.pieces.iter().enumerate() {
        out.zeros(piece.start)?;
        let sum = match piece.target {
            Target::Trunk(offset) => out.copy(&mut trunk, offset, piece.length, &shard.trunk)?,
            Target::Bank(bank, offset) => out.copy(&mut banks[bank], offset, piece.length, "the bank")?,
            Target::Marker(value) => out.copy(&mut Cursor::new(value.to_le_bytes()), 0, piece.length, "")?,
        };
        on_bytes(piece.length);
        if receipt.piece(number) != Some(sum) {
            let tensor = &shard.tensors[piece.tensor].name;
            return Err(differs(
                &shard.source.name,
                &format!("tensor {tensor}"),
                piece.start,
                &sum,
                "its receipt's",
            ));
        }
    }
    out.zeros(shard.source.bytes)?;
    let sum: [u8; 32] = out.sum.finalize().into();
    if strict::hex(&sum) != receipt.source_sha256 {
        return Err(differs(&shard.source.name, "the whole file", 0, &sum, &receipt.source_sha256));
    }
    partial.keep(temporary)
}

fn differs(file: &str, part: &str, offset: u64, found: &[u8; 32], expected: &str) -> Error {
    Error::Sum {
        file: file.to_owned(),
        part: part.to_owned(),
        offset,
        found: strict::hex(found),
        expected: expected.to_owned(),
        remedy: "the pack is damaged: flint verify names the file; download that file again, or make the pack anew",
    }
}

/// A file that is written from its start to its end, with its sum.
struct Hashed<'a> {
    file: &'a mut File,
    sum: Sha256,
    at: u64,
    path: &'a Path,
}

impl Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.sum.update(bytes);
        self.at += bytes.len() as u64;
        self.file.write_all(bytes).map_err(failed(self.path))
    }

    /// Zeros up to a place: what lay between tensors is no tensor's.
    fn zeros(&mut self, to: u64) -> Result<()> {
        while self.at < to {
            let gap = vec![0; (to - self.at).min(CHUNK as u64) as usize];
            self.write(&gap)?;
        }
        Ok(())
    }

    fn copy(
        &mut self,
        from: &mut (impl Read + Seek),
        offset: u64,
        length: u64,
        name: &str,
    ) -> Result<[u8; 32]> {
        let read_failed = || failed(Path::new(name));
        from.seek(SeekFrom::Start(offset)).map_err(read_failed())?;
        let (mut sum, mut left) = (Sha256::new(), length);
        let mut buffer = vec![0; length.min(CHUNK as u64) as usize];
        while left > 0 {
            let chunk = &mut buffer[..left.min(CHUNK as u64) as usize];
            from.read_exact(chunk).map_err(read_failed())?;
            sum.update(&*chunk);
            left -= chunk.len() as u64;
            self.write(chunk)?;
        }
        Ok(sum.finalize().into())
    }
}

/// Files of the pack that are the source's, unchanged.
fn copy_others(pack: &Path, receipts: &Receipts, partial: &Partial) -> Result<()> {
    for file in receipts.pack.files()?.iter().filter(|file| receipts.is_other(&file.name)) {
        let mut temporary = partial.create(&file.name)?;
        let mut reader = receipts.pack.open(file, 0, file.bytes)?;
        std::io::copy(&mut reader, &mut temporary.file).map_err(failed(&pack.join(&file.name)))?;
        partial.keep(temporary)?;
    }
    Ok(())
}

/// A pack's receipts as the place that its source's headers come from.
struct Receipts {
    pack: Folder,
    label: String,
    headers: Headers,
    small: BTreeMap<&'static str, Vec<u8>>,
}

impl Receipts {
    fn open(pack: &Path) -> Result<Self> {
        let missing =
            |file: &str| Refusal::ManifestMissing.error(file, "the receipt is not there", NO_RECEIPTS);
        let headers = strict::read_optional(pack, HEADERS)?.ok_or_else(|| missing(HEADERS))?;
        let headers: Headers = strict::parse(HEADERS, &headers)?;
        let config = strict::read_optional(pack, SOURCE_CONFIG)?.ok_or_else(|| missing(SOURCE_CONFIG))?;
        let mut small = BTreeMap::from([("config.json", config)]);
        if let Some(index) = strict::read_optional(pack, SOURCE_INDEX)? {
            small.insert(INDEX, index);
        }
        Ok(Self { pack: Folder::new(pack), label: pack.display().to_string(), headers, small })
    }

    /// Whether a file of the pack is one of the source that is neither weights nor rebuilt.
    fn is_other(&self, name: &str) -> bool {
        let own = [
            super::EXPERTS,
            super::MTP_EXPERTS,
            super::MANIFEST,
            super::MANIFEST_V1,
            super::MTP_MANIFEST,
            super::MTP_MANIFEST_V1,
            super::SUMS,
            super::profile::PROMPT,
            super::profile::DECODE,
            super::fit::FILE,
            "TD-REPACK-RECEIPT.json",
            "config.json",
            INDEX,
        ];
        !own.contains(&name)
            && !name.starts_with("receipts/")
            && !self.headers.shards.iter().any(|shard| shard.trunk == name || shard.name == name)
    }
}

impl Origin for Receipts {
    fn label(&self) -> String {
        self.label.clone()
    }

    fn repository(&self) -> Option<(String, String)> {
        None
    }

    fn files(&self) -> Result<Vec<OriginFile>> {
        let file =
            |name: &str, bytes: u64| OriginFile { name: name.to_owned(), bytes, sha256: None, stamp: 0 };
        let small = self.small.iter().map(|(name, bytes)| file(name, bytes.len() as u64));
        Ok(small.chain(self.headers.shards.iter().map(|shard| file(&shard.name, shard.bytes))).collect())
    }

    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>> {
        let bytes = match self.headers.shards.iter().find(|shard| shard.name == file.name) {
            Some(shard) if shard.header.len() as u64 <= HEADER_BOUND => {
                let mut start = (shard.header.len() as u64).to_le_bytes().to_vec();
                start.extend(shard.header.as_bytes());
                start
            }
            _ => self.small.get(file.name.as_str()).cloned().unwrap_or_default(),
        };
        let mut reader = Cursor::new(bytes);
        reader.set_position(offset);
        Ok(Box::new(reader.take(length)))
    }
}
