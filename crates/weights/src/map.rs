//! Files mapped into memory: the only `unsafe` of this crate.

#![allow(unsafe_code)]

use std::fs::File;

use memmap2::Mmap;

/// Maps a whole file for reading.
///
/// The pages come from the disk when they are first touched, so mapping costs nothing whatever the size. A file that
/// is cut short by another program while it is mapped ends the process with a bus error, as with every mapped file.
pub(crate) fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is private to this process and read-only; its bytes are only read as plain numbers, for which
    // every bit pattern is valid, so a file that another program overwrites changes numbers and breaks no invariant.
    unsafe { Mmap::map(file) }
}
