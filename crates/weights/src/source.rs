//! Where a checkpoint's files come from: a folder, the binary, or memory.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::PathBuf;
use std::sync::Arc;

use crate::map::map;
use crate::{Error, HostBytes, Result};

/// Where a checkpoint's files come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A folder on disk; its shards are mapped.
    Folder(PathBuf),
    /// Files in the binary: name and bytes.
    Embedded(&'static [(&'static str, &'static [u8])]),
    /// Files in memory: name and bytes.
    Memory(Vec<(String, HostBytes)>),
}

/// Bytes that a JSON or text file may have. The index of 150,000 tensors has about 20 MB.
const TEXT_BOUND: u64 = 512 << 20;

/// How every Git LFS pointer starts.
const LFS: &[u8] = b"version https://git-lfs";

impl Source {
    /// A small file (`config.json`, `tokenizer.json`, `chat_template.jinja`), or `None` when there is none.
    ///
    /// # Errors
    /// When the file cannot be read, is a Git LFS pointer, or is larger than 512 MiB.
    pub fn read(&self, file: &str) -> Result<Option<HostBytes>> {
        let bytes = match self {
            Self::Folder(folder) => {
                let path = folder.join(file);
                match File::open(&path) {
                    Ok(opened) => Some(HostBytes::from_vec(read_text(opened, path)?)),
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    Err(source) => return Err(Error::Io { path, source }),
                }
            }
            Self::Embedded(files) => files
                .iter()
                .find(|(name, _)| *name == file)
                .map(|(_, bytes)| HostBytes::new(Arc::new(*bytes))),
            Self::Memory(files) => {
                files.iter().find(|(name, _)| name == file).map(|(_, bytes)| bytes.clone())
            }
        };
        match &bytes {
            Some(found) if found.as_slice().starts_with(LFS) => {
                Err(Error::LfsPointer { file: file.to_owned() })
            }
            _ => Ok(bytes),
        }
    }

    /// The place in words, for messages.
    pub fn label(&self) -> String {
        match self {
            Self::Folder(folder) => folder.display().to_string(),
            Self::Embedded(_) => "the embedded model".to_owned(),
            Self::Memory(_) => "a model in memory".to_owned(),
        }
    }

    /// Names of all files, in ascending order.
    pub(crate) fn files(&self) -> Result<Vec<String>> {
        let mut names = match self {
            Self::Folder(folder) => {
                let failed = |source| Error::Io { path: folder.clone(), source };
                let mut names = Vec::new();
                for entry in std::fs::read_dir(folder).map_err(failed)? {
                    names.push(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
                }
                names
            }
            Self::Embedded(files) => files.iter().map(|(name, _)| (*name).to_owned()).collect(),
            Self::Memory(files) => files.iter().map(|(name, _)| name.clone()).collect(),
        };
        names.sort();
        Ok(names)
    }

    /// Opens a shard without reading its data.
    pub(crate) fn shard(&self, file: &str) -> Result<ShardFile> {
        match self {
            Self::Folder(folder) => {
                let path = folder.join(file);
                let failed = |source| Error::Io { path: path.clone(), source };
                let opened = File::open(&path).map_err(failed)?;
                let bytes = opened.metadata().map_err(failed)?.len();
                Ok(ShardFile::Disk { path, file: opened, bytes })
            }
            _ => match self.read(file)? {
                Some(bytes) => Ok(ShardFile::Memory(bytes)),
                None => Err(Error::MissingFiles { index: self.label(), files: vec![file.to_owned()] }),
            },
        }
    }
}

fn read_text(file: File, path: PathBuf) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match file.take(TEXT_BOUND + 1).read_to_end(&mut bytes) {
        Ok(read) if read as u64 > TEXT_BOUND => Err(Error::Malformed {
            file: path.display().to_string(),
            what: format!("it has more than {TEXT_BOUND} bytes, which no file of this kind has"),
        }),
        Ok(_) => Ok(bytes),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// A shard before its data is used.
pub(crate) enum ShardFile {
    /// An open file.
    Disk {
        /// Its path.
        path: PathBuf,
        /// The open file.
        file: File,
        /// Its length.
        bytes: u64,
    },
    /// Bytes in memory.
    Memory(HostBytes),
}

impl ShardFile {
    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Disk { bytes, .. } => *bytes,
            Self::Memory(bytes) => bytes.len() as u64,
        }
    }

    /// The next `wanted` bytes from the start, fewer when the file ends. Each call goes on where the last one ended;
    /// `at` is that place.
    pub(crate) fn read(&mut self, at: u64, wanted: u64) -> Result<Vec<u8>> {
        match self {
            Self::Disk { path, file, .. } => {
                let mut bytes = Vec::new();
                match file.take(wanted).read_to_end(&mut bytes) {
                    Ok(_) => Ok(bytes),
                    Err(source) => Err(Error::Io { path: path.clone(), source }),
                }
            }
            Self::Memory(bytes) => {
                let end = at.saturating_add(wanted).min(bytes.len() as u64);
                let range = at.min(end) as usize..end as usize;
                Ok(bytes.as_slice()[range].to_vec())
            }
        }
    }

    /// The whole file as shared bytes, mapped where it is on disk.
    pub(crate) fn into_bytes(self) -> Result<HostBytes> {
        match self {
            // The operating system refuses to map nothing.
            Self::Disk { bytes: 0, .. } => Ok(HostBytes::from_vec(Vec::new())),
            Self::Disk { path, file, .. } => match map(&file) {
                Ok(mapped) => Ok(HostBytes::new(Arc::new(mapped))),
                Err(source) => Err(Error::Io { path, source }),
            },
            Self::Memory(bytes) => Ok(bytes),
        }
    }
}

/// Whether a file starts like a Git LFS pointer.
pub(crate) fn is_lfs_pointer(start: &[u8]) -> bool {
    start.starts_with(LFS)
}
