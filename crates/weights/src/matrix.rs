//! A matrix on the host, in the bytes that the checkpoint stores.
//!
//! [`QuantMatrix`] is what a backend receives at upload. Its arrays are views of the mapped files ([`HostBytes`]):
//! making one copies nothing. Rows can be cut exactly, since no format shares numbers between rows of a cut
//! (FP8 blocks span rows, so the cut remembers where it starts inside the first block).

use std::ops::Range;
use std::sync::Arc;

use crate::exl3::{self, Exl3};
use crate::{Error, Result};

/// Shared read-only bytes: part of a mapped file, of the binary, or of a heap block.
#[derive(Clone)]
pub struct HostBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
}

impl HostBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let len = (*owner).as_ref().len();
        Self { owner, start: 0, len }
    }

    /// Takes a vector as the owner.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }

    /// Part `range` of these bytes, or `None` when it leaves them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        (range.start <= range.end && range.end <= self.len).then(|| Self {
            owner: Arc::clone(&self.owner),
            start: self.start + range.start,
            len: range.end - range.start,
        })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.start..self.start + self.len]
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl std::fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBytes({} bytes)", self.len)
    }
}

/// A number type without a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PlainType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
}

impl PlainType {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The number at index `index` of little-endian `bytes`, exactly, as fp32.
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            Self::F32 => {
                let at = index * 4;
                f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            }
            Self::F16 => half::f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
            Self::Bf16 => half::bf16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
        }
    }
}

/// How the numbers of a matrix are stored. All arrays are row-major and little-endian, without padding.
#[derive(Clone, Debug)]
pub enum Form {
    /// `[rows, cols]` numbers.
    Plain {
        /// Their type.
        kind: PlainType,
        /// The numbers.
        values: HostBytes,
    },
    /// MLX affine: `w = scale · code + bias` with one pair for each `group` inputs.
    ///
    /// A row of codes is one stream of bits, lowest bit first: code `i` has bits `[i·bits, (i+1)·bits)`.
    /// Source: `reference/mlx-affine.md`, checked against mlx 0.32.4.
    Affine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Inputs that share a scale: 32, 64 or 128.
        group: usize,
        /// Type of `scales` and `biases`.
        kind: PlainType,
        /// `[rows, cols · bits / 8]` bytes.
        codes: HostBytes,
        /// `[rows, cols / group]`.
        scales: HostBytes,
        /// `[rows, cols / group]`.
        biases: HostBytes,
    },
    /// FP8 E4M3 with one fp32 factor for each block of 128 × 128: `w = e4m3(code) · scale`.
    Fp8Block {
        /// `[rows, cols]` bytes.
        codes: HostBytes,
        /// `[⌈(first_row + rows) / 128⌉, ⌈cols / 128⌉]` fp32; row `r` uses scale row `(first_row + r) / 128`.
        scales: HostBytes,
        /// Where row 0 lies inside the first block row (0 to 127; not 0 only after a cut).
        first_row: usize,
    },
    /// EXL3: a trellis between two Hadamard transforms.
    Exl3(Exl3),
}

/// One matrix `[rows, cols]` = `[out, in]`: a product with it is `y[rows] = W · x[cols]`.
#[derive(Clone, Debug)]
pub struct QuantMatrix {
    /// Canonical module name, for messages (`layers.7.self_attn.q_a_proj`).
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The numbers.
    pub form: Form,
}

/// Rows and columns of an FP8 block.
pub const FP8_BLOCK: usize = 128;

impl QuantMatrix {
    /// Checks that every array has the size that shape and form ask for.
    pub fn check(&self) -> Result<()> {
        let check = |what, found: usize, expected: usize| {
            if found == expected {
                Ok(())
            } else {
                Err(Error::WrongSize { name: self.name.clone(), what, found, expected })
            }
        };
        match &self.form {
            Form::Plain { kind, values } => {
                check("weight", values.len(), self.rows * self.cols * kind.size())
            }
            Form::Affine { bits, group, kind, codes, scales, biases } => {
                let pairs = self.rows * (self.cols / group) * kind.size();
                check("weight", codes.len(), self.rows * self.cols * usize::from(*bits) / 8)?;
                check("scales", scales.len(), pairs)?;
                check("biases", biases.len(), pairs)
            }
            Form::Fp8Block { codes, scales, first_row } => {
                check("weight", codes.len(), self.rows * self.cols)?;
                let blocks = (first_row + self.rows).div_ceil(FP8_BLOCK) * self.cols.div_ceil(FP8_BLOCK);
                check("weight_scale_inv", scales.len(), blocks * 4)
            }
            Form::Exl3(exl3) => {
                let padded = (exl3.first_row + self.rows).next_multiple_of(exl3::BLOCK);
                check("inputs of the trellis", exl3.inputs, self.cols.next_multiple_of(exl3::BLOCK))?;
                check(
                    "outputs of the trellis",
                    exl3.outputs,
                    exl3.outputs.next_multiple_of(exl3::BLOCK).max(padded),
                )?;
                let tiles = exl3.inputs / exl3::TILE * (exl3.outputs / exl3::TILE);
                check("trellis", exl3.trellis.len(), tiles * exl3.rate.tile_bytes())?;
                check("suh", exl3.input_scales.len(), exl3.inputs * 2)?;
                check("svh", exl3.output_scales.len(), exl3.outputs * 2)
            }
        }
    }

