//! The layouts: canonical modules to stored tensors.
//!
//! A layout renames modules, joins some by rows, stacks experts or keeps them apart, and stores the latent's expansion as
//! one matrix or as a pair.

use super::{Array, HEADS, LAYERS, Model, Module, Storage, Tensor};
use serde_json::{Map, Value, json};

/// How a checkpoint spells its names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Layout {
    /// The release: one tensor for each expert, `kv_b_proj`.
    Official,
    /// transformers' modules in memory.
    Transformers,
    /// mlx converters: stacked experts, nested gates, one convolution, the absorbed pair.
    Mlx,
    /// mlx-vlm's fused modules.
    MlxFused,
    /// No prefixes, mlx-lm's split convolutions, `mtp_block`.
    Bare,
}

/// All layouts.
pub(crate) const ALL: [Layout; 5] =
    [Layout::Official, Layout::Transformers, Layout::Mlx, Layout::MlxFused, Layout::Bare];

impl Layout {
    /// Whether it stores the latent's expansion as a pair.
    fn has_pair(self) -> bool {
        matches!(self, Self::Mlx | Self::MlxFused | Self::Bare)
    }

    /// The stored path of a canonical module.
    pub(crate) fn path(self, canonical: &str) -> String {
        let mtp = format!("layers.{LAYERS}.");
        let (inside, is_mtp) = match canonical.strip_prefix(&mtp) {
            Some(rest) => (rest.to_owned(), true),
            None => (canonical.to_owned(), false),
        };
        let inside = self.rename(&inside);
        let text = match self {
            Self::Official | Self::Transformers => "model.language_model.",
            Self::Mlx | Self::MlxFused => "language_model.model.",
            Self::Bare => "",
        };
        if is_mtp {
            return match self {
                Self::Official | Self::Transformers => format!("{text}{mtp}{inside}"),
                Self::Mlx | Self::MlxFused => {
                    format!("language_model.mtp.0.{}", mtp_inside(&inside, "block.", "norm"))
                }
                Self::Bare => mtp_inside(&inside, "mtp_block.", "shared_head_norm"),
            };
        }
        match inside.strip_prefix("visual.") {
            Some(rest) => match self {
                Self::Official | Self::Transformers => format!("model.visual.{rest}"),
                Self::Mlx | Self::MlxFused => format!("vision_tower.{rest}"),
                Self::Bare => inside,
            },
            None if inside == "lm_head" => match self {
                Self::Mlx | Self::MlxFused => "language_model.lm_head".to_owned(),
                _ => inside,
            },
            None => format!("{text}{inside}"),
        }
    }

    fn rename(self, inside: &str) -> String {
        let mut name = inside.to_owned();
        if matches!(self, Self::Transformers | Self::Mlx) {
            for gate in ["f_a_proj", "f_b_proj", "A_log", "dt_bias"] {
                name = name.replace(&format!("self_attn.{gate}"), &format!("self_attn.forget_gate.{gate}"));
            }
        }
        if self != Self::Official && self != Self::Bare {
            name = name.replace("hc_attn_", "attn_hc.").replace("hc_ffn_", "ffn_hc.");
        }
        if matches!(self, Self::Mlx | Self::MlxFused) {
            name = name.replace("mlp.experts.", "mlp.switch_mlp.");
        }
        if self == Self::Bare {
            for side in ["q", "k", "v"] {
                name = name.replace(&format!("{side}_conv1d"), &format!("{side}_conv.conv"));
            }
        }
        name
    }

