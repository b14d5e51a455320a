//! Checkpoints in folders, to make packs of: several shards, EXL3 experts too.

use std::collections::BTreeMap;
use std::path::Path;

use flint_weights::pack::{ExpertRecord, ExpertSource, FilePlace, Folder, PackOptions, PackPlan, pack};
use serde_json::{Map, Value, json};

use super::layout::Layout;
use super::{Model, Random, Storage, Tensor, file};

/// A checkpoint before it is written.
pub(crate) struct Plain {
    pub(crate) config: Value,
    pub(crate) tensors: Vec<Tensor>,
}

impl Plain {
    /// The small model in a layout; experts stored as `storage`, everything else in bf16.
    pub(crate) fn new(layout: Layout, storage: fn(&str) -> Storage) -> Self {
        let model = Model::new(5, storage);
        let mut config = model.config.clone();
        match storage("layers.1.mlp.experts.gate_proj") {
            Storage::Affine(bits, group) => {
                config["quantization"] = json!({"bits": bits, "group_size": group, "mode": "affine"});
            }
            Storage::Fp8 => {
                config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
            }
            _ => {}
        }
        Self { config, tensors: layout.tensors(&model) }
    }

    /// The small model with EXL3 experts, as exllamav3 writes them: nothing aligned, a marker beside each trellis.
    /// `half_bits` gives twice the width of a layer's projection.
    pub(crate) fn exl3(half_bits: fn(usize, &str) -> usize) -> Self {
        let mut plain = Self::new(Layout::Official, |_| Storage::Bf16);
        let mut tensors = Vec::new();
        for tensor in plain.tensors {
            let Some((path, projection)) =
                tensor.name.strip_suffix(".weight").and_then(|path| path.rsplit_once('.'))
            else {
                tensors.push(tensor);
                continue;
            };
            if !path.contains(".mlp.experts.") {
                tensors.push(tensor);
                continue;
            }
            let layer = path.split("layers.").nth(1).unwrap().split('.').next().unwrap().parse().unwrap();
            let (rows, cols) = (tensor.shape[0].next_multiple_of(128), tensor.shape[1].next_multiple_of(128));
            let words = 8 * half_bits(layer, projection);
            let mut random = Random::new(&tensor.name);
            let mut add = |end: &str, dtype: &'static str, shape: &[usize], size: usize| {
                let bytes = (0..shape.iter().product::<usize>() * size).map(|_| random.byte()).collect();
                let name = format!("{path}.{projection}.{end}");
                tensors.push(Tensor { name, dtype, shape: shape.to_vec(), bytes });
            };
            add("suh", "F16", &[cols], 2);
            add("svh", "F16", &[rows], 2);
            add("trellis", "I16", &[cols / 16, rows / 16, words], 2);
            tensors.push(Tensor {
                name: format!("{path}.{projection}.mul1"),
                dtype: "I32",
                shape: Vec::new(),
                bytes: 0x83DC_D12D_u32.to_le_bytes().to_vec(),
            });
        }
        // An odd number of bytes before all others, so that nothing lies at a multiple of its size.
        tensors.insert(
            0,
            Tensor { name: "model.visual.odd".into(), dtype: "U8", shape: vec![3], bytes: vec![7; 3] },
        );
        plain.config["quantization_config"] =
            json!({"quant_method": "exl3", "bits": 3.0, "codebook": "mul1"});
        Self { config: plain.config, tensors }
    }

    /// Writes it as `shards` files with an index, and some files beside them.
    pub(crate) fn write(&self, folder: &Path, shards: usize) {
        std::fs::create_dir_all(folder.join("extra")).unwrap();
        let text = serde_json::to_string_pretty(&self.config).unwrap();
        std::fs::write(folder.join("config.json"), text).unwrap();
        std::fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        std::fs::write(folder.join("README.md"), "a model").unwrap();
        std::fs::write(folder.join("extra/notes.txt"), "kept").unwrap();
        std::fs::write(folder.join(".hidden"), "not the checkpoint's").unwrap();
        if shards == 1 {
            std::fs::write(folder.join("model.safetensors"), file(&self.tensors)).unwrap();
            return;
        }
        let mut map = Map::new();
        for (number, part) in self.tensors.chunks(self.tensors.len().div_ceil(shards)).enumerate() {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", number + 1);
            std::fs::write(folder.join(&name), file(part)).unwrap();
            map.extend(part.iter().map(|tensor| (tensor.name.clone(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

/// Makes a pack.
pub(crate) fn make(source: &Path, folder: &Path) {
    let origin = Folder::new(source);
    let plan = PackPlan::new(&origin, &PackOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    pack(&plan, &origin, folder, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
}

/// All files of a folder, by name.
pub(crate) fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn add(folder: &Path, prefix: &str, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() {
                add(&entry.path(), &format!("{name}/"), files);
            } else {
                files.insert(name, std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let mut files = BTreeMap::new();
    add(folder, "", &mut files);
    files
}

/// Asserts that two folders have the same files, and names the first that differs.
pub(crate) fn assert_same_tree(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) {
    let names = |tree: &BTreeMap<String, Vec<u8>>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    for (name, bytes) in expected {
        let differs = found[name].iter().zip(bytes).position(|(a, b)| a != b);
        assert!(
            found[name] == *bytes,
            "{name} differs at {differs:?}, {} and {} bytes",
            found[name].len(),
            bytes.len()
        );
    }
}

/// The bytes of each segment of an expert, read by the ranges that the source names.
pub(crate) fn read(source: &ExpertSource, record: &ExpertRecord<'_>, gap: u64) -> Vec<Vec<u8>> {
    let segments: Vec<_> = record.segments().collect();
    let mut bytes = vec![Vec::new(); segments.len()];
    for range in record.reads(gap) {
        let all = match &source.files()[range.file].place {
            FilePlace::Disk(path) => std::fs::read(path).unwrap(),
            FilePlace::Memory(bytes) => bytes.as_slice().to_vec(),
        };
        let of_range = &all[range.offset as usize..][..range.length as usize];
        if source.has_records() {
            record.check(of_range).unwrap();
        }
        for (segment, start) in range.segments {
            bytes[segment] = of_range[start as usize..][..segments[segment].length as usize].to_vec();
        }
    }
    bytes
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}
