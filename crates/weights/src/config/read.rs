//! Keys of `config.json` to sizes: aliases resolved, contradictions and unknown values refused by name.
//!
//! The order of resolution is that of `reference/glm5_next.md` section 2.2.

use serde_json::{Map, Value, json};

use super::keys::Keys;
use super::{Attention, FeedForward, ModelConfig, VisionConfig};
use crate::Result;

/// Layers that a model may have, so that a hostile config cannot ask for unbounded tables.
const LAYER_BOUND: usize = 512;
/// Experts that a layer may have, for the same reason.
const EXPERT_BOUND: usize = 4096;

impl ModelConfig {
    /// Reads the text network's sizes from a parsed `config.json`.
    ///
    /// # Errors
    /// A key that is missing, has a value outside its range, has a value that Flint does not run, or contradicts
    /// another key; the error names the key.
    pub fn from_json(config: &Map<String, Value>) -> Result<Self> {
        let top = Keys::new(config, "");
        let nested = top.object("text_config")?;
        let text = nested.map_or(top, |map| Keys::new(map, "text_config."));
        check_model(&top)?;
        check_fixed(&top, &text)?;

        let layers = text.bounded("num_hidden_layers", LAYER_BOUND)?;
        let attention = attention(&text, layers)?;
        let own_indexer = own_indexer(&text, &attention)?;
        let linear = Linear::read(&text, &attention)?;
        let index_kpool = index_kpool(&text)?;
        let experts = experts(&text)?;
        let routing = Routing::read(&text, experts)?;
        Ok(Self {
            vocab_size: text.size("vocab_size")?,
            hidden_size: text.size("hidden_size")?,
            feed_forward: feed_forward(&text, layers)?,
            attention,
            own_indexer,
            linear_heads: linear.heads,
            linear_head_dim: linear.head_dim,
            linear_conv_taps: linear.taps,
            linear_lower_bound: linear.lower_bound,
            heads: attention_heads(&text)?,
            q_lora_rank: text.size("q_lora_rank")?,
            kv_lora_rank: text.size("kv_lora_rank")?,
            qk_head_dim: qk_head_dim(&text)?,
            v_head_dim: text.size("v_head_dim")?,
            index_heads: text.size("index_n_heads")?,
            index_head_dim: text.size("index_head_dim")?,
            index_topk: index_topk(&text, index_kpool)?,
            index_kpool,
            intermediate_size: text.size("intermediate_size")?,
            moe_intermediate_size: text.size("moe_intermediate_size")?,
            experts,
            experts_per_token: routing.picks,
            shared_experts: text.bounded("n_shared_experts", EXPERT_BOUND)?,
            expert_groups: routing.groups,
            expert_groups_kept: routing.groups_kept,
            norm_topk_prob: text.flag("norm_topk_prob")?,
            routed_scaling_factor: text.positive("routed_scaling_factor")?,
            swiglu_limit: text.positive("swiglu_limit")?,
            rms_norm_eps: text.positive("rms_norm_eps")?,
            streams: text.bounded("hc_mult", 16)?,
            sinkhorn_rounds: text.bounded("hc_sinkhorn_iters", 1000)?,
            hc_eps: text.positive("hc_eps")?,
            mtp_layers: mtp_layers(&text)?,
            max_positions: text.size("max_position_embeddings")?,
            eos_tokens: eos_tokens(&top, &text)?,
        })
    }
}

impl VisionConfig {
    /// Reads the vision tower's sizes from a parsed `config.json`; `None` when it has no `vision_config`.
    ///
    /// # Errors
    /// A size that is missing or outside its range; the error names the key.
    pub fn from_json(config: &Map<String, Value>) -> Result<Option<Self>> {
        let Some(map) = Keys::new(config, "").object("vision_config")? else { return Ok(None) };
        let keys = Keys::new(map, "vision_config.");
        let tower = Self {
            depth: keys.bounded("depth", LAYER_BOUND)?,
            hidden_size: keys.size("hidden_size")?,
            heads: keys.size("num_heads")?,
            intermediate_size: keys.size("intermediate_size")?,
            out_hidden_size: keys.size("out_hidden_size")?,
            projection_intermediate_size: keys.size("projection_intermediate_size")?,
            patch_size: keys.bounded("patch_size", 1024)?,
            temporal_patch_size: keys.bounded("temporal_patch_size", 64)?,
            spatial_merge_size: keys.bounded("spatial_merge_size", 64)?,
            channels: keys.bounded("in_channels", 64)?,
        };
        if tower.hidden_size.is_multiple_of(tower.heads) {
            Ok(Some(tower))
        } else {
            Err(keys.wrong("num_heads", "a divisor of vision_config.hidden_size"))
        }
    }
}

