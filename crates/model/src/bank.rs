//! Where a layer's experts are.
//!
//! Kernels read experts through a slot table, so that a bank that holds only some of them needs no other kernel.

use flint_backend::{Backend, Element};

use crate::Result;

/// One layer's experts with every one resident: the slot table is the identity.
pub(crate) struct ExpertBank<B: Backend> {
    /// Gate and up projections of an expert, one below the other.
    pub(crate) gate_up: B::Matrix,
    pub(crate) down: B::Matrix,
    slots: B::Buffer,
}

impl<B: Backend> ExpertBank<B> {
    /// A bank whose stacks hold every expert in order.
    pub(crate) fn resident(gate_up: B::Matrix, down: B::Matrix, slots: B::Buffer) -> Self {
        Self { gate_up, down, slots }
    }

    /// The slot table with which every pick of the current rows can be read.
    pub(crate) fn ready(&self) -> B::Buffer {
        self.slots.clone()
    }
}

/// The table of a bank where expert `e` lies in slot `e`.
pub(crate) fn identity_slots<B: Backend>(backend: &mut B, experts: usize) -> Result<B::Buffer> {
    let table = backend.allocate(Element::U32, experts)?;
    let ids: Vec<u32> = (0..experts as u32).collect();
    backend.write_u32(&table, 0, &ids)?;
    Ok(table)
}
