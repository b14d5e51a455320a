//! Opening of real checkpoints: the embedded model, and two random models that mlx-vlm wrote.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::path::PathBuf;

use flint_weights::{Checkpoint, Encoding, Form, HostBytes, PlainType, Source};
use support::{config, layout::Layout, open, source};

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

macro_rules! embedded {
    ($($file:literal),*) => {
        &[$(($file, include_bytes!(concat!("../../../models/flint-tiny/", $file)))),*]
    };
}

static EMBEDDED: &[(&str, &[u8])] = embedded!(
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors"
);

#[test]
fn the_embedded_model_opens_from_a_folder_and_from_the_binary_alike() {
    let folder = open(Source::Folder(repository("models/flint-tiny")));
    let binary = open(Source::Embedded(EMBEDDED));
    assert_eq!(folder.manifest_digest(), binary.manifest_digest());
    assert_eq!(folder.config(), binary.config());
    assert!(folder.warnings().is_empty(), "{:?}", folder.warnings());
    for name in ["embed_tokens", "layers.0.self_attn.q_proj", "layers.7.self_attn.indexer.wk", "lm_head"] {
        let (one, two) = (folder.matrix(name).unwrap(), binary.matrix(name).unwrap());
        assert_eq!(one.decode_row_f64(one.rows - 1), two.decode_row_f64(one.rows - 1), "{name}");
    }
}

#[test]
fn the_embedded_model_has_the_widths_that_its_config_declares() {
    let checkpoint = open(Source::Folder(repository("models/flint-tiny")));
    let width = |matrix: flint_weights::QuantMatrix| match matrix.form {
        Form::Affine { bits, group, kind: PlainType::Bf16, .. } => (bits, group),
        other => panic!("{other:?}"),
    };
    assert_eq!(width(checkpoint.matrix("lm_head").unwrap()), (8, 64));
    assert_eq!(width(checkpoint.matrix("layers.0.mlp.gate_proj").unwrap()), (6, 64));
    let experts = checkpoint.stack("layers.3.mlp.experts.down_proj").unwrap();
    assert_eq!(experts.len(), 32);
    assert_eq!(experts[31].name, "layers.3.mlp.experts.31.down_proj");
    assert!(experts.into_iter().all(|expert| width(expert) == (4, 64)));
    let heads = checkpoint.latent_heads(3).unwrap();
    assert_eq!((heads.absorb.len(), heads.absorb[0].rows, heads.absorb[0].cols), (4, 128, 128));
    assert!(matches!(checkpoint.matrix("layers.3.mlp.gate").unwrap().form, Form::Plain { .. }));
}

#[test]
fn fused_modules_of_mlx_vlm_are_cut_into_their_members() {
    let checkpoint = open(Source::Folder(repository("tests/fixtures/glm5_next_nano_mlx4")));
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
    for (name, rows) in [("q_proj", 256), ("v_proj", 256), ("f_a_proj", 64), ("b_proj", 4), ("g_a_proj", 64)]
    {
        let matrix = checkpoint.matrix(&format!("layers.0.self_attn.{name}")).unwrap();
        assert_eq!((matrix.rows, matrix.cols), (rows, 256), "{name}");
        assert!(matrix.decode_f64().iter().any(|weight| *weight != 0.0));
    }
    let a_row = |name: &str, row: usize| {
        checkpoint.matrix(&format!("layers.0.self_attn.{name}")).unwrap().decode_row_f64(row)
    };
    assert_ne!(a_row("q_proj", 0), a_row("k_proj", 0));
    assert_eq!(checkpoint.vector("layers.0.self_attn.conv1d").unwrap().len(), 3 * 256 * 4);
}

#[test]
fn a_width_for_each_module_is_read_as_declared() {
    let checkpoint = open(Source::Folder(repository("tests/fixtures/glm5_next_nano_oq")));
    let bits = |name: &str| match checkpoint.matrix(name).unwrap().form {
        Form::Affine { bits, group, .. } => (bits, group),
        other => panic!("{other:?}"),
    };
    assert_eq!(bits("layers.0.self_attn.q_proj"), (5, 64));
    assert_eq!(bits("layers.0.self_attn.k_proj"), (8, 64));
    assert_eq!(bits("layers.3.self_attn.o_proj"), (3, 128));
    assert_eq!(bits("layers.3.self_attn.q_b_proj"), (4, 32));
    assert_eq!(bits("embed_tokens"), (8, 32));
    assert!(checkpoint.has("layers.8.enorm") && !checkpoint.has("visual.downsample"));
}

