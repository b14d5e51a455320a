//! Two layouts of one model are the same model.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use flint_weights::matrix::e4m3;
use flint_weights::plan::ExpertsWanted;
use flint_weights::{Checkpoint, Form, LoadPlan, PlanRequest, QuantMatrix};
use support::layout::{ALL, Layout};
use support::{LAYERS, Model, Storage, Tensor, open, refusal, says, source};

/// Latents and embeddings plain, the rest by name at many widths, experts narrow.
fn mixed(name: &str) -> Storage {
    match name {
        name if name.contains("embed_q") || name.contains("unembed_out") || name == "embed_tokens" => {
            Storage::Bf16
        }
        name if name.contains("experts.gate_proj") || name.contains("experts.up_proj") => {
            Storage::Affine(2, 64)
        }
        name if name.contains("experts.down_proj") => Storage::Affine(3, 32),
        name if name.contains("q_proj") => Storage::Affine(5, 64),
        name if name.contains("k_proj") => Storage::Affine(8, 64),
        name if name.contains("o_proj") => Storage::Affine(6, 128),
        _ => Storage::Affine(4, 64),
    }
}

/// Alike everywhere, so that every fusion is possible.
fn uniform(name: &str) -> Storage {
    match mixed(name) {
        Storage::Bf16 => Storage::Bf16,
        _ => Storage::Affine(4, 64),
    }
}

fn fp8(name: &str) -> Storage {
    let quantised =
        ["q_a_proj", "q_b_proj", "kv_a_proj", "self_attn.o_proj", "experts", "mlp.gate_proj", "mlp.up_proj"];
    if quantised.iter().any(|part| name.contains(part)) { Storage::Fp8 } else { Storage::Bf16 }
}

fn plain(name: &str) -> Storage {
    if name.contains("k_proj") { Storage::F32 } else { Storage::Bf16 }
}

fn write(model: &Model, layout: Layout) -> Checkpoint {
    open(source(&layout.config(model), &layout.tensors(model)))
}

/// Bytes and form of a matrix, its name aside.
fn content(matrix: &QuantMatrix) -> (usize, usize, String, Vec<Vec<u8>>, Vec<f64>) {
    let (form, arrays) = match &matrix.form {
        Form::Plain { kind, values } => (format!("{kind:?}"), vec![values.as_slice().to_vec()]),
        Form::Affine { bits, group, kind, codes, scales, biases } => {
            let arrays = [codes, scales, biases].map(|bytes| bytes.as_slice().to_vec()).to_vec();
            (format!("{bits} {group} {kind:?}"), arrays)
        }
        // A cut may share blocks with its neighbours: the numbers are compared below.
        Form::Fp8Block { codes, .. } => ("fp8".to_owned(), vec![codes.as_slice().to_vec()]),
        Form::Exl3(exl3) => ("exl3".to_owned(), vec![exl3.trellis.as_slice().to_vec()]),
    };
    (matrix.rows, matrix.cols, form, arrays, matrix.decode_f64())
}

/// Everything that a loader asks for.
fn assert_same_weights(model: &Model, a: &Checkpoint, b: &Checkpoint, what: &str) {
    for (name, module) in &model.modules {
        if name.starts_with("visual.") || name.contains("embed_q") || name.contains("unembed_out") {
            continue;
        }
        let is_matrix = module.arrays[0].shape.len() == 2 && !name.ends_with("_ape");
        if module.stack {
            let (one, two) = (a.stack(name).unwrap(), b.stack(name).unwrap());
            assert_eq!(one.len(), two.len());
            for (one, two) in one.iter().zip(&two) {
                assert_eq!(one.name, two.name);
                assert!(content(one) == content(two), "{what}: {} differs", one.name);
            }
        } else if is_matrix {
            let (one, two) = (a.matrix(name).unwrap(), b.matrix(name).unwrap());
            assert!(content(&one) == content(&two), "{what}: {name} differs");
        } else {
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert!(bits(a.vector(name).unwrap()) == bits(b.vector(name).unwrap()), "{what}: {name} differs");
        }
    }
    for layer in [3, LAYERS] {
        let (one, two) = (a.latent_heads(layer).unwrap(), b.latent_heads(layer).unwrap());
        for (one, two) in one.absorb.iter().zip(&two.absorb).chain(one.expand.iter().zip(&two.expand)) {
            assert_eq!(one.name, two.name);
            assert!(content(one) == content(two), "{what}: {} differs", one.name);
        }
    }
    let taps = |checkpoint: &Checkpoint| checkpoint.vector("layers.1.self_attn.conv1d").unwrap();
    assert_eq!(taps(a), taps(b));
}

fn plan(checkpoint: &Checkpoint) -> LoadPlan {
    let request = PlanRequest {
        context: 1024,
        sequences: 2,
        cache_element_bytes: 4,
        drafts_max: 3,
        rows: 512,
        machine_bytes: None,
        on_device: false,
        experts: ExpertsWanted::Auto,
    };
    LoadPlan::new(checkpoint, &request)
}

#[test]
fn every_layout_of_one_model_gives_the_same_matrices() {
    for storage in [plain, uniform, mixed] {
        let model = Model::new(7, storage);
        let first = write(&model, Layout::Official);
        for layout in ALL {
            assert_same_weights(&model, &first, &write(&model, layout), &format!("{layout:?}"));
        }
    }
}