    /// Bytes of all arrays; of a cut of a trellis, its rows' share.
    pub fn bytes(&self) -> usize {
        match &self.form {
            Form::Plain { values, .. } => values.len(),
            Form::Affine { codes, scales, biases, .. } => codes.len() + scales.len() + biases.len(),
            Form::Fp8Block { codes, scales, .. } => codes.len() + scales.len(),
            Form::Exl3(exl3) => exl3_bytes(exl3.rate, exl3.inputs, self.rows),
        }
    }

    /// Rows `range` as a matrix of its own, sharing the bytes; `None` when the range leaves the matrix.
    pub fn cut_rows(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.rows {
            return None;
        }
        let part = |bytes: &HostBytes| {
            let row = bytes.len() / self.rows.max(1);
            bytes.slice(range.start * row..range.end * row)
        };
        let form = match &self.form {
            Form::Plain { kind, values } => Form::Plain { kind: *kind, values: part(values)? },
            Form::Affine { bits, group, kind, codes, scales, biases } => Form::Affine {
                bits: *bits,
                group: *group,
                kind: *kind,
                codes: part(codes)?,
                scales: part(scales)?,
                biases: part(biases)?,
            },
            Form::Fp8Block { codes, scales, first_row } => {
                let (start, end) = (first_row + range.start, first_row + range.end);
                let row = self.cols.div_ceil(FP8_BLOCK) * 4;
                Form::Fp8Block {
                    codes: part(codes)?,
                    scales: scales.slice(start / FP8_BLOCK * row..end.div_ceil(FP8_BLOCK) * row)?,
                    first_row: start % FP8_BLOCK,
                }
            }
            Form::Exl3(exl3) => Form::Exl3(Exl3 { first_row: exl3.first_row + range.start, ..exl3.clone() }),
        };
        Some(Self { name: self.name.clone(), rows: range.end - range.start, cols: self.cols, form })
    }

    /// The exact value of every weight, row-major, in float64. The oracle of tests and of bounds.
    pub fn decode_f64(&self) -> Vec<f64> {
        match &self.form {
            // Rows of a trellis come 128 at a time.
            Form::Exl3(exl3) => exl3.decode_f64(0, self.rows, self.cols),
            _ => (0..self.rows).flat_map(|row| self.decode_row_f64(row)).collect(),
        }
    }

    /// Row `row` of [`decode_f64`](Self::decode_f64).
    pub fn decode_row_f64(&self, row: usize) -> Vec<f64> {
        let cols = self.cols;
        match &self.form {
            Form::Plain { kind, values } => {
                (0..cols).map(|col| f64::from(kind.read(values.as_slice(), row * cols + col))).collect()
            }
            Form::Affine { bits, group, kind, codes, scales, biases } => {
                let width = usize::from(*bits);
                let stream = &codes.as_slice()[row * cols * width / 8..(row + 1) * cols * width / 8];
                (0..cols)
                    .map(|col| {
                        let pair = row * (cols / group) + col / group;
                        let scale = f64::from(kind.read(scales.as_slice(), pair));
                        let bias = f64::from(kind.read(biases.as_slice(), pair));
                        scale * f64::from(affine_code(stream, width, col)) + bias
                    })
                    .collect()
            }
            Form::Fp8Block { codes, scales, first_row } => {
                let blocks = cols.div_ceil(FP8_BLOCK);
                (0..cols)
                    .map(|col| {
                        let block = (first_row + row) / FP8_BLOCK * blocks + col / FP8_BLOCK;
                        let scale = f64::from(PlainType::F32.read(scales.as_slice(), block));
                        f64::from(e4m3(codes.as_slice()[row * cols + col])) * scale
                    })
                    .collect()
            }
            Form::Exl3(exl3) => exl3.decode_f64(row, 1, cols),
        }
    }
}

/// Bytes of `rows` outputs of a trellis with their scales: whole blocks of 128 where a matrix is padded.
pub(crate) fn exl3_bytes(rate: exl3::Rate, inputs: usize, rows: usize) -> usize {
    inputs * rows.next_multiple_of(exl3::BLOCK) * rate.halves() / 16
        + 2 * (inputs + rows.next_multiple_of(exl3::BLOCK))
}

/// Code `index` of a row's bit stream with `bits` bits a code.
pub fn affine_code(stream: &[u8], bits: usize, index: usize) -> u32 {
    let bit = index * bits;
    let low = u32::from(stream[bit / 8]);
    let high = stream.get(bit / 8 + 1).copied().map_or(0, u32::from);
    ((low | high << 8) >> (bit % 8)) & ((1 << bits) - 1)
}

/// The value of an FP8 E4M3 (`fn` kind) code; NaN for `0x7F` and `0xFF`.
pub fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(code >> 3 & 15);
    let mantissa = f32::from(code & 7);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * power_of_two(-6),
        _ => (1.0 + mantissa / 8.0) * power_of_two(exponent - 7),
    };
    sign * magnitude
}

/// `2^exponent` for a normal result.
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}
