//! Python's string methods, where minijinja's own differ or are missing.
//!
//! Methods that only look at a text see through ink; methods that cut it keep the ink on the pieces.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use crate::ink::Ink;
use crate::python;

/// Calls `value.method(arguments)`.
pub(super) fn call(
    ink: Option<&Ink>,
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) if value.kind() == ValueKind::String => match on_text(text, method, arguments)? {
            Some(result) => Ok(result),
            None if looks_only(method) => {
                let seen = |value: &Value| match (value.as_str(), ink) {
                    (Some(text), Some(ink)) => Value::from(ink.plain(text)),
                    _ => value.clone(),
                };
                let arguments: Vec<Value> = arguments.iter().map(seen).collect();
                pycompat::unknown_method_callback(state, &seen(value), method, &arguments)
            }
            None => pycompat::unknown_method_callback(state, value, method, arguments),
        },
        _ => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// The filter `trim(chars=None)`: `str.strip` of the value's text.
pub(super) fn trim(value: &Value, options: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let options = options.into_values();
    let (chars, named): (Option<&str>, Kwargs) = from_args(&options)?;
    let chars = if named.has("chars") { named.get::<Option<&str>>("chars")? } else { chars };
    named.assert_all_used()?;
    let text = value.to_string();
    Ok(Value::from(python::strip(&text, chars, true, true)))
}

/// The test `iterable`: what Python can iterate over, which `none` is not.
pub(super) fn is_iterable(value: &Value) -> bool {
    is_sequence(value) || value.kind() == ValueKind::Iterable
}

/// The test `sequence`: what has a length and items, so texts, mappings and Jinja's undefined too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

/// Whether a method answers a question about a text without passing any of it on.
fn looks_only(method: &str) -> bool {
    matches!(method, "startswith" | "endswith" | "find" | "rfind" | "count") || method.starts_with("is")
}

/// The methods that are done here; `None` for others.
fn on_text(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let triple = |head: &str, separator: &str, tail: &str| {
        Value::from(Tuple::from([head, separator, tail].map(Value::from)))
    };
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(arguments)?;
            Value::from(python::strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
            let separator = if named.has("sep") { named.get("sep")? } else { separator };
            let most = if named.has("maxsplit") { named.get("maxsplit")? } else { most };
            named.assert_all_used()?;
            let most = most.and_then(|most| usize::try_from(most).ok());
            let pieces = python::split(text, separator, most, method == "rsplit")
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "split: empty separator"))?;
            list(pieces)
        }
        "splitlines" => {
            let (keep_ends,): (Option<bool>,) = from_args(arguments)?;
            list(python::split_lines(text, keep_ends.unwrap_or(false)))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            match text.split_once(separator) {
                Some((head, tail)) => triple(head, separator, tail),
                None => triple(text, "", ""),
            }
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            match text.rsplit_once(separator) {
                Some((head, tail)) => triple(head, separator, tail),
                None => triple("", "", text),
            }
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "isspace" => {
            let () = from_args(arguments)?;
            Value::from(!text.is_empty() && text.chars().all(python::is_space))
        }
        _ => return Ok(None),
    }))
}

fn list<'a>(pieces: impl IntoIterator<Item = &'a str>) -> Value {
    Value::from(pieces.into_iter().map(Value::from).collect::<Vec<_>>())
}
