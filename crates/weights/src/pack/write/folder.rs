//! The folder in which a pack is made: one writer at a time, files that are whole or not there, and room for all of it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::PackPlan;
use super::receipt::{self, HEADERS, SOURCE_CONFIG, SOURCE_INDEX, receipt_name};
use crate::pack::strict;
use crate::{Error, Result};

/// What an unfinished pack's folder has behind its name.
const PARTIAL: &str = ".partial";
/// Held by the writer; also remembers when the source's files were last changed. Not part of a pack.
const LOCK: &str = ".flint-pack";
/// The plan, by which a later run knows its own work.
const PLAN: &str = "receipts/plan.json";
/// Left free beside the pack: for the system, and for what other programs write meanwhile.
const SPARE: u64 = 64 << 20;

/// A pack in the making.
#[derive(Debug)]
pub(in crate::pack) struct Partial {
    folder: PathBuf,
    /// Locked as long as this process writes here.
    lock: File,
}

impl Partial {
    /// Opens the folder of an unfinished pack, or begins one.
    pub(super) fn open(plan: &PackPlan, folder: &Path) -> Result<Self> {
        let this = Self::begun(folder)?;
        this.begin(plan)?;
        this.check_space(plan)?;
        Ok(this)
    }

    /// Opens a folder that will have the name of `folder` when its work is done.
    pub(in crate::pack) fn begun(folder: &Path) -> Result<Self> {
        refuse_existing(folder)?;
        let Some(name) = folder.file_name() else {
            let (place, what) = (folder.display().to_string(), "it is no name of a new folder".to_owned());
            return Err(Error::Packing { place, what, remedy: "name a folder that does not exist" });
        };
        let mut name = name.to_owned();
        name.push(PARTIAL);
        let partial = folder.with_file_name(name);
        std::fs::create_dir_all(&partial).map_err(failed(&partial))?;
        let path = partial.join(LOCK);
        let options = OpenOptions::new().create(true).truncate(false).read(true).write(true).clone();
        let lock = options.open(&path).map_err(failed(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = "another flint pack writes here".to_owned();
                let remedy = "wait until it ends";
                return Err(Error::Packing { place: partial.display().to_string(), what, remedy });
            }
            // Some network file systems have no locks: then their users keep runs apart.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(source)) => return Err(failed(&path)(source)),
        }
        Ok(Self { folder: partial, lock })
    }

    /// Writes the plan, or compares it with that of an earlier run.
    fn begin(&self, plan: &PackPlan) -> Result<()> {
        let text = strict::text(PLAN, &plan.describe())?;
        let known = self.read(PLAN)?;
        if known.as_ref().is_some_and(|known| *known != text) {
            let what = "an unfinished pack of another source, version or numbering is there".to_owned();
            let remedy = "remove that folder, or give the source that it was begun with";
            return Err(Error::Packing { place: self.folder.display().to_string(), what, remedy });
        }
        self.forget_changed(plan)?;
        if known.is_none() {
            let headers = strict::line(HEADERS, &receipt::Headers::new(plan))?;
            self.write(HEADERS, &headers)?;
            self.write(SOURCE_CONFIG, &plan.config_bytes)?;
            if let Some(index) = &plan.index_bytes {
                self.write(SOURCE_INDEX, index)?;
            }
            self.write(PLAN, &text)?;
        }
        Ok(())
    }

    /// Drops receipts of shards whose source was changed since they were copied.
    fn forget_changed(&self, plan: &PackPlan) -> Result<()> {
        let path = self.folder.join(LOCK);
        let known: Map<String, Value> =
            serde_json::from_slice(&std::fs::read(&path).map_err(failed(&path))?).unwrap_or_default();
        for shard in &plan.shards {
            let stamp = known.get(&shard.source.name).and_then(Value::as_u64);
            if stamp != Some(shard.source.stamp) {
                self.remove(&receipt_name(shard))?;
            }
        }
        let stamps: Map<String, Value> =
            plan.shards.iter().map(|shard| (shard.source.name.clone(), json!(shard.source.stamp))).collect();
        // In place: the lock is on this file. A torn write reads as no stamps, which only costs a copy.
        let text = strict::line(LOCK, &stamps)?;
        std::fs::write(&path, text).map_err(failed(&path))
    }

    /// Compares what is still to be written with what the file system has.
    fn check_space(&self, plan: &PackPlan) -> Result<()> {
        let Some(free) = free_bytes(&self.folder) else { return Ok(()) };
        match shortage(plan.pack_bytes(), allocated(&self.folder), free) {
            None => Ok(()),
            Some(what) => {
                let remedy = "make room, or name a folder on another disk";
                Err(Error::Packing { place: self.folder.display().to_string(), what, remedy })
            }
        }
    }

