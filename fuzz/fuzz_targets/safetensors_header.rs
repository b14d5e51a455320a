//! A shard of any bytes is read or refused, alone and as the only shard of a checkpoint.

#![no_main]

use flint_weights::safetensors::Header;
use flint_weights::{Checkpoint, HostBytes, LoadPlan, PlanRequest, Source};
use libfuzzer_sys::fuzz_target;

const CONFIG: &[u8] = include_bytes!("../../crates/weights/tests/support/config.json");

fuzz_target!(|data: &[u8]| {
    let shard = HostBytes::from_vec(data.to_vec());
    // What is refused alone is refused in a checkpoint; trying it again would only cost time.
    let Ok(header) = Header::of_bytes("model.safetensors", &shard) else { return };
    for tensor in &header.tensors {
        assert!(tensor.start <= tensor.end && tensor.end <= data.len() as u64);
    }
    let config = ("config.json".to_owned(), HostBytes::from_vec(CONFIG.to_vec()));
    let source = Source::Memory(vec![config, ("model.safetensors".to_owned(), shard)]);
    match Checkpoint::open(source) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(checkpoint) => {
            let request = PlanRequest {
                context: 4096,
                sequences: 2,
                cache_element_bytes: 4,
                drafts_max: 3,
                rows: 512,
                machine_bytes: Some(1 << 20),
                on_device: false,
                experts: flint_weights::plan::ExpertsWanted::Auto,
            };
            LoadPlan::new(&checkpoint, &request).render(80);
            for name in ["lm_head", "layers.0.self_attn.q_proj", "layers.3.self_attn.o_proj"] {
                let _ = checkpoint.matrix(name);
            }
            let _ = checkpoint.latent_heads(3);
            let _ = checkpoint.vector("layers.1.self_attn.conv1d");
        }
    }
});
