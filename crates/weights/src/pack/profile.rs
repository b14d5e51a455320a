//! Which experts were used how often: a hint for what to hold in memory first. It cannot change a result.
//!
//! Flint writes `flint-expert-usage-v1`. A file of another format is taken where each layer can be read without doubt as
//! counts or as an order of the experts. Source: `reference/streaming-pack.md` section 5.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::strict;
use crate::Result;

/// The profile of prompts in a pack's folder.
pub const PROMPT: &str = "expert-usage-v1.json";
/// The profile of decoding.
pub const DECODE: &str = "expert-usage-decode-v1.json";
const FORMAT: &str = "flint-expert-usage-v1";

/// What the tokens were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Tokens of prompts.
    Prompt,
    /// Tokens of replies.
    Decode,
}

impl Phase {
    /// The file of a phase's profile.
    pub fn file(self) -> &'static str {
        match self {
            Self::Prompt => PROMPT,
            Self::Decode => DECODE,
        }
    }
}

/// How often each expert of each layer was picked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageProfile {
    format: String,
    /// What the tokens were.
    pub phase: Phase,
    /// How many tokens were counted.
    pub tokens: u64,
    /// Experts of a layer.
    pub n_experts: usize,
    /// The layers, ascending.
    pub layers: Vec<LayerUsage>,
}

/// How often each expert of one layer was picked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerUsage {
    /// The model's number of the layer.
    pub layer: usize,
    /// By expert.
    pub counts: Vec<u64>,
}

/// What a file gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Usage {
    /// Counts, or an order as counts that have the same order.
    Understood(UsageProfile),
    /// Why the file is left aside; slots start empty.
    NotUnderstood(String),
}

impl UsageProfile {
    /// A profile of these layers' counts.
    pub fn new(phase: Phase, tokens: u64, n_experts: usize, layers: Vec<LayerUsage>) -> Self {
        Self { format: FORMAT.to_owned(), phase, tokens, n_experts, layers }
    }

    /// Reads a file for a model whose layers `layers` have `experts` experts each. `phase` is what the file's name says.
    pub fn read(json: &[u8], phase: Phase, layers: &[usize], experts: usize) -> Usage {
        if json.len() as u64 > strict::JSON_BOUND {
            return Usage::NotUnderstood(format!("it has {} bytes, which no profile has", json.len()));
        }
        let value: Value = match strict::parse(phase.file(), json) {
            Ok(value) => value,
            Err(error) => return Usage::NotUnderstood(error.to_string()),
        };
        let read = if value.get("format").and_then(Value::as_str) == Some(FORMAT) {
            Self::own(value, layers, experts)
        } else {
            Self::foreign(&value, phase, layers, experts)
        };
        read.map_or_else(Usage::NotUnderstood, Usage::Understood)
    }

    fn own(value: Value, layers: &[usize], experts: usize) -> std::result::Result<Self, String> {
        let profile: Self = serde_json::from_value(value).map_err(|error| error.to_string())?;
        if profile.n_experts != experts {
            return Err(format!("it counts {} experts, the model has {experts}", profile.n_experts));
        }
        if !profile.layers.iter().map(|layer| layer.layer).eq(layers.iter().copied()) {
            return Err(format!("its layers are not the model's {layers:?}"));
        }
        match profile.layers.iter().find(|layer| layer.counts.len() != experts) {
            None => Ok(profile),
            Some(layer) => {
                Err(format!("layer {} has {} counts, not {experts}", layer.layer, layer.counts.len()))
            }
        }
    }

    /// A file of another format: the one place in it that has a row of numbers for each layer.
    fn foreign(
        value: &Value,
        phase: Phase,
        layers: &[usize],
        experts: usize,
    ) -> std::result::Result<Self, String> {
        let mut found = Vec::new();
        collect(value, layers, experts, 0, &mut found);
        let rows = match found.as_slice() {
            [rows] => rows,
            [] => {
                return Err(format!(
                    "nothing in it has {experts} numbers for each of {} layers",
                    layers.len()
                ));
            }
            more => return Err(format!("{} places in it have numbers for each layer", more.len())),
        };
        let orders = rows.iter().filter(|row| is_order(row)).count();
        let counts: Vec<Vec<u64>> = match orders {
            0 => rows.clone(),
            all if all == rows.len() => rows.iter().map(|row| counts_of_order(row)).collect(),
            _ => return Err("some of its layers are orders of the experts, others are counts".to_owned()),
        };
        let layers = layers.iter().zip(counts).map(|(layer, counts)| LayerUsage { layer: *layer, counts });
        Ok(Self::new(phase, 0, experts, layers.collect()))
    }

