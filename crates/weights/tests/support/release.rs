//! The release's table of tensors, at full size and without data: names, shapes and types of its FP8 repository.
//!
//! Source: `reference/tensors-and-budget.md` section 1 and `vision.md` section 2.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

const HIDDEN: usize = 4096;
const VOCABULARY: usize = 154_880;
const LAYERS: usize = 45;
const INNER: usize = 2048;

/// A tensor without data.
pub(crate) struct Hollow {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
}

impl Hollow {
    fn bytes(&self) -> usize {
        let size = match self.dtype {
            "F32" | "U32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        self.shape.iter().product::<usize>() * size
    }
}

/// How the release's FP8 matrices are stored.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Form {
    Fp8,
    Affine4,
}

struct Table {
    rows: Vec<Hollow>,
    form: Form,
}

/// All tensors, with this many experts in a layer.
pub(crate) fn tensors(form: Form, experts: usize) -> Vec<Hollow> {
    let mut table = Table { rows: Vec::new(), form };
    let text = "model.language_model.";
    table.plain("lm_head.weight", &[VOCABULARY, HIDDEN]);
    table.plain(&format!("{text}embed_tokens.weight"), &[VOCABULARY, HIDDEN]);
    table.plain(&format!("{text}norm.weight"), &[HIDDEN]);
    for layer in 0..=LAYERS {
        let at = format!("{text}layers.{layer}.");
        table.plain(&format!("{at}input_layernorm.weight"), &[HIDDEN]);
        table.plain(&format!("{at}post_attention_layernorm.weight"), &[HIDDEN]);
        if layer < LAYERS {
            for site in ["attn", "ffn"] {
                table.plain(&format!("{at}hc_{site}_fn"), &[24, 4 * HIDDEN]);
                table.add(format!("{at}hc_{site}_base"), "F32", &[24]);
                table.add(format!("{at}hc_{site}_scale"), "F32", &[3]);
            }
        } else {
            for norm in ["enorm", "hnorm", "shared_head.norm"] {
                table.plain(&format!("{at}{norm}.weight"), &[HIDDEN]);
            }
            table.plain(&format!("{at}eh_proj.weight"), &[HIDDEN, 2 * HIDDEN]);
        }
        if layer % 4 == 3 || layer == LAYERS {
            table.dsa(&format!("{at}self_attn."));
        } else {
            table.kda(&format!("{at}self_attn."));
        }
        if layer < 3 {
            table.block(&format!("{at}mlp."), 12_288);
        } else {
            table.moe(&format!("{at}mlp."), experts);
        }
    }
    table.vision();
    table.rows
}

impl Table {
    fn add(&mut self, name: String, dtype: &'static str, shape: &[usize]) {
        self.rows.push(Hollow { name, dtype, shape: shape.to_vec() });
    }

    fn plain(&mut self, name: &str, shape: &[usize]) {
        self.add(name.to_owned(), "BF16", shape);
    }

    /// A matrix that the release stores in FP8.
    fn quantised(&mut self, name: &str, rows: usize, cols: usize) {
        match self.form {
            Form::Fp8 => {
                self.add(format!("{name}.weight"), "F8_E4M3", &[rows, cols]);
                self.add(format!("{name}.weight_scale_inv"), "F32", &[rows / 128, cols / 128]);
            }
            Form::Affine4 => {
                self.add(format!("{name}.weight"), "U32", &[rows, cols / 8]);
                self.add(format!("{name}.scales"), "BF16", &[rows, cols / 64]);
                self.add(format!("{name}.biases"), "BF16", &[rows, cols / 64]);
            }
        }
    }

    fn kda(&mut self, at: &str) {
        for side in ["q", "k", "v"] {
            self.plain(&format!("{at}{side}_proj.weight"), &[8192, HIDDEN]);
            self.plain(&format!("{at}{side}_conv1d.weight"), &[8192, 1, 4]);
        }
        for gate in ["f", "g"] {
            self.plain(&format!("{at}{gate}_a_proj.weight"), &[128, HIDDEN]);
            self.plain(&format!("{at}{gate}_b_proj.weight"), &[8192, 128]);
        }
        self.plain(&format!("{at}b_proj.weight"), &[64, HIDDEN]);
        self.add(format!("{at}A_log"), "F32", &[64]);
        self.add(format!("{at}dt_bias"), "F32", &[8192]);
        self.plain(&format!("{at}o_norm.weight"), &[128]);
        self.plain(&format!("{at}o_proj.weight"), &[HIDDEN, 8192]);
    }

    fn dsa(&mut self, at: &str) {
        self.quantised(&format!("{at}q_a_proj"), 1536, HIDDEN);
        self.plain(&format!("{at}q_a_layernorm.weight"), &[1536]);
        self.quantised(&format!("{at}q_b_proj"), 16_384, 1536);
        self.quantised(&format!("{at}kv_a_proj_with_mqa"), 512, HIDDEN);
        self.plain(&format!("{at}kv_a_layernorm.weight"), &[512]);
        self.plain(&format!("{at}kv_b_proj.weight"), &[32_768, 512]);
        self.quantised(&format!("{at}o_proj"), HIDDEN, 16_384);
        self.plain(&format!("{at}indexer.wq_b.weight"), &[4096, 1536]);
        self.plain(&format!("{at}indexer.wk.weight"), &[128, HIDDEN]);
        self.plain(&format!("{at}indexer.k_norm.weight"), &[128]);
        self.plain(&format!("{at}indexer.k_norm.bias"), &[128]);
        self.plain(&format!("{at}indexer.weights_proj.weight"), &[32, HIDDEN]);
        self.plain(&format!("{at}indexer.index_kpool_compress_ape"), &[4, 128]);
        self.plain(&format!("{at}indexer.index_kpool_compress_gate"), &[128, HIDDEN]);
    }

