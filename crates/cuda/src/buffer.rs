//! Handles of device memory.

use std::sync::Arc;

use flint_backend::ops::Rows;
use flint_backend::{Element, Error, Result};

use crate::driver::Memory;

struct Elements {
    memory: Memory,
    element: Element,
    len: usize,
}

/// A handle of memory; freed with the last handle, after everything queued before has run.
#[derive(Clone)]
pub struct CudaBuffer(Arc<Elements>);

impl std::fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaBuffer({:?} × {})", self.0.element, self.0.len)
    }
}

impl CudaBuffer {
    /// Makes a handle of memory that has room for `len` elements.
    pub(crate) fn new(memory: Memory, element: Element, len: usize) -> Self {
        debug_assert!(len * element.size() <= memory.bytes());
        Self(Arc::new(Elements { memory, element, len }))
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

    /// Device address of element `first` (or just behind the last).
    pub(crate) fn at(&self, first: usize) -> u64 {
        self.0.memory.at(first * self.0.element.size())
    }

    /// Refuses a copy of `bytes` bytes at element `first` that does not fit, or of another type.
    pub(crate) fn check_range(&self, element: Element, first: usize, bytes: usize) -> Result<()> {
        let size = element.size();
        if self.0.element == element && first * size + bytes <= self.0.len * size {
            return Ok(());
        }
        let what = format!("{bytes} bytes at element {first} of {self:?} as {element:?}");
        Err(Error::Shape { op: "copy", what })
    }

    /// Refuses another type, or fewer than `len` elements.
    pub(crate) fn require(&self, op: &'static str, element: Element, len: usize) -> Result<()> {
        if self.0.element == element && self.0.len >= len {
            return Ok(());
        }
        Err(Error::Shape { op, what: format!("{self:?} where {element:?} × {len} is needed") })
    }
}

/// fp32 rows whose range was checked: what a kernel needs of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsF32 {
    /// Device address of row 0.
    pub(crate) address: u64,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    /// Elements of a row.
    pub(crate) width: usize,
    /// Rows.
    pub(crate) rows: usize,
}

impl RowsF32 {
    /// Checks that all rows lie in an F32 buffer.
    pub(crate) fn new(op: &'static str, rows: &Rows<CudaBuffer>) -> Result<Self> {
        let &Rows { ref buffer, first, stride, width, rows } = rows;
        let refused = |what: String| Err(Error::Shape { op, what });
        if buffer.element() != Element::F32 {
            return refused(format!("{buffer:?} where F32 rows are needed"));
        }
        if rows > 1 && stride < width {
            return refused(format!("rows of {width} elements every {stride}"));
        }
        let end = if rows == 0 { first } else { first + (rows - 1) * stride + width };
        if end > buffer.len() {
            return refused(format!("{rows} rows of {width} every {stride} from {first} of {buffer:?}"));
        }
        Ok(Self { address: buffer.at(first), stride, width, rows })
    }
}
