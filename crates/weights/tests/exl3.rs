//! EXL3: tiles against exllamav3's, checkpoints as its converter writes them, and refusals by name.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use flint_weights::exl3::{Codebook, Rate, TILE_WEIGHTS, states};
use flint_weights::safetensors::Header;
use flint_weights::{Checkpoint, Encoding, Error, Form, HostBytes, LoadPlan, PlanRequest, QuantMatrix};
use serde_json::{Value, json};
use support::layout::Layout;
use support::{Model, Random, Storage, Tensor, open, refusal, says, source};

// The formula.

/// BLAKE3 of each codebook's 65,536 values in order, which `cargo xtask goldens` compares one by one with exllamav3's.
const CODEBOOKS: [(Codebook, &str); 3] = [
    (Codebook::ThreeInst, "992d166575bc27822fe73810b7a738566bede684241046c868a7fa5be3ca2062"),
    (Codebook::Mcg, "86696c43abc764ec83343b7b1a10cf2f668b190f3b2063d570359a7505b6ab9a"),
    (Codebook::Mul1, "bee431531d96e1864f46518ca15efb6073858eddbd03071df1bc6387f92334b0"),
];

#[test]
fn every_codebook_has_exllamav3s_values() {
    let digests = CODEBOOKS.map(|(codebook, _)| {
        let values: Vec<u8> = (0..=u16::MAX).flat_map(|state| codebook.value(state).to_le_bytes()).collect();
        blake3::hash(&values).to_hex().to_string()
    });
    assert_eq!(digests, CODEBOOKS.map(|(_, digest)| digest));
}

#[test]
fn tiles_of_every_rate_and_codebook_decode_to_exllamav3s_values() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/exl3.safetensors");
    let bytes = HostBytes::new(Arc::new(std::fs::read(path).unwrap()));
    let header = Header::of_bytes("exl3.safetensors", &bytes).unwrap();
    let find = |name: &str| header.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    let data = |name: &str| {
        let tensor = find(name);
        bytes.slice(tensor.start as usize..tensor.end as usize).unwrap()
    };
    let mut cases = 0;
    for case in header.tensors.iter().filter_map(|tensor| tensor.name.strip_suffix(".tiles")) {
        let all = CODEBOOKS.map(|(codebook, _)| codebook);
        let codebook = all.into_iter().find(|codebook| case.contains(&codebook.to_string())).unwrap();
        let rate = Rate::of_words(find(&format!("{case}.tiles")).shape[1]).unwrap();
        assert!(case.starts_with(&format!("K{rate}.")), "{case} has {rate} bits");
        let (tiles, values) = (data(&format!("{case}.tiles")), data(&format!("{case}.values")));
        let tiles = tiles.as_slice().chunks_exact(rate.tile_bytes());
        for (tile, expected) in tiles.zip(values.as_slice().chunks_exact(TILE_WEIGHTS * 2)) {
            let values = states(tile, rate).into_iter().flat_map(|s| codebook.value(s).to_le_bytes());
            assert!(values.eq(expected.iter().copied()), "{case}");
        }
        cases += 1;
    }
    assert_eq!(cases, 27, "eight rates in three codebooks and three half rates");
}

// Checkpoints.

/// A checkpoint to spoil: config and tensors.
type Parts = (Value, Vec<Tensor>);

const TEXT: &str = "model.language_model.";
const O_PROJ: &str = "model.language_model.layers.1.self_attn.o_proj";
const QKV: &str = "model.language_model.layers.1.self_attn.qkv_proj";
const VISION: &str = "model.visual.blocks.0.attn.";

/// Half bits of a module: all rates, by name.
fn halves(module: &str) -> usize {
    let rates = [2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16];
    rates[Random::new(module).below(rates.len())]
}

fn scales(random: &mut Random, len: usize) -> Vec<u8> {
    let mut scale = || if random.byte() & 1 == 0 { 0.5 + random.unit() } else { -0.5 - random.unit() };
    (0..len).flat_map(|_| half::f16::from_f32(scale()).to_le_bytes()).collect()
}

