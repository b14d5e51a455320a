//! What a record is made of: the arrays of one expert's three matrices, back to back.
//!
//! ```text
//! mode    arrays of each projection, in this order                       alignment
//! exl3    code I16 [in/16, out/16, 16K], rout F16 [out], rin F16 [in]    4096
//! affine  weight U32 [out, in·bits/32], scales, biases [out, in/group]   16384
//! fp8     weight F8_E4M3 [out, in], weight_scale_inv F32 [out/128, in/128]
//! plain   weight [out, in]
//! ```
//!
//! Gate, up, down; zeros up to the alignment. Sizes of EXL3 matrices are padded to multiples of 128.
//! Source: `reference/streaming-pack.md` sections 2 and 9, `exl3.md` section 1, `mlx-affine.md`, `fp8.md`.

use std::fmt;
use std::str::FromStr;

use crate::matrix::FP8_BLOCK;
use crate::safetensors::Dtype;

/// Side of a block of an EXL3 matrix.
const HADAMARD: usize = 128;
/// Side of an EXL3 tile.
pub(super) const TILE: usize = 16;

/// Sizes of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of one expert.
    pub inter: usize,
    /// Experts of a layer.
    pub experts: usize,
}

/// Which of an expert's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Projection {
    Gate,
    Up,
    Down,
}

impl Projection {
    /// All, in the order of a record.
    pub const ALL: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    /// The module's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// Outputs and inputs.
    pub fn sides(self, dims: &Dims) -> (usize, usize) {
        match self {
            Self::Gate | Self::Up => (dims.inter, dims.hidden),
            Self::Down => (dims.hidden, dims.inter),
        }
    }
}

/// Which array of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// EXL3's trellis.
    Code,
    /// EXL3's output signs and scales, `svh`.
    Rout,
    /// EXL3's input signs and scales, `suh`.
    Rin,
    /// Affine or FP8 codes, or plain numbers.
    Weight,
    /// Affine scales.
    Scales,
    /// Affine biases.
    Biases,
    /// FP8 factors.
    ScaleInv,
}

impl Part {
    /// Every part: the record's name, and the ends of a checkpoint's tensor names.
    const NAMES: [(Self, &'static str, &'static str); 7] = [
        (Self::Code, "code", "trellis"),
        (Self::Rout, "rout", "svh"),
        (Self::Rin, "rin", "suh"),
        (Self::Weight, "weight", "weight"),
        (Self::Scales, "scales", "scales"),
        (Self::Biases, "biases", "biases"),
        (Self::ScaleInv, "weight_scale_inv", "weight_scale_inv"),
    ];

    /// Its name in a record.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    /// The last component of the tensor's name in a checkpoint with a tensor for each expert.
    pub fn tensor(self) -> &'static str {
        Self::NAMES[self as usize].2
    }

    fn of_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, record, _)| *record == name).map(|(part, _, _)| *part)
    }

    /// The part of a tensor's last component.
    pub(super) fn of_tensor(end: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, _, tensor)| *tensor == end).map(|(part, _, _)| *part)
    }
}

/// One array of one matrix: `gate_proj.code`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Component {
    /// The matrix.
    pub projection: Projection,
    /// The array.
    pub part: Part,
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.projection.name(), self.part.name())
    }
}

impl FromStr for Component {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (projection, part) = text.split_once('.').ok_or(())?;
        let projection = Projection::ALL.into_iter().find(|p| p.name() == projection).ok_or(())?;
        Ok(Self { projection, part: Part::of_name(part).ok_or(())? })
    }
}

/// The formula that turns an EXL3 state into a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Codebook {
    ThreeInst,
    Mcg,
    Mul1,
}

