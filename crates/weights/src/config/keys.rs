//! Typed access to one object of `config.json`, with errors that name the key, the value and what was expected.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Upper bound of every size: far above any model, low enough that products of three fit in 64 bits.
const SIZE_BOUND: u64 = 1 << 21;

/// One object of `config.json`.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    /// Path of the object with its last dot (`text_config.`), empty at the top.
    path: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { map, path }
    }

    /// The value of a key; `null` counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, `null` included.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object of a key.
    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        self.optional(key, "an object", Value::as_object)
    }

    /// A size of at least 1.
    pub(super) fn size(&self, key: &str) -> Result<usize> {
        match self.optional_size(key)? {
            Some(size) => Ok(size),
            None => Err(self.missing(key, "a whole number")),
        }
    }

    /// A size from 1 to `bound`.
    pub(super) fn bounded(&self, key: &str, bound: usize) -> Result<usize> {
        let size = self.size(key)?;
        if size <= bound { Ok(size) } else { Err(self.wrong(key, &format!("a number up to {bound}"))) }
    }

    /// A size of at least 1, or nothing.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match self.optional_count(key)? {
            Some(0) => Err(self.wrong(key, "a number of at least 1")),
            count => Ok(count),
        }
    }

    /// A number of at least 0, or nothing.
    pub(super) fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        let count =
            |value: &Value| value.as_u64().filter(|count| *count <= SIZE_BOUND).map(|count| count as usize);
        self.optional(key, "a whole number up to 2097152", count)
    }

    /// A finite number, or nothing.
    pub(super) fn optional_number(&self, key: &str) -> Result<Option<f32>> {
        let finite =
            |value: &Value| value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        self.optional(key, "a finite number", finite)
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, key: &str) -> Result<f32> {
        match self.optional_number(key)? {
            Some(number) if number > 0.0 => Ok(number),
            Some(_) => Err(self.wrong(key, "a number above 0")),
            None => Err(self.missing(key, "a number above 0")),
        }
    }

    /// A truth value, or nothing.
    pub(super) fn optional_flag(&self, key: &str) -> Result<Option<bool>> {
        self.optional(key, "true or false", Value::as_bool)
    }

    /// A truth value.
    pub(super) fn flag(&self, key: &str) -> Result<bool> {
        match self.optional_flag(key)? {
            Some(flag) => Ok(flag),
            None => Err(self.missing(key, "true or false")),
        }
    }

    /// A text, or nothing.
    pub(super) fn optional_text(&self, key: &str) -> Result<Option<&'a str>> {
        self.optional(key, "a text", Value::as_str)
    }

    /// A list, or nothing.
    pub(super) fn optional_list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        self.optional(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// Refuses another value than `only`, when the key is there.
    pub(super) fn only(&self, key: &str, only: &Value) -> Result<()> {
        match self.value(key) {
            Some(value) if value != only => Err(self.wrong(key, &only.to_string())),
            _ => Ok(()),
        }
    }

    /// The error of a key that is not there.
    pub(super) fn missing(&self, key: &str, expected: &str) -> Error {
        self.error(key, "is missing".to_owned(), expected, "download config.json of the checkpoint again")
    }

    /// The error of a key with a value that Flint cannot run.
    pub(super) fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = match self.map.get(key) {
            Some(value) => format!("is {}", shorten(&value.to_string())),
            None => "is missing".to_owned(),
        };
        self.error(key, found, expected, "")
    }

    /// An error at a key.
    pub(super) fn error(&self, key: &str, found: String, expected: &str, remedy: &'static str) -> Error {
        let key = format!("{}{key}", self.path);
        Error::Config { key, found, expected: expected.to_owned(), remedy }
    }

    fn optional<T>(&self, key: &str, kind: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.value(key) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(key, kind)),
        }
    }
}

/// A value short enough for a message.
pub(crate) fn shorten(text: &str) -> String {
    const LONGEST: usize = 80;
    if text.len() <= LONGEST {
        return text.to_owned();
    }
    let mut end = LONGEST;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}
