//! GLM-5.3-Flash over any backend.
//!
//! [`language`] is the door that the engine uses: append rows, commit, read logits. Behind it the network is written
//! once, as operations of `flint-backend`: `glm.rs` runs a forward, `hyper.rs`, `kda.rs`, `dsa.rs` and `feed.rs` are
//! its blocks, `bank.rs` gives experts their slots, `sequence.rs` holds what a sequence is between forwards,
//! `saved.rs` its bytes, `load.rs` brings weights from a checkpoint to the device.
//! Formulas: `reference/glm5_next.md`. No arithmetic happens here.

pub mod bank;
mod dsa;
mod feed;
mod glm;
mod head;
mod hyper;
mod kda;
pub mod language;
mod load;
pub mod probe;
#[cfg(test)]
mod release_layers;
mod saved;
mod scratch;
mod sequence;

pub use glm::{Glm, GlmOptions};
pub use language::{Batch, Best, Error, LanguageModel, Limits, Logits, Result, SequenceId, Span, Want};
