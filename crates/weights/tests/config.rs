//! `config.json`: aliases meet, contradictions and unknown values are refused by name.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use flint_weights::ModelConfig;
use flint_weights::config::{Attention, FeedForward};
use serde_json::{Value, json};
use support::{config, says};

/// The small model's config with `edit` applied to its text part.
fn edited(edit: impl FnOnce(&mut Value)) -> flint_weights::Result<ModelConfig> {
    let mut config = config();
    edit(&mut config["text_config"]);
    ModelConfig::from_json(config.as_object().unwrap())
}

fn refused(edit: impl FnOnce(&mut Value), parts: &[&str]) {
    match edited(edit) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => says(&error, parts),
    }
}

fn remove(text: &mut Value, key: &str) {
    text.as_object_mut().unwrap().remove(key);
}

#[test]
fn the_release_values_are_read() {
    let config = edited(|_| {}).unwrap();
    assert_eq!(config.attention, [Attention::Kda, Attention::Kda, Attention::Kda, Attention::Dsa]);
    let (dense, sparse) = (FeedForward::Dense, FeedForward::Sparse);
    assert_eq!(config.feed_forward, [dense, sparse, sparse, sparse]);
    assert_eq!((config.linear_heads, config.linear_head_dim, config.linear_conv_taps), (2, 64, 4));
    assert_eq!(config.linear_lower_bound, Some(-5.0));
    assert_eq!((config.index_topk, config.index_kpool, config.experts), (16, 4, 3));
    assert_eq!(config.eos_tokens, [1, 2, 3]);
    assert_eq!((config.mtp_layers, config.max_positions, config.hc_eps), (1, 4096, 1e-6));
}

#[test]
fn a_text_only_config_has_its_keys_at_the_top() {
    let mut text = config()["text_config"].clone();
    text["eos_token_id"] = json!(3);
    for name in ["glm5_next_text", "glm5_next"] {
        text["model_type"] = json!(name);
        let flat = ModelConfig::from_json(text.as_object().unwrap()).unwrap();
        assert_eq!(flat, ModelConfig { eos_tokens: vec![3], ..edited(|_| {}).unwrap() });
    }
}

#[test]
fn the_pool_size_is_never_guessed() {
    let what = ["text_config.index_kpool is missing", "cannot be guessed", "add the key"];
    refused(|text| remove(text, "index_kpool"), &what);
    refused(|text| text["index_kpool"] = Value::Null, &what);
    refused(
        |text| text["index_kpool"] = json!(5),
        &["text_config.index_topk is 16", "multiple of index_kpool, 5"],
    );
}

#[test]
fn every_required_key_is_named_when_it_is_missing() {
    for key in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "v_head_dim",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "intermediate_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
        "swiglu_limit",
        "rms_norm_eps",
        "hc_mult",
        "hc_sinkhorn_iters",
        "hc_eps",
        "max_position_embeddings",
    ] {
        refused(|text| remove(text, key), &[&format!("text_config.{key} is missing")]);
        refused(|text| text[key] = json!("many"), &[&format!("text_config.{key} is \"many\"")]);
        refused(|text| text[key] = json!(-1), &[&format!("text_config.{key} is -1")]);
    }
}

#[test]
fn an_unknown_value_of_a_known_key_is_refused() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("scoring_func", json!("softmax")),
        ("topk_method", json!("greedy")),
        ("moe_router_dtype", json!("bfloat16")),
        ("attention_bias", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("mhc", json!(false)),
        ("mla_use_nope", json!(false)),
        ("index_kpool_compress", json!(false)),
        ("index_kpool_always_select_tail", json!(false)),
        ("qk_rope_head_dim", json!(64)),
        ("num_key_value_heads", json!(1)),
        ("qk_nope_head_dim", json!(32)),
        ("model_type", json!("llama")),
        ("dtype", json!("float8_e4m3fn")),
        ("torch_dtype", json!("int8")),
        ("topk_group", json!(2)),
        ("n_group", json!(2)),
        ("num_experts_per_tok", json!(4)),
        ("index_topk_pattern", json!(7)),
    ] {
        let text = format!("text_config.{key} is {value}");
        refused(
            |config| {
                remove(config, "indexer_types");
                config[key] = value;
            },
            &[&text, "expected"],
        );
    }
}

