//! Names of transformers' modules in memory, met in files that others save.
//!
//! `self_attn.forget_gate.*`, `attn_hc.*`, `ffn_hc.*`, `mlp.experts.gate_up_proj` (all experts, gate rows first, no
//! `.weight`), `self_attn.conv1d`. Source: `reference/tensors-and-budget.md`, section 2.1.

use crate::names::{Fusion, replace_component};

/// Modules that hold several canonical ones.
pub(crate) const FUSIONS: &[Fusion] =
    &[Fusion { name: "conv1d", members: &["q_conv1d", "k_conv1d", "v_conv1d"] }];

/// Nested names of the hyper-connections, and the release's.
const HYPER_CONNECTIONS: &[(&str, &str)] = &[
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
];

/// Unnests the forget gate and renames the hyper-connections.
pub(crate) fn rename(path: String) -> String {
    if let Some(unnested) = replace_component(&path, "forget_gate", "") {
        return unnested;
    }
    if !path.contains("_hc.") {
        return path;
    }
    HYPER_CONNECTIONS.iter().find_map(|(nested, flat)| replace_component(&path, nested, flat)).unwrap_or(path)
}
