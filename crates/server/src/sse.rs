//! Server-sent events: one `data:` line for each JSON frame, then `[DONE]`.
//!
//! An error inside a stream is a frame of its own, and `[DONE]` stays away: the reply is not complete.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;

use crate::frames::Frames;
use crate::reply::{Part, Reply};

/// Streams a reply. The client's leaving drops the body, and with it the reply.
pub(crate) fn respond(reply: Reply, frames: Box<dyn Frames>) -> Response {
    let ready = frames.open().iter().map(data).collect();
    let sender = Sender { reply, frames, ready };
    let body = stream::unfold(sender, |mut sender| async move {
        let bytes = sender.next().await?;
        Some((Ok::<_, Infallible>(bytes), sender))
    });
    let mut response = Body::from_stream(body).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // A buffering proxy would turn the stream into one late block.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct Sender {
    reply: Reply,
    frames: Box<dyn Frames>,
    ready: VecDeque<Bytes>,
}

impl Sender {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(bytes) = self.ready.pop_front() {
            return Some(bytes);
        }
        match self.reply.next().await? {
            Ok(Part::Text { channel, text, tokens }) => {
                Some(data(&self.frames.text(channel, &text, &tokens)))
            }
            Ok(Part::End(end)) => {
                self.ready.extend(self.frames.end(&end).iter().map(data));
                self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
                self.ready.pop_front()
            }
            Err(error) => Some(data(&error.body())),
        }
    }
}

/// One event. JSON text has no line breaks, so one line holds it.
fn data(frame: &Value) -> Bytes {
    Bytes::from(format!("data: {frame}\n\n"))
}
