//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use flint_chat::ChatRequest;
use flint_engine::Token;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, read_object, shown};
use crate::frames::{Envelope, Frames, TokenText, finite};
use crate::generation::Generation;
use crate::reply::{Channel, End, Whole};
use crate::routes::{Prepared, send, submit};
use crate::state::Shared;

/// Where the prompt comes from.
pub(crate) const PROMPT_FIELD: &str = "messages";

/// Alternatives that a client may ask for at each token.
const MOST_LOGPROBS: u64 = 20;

/// Answers a conversation's last message.
pub(crate) async fn complete(
    State(server): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = read_object(&headers, body, server.options.body_bytes).await?;
    let fields = Fields::new(&body, "");
    let generation = Generation::read(fields, &server.chat.defaults())?;
    let logprobs = read_logprobs(fields)?;
    let request = read_conversation(fields)?;
    let (stream, usage) = (generation.stream, generation.include_usage);
    let object = if stream { "chat.completion.chunk" } else { "chat.completion" };
    let envelope = Envelope::new(&server, "chatcmpl-", object, generation.seed.clone(), usage);
    let prompt = render(&server, request).await?;
    let prepared = Prepared {
        id: envelope.id.clone(),
        generation,
        prompt: prompt.tokens,
        prompt_field: PROMPT_FIELD,
        logprobs,
        in_reasoning: prompt.in_reasoning,
        split_reasoning: true,
    };
    let reply = submit(&server, prepared)?;
    let frames =
        ChatFrames { envelope, tokens: TokenText(Arc::clone(&server.chat)), logprobs: logprobs.is_some() };
    send(reply, stream, Box::new(frames.clone()), move |whole| frames.whole(whole)).await
}

/// Renders and tokenises away from the sockets: a prompt of a megabyte takes a second.
async fn render(server: &Arc<Shared>, request: ChatRequest) -> Result<flint_chat::Prompt, ApiError> {
    let chat = Arc::clone(&server.chat);
    let rendered = tokio::task::spawn_blocking(move || chat.render(&request)).await;
    match rendered {
        Ok(Ok(prompt)) => Ok(prompt),
        Ok(Err(error)) => Err(refusal(&error)),
        Err(error) => Err(ApiError::engine(format!("rendering the messages failed: {error}"))),
    }
}

/// What the chat format says of the conversation, with the path of the field that is wrong.
fn refusal(error: &flint_chat::Error) -> ApiError {
    let message = error.to_string();
    match error {
        flint_chat::Error::Request { field, .. } => ApiError::invalid(field, message),
        flint_chat::Error::NoImages { field } => ApiError::unsupported(field, message),
        error if error.is_request() => ApiError::invalid(PROMPT_FIELD, message),
        _ => ApiError::engine(message),
    }
}

fn read_logprobs(body: Fields) -> Result<Option<usize>, ApiError> {
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
    match (wanted, top) {
        (false, Some(1..)) => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true beside it"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
    }
}

fn read_conversation(body: Fields) -> Result<ChatRequest, ApiError> {
    let messages = body
        .list(PROMPT_FIELD)?
        .filter(|list| !list.is_empty())
        .ok_or_else(|| ApiError::invalid(PROMPT_FIELD, "messages must hold at least one message"))?;
    refuse_media(messages)?;
    let tools = read_tools(body)?;
    let thinking = Thinking::read(body)?;
    Ok(ChatRequest {
        messages: messages.to_vec(),
        tools,
        add_generation_prompt: true,
        enable_thinking: thinking.enabled,
        reasoning_effort: thinking.effort,
        clear_thinking: thinking.clear,
        extra: thinking.extra,
    })
}

/// Pictures, sound and files: the text model cannot see them, and leaving them out would answer another question.
fn refuse_media(messages: &[Value]) -> Result<(), ApiError> {
    for (index, message) in messages.iter().enumerate() {
        let parts = message.get("content").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (place, part) in parts.iter().enumerate() {
            let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
            if !matches!(kind, "text" | "input_text" | "output_text" | "refusal") {
                let path = format!("messages[{index}].content[{place}].type");
                let message = format!("{path} is {kind:?}; this server reads text only");
                return Err(ApiError::unsupported(path, message));
            }
        }
    }
    Ok(())
}

