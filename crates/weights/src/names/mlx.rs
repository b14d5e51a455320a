//! Names of MLX checkpoints, of every generation of mlx-lm and mlx-vlm.
//!
//! `mlp.switch_mlp.*` (experts stacked), `self_attn.{q,k,v}_conv.conv`, fused modules, and the MTP block as `mtp.0.*`,
//! as `mtp_block.*`, or as a drafter's top-level names. Source: `reference/tensors-and-budget.md`, section 2.2.

use crate::names::{Fusion, replace_component};

/// Modules that hold several canonical ones.
pub(crate) const FUSIONS: &[Fusion] = &[
    Fusion { name: "qkv_proj", members: &["q_proj", "k_proj", "v_proj"] },
    Fusion { name: "fbg_a_proj", members: &["f_a_proj", "b_proj", "g_a_proj"] },
    Fusion { name: "qkv_a_proj", members: &["q_a_proj", "kv_a_proj_with_mqa"] },
    Fusion { name: "gate_up_proj", members: &["gate_proj", "up_proj"] },
    Fusion { name: "qkv_conv.conv", members: &["q_conv1d", "k_conv1d", "v_conv1d"] },
];

/// The MTP block as the layer after the trunk, or `None` when the path is not of the block.
pub(crate) fn mtp_block(path: &str, trunk_layers: usize) -> Option<String> {
    if let Some(rest) = path.strip_prefix("mtp.") {
        let (number, rest) = rest.split_once('.')?;
        let layer = trunk_layers + number.parse::<usize>().ok().filter(|number| *number < 1024)?;
        return Some(match rest.strip_prefix("block.").or_else(|| rest.strip_prefix("mtp_block.")) {
            Some(inside) => format!("layers.{layer}.{inside}"),
            None => format!("layers.{layer}.{}", head_norm(rest)),
        });
    }
    if let Some(inside) = path.strip_prefix("mtp_block.") {
        return Some(format!("layers.{trunk_layers}.{inside}"));
    }
    ["enorm", "hnorm", "eh_proj", "shared_head_norm"]
        .contains(&path)
        .then(|| format!("layers.{trunk_layers}.{}", head_norm(path)))
}

/// The norm before the head has three names.
fn head_norm(path: &str) -> &str {
    match path {
        "norm" | "shared_head_norm" => "shared_head.norm",
        other => other,
    }
}

/// Split convolutions, and the release's names.
const CONVOLUTIONS: &[(&str, &str)] =
    &[("q_conv.conv", "q_conv1d"), ("k_conv.conv", "k_conv1d"), ("v_conv.conv", "v_conv1d")];

/// Names of single modules.
pub(crate) fn rename(path: String) -> String {
    if let Some(renamed) = replace_component(&path, "switch_mlp", "experts") {
        return renamed;
    }
    if !path.contains("_conv.") {
        return path;
    }
    CONVOLUTIONS.iter().find_map(|(split, flat)| replace_component(&path, split, flat)).unwrap_or(path)
}
