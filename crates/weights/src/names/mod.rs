//! Stored names to canonical places.
//!
//! The canonical name of a module is the release's without `model.language_model.`
//! (`layers.7.self_attn.q_a_proj`, `layers.3.mlp.experts.gate_proj`, `lm_head`). Every layout's spellings are rules
//! in a file of its own ([`official`], [`transformers`], [`mlx`], [`exl3`]); a checkpoint may mix them, tensor by tensor.
//! This module knows names only, no shapes: whether a place exists is `table.rs`'s matter.
//! Source: `reference/tensors-and-budget.md`, section 3.

pub(crate) mod exl3;
pub(crate) mod mlx;
pub(crate) mod official;
pub(crate) mod transformers;

/// Which of a module's arrays a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    /// The numbers or codes.
    Weight,
    /// Affine scales.
    Scales,
    /// Affine biases.
    Biases,
    /// FP8 block factors.
    ScaleInv,
    /// An array of a trellis.
    Exl3(exl3::Array),
    /// An array of a format that Flint does not read, with the format's name.
    Foreign(&'static str),
}

/// A module that holds several canonical ones, one below the other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fusion {
    /// Last components of the stored module path.
    pub(crate) name: &'static str,
    /// Last components of the members, in the order of their rows.
    pub(crate) members: &'static [&'static str],
}

/// What a tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Canonical module; of a fusion, the path before its name, with the last dot.
    pub(crate) module: String,
    /// The fusion it belongs to.
    pub(crate) fusion: Option<&'static Fusion>,
    /// Member of a stack, when the tensor is one member only.
    pub(crate) member: Option<usize>,
    /// Which array.
    pub(crate) part: Part,
}

/// The place of a stored tensor. `trunk_layers` is the number of the first MTP layer.
pub(crate) fn place_of_tensor(stored: &str, trunk_layers: usize) -> Place {
    let (path, part) = official::split_part(stored);
    place(path, part, trunk_layers)
}

/// The place that a key of a quantisation table names, with or without `.weight` (or `.scales`, `.biases`).
pub(crate) fn place_of_key(key: &str, trunk_layers: usize) -> Place {
    let path = match official::split_part(key) {
        (path, Part::Weight | Part::Scales | Part::Biases | Part::ScaleInv | Part::Exl3(_)) => path,
        (_, Part::Foreign(_)) => key,
    };
    place(path, Part::Weight, trunk_layers)
}

fn place(path: &str, part: Part, trunk_layers: usize) -> Place {
    let bare = official::strip_prefixes(path);
    if let Some(rest) = official::vision(bare) {
        return Place { module: format!("visual.{rest}"), fusion: None, member: None, part };
    }
    let unified = mlx::mtp_block(bare, trunk_layers).unwrap_or_else(|| bare.to_owned());
    let renamed = mlx::rename(transformers::rename(unified));
    let (module, member) = official::expert_member(renamed);
    match mlx::FUSIONS.iter().chain(transformers::FUSIONS).find(|fusion| ends_with_path(&module, fusion.name))
    {
        Some(fusion) => {
            let parent = module[..module.len() - fusion.name.len()].to_owned();
            Place { module: parent, fusion: Some(fusion), member, part }
        }
        None => Place { module, fusion: None, member, part },
    }
}

