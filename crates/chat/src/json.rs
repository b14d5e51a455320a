//! JSON as it was written: key order and integers of any size survive.
//!
//! A template prints tool schemas and arguments, and the model was trained on Python's prints, where an integer has no
//! largest value. `serde_json::Value` rounds integers beyond 64 bits, so text that a client sends as a string (the
//! arguments of a call) is read by [`Json::parse`].

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Deepest nesting that is read; deeper text is refused, since every later walk is recursive.
const DEPTH: usize = 128;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// Decimal digits with an optional minus.
    Integer(String),
    Float(f64),
    String(String),
    Array(Vec<Json>),
    /// Keys in the order of first appearance, each once.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads one JSON text. The error says what is wrong in words.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let raw: &RawValue = serde_json::from_str(text).map_err(|error| error.to_string())?;
        Self::read(raw, 0)
    }

    /// What a JSON value is called in an error.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) | Self::Float(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "an array",
            Self::Object(_) => "an object",
        }
    }

    /// The value under `key`, if this is an object that has it.
    pub(crate) fn field(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    fn read(raw: &RawValue, depth: usize) -> Result<Self, String> {
        if depth == DEPTH {
            return Err(format!("nested deeper than {DEPTH} levels"));
        }
        let text = raw.get();
        match text.as_bytes().first() {
            Some(b'{') => {
                let Entries(entries) = serde_json::from_str(text).map_err(|error| error.to_string())?;
                let mut object: Vec<(String, Self)> = Vec::with_capacity(entries.len());
                let mut places = std::collections::HashMap::new();
                for (key, raw) in entries {
                    let value = Self::read(raw, depth + 1)?;
                    // A repeated key keeps its place and takes the last value, as in Python.
                    let place = *places.entry(key.clone()).or_insert(object.len());
                    match object.get_mut(place) {
                        Some(entry) => entry.1 = value,
                        None => object.push((key, value)),
                    }
                }
                Ok(Self::Object(object))
            }
            Some(b'[') => {
                let items: Vec<&RawValue> = serde_json::from_str(text).map_err(|error| error.to_string())?;
                Ok(Self::Array(
                    items.into_iter().map(|raw| Self::read(raw, depth + 1)).collect::<Result<_, _>>()?,
                ))
            }
            Some(b'"') => Ok(Self::String(serde_json::from_str(text).map_err(|error| error.to_string())?)),
            Some(b't') => Ok(Self::Bool(true)),
            Some(b'f') => Ok(Self::Bool(false)),
            Some(b'n') => Ok(Self::Null),
            _ => Ok(Self::number(text)),
        }
    }

    /// A number as written; one with a point or an exponent is a float of 64 bits, as in Python.
    fn number(text: &str) -> Self {
        if text.contains(['.', 'e', 'E']) {
            Self::Float(text.parse().unwrap_or(f64::NAN))
        } else if text == "-0" {
            Self::Integer("0".into())
        } else {
            Self::Integer(text.into())
        }
    }
}

impl From<&serde_json::Value> for Json {
    /// Integers beyond 64 bits were already floats in `value` and stay so.
    fn from(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            Value::Number(number) if number.is_i64() || number.is_u64() => Self::Integer(number.to_string()),
            Value::Number(number) => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            Value::String(text) => Self::String(text.clone()),
            Value::Array(items) => Self::Array(items.iter().map(Self::from).collect()),
            Value::Object(entries) => {
                Self::Object(entries.iter().map(|(key, value)| (key.clone(), Self::from(value))).collect())
            }
        }
    }
}

/// The entries of one object, unread.
struct Entries<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_any_size_and_key_order_survive() {
        let json =
            Json::parse(r#" {"z": 123456789012345678901234567890, "a": -0, "z2": [1e2, "\u00e9", null]} "#);
        assert_eq!(
            json,
            Ok(Json::Object(vec![
                ("z".into(), Json::Integer("123456789012345678901234567890".into())),
                ("a".into(), Json::Integer("0".into())),
                ("z2".into(), Json::Array(vec![Json::Float(100.0), Json::String("é".into()), Json::Null])),
            ]))
        );
    }

    #[test]
    fn a_repeated_key_takes_the_last_value_in_the_first_place() {
        let json = Json::parse(r#"{"a": 1, "b": 2, "a": 3}"#);
        assert_eq!(
            json,
            Ok(Json::Object(vec![
                ("a".into(), Json::Integer("3".into())),
                ("b".into(), Json::Integer("2".into()))
            ]))
        );
    }

    #[test]
    fn broken_and_bottomless_text_is_an_error() {
        for text in ["", "{", "[1,]", "{\"a\" 1}", "\"\\ud800\"", "01", "NaN", "1 2", "{1: 2}"] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
        assert!(Json::parse(&"[".repeat(100_000)).is_err());
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(Json::parse(&deep(128)).is_ok());
        assert!(Json::parse(&deep(129)).is_err());
    }

    #[test]
    fn a_float_beyond_the_range_is_infinite_as_in_python() {
        assert_eq!(Json::parse("1e999"), Ok(Json::Float(f64::INFINITY)));
    }
}
