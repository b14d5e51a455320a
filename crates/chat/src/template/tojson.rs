//! The filter `tojson` as transformers defines it: `json.dumps` with `ensure_ascii` off.
//!
//! minijinja's own filter escapes for HTML and knows none of Python's options.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::value::BigInteger;
use crate::ink::Ink;
use crate::python;

/// How Python was asked to print.
struct Style<'a> {
    ink: Option<&'a Ink>,
    ensure_ascii: bool,
    /// White space of one level; `None` prints on one line.
    indent: Option<String>,
    between_items: String,
    behind_key: String,
    sort_keys: bool,
}

/// `value | tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn filter(ink: Option<&Ink>, value: &Value, options: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    type Positional<'a> =
        (Option<&'a Value>, Option<&'a Value>, Option<&'a Value>, Option<&'a Value>, Kwargs);
    let options = options.into_values();
    let (ensure_ascii, indent, separators, sort_keys, named): Positional<'_> = from_args(&options)?;
    let pick = |positional: Option<&Value>, name: &str| -> Result<Option<Value>, Error> {
        let value = if named.has(name) { Some(named.get::<Value>(name)?) } else { positional.cloned() };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = pick(indent, "indent")?.map(|value| indentation(&value)).transpose()?;
    let (between_items, behind_key) = match pick(separators, "separators")? {
        Some(pair) => separator_pair(&pair)?,
        // Python leaves the blank out where a line break follows.
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ink,
        ensure_ascii: pick(ensure_ascii, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        indent,
        between_items,
        behind_key,
        sort_keys: pick(sort_keys, "sort_keys")?.is_some_and(|value| value.is_true()),
    };
    named.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

fn indentation(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Ok(" ".repeat(usize::try_from(value.clone())?.min(64))),
    }
}

fn separator_pair(value: &Value) -> Result<(String, String), Error> {
    let parts: Vec<Value> = value.try_iter()?.collect();
    match parts.as_slice() {
        [between, behind] => Ok((between.to_string(), behind.to_string())),
        _ => Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair of strings")),
    }
}

impl Style<'_> {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(out, "{value}");
            }
            ValueKind::Number => out.push_str(&python::float_json(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_list(out, ('[', ']'), &items, depth, |style, out, item| {
                    style.write(out, item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    entries.push((key_text(&key)?, value.get_item(&key)?));
                }
                if self.sort_keys {
                    entries.sort_by_cached_key(|(key, _)| {
                        self.ink.map_or_else(|| key.clone(), |ink| ink.plain(key))
                    });
                }
                self.write_list(out, ('{', '}'), &entries, depth, |style, out, (key, item)| {
                    style.write_text(out, key);
                    out.push_str(&style.behind_key);
                    style.write(out, item, depth + 1)
                })?;
            }
            kind => match value.downcast_object_ref::<BigInteger>() {
                Some(integer) => out.push_str(&integer.0),
                None => {
                    return Err(Error::new(
                        ErrorKind::InvalidOperation,
                        format!("tojson: {kind} has no JSON form"),
                    ));
                }
            },
        }
        Ok(())
    }

    fn write_list<T>(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: &[T],
        depth: usize,
        mut write: impl FnMut(&Self, &mut String, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.between_items);
            }
            self.break_line(out, depth + 1);
            write(self, out, item)?;
        }
        if !items.is_empty() {
            self.break_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            // An inked character is escaped if its original is; else it stays inked.
            let original = self.ink.and_then(|ink| ink.original(c)).unwrap_or(c);
            match original {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..' ' => push_escape(out, original),
                '\u{7f}'.. if self.ensure_ascii => push_escape(out, original),
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn push_escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// A mapping's key as JSON writes it.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(python::float_json(f64::try_from(key.clone())?)),
        kind => Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: a key cannot be {kind}"))),
    }
}
