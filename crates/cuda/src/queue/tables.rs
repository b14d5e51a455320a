//! The metadata of launches in device memory: one region, filled front to back, uploaded once for many launches.
//!
//! Inside a step a table's place follows from the tables before it and their capacities, so that a graph captured in
//! one step reads the next step's values at the same addresses. The region is reused from its start; copies into it
//! stand on the stream behind the launches that read what was there.

use std::sync::Arc;

use crate::CudaError;
use crate::driver::{Device, Event, Memory, Pinned, Stream};
use crate::queue::Table;

/// Bytes of the region: page lists of 64 sequences in 40 layers, several times over.
const REGION: usize = 64 << 20;
/// Tables start on such a multiple, and take at least so much.
const LEAST: usize = 256;
/// Uploads that may be under way: the host can prepare two steps while the device runs one.
const SLOTS: usize = 3;

/// A piece of pinned memory and the copy that reads it.
struct Slot {
    pinned: Pinned,
    copied: Event,
}

/// Where tables go.
pub(crate) struct Tables {
    region: Memory,
    /// Bytes that were not uploaded yet; they belong at `start`.
    waiting: Vec<u8>,
    start: usize,
    /// Where the next table goes.
    next: usize,
    slots: Vec<Slot>,
    turn: usize,
    device: Arc<Device>,
}

impl Tables {
    /// An empty region.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let region = Memory::lasting(device, REGION, "the tables of launches")?;
        Ok(Self {
            region,
            waiting: Vec::new(),
            start: 0,
            next: 0,
            slots: Vec::new(),
            turn: 0,
            device: device.clone(),
        })
    }

    /// What a table of `bytes` bytes takes when `capacity` is asked for it.
    fn room(bytes: usize, capacity: usize) -> usize {
        bytes.max(capacity).max(LEAST).next_power_of_two()
    }

    /// Whether a table would go behind the region's end: everything before it must be uploaded, and launched, first.
    pub(crate) fn is_full_for(&self, bytes: usize, capacity: usize) -> bool {
        self.next + Self::room(bytes, capacity) > REGION
    }

    /// Starts again at the region's front. Nothing waits.
    pub(crate) fn restart(&mut self) {
        debug_assert!(self.waiting.is_empty(), "tables were uploaded");
        (self.start, self.next) = (0, 0);
    }

    /// Takes a table; `None` when it is greater than the whole region.
    pub(crate) fn push(&mut self, bytes: &[u8], capacity: usize) -> Option<Table> {
        let at = self.next;
        let next = at + Self::room(bytes.len(), capacity);
        if next > REGION {
            return None;
        }
        self.waiting.resize(at - self.start, 0);
        self.waiting.extend_from_slice(bytes);
        self.next = next;
        Some(Table { address: self.region.at(at) })
    }

    /// Bytes that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Queues the copy of all tables that wait.
    pub(crate) fn upload(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let bytes = self.waiting.len();
        if bytes > 0 {
            if self.slots.len() <= self.turn {
                let pinned = Pinned::new(&self.device, bytes.next_power_of_two().max(1 << 16))?;
                self.slots.push(Slot { pinned, copied: Event::new(&self.device)? });
            }
            let slot = &mut self.slots[self.turn];
            slot.copied.wait()?;
            if slot.pinned.bytes() < bytes {
                slot.pinned = Pinned::new(&self.device, bytes.next_power_of_two())?;
            }
            slot.pinned.as_mut_slice()[..bytes].copy_from_slice(&self.waiting);
            // SAFETY: the region holds `next` bytes and more; the slot is not touched before its event has happened.
            unsafe { stream.copy_in(self.region.at(self.start), &slot.pinned, 0, bytes) }?;
            slot.copied.record(stream)?;
            self.turn = (self.turn + 1) % SLOTS;
        }
        self.waiting.clear();
        self.start = self.next;
        Ok(())
    }

    /// Forgets what waits, after an error.
    pub(crate) fn forget(&mut self) {
        self.waiting.clear();
        self.start = self.next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tables_room_is_a_power_of_two_that_its_capacity_fixes() {
        assert_eq!(Tables::room(0, 0), 256);
        assert_eq!(Tables::room(4, 300), 512);
        assert_eq!(Tables::room(40, 300), 512);
        assert_eq!(Tables::room(600, 300), 1024);
    }
}
