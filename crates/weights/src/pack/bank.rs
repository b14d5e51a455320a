//! A pack that is open: both manifests checked, both banks there with their whole length. No record is read.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::form::{Dims, Mode};
use super::manifest::{Expected, Table, V2, read};
use super::manifest_v1;
use super::source::ExpertSource;
use super::{
    BLOCK, EXPERTS, MANIFEST, MANIFEST_V1, MTP_EXPERTS, MTP_MANIFEST, MTP_MANIFEST_V1, REPACK, Refusal,
};
use crate::config::{FeedForward, ModelConfig};
use crate::{Error, Result};

/// A streaming pack.
#[derive(Debug)]
pub struct Pack {
    folder: PathBuf,
    experts: Bank,
    mtp: Option<Bank>,
    notes: Vec<String>,
}

/// One file of records with its table.
#[derive(Debug)]
pub struct Bank {
    file: &'static str,
    pub(super) table: Table,
    model_key: String,
}

impl Pack {
    /// Opens the pack of a folder whose `config.json` gives these sizes.
    ///
    /// # Errors
    /// Everything that section 8 of the format's description names, by its [`Refusal`].
    pub fn open(folder: &Path, config: &ModelConfig) -> Result<Self> {
        let dims = dims(config);
        refuse_v3(folder)?;
        let expected = Expected { dims, layers: trunk_layers(config), sidecar: EXPERTS };
        let experts = Bank::open(folder, [MANIFEST, MANIFEST_V1], &expected)?;
        let layers = config.layers()..config.layers() + config.mtp_layers.max(1);
        let expected = Expected { dims, layers: layers.collect(), sidecar: MTP_EXPERTS };
        let block = block(folder)?;
        let mtp = Self::open_mtp(folder, &expected, &block)?;
        let notes = other_manifests(folder, &block);
        Ok(Self { folder: folder.to_owned(), experts, mtp, notes })
    }

    /// The MTP layers' bank. A model that says it has such layers may come without them, but then without any part of
    /// the bank, and the block of `config.json` does not name it.
    fn open_mtp(folder: &Path, expected: &Expected, block: &Value) -> Result<Option<Bank>> {
        let is_there = |file: &str| folder.join(file).symlink_metadata().is_ok();
        let is_named = block.get("mtp_manifest").is_some_and(Value::is_string);
        match (is_there(MTP_MANIFEST), is_there(MTP_EXPERTS)) {
            (false, false) if is_named => {
                let what = format!(
                    "config.json names the MTP layers' bank, but neither it nor {MTP_EXPERTS} is there"
                );
                Err(Refusal::ManifestMissing.error(MTP_MANIFEST, what, REPACK))
            }
            (false, false) => Ok(None),
            (false, true) => {
                let what = format!("{MTP_EXPERTS} is there, its manifest is not");
                Err(Refusal::ManifestMissing.error(MTP_MANIFEST, what, REPACK))
            }
            _ => Bank::open(folder, [MTP_MANIFEST, MTP_MANIFEST_V1], expected).map(Some),
        }
    }

    /// The pack's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The experts of the trunk.
    pub fn experts(&self) -> &Bank {
        &self.experts
    }

    /// The experts of the MTP layers, where the pack has them.
    pub fn mtp_experts(&self) -> Option<&Bank> {
        self.mtp.as_ref()
    }

    /// All banks.
    pub fn banks(&self) -> impl Iterator<Item = &Bank> {
        std::iter::once(&self.experts).chain(&self.mtp)
    }

    /// What a user should know and what changes nothing.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Where each expert's bytes are.
    pub fn source(&self) -> ExpertSource {
        ExpertSource::of_pack(self)
    }
}

impl Bank {
    fn open(folder: &Path, [newer, older]: [&'static str; 2], expected: &Expected) -> Result<Self> {
        let (table, V2 { model_key, .. }) = read(folder, newer, expected)?;
        manifest_v1::compare(folder, older, &table, &expected.layers)?;
        open_sidecar(folder, expected.sidecar, table.size)?;
        Ok(Self { file: expected.sidecar, table, model_key })
    }

    /// The bank's file.
    pub fn file(&self) -> &'static str {
        self.file
    }

    /// How its experts are stored.
    pub fn mode(&self) -> Mode {
        self.table.mode
    }

