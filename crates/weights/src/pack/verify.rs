//! A pack against its own sums: every file, every record. All that is wrong is found, not the first thing only.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::bank::{Bank, Pack};
use super::origin::{Folder, Origin as _};
use super::{SUMS, strict, sums};
use crate::config::ModelConfig;
use crate::{Error, Result};

const CHUNK: usize = 1 << 20;
/// Files up to this size are hashed in a quick look too: all but banks and shards.
const SMALL: u64 = 64 << 20;

/// How much is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything.
    All,
    /// Small files, and so many random records of all banks.
    Quick {
        /// How many.
        records: usize,
        /// Which: the same seed takes the same.
        seed: u64,
    },
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file.
    pub file: String,
    /// Which record: the model's number of the layer, and the expert.
    pub record: Option<(usize, usize)>,
    /// Where it starts, in bytes.
    pub offset: u64,
    /// What was found and what was expected.
    pub what: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.record {
            Some((layer, expert)) => write!(
                f,
                "{}: record of layer {layer}, expert {expert} at offset {}: {}",
                self.file, self.offset, self.what
            ),
            None => write!(f, "{}: {}", self.file, self.what),
        }
    }
}

/// What was looked at, and what is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Whole files that were hashed.
    pub files: usize,
    /// Records that were hashed.
    pub records: usize,
    /// Bytes that were read.
    pub bytes: u64,
    /// What is wrong; nothing where all is well.
    pub findings: Vec<Finding>,
    /// Files without a sum: nothing is known of them.
    pub unlisted: Vec<String>,
}

/// Reads a folder against its sums. `progress` gets bytes done and all bytes.
///
/// # Errors
/// A folder with neither `manifest.sha256` nor a readable pack: there is nothing to compare with.
pub fn verify(folder: &Path, scope: Scope, progress: &mut dyn FnMut(u64, u64)) -> Result<Verified> {
    let listed = sums::read(folder)?;
    let pack = open(folder);
    let listed = match (listed, &pack) {
        (Some(listed), _) => listed,
        (None, Ok(_)) => BTreeMap::new(),
        (None, Err(_)) => {
            let what =
                format!("it has no {SUMS} and is no streaming pack, so there is nothing to compare with");
            let remedy = "flint inspect checks the headers of a plain checkpoint";
            return Err(Error::Packing { place: folder.display().to_string(), what, remedy });
        }
    };
    let mut work = Work { folder, progress, all: 0, result: Verified::default() };
    let there = Folder::new(folder).files()?;
    work.result.unlisted = there
        .iter()
        .filter(|file| sums::is_listed(&file.name) && !listed.contains_key(&file.name))
        .map(|file| file.name.clone())
        .collect();
    let pack = match pack {
        Ok(pack) => Some(pack),
        // Sums of a folder that is no pack are a use of their own.
        Err(Error::NoCheckpoint { .. }) => None,
        Err(error) => {
            work.found(&error_file(&error), error.to_string());
            None
        }
    };
    let banks: Vec<&Bank> = pack.iter().flat_map(Pack::banks).collect();
    let size = |name: &str| there.iter().find(|file| file.name == name).map_or(0, |file| file.bytes);
    match scope {
        Scope::All => {
            let unlisted =
                banks.iter().filter(|bank| !listed.contains_key(bank.file())).map(|bank| bank.bytes());
            work.all = listed.keys().map(|name| size(name)).sum::<u64>() + unlisted.sum::<u64>();
            for (name, sum) in &listed {
                match banks.iter().find(|bank| bank.file() == name) {
                    Some(bank) => work.bank(bank, Some(*sum)),
                    None => work.file(name, *sum),
                }
            }
            for bank in banks.iter().filter(|bank| !listed.contains_key(bank.file())) {
                work.bank(bank, None);
            }
        }
        Scope::Quick { records, seed } => {
            let picks = picks(&banks, records, seed);
            let bytes = |&(bank, record): &(usize, usize)| record_place(banks[bank], record).2;
            let is_small = |name: &str| size(name) <= SMALL && !banks.iter().any(|bank| bank.file() == name);
            let small: Vec<_> = listed.iter().filter(|(name, _)| is_small(name)).collect();
            work.all =
                small.iter().map(|(name, _)| size(name)).sum::<u64>() + picks.iter().map(bytes).sum::<u64>();
            for (name, sum) in small {
                work.file(name, *sum);
            }
            for (name, _) in listed.iter().filter(|(name, _)| size(name) > SMALL) {
                if folder.join(name).metadata().is_err() {
                    work.found(name, "the file is not there".to_owned());
                }
            }
            for (bank, record) in picks {
                work.record(banks[bank], record);
            }
        }
    }
    Ok(work.result)
}

fn open(folder: &Path) -> Result<Pack> {
    let json = strict::read_optional(folder, "config.json")?;
    let bank = folder.join(super::EXPERTS).symlink_metadata().is_ok();
    let Some(json) = json else {
        let (place, found) = (folder.display().to_string(), "there is no config.json".to_owned());
        return Err(Error::NoCheckpoint { place, found, remedy: "give the folder of a streaming pack" });
    };
    let config: serde_json::Map<String, serde_json::Value> = strict::parse("config.json", &json)?;
    if !bank && !config.contains_key(super::BLOCK) {
        let (place, found) = (folder.display().to_string(), "it is no streaming pack".to_owned());
        return Err(Error::NoCheckpoint { place, found, remedy: "give the folder of a streaming pack" });
    }
    Pack::open(folder, &ModelConfig::from_json(&config)?)
}

