//! Where a layer's experts are: all on the device, or some of them in slots while the others wait in the files.
//!
//! Kernels read experts through a slot table, so a bank that holds only some of them needs no other kernel. `stream.rs`
//! brings experts into slots and runs a product in waves, `slabs.rs` is their memory, `replace.rs` chooses which expert leaves, `report.rs` counts.
//! Whatever a bank holds changes speed, never bits: each pair's product is one expert's with one row, and `combine` adds
//! stored pairs in one order.

pub mod replace;
pub mod report;
mod slabs;
mod stream;

use flint_backend::{Backend, Element};
use flint_weights::stream::{ExpertStream, STAGING};

use crate::Result;
pub(crate) use stream::Bank;

/// Where the routed experts of a model are.
pub enum Experts {
    /// All on the device.
    Resident,
    /// Some in slots, the others in the files.
    Streamed(Box<ExpertStream>, BankOptions),
}

/// The size of a bank and how it is kept.
#[derive(Clone, Debug)]
pub struct BankOptions {
    /// Experts of each layer that are on the device at once; at least 1, more than there are is all of them.
    pub slots: usize,
    /// Experts that are on their way at once, each with memory of its own; at least 1.
    pub staging: usize,
    /// Which expert leaves.
    pub replacement: replace::Replacement,
    /// How often experts were used before, by layer of the model: those used most are read at load. Empty for none.
    pub usage: Vec<Vec<u64>>,
}

impl Default for BankOptions {
    fn default() -> Self {
        Self { slots: 64, staging: STAGING, replacement: replace::Replacement::default(), usage: Vec::new() }
    }
}

/// One layer's experts on the device.
pub(crate) struct ExpertBank<B: Backend> {
    /// Gate and up projections of an expert, one below the other.
    pub(crate) gate_up: B::Matrix,
    pub(crate) down: B::Matrix,
    /// U32 `[experts]`: where each expert is.
    pub(crate) slots: B::Buffer,
}

/// The table of a bank where expert `e` lies in slot `e`.
pub(crate) fn identity_slots<B: Backend>(backend: &mut B, experts: usize) -> Result<B::Buffer> {
    let table = backend.allocate(Element::U32, experts)?;
    let ids: Vec<u32> = (0..experts as u32).collect();
    backend.write_u32(&table, 0, &ids)?;
    Ok(table)
}
