//! `GET /v1/models` and `GET /v1/models/{id}`: the one model that is loaded.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::{Shared, seconds_of};

/// The list of models.
pub(crate) async fn list(State(server): State<Arc<Shared>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&server)] }))
}

/// One model by its name.
pub(crate) async fn show(
    State(server): State<Arc<Shared>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id == server.model_name {
        return Ok(Json(model(&server)));
    }
    let message = format!("the model {id:?} is not here; {:?} is", server.model_name);
    Err(ApiError::request(StatusCode::NOT_FOUND, Some("model_not_found"), Some("model".into()), message))
}

fn model(server: &Shared) -> Value {
    json!({
        "id": server.model_name,
        "object": "model",
        "created": seconds_of(server.started),
        "owned_by": "flint",
        "max_model_len": server.engine.limits().context,
    })
}
