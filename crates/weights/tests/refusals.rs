//! Checkpoints whose tensors, names and tables contradict each other: refused on opening, by name.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::sync::LazyLock;

use flint_weights::{Checkpoint, Error, Form, PlainType};
use serde_json::{Value, json};
use support::layout::Layout;
use support::{Model, Storage, Tensor, config, open, refusal, says, source};

/// 4 bits, group 64 everywhere but in the output projections, which have 6 bits, group 128.
fn affine(name: &str) -> Storage {
    match name {
        name if name.ends_with("self_attn.o_proj") => Storage::Affine(6, 128),
        _ => Storage::Affine(4, 64),
    }
}

fn fp8(name: &str) -> Storage {
    if name.contains("q_a_proj") || name.contains("experts") { Storage::Fp8 } else { Storage::Bf16 }
}

/// A checkpoint to spoil: config and tensors.
type Parts = (Value, Vec<Tensor>);

fn parts(layout: Layout, storage: fn(&str) -> Storage) -> Parts {
    let model = Model::new(31, storage);
    (layout.config(&model), layout.tensors(&model))
}

static AFFINE: LazyLock<Parts> = LazyLock::new(|| parts(Layout::Mlx, affine));
static FP8: LazyLock<Parts> = LazyLock::new(|| parts(Layout::Official, fp8));
static PLAIN: LazyLock<Parts> = LazyLock::new(|| parts(Layout::Official, |_| Storage::Bf16));

