//! How a module's numbers are stored, decided by its tensors and held against the quantisation table.
//!
//! The format is a property of the module: quantised where its companion tensors exist, plain where they do not. The
//! table must agree. [`dense`], [`affine`], [`fp8`] and [`exl3`] know one encoding each; [`scheme`] reads the table.
//! Source: `reference/weights.md`, `mlx-affine.md` section 5, `fp8.md`.

pub(crate) mod affine;
pub(crate) mod dense;
pub(crate) mod exl3;
pub(crate) mod fp8;
pub(crate) mod scheme;

use std::fmt;
use std::ops::Range;

use serde::{Serialize, Serializer};

use crate::exl3::{BLOCK, Codebook, Rate};
use crate::matrix::{PlainType, exl3_bytes};
use crate::names::Part;
use crate::safetensors::Dtype;
use crate::shards::{Shards, Tensor};
use crate::{Error, Result};
use exl3::{Exl3Pieces, Marker};
use scheme::Scheme;

/// How the numbers of a matrix are stored, without the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Encoding {
    /// Numbers of a plain type.
    Plain(PlainType),
    /// MLX affine.
    Affine {
        /// Bits of a code.
        bits: u8,
        /// Inputs that share a scale.
        group: usize,
        /// Type of scales and biases.
        kind: PlainType,
    },
    /// FP8 E4M3 with a factor for each block of 128 × 128.
    Fp8Block,
    /// EXL3.
    Exl3 {
        /// Bits of a weight.
        rate: Rate,
        /// Formula of the values.
        codebook: Codebook,
    },
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(kind) => f.write_str(plain_name(*kind)),
            Self::Affine { bits, group, kind } => {
                write!(f, "affine {bits}-bit, group {group}")?;
                if *kind == PlainType::Bf16 { Ok(()) } else { write!(f, ", {} scales", plain_name(*kind)) }
            }
            Self::Fp8Block => f.write_str("fp8 e4m3, blocks of 128"),
            Self::Exl3 { rate, codebook } => write!(f, "exl3 {rate}-bit, {codebook}"),
        }
    }
}

impl Serialize for Encoding {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

fn plain_name(kind: PlainType) -> &'static str {
    match kind {
        PlainType::F32 => "f32",
        PlainType::F16 => "f16",
        PlainType::Bf16 => "bf16",
    }
}

/// Which part of a tensor belongs to a module's member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the tensor.
    pub(crate) tensor: usize,
    /// The member, when the tensor holds a whole stack.
    pub(crate) member: Option<usize>,
    /// First row and all rows, when the tensor is a fusion.
    pub(crate) rows: Option<(usize, usize)>,
}

impl Piece {
    /// Whether two pieces are the same cut of their tensors.
    fn same_cut(&self, other: &Self) -> bool {
        self.member == other.member && self.rows == other.rows
    }
}

/// The arrays that were found for one member of a module.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) weight: Option<Piece>,
    pub(crate) scales: Option<Piece>,
    pub(crate) biases: Option<Piece>,
    pub(crate) scale_inv: Option<Piece>,
    pub(crate) exl3: Exl3Pieces,
}

impl Pieces {
    /// The slot of an array; `None` for those of formats that Flint does not read.
    pub(crate) fn slot(&mut self, part: Part) -> Option<&mut Option<Piece>> {
        match part {
            Part::Weight => Some(&mut self.weight),
            Part::Scales => Some(&mut self.scales),
            Part::Biases => Some(&mut self.biases),
            Part::ScaleInv => Some(&mut self.scale_inv),
            Part::Exl3(array) => Some(self.exl3.slot(array)),
            Part::Foreign(_) => None,
        }
    }

    /// Any array of the member.
    pub(crate) fn any(&self) -> Option<Piece> {
        self.weight.or(self.scales).or(self.biases).or(self.scale_inv).or(self.exl3.any())
    }

    /// The tensor that holds the numbers or codes.
    pub(crate) fn numbers(&self) -> Option<Piece> {
        self.weight.or(self.exl3.trellis())
    }
}

/// Bytes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Number of the tensor.
    pub(crate) tensor: usize,
    /// First byte, from the start of the tensor's data.
    pub(crate) start: usize,
    /// Number of bytes.
    pub(crate) len: usize,
}

/// One matrix or array as it is stored: the numbers of a whole fusion, and the rows that are meant.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// How the numbers are stored.
    pub(crate) encoding: Encoding,
    /// Rows of the stored matrix.
    pub(crate) rows: usize,
    /// Columns.
    pub(crate) cols: usize,
    /// Numbers or codes.
    pub(crate) weight: Span,
    /// Affine scales, FP8 factors, or the scales of a trellis's inputs.
    pub(crate) scales: Option<Span>,
    /// Affine biases, or the scales of a trellis's outputs.
    pub(crate) biases: Option<Span>,
    /// The marker of a trellis's codebook.
    pub(crate) marker: Option<Marker>,
    /// The rows that are meant; `None` for all.
    pub(crate) cut: Option<Range<usize>>,
}

