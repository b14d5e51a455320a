//! Checkpoints on disk, as the rest of Flint sees them.
//!
//! This crate owns everything between a folder and a list of host matrices: `config.json` ([`config`]), the
//! safetensors container ([`safetensors`]), the spellings of every layout (`names/`), how numbers are stored
//! (`encoding/`), what a load would cost ([`plan`]), and
//! streaming packs ([`pack`]). [`Checkpoint`] is the way in. It knows no device and computes no
//! network. The next reader of a weight is `flint-model`'s `load.rs`.

mod assemble;
mod checkpoint;
pub mod config;
mod drawn;
mod encoding;
mod error;
pub mod exl3;
mod latent;
mod map;
pub mod matrix;
mod names;
pub mod pack;
pub mod plan;
pub mod safetensors;
mod shards;
mod source;
mod storage;
pub mod stream;
mod table;
mod values;

pub use checkpoint::Checkpoint;
pub use config::ModelConfig;
pub use encoding::Encoding;
pub use error::Error;
pub use latent::LatentHeads;
pub use matrix::{Form, HostBytes, PlainType, QuantMatrix};
pub use plan::{LoadPlan, PlanRequest};
pub use source::Source;
pub use table::Group;

/// What every fallible function of this crate returns.
pub type Result<T> = std::result::Result<T, Error>;
