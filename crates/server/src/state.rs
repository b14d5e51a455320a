//! What all routes share.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use flint_chat::ChatFormat;
use flint_engine::Handle;

/// What the server speaks for.
#[derive(Clone)]
pub struct ServerState {
    /// The door to the engine.
    pub engine: Handle,
    /// The checkpoint's tokenizer and template.
    pub chat: Arc<ChatFormat>,
    /// The name that clients see.
    pub model_name: String,
    /// When the model was loaded.
    pub started: SystemTime,
}

/// Bounds of the server.
#[derive(Clone, Copy, Debug)]
pub struct ServerOptions {
    /// Longest request body. A token of text is about four bytes, so the default holds prompts of millions of tokens.
    pub body_bytes: usize,
    /// How long running replies may go on after a shutdown was asked for.
    pub drain: Duration,
    /// How long the engine may stand still with work to do before `/health` says so. One forward of a large prompt
    /// part on a slow machine takes tens of seconds.
    pub stall: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { body_bytes: 32 << 20, drain: Duration::from_secs(30), stall: Duration::from_mins(5) }
    }
}

/// State and bounds, as the routes hold them.
pub(crate) struct Shared {
    pub(crate) engine: Handle,
    pub(crate) chat: Arc<ChatFormat>,
    pub(crate) model_name: String,
    pub(crate) started: SystemTime,
    pub(crate) options: ServerOptions,
}

impl Shared {
    pub(crate) fn new(state: ServerState, options: ServerOptions) -> Self {
        let ServerState { engine, chat, model_name, started } = state;
        Self { engine, chat, model_name, started, options }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    seconds_of(SystemTime::now())
}

/// A time as seconds since 1970; 0 before that.
pub(crate) fn seconds_of(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}
