//! Where the files of a checkpoint come from while a pack is made of it: a folder here, a server elsewhere.

use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use crate::{Error, Result};

/// Folders inside a checkpoint's folder that are followed.
const DEPTH: usize = 4;

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginFile {
    /// Its name, with `/` between folders.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, where the place knows it.
    pub sha256: Option<[u8; 32]>,
    /// What changes when the file does, where the place has no sum: the time of its last change.
    pub stamp: u64,
}

/// A place that has the files of one version of a checkpoint.
pub trait Origin: Sync {
    /// The place in words, for messages.
    fn label(&self) -> String;

    /// The repository and its revision, where the place is one.
    fn repository(&self) -> Option<(String, String)>;

    /// All files, by name.
    ///
    /// # Errors
    /// A place that cannot be listed.
    fn files(&self) -> Result<Vec<OriginFile>>;

    /// Reads `length` bytes of a file from `offset` on. The reader ends early only where the file does.
    ///
    /// # Errors
    /// A file that cannot be opened.
    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>>;
}

/// A folder on disk.
#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// The folder of a checkpoint.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
}

impl Origin for Folder {
    fn label(&self) -> String {
        self.0.display().to_string()
    }

    fn repository(&self) -> Option<(String, String)> {
        None
    }

    fn files(&self) -> Result<Vec<OriginFile>> {
        let mut files = Vec::new();
        list(&self.0, "", DEPTH, &mut files)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>> {
        let path = self.0.join(&file.name);
        let failed = |source| Error::Io { path: path.clone(), source };
        let mut opened = File::open(&path).map_err(failed)?;
        opened.seek(SeekFrom::Start(offset)).map_err(failed)?;
        Ok(Box::new(opened.take(length)))
    }
}

/// Adds the regular files of a folder and of the folders in it. Hidden ones are not the checkpoint's.
fn list(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<OriginFile>) -> Result<()> {
    let failed = |source| Error::Io { path: folder.to_owned(), source };
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if name.starts_with('.') {
            continue;
        }
        let path = entry.path();
        // Caches of downloads are folders of links: they are followed.
        let metadata = std::fs::metadata(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let name = format!("{prefix}{name}");
        if metadata.is_dir() && depth > 0 {
            list(&path, &format!("{name}/"), depth - 1, files)?;
        } else if metadata.is_file() {
            let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let stamp = changed.map_or(0, |since| since.as_nanos() as u64);
            files.push(OriginFile { name, bytes: metadata.len(), sha256: None, stamp });
        }
    }
    Ok(())
}

/// Reads a whole small file.
pub(super) fn read(origin: &dyn Origin, file: &OriginFile, bound: u64) -> Result<Vec<u8>> {
    if file.bytes > bound {
        let what = format!("it has {} bytes, which no file of this kind has", file.bytes);
        return Err(Error::Malformed { file: file.name.clone(), what });
    }
    let mut bytes = Vec::new();
    let mut reader = origin.open(file, 0, file.bytes)?;
    reader.read_to_end(&mut bytes).map_err(|source| read_error(origin, file, source))?;
    if bytes.len() as u64 == file.bytes {
        Ok(bytes)
    } else {
        Err(Error::FileSize { file: file.name.clone(), found: bytes.len() as u64, expected: file.bytes })
    }
}

/// A failed read of a file of an origin.
pub(super) fn read_error(origin: &dyn Origin, file: &OriginFile, source: std::io::Error) -> Error {
    Error::Io { path: PathBuf::from(format!("{}/{}", origin.label(), file.name)), source }
}