    /// The file's bytes.
    ///
    /// # Errors
    /// None in practice: the numbers can always be written.
    pub fn to_json(&self) -> Result<Vec<u8>> {
        strict::line(self.phase.file(), self)
    }

    /// The experts of a layer, most used first; equal counts by number.
    pub fn ranked(&self, layer: usize) -> Option<Vec<usize>> {
        let usage = self.layers.iter().find(|usage| usage.layer == layer)?;
        let mut experts: Vec<usize> = (0..usage.counts.len()).collect();
        experts.sort_by_key(|expert| (std::cmp::Reverse(usage.counts[*expert]), *expert));
        Some(experts)
    }
}

/// Nesting that a profile may have.
const DEPTH: usize = 8;

/// Collects every place that has one row of `experts` whole numbers for each layer.
fn collect(value: &Value, layers: &[usize], experts: usize, depth: usize, found: &mut Vec<Vec<Vec<u64>>>) {
    if depth > DEPTH {
        return;
    }
    if let Some(rows) = rows(value, layers, experts) {
        found.push(rows);
        return;
    }
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, layers, experts, depth + 1, found)),
        Value::Object(map) => map.values().for_each(|item| collect(item, layers, experts, depth + 1, found)),
        _ => {}
    }
}

/// The rows of a list of rows, of a list of objects with `layer` and one row, or of an object with layers as keys.
fn rows(value: &Value, layers: &[usize], experts: usize) -> Option<Vec<Vec<u64>>> {
    match value {
        Value::Array(items) if items.len() == layers.len() => {
            if let Some(rows) = items.iter().map(|item| row(item, experts)).collect::<Option<Vec<_>>>() {
                return Some(rows);
            }
            let numbered = items.iter().map(|item| {
                let map = item.as_object()?;
                let layer = map.get("layer").or_else(|| map.get("layer_idx"))?.as_u64()?;
                Some((layer, one_row(map.values(), experts)?))
            });
            in_order(numbered.collect::<Option<Vec<_>>>()?, layers)
        }
        Value::Object(map) if map.len() == layers.len() => {
            let numbered = map.iter().map(|(key, item)| {
                let number =
                    key.strip_prefix("layers.").or_else(|| key.strip_prefix("layer_")).unwrap_or(key);
                let of_object = |item: &Value| one_row(item.as_object()?.values(), experts);
                Some((number.parse().ok()?, row(item, experts).or_else(|| of_object(item))?))
            });
            in_order(numbered.collect::<Option<Vec<_>>>()?, layers)
        }
        _ => None,
    }
}

/// Rows in the order of the layers, whichever of the two numberings they have.
fn in_order(mut rows: Vec<(u64, Vec<u64>)>, layers: &[usize]) -> Option<Vec<Vec<u64>>> {
    rows.sort_by_key(|(layer, _)| *layer);
    let numbers = || rows.iter().map(|(layer, _)| *layer);
    let is_bank = numbers().eq(0..layers.len() as u64);
    let is_model = numbers().eq(layers.iter().map(|layer| *layer as u64));
    (is_bank || is_model).then(|| rows.into_iter().map(|(_, row)| row).collect())
}

/// The only row among values.
fn one_row<'a>(values: impl Iterator<Item = &'a Value>, experts: usize) -> Option<Vec<u64>> {
    let mut rows = values.filter_map(|value| row(value, experts));
    let first = rows.next()?;
    rows.next().is_none().then_some(first)
}

fn row(value: &Value, experts: usize) -> Option<Vec<u64>> {
    let items = value.as_array().filter(|items| items.len() == experts)?;
    items.iter().map(Value::as_u64).collect()
}

