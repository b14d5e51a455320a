//! Making a pack: bytes are copied, none is decoded.
//!
//! The work goes on in a folder of the pack's name with `.partial` behind it, which is renamed when all is done: a pack
//! that is there is whole. [`plan`] decides from headers where every byte goes; [`copy`] streams the source shard by
//! shard and leaves a receipt for each; [`check`] reads everything back and compares it with the source's sums;
//! [`finish`] writes the manifests and the rest. A run that was ended anywhere is taken up by the next one, and the result
//! is the same bytes.
//! Source: `reference/streaming-pack.md` section 9.

mod check;
mod copy;
mod finish;
mod folder;
mod plan;
mod receipt;

use std::path::{Path, PathBuf};

pub(super) use folder::{Partial, failed};
pub use plan::PackPlan;
pub(super) use plan::{ShardPlan, Target};
pub(super) use receipt::{HEADERS, Headers, Receipt, SOURCE_CONFIG, SOURCE_INDEX, receipt_name};

use super::origin::Origin;
use crate::Result;

/// How layers are numbered in manifests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numbering {
    /// 0, 1, 2, … in the bank's order: what other readers expect.
    #[default]
    Bank,
    /// The model's own numbers.
    Model,
}

impl Numbering {
    /// The number of the layer at `at` in the bank.
    pub(super) fn of(self, at: usize, layer: usize) -> usize {
        match self {
            Self::Bank => at,
            Self::Model => layer,
        }
    }
}

/// What a user may choose.
#[derive(Clone, Debug, Default)]
pub struct PackOptions {
    /// How the experts must be stored, by name (`exl3`, `affine`, `fp8`, `plain`): another form is refused.
    pub format: Option<String>,
    /// How layers are numbered in manifests.
    pub numbering: Numbering,
}

/// A step of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The source is copied.
    Copying,
    /// What was written is read back.
    Checking,
}

/// How far the work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The step.
    pub stage: Stage,
    /// Bytes done.
    pub done: u64,
    /// Bytes of the step.
    pub all: u64,
}

/// A pack that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Its folder.
    pub folder: PathBuf,
    /// Records of both banks.
    pub records: usize,
    /// Bytes of the banks.
    pub bank_bytes: u64,
    /// Bytes of the trunk's shards.
    pub trunk_bytes: u64,
    /// Shards that an earlier run had copied.
    pub resumed_shards: usize,
}

/// Makes the pack of a plan in `folder`, or goes on with one that was begun.
///
/// # Errors
/// A folder that exists already; an unfinished pack of another source; too little space, with numbers; a source that
/// fails or whose bytes have another SHA-256 than it says; what was written and reads back otherwise.
pub fn pack(
    plan: &PackPlan,
    origin: &dyn Origin,
    folder: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<Packed> {
    let partial = Partial::open(plan, folder)?;
    let resumed = copy::copy(plan, origin, &partial, progress)?;
    let checked = check::check(plan, &partial, progress)?;
    finish::finish(plan, origin, &partial, &checked)?;
    partial.complete(folder)?;
    Ok(Packed {
        folder: folder.to_owned(),
        records: plan.banks.iter().map(|bank| bank.table.records()).sum(),
        bank_bytes: plan.bank_bytes(),
        trunk_bytes: plan.trunk_bytes(),
        resumed_shards: resumed,
    })
}
