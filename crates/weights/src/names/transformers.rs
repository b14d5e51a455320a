//! Names of transformers' modules in memory, met in files that others save.
//!
//! `self_attn.forget_gate.*`, `attn_hc.*`, `ffn_hc.*`, `mlp.experts.gate_up_proj` (all experts, gate rows first, no
//! `.weight`), `self_attn.conv1d`. Source: `reference/tensors-and-budget.md`, section 2.1.

use crate::names::{Fusion, replace_component};

/// Modules that hold several canonical ones.
pub(crate) const FUSIONS: &[Fusion] =
    &[Fusion { name: "conv1d", members: &["q_conv1d", "k_conv1d", "v_conv1d"] }];

/// Unnests the forget gate and renames the hyper-connections.
pub(crate) fn rename(path: String) -> String {
    let path = replace_component(&path, "forget_gate", "").unwrap_or(path);
    for (nested, flat) in [("attn_hc", "hc_attn"), ("ffn_hc", "hc_ffn")] {
        for array in ["fn", "base", "scale"] {
            let renamed = replace_component(&path, &format!("{nested}.{array}"), &format!("{flat}_{array}"));
            if let Some(renamed) = renamed {
                return renamed;
            }
        }
    }
    path
}
