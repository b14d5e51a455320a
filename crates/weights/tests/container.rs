//! Damaged and foreign files: each ends in an error that names the file and says what to do, never in a panic.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::path::Path;
use std::sync::LazyLock;

use flint_weights::safetensors::Header;
use flint_weights::{Checkpoint, Error, HostBytes, Source};
use proptest::prelude::*;
use serde_json::{Value, json};
use support::layout::Layout;
use support::{Model, Storage, Tensor, config, file, files, open, refusal, says, source};

static TENSORS: LazyLock<Vec<Tensor>> =
    LazyLock::new(|| Layout::Official.tensors(&Model::new(21, |_| Storage::Bf16)));
static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| file(&TENSORS));

fn config_file() -> (&'static str, Vec<u8>) {
    ("config.json", config().to_string().into_bytes())
}

/// A file with this header JSON and `data` bytes after it.
fn with_header(json: &str, data: usize) -> HostBytes {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    HostBytes::from_vec(bytes)
}

fn header_error(json: &str, data: usize) -> Error {
    Header::of_bytes("x.safetensors", &with_header(json, data)).unwrap_err()
}

/// A checkpoint in two shards with its index, after `edit` of index and files.
fn sharded(edit: impl FnOnce(&mut Value, &mut Vec<(&'static str, Vec<u8>)>)) -> Source {
    let (one, two) = TENSORS.split_at(TENSORS.len() / 2);
    let mut map = serde_json::Map::new();
    for (part, name) in [(one, "a.safetensors"), (two, "b.safetensors")] {
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    let mut index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    let mut shards = vec![("a.safetensors", file(one)), ("b.safetensors", file(two))];
    edit(&mut index, &mut shards);
    let mut all = vec![config_file(), ("model.safetensors.index.json", index.to_string().into_bytes())];
    all.extend(shards);
    files(&all)
}

#[test]
fn a_checkpoint_in_two_shards_is_the_same_as_in_one() {
    let (two, one) = (open(sharded(|_, _| {})), open(source(&config(), &TENSORS)));
    assert_eq!(two.vector("norm").unwrap(), one.vector("norm").unwrap());
    assert_eq!(two.tensors(), one.tensors());
}

#[test]
fn a_shard_of_another_length_than_its_header_says_is_refused_with_both_lengths() {
    let whole = FILE.clone();
    for (cut, why) in
        [(whole.len() - 1, "1 bytes are missing"), (whole.len() - 4000, "4000 bytes are missing")]
    {
        let error = refusal(files(&[config_file(), ("model.safetensors", whole[..cut].to_vec())]));
        let numbers = [format!("has {cut} bytes"), format!("asks for {}", whole.len())];
        says(&error, &["model.safetensors", &numbers[0], &numbers[1], why, "download this file again"]);
    }
    let long = [whole, vec![0; 16]].concat();
    says(&refusal(files(&[config_file(), ("model.safetensors", long)])), &["16 bytes too many"]);
}

#[test]
fn a_shard_that_ends_inside_its_header_is_refused() {
    let whole = FILE.clone();
    for cut in [0, 1, 7, 8, 9, 500] {
        let error = refusal(files(&[config_file(), ("model.safetensors", whole[..cut].to_vec())]));
        assert!(matches!(error, Error::FileSize { found, .. } if found == cut as u64), "{cut}: {error}");
    }
}

#[test]
fn the_same_damage_is_found_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let whole = FILE.clone();
    std::fs::write(folder.path().join("config.json"), config_file().1).unwrap();
    for cut in [0, 5, 100, whole.len() - 24, whole.len()] {
        std::fs::write(folder.path().join("model.safetensors"), &whole[..cut]).unwrap();
        let opened = Checkpoint::open(Source::Folder(folder.path().to_owned()));
        assert_eq!(opened.is_ok(), cut == whole.len(), "{cut}");
        if let Err(error) = opened {
            says(&error, &["model.safetensors", &format!("has {cut} bytes")]);
        }
    }
}

#[test]
fn a_git_lfs_pointer_is_recognised_in_place_of_any_file() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5309\n".to_vec();
    let lfs = |source: Source, name: &str| {
        says(&refusal(source), &[name, "Git LFS pointer", "git lfs pull"]);
    };
    lfs(files(&[config_file(), ("model.safetensors", pointer.clone())]), "model.safetensors");
    lfs(files(&[("config.json", pointer.clone())]), "config.json");
    lfs(sharded(|_, shards| shards[1].1 = pointer.clone()), "b.safetensors");

    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config_file().1).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), pointer).unwrap();
    lfs(Source::Folder(folder.path().to_owned()), "model.safetensors");
}

