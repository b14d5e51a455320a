//! A model that is larger than the memory that Flint may use runs in that memory, and says the same.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Map, Value, json};

/// Inner width of the grown experts: 1.8 GB of them.
const INNER: u64 = 16_384;
/// Inner width that flint-tiny has.
const SMALL: u64 = 128;
/// Bytes that the process may allocate, by the system's own limit.
const LIMIT: u64 = 1100 << 20;

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny")
}

/// flint-tiny with experts that are wide and all zeros: their files are holes, which take no room on disk.
fn grown() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), folder.path().join(entry.unwrap().file_name()));
        match from.extension().and_then(|end| end.to_str()) {
            Some("safetensors") => grow(&from, &to),
            _ if from.file_name().unwrap() == "config.json" => {
                let text = std::fs::read_to_string(&from).unwrap();
                let grown = text.replace(
                    &format!("\"moe_intermediate_size\": {SMALL}"),
                    &format!("\"moe_intermediate_size\": {INNER}"),
                );
                assert_ne!(grown, text, "the config names the experts' width");
                std::fs::write(to, grown).unwrap();
            }
            _ if from.is_file() => drop(std::fs::copy(from, to).unwrap()),
            _ => {}
        }
    }
    folder
}

/// Copies a shard; experts' tensors get the new width and hold nothing.
fn grow(from: &Path, to: &Path) {
    let mut file = File::open(from).unwrap();
    let mut length = [0; 8];
    file.read_exact(&mut length).unwrap();
    let mut header = vec![0; u64::from_le_bytes(length) as usize];
    file.read_exact(&mut header).unwrap();
    let data = 8 + header.len() as u64;
    let header: Map<String, Value> = serde_json::from_slice(&header).unwrap();
    let (mut grown, mut copies, mut end) = (Map::new(), Vec::new(), 0_u64);
    for (name, tensor) in &header {
        if name == "__metadata__" {
            continue;
        }
        let offsets: Vec<u64> =
            tensor["data_offsets"].as_array().unwrap().iter().map(|o| o.as_u64().unwrap()).collect();
        let (mut shape, mut bytes) = (tensor["shape"].clone(), offsets[1] - offsets[0]);
        if name.contains("switch_mlp.") || name.contains("shared_experts.") {
            widen(shape.as_array_mut().unwrap(), name.contains("down_proj"));
            bytes *= INNER / SMALL;
        } else {
            copies.push((data + offsets[0], end, bytes));
        }
        grown.insert(
            name.clone(),
            json!({"dtype": tensor["dtype"], "shape": shape, "data_offsets": [end, end + bytes]}),
        );
        end += bytes;
    }
    let header = serde_json::to_vec(&grown).unwrap();
    let mut out = File::create(to).unwrap();
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(&header).unwrap();
    let start = 8 + header.len() as u64;
    out.set_len(start + end).unwrap();
    for (from, to, bytes) in copies {
        let mut values = vec![0; bytes as usize];
        file.seek(SeekFrom::Start(from)).unwrap();
        file.read_exact(&mut values).unwrap();
        out.seek(SeekFrom::Start(start + to)).unwrap();
        out.write_all(&values).unwrap();
    }
}

/// Rows of gate and up grow, inputs of down.
fn widen(shape: &mut [Value], down: bool) {
    let at = shape.len() - if down { 1 } else { 2 };
    shape[at] = json!(shape[at].as_u64().unwrap() * INNER / SMALL);
}

/// Runs the program where it cannot allocate more than [`LIMIT`].
fn limited(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_flint");
    let quoted: Vec<String> = arguments.iter().map(|argument| format!("'{argument}'")).collect();
    let line = format!("ulimit -d {}; exec '{program}' {}", LIMIT >> 10, quoted.join(" "));
    Command::new("sh").args(["-c", &line]).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_model_larger_than_its_memory_runs_inside_it() {
    let folder = grown();
    let dir = folder.path().to_str().unwrap();
    let common = [
        "generate",
        "--raw",
        "Once upon a time, in a land",
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        "--device",
        "cpu",
    ];
    let with = |more: &[&str]| limited(&[&common[..], &["--context", "256", "--model", dir], more].concat());
    let auto = with(&["--memory", "900M"]);
    assert!(auto.status.success(), "{}", text(&auto.stderr));
    for slots in ["1", "5"] {
        let some = with(&["--slots", slots]);
        assert!(some.status.success(), "{slots} slots: {}", text(&some.stderr));
        assert_eq!(text(&some.stdout), text(&auto.stdout), "{slots} slots");
    }
    // A profile fills slots at load and changes no word; one that is no profile is left aside with a line.
    let profile = folder.path().join("expert-usage-decode-v1.json");
    let layers: Vec<Value> =
        (3..8).map(|layer| json!({"layer": layer, "counts": (0..32).collect::<Vec<_>>()})).collect();
    let usage = json!({"format": "flint-expert-usage-v1", "phase": "decode", "tokens": 9, "n_experts": 32, "layers": layers});
    for (text_of, aside) in [(usage.to_string(), false), ("{}".to_owned(), true)] {
        std::fs::write(&profile, text_of).unwrap();
        let known = with(&["--slots", "5"]);
        assert_eq!(text(&known.stdout), text(&auto.stdout), "{}", text(&known.stderr));
        assert_eq!(text(&known.stderr).contains("is left aside"), aside, "{}", text(&known.stderr));
    }
    let refused = with(&["--memory", "900M", "--slots", "all"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("900.0 MiB"), "{}", text(&refused.stderr));
    let plan = limited(&["plan", dir, "--memory", "900M", "--context", "256", "--device", "cpu"]);
    assert!(
        text(&plan.stdout).contains("of 32 experts of each layer are in memory"),
        "{}",
        text(&plan.stdout)
    );
}