/// The tools that the prompt shows. `tool_choice` "none" shows none: what the model does not see it cannot call.
fn read_tools(body: Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let tools = body.list("tools")?.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        let named = tool.get("function").and_then(|f| f.get("name")).is_some_and(Value::is_string);
        if !named || tool.get("type").and_then(Value::as_str).unwrap_or("function") != "function" {
            let path = format!("tools[{index}]");
            let message = format!("{path} must be {{\"type\": \"function\", \"function\": {{\"name\": …}}}}");
            return Err(ApiError::invalid(path, message));
        }
    }
    let shown_tools = match body.value("tool_choice") {
        None => tools,
        Some(Value::String(choice)) if choice == "auto" => tools,
        Some(Value::String(choice)) if choice == "none" => &[],
        Some(other) => {
            let message =
                format!("tool_choice {} is not supported yet; send \"auto\" or \"none\"", shown(other));
            return Err(ApiError::unsupported("tool_choice", message));
        }
    };
    if !shown_tools.is_empty() && body.boolean("parallel_tool_calls")? == Some(false) {
        let message = "parallel_tool_calls false is not supported yet: the model may write several calls";
        return Err(ApiError::unsupported("parallel_tool_calls", message));
    }
    Ok((!shown_tools.is_empty()).then(|| shown_tools.to_vec()))
}

/// What a request says about reasoning, from every place where clients say it.
#[derive(Debug, Default, PartialEq)]
struct Thinking {
    enabled: Option<bool>,
    effort: Option<String>,
    clear: Option<bool>,
    /// Other variables for the template.
    extra: Map<String, Value>,
}

impl Thinking {
    fn read(body: Fields) -> Result<Self, ApiError> {
        let mut thinking = Self::default();
        if let Some(effort) = body.text("reasoning_effort")? {
            thinking.read_effort(effort)?;
        }
        if let Some(object) = body.object("thinking")? {
            thinking.read_switch(Fields::new(object, "thinking."))?;
        }
        if let Some(object) = body.object("chat_template_kwargs")? {
            thinking.read_variables(object)?;
        }
        Ok(thinking)
    }

    /// OpenAI's levels on the model's three (Low, High, Max).
    fn read_effort(&mut self, effort: &str) -> Result<(), ApiError> {
        let level = match effort {
            "none" => {
                self.enabled = Some(false);
                return Ok(());
            }
            "minimal" | "low" => "low",
            "medium" | "high" => "high",
            "xhigh" | "max" => "max",
            other => {
                return Err(ApiError::invalid(
                    "reasoning_effort",
                    format!(
                        "reasoning_effort is {other:?}; it must be none, minimal, low, medium, high, xhigh or max"
                    ),
                ));
            }
        };
        self.effort = Some(level.into());
        Ok(())
    }

    /// `thinking: {"type": "enabled" | "disabled", "clear_thinking": …}`, as the model's own API writes it.
    fn read_switch(&mut self, fields: Fields) -> Result<(), ApiError> {
        self.enabled = match fields.text("type")? {
            None => self.enabled,
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            Some(other) => {
                let message = format!("thinking.type is {other:?}; it must be enabled or disabled");
                return Err(ApiError::invalid("thinking.type", message));
            }
        };
        self.clear = fields.boolean("clear_thinking")?.or(self.clear);
        if fields.value("budget_tokens").is_some() {
            let message = "thinking.budget_tokens is not supported yet; bound the reply with max_tokens";
            return Err(ApiError::unsupported("thinking.budget_tokens", message));
        }
        Ok(())
    }

    /// `chat_template_kwargs`: variables of the template, given by name. They win over the general fields.
    fn read_variables(&mut self, object: &Map<String, Value>) -> Result<(), ApiError> {
        const OURS: [&str; 3] = ["enable_thinking", "clear_thinking", "reasoning_effort"];
        const CONVERSATION: [&str; 3] = ["messages", "tools", "add_generation_prompt"];
        let fields = Fields::new(object, "chat_template_kwargs.");
        self.enabled = fields.boolean("enable_thinking")?.or(self.enabled);
        self.clear = fields.boolean("clear_thinking")?.or(self.clear);
        self.effort = fields.text("reasoning_effort")?.map(str::to_owned).or(self.effort.take());
        for (name, value) in object {
            if CONVERSATION.contains(&name.as_str()) {
                let path = fields.path(name);
                let message = format!("{path} would replace the request's own; leave it out");
                return Err(ApiError::unsupported(path, message));
            }
            if !OURS.contains(&name.as_str()) {
                self.extra.insert(name.clone(), value.clone());
            }
        }
        Ok(())
    }
}

/// A chat reply as JSON.
#[derive(Clone)]
struct ChatFrames {
    envelope: Envelope,
    tokens: TokenText,
    /// Whether logprobs were asked for.
    logprobs: bool,
}

