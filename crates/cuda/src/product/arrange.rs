//! Upload: a matrix's bytes go to the device as they are, where kernels put them into units, bit for bit.

use flint_backend::{Error, Result};
use flint_weights::{Form, PlainType, QuantMatrix};

use super::table::{Encoding, RowPart, TILE, UNIT, UnitPart};
use crate::driver::Memory;
use crate::kernels::Kernel;
use crate::queue::{Args, Grid, Queue};

static ARRANGE_CODES: Kernel = Kernel::new("product_arrange_codes", "product_arrange.cu");
static ARRANGE_SCALES: Kernel = Kernel::new("product_arrange_scales", "product_arrange.cu");

/// Bytes of codes that are staged on the device at once, about.
const STAGED: usize = 64 << 20;
/// Alignment of a member's arrays.
const ALIGNED: usize = 256;

/// Memory of an upload (freed behind the kernels that read it), and where its matrices' arrays begin.
struct Staged {
    memory: Memory,
    biases: usize,
    codes: usize,
}

fn threads(total: usize) -> Grid {
    Grid { blocks: [total.div_ceil(256) as u32, 1, 1], threads: 256, shared: 0 }
}

/// Uploads part `part` of every member in units.
pub(crate) fn upload_units(
    queue: &mut Queue,
    members: &[&QuantMatrix],
    encoding: Encoding,
    first_output: usize,
    kept: &mut Vec<Memory>,
) -> Result<UnitPart> {
    let Some(first) = members.first() else {
        return Err(Error::Shape { op: "upload", what: "a part without members".into() });
    };
    let (tiles, units) = (first.rows.div_ceil(TILE), first.cols.div_ceil(UNIT));
    let entries = encoding.entries(units);
    let code_stride = tiles * units * encoding.unit_bytes();
    let scale_stride = tiles * entries * encoding.entry_bytes();
    let codes = queue.reserve((members.len() * code_stride).max(ALIGNED), &first.name)?;
    let scales = queue.reserve((members.len() * scale_stride).max(ALIGNED), &first.name)?;
    let staged = stage(queue, first, encoding)?;
    for (index, member) in members.iter().enumerate() {
        arrange_scales(queue, member, encoding, &staged, scales.at(index * scale_stride))?;
        arrange_codes(queue, member, encoding, &staged, codes.at(index * code_stride))?;
    }
    let part = UnitPart {
        codes: codes.at(0),
        scales: scales.at(0),
        code_stride: code_stride as u64,
        scale_stride: scale_stride as u64,
        encoding: encoding.number(),
        outputs: first.rows as u32,
        first_output: first_output as u32,
        tiles: tiles as u32,
        entries: entries as u32,
        share: encoding.share() as u32,
    };
    kept.extend([codes, scales]);
    Ok(part)
}

/// Bytes of a row of codes.
fn row_bytes(matrix: &QuantMatrix, encoding: Encoding) -> usize {
    matrix.cols * encoding.bits() / 8
}

/// Rows whose codes are staged at once: whole tiles.
fn staged_rows(matrix: &QuantMatrix, encoding: Encoding) -> usize {
    (STAGED / row_bytes(matrix, encoding).max(1))
        .next_multiple_of(TILE)
        .min(matrix.rows.next_multiple_of(TILE))
}

fn stage(queue: &mut Queue, matrix: &QuantMatrix, encoding: Encoding) -> Result<Staged> {
    let numbers = match &matrix.form {
        Form::Plain { .. } | Form::Exl3(_) => 0,
        Form::Affine { scales, .. } | Form::Fp8Block { scales, .. } => scales.len(),
    };
    // Members of an FP8 stack may be cut at different rows of a block.
    let numbers = (numbers + matrix.cols.div_ceil(128) * 8).next_multiple_of(ALIGNED);
    let codes = staged_rows(matrix, encoding) * row_bytes(matrix, encoding);
    let memory = queue.reserve(2 * numbers + codes, "an upload")?;
    Ok(Staged { memory, biases: numbers, codes: 2 * numbers })
}

