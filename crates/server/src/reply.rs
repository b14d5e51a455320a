//! One reply on its way out: the engine's events become parts of text.
//!
//! Every route and both ways of sending read the same [`Reply`]; a whole reply is the fold of its parts
//! ([`Whole::collect`]). Dropping a reply cancels its request within one forward.

use std::collections::VecDeque;
use std::time::Instant;

use flint_chat::{Piece, TextStream};
use flint_engine::{Event, Events, FinishReason, Token};

use crate::error::ApiError;

/// A reply that is being generated.
pub(crate) struct Reply {
    id: String,
    /// `None` once the reply has ended; dropping it is what cancels the request.
    events: Option<Events>,
    text: TextStream,
    ready: VecDeque<Part>,
    /// Tokens with logprobs whose text is still held back: they travel with the next part.
    unsent: Vec<Token>,
    prompt_tokens: usize,
    completion_tokens: usize,
    started: Instant,
    ended: bool,
}

/// What a reply consists of.
#[derive(Debug)]
pub(crate) enum Part {
    /// Text, and the tokens with logprobs that came since the part before. Either may be empty.
    Text { channel: Channel, text: String, tokens: Vec<Token> },
    /// The end. Nothing follows.
    End(End),
}

/// Which text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    /// Inside the think block.
    Reasoning,
    /// The answer.
    Content,
}

/// How a reply ended and what it used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// OpenAI's `finish_reason`.
    pub(crate) finish_reason: &'static str,
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
}

impl Reply {
    /// The reply named `id` whose events come from `events` and whose text is cut and split by `text`.
    pub(crate) fn new(id: String, prompt_tokens: usize, events: Events, text: TextStream) -> Self {
        tracing::info!(id, prompt_tokens, "request accepted");
        Self {
            id,
            events: Some(events),
            text,
            ready: VecDeque::new(),
            unsent: Vec::new(),
            prompt_tokens,
            completion_tokens: 0,
            started: Instant::now(),
            ended: false,
        }
    }

    /// The next part; `None` after the end or an error.
    pub(crate) async fn next(&mut self) -> Option<Result<Part, ApiError>> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(Ok(part));
            }
            let event = self.events.as_mut()?.recv_async().await;
            match event {
                Some(Event::Started { prompt_tokens }) => self.prompt_tokens = prompt_tokens,
                Some(Event::Token(token)) => self.push(token),
                Some(Event::Finished { reason, usage }) => {
                    self.completion_tokens = usage.completion_tokens;
                    self.finish(match reason {
                        FinishReason::StopToken(_) => "stop",
                        FinishReason::Length => "length",
                    });
                }
                Some(Event::Failed(error)) => return Some(Err(self.fail(error.to_string()))),
                None => return Some(Err(self.fail("the engine stopped before the reply ended".into()))),
            }
        }
    }

    fn push(&mut self, token: Token) {
        self.completion_tokens += 1;
        let pieces = self.text.push(token.id);
        if token.logprobs.is_some() {
            self.unsent.push(token);
        }
        self.enqueue(pieces);
        if self.text.stopped().is_some() {
            self.finish("stop");
        }
    }

    fn finish(&mut self, finish_reason: &'static str) {
        self.events = None;
        let pieces = self.text.finish();
        self.enqueue(pieces);
        if !self.unsent.is_empty() {
            let tokens = std::mem::take(&mut self.unsent);
            self.ready.push_back(Part::Text { channel: Channel::Content, text: String::new(), tokens });
        }
        let (prompt_tokens, completion_tokens) = (self.prompt_tokens, self.completion_tokens);
        self.ready.push_back(Part::End(End { finish_reason, prompt_tokens, completion_tokens }));
        self.ended = true;
        let seconds = self.started.elapsed().as_secs_f64();
        tracing::info!(
            id = self.id,
            prompt_tokens,
            completion_tokens,
            finish_reason,
            seconds,
            "request finished"
        );
    }

    fn fail(&mut self, reason: String) -> ApiError {
        self.events = None;
        self.ended = true;
        tracing::error!(id = self.id, reason, "request failed");
        ApiError::engine(reason)
    }

    fn enqueue(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            let (channel, text) = match piece {
                Piece::Reasoning(text) => (Channel::Reasoning, text),
                Piece::Content(text) => (Channel::Content, text),
            };
            self.ready.push_back(Part::Text { channel, text, tokens: std::mem::take(&mut self.unsent) });
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.ended {
            let (id, completion_tokens) = (&self.id, self.completion_tokens);
            tracing::info!(id, completion_tokens, "request cancelled by its client");
        }
    }
}

/// A reply that has ended, in one piece.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) tokens: Vec<Token>,
    pub(crate) end: End,
}

impl Whole {
    /// Folds a reply's parts.
    pub(crate) async fn collect(mut reply: Reply) -> Result<Self, ApiError> {
        let (mut reasoning, mut content, mut all_tokens) = (String::new(), String::new(), Vec::new());
        while let Some(part) = reply.next().await {
            match part? {
                Part::Text { channel, text, tokens } => {
                    match channel {
                        Channel::Reasoning => reasoning.push_str(&text),
                        Channel::Content => content.push_str(&text),
                    }
                    all_tokens.extend(tokens);
                }
                Part::End(end) => return Ok(Self { reasoning, content, tokens: all_tokens, end }),
            }
        }
        Err(ApiError::engine("the reply ended without an end"))
    }
}
