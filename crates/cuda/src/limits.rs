//! What a device can do at best: copies in its memory, the roof of decode, and a matrix product, the roof of prefill.
//!
//! Rulers for `flint bench` alone; nothing here is part of the network's arithmetic. The product is that of the vendor's
//! library where it is installed (`libcublas`), since that is what others would use.

use std::ffi::{c_int, c_void};
use std::time::{Duration, Instant};

use flint_backend::Result;
use libloading::Library;

use crate::Cuda;
use crate::driver::{Memory, Pinned};
use crate::queue::Queue;

/// Rates of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Bytes a second, read and written ones together, of a copy inside the device's memory.
    pub copy_bytes_per_second: f64,
    /// Bytes a second of a copy from pinned host memory to the device, the roof of loading.
    pub upload_bytes_per_second: f64,
    /// Operations a second (a multiply and an add count two) of a bf16 product of 8192 × 8192 × 8192 on random numbers;
    /// `None` where the vendor's library is not installed.
    pub product_per_second: Option<f64>,
}

/// Bytes that are copied: far more than any cache.
const COPY_BYTES: usize = 1 << 30;
/// Bytes of pinned host memory that are copied to the device.
const UPLOAD_BYTES: usize = 128 << 20;
/// Copies or products of one measurement.
const REPEATS: u32 = 10;
/// Measurements; the best counts.
const ROUNDS: usize = 5;
/// Rows and columns of the product.
const SIDE: usize = 8192;

impl Cuda {
    /// Measures the device's rates. Takes about a second and 2 GiB of device memory.
    ///
    /// # Errors
    /// When the device refuses the memory or fails.
    pub fn measure_limits(&mut self) -> Result<DeviceLimits> {
        let queue = self.queue();
        let copy = measure_copy(queue)?;
        let upload = measure_upload(queue)?;
        let product = measure_product(queue)?;
        let operations = 2.0 * (SIDE * SIDE * SIDE) as f64;
        Ok(DeviceLimits {
            copy_bytes_per_second: 2.0 * COPY_BYTES as f64 / copy.as_secs_f64(),
            upload_bytes_per_second: UPLOAD_BYTES as f64 / upload.as_secs_f64(),
            product_per_second: product.map(|time| operations / time.as_secs_f64()),
        })
    }
}

/// Time of one copy.
fn measure_copy(queue: &mut Queue) -> Result<Duration> {
    let from = random(queue, COPY_BYTES)?;
    let to = queue.reserve(COPY_BYTES, "a copy that is measured")?;
    best(queue, |queue| Ok(queue.stream().copy_within(&to, &from)?))
}

/// Time of one copy from pinned host memory.
fn measure_upload(queue: &mut Queue) -> Result<Duration> {
    let from = Pinned::new(queue.stream().device(), UPLOAD_BYTES)?;
    let to = queue.reserve(UPLOAD_BYTES, "a copy that is measured")?;
    best(queue, |queue| {
        // SAFETY: the range is the whole of `to`; nobody changes `from` before `best` has waited.
        Ok(unsafe { queue.stream().copy_in(to.at(0), &from, 0, UPLOAD_BYTES) }?)
    })
}

/// Time of one product, where there is a library.
fn measure_product(queue: &mut Queue) -> Result<Option<Duration>> {
    let Some(library) = Blas::load(queue) else { return Ok(None) };
    let bytes = SIDE * SIDE * 2;
    let (a, b) = (random(queue, bytes)?, random(queue, bytes)?);
    let out = queue.reserve(bytes, "a product that is measured")?;
    let mut done = true;
    let time = best(queue, |_| {
        done &= library.multiply(&a, &b, &out);
        Ok(())
    })?;
    Ok(done.then_some(time))
}

/// The shortest time of a round, for one of its pieces.
fn best(queue: &mut Queue, mut work: impl FnMut(&mut Queue) -> Result<()>) -> Result<Duration> {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        queue.synchronize()?;
        let start = Instant::now();
        for _ in 0..REPEATS {
            work(queue)?;
        }
        queue.synchronize()?;
        best = best.min(start.elapsed() / REPEATS);
    }
    Ok(best)
}

/// Device memory full of random bf16 numbers between -2 and 2.
fn random(queue: &mut Queue, bytes: usize) -> Result<Memory> {
    const PIECE: usize = 16 << 20;
    let memory = queue.reserve(bytes, "numbers that are measured with")?;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut piece = vec![0; PIECE.min(bytes)];
    for word in piece.chunks_exact_mut(2) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = 2.0 * ((state >> 40) as f32 / (1 << 23) as f32 - 1.0);
        word.copy_from_slice(&half::bf16::from_f32(number).to_le_bytes());
    }
    for first in (0..bytes).step_by(piece.len().max(1)) {
        queue.fill(&memory, first, &piece[..piece.len().min(bytes - first)])?;
    }
    Ok(memory)
}

type Create = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Destroy = unsafe extern "C" fn(*mut c_void) -> c_int;
type SetStream = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Multiply = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The vendor's matrix library.
struct Blas {
    handle: *mut c_void,
    multiply: Multiply,
    destroy: Destroy,
    _library: Library,
}

/// Its values for a transposed operand, bf16 numbers, fp32 sums and its own choice of a kernel.
const TRANSPOSED: c_int = 1;
const PLAIN: c_int = 0;
const BF16: c_int = 14;
const FP32_SUMS: c_int = 68;
const ANY: c_int = -1;

impl Blas {
    fn load(queue: &Queue) -> Option<Self> {
        let names = ["libcublas.so.13", "libcublas.so.12", "libcublas.so"];
        // SAFETY: the vendor's library; its initialisers are meant to run in any process.
        let library = names.iter().find_map(|name| unsafe { Library::new(name) }.ok())?;
        // SAFETY: the types are those of the library's documentation; the handle is used with its own library.
        unsafe {
            let create = *library.get::<Create>(b"cublasCreate_v2\0").ok()?;
            let destroy = *library.get::<Destroy>(b"cublasDestroy_v2\0").ok()?;
            let set_stream = *library.get::<SetStream>(b"cublasSetStream_v2\0").ok()?;
            let multiply = *library.get::<Multiply>(b"cublasGemmEx\0").ok()?;
            let mut handle = std::ptr::null_mut();
            if create(&raw mut handle) != 0 {
                return None;
            }
            let blas = Self { handle, multiply, destroy, _library: library };
            (set_stream(handle, queue.stream().handle()) == 0).then_some(blas)
        }
    }

    /// Queues one product; whether the library took it.
    fn multiply(&self, a: &Memory, b: &Memory, out: &Memory) -> bool {
        let (side, one, zero) = (SIDE as c_int, 1.0_f32, 0.0_f32);
        let at = |memory: &Memory| memory.at(0) as *mut c_void;
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        // SAFETY: three matrices of `SIDE` × `SIDE` bf16 numbers that live until the queue has run.
        unsafe {
            (self.multiply)(
                self.handle,
                TRANSPOSED,
                PLAIN,
                side,
                side,
                side,
                one,
                at(a),
                BF16,
                side,
                at(b),
                BF16,
                side,
                zero,
                at(out),
                BF16,
                side,
                FP32_SUMS,
                ANY,
            ) == 0
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle is this library's and is not used again. A fault has nobody to go to here.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}