/// The file that an error is about.
fn error_file(error: &Error) -> String {
    match error {
        Error::Pack { file, .. } | Error::Malformed { file, .. } => file.clone(),
        _ => "config.json".to_owned(),
    }
}

/// Layer number in the bank, expert, and bytes of a record by its number in the bank.
fn record_place(bank: &Bank, record: usize) -> (usize, usize, u64) {
    let (at, expert) = (record / bank.table.dims.experts, record % bank.table.dims.experts);
    (at, expert, bank.table.layers[at].record_bytes)
}

/// Random records, each once, in the order of the files.
fn picks(banks: &[&Bank], count: usize, seed: u64) -> Vec<(usize, usize)> {
    let of_bank = |(bank, open): (usize, &&Bank)| (0..open.table.records()).map(move |record| (bank, record));
    let mut all: Vec<(usize, usize)> = banks.iter().enumerate().flat_map(of_bank).collect();
    let mut state = seed;
    let mut random = || {
        // splitmix64: any good spread will do.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let count = count.min(all.len());
    for at in 0..count {
        let left = (all.len() - at) as u64;
        all.swap(at, at + (random() % left) as usize);
    }
    all.truncate(count);
    all.sort_unstable();
    all
}

struct Work<'a> {
    folder: &'a Path,
    progress: &'a mut dyn FnMut(u64, u64),
    all: u64,
    result: Verified,
}

impl Work<'_> {
    fn found(&mut self, file: &str, what: String) {
        self.result.findings.push(Finding { file: file.to_owned(), record: None, offset: 0, what });
    }

    fn read(&mut self, bytes: u64) {
        self.result.bytes += bytes;
        (self.progress)(self.result.bytes, self.all.max(self.result.bytes));
    }

    /// Hashes a file.
    fn file(&mut self, name: &str, expected: [u8; 32]) {
        match self.hash(name) {
            Ok(found) => self.compare(name, found, expected),
            Err(error) => self.unreadable(name, &error),
        }
    }

    fn compare(&mut self, name: &str, found: [u8; 32], expected: [u8; 32]) {
        self.result.files += 1;
        if found != expected {
            self.found(
                name,
                format!("SHA-256 {}, {SUMS} says {}", strict::hex(&found), strict::hex(&expected)),
            );
        }
    }

    fn unreadable(&mut self, name: &str, error: &std::io::Error) {
        let what = match error.kind() {
            ErrorKind::NotFound => "the file is not there".to_owned(),
            ErrorKind::UnexpectedEof => "the file is shorter than its manifest says".to_owned(),
            _ => format!("it cannot be read: {error}"),
        };
        self.found(name, what);
    }

    fn hash(&mut self, name: &str) -> std::io::Result<[u8; 32]> {
        let mut file = File::open(self.folder.join(name))?;
        let (mut sum, mut buffer) = (Sha256::new(), vec![0; CHUNK]);
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(sum.finalize().into()),
                Ok(read) => {
                    sum.update(&buffer[..read]);
                    self.read(read as u64);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Hashes a bank, whole and record by record, in one reading.
    fn bank(&mut self, bank: &Bank, expected: Option<[u8; 32]>) {
        match self.records(bank) {
            Ok(found) => {
                if let Some(expected) = expected {
                    self.compare(bank.file(), found, expected);
                }
            }
            Err(error) => self.unreadable(bank.file(), &error),
        }
    }

    fn records(&mut self, bank: &Bank) -> std::io::Result<[u8; 32]> {
        let mut file = File::open(self.folder.join(bank.file()))?;
        let (mut whole, mut bytes) = (Sha256::new(), Vec::new());
        for record in 0..bank.table.records() {
            let (_, _, length) = record_place(bank, record);
            bytes.resize(length as usize, 0);
            file.read_exact(&mut bytes)?;
            whole.update(&bytes);
            self.check(bank, record, &bytes);
        }
        Ok(whole.finalize().into())
    }

    /// Reads and hashes one record.
    fn record(&mut self, bank: &Bank, record: usize) {
        let (at, expert, length) = record_place(bank, record);
        let mut bytes = vec![0; length as usize];
        let read = File::open(self.folder.join(bank.file())).and_then(|mut file| {
            file.seek(SeekFrom::Start(bank.table.offset(at, expert)))?;
            file.read_exact(&mut bytes)
        });
        match read {
            Ok(()) => self.check(bank, record, &bytes),
            Err(error) => self.unreadable(bank.file(), &error),
        }
    }

    fn check(&mut self, bank: &Bank, record: usize, bytes: &[u8]) {
        let (at, expert, _) = record_place(bank, record);
        self.result.records += 1;
        self.read(bytes.len() as u64);
        let layer = &bank.table.layers[at];
        let (found, expected): ([u8; 32], _) = (Sha256::digest(bytes).into(), layer.sums[expert]);
        if found != expected {
            self.result.findings.push(Finding {
                file: bank.file().to_owned(),
                record: Some((layer.layer, expert)),
                offset: bank.table.offset(at, expert),
                what: format!(
                    "SHA-256 {}, the manifest says {}",
                    strict::hex(&found),
                    strict::hex(&expected)
                ),
            });
        }
    }
}
