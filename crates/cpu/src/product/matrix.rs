//! An uploaded matrix: views of the checkpoint's bytes and the tree of each part.

use std::sync::{Arc, PoisonError, RwLock};

use flint_backend::{Error, Precision, Result};
use flint_weights::{Form, HostBytes, PlainType, QuantMatrix};

use super::layout::{Layout, Unit, code_factor, exact_in_bf16};
use crate::{Arithmetic, Cpu};

/// A handle of an uploaded matrix or stack. The weights stay where the checkpoint has them.
#[derive(Clone)]
pub struct CpuMatrix(Arc<Shared>);

struct Shared {
    outputs: usize,
    inputs: usize,
    members: usize,
    unit: Unit,
    /// Another stack takes its place when a slot is written.
    stack: RwLock<Arc<Stack>>,
}

/// Matrices of one shape, as they are at one moment.
pub(crate) struct Stack {
    /// Outputs of each member.
    pub(crate) outputs: usize,
    /// Inputs of each member.
    pub(crate) inputs: usize,
    /// A member without parts is an empty slot.
    pub(crate) members: Vec<Arc<Member>>,
}

/// One matrix: parts over one input, one below the other.
pub(crate) struct Member {
    pub(crate) parts: Vec<Part>,
    /// The distinct arrangements of the input that the parts ask for.
    pub(crate) views: Vec<View>,
    /// The distinct scales of inputs of trellises: `suh`.
    pub(crate) rotations: Vec<HostBytes>,
}

/// An arrangement of an input row: decoded order, and the groups whose sums the biases multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct View {
    pub(crate) layout: Layout,
    /// Inputs of a group, for forms with biases.
    pub(crate) group: Option<usize>,
    /// Rows that the part's kernels stream.
    pub(crate) stream: Reach,
    /// Index into [`Member::rotations`], for trellises.
    pub(crate) rotation: Option<usize>,
}

/// How many rows kernels take at once, and how many in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    pub(crate) tile: usize,
    pub(crate) rows: usize,
}

/// A run of outputs of one form.
pub(crate) struct Part {
    pub(crate) form: Form,
    /// The member's output that is this part's output 0.
    pub(crate) first_output: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    pub(crate) layout: Layout,
    /// What undoes [`code_factor`].
    pub(crate) scale_factor: f32,
    /// Index into [`Member::views`].
    pub(crate) view: usize,
}

impl std::fmt::Debug for CpuMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuMatrix({} × [{}, {}])", self.0.members, self.0.outputs, self.0.inputs)
    }
}

impl CpuMatrix {
    pub(crate) fn single(cpu: &Cpu, parts: &[QuantMatrix], precision: Precision) -> Result<Self> {
        let unit = preferred_unit(cpu, precision);
        let (outputs, inputs, member) = Member::new(unit, parts)?;
        Ok(Self::new(unit, outputs, inputs, vec![Arc::new(member)]))
    }

    fn new(unit: Unit, outputs: usize, inputs: usize, members: Vec<Arc<Member>>) -> Self {
        let count = members.len();
        let stack = RwLock::new(Arc::new(Stack { outputs, inputs, members }));
        Self(Arc::new(Shared { outputs, inputs, members: count, unit, stack }))
    }

    /// Empty slots for matrices like `like`.
    pub(crate) fn slots(cpu: &Cpu, like: &[QuantMatrix], slots: usize, precision: Precision) -> Result<Self> {
        let unit = preferred_unit(cpu, precision);
        let (outputs, inputs, _) = Member::new(unit, like)?;
        let empty = Arc::new(Member { parts: Vec::new(), views: Vec::new(), rotations: Vec::new() });
        Ok(Self::new(unit, outputs, inputs, vec![empty; slots]))
    }

    /// Puts a matrix into a slot. Calls that run keep the members that they started with.
    pub(crate) fn write_member(&self, slot: usize, parts: &[QuantMatrix]) -> Result<()> {
        let (outputs, inputs, member) = Member::new(self.0.unit, parts)?;
        if slot >= self.0.members || (outputs, inputs) != (self.0.outputs, self.0.inputs) {
            let name = parts.first().map_or("", |part| &part.name);
            let what = format!("{name} [{outputs}, {inputs}] into slot {slot} of {self:?}");
            return Err(Error::Shape { op: "write_member", what });
        }
        let mut stack = self.0.stack.write().unwrap_or_else(PoisonError::into_inner);
        let mut members = stack.members.clone();
        members[slot] = Arc::new(member);
        *stack = Arc::new(Stack { outputs, inputs, members });
        Ok(())
    }

