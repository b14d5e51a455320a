//! The crate through its door, on the embedded model's files.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod files;
mod goldens;
mod injection;
mod release;
mod stream;

use std::path::Path;
use std::sync::LazyLock;

use flint_chat::{ChatFiles, ChatFormat, ChatRequest, Result};
use proptest::test_runner::Config as ProptestConfig;
use serde_json::Value;

/// How many cases a property is tried on. Failing cases are printed, not written beside the source.
pub(crate) fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Reads a file of this crate's fixtures.
pub(crate) fn fixture(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

/// The embedded model's files.
pub(crate) struct Files {
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) template: String,
    pub(crate) tokenizer_config: Vec<u8>,
    pub(crate) generation: Vec<u8>,
    pub(crate) config: Vec<u8>,
}

impl Files {
    pub(crate) fn read() -> Self {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny");
        let read = |name: &str| std::fs::read(model.join(name)).unwrap();
        Self {
            tokenizer: read("tokenizer.json"),
            template: String::from_utf8(read("chat_template.jinja")).unwrap(),
            tokenizer_config: read("tokenizer_config.json"),
            generation: read("generation_config.json"),
            config: read("config.json"),
        }
    }

    pub(crate) fn all(&self) -> ChatFiles<'_> {
        ChatFiles {
            tokenizer_json: &self.tokenizer,
            chat_template: Some(&self.template),
            tokenizer_config: Some(&self.tokenizer_config),
            generation_config: Some(&self.generation),
            config: Some(&self.config),
        }
    }

    /// The embedded model.
    pub(crate) fn open(&self) -> ChatFormat {
        ChatFormat::open(&self.all()).unwrap()
    }

    /// The embedded model's tokenizer with another template.
    pub(crate) fn with_template(&self, template: &str) -> Result<ChatFormat> {
        ChatFormat::open(&ChatFiles { chat_template: Some(template), ..self.all() })
    }
}

/// The embedded model.
pub(crate) fn tiny() -> &'static ChatFormat {
    static TINY: LazyLock<ChatFormat> = LazyLock::new(|| Files::read().open());
    &TINY
}

/// A golden's request.
pub(crate) fn request(case: &Value) -> ChatRequest {
    let options = &case["options"];
    ChatRequest {
        tools: case["tools"].as_array().cloned(),
        add_generation_prompt: options["add_generation_prompt"].as_bool().unwrap_or(false),
        enable_thinking: options["enable_thinking"].as_bool(),
        reasoning_effort: options["reasoning_effort"].as_str().map(str::to_owned),
        clear_thinking: options["clear_thinking"].as_bool(),
        ..ChatRequest::new(case["messages"].as_array().unwrap().clone())
    }
}