impl Codebook {
    /// All.
    pub const ALL: [Self; 3] = [Self::ThreeInst, Self::Mcg, Self::Mul1];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::ThreeInst => "3inst",
            Self::Mcg => "mcg",
            Self::Mul1 => "mul1",
        }
    }

    /// Its multiplier: the value of the marker beside each trellis, where it has one.
    pub fn multiplier(self) -> u32 {
        match self {
            Self::ThreeInst => 89_226_354,
            Self::Mcg => 0xCBAC_1FED,
            Self::Mul1 => 0x83DC_D12D,
        }
    }

    /// The last component of its marker's name.
    pub fn marker(self) -> Option<&'static str> {
        match self {
            Self::ThreeInst => None,
            Self::Mcg => Some("mcg"),
            Self::Mul1 => Some("mul1"),
        }
    }
}

/// How the experts of a bank are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// EXL3 with one codebook.
    Exl3(Codebook),
    /// MLX affine.
    Affine,
    /// FP8 with factors of blocks.
    Fp8,
    /// Numbers without a scale.
    Plain,
}

impl Mode {
    /// Its name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exl3(_) => "exl3",
            Self::Affine => "affine",
            Self::Fp8 => "fp8",
            Self::Plain => "plain",
        }
    }

    /// What records start at multiples of.
    pub fn alignment(self) -> u64 {
        if self == Self::Affine { 16_384 } else { 4096 }
    }
}

/// How one matrix is stored, without its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixForm {
    /// EXL3.
    Exl3 {
        /// Bits of a weight, doubled: 5 is K = 2.5.
        half_bits: usize,
    },
    /// MLX affine.
    Affine {
        /// Bits of a code.
        bits: usize,
        /// Inputs that share a scale.
        group: usize,
        /// Type of scales and biases.
        kind: Dtype,
    },
    /// FP8 with factors of blocks of 128 × 128.
    Fp8,
    /// Numbers without a scale.
    Plain(Dtype),
}

/// An array's part, number type and shape.
type Array = (Part, Dtype, Vec<usize>);

impl MatrixForm {
    /// The form of arrays that were found for a matrix of `rows` outputs and `cols` inputs.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub(super) fn read(rows: usize, cols: usize, arrays: &[Array]) -> Result<Self, String> {
        let parts: Vec<Part> = arrays.iter().map(|(part, _, _)| *part).collect();
        let last = |at: usize| arrays[at].2.last().copied().unwrap_or(0);
        let form = match parts.as_slice() {
            [Part::Code, Part::Rout, Part::Rin] => Self::Exl3 { half_bits: last(0) / (TILE / 2) },
            [Part::Weight, Part::Scales, Part::Biases] => Self::Affine {
                bits: last(0).saturating_mul(32).checked_div(cols).unwrap_or(0),
                group: cols.checked_div(last(1)).unwrap_or(0),
                kind: arrays[1].1,
            },
            [Part::Weight, Part::ScaleInv] => Self::Fp8,
            [Part::Weight] => Self::Plain(arrays[0].1),
            _ => {
                let names = parts.iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
                return Err(format!("its arrays are {names}, which is no form that Flint reads"));
            }
        };
        form.check_width()?;
        for ((part, dtype, shape), (_, other, expected)) in arrays.iter().zip(form.arrays(rows, cols)) {
            if *dtype != other || *shape != expected {
                let name = part.name();
                return Err(format!(
                    "{name} is {} {shape:?}, but the model's sizes and {form} ask for {} {expected:?}",
                    dtype.name(),
                    other.name()
                ));
            }
        }
        Ok(form)
    }

    /// Refuses widths that no decoder has.
    fn check_width(self) -> Result<(), String> {
        let known = match self {
            Self::Exl3 { half_bits } => is_exl3_width(half_bits),
            Self::Affine { bits, group, kind } => {
                matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128) && kind.plain().is_some()
            }
            Self::Fp8 => true,
            Self::Plain(dtype) => dtype.plain().is_some(),
        };
        if known { Ok(()) } else { Err(format!("{self} is no width that Flint reads")) }
    }

    /// The arrays of a matrix of `rows` outputs and `cols` inputs, in the order of a record.
    pub(super) fn arrays(self, rows: usize, cols: usize) -> Vec<Array> {
        match self {
            Self::Exl3 { half_bits } => {
                let (rows, cols) = (rows.next_multiple_of(HADAMARD), cols.next_multiple_of(HADAMARD));
                vec![
                    (Part::Code, Dtype::I16, vec![cols / TILE, rows / TILE, TILE / 2 * half_bits]),
                    (Part::Rout, Dtype::F16, vec![rows]),
                    (Part::Rin, Dtype::F16, vec![cols]),
                ]
            }
            Self::Affine { bits, group, kind } => vec![
                (Part::Weight, Dtype::U32, vec![rows, cols * bits / 32]),
                (Part::Scales, kind, vec![rows, cols / group]),
                (Part::Biases, kind, vec![rows, cols / group]),
            ],
            Self::Fp8 => vec![
                (Part::Weight, Dtype::F8E4m3, vec![rows, cols]),
                (Part::ScaleInv, Dtype::F32, vec![rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)]),
            ],
            Self::Plain(kind) => vec![(Part::Weight, kind, vec![rows, cols])],
        }
    }

    /// Bits of a weight, scales apart: what a manifest calls K.
    pub fn bits(self) -> f64 {
        match self {
            Self::Exl3 { half_bits } => half_bits as f64 / 2.0,
            Self::Affine { bits, .. } => bits as f64,
            Self::Fp8 => 8.0,
            Self::Plain(kind) => (kind.size() * 8) as f64,
        }
    }

    /// Whether a bank of this mode may hold it.
    pub(super) fn is_of(self, mode: Mode) -> bool {
        matches!(
            (self, mode),
            (Self::Exl3 { .. }, Mode::Exl3(_))
                | (Self::Affine { .. }, Mode::Affine)
                | (Self::Fp8, Mode::Fp8)
                | (Self::Plain(_), Mode::Plain)
        )
    }
}

