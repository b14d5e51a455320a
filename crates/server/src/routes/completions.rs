//! `POST /v1/completions`: the text after a text.
//!
//! The prompt is the client's alone, so special tokens written in it are special tokens. Nothing is put before it.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use flint_engine::Token;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, read_object, shown};
use crate::frames::{Envelope, Frames, TokenText, finite};
use crate::generation::Generation;
use crate::reply::{Channel, End, Whole};
use crate::routes::{Prepared, send, submit};
use crate::state::Shared;

const PROMPT_FIELD: &str = "prompt";

/// Alternatives that a client may ask for at each token.
const MOST_LOGPROBS: u64 = 20;

/// Continues a text.
pub(crate) async fn complete(
    State(server): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read_object(&headers, body, server.options.body_bytes).await?;
    let fields = Fields::new(&body, "");
    let generation = Generation::read(fields, &server.chat.defaults())?;
    if fields.boolean("echo")? == Some(true) {
        return Err(ApiError::unsupported("echo", "echo is not supported yet; leave it out"));
    }
    let logprobs = fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize);
    let prompt = tokens(&server, read_prompt(fields)?).await?;
    let (stream, usage) = (generation.stream, generation.include_usage);
    let envelope = Envelope::new(&server, "cmpl-", "text_completion", generation.seed.clone(), usage);
    let prepared = Prepared {
        id: envelope.id.clone(),
        generation,
        prompt,
        prompt_field: PROMPT_FIELD,
        logprobs,
        in_reasoning: false,
        split_reasoning: false,
    };
    let reply = submit(&server, prepared)?;
    let frames = TextFrames {
        envelope,
        tokens: TokenText(Arc::clone(&server.chat)),
        logprobs: logprobs.is_some(),
        offset: 0,
    };
    send(reply, stream, Box::new(frames.clone()), move |whole| frames.clone().whole(whole)).await
}

/// A prompt as the client wrote it.
#[derive(Debug, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// One text or one list of tokens, alone or as the only member of a list.
fn read_prompt(body: Fields) -> Result<Prompt, ApiError> {
    let wrong = |what: String| ApiError::invalid(PROMPT_FIELD, what);
    let Some(value) = body.value(PROMPT_FIELD) else { return Err(wrong("prompt is missing".into())) };
    let list = match value {
        Value::String(text) => return Ok(Prompt::Text(text.clone())),
        Value::Array(list) => list,
        other => {
            return Err(wrong(format!("prompt is {}; it must be a text or a list of tokens", shown(other))));
        }
    };
    match list.as_slice() {
        [] => Err(wrong("prompt is an empty list".into())),
        [Value::String(text)] => Ok(Prompt::Text(text.clone())),
        [Value::Array(tokens)] => read_tokens(tokens),
        [Value::String(_) | Value::Array(_), ..] => Err(ApiError::unsupported(
            PROMPT_FIELD,
            format!("prompt holds {} prompts; send one for each request", list.len()),
        )),
        tokens => read_tokens(tokens),
    }
}

fn read_tokens(list: &[Value]) -> Result<Prompt, ApiError> {
    let token = |value: &Value| {
        value.as_u64().and_then(|token| u32::try_from(token).ok()).ok_or_else(|| {
            ApiError::invalid(
                PROMPT_FIELD,
                format!("prompt holds {}, which is no token number", shown(value)),
            )
        })
    };
    Ok(Prompt::Tokens(list.iter().map(token).collect::<Result<_, _>>()?))
}

async fn tokens(server: &Arc<Shared>, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let text = match prompt {
        Prompt::Tokens(tokens) => return Ok(tokens),
        Prompt::Text(text) => text,
    };
    let chat = Arc::clone(&server.chat);
    match tokio::task::spawn_blocking(move || chat.encode_trusted(&text)).await {
        Ok(Ok(tokens)) => Ok(tokens),
        Ok(Err(error)) => Err(ApiError::invalid(PROMPT_FIELD, error.to_string())),
        Err(error) => Err(ApiError::engine(format!("tokenising the prompt failed: {error}"))),
    }
}

/// A completion as JSON.
#[derive(Clone)]
struct TextFrames {
    envelope: Envelope,
    tokens: TokenText,
    /// Whether logprobs were asked for.
    logprobs: bool,
    /// Characters of the tokens that were reported so far.
    offset: usize,
}

impl TextFrames {
    fn choice(&mut self, text: &str, tokens: &[Token], finish_reason: Option<&str>) -> Value {
        json!([{
            "text": text,
            "index": 0,
            "logprobs": if self.logprobs { self.logprobs(tokens) } else { Value::Null },
            "finish_reason": finish_reason,
        }])
    }

    fn whole(&mut self, whole: &Whole) -> Value {
        // Without a think block every text is content; reasoning stays empty.
        let text = format!("{}{}", whole.reasoning, whole.content);
        let choice = self.choice(&text, &whole.tokens, Some(whole.end.finish_reason));
        self.envelope.whole(choice, &whole.end)
    }

    /// The older form: parallel lists, alternatives keyed by their text.
    fn logprobs(&mut self, tokens: &[Token]) -> Value {
        let (mut texts, mut chosen, mut top, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for token in tokens {
            let Some(logprobs) = &token.logprobs else { continue };
            let text = self.name(token.id);
            offsets.push(self.offset);
            self.offset += self.tokens.text(token.id).chars().count();
            chosen.push(finite(logprobs.chosen));
            let best: Map<String, Value> =
                logprobs.top.iter().map(|(id, logprob)| (self.name(*id), finite(*logprob).into())).collect();
            top.push(best);
            texts.push(text);
        }
        json!({ "tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets })
    }

    /// A token's text as a key: bytes that are no text on their own are spelled, so that no two tokens share a name.
    fn name(&self, token: u32) -> String {
        use std::fmt::Write as _;
        let bytes = self.tokens.bytes(token);
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => error.as_bytes().iter().fold("bytes:".to_owned(), |mut name, byte| {
                // Writing to a String cannot fail.
                let _ = write!(name, "\\x{byte:02x}");
                name
            }),
        }
    }
}

impl Frames for TextFrames {
    fn open(&self) -> Option<Value> {
        None
    }

    fn text(&mut self, _channel: Channel, text: &str, tokens: &[Token]) -> Value {
        let choice = self.choice(text, tokens, None);
        self.envelope.frame(choice)
    }

    fn end(&mut self, end: &End) -> Vec<Value> {
        let choice = self.choice("", &[], Some(end.finish_reason));
        std::iter::once(self.envelope.frame(choice)).chain(self.envelope.usage_frame(end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(prompt: &Value) -> Result<Prompt, ApiError> {
        let body = json!({ "prompt": prompt });
        read_prompt(Fields::new(body.as_object().unwrap(), ""))
    }

    #[test]
    fn a_prompt_is_a_text_or_tokens_alone_or_in_a_list_of_one() {
        assert_eq!(read(&json!("a")), Ok(Prompt::Text("a".into())));
        assert_eq!(read(&json!(["a"])), Ok(Prompt::Text("a".into())));
        assert_eq!(read(&json!([1, 2])), Ok(Prompt::Tokens(vec![1, 2])));
        assert_eq!(read(&json!([[1, 2]])), Ok(Prompt::Tokens(vec![1, 2])));
    }

    #[test]
    fn other_prompts_are_refused() {
        for prompt in
            [json!(null), json!([]), json!(5), json!(["a", "b"]), json!([1, "a"]), json!([-1]), json!([1.5])]
        {
            assert!(read(&prompt).is_err(), "{prompt}");
        }
    }
}
