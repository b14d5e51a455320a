//! What a load would cost, as plain data: made from shapes and `config.json`, before a weight is read.
//!
//! [`fit`] says what to change when it does not fit, [`render`] makes the table for a terminal. Which bytes a sequence
//! needs follows from the layers' states: `reference/glm5_next.md` sections 5 and 6.4.

mod fit;
mod render;
mod slots;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::checkpoint::Checkpoint;
use crate::config::{Attention, FeedForward, ModelConfig};
use crate::encoding::{Encoding, Stored};
use crate::table::{Group, Need, Shape, Spec};

pub use slots::{ExpertsWanted, SlotsPlan};

/// Positions of a page of the latent attention's cache, when a pool's size divides them.
const PAGE_POSITIONS: usize = 256;

/// What a load is asked to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlanRequest {
    /// Longest sequence, prompt and reply together.
    pub context: usize,
    /// Sequences that may be open at once.
    pub sequences: usize,
    /// Bytes of a cached number of the latent attention: 4 (fp32) or 2 (bf16).
    pub cache_element_bytes: usize,
    /// Drafts of one span.
    pub drafts_max: usize,
    /// Most rows of one forward: working memory grows with them.
    pub rows: usize,
    /// Memory that the load may use, where it is known.
    pub machine_bytes: Option<u64>,
    /// Whether that memory is a device's own, and not the machine's.
    pub on_device: bool,
    /// Which routed experts are to be in memory.
    pub experts: ExpertsWanted,
}

impl PlanRequest {
    /// Whose memory it is, in words.
    fn holder(&self) -> &'static str {
        if self.on_device { "the device" } else { "this machine" }
    }
}

/// The model's sizes in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelSummary {
    /// Layers of the trunk.
    pub layers: usize,
    /// Of them with Kimi delta attention.
    pub kda_layers: usize,
    /// Of them with sparse latent attention.
    pub dsa_layers: usize,
    /// Of them with routed experts.
    pub sparse_layers: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Routed experts of a sparse layer.
    pub experts: usize,
    /// Experts that a row uses.
    pub experts_per_token: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Longest sequence that the model knows.
    pub max_positions: usize,
    /// Weights of the trunk, embedding and head.
    pub parameters: u64,
    /// Of them those that one token multiplies (no embedding; experts by share).
    pub active_parameters: u64,
}

/// A part of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupPlan {
    /// Which part.
    pub group: Group,
    /// Matrices, each expert and head counted.
    pub matrices: usize,
    /// Weights.
    pub values: u64,
    /// Bytes in the checkpoint.
    pub stored_bytes: u64,
    /// Bytes in memory; 0 for a part that is not loaded.
    pub resident_bytes: u64,
}

/// All loaded matrices of one encoding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WidthPlan {
    /// The encoding.
    pub encoding: Encoding,
    /// Matrices.
    pub matrices: usize,
    /// Weights.
    pub values: u64,
    /// Bytes in the checkpoint, scales included.
    pub bytes: u64,
    /// Bits of a weight, scales included.
    pub bits_per_weight: f64,
}

/// Bytes of one sequence's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StatePlan {
    /// Recurrent matrices of the KDA layers, fp32.
    pub kda_state: u64,
    /// Rows before the convolution, fp32.
    pub kda_window: u64,
    /// Scan inputs of drafts, fp32.
    pub kda_log: u64,
    /// Raw indexer keys of the open pool and of drafts, fp32.
    pub dsa_ring: u64,
    /// Latents of one token.
    pub latents_per_token: u64,
    /// Pooled indexer keys of one pool.
    pub pooled_keys_per_pool: u64,
    /// Tokens of a pool.
    pub pool_tokens: u64,
    /// Tokens of a page: the cache grows by pages.
    pub page_tokens: u64,
}

