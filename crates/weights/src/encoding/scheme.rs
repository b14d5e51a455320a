//! The quantisation table of `config.json`: which module is stored how, in every spelling.
//!
//! A table stands under `quantization` or `quantization_config`, at the top or in `text_config`; several must agree.
//! Keys are module paths in any layout's spelling; two keys for one module must agree. A key of a fused module holds
//! for its members, one of `kv_b_proj` for the absorbed pair where the pair has none of its own.
//! Source: `reference/mlx-affine.md` section 5, `reference/weights.md`.

use std::collections::HashMap;
use std::fmt;

use serde_json::{Map, Value};

use crate::config::shorten;
use crate::names::{Place, place_of_key};
use crate::table::Table;
use crate::{Error, Result};

/// Bits and group of an affine module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width {
    pub(crate) bits: u8,
    pub(crate) group: usize,
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bits, group {}", self.bits, self.group)
    }
}

/// What a table says of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// Not quantised.
    Plain,
    /// Affine.
    Quantised(Width),
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => f.write_str("unquantised"),
            Self::Quantised(width) => width.fmt(f),
        }
    }
}

/// How a checkpoint is quantised.
#[derive(Debug)]
pub(crate) enum Scheme {
    /// No table.
    Plain,
    /// FP8 with blocks of 128 × 128.
    Fp8,
    /// EXL3. Its table says nothing that the tensors do not say.
    Exl3,
    /// MLX affine.
    Affine(Affine),
}

/// An MLX table.
#[derive(Debug)]
pub(crate) struct Affine {
    default: Width,
    /// By canonical module.
    entries: HashMap<String, Entries>,
    /// Keys that name no module of the model.
    unknown: Vec<String>,
    /// Where the table stands.
    place: &'static str,
}

/// A table's entries for one module: for all of it, and for single members of a stack.
#[derive(Debug, Default)]
struct Entries {
    whole: Option<Entry>,
    members: HashMap<usize, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    key: String,
    setting: Setting,
}

impl Scheme {
    /// Reads the table of a `config.json`.
    ///
    /// # Errors
    /// A method or mode that Flint does not read, a width outside the format, keys or tables that contradict each
    /// other; each by name.
    pub(crate) fn read(config: &Map<String, Value>, table: &Table, trunk_layers: usize) -> Result<Self> {
        let mut found: Option<(&'static str, Self)> = None;
        for (place, block) in blocks(config)? {
            let scheme = Self::of_block(place, block, table, trunk_layers)?;
            match &found {
                None => found = Some((place, scheme)),
                Some((first, other)) => other.check_same(&scheme, first, place)?,
            }
        }
        Ok(found.map_or(Self::Plain, |(_, scheme)| scheme))
    }

    fn of_block(
        place: &'static str,
        block: &Map<String, Value>,
        table: &Table,
        trunk: usize,
    ) -> Result<Self> {
        match block.get("quant_method").filter(|method| !method.is_null()) {
            Some(Value::String(method)) if method == "fp8" => check_fp8(place, block).map(|()| Self::Fp8),
            Some(Value::String(method)) if method == "exl3" => {
                check_codebook(place, block).map(|()| Self::Exl3)
            }
            Some(Value::String(method)) if method != "mlx" && method != "affine" => {
                Err(unsupported_method(place, method))
            }
            Some(Value::String(_)) | None => Affine::read(place, block, table, trunk).map(Self::Affine),
            Some(other) => Err(wrong(place, "quant_method", other, "a text")),
        }
    }

    /// What the table says of a module, with the key that says it; `None` without a table.
    pub(crate) fn setting(&self, module: &str, member: usize) -> Option<(&str, Setting)> {
        let Self::Affine(affine) = self else { return None };
        Some(
            affine
                .entry(module, member)
                .map_or((affine.place, Setting::Quantised(affine.default)), |entry| {
                    (entry.key.as_str(), entry.setting)
                }),
        )
    }

    /// The module's own entry, if it has one.
    pub(crate) fn own_entry(&self, module: &str, member: usize) -> Option<(&str, Setting)> {
        let Self::Affine(affine) = self else { return None };
        affine.entry(module, member).map(|entry| (entry.key.as_str(), entry.setting))
    }

    /// Keys that name no module of the model, in one sentence.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let Self::Affine(Affine { unknown, place, .. }) = self else { return Vec::new() };
        let Some(first) = unknown.first() else { return Vec::new() };
        let shown = unknown.iter().take(3).map(String::as_str).collect::<Vec<_>>().join(", ");
        let keys = if unknown.len() == 1 {
            format!("the key {first} names")
        } else {
            format!("{} keys name", unknown.len())
        };
        vec![format!("config.json, {place}: {keys} no module of the model ({shown}); they are not used")]
    }