/// Refuses another model.
fn check_model(top: &Keys<'_>) -> Result<()> {
    let expected = "\"glm5_next\" (GLM-5.3-Flash), the one family that Flint runs";
    match top.optional_text("model_type")? {
        Some("glm5_next" | "glm5_next_text") => Ok(()),
        Some(drafter @ "glm5_next_mtp") => {
            let found = format!("is {drafter:?}, a drafter without its model");
            Err(top.error("model_type", found, expected, "open the folder of the model itself"))
        }
        Some(_) if top.has("dflash_config") => {
            let found = "belongs to a DFlash2 drafter without its model".to_owned();
            Err(top.error("model_type", found, expected, "open the folder of the model itself"))
        }
        Some(other) => {
            let found = format!("is {other:?}");
            Err(top.error("model_type", found, expected, "open a checkpoint of that model"))
        }
        None => Err(top.missing("model_type", expected)),
    }
}

/// Refuses values of known keys that change the network in ways that Flint does not compute.
fn check_fixed(top: &Keys<'_>, text: &Keys<'_>) -> Result<()> {
    let fixed = [
        ("hidden_act", json!("silu")),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("noaux_tc")),
        ("moe_router_dtype", json!("float32")),
        ("attention_bias", json!(false)),
        ("tie_word_embeddings", json!(false)),
        ("mhc", json!(true)),
        ("mla_use_nope", json!(true)),
        ("index_kpool_compress", json!(true)),
        ("index_kpool_always_select_tail", json!(true)),
        ("qk_rope_head_dim", json!(0)),
    ];
    for (key, value) in &fixed {
        text.only(key, value)?;
    }
    for (keys, key) in [(top, "dtype"), (top, "torch_dtype"), (text, "dtype"), (text, "torch_dtype")] {
        match keys.optional_text(key)? {
            None | Some("bfloat16" | "float16" | "float32") => {}
            Some(_) => return Err(keys.wrong(key, "\"bfloat16\", \"float16\" or \"float32\"")),
        }
    }
    match text.optional_text("model_type")? {
        None | Some("glm5_next" | "glm5_next_text") => top.only("tie_word_embeddings", &json!(false)),
        Some(_) => Err(text.wrong("model_type", "\"glm5_next_text\"")),
    }
}

/// The first `layers` entries of a list of words, each read by `word`.
fn per_layer<T>(
    text: &Keys<'_>,
    key: &str,
    layers: usize,
    expected: &str,
    word: impl Fn(&str) -> Option<T>,
) -> Result<Option<Vec<T>>> {
    let Some(list) = text.optional_list(key)? else { return Ok(None) };
    if list.len() < layers {
        let found = format!("has {} entries", list.len());
        return Err(text.error(key, found, &format!("one for each of {layers} layers"), ""));
    }
    let mut kinds = Vec::with_capacity(layers);
    for (layer, value) in list.iter().take(layers).enumerate() {
        match value.as_str().and_then(&word) {
            Some(kind) => kinds.push(kind),
            None => return Err(text.error(&format!("{key}[{layer}]"), format!("is {value}"), expected, "")),
        }
    }
    Ok(Some(kinds))
}

fn attention(text: &Keys<'_>, layers: usize) -> Result<Vec<Attention>> {
    let expected = "\"linear_attention\" or \"deepseek_sparse_attention\"";
    let listed = per_layer(text, "layer_types", layers, expected, |word| match word {
        "linear_attention" => Some(Attention::Kda),
        "deepseek_sparse_attention" | "indexed_attention" | "full_attention" => Some(Attention::Dsa),
        _ => None,
    })?;
    let by_number = |layer| if layer % 4 == 3 { Attention::Dsa } else { Attention::Kda };
    Ok(listed.unwrap_or_else(|| (0..layers).map(by_number).collect()))
}

fn feed_forward(text: &Keys<'_>, layers: usize) -> Result<Vec<FeedForward>> {
    let listed = per_layer(text, "mlp_layer_types", layers, "\"dense\" or \"sparse\"", |word| match word {
        "dense" => Some(FeedForward::Dense),
        "sparse" => Some(FeedForward::Sparse),
        _ => None,
    })?;
    let dense = text.optional_count("first_k_dense_replace")?.unwrap_or(3);
    let by_number = |layer| if layer < dense { FeedForward::Dense } else { FeedForward::Sparse };
    Ok(listed.unwrap_or_else(|| (0..layers).map(by_number).collect()))
}

