//! GLM-5.3-Flash over any backend.
//!
//! [`language`] is the door that the engine uses: append rows, commit, read logits. Behind it (`glm.rs`, `kda.rs`,
//! `dsa.rs`, `moe.rs`, …) the network is written once, as operations of `flint-backend`.

pub mod language;

pub use language::{Batch, Error, LanguageModel, Limits, Logits, Result, SequenceId, Span, Want};