#[test]
fn a_header_over_the_bound_is_refused_without_reading_it() {
    let bytes = [&u64::MAX.to_le_bytes()[..], &[b'{'; 100]].concat();
    let error = Header::of_bytes("x.safetensors", &HostBytes::from_vec(bytes)).unwrap_err();
    says(&error, &["x.safetensors", "18446744073709551615", "the bound is 100000000"]);
}

#[test]
fn headers_of_every_length_are_read_whole() {
    // Lengths around a power of ten, where others cut: the padding is in the metadata.
    for length in [99_993, 99_994, 99_999, 100_000, 100_001] {
        let entry = r#""t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}"#;
        let pad = length - entry.len() - r#"{"__metadata__":{"p":""},}"#.len();
        let json = format!(r#"{{"__metadata__":{{"p":"{}"}},{entry}}}"#, "x".repeat(pad));
        assert_eq!(json.len(), length);
        let header = Header::of_bytes("x", &with_header(&json, 3)).unwrap();
        assert_eq!((header.tensors.len(), header.tensors[0].start), (1, 8 + length as u64));
    }
}

#[test]
fn impossible_entries_are_refused_by_tensor() {
    let entry = |dtype: &str, shape: &str, a: u64, b: u64| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{a},{b}]}}}}"#)
    };
    for (json, what) in [
        (entry("F32", "[2]", 8, 0), "start at 8 and end at 0"),
        (entry("F32", "[2]", 0, 7), "span 7 bytes, but shape [2] of F32 asks for 8"),
        (entry("BF16", "[4294967296,4294967296,2]", 0, 8), "more than 2^64"),
        (entry("U8", "[8]", u64::MAX - 8, u64::MAX), "beyond every file"),
    ] {
        says(&header_error(&json, 8), &["x.safetensors", "tensor w", what, "download it again"]);
    }
    says(&header_error(&entry("U8", "[9]", 0, 9), 8), &["has", "asks for"]);
}