    /// Fused modules: name and members, relative to one path.
    fn fusions(self) -> &'static [(&'static str, &'static [&'static str])] {
        match self {
            Self::Official | Self::Bare => &[],
            Self::Transformers => &[
                ("self_attn.conv1d", &["self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"]),
                ("mlp.experts.gate_up_proj", &["mlp.experts.gate_proj", "mlp.experts.up_proj"]),
            ],
            Self::Mlx => {
                &[("self_attn.conv1d", &["self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"])]
            }
            Self::MlxFused => &[
                (
                    "self_attn.qkv_conv.conv",
                    &["self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"],
                ),
                ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                ("self_attn.fbg_a_proj", &["self_attn.f_a_proj", "self_attn.b_proj", "self_attn.g_a_proj"]),
                ("self_attn.qkv_a_proj", &["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]),
                ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
                (
                    "mlp.shared_experts.gate_up_proj",
                    &["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"],
                ),
            ],
        }
    }

    /// The stored tensors of a model.
    pub(crate) fn tensors(self, model: &Model) -> Vec<Tensor> {
        let mut modules = model.modules.clone();
        if !self.has_pair() {
            join_latents(&mut modules);
        }
        for layer in 0..=LAYERS {
            for (name, members) in self.fusions() {
                let full = |name: &str| format!("layers.{layer}.{name}");
                let parts: Vec<Module> =
                    members.iter().filter_map(|name| modules.get(&full(name)).cloned()).collect();
                // Codes of different widths do not fit one tensor.
                let shape = |module: &Module| {
                    module.arrays.iter().map(|a| (a.dtype, a.shape[1..].to_vec())).collect::<Vec<_>>()
                };
                if parts.len() == members.len() && parts.iter().all(|part| shape(part) == shape(&parts[0])) {
                    members.iter().for_each(|name| drop(modules.remove(&full(name))));
                    modules.insert(full(name), fuse(&parts));
                }
            }
        }
        modules.iter().flat_map(|(name, module)| self.stored(name, module)).collect()
    }

    fn stored(self, canonical: &str, module: &Module) -> Vec<Tensor> {
        let experts = canonical.contains("mlp.experts.");
        let apart = experts && matches!(self, Self::Official | Self::Bare);
        let mut tensors = Vec::new();
        for array in &module.arrays {
            if apart {
                for (member, bytes) in array.members.iter().enumerate() {
                    let path =
                        self.path(&canonical.replace("mlp.experts.", &format!("mlp.experts.{member}.")));
                    tensors.push(tensor(&path, array, array.shape.clone(), bytes.clone()));
                }
                continue;
            }
            let mut shape = self.shape(canonical, &array.shape);
            if module.stack {
                shape.insert(0, array.members.len());
            }
            let mut stored = tensor(&self.path(canonical), array, shape, array.members.concat());
            if experts && self == Self::Transformers {
                // Stacked experts have no ".weight" there, and their factors an underscore.
                stored.name = stored.name.replace(".weight_scale_inv", "_scale_inv").replace(".weight", "");
            }
            tensors.push(stored);
        }
        tensors
    }

    /// Convolutions have their taps or channels in another place in MLX files.
    fn shape(self, canonical: &str, shape: &[usize]) -> Vec<usize> {
        let mlx = self.has_pair();
        match shape {
            [channels, 1, taps] if mlx => vec![*channels, *taps, 1],
            [out, colours, rest @ ..] if mlx && canonical.starts_with("visual.") && !rest.is_empty() => {
                [&[*out][..], rest, &[*colours]].concat()
            }
            _ => shape.to_vec(),
        }
    }

    /// `config.json` with the quantisation table in this layout's spelling.
    pub(crate) fn config(self, model: &Model) -> Value {
        let mut config = model.config.clone();
        let mut table = Map::new();
        for (name, module) in &model.modules {
            let own = module.arrays[0].dtype;
            if let (Storage::Affine(bits, group), "U32") = (model.storage(name), own) {
                table.insert(self.path(name), json!({"bits": bits, "group_size": group}));
            }
        }
        if !table.is_empty() {
            let head = [("group_size", json!(64)), ("bits", json!(4)), ("mode", json!("affine"))];
            let head = head.into_iter().map(|(key, value)| (key.to_owned(), value));
            config["quantization"] = Value::Object(head.chain(table).collect());
            config["quantization_config"] = config["quantization"].clone();
        }
        if model.modules.values().any(|module| module.arrays[0].dtype == "F8_E4M3") {
            config["quantization_config"] = json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
            });
        }
        config
    }
}

fn mtp_inside(inside: &str, block: &str, norm: &str) -> String {
    match inside {
        "enorm" | "hnorm" | "eh_proj" => inside.to_owned(),
        "shared_head.norm" => norm.to_owned(),
        _ => format!("{block}{inside}"),
    }
}

fn tensor(path: &str, array: &Array, shape: Vec<usize>, bytes: Vec<u8>) -> Tensor {
    let name = if array.part.is_empty() { path.to_owned() } else { format!("{path}.{}", array.part) };
    Tensor { name, dtype: array.dtype, shape, bytes }
}

/// Several modules one below the other, member by member.
fn fuse(parts: &[Module]) -> Module {
    let arrays = parts[0].arrays.iter().enumerate().map(|(at, first)| {
        let mut shape = first.shape.clone();
        shape[0] = parts.iter().map(|part| part.arrays[at].shape[0]).sum();
        let member =
            |member: usize| parts.iter().flat_map(|part| part.arrays[at].members[member].clone()).collect();
        Array { shape, members: (0..first.members.len()).map(member).collect(), ..first.clone() }
    });
    Module { stack: parts[0].stack, arrays: arrays.collect() }
}

/// `embed_q` and `unembed_out` as `kv_b_proj`: per head the transposed keys, then the values.
fn join_latents(modules: &mut std::collections::BTreeMap<String, Module>) {
    let pairs: Vec<String> =
        modules.keys().filter_map(|name| name.strip_suffix("embed_q").map(str::to_owned)).collect();
    for at in pairs {
        let (keys, values) = (&modules[&format!("{at}embed_q")], &modules[&format!("{at}unembed_out")]);
        let (keys, values) = (keys.arrays[0].clone(), values.arrays[0].clone());
        assert_eq!((keys.dtype, values.dtype), ("BF16", "BF16"), "only a plain pair can be joined");
        let (rank, qk) = (keys.shape[0], keys.shape[1]);
        let mut bytes = Vec::new();
        for head in 0..HEADS {
            for row in 0..qk {
                for col in 0..rank {
                    let from = (col * qk + row) * 2;
                    bytes.extend(&keys.members[head][from..from + 2]);
                }
            }
            bytes.extend(&values.members[head]);
        }
        let shape = vec![HEADS * (qk + values.shape[0]), rank];
        let array = Array { part: "weight", dtype: "BF16", shape, members: vec![bytes] };
        modules.remove(&format!("{at}embed_q"));
        modules.remove(&format!("{at}unembed_out"));
        modules.insert(format!("{at}kv_b_proj"), Module { stack: false, arrays: vec![array] });
    }
}