/// Whether a row names each expert once.
fn is_order(row: &[u64]) -> bool {
    let mut seen = vec![false; row.len()];
    row.iter().all(|expert| seen.get_mut(*expert as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
}

/// Counts that give an order back: the first expert has the highest.
fn counts_of_order(row: &[u64]) -> Vec<u64> {
    let mut counts = vec![0; row.len()];
    for (place, expert) in row.iter().enumerate() {
        counts[*expert as usize] = (row.len() - place) as u64;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const LAYERS: [usize; 3] = [3, 4, 5];

    fn read(value: &Value) -> Usage {
        UsageProfile::read(value.to_string().as_bytes(), Phase::Prompt, &LAYERS, 4)
    }

    fn ranks(value: &Value) -> Vec<Vec<usize>> {
        let Usage::Understood(profile) = read(value) else { panic!("{:?}", read(value)) };
        LAYERS.iter().map(|layer| profile.ranked(*layer).unwrap()).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        let layers = LAYERS.map(|layer| LayerUsage { layer, counts: vec![0, 17, layer as u64, 17] });
        let profile = UsageProfile::new(Phase::Prompt, 99, 4, layers.to_vec());
        let read = UsageProfile::read(&profile.to_json().unwrap(), Phase::Prompt, &LAYERS, 4);
        assert_eq!(read, Usage::Understood(profile));
    }

    #[test]
    fn equal_counts_are_ranked_by_number() {
        let profile =
            UsageProfile::new(Phase::Decode, 1, 4, vec![LayerUsage { layer: 3, counts: vec![2, 9, 2, 9] }]);
        assert_eq!(profile.ranked(3), Some(vec![1, 3, 0, 2]));
        assert_eq!(profile.ranked(4), None);
    }

    #[test]
    fn other_formats_are_read_where_there_is_no_doubt() {
        let counts = json!([[9, 0, 7, 0], [0, 0, 0, 5], [1, 1, 1, 1]]);
        let expected = vec![vec![0, 2, 1, 3], vec![3, 0, 1, 2], vec![0, 1, 2, 3]];
        let orders = json!([[0, 2, 1, 3], [3, 0, 1, 2], [0, 1, 2, 3]]);
        for rows in [counts, orders] {
            assert_eq!(ranks(&rows), expected);
            assert_eq!(ranks(&json!({"meta": {"tokens": 3}, "usage": {"rows": rows}})), expected);
            let keys = |first: usize| json!({(first + 2).to_string(): rows[2], first.to_string(): rows[0], (first + 1).to_string(): rows[1]});
            assert_eq!(ranks(&keys(0)), expected);
            assert_eq!(ranks(&json!({"layers": keys(3)})), expected);
            let objects = json!([{"layer": 5, "hot": rows[2]}, {"layer": 3, "hot": rows[0]}, {"layer": 4, "hot": rows[1]}]);
            assert_eq!(ranks(&objects), expected);
        }
    }

    #[test]
    fn doubt_leaves_a_file_aside() {
        let rows = json!([[9, 0, 7, 0], [0, 0, 0, 5], [1, 1, 1, 1]]);
        for doubtful in [
            json!({"prompt": rows, "decode": rows}),
            json!([[9, 0, 7, 0], [0, 0, 0, 5]]),
            json!([[9, 0, 7, 0], [0, 1, 2, 3], [1, 1, 1, 1]]),
            json!([[9.5, 0, 7, 0], [0, 0, 0, 5], [1, 1, 1, 1]]),
            json!({"1": rows[0], "2": rows[1], "3": rows[2]}),
            json!({"format": FORMAT, "phase": "prompt", "tokens": 1, "n_experts": 5, "layers": []}),
            json!(null),
        ] {
            assert!(matches!(read(&doubtful), Usage::NotUnderstood(_)), "{doubtful}");
        }
        let twice = br#"{"a": 1, "a": 2}"#;
        assert!(matches!(UsageProfile::read(twice, Phase::Prompt, &LAYERS, 4), Usage::NotUnderstood(_)));
    }
}
