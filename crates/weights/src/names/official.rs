//! The release's names, and what all layouts share: prefixes and the names of a module's arrays.
//!
//! `model.language_model.layers.N.mlp.experts.E.gate_proj.weight` with `….weight_scale_inv` in the FP8 repository;
//! `lm_head.weight` at the top; vision under `model.visual.`.
//! Source: `reference/tensors-and-budget.md`, section 1.

use crate::names::{Part, exl3};

/// Last components of array names of formats that Flint does not read.
const FOREIGN: &[(&str, &str)] = &[
    (".signs", "EXL3 embedding"),
    (".qweight", "GPTQ or AWQ"),
    (".qzeros", "GPTQ or AWQ"),
    (".g_idx", "GPTQ or AWQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale", "compressed-tensors or modelopt"),
    (".weight_scale_2", "modelopt"),
    (".weight_zero_point", "compressed-tensors"),
    (".input_scale", "modelopt"),
    (".absmax", "bitsandbytes"),
    (".quant_map", "bitsandbytes"),
    (".global_scale", "nvfp4"),
];

/// Cuts the array's name from a tensor's name. A name without one is the module's only array.
pub(crate) fn split_part(stored: &str) -> (&str, Part) {
    const PARTS: &[(&str, Part)] = &[
        (".weight", Part::Weight),
        (".scales", Part::Scales),
        (".biases", Part::Biases),
        (".weight_scale_inv", Part::ScaleInv),
        // transformers' stacked experts have no ".weight" before it.
        ("_scale_inv", Part::ScaleInv),
    ];
    if let Some((path, part)) =
        PARTS.iter().chain(exl3::PARTS).find_map(|(end, part)| Some((stored.strip_suffix(end)?, *part)))
    {
        return (path, part);
    }
    FOREIGN
        .iter()
        .find_map(|(end, format)| Some((stored.strip_suffix(end)?, Part::Foreign(format))))
        .unwrap_or((stored, Part::Weight))
}

/// Strips `model.` and `language_model.` from the front, as often as they stand there.
pub(crate) fn strip_prefixes(path: &str) -> &str {
    let mut rest = path;
    while let Some(shorter) = rest.strip_prefix("model.").or_else(|| rest.strip_prefix("language_model.")) {
        rest = shorter;
    }
    rest
}

/// The path inside the vision tower, if it is one.
pub(crate) fn vision(path: &str) -> Option<&str> {
    path.strip_prefix("visual.").or_else(|| path.strip_prefix("vision_tower."))
}

/// `….experts.E.gate_proj` as the stack `….experts.gate_proj` and its member.
pub(crate) fn expert_member(path: String) -> (String, Option<usize>) {
    const EXPERTS: &str = ".mlp.experts.";
    let Some(at) = path.find(EXPERTS) else { return (path, None) };
    let rest = &path[at + EXPERTS.len()..];
    let Some((number, projection)) = rest.split_once('.') else { return (path, None) };
    // "07" would be a second spelling of 7.
    let canonical = number == "0" || !number.starts_with('0');
    match number.parse::<usize>() {
        Ok(member) if canonical && number.bytes().all(|c| c.is_ascii_digit()) => {
            (format!("{}{EXPERTS}{projection}", &path[..at]), Some(member))
        }
        _ => (path, None),
    }
}
