//! Errors as a client sees them: OpenAI's JSON form, with the parameter's path and a code.
//!
//! Bodies are made by the JSON library, never by hand: a message may quote any text a client sent.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// An answer that is not a result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// OpenAI's `type`.
    kind: &'static str,
    code: Option<&'static str>,
    /// Path of the field that is wrong, as `messages[2].role`.
    param: Option<String>,
    message: String,
}

impl ApiError {
    /// A field whose value cannot be used.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, Some("invalid_value"), Some(param.into()), message.into())
    }

    /// A field that Flint knows and cannot honour.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::request(
            StatusCode::BAD_REQUEST,
            Some("unsupported_parameter"),
            Some(param.into()),
            message.into(),
        )
    }

    /// A prompt or a bound that the context cannot hold.
    pub(crate) fn context_length(param: impl Into<String>, message: impl Into<String>) -> Self {
        let code = Some("context_length_exceeded");
        Self::request(StatusCode::BAD_REQUEST, code, Some(param.into()), message.into())
    }

    /// Any other fault of the request, with its own status.
    pub(crate) fn request(
        status: StatusCode,
        code: Option<&'static str>,
        param: Option<String>,
        message: String,
    ) -> Self {
        Self { status, kind: "invalid_request_error", code, param, message }
    }

    /// The server has too much to do.
    pub(crate) fn overloaded(message: impl Into<String>) -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { status, kind: "server_error", code: Some("overloaded"), param: None, message: message.into() }
    }

    /// The engine failed.
    pub(crate) fn engine(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self {
            status,
            kind: "server_error",
            code: Some("engine_failed"),
            param: None,
            message: message.into(),
        }
    }

    /// The body of the answer.
    pub(crate) fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}