/// The tensors of a module of these sizes.
fn exl3(module: &str, rows: usize, cols: usize) -> Vec<Tensor> {
    let mut random = Random::new(module);
    let (outputs, inputs) = (rows.next_multiple_of(128), cols.next_multiple_of(128));
    let tensor = |part: &str, dtype, shape: Vec<usize>, bytes: Vec<u8>| Tensor {
        name: format!("{module}.{part}"),
        dtype,
        shape,
        bytes,
    };
    let words = 8 * halves(module);
    let trellis = (0..inputs / 16 * (outputs / 16) * words * 2).map(|_| random.byte()).collect();
    vec![
        tensor("mul1", "I32", vec![], 0x83DC_D12D_u32.to_le_bytes().to_vec()),
        tensor("suh", "F16", vec![inputs], scales(&mut random, inputs)),
        tensor("svh", "F16", vec![outputs], scales(&mut random, outputs)),
        tensor("trellis", "I16", vec![inputs / 16, outputs / 16, words], trellis),
    ]
}

/// The small model as the converter writes it: attention, feed-forwards and head as trellises, the input projections and
/// convolutions of KDA layers fused, vision in parts beside the whole.
static CONVERTED: LazyLock<Parts> = LazyLock::new(|| {
    let model = Model::new(37, |_| Storage::Bf16);
    let quantised =
        ["o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wq_b", "gate_proj", "up_proj", "down_proj"];
    let mut tensors = Vec::new();
    for tensor in Layout::Official.tensors(&model) {
        let Some(module) = tensor.name.strip_suffix(".weight") else {
            tensors.push(tensor);
            continue;
        };
        let fused = |side: &str| module.strip_suffix(side).filter(|_| !module.contains("visual"));
        if let Some(layer) = fused("q_proj") {
            tensors.extend(exl3(&format!("{layer}qkv_proj"), 3 * tensor.shape[0], tensor.shape[1]));
        } else if let Some(layer) = fused("q_conv1d") {
            let shape = vec![3 * tensor.shape[0], 1, 4];
            tensors.push(Tensor {
                name: format!("{layer}conv1d.weight"),
                shape,
                bytes: tensor.bytes.repeat(3),
                ..tensor
            });
        } else if ["k_proj", "v_proj", "k_conv1d", "v_conv1d"].iter().any(|side| fused(side).is_some()) {
        } else if module == "lm_head" || quantised.iter().any(|name| module.ends_with(&format!(".{name}"))) {
            tensors.extend(exl3(module, tensor.shape[0], tensor.shape[1]));
        } else {
            tensors.push(tensor);
        }
    }
    for side in ["q_proj", "k_proj", "v_proj"] {
        tensors.extend(exl3(&format!("{VISION}{side}"), 64, 64));
        let (name, bytes) = (format!("{VISION}{side}.bias"), vec![0; 128]);
        tensors.push(Tensor { name, dtype: "F16", shape: vec![64], bytes });
    }
    let mut config = Layout::Official.config(&model);
    config["quantization_config"] = json!({"quant_method": "exl3", "version": "1.6.5", "bits": 3.0, "head_bits": 6,
        "calibration": {"rows": 128, "cols": 2048}, "out_scales": "auto", "codebook": "mul1"});
    (config, tensors)
});