/// Whether a width, doubled, is one of EXL3's: 1 to 8, and 1.5, 2.5, 3.5.
pub(super) fn is_exl3_width(half_bits: usize) -> bool {
    matches!(half_bits, 3 | 5 | 7) || (half_bits.is_multiple_of(2) && (2..=16).contains(&half_bits))
}

impl fmt::Display for MatrixForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exl3 { .. } => write!(f, "exl3 K={}", self.bits()),
            Self::Affine { bits, group, .. } => write!(f, "affine {bits}-bit, group {group}"),
            Self::Fp8 => f.write_str("fp8 e4m3, blocks of 128"),
            Self::Plain(kind) => write!(f, "plain {}", kind.name()),
        }
    }
}

/// One array of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which array.
    pub component: Component,
    /// Number type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// First byte, from the start of the record.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// What all experts of a layer are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordForm {
    /// Forms of gate, up and down.
    pub matrices: [MatrixForm; 3],
    /// The arrays, back to back.
    pub segments: Vec<Segment>,
    /// Bytes of all segments.
    pub logical_bytes: u64,
}

impl RecordForm {
    /// The record of these matrices.
    pub fn new(matrices: [MatrixForm; 3], dims: &Dims) -> Self {
        let mut segments = Vec::with_capacity(9);
        let mut offset = 0;
        for (projection, form) in Projection::ALL.into_iter().zip(matrices) {
            let (rows, cols) = projection.sides(dims);
            for (part, dtype, shape) in form.arrays(rows, cols) {
                let length = shape.iter().product::<usize>() as u64 * dtype.size() as u64;
                let component = Component { projection, part };
                segments.push(Segment { component, dtype, shape, offset, length });
                offset += length;
            }
        }
        Self { matrices, segments, logical_bytes: offset }
    }

