//! A JSON body and typed reads of its fields, whose errors name the field.
//!
//! A field that is `null` counts as absent, as OpenAI's clients send it.

use std::error::Error as _;
use std::ops::RangeInclusive;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt as _;
use serde_json::{Map, Value};

use crate::error::ApiError;

/// What a refused body may still send before the answer: a client that is cut off while it writes often loses the
/// answer to the reset of its connection.
const DISCARD_BYTES: usize = 256 << 20;

/// How long a body may take to arrive. A sender that stalls would hold its connection for ever.
const BODY_TIMEOUT: Duration = Duration::from_mins(2);

/// Reads a request's body as a JSON object.
///
/// # Errors
/// Another content type (415: a page of another origin can send forms and plain text without asking, JSON not),
/// more than `limit_bytes` (413), no JSON, JSON nested deeper than 127 levels, or not an object (400).
pub(crate) async fn read_object(
    headers: &HeaderMap,
    body: Body,
    limit_bytes: usize,
) -> Result<Map<String, Value>, ApiError> {
    check_content_type(headers)?;
    let read = tokio::time::timeout(BODY_TIMEOUT, read_body(body, limit_bytes));
    let bytes = read.await.map_err(|_| too_slow())??;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(not_json("the body must be a JSON object".into())),
        Err(error) => Err(not_json(format!("the body is not valid JSON: {error}"))),
    }
}

fn not_json(message: String) -> ApiError {
    ApiError::request(StatusCode::BAD_REQUEST, Some("invalid_json"), None, message)
}

fn too_slow() -> ApiError {
    let message = format!("the body did not arrive within {} seconds", BODY_TIMEOUT.as_secs());
    ApiError::request(StatusCode::REQUEST_TIMEOUT, Some("body_timeout"), None, message)
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let value = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = value.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(ApiError::request(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Some("unsupported_media_type"),
        None,
        format!("Content-Type is {value:?}; send the body as application/json"),
    ))
}

async fn read_body(body: Body, limit_bytes: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let (mut bytes, mut seen) = (Vec::new(), 0_usize);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| {
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            not_json(format!("the body could not be read: {reason}"))
        })?;
        seen = seen.saturating_add(chunk.len());
        if seen > limit_bytes {
            bytes = Vec::new();
            if seen > DISCARD_BYTES {
                break;
            }
        } else {
            bytes.extend_from_slice(&chunk);
        }
    }
    if seen <= limit_bytes {
        return Ok(bytes);
    }
    Err(ApiError::request(
        StatusCode::PAYLOAD_TOO_LARGE,
        Some("body_too_large"),
        None,
        format!("the body is larger than {limit_bytes} bytes, the most that this server reads"),
    ))
}

/// Typed reads of an object's fields.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Path of the object with a dot after it; empty for the body itself.
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The fields of the body (`path` empty) or of the object at `path` (ends in a dot).
    pub(crate) fn new(object: &'a Map<String, Value>, path: &'a str) -> Self {
        Self { object, path }
    }

    /// The path of a field, for errors.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// The field, if it is there and not null.
    pub(crate) fn value(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// A boolean.
    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A text.
    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// An object.
    pub(crate) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// A list.
    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// A number that fp32 can hold. Ranges are the engine's business.
    pub(crate) fn number(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.typed(name, "a number", |value| value.as_f64().map(|v| v as f32).filter(|v| v.is_finite()))
    }

    /// A whole number within `range`.
    pub(crate) fn integer(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let wanted = if *range.end() == u64::MAX {
            format!("a whole number of at least {}", range.start())
        } else {
            format!("a whole number from {} to {}", range.start(), range.end())
        };
        self.typed(name, &wanted, |value| value.as_u64().filter(|v| range.contains(v)))
    }

    fn typed<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let refuse = || {
            let path = self.path(name);
            ApiError::invalid(&path, format!("{path} is {}; it must be {wanted}", shown(value)))
        };
        read(value).map(Some).ok_or_else(refuse)
    }
}

/// A value for a message: short enough to read.
pub(crate) fn shown(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = match value {
        Value::Array(list) => return format!("a list of {}", list.len()),
        Value::Object(_) => return "an object".into(),
        other => other.to_string(),
    };
    if text.chars().count() <= LONGEST {
        return text;
    }
    let start: String = text.chars().take(LONGEST).collect();
    format!("{start}…")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: &Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap()
    }

    #[test]
    fn null_counts_as_absent() {
        let body = object(&json!({ "stream": null }));
        assert_eq!(Fields::new(&body, "").boolean("stream"), Ok(None));
    }

    #[test]
    fn a_field_of_another_type_is_refused_with_its_path_and_value() {
        let body = object(&json!({ "include_usage": "yes" }));
        let error = Fields::new(&body, "stream_options.").boolean("include_usage").unwrap_err();
        let body = error.body();
        assert_eq!(body["error"]["param"], "stream_options.include_usage");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("\"yes\""), "{message}");
    }

    #[test]
    fn a_number_that_fp32_cannot_hold_is_refused() {
        let body = object(&json!({ "temperature": 1e300 }));
        assert!(Fields::new(&body, "").number("temperature").is_err());
    }

    #[test]
    fn a_long_value_is_shortened_in_the_message() {
        let text = shown(&Value::String("é".repeat(5000)));
        assert!(text.chars().count() < 100, "{text}");
    }
}
