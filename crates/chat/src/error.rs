//! Why text could not become tokens, or a checkpoint's text files could not be used.

/// What every fallible call of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a file, a template or a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the checkpoint that cannot be used.
    #[error("{file}: {problem}; {remedy}")]
    File {
        /// The file's name.
        file: &'static str,
        /// What was found, and what was expected.
        problem: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The checkpoint has no chat template, so messages cannot be rendered.
    #[error(
        "the checkpoint has no chat template (neither chat_template.jinja nor `chat_template` in \
         tokenizer_config.json); send a prompt to the completions route, or add the template of the model's release"
    )]
    NoTemplate,
    /// The chat template cannot be compiled, or fails on the simplest conversation.
    #[error(
        "chat template {name}{}: {problem}; take the template of the model's release", place(*.line)
    )]
    Template {
        /// Which template.
        name: String,
        /// Line of the template, where known.
        line: Option<usize>,
        /// What the engine said.
        problem: String,
    },
    /// The chat template refused this conversation.
    #[error("the chat template refused the conversation{}: {problem}", place(*.line))]
    Render {
        /// Line of the template, where known.
        line: Option<usize>,
        /// What the template or the engine said.
        problem: String,
    },
    /// A field of a request that has another shape than the API defines.
    #[error("{field}: {found}, expected {expected}")]
    Request {
        /// The field's path, `messages[2].content[0].type` for example.
        field: String,
        /// What was found.
        found: String,
        /// What was expected, and the remedy where it is not the same.
        expected: String,
    },
    /// A picture or video for a model whose template has no place for one.
    #[error(
        "{field}: the chat template of this checkpoint has no place for images or videos; send text only"
    )]
    NoImages {
        /// The part's path.
        field: String,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(String),
}

impl Error {
    /// Whether the sender of the request can repair it (as opposed to the owner of the checkpoint).
    pub fn is_request(&self) -> bool {
        match self {
            Self::Render { .. } | Self::Request { .. } | Self::NoImages { .. } | Self::NoTemplate => true,
            Self::File { .. } | Self::Template { .. } | Self::Tokenizer(_) => false,
        }
    }

    /// A request's field that is not what it should be.
    pub(crate) fn request(
        field: impl Into<String>,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Request { field: field.into(), found: found.into(), expected: expected.into() }
    }
}

/// `, line N`, or nothing.
fn place(line: Option<usize>) -> String {
    line.map(|line| format!(", line {line}")).unwrap_or_default()
}
