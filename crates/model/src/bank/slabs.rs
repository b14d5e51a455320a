//! Memory for experts: made once, handed from the reader to a slot and back.

use std::collections::HashMap;
use std::sync::Arc;

use flint_weights::stream::Slab;

use crate::Result;

/// Memory that is free, by its size.
#[derive(Default)]
pub(super) struct Slabs {
    free: HashMap<usize, Vec<Slab>>,
    /// How many of a size may still be made.
    unmade: HashMap<usize, usize>,
    /// Left by their slots, perhaps still read by what is queued.
    leaving: Vec<Arc<Slab>>,
}

impl Slabs {
    /// Allows `count` more of a size.
    pub(super) fn allow(&mut self, bytes: usize, count: usize) {
        *self.unmade.entry(bytes).or_default() += count;
    }

    /// Whether any of a size may be made.
    pub(super) fn knows(&self, bytes: usize) -> bool {
        self.unmade.contains_key(&bytes)
    }

    /// One of a size; `None` when all are in use.
    pub(super) fn take(&mut self, bytes: usize) -> Result<Option<Slab>> {
        self.collect();
        if let Some(slab) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(Some(slab));
        }
        match self.unmade.get_mut(&bytes) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Ok(Some(Slab::new(bytes)?))
            }
            _ => Ok(None),
        }
    }

    /// Takes one back, now or when nobody reads it any more.
    pub(super) fn give_back(&mut self, slab: Arc<Slab>) {
        match Arc::try_unwrap(slab) {
            Ok(slab) => self.free.entry(slab.len()).or_default().push(slab),
            Err(shared) => self.leaving.push(shared),
        }
    }

    /// Whether some come back once the device has caught up.
    pub(super) fn are_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Takes one back at the next look: its matrices are about to be replaced.
    pub(super) fn leave(&mut self, slab: Arc<Slab>) {
        self.leaving.push(slab);
    }

    fn collect(&mut self) {
        for slab in std::mem::take(&mut self.leaving) {
            self.give_back(slab);
        }
    }
}