impl StatePlan {
    fn new(config: &ModelConfig, request: &PlanRequest) -> Self {
        let layers = |kind| config.attention.iter().filter(|attention| **attention == kind).count() as u64;
        let (kda, dsa) = (layers(Attention::Kda), layers(Attention::Dsa));
        let (width, heads, drafts) =
            (config.linear_width() as u64, config.linear_heads as u64, request.drafts_max as u64);
        let (pool, cached) = (config.index_kpool as u64, request.cache_element_bytes as u64);
        let key = config.index_head_dim as u64;
        Self {
            kda_state: kda * width * config.linear_head_dim as u64 * 4,
            kda_window: kda * (config.linear_conv_taps as u64 - 1 + drafts) * 3 * width * 4,
            kda_log: kda * drafts * (3 * width + heads) * 4,
            dsa_ring: dsa * (pool + drafts) * 2 * key * 4,
            latents_per_token: dsa * config.kv_lora_rank as u64 * cached,
            pooled_keys_per_pool: dsa * key * cached,
            pool_tokens: pool,
            page_tokens: (PAGE_POSITIONS as u64).div_ceil(pool) * pool,
        }
    }

    /// Bytes that a sequence has whatever its length.
    pub fn fixed_bytes(&self) -> u64 {
        self.kda_state + self.kda_window + self.kda_log + self.dsa_ring
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        self.page_tokens * self.latents_per_token
            + self.page_tokens / self.pool_tokens * self.pooled_keys_per_pool
    }

    /// Bytes that a further token costs, on average.
    pub fn bytes_per_token(&self) -> f64 {
        self.page_bytes() as f64 / self.page_tokens as f64
    }

    /// Bytes of a sequence of `tokens` tokens.
    pub fn bytes(&self, tokens: u64) -> u64 {
        self.fixed_bytes() + tokens.div_ceil(self.page_tokens) * self.page_bytes()
    }
}

/// What a load would cost. Nothing is read to make it but headers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadPlan {
    /// Where the checkpoint is.
    pub source: String,
    /// What was asked for.
    pub request: PlanRequest,
    /// The model.
    pub model: ModelSummary,
    /// Tensors of the checkpoint.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Parts of the model, those that are not loaded included.
    pub groups: Vec<GroupPlan>,
    /// Loaded matrices by encoding.
    pub widths: Vec<WidthPlan>,
    /// The slots of the experts, where not all of them are in memory.
    pub slots: Option<SlotsPlan>,
    /// Weights in memory.
    pub weight_bytes: u64,
    /// Weights that one decoded token reads.
    pub weight_bytes_per_token: u64,
    /// One sequence's state.
    pub state: StatePlan,
    /// States of all sequences at the whole context.
    pub state_bytes: u64,
    /// Activations of a forward, estimated.
    pub working_bytes: u64,
    /// Everything.
    pub total_bytes: u64,
    /// Whether it fits, where the machine's memory is known.
    pub fits: Option<bool>,
    /// What to change when it does not fit.
    pub advice: Vec<String>,
    /// What the user should know of the checkpoint.
    pub warnings: Vec<String>,
}

impl LoadPlan {
    /// The plan of a checkpoint.
    pub fn new(checkpoint: &Checkpoint, request: &PlanRequest) -> Self {
        let config = checkpoint.config();
        let mut groups = groups(checkpoint);
        let model = summary(config, &groups);
        let weight_bytes_per_token = per_token(config, &groups, |group| group.resident_bytes);
        let state = StatePlan::new(config, request);
        let state_bytes = request.sequences as u64 * state.bytes(request.context as u64);
        let working_bytes = working_bytes(config, request.rows);
        let all_bytes: u64 = groups.iter().map(|group| group.resident_bytes).sum();
        let mut slots = None;
        if let Some(experts) = groups.iter_mut().find(|group| group.group == Group::Experts) {
            let others = all_bytes - experts.resident_bytes + state_bytes + working_bytes;
            slots = SlotsPlan::new(checkpoint, request, others, experts.resident_bytes);
            if let Some(slots) = &slots {
                experts.resident_bytes = slots.bytes();
            }
        }
        let weight_bytes = groups.iter().map(|group| group.resident_bytes).sum();
        let total_bytes = weight_bytes + state_bytes + working_bytes;
        let mut plan = Self {
            source: checkpoint.source().label(),
            request: *request,
            model,
            tensors: checkpoint.tensors(),
            tensor_bytes: checkpoint.tensor_bytes(),
            widths: widths(checkpoint),
            slots,
            weight_bytes,
            weight_bytes_per_token,
            groups,
            state,
            state_bytes,
            working_bytes,
            total_bytes,
            fits: request.machine_bytes.map(|machine| total_bytes <= machine),
            advice: Vec::new(),
            warnings: checkpoint.warnings().to_vec(),
        };
        plan.advice = fit::advice(&plan, checkpoint);
        plan
    }

