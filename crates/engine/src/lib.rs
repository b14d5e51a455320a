//! The loop: requests in, tokens out.
//!
//! One thread owns the model. [`Handle::submit`] is the only door: it checks a request and returns its [`Events`]. Each
//! round of the loop is one forward:
//!
//! ```text
//! scheduler::plan (pure) -> Drafter::propose -> Batch of spans -> LanguageModel::forward
//!   -> per request: draw a token per wanted row, keep drafts while drawn == draft -> commit(k) -> Event
//! ```
//!
//! A token is a function of its logit row, the request's own history and rules, its seed and its absolute position. So a
//! reply does not depend on its neighbours, on the row budget, on how the prompt was cut, or on what a drafter proposed.
//!
//! Deliberately absent: text (crate `flint-chat`), HTTP (crate `flint-server`), any backend type, a running random
//! generator, and a clock in the scheduler. Read on from `engine.rs`, which owns the thread, to
//! `rounds.rs`, which owns one round, to `walk.rs`, `sampler.rs` and `scheduler.rs`, which decide.

mod drafter;
mod engine;
mod error;
mod events;
mod history;
mod math;
mod noise;
mod request;
mod rounds;
mod sampler;
mod sampling;
pub mod scheduler;
mod status;
pub mod testing;
mod walk;

#[cfg(test)]
mod contracts;

pub use drafter::Drafter;
pub use engine::{Engine, EngineOptions, Handle};
pub use error::Error;
pub use events::{Elapsed, Events};
pub use request::{Event, FinishReason, Request, Token, TokenLogprobs, Usage};
pub use sampling::Sampling;
pub use status::Status;
