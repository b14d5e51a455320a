//! A small model made from a seed, and the layouts that it can be written in.
//!
//! [`Model`] holds canonical modules with the bytes of each array; [`layout`] turns them into the stored tensors of a
//! layout; [`file`] writes a safetensors file. Nothing here uses Flint's reader, so that the two can be held against
//! each other.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod layout;
pub(crate) mod packs;
pub(crate) mod release;

use std::collections::BTreeMap;

use flint_weights::{Checkpoint, Error, HostBytes, Source};
use serde_json::{Value, json};

/// A stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// An array of a module: its name after the module's (`weight`, `scales`; empty for the module's only array), type, shape
/// of one member, and the bytes of each member.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) part: &'static str,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) members: Vec<Vec<u8>>,
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Storage {
    Bf16,
    F32,
    Fp8,
    Affine(usize, usize),
}

/// A module with all of its arrays. `stack` tells whether it has members, even if only one.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) stack: bool,
    pub(crate) arrays: Vec<Array>,
}

/// Sizes of the small model, those of `config.json`. Every width divides by 64, so that each encoding fits.
pub(crate) const HIDDEN: usize = 128;
pub(crate) const VOCABULARY: usize = 192;
pub(crate) const LAYERS: usize = 4;
pub(crate) const HEADS: usize = 2;
pub(crate) const EXPERTS: usize = 3;
const LINEAR: (usize, usize) = (2, 64);
const Q_RANK: usize = 64;
const KV_RANK: usize = 128;
const QK: usize = 64;
const V: usize = 128;
const INDEX: (usize, usize) = (2, 64);
const KPOOL: usize = 4;
const INNER: usize = 128;
const EXPERT_INNER: usize = 64;

/// A model: `config.json` and canonical modules.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) config: Value,
    pub(crate) modules: BTreeMap<String, Module>,
    seed: u64,
    storage: fn(&str) -> Storage,
}

impl Model {
    /// The small model with MTP layer and vision tower; `storage` chooses the encoding of each matrix by its name.
    pub(crate) fn new(seed: u64, storage: fn(&str) -> Storage) -> Self {
        let mut model = Self { config: config(), modules: BTreeMap::new(), seed, storage };
        model.matrix("embed_tokens", None, VOCABULARY, HIDDEN);
        model.matrix("lm_head", None, VOCABULARY, HIDDEN);
        model.vector("norm", &[HIDDEN]);
        for layer in 0..LAYERS {
            model.layer(layer);
        }
        model.mtp(LAYERS);
        model.vision();
        model
    }

    /// How a matrix of this name is stored. Routers, hyper-connections, pool gates, `eh_proj` and the vision tower are
    /// never quantised.
    pub(crate) fn storage(&self, name: &str) -> Storage {
        let plain = ["hc_", "mlp.gate", "index_kpool", "eh_proj", "visual."];
        match (self.storage)(name) {
            Storage::Fp8 | Storage::Affine(..)
                if plain.iter().any(|part| {
                    name.contains(part) && !name.contains("gate_proj") && !name.contains("gate_up")
                }) =>
            {
                Storage::Bf16
            }
            storage => storage,
        }
    }

    fn layer(&mut self, layer: usize) {
        let at = format!("layers.{layer}.");
        self.vector(&format!("{at}input_layernorm"), &[HIDDEN]);
        self.vector(&format!("{at}post_attention_layernorm"), &[HIDDEN]);
        for site in ["attn", "ffn"] {
            self.matrix(&format!("{at}hc_{site}_fn"), None, 24, 4 * HIDDEN);
            self.single(&format!("{at}hc_{site}_base"), "F32", &[24]);
            self.single(&format!("{at}hc_{site}_scale"), "F32", &[3]);
        }
        if layer % 4 == 3 {
            self.dsa(&at);
        } else {
            self.kda(&at);
        }
        if layer == 0 {
            self.block(&format!("{at}mlp."), INNER);
        } else {
            self.sparse(&at);
        }
    }

    fn kda(&mut self, at: &str) {
        let (heads, dim) = LINEAR;
        let (at, width) = (format!("{at}self_attn."), heads * dim);
        for side in ["q", "k", "v"] {
            self.matrix(&format!("{at}{side}_proj"), None, width, HIDDEN);
            self.vector(&format!("{at}{side}_conv1d"), &[width, 1, 4]);
        }
        for gate in ["f", "g"] {
            self.matrix(&format!("{at}{gate}_a_proj"), None, dim, HIDDEN);
            self.matrix(&format!("{at}{gate}_b_proj"), None, width, dim);
        }
        self.matrix(&format!("{at}b_proj"), None, heads, HIDDEN);
        self.single(&format!("{at}A_log"), "F32", &[heads]);
        self.single(&format!("{at}dt_bias"), "F32", &[width]);
        self.vector(&format!("{at}o_norm"), &[dim]);
        self.matrix(&format!("{at}o_proj"), None, HIDDEN, width);
    }

