//! What the kernels know of a matrix: a table of its parts in device memory.

use bytemuck::{Pod, Zeroable};
use flint_weights::{Form, PlainType};

/// Outputs of a tile.
pub(crate) const TILE: usize = 16;
/// Inputs of a unit.
pub(crate) const UNIT: usize = 64;

/// A run of outputs of one encoding, in units; the same in `kernels/product/encoding.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct UnitPart {
    pub(crate) codes: u64,
    pub(crate) scales: u64,
    pub(crate) code_stride: u64,
    pub(crate) scale_stride: u64,
    pub(crate) encoding: u32,
    pub(crate) outputs: u32,
    pub(crate) first_output: u32,
    pub(crate) tiles: u32,
    pub(crate) entries: u32,
    pub(crate) share: u32,
}

/// A run of outputs of one form, row beside row; the same in `kernels/product/rows.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(crate) struct RowPart {
    pub(crate) codes: u64,
    pub(crate) scales: u64,
    pub(crate) biases: u64,
    pub(crate) code_stride: u64,
    pub(crate) scale_stride: u64,
    pub(crate) form: u32,
    pub(crate) numbers: u32,
    pub(crate) bits: u32,
    pub(crate) group: u32,
    pub(crate) outputs: u32,
    pub(crate) first_output: u32,
    pub(crate) first_row: u32,
    pub(crate) reserved: u32,
}

/// Kernels exist in families, so that each is compiled for few encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// bf16, FP8, and affine with bf16 scales.
    Usual,
    /// Affine with fp32 scales (fp16 ones are widened).
    Wide,
}

/// How weights are encoded for the tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Plain numbers.
    Bf16,
    /// E4M3 with a factor for each block.
    Fp8,
    /// Codes with scale and bias for each `group` inputs.
    Affine { bits: u8, group: usize, wide: bool },
}

impl Encoding {
    /// That of a form; `None` for forms that tensor cores do not take.
    pub(crate) fn of(form: &Form) -> Option<Self> {
        match form {
            Form::Plain { kind: PlainType::Bf16, .. } => Some(Self::Bf16),
            // A trellis is refused at upload (`matrix.rs`).
            Form::Plain { .. } | Form::Exl3(_) => None,
            Form::Fp8Block { .. } => Some(Self::Fp8),
            Form::Affine { bits, group, kind, .. } => {
                Some(Self::Affine { bits: *bits, group: *group, wide: *kind != PlainType::Bf16 })
            }
        }
    }

    /// The kernels' number: 0 bf16, 1 FP8, else the bits, with 16 for groups of 32 and 32 for fp32 scales.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Bf16 => 0,
            Self::Fp8 => 1,
            Self::Affine { bits, group, wide } => {
                u32::from(bits) | if group == 32 { 16 } else { 0 } | if wide { 32 } else { 0 }
            }
        }
    }

    pub(crate) fn family(self) -> Family {
        match self {
            Self::Affine { wide: true, .. } => Family::Wide,
            _ => Family::Usual,
        }
    }

    /// Bits of a code or number.
    pub(crate) fn bits(self) -> usize {
        match self {
            Self::Bf16 => 16,
            Self::Fp8 => 8,
            Self::Affine { bits, .. } => usize::from(bits),
        }
    }

    /// Bytes of a unit.
    pub(crate) fn unit_bytes(self) -> usize {
        self.bits() * 128
    }

    /// Bytes of an entry of scales.
    pub(crate) fn entry_bytes(self) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Fp8 | Self::Affine { wide: false, .. } => 64,
            Self::Affine { wide: true, .. } => 128,
        }
    }

    /// Half units that share an entry, as a shift.
    pub(crate) fn share(self) -> usize {
        match self {
            Self::Fp8 | Self::Affine { group: 128, .. } => 2,
            Self::Affine { group: 32, .. } => 0,
            _ => 1,
        }
    }

    /// Entries of a tile of `units`.
    pub(crate) fn entries(self, units: usize) -> usize {
        match self {
            Self::Bf16 => 0,
            _ => (2 * units).div_ceil(1 << self.share()),
        }
    }

    /// Inputs whose sums the biases need: 0, 32 or 64.
    pub(crate) fn summed(self) -> usize {
        match self {
            Self::Affine { group: 32, wide: true, .. } => 32,
            Self::Affine { wide: true, .. } => 64,
            _ => 0,
        }
    }

    /// Entries that `kernels/product/tile.cuh` keeps of a unit.
    pub(crate) fn unit_entries(self) -> usize {
        match self {
            Self::Bf16 => 0,
            Self::Affine { wide: false, .. } | Self::Affine { group: 32, .. } => 2,
            _ => 1,
        }
    }
}