#[test]
fn malformed_headers_are_refused_with_the_place() {
    for (json, what) in [
        ("", "EOF"),
        ("[]", "expected an object"),
        (r#"{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#, "w: unknown variant `F4`"),
        (r#"{"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, "w: invalid value"),
        (r#"{"w":{"dtype":"U8","shape":[1]}}"#, "w: missing field `data_offsets`"),
        (r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1}}"#, "unknown field `more`"),
        (r#"{"__metadata__":{"a":1}}"#, "invalid type"),
        ("{}x", "trailing characters"),
    ] {
        let error = header_error(json, 0);
        assert!(matches!(error, Error::Malformed { .. }), "{json}: {error}");
        says(&error, &["x.safetensors", what]);
    }
}

#[test]
fn a_header_may_end_in_spaces_and_leave_gaps() {
    let json = r#"{"b":{"dtype":"U8","shape":[2],"data_offsets":[6,8]},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}   "#;
    let header = Header::of_bytes("x", &with_header(json, 8)).unwrap();
    assert_eq!(header.tensors.iter().map(|tensor| tensor.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn overlapping_and_repeated_tensors_are_refused() {
    let two = |a: &str, b: &str| {
        format!(
            r#"{{"{a}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}},"{b}":{{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}}}"#
        )
    };
    says(&header_error(&two("one", "two"), 7), &["tensor two", "overlaps"]);
    let twice = two("one", "one").replace("[3,7]", "[4,8]");
    says(&header_error(&twice, 8), &["tensor one", "occurs twice"]);
}

#[test]
fn an_index_that_names_absent_files_lists_them() {
    let error = refusal(sharded(|_, shards| drop(shards.remove(1))));
    says(&error, &["model.safetensors.index.json names 1 file that is not there: b.safetensors", "download"]);
}

#[test]
fn an_index_cannot_lead_out_of_the_folder() {
    for name in ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b", "", ".."] {
        let error = refusal(sharded(|index, _| index["weight_map"]["lm_head.weight"] = json!(name)));
        says(&error, &["model.safetensors.index.json", &format!("{name:?}"), "no plain file name"]);
    }
}

#[test]
fn an_index_and_its_shards_must_agree_on_every_tensor() {
    let error = refusal(sharded(|index, _| index["weight_map"]["extra.weight"] = json!("a.safetensors")));
    says(&error, &["extra.weight should be in a.safetensors, which does not have it"]);
    let error = refusal(sharded(|index, _| index["weight_map"]["lm_head.weight"] = json!("a.safetensors")));
    says(&error, &["lm_head.weight should be in a.safetensors, but is in b.safetensors"]);
    let remove = |index: &mut Value| index["weight_map"].as_object_mut().unwrap().remove("lm_head.weight");
    let error = refusal(sharded(|index, _| drop(remove(index))));
    says(&error, &["b.safetensors holds lm_head.weight, which the index does not name"]);
    let error = refusal(sharded(|_, shards| shards[1].1 = shards[0].1.clone()));
    says(&error, &["is in a.safetensors and in b.safetensors"]);
}

#[test]
fn a_malformed_index_is_refused() {
    let with =
        |index: &str| files(&[config_file(), ("model.safetensors.index.json", index.as_bytes().to_vec())]);
    for (index, what) in [
        ("{", "EOF"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":{"a":1}}"#, "invalid type"),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "a occurs twice"),
    ] {
        says(&refusal(with(index)), &["model.safetensors.index.json", what]);
    }
}

#[test]
fn a_folder_without_a_checkpoint_says_what_is_there_instead() {
    let bytes = || vec![0; 10];
    says(&refusal(files(&[])), &["there is no config.json", "give the folder"]);
    says(&refusal(files(&[("m.gguf", bytes())])), &["m.gguf", "GGUF", "safetensors version"]);
    says(&refusal(files(&[config_file(), ("Model-Q4_K.GGUF", bytes())])), &["Model-Q4_K.GGUF", "GGUF"]);
    says(
        &refusal(files(&[config_file(), ("pytorch_model.bin", bytes())])),
        &["pytorch_model.bin", "pickled"],
    );
    says(&refusal(files(&[config_file()])), &["neither model.safetensors.index.json nor model.safetensors"]);
    let single = refusal(files(&[config_file(), ("model-00001-of-00002.safetensors", bytes())]));
    says(&single, &["there is model-00001-of-00002.safetensors, but neither"]);
    says(
        &refusal(files(&[config_file(), ("experts.bin", bytes())])),
        &["BankMissing: config.json", "experts.bin is there"],
    );
    let mut streaming = config();
    streaming["expert_streaming"] = json!({});
    let streaming = ("config.json", streaming.to_string().into_bytes());
    says(&refusal(files(&[streaming])), &["streaming pack", "without its bank"]);
}

#[test]
fn a_file_in_place_of_the_folder_is_refused_by_kind() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, b"x").unwrap();
        refusal(Source::Folder(path))
    };
    says(&refuse("model.gguf"), &["model.gguf", "the GGUF format"]);
    says(&refuse("model.safetensors"), &["a checkpoint is a folder"]);
    let error = refusal(Source::Folder(Path::new("no/such/folder").to_owned()));
    says(&error, &["no/such/folder"]);
}

#[test]
fn a_malformed_config_is_refused() {
    for (text, what) in [("", "EOF"), ("[1]", "no object"), ("{\"model_type\": \"glm5_next\",", "EOF")] {
        says(&refusal(files(&[("config.json", text.as_bytes().to_vec())])), &["config.json", what]);
    }
    let deep = "[".repeat(100_000);
    says(&refusal(files(&[("config.json", deep.into_bytes())])), &["config.json", "recursion limit"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_truncated_shard_is_always_refused_by_its_lengths(part in 0.0..1.0_f64) {
        let whole = FILE.clone();
        let cut = (whole.len() as f64 * part) as usize;
        let header = Header::of_bytes("s", &HostBytes::from_vec(whole[..cut].to_vec()));
        prop_assert!(matches!(header, Err(Error::FileSize { .. })), "{header:?}");
    }

    #[test]
    fn a_flipped_byte_of_a_header_is_refused_or_changes_nothing(at in 0.0..1.0_f64, mask in 1..=255_u8) {
        let mut bytes = FILE.clone();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let at = ((8 + header) as f64 * at) as usize;
        bytes[at] ^= mask;
        let opened = Checkpoint::open(files(&[config_file(), ("model.safetensors", bytes)]));
        match opened {
            // A flip inside "__metadata__", or of whitespace, changes nothing that is used.
            Ok(checkpoint) => {
                prop_assert_eq!(checkpoint.tensors(), TENSORS.len());
                prop_assert_eq!(checkpoint.vector("norm").unwrap(), open(source(&config(), &TENSORS)).vector("norm").unwrap());
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic_the_header_reader(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Header::of_bytes("s", &HostBytes::from_vec(bytes));
    }
}