fn changed(edit: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> (Value, Vec<Tensor>) {
    let (mut config, mut tensors) = CONVERTED.clone();
    edit(&mut config, &mut tensors);
    (config, tensors)
}

fn accept(edit: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> Checkpoint {
    let (config, tensors) = changed(edit);
    open(source(&config, &tensors))
}

fn spoil(edit: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> Error {
    let (config, tensors) = changed(edit);
    refusal(source(&config, &tensors))
}

fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}"))
}

fn add(tensors: &mut Vec<Tensor>, name: &str, dtype: &'static str, shape: Vec<usize>, bytes: Vec<u8>) {
    tensors.push(Tensor { name: name.to_owned(), dtype, shape, bytes });
}

fn o_proj(checkpoint: &Checkpoint) -> QuantMatrix {
    checkpoint.matrix("layers.1.self_attn.o_proj").unwrap()
}

#[test]
fn a_converted_checkpoint_opens_with_the_width_of_each_tensor() {
    let checkpoint = accept(|_, _| {});
    assert_eq!(checkpoint.warnings(), [] as [&str; 0]);
    let mut seen = Vec::new();
    for (name, rows, cols) in [
        ("layers.1.self_attn.o_proj", 128, 128),
        ("lm_head", 192, 128),
        ("layers.3.self_attn.q_a_proj", 64, 128),
        ("layers.3.self_attn.q_b_proj", 128, 64),
    ] {
        let matrix = checkpoint.matrix(name).unwrap();
        assert_eq!((matrix.rows, matrix.cols), (rows, cols), "{name}");
        let Form::Exl3(exl3) = &matrix.form else { panic!("{name}") };
        let stored = if name == "lm_head" { name.to_owned() } else { format!("{TEXT}{name}") };
        assert_eq!(exl3.rate.halves(), halves(&stored), "{name}");
        assert_eq!(exl3.codebook, Codebook::Mul1);
        assert!(matrix.decode_f64().iter().all(|value| value.is_finite()));
        assert_eq!(matrix.decode_f64()[5 * cols..6 * cols], matrix.decode_row_f64(5));
        seen.push(exl3.rate);
    }
    // Members of one stack may have different widths.
    let experts = checkpoint.stack("layers.3.mlp.experts.gate_proj").unwrap();
    for (member, matrix) in experts.iter().enumerate() {
        let Form::Exl3(exl3) = &matrix.form else { panic!("{}", matrix.name) };
        assert_eq!(exl3.rate.halves(), halves(&format!("{TEXT}layers.3.mlp.experts.{member}.gate_proj")));
    }
    let request = PlanRequest {
        context: 64,
        sequences: 1,
        cache_element_bytes: 4,
        drafts_max: 0,
        rows: 64,
        machine_bytes: None,
        on_device: false,
        experts: flint_weights::plan::ExpertsWanted::All,
    };
    let plan = LoadPlan::new(&checkpoint, &request);
    let exl3 = plan.widths.iter().filter(|width| matches!(width.encoding, Encoding::Exl3 { .. }));
    assert!(exl3.clone().count() > 2 && exl3.clone().all(|width| width.matrices > 0));
    assert_eq!(
        Encoding::Exl3 { rate: Rate::of_halves(5).unwrap(), codebook: Codebook::Mul1 }.to_string(),
        "exl3 2.5-bit, mul1"
    );
}

#[test]
fn a_fused_trellis_is_cut_by_outputs() {
    let checkpoint = accept(|_, _| {});
    let parts = ["q_proj", "k_proj", "v_proj"]
        .map(|side| checkpoint.matrix(&format!("layers.1.self_attn.{side}")).unwrap());
    let mut whole = None;
    for (index, part) in parts.iter().enumerate() {
        let Form::Exl3(exl3) = &part.form else { panic!("{}", part.name) };
        assert_eq!((part.rows, exl3.first_row, exl3.outputs), (128, 128 * index, 384));
        let mut all = exl3.clone();
        all.first_row = 0;
        whole.get_or_insert(QuantMatrix { rows: 384, form: Form::Exl3(all), ..part.clone() });
    }
    let whole = whole.unwrap();
    let joined: Vec<f64> = parts.iter().flat_map(QuantMatrix::decode_f64).collect();
    assert!(whole.decode_f64() == joined);
    let cut = whole.cut_rows(100..140).unwrap();
    assert!(cut.decode_f64() == joined[100 * 128..140 * 128]);
    assert_eq!(whole.bytes(), parts.iter().map(QuantMatrix::bytes).sum::<usize>() - 2 * 2 * 128);
}

#[test]
fn packed_signs_are_scales_of_one() {
    let signs: Vec<u16> = (0..8).map(|word: u32| (word.wrapping_mul(2_654_435_761) >> 7) as u16).collect();
    let ones: Vec<u8> = (0..128)
        .map(|i| if signs[i / 16] >> (i % 16) & 1 == 1 { -1.0 } else { 1.0 })
        .flat_map(|sign| half::f16::from_f32(sign).to_le_bytes())
        .collect();
    let packed: Vec<u8> = signs.iter().flat_map(|word| word.to_le_bytes()).collect();
    let expected = accept(|_, tensors| {
        for side in ["suh", "svh"] {
            find(tensors, &format!("{O_PROJ}.{side}")).bytes.clone_from(&ones);
        }
    });
    let found = accept(|_, tensors| {
        for side in ["su", "sv"] {
            let tensor = find(tensors, &format!("{O_PROJ}.{side}h"));
            *tensor = Tensor {
                name: format!("{O_PROJ}.{side}"),
                dtype: "I16",
                shape: vec![8],
                bytes: packed.clone(),
            };
        }
    });
    assert!(o_proj(&found).decode_f64() == o_proj(&expected).decode_f64());
}

#[test]
fn each_codebook_is_chosen_by_its_marker() {
    for (marker, codebook) in [(None, Codebook::ThreeInst), (Some(("mcg", 0xCBAC_1FED_u32)), Codebook::Mcg)] {
        let checkpoint = accept(|_, tensors| {
            let at = tensors.iter().position(|tensor| tensor.name == format!("{O_PROJ}.mul1")).unwrap();
            tensors.remove(at);
            let trellis = find(tensors, &format!("{O_PROJ}.trellis"));
            (trellis.shape, trellis.bytes) = (vec![8, 8, 48], vec![0x5A; 8 * 8 * 96]);
            if let Some((name, value)) = marker {
                add(tensors, &format!("{O_PROJ}.{name}"), "I32", vec![1], value.to_le_bytes().to_vec());
            }
        });
        let Form::Exl3(exl3) = o_proj(&checkpoint).form else { panic!("{codebook}") };
        assert_eq!(exl3.codebook, codebook);
    }
}

#[test]
fn vision_attention_is_read_in_parts_where_it_has_them_and_whole_otherwise() {
    let checkpoint = accept(|_, _| {});
    assert!(
        checkpoint.has("visual.blocks.0.attn.q_proj") && checkpoint.has("visual.blocks.0.attn.v_proj.bias")
    );
    assert!(!checkpoint.has("visual.blocks.0.attn.qkv") && !checkpoint.has("visual.blocks.0.attn.qkv.bias"));
    let is_part = |name: &str| {
        ["q_proj", "k_proj", "v_proj"].iter().any(|part| name.starts_with(&format!("{VISION}{part}")))
    };
    let checkpoint = accept(|_, tensors| tensors.retain(|tensor| !is_part(&tensor.name)));
    assert!(checkpoint.has("visual.blocks.0.attn.qkv") && !checkpoint.has("visual.blocks.0.attn.q_proj"));
    let error =
        spoil(|_, tensors| tensors.retain(|tensor| !tensor.name.starts_with(&format!("{VISION}k_proj"))));
    says(&error, &["missing: visual.blocks.0.attn.k_proj", "visual.blocks.0.attn.k_proj.bias"]);
}

#[test]
fn a_list_of_tensors_that_differs_from_the_shards_is_named_and_not_used() {
    let (config, tensors) = CONVERTED.clone();
    let open_with = |list: Value| {
        open(support::files(&[
            ("config.json", serde_json::to_vec(&config).unwrap()),
            ("model.safetensors", support::file(&tensors)),
            ("quantization_config.json", serde_json::to_vec(&list).unwrap()),
        ]))
    };
    let list = |name: &str, shape: [usize; 1]| {
        let tensors = json!({name: {"shape": shape, "n_bytes": 256, "dtype": "torch.float16"}});
        json!({"tensor_storage": {"lm_head": {"stored_tensors": tensors, "quant_format": "exl3"}, "hc": {"stored_tensors": {}}}})
    };
    assert_eq!(open_with(list("lm_head.suh", [128])).warnings(), [] as [&str; 0]);
    let warnings = open_with(list("lm_head.suh", [256])).warnings().to_vec();
    assert!(warnings[0].contains("lm_head.suh is listed as [256], stored as [128]"), "{warnings:?}");
    let warnings = open_with(list("lm_head.su", [8])).warnings().to_vec();
    assert!(warnings[0].contains("lm_head.su is listed as [8], not there"), "{warnings:?}");
}

// Refusals.

#[test]
fn markers_that_name_no_codebook_are_refused() {
    let mcg = 0xCBAC_1FED_u32.to_le_bytes().to_vec();
    let error = spoil(|_, tensors| add(tensors, &format!("{O_PROJ}.mcg"), "I32", vec![], mcg));
    says(&error, &["layers.1.self_attn.o_proj", "markers of two codebooks, mcg and mul1"]);
    let error = spoil(|_, tensors| find(tensors, &format!("{O_PROJ}.mul1")).dtype = "F32");
    says(&error, &["o_proj.mul1", "stored as F32", "expected I32"]);
    // The value is data: it is looked at when the module is read.
    let checkpoint = accept(|_, tensors| find(tensors, &format!("{O_PROJ}.mul1")).bytes[0] ^= 1);
    let error = checkpoint.matrix("layers.1.self_attn.o_proj").unwrap_err();
    says(
        &error,
        &["o_proj.mul1 (model.safetensors, offset", "0x83dcd12c, expected 0x83dcd12d", "another codebook"],
    );
    let error = spoil(|config, _| config["quantization_config"]["codebook"] = json!("4inst"));
    says(&error, &["quantization_config.codebook", "4inst", "\"3inst\", \"mcg\" or \"mul1\""]);
}

#[test]
fn trellises_of_other_shapes_are_refused_with_both_shapes() {
    let shape = |shape: [usize; 3]| {
        spoil(|_, tensors| {
            let trellis = find(tensors, &format!("{O_PROJ}.trellis"));
            (trellis.shape, trellis.bytes) = (shape.to_vec(), vec![0; shape.iter().product::<usize>() * 2]);
        })
    };
    for (stored, words) in
        [([8, 8, 41], "K of 1 to 8"), ([8, 8, 136], "K of 1 to 8"), ([8, 8, 72], "1.5, 2.5 or 3.5")]
    {
        says(&shape(stored), &["o_proj.trellis", &format!("shape {stored:?}"), words]);
    }
    says(
        &shape([8, 16, 48]),
        &["o_proj.trellis", "[8, 16, 48]", "[8, 8, 16·K]", "128 inputs and 128 outputs"],
    );
    // Outputs first is another order of tiles.
    let error = spoil(|_, tensors| find(tensors, "lm_head.trellis").shape.swap(0, 1));
    says(&error, &["lm_head.trellis", "[16, 8", "[8, 16, 16·K]", "inputs first"]);
    let error = spoil(|_, tensors| find(tensors, &format!("{O_PROJ}.trellis")).dtype = "F16");
    says(&error, &["o_proj.trellis", "stored as F16", "expected I16"]);
    let error = spoil(|_, tensors| {
        let svh = find(tensors, "lm_head.svh");
        (svh.shape, svh.bytes) = (vec![192], vec![0; 384]);
    });
    says(&error, &["lm_head.svh", "[192]", "[256]"]);
}

#[test]
fn half_rates_are_mul1s_alone() {
    let error = spoil(|_, tensors| {
        let at = tensors.iter().position(|tensor| tensor.name == format!("{O_PROJ}.mul1")).unwrap();
        tensors.remove(at);
        let trellis = find(tensors, &format!("{O_PROJ}.trellis"));
        (trellis.shape, trellis.bytes) = (vec![8, 8, 40], vec![0; 8 * 8 * 80]);
    });
    says(&error, &["layers.1.self_attn.o_proj", "2.5 bits", "3inst", "half rates are mul1's"]);
}

#[test]
fn arrays_that_are_missing_or_too_many_are_refused() {
    let error = spoil(|_, tensors| tensors.retain(|tensor| tensor.name != format!("{O_PROJ}.suh")));
    says(&error, &["layers.1.self_attn.o_proj", "neither suh nor su"]);
    let error = spoil(|_, tensors| add(tensors, &format!("{O_PROJ}.sv"), "I16", vec![8], vec![0; 16]));
    says(&error, &["layers.1.self_attn.o_proj", "both svh and sv"]);
    let error =
        spoil(|_, tensors| add(tensors, &format!("{O_PROJ}.weight"), "BF16", vec![128, 128], vec![0; 32768]));
    says(&error, &["layers.1.self_attn.o_proj", "both a trellis and a weight"]);
    let error = spoil(|_, tensors| tensors.retain(|tensor| tensor.name != format!("{O_PROJ}.trellis")));
    says(&error, &["missing: layers.1.self_attn.o_proj"]);
    let error = spoil(|_, tensors| {
        add(tensors, &format!("{TEXT}layers.1.mlp.gate.suh"), "F16", vec![128], vec![0; 256]);
    });
    says(&error, &["layers.1.mlp.gate", "layers.1.mlp.gate.suh, but no trellis"]);
    let error = spoil(|_, tensors| add(tensors, &format!("{O_PROJ}.bias"), "F16", vec![128], vec![0; 256]));
    says(&error, &["1 left over", "o_proj.bias"]);
    let error = spoil(|_, tensors| add(tensors, &format!("{TEXT}norm.suh"), "F16", vec![128], vec![0; 256]));
    says(&error, &["norm", "never quantised"]);
    let error = spoil(|_, tensors| {
        tensors.retain(|tensor| !tensor.name.contains("embed_tokens"));
        tensors.extend(exl3(&format!("{TEXT}embed_tokens"), 192, 128));
    });
    says(&error, &["embed_tokens.trellis", "an embedding in EXL3 is not supported"]);
}

#[test]
fn scales_that_are_no_numbers_are_refused_when_the_module_is_read() {
    for side in ["suh", "svh"] {
        let checkpoint = accept(|_, tensors| {
            find(tensors, &format!("{QKV}.{side}")).bytes[6..8].copy_from_slice(&0x7C00_u16.to_le_bytes());
        });
        let error = checkpoint.matrix("layers.1.self_attn.k_proj").unwrap_err();
        says(&error, &[&format!("qkv_proj.{side}"), "value inf at index 3", "not a finite number"]);
    }
}
