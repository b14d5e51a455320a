//! What the JSON of all completion routes has in common.

use std::sync::Arc;

use flint_chat::ChatFormat;
use serde_json::{Map, Value, json};

use crate::random::random_bits;
use crate::reply::{Channel, End};
use crate::state::Shared;

/// Turns a reply's parts into the JSON frames of one route.
pub(crate) trait Frames: Send + Sync {
    /// The frame before any text.
    fn open(&self) -> Option<Value>;
    /// One part of text, with the logprobs of its tokens.
    fn text(&mut self, channel: Channel, text: &str, tokens: &[flint_engine::Token]) -> Value;
    /// The frames after the last text.
    fn end(&mut self, end: &End) -> Vec<Value>;
}

/// The fields around `choices`, equal in every frame of a reply.
#[derive(Clone)]
pub(crate) struct Envelope {
    pub(crate) id: String,
    object: &'static str,
    created: u64,
    model: String,
    fingerprint: String,
    seed: Value,
    /// Whether a stream asked for usage: then every frame has the field, null but in the last.
    include_usage: bool,
}

impl Envelope {
    /// The envelope of a new reply; `prefix` starts its id.
    pub(crate) fn new(
        server: &Shared,
        prefix: &str,
        object: &'static str,
        seed: Value,
        include_usage: bool,
    ) -> Self {
        Self {
            id: format!("{prefix}{:016x}{:016x}", random_bits(), random_bits()),
            object,
            created: crate::state::unix_seconds(),
            model: server.model_name.clone(),
            fingerprint: server.engine.arithmetic_id().to_owned(),
            seed,
            include_usage,
        }
    }

    /// A frame of a stream.
    pub(crate) fn frame(&self, choices: Value) -> Value {
        let mut frame = self.base(choices);
        if self.include_usage {
            frame.insert("usage".into(), Value::Null);
        }
        Value::Object(frame)
    }

    /// The frame for a stream's usage, if it was asked for: its list of choices is there and empty.
    pub(crate) fn usage_frame(&self, end: &End) -> Option<Value> {
        self.include_usage.then(|| self.whole(json!([]), end))
    }

    /// A whole reply.
    pub(crate) fn whole(&self, choices: Value, end: &End) -> Value {
        let mut body = self.base(choices);
        body.insert("usage".into(), usage(end));
        Value::Object(body)
    }

    fn base(&self, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.clone().into());
        map.insert("object".into(), self.object.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.clone().into());
        map.insert("system_fingerprint".into(), self.fingerprint.clone().into());
        map.insert("seed".into(), self.seed.clone());
        map.insert("choices".into(), choices);
        map
    }
}

fn usage(end: &End) -> Value {
    json!({
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    })
}

/// Tokens as text for logprobs.
#[derive(Clone)]
pub(crate) struct TokenText(pub(crate) Arc<ChatFormat>);

impl TokenText {
    /// A token's text; bytes that are no UTF-8 on their own show as U+FFFD.
    pub(crate) fn text(&self, token: u32) -> String {
        String::from_utf8_lossy(&self.bytes(token)).into_owned()
    }

    /// A token's own bytes.
    pub(crate) fn bytes(&self, token: u32) -> Vec<u8> {
        self.0.token_bytes(token)
    }
}

/// A log-probability that JSON can hold: minus infinity has no number there, and OpenAI writes −9999.
pub(crate) fn finite(logprob: f32) -> f32 {
    const IMPOSSIBLE: f32 = -9999.0;
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}
