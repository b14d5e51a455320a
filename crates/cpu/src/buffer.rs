//! Device memory that happens to be RAM.
//!
//! A buffer is reached through raw pointers only while one operation runs: the backend is `&mut` during an operation,
//! handles give no references away, and an operation's tasks write disjoint rows.

use std::cell::UnsafeCell;
use std::sync::Arc;

use flint_backend::ops::Rows;
use flint_backend::{Element, Error, Result};

/// One cache line: every buffer starts on one.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

struct Memory {
    lines: UnsafeCell<Box<[Line]>>,
    element: Element,
    len: usize,
}

// SAFETY: the contents are only reached inside an operation or a copy of a backend, which is `&mut` then; its tasks
// write disjoint ranges.
unsafe impl Sync for Memory {}
// SAFETY: as above; the memory has no thread affinity.
unsafe impl Send for Memory {}

/// A handle of memory; freed with the last handle.
#[derive(Clone)]
pub struct CpuBuffer(Arc<Memory>);

impl std::fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuBuffer({:?} × {})", self.0.element, self.0.len)
    }
}

impl CpuBuffer {
    /// `len` zeros. The system gives the pages when they are first touched.
    pub(crate) fn zeros(element: Element, len: usize) -> Result<Self> {
        let bytes = len * element.size();
        let count = bytes.div_ceil(size_of::<Line>());
        let refused =
            || Error::OutOfMemory { backend: "cpu", bytes, what: format!("a buffer of {len} elements") };
        let layout = std::alloc::Layout::array::<Line>(count).map_err(|_| refused())?;
        let lines = if count == 0 {
            Box::default()
        } else {
            // SAFETY: the layout is not empty; zeroed bytes are valid lines; the box takes the allocation over with
            // the layout it was made with.
            unsafe {
                #[expect(clippy::cast_ptr_alignment, reason = "the layout has the line's alignment")]
                let start = std::alloc::alloc_zeroed(layout).cast::<Line>();
                if start.is_null() {
                    return Err(refused());
                }
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, count))
            }
        };
        Ok(Self(Arc::new(Memory { lines: UnsafeCell::new(lines), element, len })))
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Type of the elements.
    pub fn element(&self) -> Element {
        self.0.element
    }

    /// Where the memory starts.
    pub(crate) fn start(&self) -> *mut u8 {
        // SAFETY: only the pointer is taken.
        unsafe { (*self.0.lines.get()).as_mut_ptr().cast() }
    }

    fn range(&self, element: Element, first: usize, bytes: usize) -> Result<*mut u8> {
        let size = element.size();
        if self.0.element != element || first * size + bytes > self.0.len * size {
            let what = format!("{bytes} bytes at element {first} of {self:?} as {element:?}");
            return Err(Error::Shape { op: "copy", what });
        }
        // SAFETY: the range was checked.
        Ok(unsafe { self.start().add(first * size) })
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, element: Element, first: usize, bytes: &[u8]) -> Result<()> {
        let at = self.range(element, first, bytes.len())?;
        // SAFETY: the range was checked, and the host's slice is not device memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, element: Element, first: usize, out: &mut [u8]) -> Result<()> {
        let at = self.range(element, first, out.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(at, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// All elements as fp32 for reading; an error when the buffer has another type or fewer than `len` of them.
    ///
    /// # Safety
    /// Nobody writes the buffer while the slice lives.
    pub(crate) unsafe fn f32s(&self, op: &'static str, len: usize) -> Result<&[f32]> {
        self.expect(op, Element::F32, len)?;
        // SAFETY: type and length were checked, the start is aligned; the caller excludes writers.
        Ok(unsafe { std::slice::from_raw_parts(self.start().cast(), self.0.len) })
    }

    /// All elements as u32 for reading.
    ///
    /// # Safety
    /// As [`f32s`](Self::f32s).
    pub(crate) unsafe fn u32s(&self, op: &'static str, len: usize) -> Result<&[u32]> {
        self.expect(op, Element::U32, len)?;
        // SAFETY: as in `f32s`.
        Ok(unsafe { std::slice::from_raw_parts(self.start().cast(), self.0.len) })
    }

    /// Where at least `len` u32 elements start.
    pub(crate) fn u32_start(&self, op: &'static str, len: usize) -> Result<Start<u32>> {
        self.expect(op, Element::U32, len)?;
        Ok(Start::new(self.start().cast()))
    }

    /// Where at least `len` fp32 elements start.
    pub(crate) fn f32_start(&self, op: &'static str, len: usize) -> Result<Start<f32>> {
        self.expect(op, Element::F32, len)?;
        Ok(Start::new(self.start().cast()))
    }

    /// Checks type and length.
    pub(crate) fn expect(&self, op: &'static str, element: Element, len: usize) -> Result<()> {
        if self.0.element == element && self.0.len >= len {
            return Ok(());
        }
        Err(Error::Shape { op, what: format!("{self:?} where {element:?} × {len} is needed") })
    }
}

/// Where the checked elements of a buffer start, for the tasks of one operation.
#[derive(Debug)]
pub(crate) struct Start<T>(*mut T);

impl<T> Clone for Start<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Start<T> {}

// SAFETY: a pointer is shared, not memory; whoever reaches through it keeps writers and readers apart.
unsafe impl<T> Sync for Start<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Start<T> {}

impl<T> Start<T> {
    /// A pointer that the caller checked.
    pub(crate) fn new(start: *mut T) -> Self {
        Self(start)
    }

    /// Element `index`.
    ///
    /// # Safety
    /// `index` is inside the checked elements or just behind them.
    pub(crate) unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: the caller vouches for the index.
        unsafe { self.0.add(index) }
    }
}

/// fp32 rows of a buffer whose range was checked, for the tasks of one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsF32 {
    start: Start<f32>,
    stride: usize,
    pub(crate) width: usize,
    pub(crate) rows: usize,
}

