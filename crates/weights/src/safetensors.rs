//! The header of a safetensors file: parsed and checked whole before a byte of data is used.
//!
//! ```text
//! offset  bytes  content
//! 0       8      n, little-endian
//! 8       n      JSON: name -> {"dtype", "shape", "data_offsets": [a, b]}, "__metadata__" -> strings
//! 8 + n   ...    data; a and b count from here
//! ```
//!
//! Alignment is not asked for (a header length that is no multiple of 8 is legal), nor that the tensors leave no gap.
//! The last tensor must end where the file ends. Source: `reference/weights.md`, section "safetensors".

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::source::{ShardFile, is_lfs_pointer};
use crate::{Error, PlainType, Result};

/// Bytes that a header may have. That of 150,000 tensors has about 20 MB.
pub const HEADER_BOUND: u64 = 100_000_000;

/// Number type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[allow(missing_docs)]
pub enum Dtype {
    F64,
    F32,
    F16,
    #[serde(rename = "BF16")]
    Bf16,
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    #[serde(rename = "F8_E5M2")]
    F8E5m2,
    #[serde(rename = "F8_E8M0")]
    F8E8m0,
    I64,
    U64,
    I32,
    U32,
    I16,
    U16,
    I8,
    U8,
    #[serde(rename = "BOOL")]
    Bool,
}

impl Dtype {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F8E4m3 | Self::F8E5m2 | Self::F8E8m0 | Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Its name in a header.
    pub fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4m3 => "F8_E4M3",
            Self::F8E5m2 => "F8_E5M2",
            Self::F8E8m0 => "F8_E8M0",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
        }
    }

    /// The plain type that it is, if it is one.
    pub fn plain(self) -> Option<PlainType> {
        match self {
            Self::F32 => Some(PlainType::F32),
            Self::F16 => Some(PlainType::F16),
            Self::Bf16 => Some(PlainType::Bf16),
            _ => None,
        }
    }
}

/// A tensor of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Stored name.
    pub name: String,
    /// Number type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub start: u64,
    /// Byte after the last, from the start of the file.
    pub end: u64,
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their data.
    pub tensors: Vec<TensorInfo>,
    /// The header's JSON, byte for byte.
    pub json: Vec<u8>,
}

impl Header {
    /// Reads and checks the header of a file that is in memory.
    ///
    /// # Errors
    /// A Git LFS pointer, a header that is too long or malformed, a tensor outside the file or over another one, a
    /// file shorter or longer than its header says.
    pub fn of_bytes(file: &str, bytes: &crate::HostBytes) -> Result<Self> {
        Self::read(file, &mut ShardFile::Memory(bytes.clone()))
    }

    /// Reads and checks a shard's header; nothing else of the file is read.
    pub(crate) fn read(file: &str, shard: &mut ShardFile) -> Result<Self> {
        let bytes = shard.len();
        Self::read_with(file, bytes, &mut |at, wanted| shard.read(at, wanted))
    }

    /// As [`read`](Self::read), of a file of `file_bytes` bytes. `next(at, wanted)` gives the next `wanted` bytes, fewer
    /// when the file ends; `at` is where the last call ended.
    pub(crate) fn read_with(
        file: &str,
        file_bytes: u64,
        next: &mut dyn FnMut(u64, u64) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let start = next(0, 8)?;
        let Ok(length) = <[u8; 8]>::try_from(start.as_slice()) else {
            return Err(Error::FileSize { file: file.to_owned(), found: file_bytes, expected: 8 });
        };
        // The first 8 bytes of a pointer ("version ") are a length far above the bound.
        let declared = u64::from_le_bytes(length);
        if declared > HEADER_BOUND {
            let mut begin = start;
            begin.extend(next(8, 64)?);
            return Err(if is_lfs_pointer(&begin) {
                Error::LfsPointer { file: file.to_owned() }
            } else {
                Error::HeaderTooLong { file: file.to_owned(), declared, bound: HEADER_BOUND }
            });
        }
        let json = next(8, declared)?;
        if (json.len() as u64) < declared {
            return Err(Error::FileSize { file: file.to_owned(), found: file_bytes, expected: 8 + declared });
        }
        let tensors = parse(file, &json, file_bytes)?;
        Ok(Self { tensors, json })
    }
}