    /// Checks that two tables say the same of every module.
    fn check_same(&self, other: &Self, first: &'static str, second: &'static str) -> Result<()> {
        match (self, other) {
            (Self::Plain, Self::Plain) | (Self::Fp8, Self::Fp8) | (Self::Exl3, Self::Exl3) => Ok(()),
            (Self::Affine(a), Self::Affine(b)) => a.check_same(b, first, second),
            _ => Err(Error::Config {
                key: second.to_owned(),
                found: format!("names another quantisation method than {first}"),
                expected: "one method".to_owned(),
                remedy: "download config.json again",
            }),
        }
    }
}

impl Affine {
    fn read(place: &'static str, block: &Map<String, Value>, table: &Table, trunk: usize) -> Result<Self> {
        check_mode(place, block)?;
        let default = Width { bits: bits(place, block)?, group: group(place, block)? };
        let mut affine = Self { default, entries: HashMap::new(), unknown: Vec::new(), place };
        for (key, value) in block {
            match value {
                Value::Object(entry) => {
                    let at = format!("{place}.{key}");
                    check_mode(&at, entry)?;
                    let width = Width {
                        bits: if entry.contains_key("bits") { bits(&at, entry)? } else { default.bits },
                        group: if entry.contains_key("group_size") {
                            group(&at, entry)?
                        } else {
                            default.group
                        },
                    };
                    affine.insert(key, Setting::Quantised(width), table, trunk)?;
                }
                Value::Bool(quantised) => {
                    let setting = if *quantised { Setting::Quantised(default) } else { Setting::Plain };
                    affine.insert(key, setting, table, trunk)?;
                }
                _ => {}
            }
        }
        Ok(affine)
    }

    /// Adds a key for every module that it names.
    fn insert(&mut self, key: &str, setting: Setting, table: &Table, trunk: usize) -> Result<()> {
        let Place { module, fusion, member, .. } = place_of_key(key, trunk);
        let modules: Vec<String> = match fusion {
            Some(fusion) => fusion.members.iter().map(|name| format!("{module}{name}")).collect(),
            None => vec![module],
        };
        let mut known = false;
        for module in modules {
            if table.find(&module).is_none() {
                continue;
            }
            known = true;
            let entry = Entry { key: key.to_owned(), setting };
            let entries = self.entries.entry(module.clone()).or_default();
            for other in entries.against(member) {
                if other.setting != setting {
                    return Err(disagree(&module, other, &entry));
                }
            }
            match member {
                None => entries.whole.get_or_insert(entry),
                Some(member) => entries.members.entry(member).or_insert(entry),
            };
        }
        if !known {
            self.unknown.push(key.to_owned());
        }
        Ok(())
    }

    fn entry(&self, module: &str, member: usize) -> Option<&Entry> {
        let of = |module: &str| {
            let entries = self.entries.get(module)?;
            entries.members.get(&member).or(entries.whole.as_ref())
        };
        of(module).or_else(|| {
            let stem = module.strip_suffix("embed_q").or_else(|| module.strip_suffix("unembed_out"))?;
            of(&format!("{stem}kv_b_proj"))
        })
    }

    fn check_same(&self, other: &Self, first: &'static str, second: &'static str) -> Result<()> {
        if self.default != other.default {
            return Err(Error::Config {
                key: second.to_owned(),
                found: format!("declares {}", other.default),
                expected: format!("{}, as {first}", self.default),
                remedy: "the two tables must agree: download config.json again",
            });
        }
        let mut modules: Vec<&String> = self.entries.keys().chain(other.entries.keys()).collect();
        modules.sort();
        let none = Entries::default();
        for module in modules {
            let (a, b) =
                (self.entries.get(module).unwrap_or(&none), other.entries.get(module).unwrap_or(&none));
            let mut members: Vec<Option<usize>> =
                a.members.keys().chain(b.members.keys()).copied().map(Some).collect();
            members.push(None);
            for member in members {
                let setting = |entries: &Entries, place: &str, table: &Self| {
                    let own =
                        member.and_then(|member| entries.members.get(&member)).or(entries.whole.as_ref());
                    own.map_or((place.to_owned(), Setting::Quantised(table.default)), |entry| {
                        (format!("{place}.{}", entry.key), entry.setting)
                    })
                };
                let ((key_a, set_a), (key_b, set_b)) = (setting(a, first, self), setting(b, second, other));
                if set_a != set_b {
                    let (one, two) =
                        (Entry { key: key_a, setting: set_a }, Entry { key: key_b, setting: set_b });
                    return Err(disagree(module, &one, &two));
                }
            }
        }
        Ok(())
    }
}

