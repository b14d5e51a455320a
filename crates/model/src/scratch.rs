//! Device memory of one forward, sized once.
//!
//! Every buffer is written before it is read inside a forward, so nothing of an earlier one is visible.

use flint_backend::{Backend, Element, Rows};
use flint_weights::ModelConfig;
use flint_weights::config::Attention;

use crate::Result;

/// Widths of the activations that several blocks share.
pub(crate) struct Scratch<B: Backend> {
    /// U32 `[rows]`.
    pub(crate) tokens: B::Buffer,
    /// U32 `[rows]`: rows whose logits are wanted.
    pub(crate) wanted: B::Buffer,
    /// `[rows, n · hidden]`.
    pub(crate) streams: B::Buffer,
    /// `[rows, n + n · n]`.
    pub(crate) mix: B::Buffer,
    /// `[rows, hidden]`: a block's input.
    pub(crate) x: B::Buffer,
    /// `[rows, hidden]`: a block's output.
    pub(crate) y: B::Buffer,
    /// Blocks take their intermediate rows from here, front to back.
    arena: B::Buffer,
    arena_len: usize,
    /// U32 `[rows, pools]`: the selection that layers without an indexer reuse.
    pub(crate) pools: B::Buffer,
    /// U32 `[rows, experts_per_token]`.
    pub(crate) picks: B::Buffer,
}

/// Hands out consecutive rows of the arena to one block.
pub(crate) struct Slab<'a, B: Backend> {
    scratch: &'a Scratch<B>,
    next: usize,
}

impl<B: Backend> Scratch<B> {
    /// Buffers for forwards of at most `rows` rows.
    pub(crate) fn new(backend: &mut B, config: &ModelConfig, rows: usize) -> Result<Self> {
        let hidden = config.hidden_size;
        let n = config.streams;
        let arena_len = rows * arena_width(config);
        let pools = config.index_topk / config.index_kpool;
        Ok(Self {
            tokens: backend.allocate(Element::U32, rows)?,
            wanted: backend.allocate(Element::U32, rows)?,
            streams: backend.allocate(Element::F32, rows * n * hidden)?,
            mix: backend.allocate(Element::F32, rows * (n + n * n))?,
            x: backend.allocate(Element::F32, rows * hidden)?,
            y: backend.allocate(Element::F32, rows * hidden)?,
            arena: backend.allocate(Element::F32, arena_len)?,
            arena_len,
            pools: backend.allocate(Element::U32, rows * pools)?,
            picks: backend.allocate(Element::U32, rows * config.experts_per_token)?,
        })
    }

    /// Starts a block: nothing of the arena is in use.
    pub(crate) fn slab(&self) -> Slab<'_, B> {
        Slab { scratch: self, next: 0 }
    }
}

impl<B: Backend> Slab<'_, B> {
    /// The next `rows × width` elements.
    pub(crate) fn rows(&mut self, rows: usize, width: usize) -> Rows<B::Buffer> {
        let first = self.next;
        self.next += rows * width;
        debug_assert!(self.next <= self.scratch.arena_len, "the arena is sized by `arena_width`");
        Rows { buffer: self.scratch.arena.clone(), first, stride: width, width, rows }
    }
}

/// Elements of a row that the widest block keeps at once. Follows the blocks' own requests.
fn arena_width(config: &ModelConfig) -> usize {
    let channels = config.linear_width();
    let kda = kda_projection_width(config) + 3 * channels + 3 * channels;
    let heads = config.heads;
    let dsa = dsa_projection_width(config)
        + heads * config.qk_head_dim
        + config.index_heads * config.index_head_dim
        + 2 * heads * config.kv_lora_rank
        + heads * config.v_head_dim;
    let dense = 3 * config.intermediate_size;
    let pairs = config.experts_per_token;
    let shared = config.moe_intermediate_size * config.shared_experts;
    let sparse = config.experts
        + pairs
        + pairs * (3 * config.moe_intermediate_size + config.hidden_size)
        + 3 * shared
        + config.hidden_size;
    let attention = if config.attention.contains(&Attention::Dsa) { kda.max(dsa) } else { kda };
    attention.max(dense).max(sparse)
}

/// Outputs of a KDA layer's fused input projection: q, k, v, f_a, b, g_a.
pub(crate) fn kda_projection_width(config: &ModelConfig) -> usize {
    3 * config.linear_width() + 2 * config.linear_head_dim + config.linear_heads
}

/// Outputs of a DSA layer's fused input projection: q_a, kv_a, and the indexer's k, γ and weights.
pub(crate) fn dsa_projection_width(config: &ModelConfig) -> usize {
    config.q_lora_rank + config.kv_lora_rank + 2 * config.index_head_dim + config.index_heads
}
