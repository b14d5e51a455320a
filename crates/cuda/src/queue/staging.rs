//! Copies between the host and buffers through pinned memory.

use std::sync::Arc;

use crate::CudaError;
use crate::driver::{Device, Event, Pinned, Stream};

/// Bytes of a slot: large enough for the bus's full speed.
const SLOT: usize = 16 << 20;
/// Slots: the host fills one while the device copies from the others.
const SLOTS: usize = 4;
/// Bytes above which several threads fill a slot: one alone is slower than the bus.
const SHARED_FILL: usize = 2 << 20;
/// Threads that fill a slot.
const FILLERS: usize = 4;

struct Slot {
    pinned: Pinned,
    copied: Event,
    /// Bytes given out since its event happened.
    used: usize,
}

/// Pinned memory for copies in both directions.
pub(crate) struct Staging {
    slots: Vec<Slot>,
    turn: usize,
    out: Option<Pinned>,
    device: Arc<Device>,
}

impl Staging {
    /// No memory yet.
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        Self { slots: Vec::new(), turn: 0, out: None, device: device.clone() }
    }

    /// Queues copies of `bytes` to a device address; the slice may be reused at once.
    ///
    /// # Safety
    /// The device range lies inside one allocation.
    pub(crate) unsafe fn copy_in(&mut self, stream: &Stream, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let mut done = 0;
        while done < bytes.len() {
            let slot = self.slot(stream)?;
            let count = (SLOT - slot.used).min(bytes.len() - done);
            let (first, part) = (slot.used, &bytes[done..done + count]);
            fill(&mut slot.pinned.as_mut_slice()[first..first + count], part);
            // SAFETY: the range is part of the caller's; bytes of a slot are given out once until its event happened.
            unsafe { stream.copy_in(to + done as u64, &slot.pinned, first, count) }?;
            // The next use of the slot starts on a cache line of its own.
            slot.used = (first + count).next_multiple_of(64);
            done += count;
        }
        Ok(())
    }

    /// A slot with room.
    fn slot(&mut self, stream: &Stream) -> Result<&mut Slot, CudaError> {
        if self.slots.get(self.turn).is_some_and(|slot| slot.used >= SLOT) {
            self.slots[self.turn].copied.record(stream)?;
            self.turn = (self.turn + 1) % SLOTS;
            if let Some(slot) = self.slots.get_mut(self.turn) {
                slot.copied.wait()?;
                slot.used = 0;
            }
        }
        if self.slots.len() <= self.turn {
            let pinned = Pinned::new(&self.device, SLOT)?;
            self.slots.push(Slot { pinned, copied: Event::new(&self.device)?, used: 0 });
        }
        Ok(&mut self.slots[self.turn])
    }

    /// Copies from a device address, behind the stream's work, and waits.
    ///
    /// # Safety
    /// The device range lies inside one allocation.
    pub(crate) unsafe fn copy_out(
        &mut self,
        stream: &Stream,
        out: &mut [u8],
        from: u64,
    ) -> Result<(), CudaError> {
        let most = out.len().min(SLOT);
        let kept = self.out.take().filter(|pinned| pinned.bytes() >= most);
        let mut pinned = match kept {
            Some(pinned) => pinned,
            None => Pinned::new(&self.device, most.next_power_of_two())?,
        };
        for (index, part) in out.chunks_mut(SLOT).enumerate() {
            // SAFETY: part of the caller's range; read below, after the wait.
            unsafe { stream.copy_out(&mut pinned, from + (index * SLOT) as u64, part.len()) }?;
            stream.wait()?;
            part.copy_from_slice(&pinned.as_mut_slice()[..part.len()]);
        }
        self.out = Some(pinned);
        Ok(())
    }
}

/// Copies between host slices of one length, with several threads where one would be too slow.
fn fill(to: &mut [u8], from: &[u8]) {
    if from.len() < SHARED_FILL {
        to.copy_from_slice(from);
        return;
    }
    let part = from.len().div_ceil(FILLERS);
    std::thread::scope(|scope| {
        for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn several_threads_copy_every_byte() {
        let from: Vec<u8> = (0..super::SHARED_FILL + 12_345).map(|i| (i * 7 % 251) as u8).collect();
        let mut to = vec![0; from.len()];
        super::fill(&mut to, &from);
        assert!(to == from);
    }
}
