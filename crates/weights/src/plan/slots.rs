//! How many routed experts of a layer are in memory when not all of them fit.

use serde::Serialize;

use super::PlanRequest;
use crate::Result;
use crate::checkpoint::Checkpoint;
use crate::stream::STAGING;

/// Which routed experts are to be in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertsWanted {
    /// All where they fit, else as many of each layer as do.
    #[default]
    Auto,
    /// All.
    All,
    /// So many of each layer at most.
    Slots(usize),
}

/// Experts that are in memory in part; the others are read from the files when a row needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SlotsPlan {
    /// Experts of each layer that are in memory.
    pub slots: usize,
    /// Experts of each layer.
    pub experts: usize,
    /// Bytes of one slot in every layer.
    pub slot_bytes: u64,
    /// Bytes of the experts that are on their way.
    pub staging_bytes: u64,
}

impl SlotsPlan {
    /// Bytes of all slots and of the experts on their way.
    pub fn bytes(&self) -> u64 {
        self.slots as u64 * self.slot_bytes + self.staging_bytes
    }

    /// The slots that were asked for, or that fit beside `others` bytes; `None` when all experts are to be in memory, or
    /// not even one of each layer fits.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        request: &PlanRequest,
        others: u64,
        resident: u64,
    ) -> Option<Self> {
        let experts = checkpoint.config().experts;
        let (slot_bytes, staging_bytes) = checkpoint.slot_bytes().ok()?;
        let slots = match request.experts {
            ExpertsWanted::All => return None,
            ExpertsWanted::Slots(slots) => slots,
            ExpertsWanted::Auto => {
                let machine = request.machine_bytes.filter(|machine| others + resident > *machine)?;
                if !checkpoint.streams() {
                    return None;
                }
                let room = machine.checked_sub(others + staging_bytes)?;
                (room / slot_bytes.max(1)) as usize
            }
        };
        ((1..experts).contains(&slots)).then_some(Self { slots, experts, slot_bytes, staging_bytes })
    }
}

impl Checkpoint {
    /// Bytes of one expert of every layer as they are read, and of those on their way.
    fn slot_bytes(&self) -> Result<(u64, u64)> {
        let layers = self.slab_bytes()?;
        let largest = layers.iter().copied().max().unwrap_or(0);
        Ok((layers.iter().map(|bytes| *bytes as u64).sum(), (largest * STAGING) as u64))
    }
}
