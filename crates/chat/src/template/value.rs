//! Values as a template sees them, in plain text or with foreign text inked.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr};

use crate::ink::Ink;
use crate::json::Json;

/// How foreign text enters the template.
#[derive(Clone)]
pub(crate) enum Paint {
    /// As it is.
    Plain,
    /// Every text inked: nothing that the template does can make a control token of it.
    All(Arc<Ink>),
    /// Only text that holds a control token or could complete one: for templates that look at what they are given
    /// (the types in a tool's schema, say).
    Risky(Arc<Ink>),
}

impl Paint {
    /// The ink, where there is one.
    pub(crate) fn ink(&self) -> Option<&Arc<Ink>> {
        match self {
            Self::Plain => None,
            Self::All(ink) | Self::Risky(ink) => Some(ink),
        }
    }

    /// Foreign text.
    pub(crate) fn text(&self, text: &str) -> Value {
        match self {
            Self::All(ink) => Value::from(ink.mark(text)),
            Self::Risky(ink) if ink.is_risky(text) => Value::from(ink.mark(text)),
            _ => Value::from(text),
        }
    }

    /// A foreign name, which the template may look up.
    pub(crate) fn name(&self, name: &str) -> String {
        match self.ink() {
            Some(ink) if ink.is_risky_name(name) => ink.mark(name),
            _ => name.to_owned(),
        }
    }

    /// A foreign value.
    pub(crate) fn json(&self, json: &Json) -> Value {
        match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Integer(digits) => integer(digits),
            Json::Float(value) => Value::from(*value),
            Json::String(text) => self.text(text),
            Json::Array(items) => Value::from(items.iter().map(|item| self.json(item)).collect::<Vec<_>>()),
            Json::Object(entries) => {
                Value::from_pairs(entries.iter().map(|(key, value)| (self.name(key), self.json(value))))
            }
        }
    }

    /// The same with strings that the template will compare: inked only where they are risky.
    pub(crate) fn option(&self, json: &Json) -> Value {
        match self {
            Self::All(ink) => Self::Risky(Arc::clone(ink)).json(json),
            _ => self.json(json),
        }
    }
}

fn integer(digits: &str) -> Value {
    digits
        .parse::<i64>()
        .map(Value::from)
        .or_else(|_| digits.parse::<i128>().map(Value::from))
        .unwrap_or_else(|_| Value::from_object(BigInteger(digits.to_owned())))
}

/// An integer beyond the engine's 128 bits: it can be printed, which is all that templates do with one.
#[derive(Debug)]
pub(super) struct BigInteger(pub(super) String);

impl Object for BigInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}
