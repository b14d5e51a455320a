//! Text, tokens and messages: what stands between an API and a model that knows only token ids.
//!
//! [`ChatFormat`] opens a checkpoint's own tokenizer and chat template; [`ChatFormat::render`] turns a conversation
//! into the tokens of a prompt, [`ChatFormat::stream`] a reply's tokens into text. Two promises: other people's text
//! never becomes a control token, and a reply's text does not depend on where its tokens were cut.
//!
//! The way through: `format.rs` (the door), `message.rs` (checks a request), `template.rs` (runs the template),
//! `ink.rs` (tells the template's characters from foreign ones), `tokenizer.rs` (text to ids), `stream.rs` (ids to
//! text), `files.rs` (stop tokens and sampling defaults). It knows no model, no engine and no HTTP.

mod error;
mod files;
mod format;
mod ink;
mod json;
mod message;
mod python;
mod reasoning;
mod stream;
mod template;
mod tokenizer;

pub use error::{Error, Result};
pub use files::{ChatFiles, GenerationDefaults};
pub use format::{Capabilities, ChatFormat, Prompt};
pub use message::ChatRequest;
pub use stream::{Piece, StreamOptions, TextStream};
