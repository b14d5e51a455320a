//! Uploaded matrices.

use std::sync::Arc;

use flint_backend::{Error, Precision, Result};
use flint_weights::{Form, PlainType, QuantMatrix};

use crate::driver::Memory;
use crate::product::arrange::{upload_rows, upload_units};
use crate::product::table::{Encoding, Family, RowPart, UnitPart};
use crate::queue::Queue;

/// A handle of a matrix or a stack on the device.
#[derive(Clone)]
pub struct CudaMatrix(Arc<Stack>);

/// Matrices of one shape; members agree in the form of each part.
pub(crate) struct Stack {
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) members: usize,
    /// Parts in units, by the kernels that take them.
    pub(crate) units: Vec<Units>,
    /// Parts in rows.
    pub(crate) rows: Option<RowParts>,
    plain: Option<Plain>,
    /// The parts' memory, and the tables'.
    memory: Vec<Memory>,
}

/// Parts of one family.
pub(crate) struct Units {
    pub(crate) family: Family,
    /// Device address of the table.
    pub(crate) table: u64,
    pub(crate) parts: Vec<(Encoding, UnitPart)>,
}

/// Parts whose products are fp32.
pub(crate) struct RowParts {
    /// Device address of the table.
    pub(crate) table: u64,
    pub(crate) count: usize,
}

/// A matrix of plain numbers, row beside row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain {
    /// Device address of the first number.
    pub(crate) address: u64,
    /// Their type.
    pub(crate) numbers: PlainType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl std::fmt::Debug for CudaMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMatrix({} × [{}, {}])", self.0.members, self.0.outputs, self.0.inputs)
    }
}

impl CudaMatrix {
    /// Uploads parts over one input.
    pub(crate) fn single(queue: &mut Queue, parts: &[QuantMatrix], precision: Precision) -> Result<Self> {
        Self::stack(queue, std::slice::from_ref(&parts.to_vec()), precision)
    }

    /// Uploads a stack.
    pub(crate) fn stack(
        queue: &mut Queue,
        members: &[Vec<QuantMatrix>],
        precision: Precision,
    ) -> Result<Self> {
        let (outputs, inputs) = check_members(members)?;
        let mut stack = Stack {
            outputs,
            inputs,
            members: members.len(),
            units: Vec::new(),
            rows: None,
            plain: None,
            memory: Vec::new(),
        };
        let (mut first_output, mut row_parts) = (0, Vec::new());
        for part in 0..members[0].len() {
            let column: Vec<&QuantMatrix> = members.iter().map(|member| &member[part]).collect();
            let encoding = Encoding::of(&column[0].form).filter(|_| precision == Precision::Product);
            if let Some(encoding) = encoding {
                let unit = upload_units(queue, &column, encoding, first_output, &mut stack.memory)?;
                stack.add_unit(encoding, unit);
            } else {
                row_parts.push(upload_rows(queue, &column, first_output, &mut stack.memory)?);
            }
            first_output += column[0].rows;
        }
        stack.plain = plain_of(members, &row_parts);
        stack.write_tables(queue, &row_parts)?;
        Ok(Self(Arc::new(stack)))
    }

    pub(crate) fn stacked(&self) -> &Stack {
        &self.0
    }

    /// The numbers of a single matrix of one plain part that stays in rows ([`Precision::Full`], or no bf16).
    pub(crate) fn plain(&self) -> Option<Plain> {
        self.0.plain
    }
}

impl Stack {
    fn add_unit(&mut self, encoding: Encoding, part: UnitPart) {
        let family = encoding.family();
        match self.units.iter_mut().find(|units| units.family == family) {
            Some(units) => units.parts.push((encoding, part)),
            None => self.units.push(Units { family, table: 0, parts: vec![(encoding, part)] }),
        }
    }