    /// The record of arrays that were found, in the order of a record.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub(super) fn read(dims: &Dims, arrays: &[(Component, Dtype, Vec<usize>)]) -> Result<Self, String> {
        let mut matrices = [MatrixForm::Fp8; 3];
        for (slot, projection) in matrices.iter_mut().zip(Projection::ALL) {
            let of = arrays.iter().filter(|(component, _, _)| component.projection == projection);
            let found: Vec<Array> = of.map(|(c, dtype, shape)| (c.part, *dtype, shape.clone())).collect();
            let (rows, cols) = projection.sides(dims);
            *slot =
                MatrixForm::read(rows, cols, &found).map_err(|e| format!("{}: {e}", projection.name()))?;
        }
        let form = Self::new(matrices, dims);
        let order = form.segments.iter().map(|segment| segment.component);
        if order.eq(arrays.iter().map(|(component, _, _)| *component)) {
            Ok(form)
        } else {
            Err("its components do not stand in the order gate, up, down".to_owned())
        }
    }

    /// Bytes of a record with its padding.
    pub fn record_bytes(&self, alignment: u64) -> u64 {
        self.logical_bytes.next_multiple_of(alignment)
    }

    /// The matrices' forms in words: one where they are equal.
    pub fn label(&self) -> String {
        let [gate, up, down] = self.matrices;
        if gate == up && up == down { gate.to_string() } else { format!("gate {gate}; up {up}; down {down}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASE: Dims = Dims { hidden: 4096, inter: 2048, experts: 288 };

    #[test]
    fn records_of_the_release_have_the_documented_sizes() {
        for (half_bits, bytes) in [(4, 6_328_320), (5, 7_901_184), (6, 9_474_048), (8, 12_619_776)] {
            let form = RecordForm::new([MatrixForm::Exl3 { half_bits }; 3], &RELEASE);
            assert_eq!((form.logical_bytes, form.record_bytes(4096)), (bytes, bytes));
        }
        let affine = MatrixForm::Affine { bits: 4, group: 64, kind: Dtype::Bf16 };
        let affine = RecordForm::new([affine; 3], &RELEASE);
        assert_eq!(affine.record_bytes(16_384), 14_155_776);
        assert_eq!(RecordForm::new([MatrixForm::Fp8; 3], &RELEASE).logical_bytes, 25_171_968);
    }

    #[test]
    fn segments_of_three_bits_start_where_the_document_says() {
        let form = RecordForm::new([MatrixForm::Exl3 { half_bits: 6 }; 3], &RELEASE);
        let starts: Vec<u64> = form.segments.iter().map(|segment| segment.offset).collect();
        let expected =
            [0, 3_145_728, 3_149_824, 3_158_016, 6_303_744, 6_307_840, 6_316_032, 9_461_760, 9_469_952];
        assert_eq!(starts, expected);
        assert_eq!(form.segments[6].shape, [128, 256, 48]);
        assert_eq!(form.segments[7].component.to_string(), "down_proj.rout");
    }

    #[test]
    fn a_form_is_read_back_from_its_arrays() {
        let affine = |bits| MatrixForm::Affine { bits, group: 64, kind: Dtype::Bf16 };
        let forms = [
            [
                MatrixForm::Exl3 { half_bits: 5 },
                MatrixForm::Exl3 { half_bits: 6 },
                MatrixForm::Exl3 { half_bits: 4 },
            ],
            [affine(4), affine(4), affine(6)],
            [MatrixForm::Fp8; 3],
            [MatrixForm::Plain(Dtype::Bf16); 3],
        ];
        for matrices in forms {
            let form = RecordForm::new(matrices, &RELEASE);
            let arrays: Vec<_> =
                form.segments.iter().map(|s| (s.component, s.dtype, s.shape.clone())).collect();
            assert_eq!(RecordForm::read(&RELEASE, &arrays), Ok(form));
            let mut swapped = arrays.clone();
            swapped.swap(0, arrays.len() / 3);
            assert!(RecordForm::read(&RELEASE, &swapped).is_err());
        }
    }

    #[test]
    fn names_of_components_come_back() {
        for text in ["gate_proj.code", "up_proj.rin", "down_proj.weight_scale_inv"] {
            assert_eq!(text.parse::<Component>().unwrap().to_string(), text);
        }
        assert!("gate.code".parse::<Component>().is_err() && "gate_proj".parse::<Component>().is_err());
    }
}
