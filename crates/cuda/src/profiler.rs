//! Marks for a profiler: which part of a program it should look at (`ncu --profile-from-start off`).

use std::ffi::c_uint;

use libloading::Library;

use crate::driver::LIBRARIES;

/// Tells a profiler that is attached to begin. Without one nothing happens.
pub fn start() {
    call(b"cuProfilerStart\0");
}

/// Tells it to end.
pub fn stop() {
    call(b"cuProfilerStop\0");
}

/// Calls a function of the driver that takes no argument and may be missing: a mark that nobody reads is no loss.
fn call(name: &[u8]) {
    // SAFETY: the driver's library, which the program has loaded already.
    let Some(library) = LIBRARIES.iter().find_map(|name| unsafe { Library::new(name) }.ok()) else { return };
    // SAFETY: the type is the one that the driver's documentation gives for both functions.
    unsafe {
        if let Ok(function) = library.get::<unsafe extern "C" fn() -> c_uint>(name) {
            let _ = function();
        }
    }
}