    pub(crate) fn stack(cpu: &Cpu, members: &[Vec<QuantMatrix>], precision: Precision) -> Result<Self> {
        let unit = preferred_unit(cpu, precision);
        let mut shape = None;
        let mut uploaded = Vec::with_capacity(members.len());
        for (index, parts) in members.iter().enumerate() {
            let (outputs, inputs, member) = Member::new(unit, parts)?;
            let expected = *shape.get_or_insert((outputs, inputs));
            if expected != (outputs, inputs) {
                let name = parts.first().map_or("", |part| &part.name);
                let what = format!(
                    "{name}: member {index} of the stack is [{outputs}, {inputs}], the first is [{}, {}]",
                    expected.0, expected.1
                );
                return Err(Error::Shape { op: "upload_stack", what });
            }
            uploaded.push(Arc::new(member));
        }
        let Some((outputs, inputs)) = shape else {
            return Err(Error::Shape { op: "upload_stack", what: "a stack without members".into() });
        };
        Ok(Self::new(unit, outputs, inputs, uploaded))
    }

    /// Outputs of each member.
    pub fn outputs(&self) -> usize {
        self.0.outputs
    }

    /// Inputs of each member.
    pub fn inputs(&self) -> usize {
        self.0.inputs
    }

    /// Matrices of the stack; 1 for a single matrix.
    pub fn members(&self) -> usize {
        self.0.members
    }

    /// The members as they are now.
    pub(crate) fn stacked(&self) -> Arc<Stack> {
        self.0.stack.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn preferred_unit(cpu: &Cpu, precision: Precision) -> Unit {
    match (cpu.options().arithmetic, precision) {
        (Arithmetic::Dot, Precision::Product) => Unit::Dot,
        _ => Unit::Fma,
    }
}

impl Member {
    fn new(unit: Unit, parts: &[QuantMatrix]) -> Result<(usize, usize, Self)> {
        let Some(first) = parts.first() else {
            return Err(Error::Shape { op: "upload", what: "a matrix without parts".into() });
        };
        let inputs = first.cols;
        let mut member =
            Self { parts: Vec::with_capacity(parts.len()), views: Vec::new(), rotations: Vec::new() };
        let mut outputs = 0;
        for part in parts {
            check_form(part)?;
            part.check()?;
            if part.cols != inputs {
                let what = format!(
                    "{} has {} inputs, {} beside it has {inputs}; parts of one matrix share their input",
                    part.name, part.cols, first.name
                );
                return Err(Error::Shape { op: "upload", what });
            }
            // Codes that bf16 cannot hold keep fp32 products whatever the arithmetic.
            let unit = if exact_in_bf16(&part.form) { unit } else { Unit::Fma };
            let layout = Layout::of(unit, &part.form);
            let stream = stream_reach(unit, &part.form);
            let rotation = member.rotation(&part.form);
            let view = View { layout, group: affine_group(&part.form), stream, rotation };
            let index = member.views.iter().position(|known| *known == view).unwrap_or_else(|| {
                member.views.push(view);
                member.views.len() - 1
            });
            let form = part.form.clone();
            let scale_factor = code_factor(unit, &form).recip();
            member.parts.push(Part {
                form,
                first_output: outputs,
                outputs: part.rows,
                inputs,
                layout,
                scale_factor,
                view: index,
            });
            outputs += part.rows;
        }
        Ok((outputs, inputs, member))
    }

    /// The rotation of a trellis's inputs. Cuts of one trellis share theirs.
    fn rotation(&mut self, form: &Form) -> Option<usize> {
        let Form::Exl3(exl3) = form else { return None };
        let suh = exl3.input_scales.as_slice();
        let known = self.rotations.iter().position(|known| known.as_slice() == suh);
        Some(known.unwrap_or_else(|| {
            self.rotations.push(exl3.input_scales.clone());
            self.rotations.len() - 1
        }))
    }
}

/// How far the kernels that stream a form reach.
fn stream_reach(unit: Unit, form: &Form) -> Reach {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = super::stream::kernels(unit, form) {
        return Reach { tile: kernels.tiles.len(), rows: kernels.most_rows };
    }
    let _ = (unit, form);
    Reach { tile: 0, rows: 0 }
}

fn affine_group(form: &Form) -> Option<usize> {
    match form {
        Form::Affine { group, .. } => Some(*group),
        Form::Plain { .. } | Form::Fp8Block { .. } | Form::Exl3(_) => None,
    }
}

/// Widths and groups that the kernels read.
fn check_form(matrix: &QuantMatrix) -> Result<()> {
    let unsupported = |what: String| {
        let remedy = "choose a checkpoint with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128";
        Err(Error::Unsupported { name: matrix.name.clone(), backend: "cpu", what, remedy })
    };
    if let Form::Affine { bits, group, .. } = &matrix.form {
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) || !matches!(group, 32 | 64 | 128) {
            return unsupported(format!("affine codes of {bits} bits in groups of {group}"));
        }
        if !matrix.cols.is_multiple_of(*group) {
            return unsupported(format!("{} inputs in groups of {group}", matrix.cols));
        }
    }
    Ok(())
}

impl Part {
    /// Bytes of an output's codes or numbers.
    pub(crate) fn row_bytes(&self) -> usize {
        match &self.form {
            Form::Plain { kind, .. } => self.inputs * kind.size(),
            Form::Affine { bits, .. } => self.inputs * usize::from(*bits) / 8,
            Form::Fp8Block { .. } => self.inputs,
            // Outputs of a trellis have no codes of their own.
            Form::Exl3(_) => 0,
        }
    }