    fn block(&mut self, at: &str, inner: usize) {
        self.quantised(&format!("{at}gate_proj"), inner, HIDDEN);
        self.quantised(&format!("{at}up_proj"), inner, HIDDEN);
        self.quantised(&format!("{at}down_proj"), HIDDEN, inner);
    }

    fn moe(&mut self, at: &str, experts: usize) {
        self.plain(&format!("{at}gate.weight"), &[experts, HIDDEN]);
        self.add(format!("{at}gate.e_score_correction_bias"), "F32", &[experts]);
        self.block(&format!("{at}shared_experts."), INNER);
        for expert in 0..experts {
            self.block(&format!("{at}experts.{expert}."), INNER);
        }
    }

    fn vision(&mut self) {
        let at = "model.visual.";
        self.plain(&format!("{at}patch_embed.proj.weight"), &[1024, 3, 2, 14, 14]);
        self.plain(&format!("{at}patch_embed.proj.bias"), &[1024]);
        for block in 0..24 {
            let at = format!("{at}blocks.{block}.");
            for (norm, len) in [("norm1", 1024), ("norm2", 1024), ("attn.q_norm", 64), ("attn.k_norm", 64)] {
                self.plain(&format!("{at}{norm}.weight"), &[len]);
            }
            for (name, rows, cols) in [
                ("attn.qkv", 3072, 1024),
                ("attn.proj", 1024, 1024),
                ("mlp.gate_proj", 4096, 1024),
                ("mlp.up_proj", 4096, 1024),
                ("mlp.down_proj", 1024, 4096),
            ] {
                self.plain(&format!("{at}{name}.weight"), &[rows, cols]);
                self.plain(&format!("{at}{name}.bias"), &[rows]);
            }
        }
        self.plain(&format!("{at}post_layernorm.weight"), &[1024]);
        self.plain(&format!("{at}downsample.weight"), &[HIDDEN, 1024, 2, 2]);
        self.plain(&format!("{at}downsample.bias"), &[HIDDEN]);
        self.plain(&format!("{at}merger.proj.weight"), &[HIDDEN, HIDDEN]);
        self.plain(&format!("{at}merger.post_projection_norm.weight"), &[HIDDEN]);
        self.plain(&format!("{at}merger.post_projection_norm.bias"), &[HIDDEN]);
        self.plain(&format!("{at}merger.gate_proj.weight"), &[10_240, HIDDEN]);
        self.plain(&format!("{at}merger.up_proj.weight"), &[10_240, HIDDEN]);
        self.plain(&format!("{at}merger.down_proj.weight"), &[HIDDEN, 10_240]);
    }
}

/// The release's `config.json`.
pub(crate) fn config(form: Form, experts: usize) -> Value {
    let mut config = super::config();
    let text = config["text_config"].as_object_mut().unwrap();
    let kinds = |layer: usize| if layer % 4 == 3 { "deepseek_sparse_attention" } else { "linear_attention" };
    text.insert("layer_types".into(), (0..LAYERS).map(kinds).collect());
    let halves = |layer: usize| if layer < 3 { "dense" } else { "sparse" };
    text.insert("mlp_layer_types".into(), (0..LAYERS).map(halves).collect());
    text.insert("indexer_types".into(), (0..LAYERS).map(|_| "full").collect());
    text.insert(
        "linear_attn_config".into(),
        json!({"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4}),
    );
    for (key, value) in [
        ("vocab_size", VOCABULARY),
        ("hidden_size", HIDDEN),
        ("num_hidden_layers", LAYERS),
        ("first_k_dense_replace", 3),
        ("num_attention_heads", 64),
        ("num_key_value_heads", 64),
        ("q_lora_rank", 1536),
        ("kv_lora_rank", 512),
        ("qk_nope_head_dim", 256),
        ("qk_head_dim", 256),
        ("v_head_dim", 256),
        ("index_n_heads", 32),
        ("index_head_dim", 128),
        ("index_topk", 2048),
        ("index_kpool", 4),
        ("intermediate_size", 12_288),
        ("moe_intermediate_size", INNER),
        ("n_routed_experts", experts),
        ("num_experts_per_tok", 8),
        ("max_position_embeddings", 1 << 20),
    ] {
        text.insert(key.into(), json!(value));
    }
    config["vision_config"] = json!({
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": HIDDEN,
        "projection_intermediate_size": 10240, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
        "in_channels": 3,
    });
    match form {
        Form::Fp8 => {
            config["quantization_config"] = json!({
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            });
        }
        Form::Affine4 => config["quantization"] = json!({"group_size": 64, "bits": 4, "mode": "affine"}),
    }
    config
}

/// Writes a checkpoint of `shards` files whose data is a hole: the files have their whole length and no blocks on disk.
pub(crate) fn write(folder: &Path, config: &Value, tensors: &[Hollow], shards: usize) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut map = Map::new();
    for (number, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let name = format!("model-{:05}-of-{shards:05}.safetensors", number + 1);
        let (mut header, mut at) = (Map::new(), 0);
        for tensor in part {
            let end = at + tensor.bytes();
            let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]});
            header.insert(tensor.name.clone(), entry);
            map.insert(tensor.name.clone(), json!(name));
            at = end;
        }
        let json = serde_json::to_vec(&header).unwrap();
        let mut file = File::create(folder.join(&name)).unwrap();
        file.write_all(&(json.len() as u64).to_le_bytes()).unwrap();
        file.write_all(&json).unwrap();
        file.set_len((8 + json.len() + at) as u64).unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": map});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}