    /// The path of a file of the pack.
    pub(in crate::pack) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// A small file, or `None`.
    pub(super) fn read(&self, file: &str) -> Result<Option<Vec<u8>>> {
        let path = self.path(file);
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Io { path, source }),
        }
    }

    /// Writes a whole file: under another name, synced, then renamed.
    pub(in crate::pack) fn write(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let mut temporary = self.create(file)?;
        temporary.file.write_all(bytes).map_err(failed(&temporary.path))?;
        self.keep(temporary)
    }

    /// Begins a file that [`keep`](Self::keep) puts in its place.
    pub(in crate::pack) fn create(&self, file: &str) -> Result<Temporary> {
        let goal = self.path(file);
        let mut name = goal.clone().into_os_string();
        name.push(".new");
        let path = PathBuf::from(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(failed(parent))?;
        }
        let file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(failed(&path))?;
        Ok(Temporary { file, path, goal })
    }

    /// Puts a file in its place, after its bytes are on the disk.
    pub(in crate::pack) fn keep(&self, temporary: Temporary) -> Result<()> {
        let Temporary { file, path, goal } = temporary;
        file.sync_all().map_err(failed(&path))?;
        std::fs::rename(&path, &goal).map_err(failed(&goal))?;
        sync_folder(goal.parent().unwrap_or(&self.folder))
    }

    /// Removes a file, if it is there.
    pub(super) fn remove(&self, file: &str) -> Result<()> {
        let path = self.path(file);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::Io { path, source: error }),
            _ => Ok(()),
        }
    }

    /// Gives the finished pack its name.
    pub(in crate::pack) fn complete(self, folder: &Path) -> Result<()> {
        self.remove(LOCK)?;
        let Self { folder: partial, lock } = self;
        // Some systems rename no folder in which a file is open.
        drop(lock);
        if folder.is_dir() {
            // It is empty, else the work would not have begun; some systems rename onto no folder at all.
            std::fs::remove_dir(folder).map_err(failed(folder))?;
        }
        std::fs::rename(&partial, folder).map_err(failed(folder))?;
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync_folder(parent.unwrap_or(Path::new(".")))
    }
}

/// A file under another name.
#[derive(Debug)]
pub(in crate::pack) struct Temporary {
    /// Open for reading and writing.
    pub(in crate::pack) file: File,
    pub(in crate::pack) path: PathBuf,
    goal: PathBuf,
}

/// Adds a path to a system's error.
pub(in crate::pack) fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path, source }
}

/// Why a pack of `whole` bytes, of which `there` are on the disk already, does not fit into `free` bytes.
fn shortage(whole: u64, there: u64, free: u64) -> Option<String> {
    let needed = whole.saturating_sub(there) + SPARE;
    (needed > free).then(|| {
        format!(
            "the pack has {whole} bytes, {there} of them are written, so {needed} are needed with {SPARE} spare, but the \
             file system has {free} free: {} are missing",
            needed - free
        )
    })
}

fn refuse_existing(folder: &Path) -> Result<()> {
    let is_empty = match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(_) => false,
    };
    if is_empty {
        return Ok(());
    }
    let what = "there is something already".to_owned();
    Err(Error::Packing {
        place: folder.display().to_string(),
        what,
        remedy: "name a folder that does not exist",
    })
}

/// Makes names in a folder last.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|opened| opened.sync_all()).map_err(failed(folder))
}

#[cfg(not(unix))]
fn sync_folder(_: &Path) -> Result<()> {
    Ok(())
}

/// Bytes that this user may still write; `None` where the system does not say.
#[cfg(unix)]
fn free_bytes(folder: &Path) -> Option<u64> {
    let space = rustix::fs::statvfs(folder).ok()?;
    space.f_bavail.checked_mul(space.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// Bytes that the files of a folder have on the disk: banks are holes until they are written.
#[cfg(unix)]
fn allocated(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let files = entries.filter_map(|entry| entry.and_then(|entry| entry.metadata()).ok());
    files.map(|file| file.blocks() * 512).sum()
}

#[cfg(not(unix))]
fn allocated(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.filter_map(|entry| entry.and_then(|entry| entry.metadata()).ok()).map(|file| file.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_is_named_with_its_numbers() {
        assert_eq!(shortage(1000, 0, 1000 + SPARE), None);
        assert_eq!(shortage(1000, 400, 600 + SPARE), None);
        let what = shortage(1000, 400, 599 + SPARE).unwrap();
        assert!(what.contains("1000 bytes, 400 of them") && what.ends_with("1 are missing"), "{what}");
        assert_eq!(shortage(10, 400, SPARE), None);
    }
}