    fn dsa(&mut self, at: &str) {
        let at = format!("{at}self_attn.");
        self.matrix(&format!("{at}q_a_proj"), None, Q_RANK, HIDDEN);
        self.vector(&format!("{at}q_a_layernorm"), &[Q_RANK]);
        self.matrix(&format!("{at}q_b_proj"), None, HEADS * QK, Q_RANK);
        self.matrix(&format!("{at}kv_a_proj_with_mqa"), None, KV_RANK, HIDDEN);
        self.vector(&format!("{at}kv_a_layernorm"), &[KV_RANK]);
        self.matrix(&format!("{at}embed_q"), Some(HEADS), KV_RANK, QK);
        self.matrix(&format!("{at}unembed_out"), Some(HEADS), V, KV_RANK);
        self.matrix(&format!("{at}o_proj"), None, HIDDEN, HEADS * V);
        let (heads, dim) = INDEX;
        self.matrix(&format!("{at}indexer.wq_b"), None, heads * dim, Q_RANK);
        self.matrix(&format!("{at}indexer.wk"), None, dim, HIDDEN);
        self.vector(&format!("{at}indexer.k_norm"), &[dim]);
        self.single(&format!("{at}indexer.k_norm.bias"), "BF16", &[dim]);
        self.matrix(&format!("{at}indexer.weights_proj"), None, heads, HIDDEN);
        self.single(&format!("{at}indexer.index_kpool_compress_ape"), "BF16", &[KPOOL, dim]);
        self.matrix(&format!("{at}indexer.index_kpool_compress_gate"), None, dim, HIDDEN);
    }

    fn block(&mut self, at: &str, inner: usize) {
        self.matrix(&format!("{at}gate_proj"), None, inner, HIDDEN);
        self.matrix(&format!("{at}up_proj"), None, inner, HIDDEN);
        self.matrix(&format!("{at}down_proj"), None, HIDDEN, inner);
    }

    fn sparse(&mut self, at: &str) {
        let at = format!("{at}mlp.");
        self.matrix(&format!("{at}gate"), None, EXPERTS, HIDDEN);
        self.single(&format!("{at}gate.e_score_correction_bias"), "F32", &[EXPERTS]);
        self.matrix(&format!("{at}experts.gate_proj"), Some(EXPERTS), EXPERT_INNER, HIDDEN);
        self.matrix(&format!("{at}experts.up_proj"), Some(EXPERTS), EXPERT_INNER, HIDDEN);
        self.matrix(&format!("{at}experts.down_proj"), Some(EXPERTS), HIDDEN, EXPERT_INNER);
        self.block(&format!("{at}shared_experts."), EXPERT_INNER);
    }

    fn mtp(&mut self, layer: usize) {
        let at = format!("layers.{layer}.");
        for norm in ["enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"] {
            self.vector(&format!("{at}{norm}"), &[HIDDEN]);
        }
        self.matrix(&format!("{at}eh_proj"), None, HIDDEN, 2 * HIDDEN);
        self.dsa(&at);
        self.sparse(&at);
    }

    fn vision(&mut self) {
        self.vector("visual.patch_embed.proj", &[64, 3, 2, 4, 4]);
        self.single("visual.patch_embed.proj.bias", "BF16", &[64]);
        let at = "visual.blocks.0.";
        for (norm, len) in [("norm1", 64), ("norm2", 64), ("attn.q_norm", 32), ("attn.k_norm", 32)] {
            self.vector(&format!("{at}{norm}"), &[len]);
        }
        for (name, rows, cols) in [
            ("attn.qkv", 192, 64),
            ("attn.proj", 64, 64),
            ("mlp.gate_proj", 128, 64),
            ("mlp.up_proj", 128, 64),
            ("mlp.down_proj", 64, 128),
        ] {
            self.vector(&format!("{at}{name}"), &[rows, cols]);
            self.single(&format!("{at}{name}.bias"), "BF16", &[rows]);
        }
        self.vector("visual.post_layernorm", &[64]);
        self.vector("visual.downsample", &[HIDDEN, 64, 2, 2]);
        self.single("visual.downsample.bias", "BF16", &[HIDDEN]);
        self.vector("visual.merger.proj", &[HIDDEN, HIDDEN]);
        self.vector("visual.merger.post_projection_norm", &[HIDDEN]);
        self.single("visual.merger.post_projection_norm.bias", "BF16", &[HIDDEN]);
        self.vector("visual.merger.gate_proj", &[64, HIDDEN]);
        self.vector("visual.merger.up_proj", &[64, HIDDEN]);
        self.vector("visual.merger.down_proj", &[HIDDEN, 64]);
    }

