//! A `config.json` of any bytes, with the quantisation tables inside, is read or refused.

#![no_main]

use flint_weights::{Checkpoint, HostBytes, Source};
use libfuzzer_sys::fuzz_target;

/// A shard without tensors, so that everything up to the names is reached.
const SHARD: &[u8] = b"\x02\0\0\0\0\0\0\0{}";

fuzz_target!(|data: &[u8]| {
    let config = ("config.json".to_owned(), HostBytes::from_vec(data.to_vec()));
    let shard = ("model.safetensors".to_owned(), HostBytes::from_vec(SHARD.to_vec()));
    match Checkpoint::open(Source::Memory(vec![config, shard])) {
        Ok(checkpoint) => panic!("{checkpoint:?} has no tensors"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
