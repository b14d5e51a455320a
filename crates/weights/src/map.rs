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
    let mapped = unsafe { Mmap::map(file) }?;
    // Pages of 2 MiB where the file system has them: weights are read from end to end for every token, and 4 KiB pages
    // cost up to a quarter of the read bandwidth. Pages that are cached in small pieces already stay as they are.
    #[cfg(target_os = "linux")]
    let _refused = mapped.advise(memmap2::Advice::HugePage);
    Ok(mapped)
}
