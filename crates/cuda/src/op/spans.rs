//! Sequences' parts of an operation as tables: the layouts of `kernels/common/parts.cuh`.

use bytemuck::{Pod, Zeroable};
use flint_backend::ops::{DsaSpan, KdaSpan, Page};
use flint_backend::{Element, Result};

use super::{require, require_apart};
use crate::CudaBuffer;
use crate::queue::{Queue, Table};

/// A sequence's part of a KDA operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct KdaPart {
    window: u64,
    state: u64,
    log: u64,
    first_row: u32,
    logged: u32,
    sure: u32,
    drafts: u32,
}

/// Rows of a part, from `first`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Chunk {
    part: u32,
    first: u32,
}

/// Ends a list of chunks, and stands for a row that no part holds.
pub(super) const NO_PART: u32 = u32::MAX;

/// A sequence's part of a DSA operation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct DsaPart {
    ring: u64,
    first_row: u32,
    rows: u32,
    position: u32,
    first_page: u32,
}

/// The parts of spans over `rows` rows, which are checked to lie inside and apart.
pub(super) fn kda_parts(
    op: &'static str,
    spans: &[KdaSpan<CudaBuffer>],
    rows: usize,
) -> Result<Vec<KdaPart>> {
    inside(op, spans.iter().map(|span| (span.first_row, span.sure + span.drafts)), rows)?;
    let part = |span: &KdaSpan<CudaBuffer>| KdaPart {
        window: span.window.at(0),
        state: span.state.at(0),
        log: span.log.at(0),
        first_row: span.first_row as u32,
        logged: span.logged as u32,
        sure: span.sure as u32,
        drafts: span.drafts as u32,
    };
    Ok(spans.iter().map(part).collect())
}

/// Parts of `rows` rows each, cut into chunks of `size`. The list has a length that the batch's rows and the number of
/// parts fix; an empty part has a chunk too.
pub(super) fn chunks(rows: &[usize], batch_rows: usize, size: usize) -> Vec<Chunk> {
    let of_one = |(part, &rows): (usize, &usize)| {
        (0..rows.max(1)).step_by(size).map(move |first| Chunk { part: part as u32, first: first as u32 })
    };
    let mut chunks: Vec<Chunk> = rows.iter().enumerate().flat_map(of_one).collect();
    chunks.resize(batch_rows / size + rows.len(), Chunk { part: NO_PART, first: 0 });
    chunks
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

/// The tables of a DSA operation.
pub(super) struct DsaTables {
    /// The parts.
    pub(super) parts: Table,
    /// U32: the part of each row of the batch, or [`NO_PART`].
    pub(super) row_parts: Table,
    /// Addresses of the pages' latents; empty when the operation does not touch them.
    pub(super) latents: Table,
    /// Addresses of the pages' pooled keys; empty when the operation does not touch them.
    pub(super) pooled: Table,
    /// As [`position_room`] says.
    pub(super) position_room: usize,
}

impl DsaTables {
    /// Checks the spans against `rows` rows and their pages, and puts them into tables.
    pub(super) fn new(
        queue: &mut Queue,
        op: &'static str,
        spans: &[DsaSpan<CudaBuffer>],
        rows: usize,
        shape: PageShape,
    ) -> Result<Self> {
        inside(op, spans.iter().map(|span| (span.first_row, span.rows)), rows)?;
        let mut parts = Vec::with_capacity(spans.len());
        let (mut latents, mut pooled) = (Vec::new(), Vec::new());
        let mut row_parts = vec![NO_PART; rows];
        let mut first_page = 0;
        for (index, span) in spans.iter().enumerate() {
            let pages = pages(op, span, shape)?;
            if shape.latent_width > 0 {
                latents.extend(pages.iter().map(|page| page.latents.at(0)));
            }
            if shape.key_width > 0 {
                pooled.extend(pages.iter().map(|page| page.pooled.at(0)));
            }
            row_parts[span.first_row..span.first_row + span.rows].fill(index as u32);
            parts.push(DsaPart {
                ring: span.ring.at(0),
                first_row: span.first_row as u32,
                rows: span.rows as u32,
                position: span.position as u32,
                first_page,
            });
            first_page += pages.len() as u32;
        }
        // Lists of pages grow: their tables keep their place until a power of two is full.
        let page_room = (first_page as usize).next_power_of_two();
        Ok(Self {
            parts: queue.table(&parts, parts.len() * size_of::<DsaPart>())?,
            row_parts: queue.table(&row_parts, rows * 4)?,
            latents: queue.table(&latents, if shape.latent_width > 0 { page_room * 8 } else { 0 })?,
            pooled: queue.table(&pooled, if shape.key_width > 0 { page_room * 8 } else { 0 })?,
            position_room: position_room(spans, shape.page_rows),
        })
    }
}

/// Most positions of a span, in whole pages, rounded up so that it seldom moves.
pub(super) fn position_room(spans: &[DsaSpan<CudaBuffer>], page_rows: usize) -> usize {
    let longest = spans.iter().map(|span| (span.position + span.rows).div_ceil(page_rows.max(1))).max();
    longest.unwrap_or(1).max(1).next_power_of_two() * page_rows
}

/// A span's pages up to its last row.
fn pages<'a>(
    op: &'static str,
    span: &'a DsaSpan<CudaBuffer>,
    shape: PageShape,
) -> Result<&'a [Page<CudaBuffer>]> {
    let PageShape { kpool, page_rows, latent_width, key_width } = shape;
    require(op, kpool > 0 && page_rows > 0 && page_rows.is_multiple_of(kpool), || {
        format!("pages of {page_rows} positions for pools of {kpool}")
    })?;
    let last = span.position + span.rows;
    let needed = last.div_ceil(page_rows);
    require(op, span.pages.len() >= needed && u32::try_from(last).is_ok(), || {
        format!("{} pages of {page_rows} positions for {last} positions", span.pages.len())
    })?;
    for page in &span.pages[..needed] {
        if latent_width > 0 {
            page.latents.require(op, Element::Bf16, page_rows * latent_width)?;
        }
        if key_width > 0 {
            page.pooled.require(op, Element::Bf16, page_rows / kpool * key_width)?;
        }
    }
    Ok(&span.pages[..needed])
}

/// Refuses parts `(first row, rows)` outside a batch of `rows` rows, and those that share a row.
fn inside(op: &'static str, parts: impl Iterator<Item = (usize, usize)> + Clone, rows: usize) -> Result<()> {
    for (first, count) in parts.clone() {
        require(op, first + count <= rows, || {
            format!("a span of rows {first}..{} of {rows}", first + count)
        })?;
    }
    require_apart(op, parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_row_once_and_their_number_hangs_on_rows_and_parts_alone() {
        for rows in [vec![1, 1, 1], vec![33, 0, 7], vec![32, 64, 1], vec![0], vec![129]] {
            let total: usize = rows.iter().sum();
            let list = chunks(&rows, total, 32);
            assert_eq!(list.len(), total / 32 + rows.len());
            for (part, &count) in rows.iter().enumerate() {
                let firsts: Vec<u32> =
                    list.iter().filter(|chunk| chunk.part == part as u32).map(|chunk| chunk.first).collect();
                let expected: Vec<u32> = (0..count.max(1) as u32).step_by(32).collect();
                assert_eq!(firsts, expected);
            }
        }
    }

    #[test]
    fn layouts_are_those_of_the_kernels() {
        assert_eq!((size_of::<KdaPart>(), size_of::<Chunk>(), size_of::<DsaPart>()), (40, 8, 24));
    }
}
