//! The canonical table: every module that a model of this config has, with shape and group.
//!
//! Layouts and encodings do not matter here. Source: `reference/tensors-and-budget.md` section 1, `vision.md` section 2.

use std::collections::HashMap;

use serde::Serialize;

use crate::config::{Attention, FeedForward, ModelConfig, VisionConfig};
use crate::names::exl3;

/// Part of the model that a module belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// Token embedding.
    Embedding,
    /// Kimi delta attention, everything of it.
    Kda,
    /// Latent attention without the indexer.
    Dsa,
    /// Indexers of the latent attention.
    Indexer,
    /// Dense feed-forward blocks.
    Dense,
    /// Routed experts.
    Experts,
    /// Shared experts.
    Shared,
    /// Routers with their correction bias.
    Router,
    /// Hyper-connections.
    HyperConnections,
    /// Norms before the blocks and before the head.
    Norms,
    /// Output head.
    Head,
    /// Experts of the MTP layer.
    MtpExperts,
    /// The rest of the MTP layer.
    Mtp,
    /// Vision tower.
    Vision,
}

/// What a module holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Plain numbers in one of these shapes, sides of 1 aside.
    Array(Vec<Vec<usize>>),
    /// Plain numbers in any shape of this many values.
    Values(usize),
    /// A matrix.
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// Matrices of one shape.
    Stack {
        /// Their number.
        members: usize,
        /// Outputs of each.
        rows: usize,
        /// Inputs of each.
        cols: usize,
    },
}

impl Shape {
    /// Numbers of the whole module.
    pub(crate) fn values(&self) -> usize {
        match self {
            Self::Array(shapes) => shapes.first().map_or(0, |sides| sides.iter().product()),
            Self::Values(values) => *values,
            Self::Matrix { rows, cols } => rows * cols,
            Self::Stack { members, rows, cols } => members * rows * cols,
        }
    }

    /// Rows: of a fused array or matrix, those that this module contributes.
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Array(shapes) => shapes.first().and_then(|sides| sides.first()).copied().unwrap_or(0),
            Self::Values(values) => *values,
            Self::Matrix { rows, .. } | Self::Stack { rows, .. } => *rows,
        }
    }

    /// Members of a stack; 1 for everything else.
    pub(crate) fn members(&self) -> usize {
        if let Self::Stack { members, .. } = self { *members } else { 1 }
    }
}

/// When a module must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Always, or, in an optional group, with any other of the group.
    Always,
    /// The latent's expansion in one matrix: unless the pair below is there.
    Joined,
    /// The same as an absorbed pair: unless the matrix above is there.
    Split,
    /// A vision block's attention input in one module: not used where the block has it in parts.
    Replaced,
    /// These parts: all of them, or none.
    Replacing,
}

/// A module that the model has.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// Canonical name.
    pub(crate) name: String,
    /// What it holds.
    pub(crate) shape: Shape,
    /// What it belongs to.
    pub(crate) group: Group,
    /// When it must be there.
    pub(crate) need: Need,
}

/// All modules of a model.
#[derive(Debug)]
pub(crate) struct Table {
    /// The modules, in the order of the network.
    pub(crate) specs: Vec<Spec>,
    by_name: HashMap<String, usize>,
}

impl Table {
    /// The table of a config.
    pub(crate) fn new(config: &ModelConfig, vision: Option<&VisionConfig>) -> Self {
        let mut rows = Rows { config, specs: Vec::new() };
        rows.trunk();
        for layer in config.layers()..config.layers() + config.mtp_layers.max(1) {
            rows.mtp(layer);
        }
        if let Some(tower) = vision {
            rows.vision(tower);
        }
        let by_name = rows.specs.iter().enumerate().map(|(at, spec)| (spec.name.clone(), at)).collect();
        Self { specs: rows.specs, by_name }
    }

    /// The place of a module in [`specs`](Self::specs).
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}

/// A table in the making.
struct Rows<'a> {
    config: &'a ModelConfig,
    specs: Vec<Spec>,
}

