//! The list of stored tensors that exllamav3's converter writes beside the shards: held against them, never used to decode.
//!
//! `quantization_config.json`: `tensor_storage` → module → `stored_tensors` → tensor → `shape`. It lists a part of the tensors
//! only, so what it leaves out says nothing. Source: `reference/exl3.md`, section 5.

use std::collections::HashMap;

use serde_json::Value;

use crate::Result;
use crate::shards::Shards;
use crate::source::Source;

const LIST: &str = "quantization_config.json";

/// One sentence where the list says something else than the shards.
///
/// # Errors
/// When the file is there and cannot be read.
pub(crate) fn warnings(source: &Source, shards: &Shards) -> Result<Vec<String>> {
    let Some(bytes) = source.read(LIST)? else { return Ok(Vec::new()) };
    let list: Value = match serde_json::from_slice(bytes.as_slice()) {
        Ok(list) => list,
        Err(error) => return Ok(vec![format!("{LIST} is not used: {error}")]),
    };
    let stored: HashMap<&str, &[usize]> =
        shards.tensors.iter().map(|t| (t.info.name.as_str(), t.info.shape.as_slice())).collect();
    let modules = list.get("tensor_storage").and_then(Value::as_object).into_iter().flatten();
    let tensors = modules.filter_map(|(_, module)| module.get("stored_tensors")?.as_object()).flatten();
    let mut different =
        tensors.filter(|(name, facts)| stored.get(name.as_str()).copied() != shape(facts).as_deref());
    let Some((name, facts)) = different.next() else { return Ok(Vec::new()) };
    let found =
        stored.get(name.as_str()).map_or("not there".to_owned(), |shape| format!("stored as {shape:?}"));
    let listed = facts.get("shape").map_or("without a shape".to_owned(), |shape| format!("as {shape}"));
    let count = different.count() + 1;
    Ok(vec![format!(
        "{LIST} and the shards differ in {count} tensors ({name} is listed {listed}, {found}); the shards decide"
    )])
}

/// The listed shape.
fn shape(facts: &Value) -> Option<Vec<usize>> {
    facts.get("shape")?.as_array()?.iter().map(|side| usize::try_from(side.as_u64()?).ok()).collect()
}