    /// Sizes of the experts.
    pub fn dims(&self) -> Dims {
        self.table.dims
    }

    /// What records start at multiples of.
    pub fn alignment(&self) -> u64 {
        self.table.alignment
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.table.size
    }

    /// The model's numbers of its layers, ascending.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.table.layers.iter().map(|layer| layer.layer)
    }

    /// What the maker called the model.
    pub fn model_key(&self) -> &str {
        &self.model_key
    }
}

/// Opens a bank of at least so many bytes for reading, without following a link.
pub(super) fn open_sidecar(folder: &Path, file: &str, size: u64) -> Result<File> {
    let path = folder.join(file);
    let refused = |refusal: Refusal, what: String| Err(refusal.error(file, what, REPACK));
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return refused(Refusal::SidecarMissing, "the bank is not there".to_owned());
        }
        Err(error) => return refused(Refusal::SidecarOpen, error.to_string()),
    };
    if !metadata.is_file() {
        let what = "it is a link or no regular file, which Flint does not follow; copy the file itself there";
        return refused(Refusal::SidecarOpen, what.to_owned());
    }
    match metadata.len() {
        found if found < size => refused(
            Refusal::SidecarOpen,
            format!("it has {found} bytes, its manifest says {size}: {} are missing", size - found),
        ),
        found if found > size => refused(
            Refusal::SidecarGeometry,
            format!("it has {found} bytes, its manifest says {size}: {} too many", found - size),
        ),
        _ => open_without_links(&path)
            .map_err(|error| Refusal::SidecarOpen.error(file, error.to_string(), REPACK)),
    }
}

#[cfg(unix)]
fn open_without_links(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt as _;
    // The path may have become a link since it was looked at.
    let flags = rustix::fs::OFlags::NOFOLLOW.bits();
    std::fs::OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)
}

#[cfg(not(unix))]
fn open_without_links(path: &Path) -> std::io::Result<File> {
    File::open(path)
}

/// Sizes of a model's experts.
pub(super) fn dims(config: &ModelConfig) -> Dims {
    Dims { hidden: config.hidden_size, inter: config.moe_intermediate_size, experts: config.experts }
}

/// Numbers of the trunk's layers that have routed experts.
pub(super) fn trunk_layers(config: &ModelConfig) -> Vec<usize> {
    let halves = config.feed_forward.iter().enumerate();
    halves.filter(|(_, half)| **half == FeedForward::Sparse).map(|(layer, _)| layer).collect()
}

/// Names a third version where it stands alone: its fields are not known.
fn refuse_v3(folder: &Path) -> Result<()> {
    const V3: &str = "expert-manifest-v3.json";
    let is_there = |file: &str| folder.join(file).symlink_metadata().is_ok();
    if is_there(V3) && !is_there(MANIFEST) {
        let what = "packs whose experts differ inside a layer (manifest v3) are not read by this build";
        return Err(Refusal::ManifestFormat.error(V3, what, "use a pack with expert-manifest-v2.json"));
    }
    Ok(())
}

/// The block of `config.json` that marks a pack; null where there is none.
fn block(folder: &Path) -> Result<Value> {
    let path = folder.join("config.json");
    match std::fs::read(&path) {
        Ok(json) => {
            let mut config: Value = serde_json::from_slice(&json).unwrap_or_default();
            Ok(config.get_mut(BLOCK).map(Value::take).unwrap_or_default())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Value::Null),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// What is said of strings of the block that name other files of the folder than the manifests' fixed names.
fn other_manifests(folder: &Path, block: &Value) -> Vec<String> {
    let fixed = [MANIFEST, MANIFEST_V1, MTP_MANIFEST, MTP_MANIFEST_V1];
    let values = block.as_object().into_iter().flat_map(|block| block.values());
    let other = values.filter_map(Value::as_str).filter(|name| {
        Path::new(name).extension().is_some_and(|end| end.eq_ignore_ascii_case("json"))
            && !fixed.contains(name)
            && !name.contains(['/', '\\'])
            && folder.join(name).is_file()
    });
    let note =
        |name: &str| format!("config.json: {BLOCK} names {name}; Flint reads {MANIFEST} and leaves it aside");
    other.map(note).collect()
}
