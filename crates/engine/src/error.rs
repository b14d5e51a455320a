//! Why a request was refused or ended early.

use std::sync::Arc;

/// Why the engine refused a request, or ended one before its reply was complete.
///
/// [`Invalid`](Error::Invalid), [`ContextLength`](Error::ContextLength) and [`Busy`](Error::Busy) come from
/// [`submit`](crate::Handle::submit) only: nothing that a client can send ends a reply in its middle.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of the request has a value that the engine cannot honour.
    #[error("{field}: {value} cannot be used, {expected}")]
    Invalid {
        /// The request's field.
        field: &'static str,
        /// What the request says.
        value: String,
        /// What is possible.
        expected: String,
    },
    /// Prompt and reply do not fit in one sequence.
    #[error("{}", context_length(*prompt, *max_tokens, *limit))]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the request asks for, if it says.
        max_tokens: Option<usize>,
        /// Longest sequence, prompt and reply together.
        limit: usize,
    },
    /// As many requests are running and waiting as the engine takes.
    #[error(
        "{in_flight} requests are running or waiting and {limit} is the limit; send the request again later, or start with a longer queue"
    )]
    Busy {
        /// Requests that run or wait.
        in_flight: usize,
        /// How many may.
        limit: usize,
    },
    /// The model failed in a forward that this request was part of.
    #[error("the model failed: {0}")]
    Model(#[source] Arc<flint_model::Error>),
    /// The model computed logits that no token can be drawn from.
    #[error("no token can be drawn at position {position}: {found}; the request ends here, others go on")]
    Logits {
        /// Absolute position of the token that was to be drawn, prompt included.
        position: usize,
        /// What the row holds.
        found: &'static str,
    },
    /// The model broke its contract with the engine.
    #[error(
        "the model returned {found}, {expected} was expected; this is a defect of the model or its backend"
    )]
    Broken {
        /// What it returned.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// The engine was shut down.
    #[error("the engine is shut down")]
    Stopped,
    /// The engine's thread panicked, or could not be started: the process must be started again.
    #[error("the engine is dead: {reason}; start the program again")]
    Dead {
        /// What happened.
        reason: String,
    },
}

impl From<flint_model::Error> for Error {
    fn from(error: flint_model::Error) -> Self {
        Self::Model(Arc::new(error))
    }
}

fn context_length(prompt: usize, max_tokens: Option<usize>, limit: usize) -> String {
    match max_tokens {
        Some(max_tokens) => format!(
            "a prompt of {prompt} tokens and max_tokens {max_tokens} make {}, the context has {limit}; shorten the prompt, \
             lower max_tokens, or start with a larger context",
            prompt.saturating_add(max_tokens)
        ),
        None => format!(
            "a prompt of {prompt} tokens leaves no room for a reply in a context of {limit}; shorten the prompt, or start \
             with a larger context"
        ),
    }
}
