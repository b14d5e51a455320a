//! Backends around a backend: one that records, and a hook for those that cheat.
//!
//! [`Recorder`] proves that the contract suits a device with a queue: it keeps operations and writes as data and runs
//! them at the next wait. [`Hooked`] passes every operation through a function; the conformance suite builds its
//! cheaters from it.

use flint_weights::QuantMatrix;

use crate::ops::{Intercept, Op, Ops};
use crate::{Backend, Element, Precision, Result};

/// An operation of backend `B`, as data.
pub type OpOf<B> = Op<<B as Ops>::Buffer, <B as Ops>::Matrix>;

/// Something that was asked of a [`Recorder`] and has not run.
enum Command<B: Ops> {
    Run(Box<OpOf<B>>),
    WriteF32(B::Buffer, usize, Vec<f32>),
    WriteU32(B::Buffer, usize, Vec<u32>),
    WriteBytes(B::Buffer, Vec<u8>),
    BeginStep,
    EndStep,
}

/// Runs nothing until something waits.
pub struct Recorder<B: Backend> {
    inner: B,
    queue: Vec<Command<B>>,
}

impl<B: Backend> Recorder<B> {
    /// Wraps `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, queue: Vec::new() }
    }

    fn flush(&mut self) -> Result<()> {
        for command in std::mem::take(&mut self.queue) {
            match command {
                Command::Run(op) => op.run(&mut self.inner)?,
                Command::WriteF32(buffer, first, values) => self.inner.write_f32(&buffer, first, &values)?,
                Command::WriteU32(buffer, first, values) => self.inner.write_u32(&buffer, first, &values)?,
                Command::WriteBytes(buffer, bytes) => self.inner.write_bytes(&buffer, &bytes)?,
                Command::BeginStep => self.inner.begin_step()?,
                Command::EndStep => self.inner.end_step()?,
            }
        }
        Ok(())
    }
}

impl<B: Backend> Intercept for Recorder<B> {
    type Buffer = B::Buffer;
    type Matrix = B::Matrix;

    fn intercept(&mut self, op: OpOf<B>) -> Result<()> {
        self.queue.push(Command::Run(Box::new(op)));
        Ok(())
    }
}

impl<B: Backend> Backend for Recorder<B> {
    fn arithmetic(&self) -> String {
        self.inner.arithmetic()
    }

    fn product_element(&self) -> Element {
        self.inner.product_element()
    }

    fn affine_element(&self) -> Element {
        self.inner.affine_element()
    }

    fn cache_element(&self) -> Element {
        self.inner.cache_element()
    }

    fn allocate(&mut self, element: Element, len: usize) -> Result<Self::Buffer> {
        self.inner.allocate(element, len)
    }

    fn write_f32(&mut self, buffer: &Self::Buffer, first: usize, values: &[f32]) -> Result<()> {
        self.queue.push(Command::WriteF32(buffer.clone(), first, values.to_vec()));
        Ok(())
    }

    fn write_u32(&mut self, buffer: &Self::Buffer, first: usize, values: &[u32]) -> Result<()> {
        self.queue.push(Command::WriteU32(buffer.clone(), first, values.to_vec()));
        Ok(())
    }

    fn write_bytes(&mut self, buffer: &Self::Buffer, bytes: &[u8]) -> Result<()> {
        self.queue.push(Command::WriteBytes(buffer.clone(), bytes.to_vec()));
        Ok(())
    }

    fn read_f32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [f32]) -> Result<()> {
        self.flush()?;
        self.inner.read_f32(buffer, first, out)
    }

    fn read_u32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [u32]) -> Result<()> {
        self.flush()?;
        self.inner.read_u32(buffer, first, out)
    }

    fn read_bytes(&mut self, buffer: &Self::Buffer) -> Result<Vec<u8>> {
        self.flush()?;
        self.inner.read_bytes(buffer)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.queue.push(Command::BeginStep);
        Ok(())
    }

    fn end_step(&mut self) -> Result<()> {
        self.queue.push(Command::EndStep);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<()> {
        self.flush()?;
        self.inner.synchronize()
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<Self::Matrix> {
        self.inner.upload(parts, precision)
    }

    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<Self::Matrix> {
        self.inner.upload_stack(members, precision)
    }
}

/// Passes every operation through `hook`, which runs it (or something else) on the inner backend.
pub struct Hooked<B: Backend, F> {
    inner: B,
    hook: F,
}

impl<B: Backend, F: FnMut(&mut B, OpOf<B>) -> Result<()> + Send + 'static> Hooked<B, F> {
    /// Wraps `inner`.
    pub fn new(inner: B, hook: F) -> Self {
        Self { inner, hook }
    }
}

impl<B: Backend, F: FnMut(&mut B, OpOf<B>) -> Result<()> + Send + 'static> Intercept for Hooked<B, F> {
    type Buffer = B::Buffer;
    type Matrix = B::Matrix;

    fn intercept(&mut self, op: OpOf<B>) -> Result<()> {
        (self.hook)(&mut self.inner, op)
    }
}

impl<B: Backend, F: FnMut(&mut B, OpOf<B>) -> Result<()> + Send + 'static> Backend for Hooked<B, F> {
    fn arithmetic(&self) -> String {
        self.inner.arithmetic()
    }

    fn product_element(&self) -> Element {
        self.inner.product_element()
    }

    fn affine_element(&self) -> Element {
        self.inner.affine_element()
    }

    fn cache_element(&self) -> Element {
        self.inner.cache_element()
    }

    fn allocate(&mut self, element: Element, len: usize) -> Result<Self::Buffer> {
        self.inner.allocate(element, len)
    }

    fn write_f32(&mut self, buffer: &Self::Buffer, first: usize, values: &[f32]) -> Result<()> {
        self.inner.write_f32(buffer, first, values)
    }

    fn write_u32(&mut self, buffer: &Self::Buffer, first: usize, values: &[u32]) -> Result<()> {
        self.inner.write_u32(buffer, first, values)
    }

    fn write_bytes(&mut self, buffer: &Self::Buffer, bytes: &[u8]) -> Result<()> {
        self.inner.write_bytes(buffer, bytes)
    }

    fn read_f32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [f32]) -> Result<()> {
        self.inner.read_f32(buffer, first, out)
    }

    fn read_u32(&mut self, buffer: &Self::Buffer, first: usize, out: &mut [u32]) -> Result<()> {
        self.inner.read_u32(buffer, first, out)
    }

    fn read_bytes(&mut self, buffer: &Self::Buffer) -> Result<Vec<u8>> {
        self.inner.read_bytes(buffer)
    }

    fn begin_step(&mut self) -> Result<()> {
        self.inner.begin_step()
    }

    fn end_step(&mut self) -> Result<()> {
        self.inner.end_step()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.inner.synchronize()
    }

    fn upload(&mut self, parts: &[QuantMatrix], precision: Precision) -> Result<Self::Matrix> {
        self.inner.upload(parts, precision)
    }

    fn upload_stack(&mut self, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<Self::Matrix> {
        self.inner.upload_stack(members, precision)
    }
}
