//! Checkpoints on disk, as the rest of Flint sees them.
//!
//! This crate owns everything between a folder and a list of host matrices: `config.json` ([`config`]), the
//! safetensors container ([`checkpoint`]), the spellings of every layout ([`names`]), how numbers are stored
//! ([`encoding`]), and what a load would cost ([`plan`]). It knows no device and computes no network.
//! The next reader of a weight is `flint-model`'s `load.rs`.

pub mod config;
mod error;
pub mod matrix;

pub use config::ModelConfig;
pub use error::Error;
pub use matrix::{Form, HostBytes, PlainType, QuantMatrix};

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;
