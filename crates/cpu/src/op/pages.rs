//! A sequence's part of a DSA operation with its pages checked.

use flint_backend::ops::{DsaSpan, Page};
use flint_backend::{Element, Result};

use super::require;
use crate::CpuBuffer;
use crate::buffer::Start;
use crate::lanes::{Lanes, prefetch};

/// A page's cached rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cached {
    F32(Start<f32>),
    Bf16(Start<u16>),
}

impl Cached {
    fn new(op: &'static str, buffer: &CpuBuffer, len: usize) -> Result<Self> {
        let element = buffer.element();
        buffer.expect(op, element, len)?;
        match element {
            Element::F32 => Ok(Self::F32(Start::new(buffer.start().cast()))),
            Element::Bf16 => Ok(Self::Bf16(Start::new(buffer.start().cast()))),
            Element::U32 => {
                require(op, false, || "a cache of integers".into())?;
                Ok(Self::F32(Start::new(buffer.start().cast())))
            }
        }
    }

    /// Writes `values` at element `at`, rounded to nearest even where the cache is bf16.
    ///
    /// # Safety
    /// The elements exist and nobody else reaches them.
    pub(super) unsafe fn write(self, at: usize, values: &[f32]) {
        // SAFETY: as the caller vouches.
        unsafe {
            match self {
                Self::F32(start) => start.at(at).copy_from_nonoverlapping(values.as_ptr(), values.len()),
                Self::Bf16(start) => {
                    for (i, &value) in values.iter().enumerate() {
                        start.at(at + i).write(half::bf16::from_f32(value).to_bits());
                    }
                }
            }
        }
    }

    /// Asks for the memory of `count` elements from `at`.
    #[inline(always)]
    pub(super) fn prefetch(self, at: usize, count: usize) {
        let (start, size): (*const u8, usize) = match self {
            // SAFETY: only the address is made.
            Self::F32(start) => (unsafe { start.at(at) }.cast(), 4),
            // SAFETY: as above.
            Self::Bf16(start) => (unsafe { start.at(at) }.cast(), 2),
        };
        for line in (0..count * size).step_by(64) {
            prefetch(start.wrapping_add(line));
        }
    }

    /// Up to sixteen values from element `at`.
    ///
    /// # Safety
    /// The elements exist and nobody writes them.
    #[inline(always)]
    pub(super) unsafe fn read<L: Lanes>(self, at: usize, count: usize) -> L {
        // SAFETY: as the caller vouches.
        unsafe {
            match self {
                Self::F32(start) => L::read_some(start.at(at), count),
                Self::Bf16(start) => L::read_some_bf16(start.at(at), count),
            }
        }
    }
}

/// A span whose pages hold every position up to its last row.
pub(super) struct Cache {
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) position: usize,
    pub(super) kpool: usize,
    page_rows: usize,
    latents: Vec<Cached>,
    latent_width: usize,
    pooled: Vec<Cached>,
    key_width: usize,
}

/// What the pages of an operation look like.
#[derive(Clone, Copy)]
pub(super) struct PageShape {
    pub(super) kpool: usize,
    pub(super) page_rows: usize,
    /// Width of a latent; 0 when the operation does not touch them.
    pub(super) latent_width: usize,
    /// Width of a pooled key; 0 when the operation does not touch them.
    pub(super) key_width: usize,
}

impl Cache {
    pub(super) fn new(
        op: &'static str,
        span: &DsaSpan<CpuBuffer>,
        batch_rows: usize,
        shape: PageShape,
    ) -> Result<Self> {
        let PageShape { kpool, page_rows, latent_width, key_width } = shape;
        require(op, kpool > 0 && page_rows > 0 && page_rows.is_multiple_of(kpool), || {
            format!("pages of {page_rows} positions for pools of {kpool}")
        })?;
        require(op, span.first_row + span.rows <= batch_rows, || {
            format!("a span of rows {}..{} of {batch_rows}", span.first_row, span.first_row + span.rows)
        })?;
        let needed = (span.position + span.rows).div_ceil(page_rows);
        require(op, span.pages.len() >= needed, || {
            let last = span.position + span.rows;
            format!("{} pages of {page_rows} positions for {last} positions", span.pages.len())
        })?;
        let cached = |part: fn(&Page<CpuBuffer>) -> &CpuBuffer, len: usize| -> Result<Vec<Cached>> {
            let pages = if len == 0 { &[] } else { &span.pages[..needed] };
            pages.iter().map(|page| Cached::new(op, part(page), len)).collect()
        };
        Ok(Self {
            first_row: span.first_row,
            rows: span.rows,
            position: span.position,
            kpool,
            page_rows,
            latents: cached(|page| &page.latents, page_rows * latent_width)?,
            latent_width,
            pooled: cached(|page| &page.pooled, page_rows / kpool * key_width)?,
            key_width,
        })
    }

    /// Where the latent of `position` stands.
    pub(super) fn latent(&self, position: usize) -> (Cached, usize) {
        (self.latents[position / self.page_rows], position % self.page_rows * self.latent_width)
    }

    /// Where the key of pool `pool` stands.
    pub(super) fn key(&self, pool: usize) -> (Cached, usize) {
        let pools = self.page_rows / self.kpool;
        (self.pooled[pool / pools], pool % pools * self.key_width)
    }

    /// Complete pools that the span's row `row` sees.
    pub(super) fn visible(&self, row: usize) -> usize {
        (self.position + row + 1) / self.kpool
    }
}