    /// A bf16 array named `….weight`.
    fn vector(&mut self, name: &str, shape: &[usize]) {
        let array = self.array(name, "weight", "BF16", shape, 1);
        self.modules.insert(name.to_owned(), Module { stack: false, arrays: vec![array] });
    }

    /// An array whose name is the module's.
    fn single(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        let array = self.array(name, "", dtype, shape, 1);
        self.modules.insert(name.to_owned(), Module { stack: false, arrays: vec![array] });
    }

    fn matrix(&mut self, name: &str, stack: Option<usize>, rows: usize, cols: usize) {
        let members = stack.unwrap_or(1);
        let bare = ["_fn", "_gate"].iter().any(|end| name.ends_with(end)) && !name.ends_with("mlp.gate");
        let weight = if bare { "" } else { "weight" };
        let arrays = match self.storage(name) {
            Storage::Bf16 => vec![self.array(name, weight, "BF16", &[rows, cols], members)],
            Storage::F32 => vec![self.array(name, weight, "F32", &[rows, cols], members)],
            Storage::Fp8 => vec![
                self.array(name, weight, "F8_E4M3", &[rows, cols], members),
                self.array(
                    name,
                    "weight_scale_inv",
                    "F32",
                    &[rows.div_ceil(128), cols.div_ceil(128)],
                    members,
                ),
            ],
            Storage::Affine(bits, group) => vec![
                self.array(name, weight, "U32", &[rows, cols * bits / 32], members),
                self.array(name, "scales", "BF16", &[rows, cols / group], members),
                self.array(name, "biases", "BF16", &[rows, cols / group], members),
            ],
        };
        self.modules.insert(name.to_owned(), Module { stack: stack.is_some(), arrays });
    }

    /// Numbers of the type, seeded by the names.
    fn array(
        &self,
        name: &str,
        part: &'static str,
        dtype: &'static str,
        shape: &[usize],
        members: usize,
    ) -> Array {
        let values: usize = shape.iter().product();
        let member = |member: usize| {
            let mut random = Random::new(&format!("{}/{name}.{part}#{member}", self.seed));
            match dtype {
                "F32" if part == "weight_scale_inv" => {
                    (0..values).flat_map(|_| (0.001 + random.unit()).to_le_bytes()).collect()
                }
                "F32" => (0..values).flat_map(|_| (random.unit() - 0.5).to_le_bytes()).collect(),
                "BF16" => (0..values)
                    .flat_map(|_| half::bf16::from_f32(random.unit() - 0.5).to_le_bytes())
                    .collect::<Vec<u8>>(),
                // A NaN is no code that a checkpoint has.
                "F8_E4M3" => {
                    (0..values).map(|_| random.byte()).map(|c| if c & 0x7F == 0x7F { 0 } else { c }).collect()
                }
                _ => (0..values * 4).map(|_| random.byte()).collect(),
            }
        };
        Array { part, dtype, shape: shape.to_vec(), members: (0..members).map(member).collect() }
    }
}

/// The release's key set at the small model's sizes.
pub(crate) fn config() -> Value {
    serde_json::from_str(include_str!("config.json")).unwrap()
}

/// A safetensors file of these tensors.
pub(crate) fn file(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes.len();
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    let json = serde_json::to_vec(&header).unwrap();
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    for tensor in tensors {
        bytes.extend(&tensor.bytes);
    }
    bytes
}

/// A checkpoint of one shard, in memory.
pub(crate) fn source(config: &Value, tensors: &[Tensor]) -> Source {
    files(&[("config.json", serde_json::to_vec(config).unwrap()), ("model.safetensors", file(tensors))])
}

/// Files in memory.
pub(crate) fn files(files: &[(&str, Vec<u8>)]) -> Source {
    let entry = |(name, bytes): &(&str, Vec<u8>)| ((*name).to_owned(), HostBytes::from_vec(bytes.clone()));
    Source::Memory(files.iter().map(entry).collect())
}

/// The checkpoint, or a panic with the reason.
pub(crate) fn open(source: Source) -> Checkpoint {
    Checkpoint::open(source).unwrap_or_else(|error| panic!("{error}"))
}

/// The error that opening ends with.
pub(crate) fn refusal(source: Source) -> Error {
    match Checkpoint::open(source) {
        Ok(checkpoint) => panic!("{checkpoint:?} was opened"),
        Err(error) => error,
    }
}

/// Asserts that an error's text has all of these parts.
pub(crate) fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// A small generator of random bits (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    /// Seeded by a text (FNV-1a).
    pub(crate) fn new(seed: &str) -> Self {
        Self(
            seed.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            }),
        )
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    /// From 0 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