fn arrange_scales(
    queue: &mut Queue,
    matrix: &QuantMatrix,
    encoding: Encoding,
    staged: &Staged,
    to: u64,
) -> Result<()> {
    let (kind, groups, first_row) = match &matrix.form {
        Form::Plain { .. } | Form::Exl3(_) => return Ok(()),
        Form::Affine { group, kind, scales, biases, .. } => {
            queue.fill(&staged.memory, 0, scales.as_slice())?;
            queue.fill(&staged.memory, staged.biases, biases.as_slice())?;
            let number = match kind {
                PlainType::Bf16 => 0,
                PlainType::F16 => 1,
                PlainType::F32 => 2,
            };
            (number, matrix.cols / group, 0)
        }
        Form::Fp8Block { scales, first_row, .. } => {
            queue.fill(&staged.memory, 0, scales.as_slice())?;
            (3, matrix.cols.div_ceil(128), *first_row)
        }
    };
    let entries = encoding.entries(matrix.cols.div_ceil(UNIT));
    let total = matrix.rows.div_ceil(TILE) * entries * TILE;
    let args = Args::new()
        .address(to)
        .address(staged.memory.at(0))
        .address(staged.memory.at(staged.biases))
        .u32(kind)
        .u32(matrix.rows)
        .u32(groups)
        .u32(entries)
        .u32(first_row)
        .u64(total as u64);
    queue.launch(&ARRANGE_SCALES, threads(total), args)
}

fn arrange_codes(
    queue: &mut Queue,
    matrix: &QuantMatrix,
    encoding: Encoding,
    staged: &Staged,
    to: u64,
) -> Result<()> {
    let Some(codes) = codes(&matrix.form) else { return Ok(()) };
    let (row, units) = (row_bytes(matrix, encoding), matrix.cols.div_ceil(UNIT));
    let step = staged_rows(matrix, encoding);
    for start in (0..matrix.rows).step_by(step) {
        let rows = step.min(matrix.rows - start);
        queue.fill(&staged.memory, staged.codes, &codes.as_slice()[start * row..(start + rows) * row])?;
        let total = rows.div_ceil(TILE) * units * 32;
        let args = Args::new()
            .address(to + (start / TILE * units * encoding.unit_bytes()) as u64)
            .address(staged.memory.at(staged.codes))
            .u32(encoding.bits())
            .u32(rows)
            .u32(matrix.cols)
            .u64(total as u64);
        queue.launch(&ARRANGE_CODES, threads(total), args)?;
    }
    Ok(())
}

/// Codes or numbers; none of a trellis, which is refused at upload.
fn codes(form: &Form) -> Option<&flint_weights::HostBytes> {
    match form {
        Form::Plain { values: codes, .. } | Form::Affine { codes, .. } | Form::Fp8Block { codes, .. } => {
            Some(codes)
        }
        Form::Exl3(_) => None,
    }
}

/// Uploads a part of every member row beside row, as it is stored.
pub(crate) fn upload_rows(
    queue: &mut Queue,
    members: &[&QuantMatrix],
    first_output: usize,
    kept: &mut Vec<Memory>,
) -> Result<RowPart> {
    let Some(first) = members.first() else {
        return Err(Error::Shape { op: "upload", what: "a part without members".into() });
    };
    let mut part = RowPart {
        outputs: first.rows as u32,
        first_output: first_output as u32,
        ..bytemuck::Zeroable::zeroed()
    };
    let mut array = |select: &dyn Fn(&Form) -> Option<&flint_weights::HostBytes>| -> Result<(u64, u64)> {
        let longest = members.iter().filter_map(|m| select(&m.form)).map(flint_weights::HostBytes::len).max();
        let Some(longest) = longest else { return Ok((0, 0)) };
        let stride = longest.next_multiple_of(ALIGNED).max(ALIGNED);
        let memory = queue.reserve(members.len() * stride, &first.name)?;
        for (index, member) in members.iter().enumerate() {
            if let Some(bytes) = select(&member.form) {
                queue.fill(&memory, index * stride, bytes.as_slice())?;
            }
        }
        let address = memory.at(0);
        kept.push(memory);
        Ok((address, stride as u64))
    };
    (part.codes, part.code_stride) = array(&codes)?;
    (part.scales, part.scale_stride) = array(&|form| match form {
        Form::Affine { scales, .. } | Form::Fp8Block { scales, .. } => Some(scales),
        Form::Plain { .. } | Form::Exl3(_) => None,
    })?;
    (part.biases, _) = array(&|form| match form {
        Form::Affine { biases, .. } => Some(biases),
        _ => None,
    })?;
    let number = |kind: PlainType| match kind {
        PlainType::Bf16 => 0,
        PlainType::F16 => 1,
        PlainType::F32 => 2,
    };
    match &first.form {
        Form::Exl3(_) => {}
        Form::Plain { kind, .. } => part.form = number(*kind),
        Form::Fp8Block { first_row, .. } => (part.form, part.first_row) = (3, *first_row as u32),
        Form::Affine { bits, group, kind, .. } => {
            (part.form, part.numbers) = (4, number(*kind));
            (part.bits, part.group) = (u32::from(*bits), *group as u32);
        }
    }
    Ok(part)
}