impl RowsF32 {
    /// Checks that `rows` lies inside its buffer.
    pub(crate) fn new(op: &'static str, rows: &Rows<CpuBuffer>) -> Result<Self> {
        let end = match rows.rows.checked_sub(1) {
            None => Some(0),
            Some(last) => last
                .checked_mul(rows.stride)
                .and_then(|last| last.checked_add(rows.first))
                .and_then(|last| last.checked_add(rows.width)),
        };
        // No buffer is that long.
        let end = end.unwrap_or(usize::MAX);
        let buffer = rows.buffer.f32_start(op, end)?;
        if rows.rows > 1 && rows.stride < rows.width {
            return Err(Error::Shape {
                op,
                what: format!("stride {} below width {}", rows.stride, rows.width),
            });
        }
        let first = if end == 0 { 0 } else { rows.first };
        // SAFETY: `first` is inside the buffer, or no row exists.
        let start = Start::new(unsafe { buffer.at(first) });
        Ok(Self { start, stride: rows.stride, width: rows.width, rows: rows.rows })
    }

    /// Where row `row` starts; `width` elements follow.
    ///
    /// # Safety
    /// `row < rows`.
    pub(crate) unsafe fn at(self, row: usize) -> *mut f32 {
        debug_assert!(row < self.rows);
        // SAFETY: the range was checked at construction.
        unsafe { self.start.at(row * self.stride) }
    }

    /// Row `row` for reading.
    ///
    /// # Safety
    /// `row < rows`, the buffer lives, and nobody writes these elements while the slice lives.
    pub(crate) unsafe fn row<'a>(self, row: usize) -> &'a [f32] {
        // SAFETY: the range was checked at construction; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.at(row), self.width) }
    }

    /// Row `row` for writing.
    ///
    /// # Safety
    /// `row < rows`, the buffer lives, and nobody else reaches these elements while the slice lives.
    pub(crate) unsafe fn row_mut<'a>(self, row: usize) -> &'a mut [f32] {
        // SAFETY: as in `row`.
        unsafe { std::slice::from_raw_parts_mut(self.at(row), self.width) }
    }
}