impl Rows<'_> {
    fn add(&mut self, name: String, group: Group, shape: Shape) {
        self.specs.push(Spec { name, shape, group, need: Need::Always });
    }

    fn matrix(&mut self, name: String, group: Group, rows: usize, cols: usize) {
        self.add(name, group, Shape::Matrix { rows, cols });
    }

    fn vector(&mut self, name: String, group: Group, len: usize) {
        self.add(name, group, Shape::Array(vec![vec![len]]));
    }

    fn trunk(&mut self) {
        let config = self.config;
        let hidden = config.hidden_size;
        self.matrix("embed_tokens".into(), Group::Embedding, config.vocab_size, hidden);
        for layer in 0..config.layers() {
            let at = format!("layers.{layer}.");
            self.vector(format!("{at}input_layernorm"), Group::Norms, hidden);
            self.vector(format!("{at}post_attention_layernorm"), Group::Norms, hidden);
            self.hyper_connections(&at);
            match config.attention[layer] {
                Attention::Kda => self.kda(&at),
                Attention::Dsa => {
                    self.dsa(&at, Group::Dsa, config.own_indexer[layer].then_some(Group::Indexer));
                }
            }
            match config.feed_forward[layer] {
                FeedForward::Dense => {
                    self.block(&format!("{at}mlp."), Group::Dense, config.intermediate_size);
                }
                FeedForward::Sparse => self.sparse(&at, Group::Router, Group::Experts, Group::Shared),
            }
        }
        self.vector("norm".into(), Group::Norms, hidden);
        self.matrix("lm_head".into(), Group::Head, config.vocab_size, hidden);
    }

    fn hyper_connections(&mut self, at: &str) {
        let streams = self.config.streams;
        let outputs = (2 + streams) * streams;
        for site in ["attn", "ffn"] {
            let group = Group::HyperConnections;
            self.matrix(format!("{at}hc_{site}_fn"), group, outputs, streams * self.config.hidden_size);
            self.vector(format!("{at}hc_{site}_base"), group, outputs);
            self.vector(format!("{at}hc_{site}_scale"), group, 3);
        }
    }

    fn kda(&mut self, at: &str) {
        let config = self.config;
        let (hidden, width, dim) = (config.hidden_size, config.linear_width(), config.linear_head_dim);
        let (group, at) = (Group::Kda, format!("{at}self_attn."));
        for side in ["q", "k", "v"] {
            self.matrix(format!("{at}{side}_proj"), group, width, hidden);
            let taps = config.linear_conv_taps;
            self.add(format!("{at}{side}_conv1d"), group, Shape::Array(vec![vec![width, taps]]));
        }
        for gate in ["f", "g"] {
            self.matrix(format!("{at}{gate}_a_proj"), group, dim, hidden);
            self.matrix(format!("{at}{gate}_b_proj"), group, width, dim);
        }
        self.matrix(format!("{at}b_proj"), group, config.linear_heads, hidden);
        self.add(format!("{at}A_log"), group, Shape::Values(config.linear_heads));
        self.add(format!("{at}dt_bias"), group, Shape::Values(width));
        self.vector(format!("{at}o_norm"), group, dim);
        self.matrix(format!("{at}o_proj"), group, hidden, width);
    }

    fn dsa(&mut self, at: &str, group: Group, indexer: Option<Group>) {
        let config = self.config;
        let (hidden, heads) = (config.hidden_size, config.heads);
        let (q_rank, kv_rank) = (config.q_lora_rank, config.kv_lora_rank);
        let (qk, v) = (config.qk_head_dim, config.v_head_dim);
        let at = format!("{at}self_attn.");
        self.matrix(format!("{at}q_a_proj"), group, q_rank, hidden);
        self.vector(format!("{at}q_a_layernorm"), group, q_rank);
        self.matrix(format!("{at}q_b_proj"), group, heads * qk, q_rank);
        self.matrix(format!("{at}kv_a_proj_with_mqa"), group, kv_rank, hidden);
        self.vector(format!("{at}kv_a_layernorm"), group, kv_rank);
        let mut latent = |name: &str, shape, need| {
            self.specs.push(Spec { name: format!("{at}{name}"), shape, group, need });
        };
        latent("kv_b_proj", Shape::Matrix { rows: heads * (qk + v), cols: kv_rank }, Need::Joined);
        latent("embed_q", Shape::Stack { members: heads, rows: kv_rank, cols: qk }, Need::Split);
        latent("unembed_out", Shape::Stack { members: heads, rows: v, cols: kv_rank }, Need::Split);
        self.matrix(format!("{at}o_proj"), group, hidden, heads * v);
        if let Some(group) = indexer {
            self.indexer(&format!("{at}indexer."), group);
        }
    }

    fn indexer(&mut self, at: &str, group: Group) {
        let config = self.config;
        let (heads, dim) = (config.index_heads, config.index_head_dim);
        self.matrix(format!("{at}wq_b"), group, heads * dim, config.q_lora_rank);
        self.matrix(format!("{at}wk"), group, dim, config.hidden_size);
        self.vector(format!("{at}k_norm"), group, dim);
        self.vector(format!("{at}k_norm.bias"), group, dim);
        self.matrix(format!("{at}weights_proj"), group, heads, config.hidden_size);
        let ape = Shape::Array(vec![vec![config.index_kpool, dim]]);
        self.add(format!("{at}index_kpool_compress_ape"), group, ape);
        self.matrix(format!("{at}index_kpool_compress_gate"), group, dim, config.hidden_size);
    }

    /// A SwiGLU block of inner width `inner`.
    fn block(&mut self, at: &str, group: Group, inner: usize) {
        let hidden = self.config.hidden_size;
        self.matrix(format!("{at}gate_proj"), group, inner, hidden);
        self.matrix(format!("{at}up_proj"), group, inner, hidden);
        self.matrix(format!("{at}down_proj"), group, hidden, inner);
    }

    fn sparse(&mut self, at: &str, router: Group, experts: Group, shared: Group) {
        let config = self.config;
        let (hidden, inner, members) = (config.hidden_size, config.moe_intermediate_size, config.experts);
        let at = format!("{at}mlp.");
        self.matrix(format!("{at}gate"), router, members, hidden);
        self.vector(format!("{at}gate.e_score_correction_bias"), router, members);
        for (name, rows, cols) in
            [("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)]
        {
            self.add(format!("{at}experts.{name}"), experts, Shape::Stack { members, rows, cols });
        }
        self.block(&format!("{at}shared_experts."), shared, config.shared_experts * inner);
    }

    fn mtp(&mut self, layer: usize) {
        let hidden = self.config.hidden_size;
        let (at, group) = (format!("layers.{layer}."), Group::Mtp);
        for norm in ["enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm"] {
            self.vector(format!("{at}{norm}"), group, hidden);
        }
        self.matrix(format!("{at}eh_proj"), group, hidden, 2 * hidden);
        self.dsa(&at, group, Some(group));
        self.sparse(&at, group, Group::MtpExperts, group);
    }

    fn vision(&mut self, tower: &VisionConfig) {
        let group = Group::Vision;
        let (hidden, inner, out) = (tower.hidden_size, tower.intermediate_size, tower.out_hidden_size);
        let (time, patch, colours) = (tower.temporal_patch_size, tower.patch_size, tower.channels);
        // Convolutions are stored with their channels first (the release) or last (MLX).
        let first = vec![hidden, colours, time, patch, patch];
        let last = vec![hidden, time, patch, patch, colours];
        self.add("visual.patch_embed.proj".into(), group, Shape::Array(vec![first, last]));
        self.vector("visual.patch_embed.proj.bias".into(), group, hidden);
        for block in 0..tower.depth {
            let at = format!("visual.blocks.{block}.");
            for (norm, len) in [("norm1", hidden), ("norm2", hidden)] {
                self.vector(format!("{at}{norm}"), group, len);
            }
            for norm in ["attn.q_norm", "attn.k_norm"] {
                self.vector(format!("{at}{norm}"), group, hidden / tower.heads);
            }
            let mut linear = |name: &str, rows, cols, need| {
                let name = format!("{at}{name}");
                let bias = Shape::Array(vec![vec![rows]]);
                self.specs.push(Spec {
                    name: name.clone(),
                    shape: Shape::Matrix { rows, cols },
                    group,
                    need,
                });
                self.specs.push(Spec { name: format!("{name}.bias"), shape: bias, group, need });
            };
            linear(exl3::VISION_WHOLE, 3 * hidden, hidden, Need::Replaced);
            for part in exl3::VISION_SPLIT {
                linear(part, hidden, hidden, Need::Replacing);
            }
            linear("attn.proj", hidden, hidden, Need::Always);
            linear("mlp.gate_proj", inner, hidden, Need::Always);
            linear("mlp.up_proj", inner, hidden, Need::Always);
            linear("mlp.down_proj", hidden, inner, Need::Always);
        }
        self.vector("visual.post_layernorm".into(), group, hidden);
        let side = tower.spatial_merge_size;
        let shapes = vec![vec![out, hidden, side, side], vec![out, side, side, hidden]];
        self.add("visual.downsample".into(), group, Shape::Array(shapes));
        self.vector("visual.downsample.bias".into(), group, out);
        self.matrix("visual.merger.proj".into(), group, out, out);
        self.vector("visual.merger.post_projection_norm".into(), group, out);
        self.vector("visual.merger.post_projection_norm.bias".into(), group, out);
        let projection = tower.projection_intermediate_size;
        self.matrix("visual.merger.gate_proj".into(), group, projection, out);
        self.matrix("visual.merger.up_proj".into(), group, projection, out);
        self.matrix("visual.merger.down_proj".into(), group, out, projection);
    }
}