    /// Bytes of weights in memory.
    pub fn resident_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Why the load does not fit and what to change, or `None` when it fits or the machine's memory is unknown.
    pub fn shortage(&self) -> Option<String> {
        let machine = self.request.machine_bytes.filter(|machine| self.total_bytes > *machine)?;
        let mut text = format!(
            "the model needs {} (weights {}, state {}, working memory {}), {} can give {}",
            render::bytes(self.total_bytes),
            render::bytes(self.weight_bytes),
            render::bytes(self.state_bytes),
            render::bytes(self.working_bytes),
            self.request.holder(),
            render::bytes(machine)
        );
        for advice in &self.advice {
            text.push_str("; ");
            text.push_str(advice);
        }
        Some(text)
    }

    /// The plan as text of at most `width` columns (at least 80).
    pub fn render(&self, width: usize) -> String {
        render::render(self, width)
    }
}

/// Whether a part is loaded: the trunk is, the MTP layer and the vision tower are not.
fn is_loaded(group: Group) -> bool {
    !matches!(group, Group::Mtp | Group::MtpExperts | Group::Vision)
}

fn is_matrix(spec: &Spec) -> bool {
    matches!(spec.shape, Shape::Matrix { .. } | Shape::Stack { .. })
}

/// Matrices of a module. The latent's expansion counts as its heads' pairs, however it is stored.
fn matrices(spec: &Spec, members: &[Stored], config: &ModelConfig) -> usize {
    match spec.need {
        _ if !is_matrix(spec) => 0,
        Need::Joined if !members.is_empty() => 2 * config.heads,
        _ => members.len(),
    }
}

/// Bytes of a module in memory: matrices as they are stored, arrays as fp32. The key half of a quantised `kv_b_proj` is
/// transposed to fp32 numbers.
fn resident_bytes(spec: &Spec, members: &[Stored], config: &ModelConfig) -> u64 {
    let stored = members.iter().map(Stored::bytes).sum();
    if !is_matrix(spec) {
        return spec.shape.values() as u64 * 4;
    }
    let quantised = members.iter().any(|member| !matches!(member.encoding, Encoding::Plain(_)));
    if spec.need != Need::Joined || !quantised {
        return stored;
    }
    let (keys, values) = (config.qk_head_dim as u64, config.v_head_dim as u64);
    let transposed = config.heads as u64 * keys * config.kv_lora_rank as u64 * 4;
    stored * values / (keys + values) + transposed
}

impl Checkpoint {
    /// Bytes that the trunk's matrices will have in memory: what a loader counts against.
    pub fn trunk_bytes(&self) -> u64 {
        let modules = self.table.specs.iter().zip(&self.stored);
        let loaded =
            modules.filter(|(spec, members)| is_loaded(spec.group) && is_matrix(spec) && !members.is_empty());
        loaded.map(|(spec, members)| resident_bytes(spec, members, self.config())).sum()
    }
}

fn groups(checkpoint: &Checkpoint) -> Vec<GroupPlan> {
    let mut groups: BTreeMap<Group, GroupPlan> = BTreeMap::new();
    for (spec, members) in checkpoint.table.specs.iter().zip(&checkpoint.stored) {
        if members.is_empty() {
            continue;
        }
        let group = spec.group;
        let empty = GroupPlan { group, matrices: 0, values: 0, stored_bytes: 0, resident_bytes: 0 };
        let plan = groups.entry(group).or_insert(empty);
        plan.matrices += matrices(spec, members, checkpoint.config());
        plan.values += spec.shape.values() as u64;
        plan.stored_bytes += members.iter().map(Stored::bytes).sum::<u64>();
        plan.resident_bytes +=
            if is_loaded(group) { resident_bytes(spec, members, checkpoint.config()) } else { 0 };
    }
    groups.into_values().collect()
}