/// Parses a header's JSON and checks every entry against the file's length.
fn parse(file: &str, json: &[u8], file_bytes: u64) -> Result<Vec<TensorInfo>> {
    let Entries(entries) = serde_json::from_slice(json)
        .map_err(|error| Error::Malformed { file: file.to_owned(), what: format!("its header: {error}") })?;
    let data_start = 8 + json.len() as u64;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let (start, end) = check_entry(&entry, data_start).map_err(|what| Error::BadTensor {
            file: file.to_owned(),
            tensor: name.clone(),
            what,
        })?;
        tensors.push(TensorInfo { name, dtype: entry.dtype, shape: entry.shape, start, end });
    }
    tensors.sort_by_key(|tensor| (tensor.start, tensor.end));
    check_places(file, &tensors, data_start, file_bytes)?;
    check_names(file, &tensors)?;
    Ok(tensors)
}

/// The first and the last byte of an entry, or what is wrong with it.
fn check_entry(entry: &Entry, data_start: u64) -> std::result::Result<(u64, u64), String> {
    let [a, b] = entry.data_offsets;
    if a > b {
        return Err(format!("its data would start at {a} and end at {b}"));
    }
    let numbers = entry.shape.iter().try_fold(1_u64, |product, &side| product.checked_mul(side as u64));
    let bytes = numbers.and_then(|numbers| numbers.checked_mul(entry.dtype.size() as u64));
    if bytes != Some(b - a) {
        let asks = bytes.map_or("more than 2^64".to_owned(), |bytes| bytes.to_string());
        return Err(format!(
            "its offsets span {} bytes, but shape {:?} of {:?} asks for {asks}",
            b - a,
            entry.shape,
            entry.dtype
        ));
    }
    match (data_start.checked_add(a), data_start.checked_add(b)) {
        (Some(start), Some(end)) => Ok((start, end)),
        _ => Err(format!("its offset {b} is beyond every file")),
    }
}

/// Checks, on tensors in ascending order, that none overlap and that the last one ends the file.
fn check_places(file: &str, tensors: &[TensorInfo], data_start: u64, file_bytes: u64) -> Result<()> {
    let mut covered = data_start;
    for tensor in tensors {
        if tensor.start < covered && tensor.end > tensor.start {
            return Err(Error::BadTensor {
                file: file.to_owned(),
                tensor: tensor.name.clone(),
                what: "its data overlaps another tensor's".to_owned(),
            });
        }
        covered = covered.max(tensor.end);
    }
    if covered == file_bytes {
        Ok(())
    } else {
        Err(Error::FileSize { file: file.to_owned(), found: file_bytes, expected: covered })
    }
}

/// Checks that no name occurs twice.
fn check_names(file: &str, tensors: &[TensorInfo]) -> Result<()> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        None => Ok(()),
        Some(pair) => Err(Error::BadTensor {
            file: file.to_owned(),
            tensor: pair[0].to_owned(),
            what: "the name occurs twice in the header".to_owned(),
        }),
    }
}

/// An entry of the header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

/// All entries, in the order of the file, twice the same name included.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to entries")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<Name<'de>>()? {
                    if name.0 == "__metadata__" {
                        map.next_value::<std::collections::HashMap<String, String>>()?;
                    } else {
                        let entry =
                            map.next_value().map_err(|e| A::Error::custom(format!("{}: {e}", name.0)))?;
                        entries.push((name.0.into_owned(), entry));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// A key, borrowed from the JSON where it has no escapes.
#[derive(Deserialize)]
pub(crate) struct Name<'a>(#[serde(borrow)] pub(crate) Cow<'a, str>);