impl ChatFrames {
    fn chunk(&self, delta: &Value, tokens: &[Token], finish_reason: Option<&str>) -> Value {
        self.envelope.frame(json!([{
            "index": 0,
            "delta": delta,
            "logprobs": if tokens.is_empty() { Value::Null } else { self.logprobs(tokens) },
            "finish_reason": finish_reason,
        }]))
    }

    fn whole(&self, whole: &Whole) -> Value {
        let mut message = json!({ "role": "assistant", "content": whole.content });
        if !whole.reasoning.is_empty() {
            message["reasoning_content"] = whole.reasoning.clone().into();
        }
        let choice = json!([{
            "index": 0,
            "message": message,
            "logprobs": if self.logprobs { self.logprobs(&whole.tokens) } else { Value::Null },
            "finish_reason": whole.end.finish_reason,
        }]);
        self.envelope.whole(choice, &whole.end)
    }

    fn logprobs(&self, tokens: &[Token]) -> Value {
        let content: Vec<Value> = tokens
            .iter()
            .filter_map(|token| {
                let logprobs = token.logprobs.as_ref()?;
                let mut entry = self.logprob(token.id, logprobs.chosen);
                let top = logprobs.top.iter().map(|(id, logprob)| self.logprob(*id, *logprob));
                entry["top_logprobs"] = top.collect();
                Some(entry)
            })
            .collect();
        json!({ "content": content, "refusal": null })
    }

    fn logprob(&self, token: u32, logprob: f32) -> Value {
        json!({
            "token": self.tokens.text(token),
            "logprob": finite(logprob),
            "bytes": self.tokens.bytes(token),
        })
    }
}

impl Frames for ChatFrames {
    fn open(&self) -> Option<Value> {
        Some(self.chunk(&json!({ "role": "assistant", "content": "" }), &[], None))
    }

    fn text(&mut self, channel: Channel, text: &str, tokens: &[Token]) -> Value {
        let name = match channel {
            Channel::Reasoning => "reasoning_content",
            Channel::Content => "content",
        };
        self.chunk(&json!({ name: text }), tokens, None)
    }

    fn end(&mut self, end: &End) -> Vec<Value> {
        let last = self.chunk(&json!({}), &[], Some(end.finish_reason));
        std::iter::once(last).chain(self.envelope.usage_frame(end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thinking(body: &Value) -> Result<Thinking, ApiError> {
        Thinking::read(Fields::new(body.as_object().unwrap(), ""))
    }

    #[test]
    fn effort_none_turns_thinking_off_and_other_levels_map_to_the_models_three() {
        assert_eq!(thinking(&json!({ "reasoning_effort": "none" })).unwrap().enabled, Some(false));
        for (sent, level) in [("minimal", "low"), ("medium", "high"), ("xhigh", "max")] {
            let read = thinking(&json!({ "reasoning_effort": sent })).unwrap();
            assert_eq!((read.enabled, read.effort.as_deref()), (None, Some(level)));
        }
        assert!(thinking(&json!({ "reasoning_effort": "lots" })).is_err());
    }

    #[test]
    fn template_variables_win_and_unknown_ones_reach_the_template() {
        let read = thinking(&json!({
            "reasoning_effort": "none",
            "thinking": { "type": "disabled", "clear_thinking": true },
            "chat_template_kwargs": { "enable_thinking": true, "mood": "calm" },
        }))
        .unwrap();
        assert_eq!((read.enabled, read.clear), (Some(true), Some(true)));
        assert_eq!(read.extra.get("mood"), Some(&json!("calm")));
    }

    #[test]
    fn template_variables_cannot_replace_the_conversation() {
        assert!(thinking(&json!({ "chat_template_kwargs": { "messages": [] } })).is_err());
    }

    #[test]
    fn a_picture_is_refused_by_its_path() {
        let messages = [json!({ "role": "user", "content": [{ "type": "text", "text": "a" },
            { "type": "image_url", "image_url": { "url": "data:" } }] })];
        let error = refuse_media(&messages).unwrap_err();
        assert_eq!(error.body()["error"]["param"], "messages[0].content[1].type");
    }

    #[test]
    fn a_tool_choice_that_needs_enforcing_is_refused() {
        let tool = json!({ "type": "function", "function": { "name": "f" } });
        let read = |choice: Value| {
            let body = json!({ "tools": [tool], "tool_choice": choice });
            read_tools(Fields::new(body.as_object().unwrap(), ""))
        };
        assert_eq!(read(json!("auto")).unwrap().unwrap().len(), 1);
        assert_eq!(read(json!("none")).unwrap(), None);
        assert!(read(json!("required")).is_err());
        assert!(read(json!({ "type": "function", "function": { "name": "f" } })).is_err());
    }
}