fn widths(checkpoint: &Checkpoint) -> Vec<WidthPlan> {
    let mut widths: BTreeMap<Encoding, (usize, u64, u64)> = BTreeMap::new();
    for (spec, members) in checkpoint.table.specs.iter().zip(&checkpoint.stored) {
        if !is_loaded(spec.group) || !is_matrix(spec) {
            continue;
        }
        // Members of a stack may be trellises of different widths.
        for alike in members.chunk_by(|a, b| a.encoding == b.encoding) {
            let width = widths.entry(alike[0].encoding).or_default();
            width.0 += matrices(spec, alike, checkpoint.config());
            width.1 += (spec.shape.values() / members.len() * alike.len()) as u64;
            width.2 += alike.iter().map(Stored::bytes).sum::<u64>();
        }
    }
    let plan = |(encoding, (matrices, values, bytes)): (Encoding, (usize, u64, u64))| WidthPlan {
        encoding,
        matrices,
        values,
        bytes,
        bits_per_weight: bytes as f64 * 8.0 / values as f64,
    };
    let mut widths: Vec<_> = widths.into_iter().map(plan).collect();
    widths.sort_by_key(|width| std::cmp::Reverse(width.bytes));
    widths
}

/// What one token uses of the trunk: everything but the embedding, of the experts its share.
fn per_token(config: &ModelConfig, groups: &[GroupPlan], of: impl Fn(&GroupPlan) -> u64) -> u64 {
    let share = |group: &GroupPlan| match group.group {
        Group::Embedding => 0,
        Group::Experts => of(group) / config.experts as u64 * config.experts_per_token as u64,
        other if is_loaded(other) => of(group),
        _ => 0,
    };
    groups.iter().map(share).sum()
}

fn summary(config: &ModelConfig, groups: &[GroupPlan]) -> ModelSummary {
    let layers = |kind| config.attention.iter().filter(|attention| **attention == kind).count();
    ModelSummary {
        layers: config.layers(),
        kda_layers: layers(Attention::Kda),
        dsa_layers: layers(Attention::Dsa),
        sparse_layers: config.feed_forward.iter().filter(|half| **half == FeedForward::Sparse).count(),
        hidden_size: config.hidden_size,
        experts: config.experts,
        experts_per_token: config.experts_per_token,
        vocabulary: config.vocab_size,
        max_positions: config.max_positions,
        parameters: groups.iter().filter(|group| is_loaded(group.group)).map(|group| group.values).sum(),
        active_parameters: per_token(config, groups, |group| group.values),
    }
}

/// Activations of a forward of `rows` rows, fp32: the streams, a block's input and output, and the widest
/// block's intermediate rows.
fn working_bytes(config: &ModelConfig, rows: usize) -> u64 {
    let kda = 9 * config.linear_width() + 2 * config.linear_head_dim + config.linear_heads;
    let index = config.index_heads * (config.index_head_dim + 1) + 2 * config.index_head_dim;
    let latent = config.heads * (config.qk_head_dim + 2 * config.kv_lora_rank + config.v_head_dim);
    let dsa = config.q_lora_rank + config.kv_lora_rank + index + latent;
    let expert = 3 * config.moe_intermediate_size + config.hidden_size + 1;
    let shared = 3 * config.moe_intermediate_size * config.shared_experts;
    let sparse = config.experts + config.experts_per_token * expert + shared + config.hidden_size;
    let block = kda.max(dsa).max(sparse).max(3 * config.intermediate_size);
    let selection = config.index_topk / config.index_kpool;
    let row = (config.streams + 2) * config.hidden_size + block + selection;
    (rows * row * 4) as u64
}
