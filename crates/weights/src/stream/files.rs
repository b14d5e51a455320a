//! Files that records are read from.

use std::fs::File;
use std::path::Path;
use std::time::SystemTime;

use crate::{Error, HostBytes, Result};

/// A file that stays open.
#[derive(Debug)]
pub(crate) struct ReadFile {
    /// Its path, or a name for bytes in memory.
    pub(crate) label: String,
    pub(crate) bytes: Bytes,
}

/// Where its bytes are.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// On disk.
    Disk {
        file: File,
        /// Whether reads go past the page cache, and so need aligned places.
        direct: bool,
        /// As it was when it was opened.
        state: State,
    },
    /// In memory.
    Memory(HostBytes),
}

/// What changes when somebody writes to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    len: u64,
    modified: Option<SystemTime>,
}

impl State {
    fn of(file: &File) -> std::io::Result<Self> {
        let about = file.metadata()?;
        Ok(Self { len: about.len(), modified: about.modified().ok() })
    }
}

impl ReadFile {
    /// Opens a file, for direct reads where they are wanted and the file system has them.
    pub(crate) fn open(path: &Path, direct: bool) -> Result<Self> {
        let failed = |source| Error::Io { path: path.to_owned(), source };
        let (file, direct) = match open_direct(path).filter(|_| direct) {
            Some(file) => (file, true),
            None => (File::open(path).map_err(failed)?, false),
        };
        let state = State::of(&file).map_err(failed)?;
        let bytes = Bytes::Disk { file, direct, state };
        Ok(Self { label: path.display().to_string(), bytes })
    }

    /// Bytes in memory under a name.
    pub(crate) fn memory(label: String, bytes: HostBytes) -> Self {
        Self { label, bytes: Bytes::Memory(bytes) }
    }

    /// What happened to the file since it was opened, in words; `None` when it is as it was.
    pub(crate) fn change(&self) -> Option<String> {
        let Bytes::Disk { file, state, .. } = &self.bytes else { return None };
        match State::of(file) {
            Err(error) => Some(format!("it cannot be looked at any more: {error}")),
            Ok(now) if now.len != state.len => {
                Some(format!("the file had {} bytes when it was opened and has {} now", state.len, now.len))
            }
            Ok(now) if now != *state => Some("the file was changed after it was opened".to_owned()),
            Ok(_) => None,
        }
    }

    /// Whether a read that ended early may be continued where it ended.
    pub(crate) fn takes_any_place(&self) -> bool {
        !matches!(self.bytes, Bytes::Disk { direct: true, .. })
    }
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    File::options().read(true).custom_flags(flags).open(path).ok()
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> Option<File> {
    None
}