#[test]
fn another_model_is_refused_by_its_type() {
    for (name, says_so) in [("qwen3", "the one family"), ("glm5_next_mtp", "a drafter without its model")] {
        let mut config = config();
        config["model_type"] = json!(name);
        says(
            &ModelConfig::from_json(config.as_object().unwrap()).unwrap_err(),
            &["model_type", name, says_so],
        );
    }
    let drafter = json!({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": {}});
    says(
        &ModelConfig::from_json(drafter.as_object().unwrap()).unwrap_err(),
        &["DFlash2 drafter", "the model itself"],
    );
    says(&ModelConfig::from_json(&serde_json::Map::new()).unwrap_err(), &["model_type is missing"]);
}

#[test]
fn layer_kinds_have_three_spellings_and_a_default() {
    for name in ["deepseek_sparse_attention", "indexed_attention", "full_attention"] {
        let config = edited(|text| text["layer_types"][3] = json!(name)).unwrap();
        assert_eq!(config.attention[3], Attention::Dsa);
    }
    let config = edited(|text| {
        remove(text, "layer_types");
        remove(text, "mlp_layer_types");
        remove(text, "first_k_dense_replace");
    })
    .unwrap();
    assert_eq!(config.attention, edited(|_| {}).unwrap().attention);
    assert_eq!(config.feed_forward[2..], [FeedForward::Dense, FeedForward::Sparse]);
    refused(|text| text["layer_types"][1] = json!("mamba"), &["layer_types[1] is \"mamba\""]);
    refused(
        |text| text["mlp_layer_types"] = json!(["dense"]),
        &["mlp_layer_types has 1 entries", "each of 4 layers"],
    );
    refused(
        |text| text["linear_attn_config"]["kda_layers"] = json!([1, 2, 3]),
        &["linear_attn_config.kda_layers is [1,2,3]", "counted from 0"],
    );
}

#[test]
fn indexers_are_listed_or_follow_a_pattern_or_a_frequency() {
    let own = |edit: &dyn Fn(&mut Value)| {
        edited(|text| {
            text["num_hidden_layers"] = json!(12);
            text["layer_types"] = json!(vec!["full_attention"; 12]);
            text["mlp_layer_types"] = json!(vec!["sparse"; 12]);
            remove(text, "linear_attn_config");
            (text["linear_num_heads"], text["linear_head_dim"], text["linear_conv_kernel_dim"]) =
                (json!(2), json!(64), json!(4));
            remove(text, "indexer_types");
            edit(text);
        })
        .map(|config| config.own_indexer.iter().map(|own| if *own { 'F' } else { 'S' }).collect::<String>())
    };
    assert_eq!(own(&|_| {}).unwrap(), "FFFFFFFFFFFF");
    assert_eq!(own(&|text| text["index_topk_freq"] = json!(4)).unwrap(), "FFSSSFSSSFSS");
    let offset = own(&|text| {
        text["index_topk_freq"] = json!(4);
        text["index_skip_topk_offset"] = json!(4);
    });
    assert_eq!(offset.unwrap(), "FFFFSSSFSSSF");
    assert_eq!(own(&|text| text["index_topk_pattern"] = json!("FSSSFSSSFSSS")).unwrap(), "FSSSFSSSFSSS");
    let list: Vec<_> = "FSSFSSFSSFSS".chars().map(String::from).collect();
    assert_eq!(own(&|text| text["index_topk_pattern"] = json!(list)).unwrap(), "FSSFSSFSSFSS");
    says(
        &own(&|text| text["index_topk_pattern"] = json!("FS")).unwrap_err(),
        &["index_topk_pattern", "12 layers"],
    );
    says(
        &own(&|text| text["indexer_types"] = json!(vec!["shared"; 12])).unwrap_err(),
        &["indexer_types[0] is \"shared\"", "none before it"],
    );
}

#[test]
fn the_gates_bound_follows_safe_gate_when_it_is_null() {
    let bound = |edit: &dyn Fn(&mut Value)| edited(|text| edit(text)).unwrap().linear_lower_bound;
    assert_eq!(bound(&|text| text["linear_attn_config"]["gate_lower_bound"] = Value::Null), Some(-5.0));
    let unsafe_gate = |text: &mut Value| {
        text["linear_attn_config"]["gate_lower_bound"] = Value::Null;
        text["linear_attn_config"]["safe_gate"] = json!(false);
    };
    assert_eq!(bound(&unsafe_gate), None);
    let flat = |text: &mut Value| {
        text["linear_attn_config"].as_object_mut().unwrap().remove("gate_lower_bound");
        text["linear_lower_bound"] = json!(-3.5);
    };
    assert_eq!(bound(&flat), Some(-3.5));
    refused(|text| text["linear_attn_config"]["gate_lower_bound"] = json!(1.0), &["gate_lower_bound is 1.0"]);
}

#[test]
fn flat_and_nested_sizes_of_the_linear_layers_meet() {
    let flat = edited(|text| {
        remove(text, "linear_attn_config");
        for (key, value) in [("linear_num_heads", 2), ("linear_head_dim", 64), ("linear_conv_kernel_dim", 4)]
        {
            text[key] = json!(value);
        }
    });
    assert_eq!(flat.unwrap(), edited(|_| {}).unwrap());
    refused(|text| remove(text, "linear_attn_config"), &["linear_num_heads is missing"]);
}

#[test]
fn aliases_that_disagree_are_refused() {
    let alias = edited(|text| {
        remove(text, "n_routed_experts");
        text["num_local_experts"] = json!(3);
    });
    assert_eq!(alias.unwrap().experts, 3);
    refused(|text| text["num_experts"] = json!(5), &["num_experts is 5", "3, as n_routed_experts"]);
}

#[test]
fn sizes_beyond_every_model_are_refused_before_anything_is_built() {
    for key in ["hidden_size", "num_hidden_layers", "n_routed_experts", "vocab_size"] {
        refused(|text| text[key] = json!(u64::MAX), &[&format!("text_config.{key} is 18446744073709551615")]);
    }
    refused(|text| text["n_routed_experts"] = json!(100_000), &["n_routed_experts is 100000"]);
}
