//! Streaming packs: a checkpoint whose routed experts stand in one file of equal records beside the other tensors.
//!
//! [`Pack::open`] reads and checks a pack's manifests, [`ExpertSource`] says where the bytes of each expert are, whether
//! in a pack or in a plain checkpoint, [`PackPlan`] and [`pack`] make a pack, [`verify()`] reads one against its sums,
//! [`unpack`] is the reverse. [`profile`] and [`fit`] are files beside a pack that change speed and never a result.
//! Nothing here decodes a number.
//! Source: `reference/streaming-pack.md`.

mod bank;
pub mod fit;
mod form;
mod inspect;
mod manifest;
mod manifest_v1;
mod origin;
pub mod profile;
mod refusal;
mod shards;
mod source;
mod stored;
mod strict;
mod sums;
mod unpack;
mod verify;
mod write;

pub use bank::{Bank, Pack};
pub use form::{Codebook, Component, Dims, MatrixForm, Mode, Part, Projection, RecordForm, Segment};
pub use inspect::{BankSummary, LayerSummary, Summary, inspect};
pub use origin::{Folder, Origin, OriginFile};
pub use refusal::Refusal;
pub use source::{ExpertFile, ExpertLayer, ExpertRecord, ExpertSource, FilePlace, Placed, Read};
pub use unpack::unpack;
pub use verify::{Finding, Scope, Verified, verify};
pub use write::{Numbering, PackOptions, PackPlan, Packed, Progress, Stage, pack};

pub(crate) use shards::{is_pack, shards};
pub(crate) use strict::hex;

/// The routed experts of the trunk.
pub const EXPERTS: &str = "experts.bin";
/// The routed experts of the MTP layers.
pub const MTP_EXPERTS: &str = "mtp-experts.bin";
/// The record table of [`EXPERTS`].
pub const MANIFEST: &str = "expert-manifest-v2.json";
/// The same in its older form.
pub const MANIFEST_V1: &str = "expert-manifest.json";
/// The record table of [`MTP_EXPERTS`].
pub const MTP_MANIFEST: &str = "mtp-expert-manifest-v2.json";
/// The same in its older form.
pub const MTP_MANIFEST_V1: &str = "mtp-expert-manifest.json";
/// Sums of every file.
pub const SUMS: &str = "manifest.sha256";
/// The block of `config.json` that marks a pack.
pub const BLOCK: &str = "expert_streaming";

/// What a pack must be made of again to be right.
const REPACK: &str = "download this file again, or make the pack anew with flint pack";