fn spoil(whole: &Parts, edit: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> Error {
    let (mut config, mut tensors) = whole.clone();
    edit(&mut config, &mut tensors);
    refusal(source(&config, &tensors))
}

fn accept(whole: &Parts, edit: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> Checkpoint {
    let (mut config, mut tensors) = whole.clone();
    edit(&mut config, &mut tensors);
    open(source(&config, &tensors))
}

/// Edits both copies of the MLX table.
fn table(config: &mut Value, edit: impl Fn(&mut Value)) {
    edit(&mut config["quantization"]);
    edit(&mut config["quantization_config"]);
}

fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn remove(tensors: &mut Vec<Tensor>, name: &str) {
    find(tensors, name);
    tensors.retain(|tensor| tensor.name != name);
}

const O_PROJ: &str = "language_model.model.layers.3.self_attn.o_proj";

// Names.

#[test]
fn missing_and_left_over_names_are_listed_together() {
    let error = spoil(&PLAIN, |_, tensors| {
        find(tensors, "model.language_model.norm.weight").name =
            "model.language_model.norm.wieght".to_owned();
        remove(tensors, "model.language_model.layers.2.mlp.experts.1.up_proj.weight");
    });
    says(
        &error,
        &["2 missing: layers.2.mlp.experts.1.up_proj, norm", "1 left over: model.language_model.norm.wieght"],
    );
}

#[test]
fn an_expert_or_a_layer_too_many_is_left_over() {
    let error = spoil(&PLAIN, |_, tensors| {
        let mut more = find(tensors, "model.language_model.layers.2.mlp.experts.1.up_proj.weight").clone();
        more.name = more.name.replace("experts.1", "experts.3");
        tensors.push(more.clone());
        more.name = "model.language_model.layers.9.input_layernorm.weight".to_owned();
        tensors.push(more);
    });
    says(
        &error,
        &["2 left over:", "layers.2.mlp.experts.3.up_proj.weight", "layers.9.input_layernorm.weight"],
    );
}

#[test]
fn a_tensor_in_two_spellings_is_refused() {
    let error = spoil(&PLAIN, |_, tensors| {
        let mut again = find(tensors, "model.language_model.norm.weight").clone();
        again.name = "language_model.model.norm.weight".to_owned();
        tensors.push(again);
    });
    says(&error, &["norm: both", "model.language_model.norm.weight", "language_model.model.norm.weight"]);
}

#[test]
fn the_latents_expansion_is_stored_in_one_way_only() {
    let (_, mlx) = parts(Layout::Mlx, |_| Storage::Bf16);
    let error = spoil(&PLAIN, |_, tensors| {
        tensors
            .extend(mlx.iter().filter(|tensor| tensor.name.contains("layers.3.self_attn.embed_q")).cloned());
    });
    says(&error, &["layers.3.self_attn.kv_b_proj: both", "kv_b_proj.weight", "embed_q.weight"]);
}

#[test]
fn tensors_of_other_formats_are_refused_by_format() {
    for (end, format) in
        [("signs", "EXL3 embedding"), ("qweight", "GPTQ or AWQ"), ("weight_packed", "compressed-tensors")]
    {
        let error = spoil(&PLAIN, |_, tensors| {
            tensors[5].name = format!("model.language_model.layers.1.self_attn.o_proj.{end}");
        });
        says(&error, &[end, format, "not supported by this build", "MLX affine"]);
    }
}

// Shapes and types.

#[test]
fn a_tensor_of_another_shape_is_refused_with_both_shapes() {
    let name = "model.language_model.layers.1.self_attn.o_proj.weight";
    let error = spoil(&PLAIN, |_, tensors| find(tensors, name).shape = vec![64, 256]);
    says(&error, &[name, "shape [64, 256]", "asks for [128, 128]"]);
    let name = "model.language_model.norm.weight";
    let error = spoil(&PLAIN, |_, tensors| find(tensors, name).shape = vec![2, 64]);
    says(&error, &[name, "shape [2, 64]", "asks for [128]"]);
}

#[test]
fn convolution_taps_may_stand_on_either_axis_but_not_be_another_count() {
    let name = "model.language_model.layers.1.self_attn.q_conv1d.weight";
    let set = |shape: [usize; 3]| {
        move |_: &mut Value, tensors: &mut Vec<Tensor>| find(tensors, name).shape = shape.into()
    };
    let (one, two) = (accept(&PLAIN, set([128, 1, 4])), accept(&PLAIN, set([128, 4, 1])));
    let taps = |checkpoint: Checkpoint| checkpoint.vector("layers.1.self_attn.q_conv1d").unwrap();
    assert_eq!(taps(one), taps(two));
    says(&spoil(&PLAIN, set([64, 2, 4])), &[name, "[64, 2, 4]", "[128, 4]"]);
}

#[test]
fn numbers_of_another_kind_are_refused() {
    let name = "model.language_model.layers.1.self_attn.o_proj.weight";
    let error = spoil(&PLAIN, |_, tensors| find(tensors, name).dtype = "I16");
    says(&error, &[name, "stored as I16", "expected F32, F16, BF16"]);
    let name = "model.language_model.norm.weight";
    says(
        &spoil(&PLAIN, |_, tensors| find(tensors, name).dtype = "U16"),
        &[name, "U16", "expected F32, F16 or BF16"],
    );
}

#[test]
fn arrays_that_are_never_quantised_have_no_scales() {
    let error = spoil(&AFFINE, |_, tensors| {
        let mut scales = find(tensors, "language_model.model.norm.weight").clone();
        scales.name = "language_model.model.norm.scales".to_owned();
        tensors.push(scales);
    });
    says(&error, &["norm: it has scales", "never quantised"]);
}

// The MLX table.

#[test]
fn a_width_that_the_table_does_not_declare_is_refused() {
    let error = spoil(&AFFINE, |config, _| table(config, |table| table[O_PROJ]["bits"] = json!(5)));
    says(
        &error,
        &[O_PROJ, "stored as 6 bits, group 128", "says 5 bits, group 128", "The checkpoint is inconsistent"],
    );
    let error = spoil(&AFFINE, |config, _| table(config, |table| table[O_PROJ]["group_size"] = json!(64)));
    says(&error, &[O_PROJ, "stored as 6 bits, group 128", "says 6 bits, group 64"]);
    let drop_entry = |table: &mut Value| drop(table.as_object_mut().unwrap().remove(O_PROJ));
    says(
        &spoil(&AFFINE, |config, _| table(config, drop_entry)),
        &["says 4 bits, group 64", "(quantization)"],
    );
}

#[test]
fn a_scales_shape_that_fits_no_group_is_refused() {
    let error = spoil(&AFFINE, |_, tensors| {
        for part in ["scales", "biases"] {
            let tensor = find(tensors, &format!("{O_PROJ}.{part}"));
            (tensor.shape, tensor.bytes) = (vec![128, 3], vec![0; 128 * 3 * 2]);
        }
    });
    says(&error, &[O_PROJ, "no whole number of", "3 scales for 256 inputs"]);
    let error = spoil(&AFFINE, |_, tensors| {
        let tensor = find(tensors, &format!("{O_PROJ}.scales"));
        (tensor.shape, tensor.bytes) = (vec![64, 2], vec![0; 64 * 2 * 2]);
    });
    says(&error, &["o_proj.scales", "shape [64, 2]", "asks for [128, 2]"]);
    let error = spoil(&AFFINE, |_, tensors| {
        let tensor = find(tensors, &format!("{O_PROJ}.biases"));
        (tensor.shape, tensor.bytes) = (vec![128, 4], vec![0; 128 * 4 * 2]);
    });
    says(&error, &["o_proj.biases", "shape [128, 4]", "asks for [128, 2]"]);
}

#[test]
fn every_spelling_of_a_key_is_the_module() {
    for key in [
        "language_model.model.layers.3.self_attn.o_proj",
        "model.language_model.layers.3.self_attn.o_proj",
        "model.layers.3.self_attn.o_proj",
        "layers.3.self_attn.o_proj",
        "layers.3.self_attn.o_proj.weight",
        "model.layers.3.self_attn.o_proj.scales",
    ] {
        let respell = |table: &mut Value| {
            let entry = table.as_object_mut().unwrap().remove(O_PROJ).unwrap();
            table[key] = entry;
        };
        let checkpoint = accept(&AFFINE, |config, _| table(config, respell));
        let Form::Affine { bits, .. } = checkpoint.matrix("layers.3.self_attn.o_proj").unwrap().form else {
            panic!()
        };
        assert_eq!(bits, 6, "{key}");
    }
}

#[test]
fn two_spellings_of_a_module_must_agree() {
    let add = |bits: u8| {
        move |table: &mut Value| table["layers.3.self_attn.o_proj"] = json!({"bits": bits, "group_size": 128})
    };
    let error = spoil(&AFFINE, |config, _| table(config, add(5)));
    says(
        &error,
        &[O_PROJ, "says 6 bits, group 128", "layers.3.self_attn.o_proj says 5 bits", "the two must agree"],
    );
    accept(&AFFINE, |config, _| table(config, add(6)));

    // The MTP block and the layer after the trunk are one module.
    let mtp = |table: &mut Value| table["model.layers.4.self_attn.o_proj"] = json!(false);
    let error = spoil(&AFFINE, |config, _| table(config, mtp));
    says(&error, &["mtp.0.block.self_attn.o_proj", "model.layers.4.self_attn.o_proj says unquantised"]);

    // A key of a fused name names its members, "switch_mlp" and "experts" are one stack.
    let fused = |table: &mut Value| table["layers.1.self_attn.qkv_proj"] = json!({"bits": 8});
    says(
        &spoil(&AFFINE, |config, _| table(config, fused)),
        &["layers.1.self_attn.qkv_proj says 8 bits", "q_proj"],
    );
    let stack = |table: &mut Value| table["layers.1.mlp.experts.up_proj"] = json!({"bits": 3});
    says(
        &spoil(&AFFINE, |config, _| table(config, stack)),
        &["switch_mlp.up_proj", "mlp.experts.up_proj says 3 bits"],
    );
}

#[test]
fn two_tables_must_agree() {
    let error = spoil(&AFFINE, |config, _| config["quantization_config"][O_PROJ]["bits"] = json!(8));
    says(&error, &["quantization.language_model", "quantization_config.language_model", "6 bits", "8 bits"]);
    let error = spoil(&AFFINE, |config, _| config["quantization_config"]["bits"] = json!(3));
    says(&error, &["quantization_config declares 3 bits, group 64", "4 bits, group 64, as quantization"]);
    let error = spoil(&AFFINE, |config, _| {
        config["text_config"]["quantization"] = json!({"group_size": 64, "bits": 4, O_PROJ: false});
    });
    says(&error, &["text_config.quantization says 4 bits, group 64", "6 bits, group 128"]);
    let error = spoil(&AFFINE, |config, _| {
        config["quantization_config"] = FP8.0["quantization_config"].clone();
    });
    says(&error, &["quantization_config names another quantisation method than quantization"]);
    // One table is enough, wherever it stands.
    accept(&AFFINE, |config, _| {
        config["text_config"]["quantization_config"] = config["quantization"].clone();
        let top = config.as_object_mut().unwrap();
        top.retain(|key, _| !key.starts_with("quantization"));
    });
}

#[test]
fn a_partial_entry_takes_the_rest_from_the_default() {
    let partial = |table: &mut Value| table["layers.1.self_attn.k_proj"] = json!({"bits": 4});
    let respell = |table: &mut Value| {
        table.as_object_mut().unwrap().remove("language_model.model.layers.1.self_attn.k_proj");
        partial(table);
    };
    accept(&AFFINE, |config, _| table(config, respell));
    accept(&AFFINE, |config, _| table(config, |table| table["layers.1.self_attn.k_proj"] = json!(true)));
}

#[test]
fn a_module_declared_quantised_must_be_and_the_other_way_round() {
    let key = "language_model.model.layers.3.mlp.gate";
    let error = spoil(&AFFINE, |config, _| table(config, |table| table[key] = json!({"bits": 8})));
    says(&error, &["layers.3.mlp.gate", "declares it 8 bits", "stored as Bf16"]);
    accept(&AFFINE, |config, _| table(config, |table| table[key] = json!(false)));
    let error = spoil(&AFFINE, |config, _| table(config, |table| table[O_PROJ] = json!(false)));
    says(&error, &["layers.3.self_attn.o_proj", "declares it unquantised, but it has scales"]);
}

#[test]
fn packed_tensors_without_a_table_or_companions_are_refused() {
    let error = spoil(&AFFINE, |config, _| {
        let top = config.as_object_mut().unwrap();
        top.retain(|key, _| !key.starts_with("quantization"));
    });
    says(&error, &["its weight is packed, but config.json has no MLX quantization table"]);
    for part in ["scales", "biases"] {
        let error = spoil(&AFFINE, |_, tensors| remove(tensors, &format!("{O_PROJ}.{part}")));
        says(&error, &["layers.3.self_attn.o_proj", &format!("it has no {part}")]);
    }
    let error = spoil(&AFFINE, |_, tensors| remove(tensors, &format!("{O_PROJ}.weight")));
    says(&error, &["1 missing: layers.3.self_attn.o_proj"]);
    let error = spoil(&AFFINE, |_, tensors| find(tensors, &format!("{O_PROJ}.weight")).dtype = "F32");
    says(&error, &["layers.3.self_attn.o_proj", "plain F32, but it has scales"]);
}

#[test]
fn scales_and_biases_have_one_type() {
    let error = spoil(&AFFINE, |_, tensors| find(tensors, &format!("{O_PROJ}.biases")).dtype = "F16");
    says(&error, &["layers.3.self_attn.o_proj", "different types"]);
    let error = spoil(&AFFINE, |_, tensors| find(tensors, &format!("{O_PROJ}.scales")).dtype = "U16");
    says(&error, &["o_proj.scales", "stored as U16", "mxfp4, nvfp4 and mxfp8"]);
}

#[test]
fn other_modes_and_methods_are_refused_by_name() {
    for mode in ["mxfp4", "nvfp4", "mxfp8", "ternary"] {
        let error = spoil(&AFFINE, |config, _| table(config, |table| table["mode"] = json!(mode)));
        says(&error, &["config.json, quantization.mode", mode, "not supported", "affine quantisation"]);
        let error = spoil(&AFFINE, |config, _| table(config, |table| table[O_PROJ]["mode"] = json!(mode)));
        says(&error, &[O_PROJ, mode]);
    }
    for method in ["compressed-tensors", "modelopt", "awq", "gptq", "bitsandbytes", "mxfp4"] {
        let error =
            spoil(&PLAIN, |config, _| config["quantization_config"] = json!({"quant_method": method}));
        says(
            &error,
            &["quantization_config.quant_method", method, "not supported by this build", "official FP8"],
        );
    }
}

#[test]
fn widths_outside_the_format_are_refused_by_key() {
    for (key, value, expected) in [
        ("bits", json!(1), "2, 3, 4, 5, 6 or 8"),
        ("bits", json!(7), "2, 3"),
        ("group_size", json!(16), "32, 64 or 128"),
    ] {
        let error = spoil(&AFFINE, |config, _| table(config, |table| table[O_PROJ][key] = value.clone()));
        says(&error, &[&format!("{O_PROJ}.{key} is {value}"), expected]);
    }
    let error = spoil(&AFFINE, |config, _| {
        table(config, |table| drop(table.as_object_mut().unwrap().remove("bits")));
    });
    says(&error, &["quantization.bits is missing"]);
    says(&spoil(&PLAIN, |config, _| config["quantization"] = json!(4)), &["quantization is 4", "an object"]);
}

#[test]
fn keys_that_name_no_module_are_a_warning() {
    let checkpoint = accept(&AFFINE, |config, _| {
        table(config, |table| {
            for layer in 70..74 {
                table[format!("model.layers.{layer}.mlp.up_proj")] = json!({"bits": 8});
            }
        });
    });
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(warning.contains("4 keys name no module") && warning.contains("model.layers.72"), "{warning}");
    assert!(!warning.contains("layers.73"), "{warning}");
}

#[test]
fn a_stack_has_one_encoding() {
    let name = "layers.1.mlp.experts.2.up_proj.weight";
    let whole =
        parts(Layout::Bare, |name| if name.contains("experts.up") { Storage::F32 } else { Storage::Bf16 });
    let error = spoil(&whole, |_, tensors| {
        let tensor = find(tensors, name);
        tensor.dtype = "BF16";
        tensor.bytes.truncate(tensor.bytes.len() / 2);
    });
    says(&error, &["layers.1.mlp.experts.up_proj", "experts.0.up_proj is f32", "experts.2.up_proj is bf16"]);
}

#[test]
fn one_expert_may_have_a_key_of_its_own_but_then_the_stack_is_not_of_one_form() {
    let whole = parts(Layout::Bare, affine);
    let error = spoil(&whole, |config, _| {
        table(config, |table| table["layers.1.mlp.experts.2.up_proj"] = json!({"bits": 8}));
    });
    says(&error, &["layers.1.mlp.experts.up_proj", "says 4 bits", "experts.2.up_proj says 8 bits"]);
}

// The latent's expansion.

#[test]
fn a_quantised_expansion_is_decoded_once_and_cut_by_rows() {
    let whole = parts(Layout::Mlx, |_| Storage::Bf16);
    let (bits, group, rows, cols) = (6, 32, 2 * (64 + 128), 128);
    let mut random = support::Random::new("kv_b");
    let mut scale = || half::bf16::from_f32(random.unit() - 0.5).to_le_bytes();
    let scales: Vec<u8> = (0..2 * rows * cols / group).flat_map(|_| scale()).collect();
    let codes: Vec<u8> = (0..rows * cols * bits / 8).map(|_| random.byte()).collect();
    let checkpoint = accept(&whole, |config, tensors| {
        let at = "language_model.model.layers.3.self_attn.";
        tensors.retain(|t| {
            !t.name.starts_with(&format!("{at}embed_q")) && !t.name.starts_with(&format!("{at}unembed"))
        });
        let (first, second) = scales.split_at(scales.len() / 2);
        for (part, dtype, width, bytes) in [
            ("weight", "U32", cols * bits / 32, &codes[..]),
            ("scales", "BF16", cols / group, first),
            ("biases", "BF16", cols / group, second),
        ] {
            let name = format!("{at}kv_b_proj.{part}");
            tensors.push(Tensor { name, dtype, shape: vec![rows, width], bytes: bytes.to_vec() });
        }
        config["quantization"] = json!({"bits": 4, "group_size": 64, "layers.3.self_attn.kv_b_proj": {"bits": bits, "group_size": group}});
    });
    let joined = checkpoint.matrix("layers.3.self_attn.kv_b_proj").unwrap();
    let heads = checkpoint.latent_heads(3).unwrap();
    for (head, (absorb, expand)) in heads.absorb.iter().zip(&heads.expand).enumerate() {
        let first = head * (64 + 128);
        assert!(matches!(absorb.form, Form::Plain { kind: PlainType::F32, .. }));
        assert!(matches!(expand.form, Form::Affine { bits: 6, group: 32, .. }));
        let absorbed = absorb.decode_f64();
        for key in 0..64 {
            let row = joined.decode_row_f64(first + key);
            for latent in 0..cols {
                assert_eq!(absorbed[latent * 64 + key].to_bits(), f64::from(row[latent] as f32).to_bits());
            }
        }
        assert_eq!(expand.decode_row_f64(127), joined.decode_row_f64(first + 64 + 127));
    }
}

#[test]
fn a_key_of_the_joined_expansion_holds_for_the_stored_pair() {
    let whole = parts(Layout::Mlx, |name| {
        if name.contains("embed") && name.contains("layers") { Storage::Affine(6, 32) } else { Storage::Bf16 }
    });
    let key = "language_model.model.layers.3.self_attn.";
    let rename = |table: &mut Value, bits: u8| {
        let entries = table.as_object_mut().unwrap();
        entries.retain(|name, _| name != &format!("{key}embed_q") && name != &format!("{key}unembed_out"));
        table["layers.3.self_attn.kv_b_proj"] = json!({"bits": bits, "group_size": 32});
    };
    accept(&whole, |config, _| table(config, |table| rename(table, 6)));
    let error = spoil(&whole, |config, _| table(config, |table| rename(table, 4)));
    says(&error, &["embed_q.weight: stored as 6 bits", "says 4 bits", "kv_b_proj"]);
}

// FP8.

#[test]
fn the_fp8_tables_keys_are_checked() {
    for (key, value) in [
        ("fmt", json!("e5m2")),
        ("activation_scheme", json!("static")),
        ("weight_block_size", json!([64, 64])),
        ("weight_block_size", Value::Null),
        ("scale_fmt", json!("ue8m0")),
    ] {
        let error = spoil(&FP8, |config, _| config["quantization_config"][key] = value.clone());
        let found = if value.is_null() { "is missing".to_owned() } else { format!("is {value}") };
        says(&error, &[&format!("quantization_config.{key} {found}"), "expected"]);
    }
}

#[test]
fn fp8_codes_and_factors_come_together() {
    let name = "model.language_model.layers.3.self_attn.q_a_proj.weight";
    let factors = format!("{name}_scale_inv");
    says(
        &spoil(&FP8, |_, tensors| remove(tensors, &factors)),
        &["q_a_proj", "F8_E4M3, but it has no weight_scale_inv"],
    );
    says(&spoil(&FP8, |_, tensors| remove(tensors, name)), &["1 missing: layers.3.self_attn.q_a_proj"]);
    let error = spoil(&FP8, |config, _| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    says(&error, &["F8_E4M3, but config.json has no quantization_config"]);
    let error = spoil(&FP8, |_, tensors| {
        let tensor = find(tensors, &factors);
        (tensor.shape, tensor.bytes) = (vec![1, 2], vec![0; 8]);
    });
    says(&error, &[&factors, "shape [1, 2]", "asks for [1, 1]"]);
    says(
        &spoil(&FP8, |_, tensors| find(tensors, &factors).dtype = "I32"),
        &[&factors, "I32", "expected F32"],
    );
    let plain = "model.language_model.layers.1.self_attn.o_proj.weight";
    let error = spoil(&FP8, |_, tensors| {
        let (name, bytes) = (format!("{plain}_scale_inv"), 1.0_f32.to_le_bytes().to_vec());
        tensors.push(Tensor { name, dtype: "F32", shape: vec![1, 1], bytes });
    });
    says(&error, &["layers.1.self_attn.o_proj", "plain Bf16, but it has scales"]);
}

// Numbers, looked at when a tensor is handed out.

#[test]
fn scales_that_are_no_numbers_are_refused_with_their_place() {
    let checkpoint = accept(&AFFINE, |_, tensors| {
        find(tensors, &format!("{O_PROJ}.biases")).bytes[10..12].copy_from_slice(&0x7F80_u16.to_le_bytes());
        let stack = find(tensors, "language_model.model.layers.2.mlp.switch_mlp.down_proj.scales");
        let last = stack.bytes.len() - 2;
        stack.bytes[last..].copy_from_slice(&0x7FC0_u16.to_le_bytes());
    });
    let error = checkpoint.matrix("layers.3.self_attn.o_proj").unwrap_err();
    says(
        &error,
        &["o_proj.biases", "model.safetensors, offset", "shape [128, 2]", "value inf at index 5", "finite"],
    );
    let error = checkpoint.stack("layers.2.mlp.experts.down_proj").unwrap_err();
    says(&error, &["switch_mlp.down_proj.scales", "value NaN at index 383"]);
    checkpoint.matrix("layers.1.self_attn.o_proj").unwrap();
}

#[test]
fn fp8_factors_must_be_positive_and_codes_no_nan() {
    let name = "model.language_model.layers.3.self_attn.q_a_proj.weight";
    for value in [0.0_f32, -1.0, f32::NAN, f32::INFINITY] {
        let checkpoint = accept(&FP8, |_, tensors| {
            find(tensors, &format!("{name}_scale_inv")).bytes = value.to_le_bytes().to_vec();
        });
        let error = checkpoint.matrix("layers.3.self_attn.q_a_proj").unwrap_err();
        says(&error, &["q_a_proj.weight_scale_inv", &format!("value {value} at index 0"), "FP8 factor"]);
    }
    for code in [0x7F, 0xFF] {
        let checkpoint = accept(&FP8, |_, tensors| find(tensors, name).bytes[77] = code);
        let error = checkpoint.matrix("layers.3.self_attn.q_a_proj").unwrap_err();
        says(&error, &[name, "value NaN at index 77"]);
    }
}

#[test]
fn an_array_with_a_nan_is_refused() {
    let checkpoint = accept(&PLAIN, |_, tensors| {
        let array = find(tensors, "model.language_model.layers.1.self_attn.A_log");
        array.bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let error = checkpoint.vector("layers.1.self_attn.A_log").unwrap_err();
    says(&error, &["layers.1.self_attn.A_log", "value NaN at index 1"]);
}

#[test]
fn asking_for_what_the_model_does_not_have_is_an_error() {
    let checkpoint = open(source(&config(), &PLAIN.1));
    says(
        &checkpoint.matrix("layers.3.self_attn.q_proj").unwrap_err(),
        &["layers.3.self_attn.q_proj", "no matrix"],
    );
    says(&checkpoint.matrix("norm").unwrap_err(), &["norm", "no matrix"]);
    says(&checkpoint.vector("lm_head").unwrap_err(), &["lm_head", "no array"]);
    says(&checkpoint.stack("layers.0.mlp.experts.up_proj").unwrap_err(), &["no stack"]);
    says(&checkpoint.latent_heads(0).unwrap_err(), &["layers.0.self_attn.kv_b_proj"]);
}
