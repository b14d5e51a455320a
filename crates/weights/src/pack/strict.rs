//! JSON of files that others wrote: bounded, and no key twice.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{REPACK, Refusal};
use crate::safetensors::Name;
use crate::{Error, Result};

/// Bytes that a JSON file of a pack may have. The older manifest of the release's 12,096 records has about 25 MB.
pub(super) const JSON_BOUND: u64 = 128 << 20;

/// Reads a manifest without following a link.
pub(super) fn read(folder: &Path, file: &str) -> Result<Vec<u8>> {
    match read_optional(folder, file)? {
        Some(bytes) => Ok(bytes),
        None => Err(Refusal::ManifestMissing.error(file, "the manifest is not there", REPACK)),
    }
}

/// Reads a manifest without following a link; `None` when it is not there.
pub(super) fn read_optional(folder: &Path, file: &str) -> Result<Option<Vec<u8>>> {
    let path = folder.join(file);
    let refused = |what: String| Refusal::ManifestOpen.error(file, what, REPACK);
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refused(error.to_string())),
    };
    if !metadata.is_file() {
        return Err(refused("it is a link or no regular file, which Flint does not follow".to_owned()));
    }
    let mut bytes = Vec::new();
    let opened = File::open(&path).and_then(|file| file.take(JSON_BOUND + 1).read_to_end(&mut bytes));
    match opened {
        Ok(read) if read as u64 > JSON_BOUND => {
            Err(refused(format!("it has more than {JSON_BOUND} bytes, which no manifest has")))
        }
        Ok(_) => Ok(Some(bytes)),
        Err(error) => Err(refused(error.to_string())),
    }
}

/// Parses JSON that has no key twice.
pub(super) fn parse<T: DeserializeOwned>(file: &str, json: &[u8]) -> Result<T> {
    let syntax = |error: serde_json::Error| Refusal::ManifestSyntax.error(file, error.to_string(), REPACK);
    serde_json::from_slice::<NoKeyTwice>(json).map_err(syntax)?;
    serde_json::from_slice(json).map_err(syntax)
}

/// JSON as it is written to a pack: the same bytes for the same values, one line end at the end.
pub(super) fn text(file: &str, value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| Error::Malformed { file: file.to_owned(), what: error.to_string() })?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// As [`text`], on one line: for tables of many thousand entries.
pub(super) fn line(file: &str, value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(value)
        .map_err(|error| Error::Malformed { file: file.to_owned(), what: error.to_string() })?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Any JSON in which no object has a key twice. Keeps nothing.
struct NoKeyTwice;

impl<'de> Deserialize<'de> for NoKeyTwice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(Walker)
    }
}

struct Walker;

impl<'de> Visitor<'de> for Walker {
    type Value = NoKeyTwice;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_str<E>(self, _: &str) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_unit<E>(self) -> std::result::Result<NoKeyTwice, E> {
        Ok(NoKeyTwice)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<NoKeyTwice, A::Error> {
        while seq.next_element::<NoKeyTwice>()?.is_some() {}
        Ok(NoKeyTwice)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<NoKeyTwice, A::Error> {
        let mut keys: HashSet<Cow<'de, str>> = HashSet::new();
        while let Some(Name(key)) = map.next_key::<Name<'de>>()? {
            if keys.contains(&key) {
                return Err(A::Error::custom(format!("key {key:?} stands twice in one object")));
            }
            keys.insert(key);
            map.next_value::<NoKeyTwice>()?;
        }
        Ok(NoKeyTwice)
    }
}

/// A SHA-256 from its 64 hexadecimal digits.
pub(super) fn sha256(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    let mut sum = [0; 32];
    for (byte, digits) in sum.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |c: u8| (c as char).to_digit(16);
        *byte = (digit(digits[0])? * 16 + digit(digits[1])?) as u8;
    }
    Some(sum)
}

/// A SHA-256 as hexadecimal digits.
pub(crate) fn hex(sum: &[u8; 32]) -> String {
    use std::fmt::Write as _;
    sum.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_twice_is_refused_wherever_it_stands() {
        for json in [r#"{"a": 1, "a": 1}"#, r#"{"x": [{"deep": {"b": 0, "\u0062": 0}}]}"#] {
            let error = parse::<serde_json::Value>("m.json", json.as_bytes()).unwrap_err();
            assert!(matches!(error, Error::Pack { refusal: Refusal::ManifestSyntax, .. }), "{error}");
            assert!(error.to_string().contains("stands twice"), "{error}");
        }
        parse::<serde_json::Value>("m.json", br#"{"a": {"a": 1}, "b": [{"a": 1}, {"a": null}]}"#).unwrap();
    }

    #[test]
    fn json_of_hostile_depth_is_an_error() {
        let deep = "[".repeat(100_000);
        assert!(parse::<serde_json::Value>("m.json", deep.as_bytes()).is_err());
    }

    #[test]
    fn a_sum_has_sixty_four_digits() {
        let sum = [0xAB; 32];
        assert_eq!(sha256(&hex(&sum)), Some(sum));
        assert_eq!(sha256(&"AB".repeat(32)), Some(sum));
        for wrong in ["", &"a".repeat(63), &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(sha256(wrong), None);
        }
    }
}