/// Whether `path` ends in the whole components `end`.
fn ends_with_path(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// `path` with the component(s) `from` replaced by `to`, if they occur as whole components.
fn replace_component(path: &str, from: &str, to: &str) -> Option<String> {
    let at = path.match_indices(from).map(|(at, _)| at).find(|&at| {
        let before = at == 0 || path.as_bytes()[at - 1] == b'.';
        let after = path.as_bytes().get(at + from.len());
        before && (after.is_none() || after == Some(&b'.'))
    })?;
    let (before, after) = (&path[..at], &path[at + from.len()..]);
    Some(match to {
        "" => format!("{before}{}", after.strip_prefix('.').unwrap_or(after)),
        _ => format!("{before}{to}{after}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(stored: &str) -> String {
        let place = place_of_tensor(stored, 45);
        let module = match place.fusion {
            Some(fusion) => format!("{}[{}]", place.module, fusion.members.join("+")),
            None => place.module,
        };
        let member = place.member.map_or(String::new(), |member| format!("#{member}"));
        format!("{module}{member} {:?}", place.part)
    }

    #[test]
    fn every_prefix_of_the_text_network_gives_one_name() {
        for prefix in ["model.language_model.", "language_model.model.", "model.", "language_model.", ""] {
            assert_eq!(
                canonical(&format!("{prefix}layers.7.self_attn.q_a_proj.weight")),
                "layers.7.self_attn.q_a_proj Weight"
            );
        }
        assert_eq!(canonical("language_model.lm_head.scales"), "lm_head Scales");
        assert_eq!(canonical("lm_head.weight"), "lm_head Weight");
    }

    #[test]
    fn every_prefix_of_the_vision_tower_gives_one_name() {
        for prefix in ["model.visual.", "visual.", "vision_tower.", "model.vision_tower."] {
            assert_eq!(
                canonical(&format!("{prefix}blocks.0.attn.proj.bias")),
                "visual.blocks.0.attn.proj.bias Weight"
            );
        }
    }

    #[test]
    fn every_name_of_the_mtp_block_is_the_layer_after_the_trunk() {
        for stored in [
            "model.language_model.layers.45.self_attn.o_proj.weight",
            "language_model.mtp.0.block.self_attn.o_proj.weight",
            "mtp.0.block.self_attn.o_proj.weight",
            "mtp_block.self_attn.o_proj.weight",
        ] {
            assert_eq!(canonical(stored), "layers.45.self_attn.o_proj Weight");
        }
        for stored in ["mtp.0.norm.weight", "shared_head_norm.weight", "layers.45.shared_head.norm.weight"] {
            assert_eq!(canonical(stored), "layers.45.shared_head.norm Weight");
        }
        for stored in ["mtp.0.eh_proj.biases", "eh_proj.biases", "model.layers.45.eh_proj.biases"] {
            assert_eq!(canonical(stored), "layers.45.eh_proj Biases");
        }
    }

    #[test]
    fn nested_gates_and_hyper_connections_meet_the_release_names() {
        assert_eq!(canonical("layers.0.self_attn.forget_gate.A_log"), "layers.0.self_attn.A_log Weight");
        assert_eq!(
            canonical("layers.0.self_attn.forget_gate.f_a_proj.scales"),
            "layers.0.self_attn.f_a_proj Scales"
        );
        assert_eq!(canonical("layers.0.attn_hc.fn"), "layers.0.hc_attn_fn Weight");
        assert_eq!(canonical("layers.0.ffn_hc.scale"), "layers.0.hc_ffn_scale Weight");
    }

    #[test]
    fn experts_of_every_layout_are_one_stack() {
        assert_eq!(
            canonical("model.language_model.layers.3.mlp.experts.17.up_proj.weight_scale_inv"),
            "layers.3.mlp.experts.up_proj#17 ScaleInv"
        );
        assert_eq!(
            canonical("layers.3.mlp.switch_mlp.down_proj.weight"),
            "layers.3.mlp.experts.down_proj Weight"
        );
        assert_eq!(canonical("layers.3.mlp.experts.down_proj"), "layers.3.mlp.experts.down_proj Weight");
        assert_eq!(
            canonical("layers.3.mlp.experts.gate_up_proj"),
            "layers.3.mlp.experts.[gate_proj+up_proj] Weight"
        );
        assert_eq!(
            canonical("layers.3.mlp.experts.gate_up_proj_scale_inv"),
            "layers.3.mlp.experts.[gate_proj+up_proj] ScaleInv"
        );
    }

    #[test]
    fn fused_names_are_their_members() {
        for (stored, expected) in [
            ("self_attn.qkv_proj.weight", "self_attn.[q_proj+k_proj+v_proj] Weight"),
            ("self_attn.fbg_a_proj.scales", "self_attn.[f_a_proj+b_proj+g_a_proj] Scales"),
            ("self_attn.qkv_a_proj.biases", "self_attn.[q_a_proj+kv_a_proj_with_mqa] Biases"),
            ("self_attn.qkv_conv.conv.weight", "self_attn.[q_conv1d+k_conv1d+v_conv1d] Weight"),
            ("self_attn.conv1d.weight", "self_attn.[q_conv1d+k_conv1d+v_conv1d] Weight"),
            ("self_attn.k_conv.conv.weight", "self_attn.k_conv1d Weight"),
            ("mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.[gate_proj+up_proj] Weight"),
        ] {
            assert_eq!(canonical(&format!("layers.4.{stored}")), format!("layers.4.{expected}"));
        }
    }

    #[test]
    fn arrays_of_a_trellis_belong_to_their_module() {
        for (stored, expected) in [
            ("layers.0.self_attn.o_proj.trellis", "layers.0.self_attn.o_proj Exl3(Trellis)"),
            ("lm_head.suh", "lm_head Exl3(Suh)"),
            ("lm_head.sv", "lm_head Exl3(Sv)"),
            ("layers.3.mlp.experts.7.up_proj.mul1", "layers.3.mlp.experts.up_proj#7 Exl3(Mul1)"),
            ("layers.0.self_attn.qkv_proj.svh", "layers.0.self_attn.[q_proj+k_proj+v_proj] Exl3(Svh)"),
            ("visual.blocks.1.attn.q_proj.trellis", "visual.blocks.1.attn.q_proj Exl3(Trellis)"),
        ] {
            assert_eq!(canonical(&format!("model.{stored}")), expected);
        }
    }

    #[test]
    fn table_keys_may_end_in_the_name_of_an_array() {
        for key in ["layers.3.mlp.gate", "model.layers.3.mlp.gate.weight", "layers.3.mlp.gate.scales"] {
            assert_eq!(place_of_key(key, 45).module, "layers.3.mlp.gate");
        }
    }

    #[test]
    fn arrays_of_other_formats_are_known_by_name() {
        assert!(canonical("embed_tokens.signs").contains("EXL3 embedding"));
        assert!(canonical("layers.0.self_attn.o_proj.qweight").contains("GPTQ"));
    }
}