/// Which layers have an indexer of their own.
fn own_indexer(text: &Keys<'_>, attention: &[Attention]) -> Result<Vec<bool>> {
    let layers = attention.len();
    let expected = "\"full\" or \"shared\"";
    let word = |word: &str| match word {
        "full" | "F" => Some(true),
        "shared" | "S" => Some(false),
        _ => None,
    };
    let full = match per_layer(text, "indexer_types", layers, expected, word)? {
        Some(listed) => listed,
        None => match text.value("index_topk_pattern") {
            Some(Value::String(pattern)) => indexer_pattern(text, pattern, layers)?,
            Some(_) => per_layer(text, "index_topk_pattern", layers, expected, word)?.unwrap_or_default(),
            None => indexer_frequency(text, layers)?,
        },
    };
    match attention.iter().position(|kind| *kind == Attention::Dsa) {
        Some(first) if !full[first] => Err(text.error(
            &format!("indexer_types[{first}]"),
            "is \"shared\" at the first sparse-attention layer, which has none before it to share with"
                .to_owned(),
            "\"full\"",
            "",
        )),
        _ => Ok(full),
    }
}

fn indexer_pattern(text: &Keys<'_>, pattern: &str, layers: usize) -> Result<Vec<bool>> {
    if pattern.len() < layers || !pattern.bytes().all(|letter| letter == b'F' || letter == b'S') {
        return Err(text.wrong("index_topk_pattern", &format!("an F or S for each of {layers} layers")));
    }
    Ok(pattern.bytes().take(layers).map(|letter| letter == b'F').collect())
}

/// Layer `i` is full when `max(i - offset + 1, 0) mod frequency` is 0.
fn indexer_frequency(text: &Keys<'_>, layers: usize) -> Result<Vec<bool>> {
    let frequency = text.optional_count("index_topk_freq")?.unwrap_or(1).max(1);
    let offset = text.optional_count("index_skip_topk_offset")?.unwrap_or(2);
    Ok((0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(frequency)).collect())
}

/// Sizes of the KDA layers.
struct Linear {
    heads: usize,
    head_dim: usize,
    taps: usize,
    lower_bound: Option<f32>,
}

impl Linear {
    /// `linear_attn_config` overrides the flat spellings.
    fn read(text: &Keys<'_>, attention: &[Attention]) -> Result<Self> {
        let nested = text.object("linear_attn_config")?.map(|map| Keys::new(map, "linear_attn_config."));
        if let Some(keys) = &nested {
            check_layer_lists(keys, attention)?;
        }
        let size = |key: &str, flat: &str, bound: usize| match &nested {
            Some(keys) if keys.value(key).is_some() => keys.bounded(key, bound),
            _ => text.bounded(flat, bound),
        };
        Ok(Self {
            heads: size("num_heads", "linear_num_heads", 1 << 16)?,
            head_dim: size("head_dim", "linear_head_dim", 1 << 16)?,
            taps: size("short_conv_kernel_size", "linear_conv_kernel_dim", 64)?,
            lower_bound: lower_bound(nested.as_ref(), text)?,
        })
    }
}

/// The gate's bound. A null one means -5 unless `safe_gate` is false, which selects the softplus gate.
fn lower_bound(nested: Option<&Keys<'_>>, text: &Keys<'_>) -> Result<Option<f32>> {
    let (keys, key) = match nested {
        Some(keys) if keys.has("gate_lower_bound") => (keys, "gate_lower_bound"),
        _ => (text, "linear_lower_bound"),
    };
    let inside = nested.map_or(Ok(None), |keys| keys.optional_flag("safe_gate"))?;
    let safe = inside.or(text.optional_flag("safe_gate")?).unwrap_or(true);
    match keys.optional_number(key)? {
        Some(bound) if bound < 0.0 => Ok(Some(bound)),
        Some(_) => Err(keys.wrong(key, "a number below 0, or null")),
        None => Ok(safe.then_some(-5.0)),
    }
}

/// `kda_layers` and `full_attn_layers` repeat `layer_types`; a contradiction is refused.
fn check_layer_lists(keys: &Keys<'_>, attention: &[Attention]) -> Result<()> {
    for (key, kind) in [("kda_layers", Attention::Kda), ("full_attn_layers", Attention::Dsa)] {
        let Some(list) = keys.optional_list(key)? else { continue };
        let mut listed: Vec<_> = list.iter().map(Value::as_u64).collect();
        listed.sort_unstable();
        let of_kind = attention.iter().enumerate().filter(|(_, of_layer)| **of_layer == kind);
        if !listed.iter().copied().eq(of_kind.map(|(layer, _)| Some(layer as u64))) {
            return Err(keys.wrong(key, "the layers of this kind in layer_types, counted from 0"));
        }
    }
    Ok(())
}

