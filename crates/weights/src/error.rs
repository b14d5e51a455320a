//! What can be wrong with a checkpoint.

use std::path::PathBuf;

/// A checkpoint that cannot be used, with the thing, what was found, what was expected and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: std::io::Error,
    },
    /// A matrix's bytes do not have the size that its shape and form ask for.
    #[error("{name}: {what} holds {found} bytes, its shape asks for {expected}; the checkpoint is damaged, download it again")]
    WrongSize {
        /// Canonical module name.
        name: String,
        /// Which of the module's arrays.
        what: &'static str,
        /// Bytes that are there.
        found: usize,
        /// Bytes that the shape asks for.
        expected: usize,
    },
}