#[test]
fn fp32_numbers_stay_fp32_unless_a_narrower_type_holds_them_exactly() {
    let checkpoint = open(Source::Folder(repository("tests/fixtures/glm5_next_nano_oq")));
    let name = "layers.0.hc_ffn_fn";
    let stored = checkpoint.matrix(name).unwrap();
    assert!(matches!(stored.form, Form::Plain { kind: PlainType::F32, .. }));
    // All values of this fixture are exact in bf16.
    let narrowed = checkpoint.matrix_as(name, PlainType::Bf16).unwrap();
    assert!(matches!(narrowed.form, Form::Plain { kind: PlainType::Bf16, .. }));
    assert_eq!(narrowed.decode_f64(), stored.decode_f64());

    let model = support::Model::new(3, |name| {
        if name.ends_with("hc_attn_fn") { support::Storage::F32 } else { support::Storage::Bf16 }
    });
    let checkpoint = open(source(&config(), &Layout::Official.tensors(&model)));
    let error = checkpoint.matrix_as("layers.1.hc_attn_fn", PlainType::Bf16).unwrap_err();
    let value = checkpoint.matrix("layers.1.hc_attn_fn").unwrap().decode_f64()[0];
    let place = [
        "model.language_model.layers.1.hc_attn_fn (model.safetensors, offset ",
        "shape [24, 512]",
        "index 0",
    ];
    support::says(&error, &place);
    support::says(&error, &[&format!("value {value} "), "cannot be held exactly"]);
}

#[test]
fn a_checkpoint_on_disk_may_have_its_data_at_odd_offsets() {
    let model = support::Model::new(4, |_| support::Storage::F32);
    let mut bytes = support::file(&Layout::Mlx.tensors(&model));
    // One more space at the end of the header moves all data by a byte.
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.insert(8 + header as usize, b' ');
    bytes[..8].copy_from_slice(&(header + 1).to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config().to_string()).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), &bytes).unwrap();
    let moved = open(Source::Folder(folder.path().to_owned()));
    let plain = open(source(&config(), &Layout::Mlx.tensors(&model)));
    let row =
        |checkpoint: &Checkpoint| checkpoint.matrix("layers.2.self_attn.o_proj").unwrap().decode_row_f64(5);
    assert_eq!(row(&moved), row(&plain));
}

#[test]
fn a_file_that_another_library_wrote_opens() {
    let model = support::Model::new(5, |_| support::Storage::Bf16);
    let tensors = Layout::Mlx.tensors(&model);
    let views = tensors.iter().map(|tensor| {
        let dtype = if tensor.dtype == "F32" { safetensors::Dtype::F32 } else { safetensors::Dtype::BF16 };
        let view = safetensors::tensor::TensorView::new(dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
        (tensor.name.clone(), view)
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    let config = serde_json::to_vec(&config()).unwrap();
    let written = open(support::files(&[("config.json", config), ("model.safetensors", bytes)]));
    let own = open(source(&support::config(), &tensors));
    assert_eq!(
        written.vector("layers.1.self_attn.A_log").unwrap(),
        own.vector("layers.1.self_attn.A_log").unwrap()
    );
    assert_eq!(written.tensors(), own.tensors());
}

#[test]
fn small_files_are_read_from_every_source() {
    let sources = [
        Source::Folder(repository("models/flint-tiny")),
        Source::Embedded(EMBEDDED),
        Source::Memory(vec![("config.json".to_owned(), HostBytes::from_vec(EMBEDDED[0].1.to_vec()))]),
    ];
    for source in sources {
        assert_eq!(source.read("config.json").unwrap().unwrap().as_slice(), EMBEDDED[0].1);
        assert!(source.read("chat_template.txt").unwrap().is_none());
    }
}

#[test]
fn an_encoding_has_a_short_name() {
    assert_eq!(
        Encoding::Affine { bits: 4, group: 64, kind: PlainType::Bf16 }.to_string(),
        "affine 4-bit, group 64"
    );
    let wide = Encoding::Affine { bits: 3, group: 32, kind: PlainType::F32 };
    assert_eq!(wide.to_string(), "affine 3-bit, group 32, f32 scales");
}