fn attention_heads(text: &Keys<'_>) -> Result<usize> {
    let heads = text.bounded("num_attention_heads", 1 << 16)?;
    match text.optional_size("num_key_value_heads")? {
        Some(others) if others != heads => {
            Err(text.wrong("num_key_value_heads", &format!("{heads}, as num_attention_heads")))
        }
        _ => Ok(heads),
    }
}

/// `qk_head_dim`, or `qk_nope_head_dim`, which must be equal since there is no rotary part.
fn qk_head_dim(text: &Keys<'_>) -> Result<usize> {
    match (text.optional_size("qk_head_dim")?, text.optional_size("qk_nope_head_dim")?) {
        (Some(whole), Some(nope)) if whole != nope => {
            Err(text.wrong("qk_nope_head_dim", &format!("{whole}, as qk_head_dim (there is no rotary part)")))
        }
        (Some(size), _) | (None, Some(size)) => Ok(size),
        (None, None) => Err(text.missing("qk_head_dim", "a whole number")),
    }
}

fn index_kpool(text: &Keys<'_>) -> Result<usize> {
    if text.value("index_kpool").is_some() {
        return text.bounded("index_kpool", 4096);
    }
    Err(text.error(
        "index_kpool",
        "is missing".to_owned(),
        "the tokens of a pool (the release has 4, the libraries' default is 16, so it cannot be guessed)",
        "download config.json of the checkpoint again, or add the key from the model that it was made of",
    ))
}

fn index_topk(text: &Keys<'_>, kpool: usize) -> Result<usize> {
    let topk = text.size("index_topk")?;
    if topk.is_multiple_of(kpool) {
        Ok(topk)
    } else {
        Err(text.wrong("index_topk", &format!("a multiple of index_kpool, {kpool}")))
    }
}

/// Routed experts, under any of three names.
fn experts(text: &Keys<'_>) -> Result<usize> {
    let mut found: Option<(&str, usize)> = None;
    for key in ["n_routed_experts", "num_local_experts", "num_experts"] {
        match (text.optional_size(key)?, found) {
            (Some(count), Some((first, other))) if count != other => {
                return Err(text.wrong(key, &format!("{other}, as {first}")));
            }
            (Some(count), None) => found = Some((key, count)),
            _ => {}
        }
    }
    let (key, _) = found.unwrap_or(("n_routed_experts", 0));
    text.bounded(key, EXPERT_BOUND)
}

/// How experts are picked.
struct Routing {
    picks: usize,
    groups: usize,
    groups_kept: usize,
}

impl Routing {
    fn read(text: &Keys<'_>, experts: usize) -> Result<Self> {
        let picks = text.size("num_experts_per_tok")?;
        let groups = text.optional_size("n_group")?.unwrap_or(1);
        let groups_kept = text.optional_size("topk_group")?.unwrap_or(1);
        // The score of a group is the sum of its two best experts.
        if !experts.is_multiple_of(groups) || (groups > 1 && experts / groups < 2) {
            let expected = format!("a divisor of {experts} experts that leaves two in each group");
            return Err(text.wrong("n_group", &expected));
        }
        if groups_kept > groups {
            return Err(text.wrong("topk_group", &format!("a number up to n_group, {groups}")));
        }
        let eligible = experts / groups * groups_kept;
        if picks > eligible {
            let expected = format!("a number up to {eligible}, the experts of the kept groups");
            return Err(text.wrong("num_experts_per_tok", &expected));
        }
        Ok(Self { picks, groups, groups_kept })
    }
}

fn mtp_layers(text: &Keys<'_>) -> Result<usize> {
    match text.optional_count("num_nextn_predict_layers")?.unwrap_or(0) {
        layers if layers <= 16 => Ok(layers),
        _ => Err(text.wrong("num_nextn_predict_layers", "a number up to 16")),
    }
}

/// Tokens that end a generation: those at the top, else those of the text network; one number or a list.
fn eos_tokens(top: &Keys<'_>, text: &Keys<'_>) -> Result<Vec<u32>> {
    let key = "eos_token_id";
    let keys = if top.value(key).is_some() { top } else { text };
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let listed = match keys.value(key) {
        None => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(token).collect(),
        Some(value) => token(value).map(|token| vec![token]),
    };
    let Some(mut tokens) = listed else { return Err(keys.wrong(key, "a token or a list of tokens")) };
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}