#[test]
fn fp8_experts_stacked_or_apart_are_the_same() {
    let model = Model::new(8, fp8);
    let first = write(&model, Layout::Official);
    for layout in [Layout::Bare, Layout::Mlx] {
        assert_same_weights(&model, &first, &write(&model, layout), &format!("{layout:?}"));
    }
}

#[test]
fn a_fused_fp8_matrix_is_cut_inside_its_blocks() {
    let mut model = Model::new(8, fp8);
    let mut tensors = Layout::Official.tensors(&model);
    let path = "model.language_model.layers.3.self_attn.";
    tensors.retain(|t| {
        !t.name.starts_with(&format!("{path}q_a_proj")) && !t.name.contains("3.self_attn.kv_a_proj")
    });
    // 64 rows of q_a and 128 of kv_a in two blocks of 128 rows: the members share the first block.
    let codes: Vec<u8> = (0..192 * 128).map(|at| (at % 120) as u8).collect();
    let scales: Vec<u8> = [0.25_f32, 3.0].iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let fused = |part: &str, dtype, shape: [usize; 2], bytes: &Vec<u8>| Tensor {
        name: format!("{path}qkv_a_proj.{part}"),
        dtype,
        shape: shape.to_vec(),
        bytes: bytes.clone(),
    };
    tensors.push(fused("weight", "F8_E4M3", [192, 128], &codes));
    tensors.push(fused("weight_scale_inv", "F32", [2, 1], &scales));
    model.config = Layout::Official.config(&model);
    let checkpoint = open(source(&model.config, &tensors));

    let decoded = |rows: std::ops::Range<usize>| -> Vec<f64> {
        let scale = |row: usize| if row < 128 { 0.25 } else { 3.0 };
        rows.flat_map(|row| {
            codes[row * 128..(row + 1) * 128].iter().map(move |code| f64::from(e4m3(*code)) * scale(row))
        })
        .collect()
    };
    assert_eq!(checkpoint.matrix("layers.3.self_attn.q_a_proj").unwrap().decode_f64(), decoded(0..64));
    assert_eq!(
        checkpoint.matrix("layers.3.self_attn.kv_a_proj_with_mqa").unwrap().decode_f64(),
        decoded(64..192)
    );
}

#[test]
fn every_layout_of_one_model_plans_the_same_load() {
    for storage in [plain, uniform, mixed] {
        let model = Model::new(9, storage);
        let first = plan(&write(&model, Layout::Official));
        assert!(first.weight_bytes > 0);
        for layout in ALL {
            let other = plan(&write(&model, layout));
            let same =
                |plan: &LoadPlan| (plan.groups.clone(), plan.widths.clone(), plan.state, plan.total_bytes);
            assert_eq!(same(&first), same(&other), "{layout:?}");
        }
    }
}

#[test]
fn a_seed_makes_other_weights() {
    let (one, two) = (Model::new(1, plain), Model::new(2, plain));
    let (one, two) = (write(&one, Layout::Mlx), write(&two, Layout::Mlx));
    assert_ne!(one.vector("norm").unwrap(), two.vector("norm").unwrap());
    assert_ne!(one.manifest_digest(), two.manifest_digest());
    assert_eq!(two.manifest_digest(), write(&Model::new(2, plain), Layout::Mlx).manifest_digest());
}

#[test]
fn a_checkpoint_may_mix_layouts_tensor_by_tensor() {
    let model = Model::new(10, plain);
    let (official, fused) = (Layout::Official.tensors(&model), Layout::MlxFused.tensors(&model));
    let in_layer = |name: &str, layer: usize| name.contains(&format!("layers.{layer}."));
    let mut tensors: Vec<_> = official.iter().filter(|tensor| !in_layer(&tensor.name, 1)).cloned().collect();
    tensors.extend(fused.iter().filter(|tensor| in_layer(&tensor.name, 1)).cloned());
    let mixed = open(source(&model.config, &tensors));
    assert_same_weights(&model, &write(&model, Layout::Official), &mixed, "mixed");
}

#[test]
fn the_drafting_layer_and_the_vision_tower_may_be_absent_but_not_in_part() {
    let model = Model::new(11, plain);
    let tensors = Layout::Official.tensors(&model);
    let optional = |name: &str| name.contains("layers.4.") || name.contains("visual.");
    let trunk: Vec<_> = tensors.iter().filter(|tensor| !optional(&tensor.name)).cloned().collect();
    let checkpoint = open(source(&model.config, &trunk));
    assert!(!checkpoint.has("layers.4.enorm") && !checkpoint.has("visual.downsample"));

    for (kept, missing) in [
        ("layers.4.enorm", ["missing: layers.4.hnorm", "more"]),
        ("visual.downsample.bias", ["missing: visual.patch_embed.proj", "visual.blocks.0.attn.qkv"]),
    ] {
        let part: Vec<_> =
            tensors.iter().filter(|t| !optional(&t.name) || t.name.contains(kept)).cloned().collect();
        says(&refusal(source(&model.config, &part)), &missing);
    }
}
