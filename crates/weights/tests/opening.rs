//! Opening of real checkpoints: the embedded model.

use std::path::PathBuf;

use flint_weights::{Checkpoint, Source};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_embedded_model_opens_as_a_folder() {
    let checkpoint = Checkpoint::open(Source::Folder(repository().join("models/flint-tiny"))).unwrap();
    let config = checkpoint.config();
    assert_eq!((config.layers(), config.hidden_size, config.vocab_size), (8, 256, 5120));
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
    assert_eq!(checkpoint.matrix("embed_tokens").unwrap().rows, 5120);
    assert_eq!(checkpoint.stack("layers.3.mlp.experts.gate_proj").unwrap().len(), 32);
    assert_eq!(checkpoint.vector("layers.0.self_attn.conv1d").unwrap().len(), 3 * 384 * 4);
    let heads = checkpoint.latent_heads(3).unwrap();
    assert_eq!((heads.absorb[0].rows, heads.absorb[0].cols), (128, 128));
}
