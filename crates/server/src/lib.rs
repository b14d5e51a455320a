//! The HTTP interface: OpenAI's chat and text completions, over [`flint_engine::Handle`].
//!
//! ```text
//! body -> fields.rs (limits, types) -> generation.rs, routes/*.rs (refused by name) -> flint-chat (tokens)
//!   -> Handle::submit -> reply.rs (events to parts of text) -> frames.rs (JSON) -> sse.rs, or the fold of the parts
//! ```
//!
//! Every route and both ways of sending read the same [`reply`](crate) stream, so stop strings, usage and reasoning
//! behave alike everywhere. A client that leaves drops its reply, which ends its request within one forward.
//!
//! Deliberately absent: CORS (no page of another origin reads an answer), any fetch of a remote address, compression (it
//! would buffer streams), and knowledge of the model beyond the engine's handle.

mod error;
mod fields;
mod frames;
mod generation;
mod host;
mod random;
mod reply;
mod routes;
mod sse;
mod state;

use std::future::Future;
use std::io;
use std::sync::Arc;

use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::error::ApiError;
pub use crate::generation::default_sampling;
use crate::host::{HostCheck, check_host};
use crate::state::Shared;
pub use crate::state::{ServerOptions, ServerState};

/// Serves until `shutdown` completes, then lets running replies end, for [`ServerOptions::drain`] at most.
///
/// # Errors
/// When the listener has no address or accepting fails for good.
pub async fn serve(
    listener: TcpListener,
    state: ServerState,
    options: ServerOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let check = HostCheck::new(listener.local_addr()?);
    let router = router(Arc::new(Shared::new(state, options)), check);
    let (stopping, mut stopped) = watch::channel(false);
    let stop = async move {
        shutdown.await;
        tracing::info!(drain_seconds = options.drain.as_secs(), "shutting down: running replies may end");
        // The receiver is gone only when the server has ended already.
        let _ = stopping.send(true);
    };
    let drained = async move {
        // An error means that the sender is gone, so the server has ended.
        let asked = stopped.wait_for(|stop| *stop).await.is_ok();
        if asked { tokio::time::sleep(options.drain).await } else { std::future::pending().await }
    };
    tokio::select! {
        result = axum::serve(listener, router).with_graceful_shutdown(stop) => result,
        () = drained => {
            tracing::warn!("replies that were still running are cut off");
            Ok(())
        }
    }
}

fn router(shared: Arc<Shared>, check: HostCheck) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(routes::chat::complete))
        .route("/v1/completions", post(routes::completions::complete))
        .route("/v1/models", get(routes::models::list))
        .route("/v1/models/{*id}", get(routes::models::show))
        .route("/health", get(routes::health::health))
        .fallback(no_route)
        .method_not_allowed_fallback(wrong_method)
        .with_state(shared)
        .layer(from_fn_with_state(check, check_host))
}

async fn no_route(uri: Uri) -> ApiError {
    let message = format!(
        "there is nothing at {}; the routes are /v1/chat/completions, /v1/completions, /v1/models and /health",
        uri.path()
    );
    ApiError::request(StatusCode::NOT_FOUND, Some("not_found"), None, message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {method}", uri.path());
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, Some("method_not_allowed"), None, message)
}