impl Stored {
    /// The arrays that hold it.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        [Some(self.weight), self.scales, self.biases].into_iter().flatten()
    }

    /// Bytes of the rows that are meant, with their share of the scales.
    pub(crate) fn bytes(&self) -> u64 {
        let rows = self.cut.as_ref().map_or(self.rows, Range::len) as u64;
        let cols = self.cols as u64;
        match self.encoding {
            Encoding::Plain(kind) => rows * cols * kind.size() as u64,
            Encoding::Affine { bits, group, kind } => {
                rows * cols * u64::from(bits) / 8 + rows * cols / group as u64 * 2 * kind.size() as u64
            }
            Encoding::Fp8Block => rows * cols + rows.div_ceil(128) * cols.div_ceil(128) * 4,
            Encoding::Exl3 { rate, .. } => {
                exl3_bytes(rate, self.cols.next_multiple_of(BLOCK), rows as usize) as u64
            }
        }
    }
}

/// What is known of a matrix before its encoding is.
pub(crate) struct Matrix<'a> {
    /// Canonical name, for messages.
    pub(crate) name: &'a str,
    /// Canonical module, for the quantisation table.
    pub(crate) module: &'a str,
    /// Number in its stack.
    pub(crate) member: usize,
    /// Members of the stack; 1 for a single matrix.
    pub(crate) members: usize,
    /// Rows.
    pub(crate) rows: usize,
    /// Columns.
    pub(crate) cols: usize,
    /// What was found for it.
    pub(crate) pieces: Pieces,
    /// All tensors.
    pub(crate) shards: &'a Shards,
}

impl Matrix<'_> {
    /// Decides the encoding and checks every shape and width.
    ///
    /// # Errors
    /// A contradiction among the tensors, or between them and the table, by name.
    pub(crate) fn stored(&self, scheme: &Scheme) -> Result<Stored> {
        if let Some(trellis) = self.pieces.exl3.trellis() {
            return exl3::stored(self, trellis);
        }
        let Some(weight) = self.pieces.weight else {
            return Err(self.inconsistent("it has scales but no weight".to_owned()));
        };
        if let Some(piece) = self.pieces.exl3.any() {
            let name = &self.tensor(piece).info.name;
            return Err(self.inconsistent(format!("it has {name}, but no trellis")));
        }
        match self.tensor(weight).info.dtype {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => dense::stored(self, weight, scheme),
            Dtype::U32 => affine::stored(self, weight, scheme),
            Dtype::F8E4m3 => fp8::stored(self, weight, scheme),
            other => Err(Error::Type {
                tensor: self.tensor(weight).info.name.clone(),
                file: self.file(weight).to_owned(),
                found: format!("{other:?}"),
                expected: "F32, F16, BF16, F8_E4M3 with weight_scale_inv, or U32 with scales and biases"
                    .to_owned(),
            }),
        }
    }

    /// The tensor of a piece.
    fn tensor(&self, piece: Piece) -> &Tensor {
        &self.shards.tensors[piece.tensor]
    }

    /// The shard of a piece.
    fn file(&self, piece: Piece) -> &str {
        &self.shards.files[self.tensor(piece).shard].name
    }

    /// Rows of the stored matrix: those of the whole fusion.
    fn stored_rows(&self, piece: Piece) -> usize {
        piece.rows.map_or(self.rows, |(_, all)| all)
    }

    /// Bytes of an array of `rows` × `cols` numbers inside a piece's tensor, whose shape must be just that.
    fn span(&self, piece: Piece, rows: usize, cols: usize) -> Result<Span> {
        let info = &self.tensor(piece).info;
        let expected = match piece.member {
            Some(_) => vec![self.members, rows, cols],
            None => vec![rows, cols],
        };
        if info.shape != expected {
            return Err(Error::Shape {
                tensor: info.name.clone(),
                file: self.file(piece).to_owned(),
                found: info.shape.clone(),
                expected: format!("{expected:?}"),
            });
        }
        let len = rows * cols * info.dtype.size();
        Ok(Span { tensor: piece.tensor, start: piece.member.unwrap_or(0) * len, len })
    }

    /// The rows that are meant.
    fn cut(&self, piece: Piece) -> Option<Range<usize>> {
        piece.rows.map(|(first, _)| first..first + self.rows)
    }

    fn inconsistent(&self, what: String) -> Error {
        Error::Inconsistent {
            module: self.name.to_owned(),
            what,
            remedy: "the checkpoint is inconsistent: download it again, or convert it anew",
        }
    }
}
