//! Names of exllamav3's converter: the arrays of a module, and the modules that it splits.
//!
//! `P.trellis` with `P.suh`, `P.svh` and a codebook's marker; `self_attn.qkv_proj` and `self_attn.conv1d` are fusions that
//! other layouts have too. Vision blocks have `attn.q_proj`, `k_proj` and `v_proj` beside the release's `attn.qkv`.
//! Source: `reference/exl3.md`, sections 1 and 5.

use crate::names::Part;

/// An array of an EXL3 module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Array {
    /// The tiles.
    Trellis,
    /// Scales of the inputs.
    Suh,
    /// Scales of the outputs.
    Svh,
    /// Signs of the inputs, in early files.
    Su,
    /// Signs of the outputs, in early files.
    Sv,
    /// Marker of the codebook mcg.
    Mcg,
    /// Marker of the codebook mul1.
    Mul1,
}

/// Last components of tensor names.
pub(crate) const PARTS: &[(&str, Part)] = &[
    (".trellis", Part::Exl3(Array::Trellis)),
    (".suh", Part::Exl3(Array::Suh)),
    (".svh", Part::Exl3(Array::Svh)),
    (".su", Part::Exl3(Array::Su)),
    (".sv", Part::Exl3(Array::Sv)),
    (".mcg", Part::Exl3(Array::Mcg)),
    (".mul1", Part::Exl3(Array::Mul1)),
];

/// A vision block's attention input in one module, and the modules that the converter adds beside it.
pub(crate) const VISION_WHOLE: &str = "attn.qkv";
/// See [`VISION_WHOLE`]; in the order of their rows.
pub(crate) const VISION_SPLIT: [&str; 3] = ["attn.q_proj", "attn.k_proj", "attn.v_proj"];
