//! The files of a checkpoint that hold tensors: the index, the shards, and that they fit each other.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

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
    /// Hash of its header's JSON.
    pub(crate) header: blake3::Hash,
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
        let map = parse_index(index.as_slice())?;
        check_names(&map.files)?;
        let there: HashSet<String> = source.files()?.into_iter().collect();
        let mut names: Vec<&str> = map.files.iter().map(AsRef::as_ref).collect();
        names.sort_unstable();
        let missing: Vec<_> =
            names.iter().filter(|name| !there.contains(**name)).map(|name| (*name).to_owned()).collect();
        if !missing.is_empty() {
            return Err(Error::MissingFiles { index: INDEX.to_owned(), files: missing });
        }
        let mut shards = Self { files: Vec::new(), tensors: Vec::new() };
        for name in names {
            shards.add(source, name)?;
        }
        shards.check_index(&map)?;
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
        self.files.push(Shard { name: name.to_owned(), bytes, header: blake3::hash(&header.json) });
        Ok(())
    }

    /// Checks that each tensor is in the shard that the index names, and in no other.
    fn check_index(&self, map: &WeightMap<'_>) -> Result<()> {
        let wrong = |what: String| Err(Error::Index { index: INDEX.to_owned(), what });
        let mut found: HashMap<&str, &str> = HashMap::with_capacity(self.tensors.len());
        for tensor in &self.tensors {
            let (name, file) = (tensor.info.name.as_str(), self.files[tensor.shard].name.as_str());
            if let Some(other) = found.insert(name, file) {
                return wrong(format!("{name} is in {other} and in {file}"));
            }
        }
        for (name, file) in &map.tensors {
            let promised = map.files[*file].as_ref();
            match found.remove(name.as_ref()) {
                Some(actual) if promised == actual => {}
                Some(actual) => return wrong(format!("{name} should be in {promised}, but is in {actual}")),
                None => return wrong(format!("{name} should be in {promised}, which does not have it")),
            }
        }
        match found.into_iter().min() {
            None => Ok(()),
            Some((name, file)) => wrong(format!("{file} holds {name}, which the index does not name")),
        }
    }
}

/// Refuses shard names that leave the folder.
fn check_names(names: &[Cow<'_, str>]) -> Result<()> {
    match names.iter().find(|name| name.is_empty() || name.contains(['/', '\\', '\0']) || name.contains(".."))
    {
        None => Ok(()),
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

fn parse_index(json: &[u8]) -> Result<WeightMap<'_>> {
    let index: Index<'_> = serde_json::from_slice(json)
        .map_err(|error| Error::Malformed { file: INDEX.to_owned(), what: error.to_string() })?;
    let mut names = HashSet::with_capacity(index.weight_map.tensors.len());
    match index.weight_map.tensors.iter().find(|(name, _)| !names.insert(name.as_ref())) {
        Some((name, _)) => {
            let what = format!("{name} occurs twice in weight_map");
            Err(Error::Malformed { file: INDEX.to_owned(), what })
        }
        None => Ok(index.weight_map),
    }
}

/// The index file.
#[derive(Deserialize)]
struct Index<'a> {
    #[serde(borrow)]
    weight_map: WeightMap<'a>,
    #[serde(default, rename = "metadata")]
    _metadata: IgnoredAny,
}

/// Each tensor's name with the number of its shard.
struct WeightMap<'a> {
    tensors: Vec<(Cow<'a, str>, usize)>,
    files: Vec<Cow<'a, str>>,
}

impl<'de: 'a, 'a> Deserialize<'de> for WeightMap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = WeightMap<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to shard names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut index = WeightMap { tensors: Vec::new(), files: Vec::new() };
                let mut numbers: HashMap<Cow<'de, str>, usize> = HashMap::new();
                while let Some((Name(name), Name(file))) = map.next_entry::<Name<'de>, Name<'de>>()? {
                    let number = *numbers.entry(file.clone()).or_insert_with(|| {
                        index.files.push(file);
                        index.files.len() - 1
                    });
                    index.tensors.push((name, number));
                }
                Ok(index)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}