impl Entries {
    /// The entries that an entry for `member` (`None`: all members) must agree with.
    fn against(&self, member: Option<usize>) -> Vec<&Entry> {
        match member {
            None => self.whole.iter().chain(self.members.values()).collect(),
            Some(member) => self.whole.iter().chain(self.members.get(&member)).collect(),
        }
    }
}

fn disagree(module: &str, first: &Entry, second: &Entry) -> Error {
    Error::Spellings {
        module: module.to_owned(),
        first: first.key.clone(),
        first_setting: first.setting.to_string(),
        second: second.key.clone(),
        second_setting: second.setting.to_string(),
    }
}

/// Every table of a config, with its place.
fn blocks(config: &Map<String, Value>) -> Result<Vec<(&'static str, &Map<String, Value>)>> {
    let text = config.get("text_config").and_then(Value::as_object);
    let places = [
        ("quantization", config.get("quantization")),
        ("quantization_config", config.get("quantization_config")),
        ("text_config.quantization", text.and_then(|text| text.get("quantization"))),
        ("text_config.quantization_config", text.and_then(|text| text.get("quantization_config"))),
    ];
    let mut found = Vec::new();
    for (place, value) in places {
        match value {
            None | Some(Value::Null) => {}
            Some(Value::Object(block)) => found.push((place, block)),
            Some(other) => return Err(wrong("", place, other, "an object")),
        }
    }
    Ok(found)
}

/// Checks the keys of an FP8 table.
fn check_fp8(place: &str, block: &Map<String, Value>) -> Result<()> {
    let only = |key: &str, allowed: &[Value], needed: bool| match block.get(key) {
        None | Some(Value::Null) if !needed => Ok(()),
        Some(value) if allowed.contains(value) => Ok(()),
        other => {
            let expected = allowed.first().map_or("nothing".to_owned(), Value::to_string);
            Err(wrong(place, key, other.unwrap_or(&Value::Null), &expected))
        }
    };
    only("fmt", &["e4m3".into()], false)?;
    only("activation_scheme", &["dynamic".into()], false)?;
    only("weight_block_size", &[serde_json::json!([128, 128])], true)?;
    only("scale_fmt", &["float32".into(), "float".into()], false)
}

/// Refuses a codebook that Flint does not know: its tensors might have a marker that Flint does not know either.
fn check_codebook(place: &str, block: &Map<String, Value>) -> Result<()> {
    match block.get("codebook") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(name)) if ["3inst", "mcg", "mul1"].contains(&name.as_str()) => Ok(()),
        Some(other) => Err(wrong(place, "codebook", other, "\"3inst\", \"mcg\" or \"mul1\"")),
    }
}

fn unsupported_method(place: &str, method: &str) -> Error {
    let at = format!("config.json, {place}.quant_method");
    let remedy = "use the official FP8 or BF16 checkpoint, an MLX affine or an EXL3 quantisation";
    Error::Unsupported { at, what: format!("quantisation method {method:?}"), remedy }
}

fn check_mode(at: &str, block: &Map<String, Value>) -> Result<()> {
    match block.get("mode") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(mode)) if mode == "affine" => Ok(()),
        Some(Value::String(mode)) => Err(Error::Unsupported {
            at: format!("config.json, {at}.mode"),
            what: match mode.as_str() {
                "mxfp4" | "nvfp4" | "mxfp8" => format!("the MLX mode {mode:?} (micro-scaled floats)"),
                _ => format!("the MLX mode {mode:?}, which Flint does not know,"),
            },
            remedy: "use an affine quantisation of the model",
        }),
        Some(other) => Err(wrong(at, "mode", other, "\"affine\"")),
    }
}

fn bits(at: &str, block: &Map<String, Value>) -> Result<u8> {
    let allowed = [2_u8, 3, 4, 5, 6, 8];
    let value = block.get("bits").unwrap_or(&Value::Null);
    let found = value.as_u64().and_then(|bits| allowed.into_iter().find(|known| u64::from(*known) == bits));
    found.ok_or_else(|| wrong(at, "bits", value, "2, 3, 4, 5, 6 or 8"))
}

fn group(at: &str, block: &Map<String, Value>) -> Result<usize> {
    let value = block.get("group_size").unwrap_or(&Value::Null);
    let found =
        value.as_u64().and_then(|group| [32_usize, 64, 128].into_iter().find(|known| *known as u64 == group));
    found.ok_or_else(|| wrong(at, "group_size", value, "32, 64 or 128"))
}

fn wrong(at: &str, key: &str, value: &Value, expected: &str) -> Error {
    Error::Config {
        key: if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") },
        found: if value.is_null() {
            "is missing".to_owned()
        } else {
            format!("is {}", shorten(&value.to_string()))
        },
        expected: expected.to_owned(),
        remedy: "",
    }
}
