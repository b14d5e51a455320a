//! `GET /health`: whether the engine makes progress, not only whether the socket answers.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use flint_engine::Status;
use serde_json::{Value, json};

use crate::state::Shared;

/// 200 while the engine can serve, 503 when it has ended or stands still with work to do.
pub(crate) async fn health(State(server): State<Arc<Shared>>) -> (StatusCode, Json<Value>) {
    let status = server.engine.status();
    let word = verdict(&status, server.options.stall);
    let code = if word == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "status": word,
        "reason": status.ended.as_ref().map(ToString::to_string),
        "model": server.model_name,
        "running": status.running,
        "waiting": status.waiting,
        "rounds": status.rounds,
        "finished": status.finished,
        "failed": status.failed,
        "cancelled": status.cancelled,
        "seconds_since_progress": status.last_progress.elapsed().as_secs_f64(),
    });
    (code, Json(body))
}

fn verdict(status: &Status, stall: Duration) -> &'static str {
    let busy = status.running + status.waiting > 0;
    if status.ended.is_some() {
        "ended"
    } else if busy && status.last_progress.elapsed() > stall {
        "stalled"
    } else {
        "ok"
    }
}