    /// Bytes of a block's codes or numbers.
    pub(crate) fn block_bytes(&self) -> usize {
        let bits = match &self.form {
            Form::Plain { kind, .. } => kind.size() * 8,
            Form::Affine { bits, .. } => usize::from(*bits),
            Form::Fp8Block { .. } => 8,
            Form::Exl3(_) => 0,
        };
        super::layout::BLOCK * bits / 8
    }

    /// All codes or numbers.
    pub(crate) fn codes(&self) -> &[u8] {
        match &self.form {
            Form::Plain { values, .. } => values.as_slice(),
            Form::Affine { codes, .. } | Form::Fp8Block { codes, .. } => codes.as_slice(),
            Form::Exl3(exl3) => exl3.trellis.as_slice(),
        }
    }

    /// How the scales are stored.
    pub(crate) fn scales(&self) -> Option<Scales<'_>> {
        match &self.form {
            Form::Plain { .. } | Form::Exl3(_) => None,
            Form::Affine { group, kind, scales, biases, .. } => Some(Scales {
                kind: *kind,
                group: *group,
                per_row: self.inputs / group,
                rows_per_scale: 1,
                first_row: 0,
                numbers: scales.as_slice(),
                biases: Some(biases.as_slice()),
            }),
            Form::Fp8Block { scales, first_row, .. } => Some(Scales {
                kind: PlainType::F32,
                group: flint_weights::matrix::FP8_BLOCK,
                per_row: self.inputs.div_ceil(flint_weights::matrix::FP8_BLOCK),
                rows_per_scale: flint_weights::matrix::FP8_BLOCK,
                first_row: *first_row,
                numbers: scales.as_slice(),
                biases: None,
            }),
        }
    }
}

/// Scales (and biases) of a part: one for `group` inputs and `rows_per_scale` outputs.
#[derive(Clone, Copy)]
pub(crate) struct Scales<'a> {
    pub(crate) kind: PlainType,
    pub(crate) group: usize,
    /// Scales of an output.
    pub(crate) per_row: usize,
    rows_per_scale: usize,
    first_row: usize,
    numbers: &'a [u8],
    biases: Option<&'a [u8]>,
}

impl<'a> Scales<'a> {
    /// The scales of an output, in stored form.
    pub(crate) fn row(&self, output: usize) -> &'a [u8] {
        self.cut(self.numbers, output)
    }

    /// The biases of an output, in stored form.
    pub(crate) fn bias_row(&self, output: usize) -> Option<&'a [u8]> {
        self.biases.map(|biases| self.cut(biases, output))
    }

    /// Bytes from one output's scales to the next, inside [`outputs_in_step`](Self::outputs_in_step).
    pub(crate) fn stride(&self) -> usize {
        if self.rows_per_scale == 1 { self.per_row * self.kind.size() } else { 0 }
    }

    /// Outputs from `output` on whose scales are [`stride`](Self::stride) apart.
    pub(crate) fn outputs_in_step(&self, output: usize) -> usize {
        match self.rows_per_scale {
            1 => usize::MAX,
            rows => rows - (self.first_row + output) % rows,
        }
    }

    fn cut(&self, all: &'a [u8], output: usize) -> &'a [u8] {
        let bytes = self.per_row * self.kind.size();
        let row = (self.first_row + output) / self.rows_per_scale;
        &all[row * bytes..(row + 1) * bytes]
    }
}
