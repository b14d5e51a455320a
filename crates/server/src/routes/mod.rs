//! One file for each route.

pub(crate) mod chat;
pub(crate) mod completions;
pub(crate) mod health;
pub(crate) mod models;

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use flint_chat::StreamOptions;
use flint_engine::{Error, Request};

use crate::error::ApiError;
use crate::frames::Frames;
use crate::generation::Generation;
use crate::reply::{Reply, Whole};
use crate::sse;
use crate::state::Shared;

/// A request that was read whole and turned into tokens.
pub(crate) struct Prepared {
    pub(crate) id: String,
    pub(crate) generation: Generation,
    pub(crate) prompt: Vec<u32>,
    /// Field that the prompt came from, for errors.
    pub(crate) prompt_field: &'static str,
    /// Alternatives to report for each token; `None` for no logprobs.
    pub(crate) logprobs: Option<usize>,
    /// Whether the prompt ended inside a think block.
    pub(crate) in_reasoning: bool,
    /// Whether a think block is told apart from the answer.
    pub(crate) split_reasoning: bool,
}

/// Puts a prepared request to the engine.
pub(crate) fn submit(server: &Arc<Shared>, prepared: Prepared) -> Result<Reply, ApiError> {
    let Prepared { id, generation, prompt, prompt_field, logprobs, in_reasoning, split_reasoning } = prepared;
    let prompt_tokens = prompt.len();
    let bound_field = generation.max_tokens.map(|(field, _)| field);
    let request = Request {
        prompt,
        max_tokens: generation.max_tokens.map(|(_, tokens)| tokens),
        stop_tokens: server.chat.stop_tokens().to_vec(),
        sampling: generation.sampling,
        logprobs,
    };
    let events = server.engine.submit(request).map_err(|error| refusal(&error, prompt_field, bound_field))?;
    let text = server.chat.stream(StreamOptions { in_reasoning, stop: generation.stop, split_reasoning });
    Ok(Reply::new(id, prompt_tokens, events, text))
}

/// Sends a reply as a stream, or whole as `whole` writes it.
pub(crate) async fn send(
    reply: Reply,
    stream: bool,
    frames: Box<dyn Frames>,
    whole: impl FnOnce(&Whole) -> serde_json::Value,
) -> Result<Response, ApiError> {
    if stream {
        return Ok(sse::respond(reply, frames));
    }
    let collected = Whole::collect(reply).await?;
    Ok(axum::Json(whole(&collected)).into_response())
}

/// The engine's refusal of a request, by the client's own field names.
fn refusal(error: &Error, prompt_field: &str, bound_field: Option<&str>) -> ApiError {
    let message = error.to_string();
    match error {
        Error::Invalid { field, .. } => {
            let name = field.rsplit('.').next().unwrap_or(field);
            let param = match name {
                "prompt" => prompt_field,
                "max_tokens" => bound_field.unwrap_or(name),
                "logprobs" if prompt_field == chat::PROMPT_FIELD => "top_logprobs",
                other => other,
            };
            ApiError::invalid(param, message)
        }
        Error::ContextLength { prompt, limit, .. } => {
            let param = if prompt < limit { bound_field.unwrap_or(prompt_field) } else { prompt_field };
            ApiError::context_length(param, message)
        }
        Error::Busy { .. } | Error::Stopped => ApiError::overloaded(message),
        _ => ApiError::engine(message),
    }
}
