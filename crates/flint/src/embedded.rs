//! The model inside the binary: flint-tiny, the default of every command.

/// Its name.
pub(crate) const NAME: &str = "flint-tiny";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../models/flint-tiny/", $name)))),*]
    };
}

/// Its files: name and bytes.
pub(crate) static FILES: &[(&str, &[u8])] = files![
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];
