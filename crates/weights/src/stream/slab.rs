//! Memory that records are read into.

use memmap2::MmapMut;

use crate::{Error, Result};

/// Bytes to which direct reads align their offsets, lengths and memory.
pub(crate) const BLOCK: usize = 4096;

/// Page-aligned memory of a record: written by one read, then shared read-only.
#[derive(Debug)]
pub struct Slab(MmapMut);

impl Slab {
    /// `bytes` bytes of zeros, rounded up to whole blocks of 4,096; they take memory when they are first written.
    ///
    /// # Errors
    /// When the system has no room for them.
    pub fn new(bytes: usize) -> Result<Self> {
        let bytes = Self::rounded(bytes);
        let memory = MmapMut::map_anon(bytes).map_err(|source| Error::Memory { bytes, source })?;
        #[cfg(target_os = "linux")]
        let _refused = memory.advise(memmap2::Advice::HugePage);
        Ok(Self(memory))
    }

    /// The length of a slab that was asked for with `bytes`.
    pub fn rounded(bytes: usize) -> usize {
        bytes.next_multiple_of(BLOCK).max(BLOCK)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: never.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }
}

impl AsRef<[u8]> for Slab {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
