//! The files of a checkpoint that hold tensors: the index, the shards, and that they fit each other.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::safetensors::{Header, Name, TensorInfo};
use crate::source::Source;
use crate::{Error, HostBytes, Result};

/// The index of a checkpoint in several shards.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The only shard of a checkpoint without an index.
pub(crate) const SINGLE: &str = "model.safetensors";

/// A file with tensors.
#[derive(Debug)]
pub(crate) struct Shard {
    /// File name.
    pub(crate) name: String,
    /// The whole file, mapped where it is on disk.
    pub(crate) bytes: HostBytes,
    /// Its header's JSON, byte for byte.
    pub(crate) header: Vec<u8>,
}

/// A tensor and its shard.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// Name, type, shape and place.
    pub(crate) info: TensorInfo,
    /// Number of the shard.
    pub(crate) shard: usize,
}

/// All shards and their tensors.
#[derive(Debug)]
pub(crate) struct Shards {
    /// The files, in ascending order of names.
    pub(crate) files: Vec<Shard>,
    /// The tensors of all files.
    pub(crate) tensors: Vec<Tensor>,
}

impl Shards {
    /// Opens every shard and checks every header; no tensor data is read.
    pub(crate) fn open(source: &Source) -> Result<Self> {
        let Some(index) = source.read(INDEX)? else { return Self::open_single(source) };
        let weight_map = parse_index(index.as_slice())?;
        let names = shard_names(&weight_map)?;
        let there: BTreeSet<String> = source.files()?.into_iter().collect();
        let missing: Vec<String> =
            names.iter().filter(|name| !there.contains(**name)).map(|name| (*name).to_owned()).collect();
        if !missing.is_empty() {
            return Err(Error::MissingFiles { index: INDEX.to_owned(), files: missing });
        }
        let mut shards = Self { files: Vec::new(), tensors: Vec::new() };
        for name in names {
            shards.add(source, name)?;
        }
        shards.check_index(&weight_map)?;
        Ok(shards)
    }

    fn open_single(source: &Source) -> Result<Self> {
        if !source.files()?.iter().any(|name| name == SINGLE) {
            return Err(no_weights(source)?);
        }
        let mut shards = Self { files: Vec::new(), tensors: Vec::new() };
        shards.add(source, SINGLE)?;
        Ok(shards)
    }

    fn add(&mut self, source: &Source, name: &str) -> Result<()> {
        let mut file = source.shard(name)?;
        let declared = file.len();
        let header = Header::read(name, &mut file)?;
        let bytes = file.into_bytes()?;
        if bytes.len() as u64 != declared {
            let found = bytes.len() as u64;
            return Err(Error::FileSize { file: name.to_owned(), found, expected: declared });
        }
        let shard = self.files.len();
        self.tensors.extend(header.tensors.into_iter().map(|info| Tensor { info, shard }));
        self.files.push(Shard { name: name.to_owned(), bytes, header: header.json });
        Ok(())
    }

    /// Checks that each tensor is in the shard that the index names, and in no other.
    fn check_index(&self, weight_map: &HashMap<String, String>) -> Result<()> {
        let wrong = |what: String| Err(Error::Index { index: INDEX.to_owned(), what });
        let mut found: HashMap<&str, &str> = HashMap::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let (name, file) = (tensor.info.name.as_str(), self.files[tensor.shard].name.as_str());
            if let Some(other) = found.insert(name, file) {
                return wrong(format!("{name} is in {other} and in {file}"));
            }
            match weight_map.get(name) {
                Some(promised) if promised == file => {}
                Some(promised) => return wrong(format!("{name} should be in {promised}, but is in {file}")),
                None => return wrong(format!("{file} holds {name}, which the index does not name")),
            }
        }
        let lacking = weight_map.iter().filter(|(name, _)| !found.contains_key(name.as_str())).min();
        match lacking {
            None => Ok(()),
            Some((name, file)) => wrong(format!("{name} should be in {file}, which does not have it")),
        }
    }
}

/// The files of an index, in ascending order; names that leave the folder are refused.
fn shard_names(weight_map: &HashMap<String, String>) -> Result<BTreeSet<&str>> {
    let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    match names.iter().find(|name| name.is_empty() || name.contains(['/', '\\', '\0']) || name.contains(".."))
    {
        None => Ok(names),
        Some(name) => Err(Error::Index {
            index: INDEX.to_owned(),
            what: format!("shard name {name:?} is no plain file name, so Flint does not follow it"),
        }),
    }
}

/// What is there instead of safetensors shards.
fn no_weights(source: &Source) -> Result<Error> {
    let files = source.files()?;
    let with_end = |end: &str| files.iter().find(|name| name.to_lowercase().ends_with(end));
    let foreign = [
        (".gguf", "the GGUF format", "download a safetensors version of the model (official, BF16 or MLX)"),
        (".bin", "a pickled PyTorch checkpoint", "download a safetensors version of the model"),
        (".npz", "an npz checkpoint", "download a safetensors version of the model"),
    ];
    for (end, what, remedy) in foreign {
        if let Some(name) = with_end(end) {
            return Ok(Error::Unsupported { at: name.clone(), what: what.to_owned(), remedy });
        }
    }
    let found = match with_end(".safetensors") {
        Some(name) => format!("there is {name}, but neither {INDEX} nor {SINGLE}"),
        None => format!("there is neither {INDEX} nor {SINGLE}"),
    };
    let remedy = "download the checkpoint again, with all of its files";
    Ok(Error::NoCheckpoint { place: source.label(), found, remedy })
}

fn parse_index(json: &[u8]) -> Result<HashMap<String, String>> {
    let index: Index = serde_json::from_slice(json)
        .map_err(|error| Error::Malformed { file: INDEX.to_owned(), what: error.to_string() })?;
    Ok(index.weight_map.0)
}

/// The index file.
#[derive(Deserialize)]
struct Index {
    weight_map: WeightMap,
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
}

/// Tensor name to shard; a name that occurs twice is refused.
struct WeightMap(HashMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to shard names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<WeightMap, A::Error> {
                let mut names = HashMap::new();
                while let Some(Name(name)) = map.next_key::<Name<'de>>()? {
                    let file = map.next_value()?;
                    if let Some(_other) = names.insert(name.to_string(), file) {
                        return Err(A::Error::custom(format!("{name} occurs twice in weight_map")));
                    }
                }
                Ok(WeightMap(names))
            }
        }
        deserializer.deserialize_map(Reader)
    }
}
