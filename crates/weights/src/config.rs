//! `config.json`: the sizes of the model, nothing defaulted silently.
//!
//! [`read`] finds and checks the keys; here are the types that come out of it.
//! Source: `reference/glm5_next.md` section 2.

mod keys;
mod read;

pub(crate) use keys::shorten;

/// The text network's sizes and constants, after aliases were resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// What each layer mixes tokens with; its length is the number of layers.
    pub attention: Vec<Attention>,
    /// What each layer's second half is.
    pub feed_forward: Vec<FeedForward>,
    /// Whether a DSA layer has an indexer of its own (`full`) or reuses the selection of the DSA layer before it.
    /// Indexed by layer.
    pub own_indexer: Vec<bool>,
    /// KDA heads.
    pub linear_heads: usize,
    /// Key and value width of a KDA head.
    pub linear_head_dim: usize,
    /// Taps of the causal convolution.
    pub linear_conv_taps: usize,
    /// Lower bound of the log decay; `None` selects the softplus gate.
    pub linear_lower_bound: Option<f32>,
    /// Attention heads of a DSA layer.
    pub heads: usize,
    /// Rank of the query's low-rank projection.
    pub q_lora_rank: usize,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Key width of a head.
    pub qk_head_dim: usize,
    /// Value width of a head.
    pub v_head_dim: usize,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Width of an indexer head.
    pub index_head_dim: usize,
    /// Tokens that the indexer selects (a multiple of `index_kpool`).
    pub index_topk: usize,
    /// Tokens of a pool.
    pub index_kpool: usize,
    /// Inner width of the dense feed-forward blocks.
    pub intermediate_size: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Routed experts of a sparse layer.
    pub experts: usize,
    /// Experts that a row uses.
    pub experts_per_token: usize,
    /// Shared experts (their widths add up to one block).
    pub shared_experts: usize,
    /// Groups of the group-limited routing; 1 turns it off.
    pub expert_groups: usize,
    /// Groups that a row may use.
    pub expert_groups_kept: usize,
    /// Whether the picked weights are normalised to sum 1 before scaling.
    pub norm_topk_prob: bool,
    /// Factor of the routed experts' weights.
    pub routed_scaling_factor: f32,
    /// Bound of the clamped SwiGLU.
    pub swiglu_limit: f32,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f32,
    /// Residual streams.
    pub streams: usize,
    /// Rounds of the Sinkhorn normalisation.
    pub sinkhorn_rounds: usize,
    /// Epsilon of the hyper-connections.
    pub hc_eps: f32,
    /// MTP layers that the checkpoint says it has.
    pub mtp_layers: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Tokens that end a generation, in ascending order.
    pub eos_tokens: Vec<u32>,
}

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Kimi delta attention: a recurrent state of fixed size.
    Kda,
    /// Latent attention over positions that a pooled indexer selects.
    Dsa,
}

/// The second half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FeedForward {
    /// One SwiGLU block.
    Dense,
    /// Routed experts and a shared one.
    Sparse,
}

impl ModelConfig {
    /// Number of layers of the trunk.
    pub fn layers(&self) -> usize {
        self.attention.len()
    }

    /// Channels of each of a KDA layer's q, k and v.
    pub fn linear_width(&self) -> usize {
        self.linear_heads * self.linear_head_dim
    }
}

/// The vision tower's sizes. They matter for checking the tower's tensors and for the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisionConfig {
    /// Blocks of the tower.
    pub depth: usize,
    /// Width of a patch's row.
    pub hidden_size: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of a block's SwiGLU.
    pub intermediate_size: usize,
    /// Width of a feature: that of the text network.
    pub out_hidden_size: usize,
    /// Inner width of the merger.
    pub projection_intermediate_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames of a patch.
    pub temporal_patch_size: usize,
    /// Side in patches of the square that becomes one feature.
    pub spatial_merge_size: usize,
    /// Colours of a pixel.
    pub channels: usize,
}