    fn write_tables(&mut self, queue: &mut Queue, row_parts: &[RowPart]) -> Result<()> {
        for units in &mut self.units {
            let parts: Vec<UnitPart> = units.parts.iter().map(|(_, part)| *part).collect();
            let memory = table(queue, bytemuck::cast_slice(&parts))?;
            units.table = memory.at(0);
            self.memory.push(memory);
        }
        if !row_parts.is_empty() {
            let memory = table(queue, bytemuck::cast_slice(row_parts))?;
            self.rows = Some(RowParts { table: memory.at(0), count: row_parts.len() });
            self.memory.push(memory);
        }
        Ok(())
    }
}

fn table(queue: &mut Queue, bytes: &[u8]) -> Result<Memory> {
    let memory = queue.reserve(bytes.len(), "a table of parts")?;
    queue.fill(&memory, 0, bytes)?;
    Ok(memory)
}

fn plain_of(members: &[Vec<QuantMatrix>], row_parts: &[RowPart]) -> Option<Plain> {
    let ([parts], [row_part]) = (members, row_parts) else { return None };
    let [QuantMatrix { form: Form::Plain { kind, .. }, rows, cols, .. }] = parts.as_slice() else {
        return None;
    };
    Some(Plain { address: row_part.codes, numbers: *kind, rows: *rows, cols: *cols })
}

/// Checks what the kernels take for granted; returns outputs and inputs of a member.
fn check_members(members: &[Vec<QuantMatrix>]) -> Result<(usize, usize)> {
    let refused = |what: String| Err(Error::Shape { op: "upload", what });
    let Some((first, inputs)) = members.first().and_then(|parts| Some((parts, parts.first()?.cols))) else {
        return refused("a matrix or a stack without parts".into());
    };
    for parts in members {
        if parts.len() != first.len() {
            return refused(format!(
                "{}: members of {} and {} parts",
                first[0].name,
                first.len(),
                parts.len()
            ));
        }
        for (part, model) in parts.iter().zip(first) {
            check_form(part)?;
            part.check()?;
            if part.cols != inputs || part.rows != model.rows {
                return refused(format!(
                    "{} is [{}, {}], {} beside it [{}, {inputs}]",
                    part.name, part.rows, part.cols, model.name, model.rows
                ));
            }
            if !same_form(&part.form, &model.form) {
                return Err(Error::Unsupported {
                    name: part.name.clone(),
                    backend: "cuda",
                    what: format!("a stack in which it is encoded otherwise than {}", model.name),
                    remedy: "quantise all experts of a layer alike",
                });
            }
        }
    }
    Ok((first.iter().map(|part| part.rows).sum(), inputs))
}

fn same_form(a: &Form, b: &Form) -> bool {
    match (a, b) {
        (Form::Plain { kind: a, .. }, Form::Plain { kind: b, .. }) => a == b,
        (Form::Fp8Block { first_row: a, .. }, Form::Fp8Block { first_row: b, .. }) => a == b,
        (Form::Affine { bits, group, kind, .. }, Form::Affine { bits: b, group: g, kind: k, .. }) => {
            bits == b && group == g && kind == k
        }
        _ => false,
    }
}

/// Widths and groups that the kernels read.
fn check_form(matrix: &QuantMatrix) -> Result<()> {
    if matches!(matrix.form, Form::Exl3(_)) {
        return Err(Error::Unsupported {
            name: matrix.name.clone(),
            backend: "cuda",
            what: "the EXL3 encoding".into(),
            remedy: "use --device cpu, or an MLX affine, FP8 or BF16 checkpoint",
        });
    }
    let Form::Affine { bits, group, .. } = &matrix.form else { return Ok(()) };
    let known = matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) && matches!(group, 32 | 64 | 128);
    if known && matrix.cols.is_multiple_of(*group) {
        return Ok(());
    }
    Err(Error::Unsupported {
        name: matrix.name.clone(),
        backend: "cuda",
        what: format!("{} inputs of affine codes of {bits} bits in groups of {group}", matrix.cols),
        remedy: "choose a checkpoint with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128",
    })
}
