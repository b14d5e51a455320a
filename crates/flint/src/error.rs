//! What ends a command, in a sentence for the user.

use std::io;

/// What every command returns.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Why a command ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// An option whose value cannot be used.
    #[error("{option}: {value} cannot be used; {expected}")]
    Option {
        /// The option as the user writes it.
        option: String,
        /// Its value.
        value: String,
        /// What would do.
        expected: String,
    },
    /// The configuration file.
    #[error("{file}: {what}")]
    ConfigFile {
        /// Its path.
        file: String,
        /// What is wrong.
        what: String,
    },
    /// The device that the user names.
    #[error("--device {device}: {why}")]
    Device {
        /// As the user may write it.
        device: String,
        /// Why it cannot be used.
        why: String,
    },
    /// The plan does not fit into this machine's memory.
    #[error("{0}")]
    Memory(String),
    /// A file that the checkpoint needs for text.
    #[error("{place} has no {file}; download it from the checkpoint's repository")]
    MissingFile {
        /// The checkpoint.
        place: String,
        /// The file.
        file: &'static str,
    },
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Weights(#[from] flint_weights::Error),
    /// The device cannot be used.
    #[error(transparent)]
    Backend(#[from] flint_backend::Error),
    /// The model cannot be used.
    #[error(transparent)]
    Model(#[from] flint_model::Error),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] flint_engine::Error),
    /// Template or tokenizer.
    #[error(transparent)]
    Chat(#[from] flint_chat::Error),
    /// A file, a socket or the terminal.
    #[error("{what}: {source}")]
    Io {
        /// What was being done to what.
        what: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// The reader of standard output has gone: nothing is left to say, and nothing went wrong.
    #[error("standard output was closed")]
    OutputClosed,
    /// The line editor.
    #[error("the line editor failed: {0}")]
    Editor(#[from] rustyline::error::ReadlineError),
}

impl Error {
    /// Adds what was being done to a system error.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// A failed write to standard output.
    pub(crate) fn output(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::Io { what: "standard output".into(), source },
        }
    }
}
