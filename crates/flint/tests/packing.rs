//! `flint pack`, `unpack`, `verify` and `inspect`, as users run them, over the project's own checkpoint.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

#[path = "support/hub.rs"]
mod hub;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use hub::{COMMIT, Fault, LocalHub, REPOSITORY, Served};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny").canonicalize().unwrap()
}

fn flint(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flint"));
    command.args(arguments).current_dir(std::env::temp_dir()).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str]) -> Output {
    flint(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Standard output of a command that succeeds.
fn said(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout).to_owned()
}

/// Standard error of a command that fails with status 1.
fn refused(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", text(&output.stdout));
    text(&output.stderr).to_owned()
}

fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

/// SHA-256 of every file of a folder.
fn tree(folder: &Path) -> BTreeMap<String, String> {
    fn add(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() {
                add(&entry.path(), &format!("{name}/"), files);
            } else {
                files.insert(name, sum(&std::fs::read(entry.path()).unwrap()));
            }
        }
    }
    let mut files = BTreeMap::new();
    add(folder, "", &mut files);
    files
}

fn sum(bytes: &[u8]) -> String {
    format!("{:x}", HexSum(&Sha256::digest(bytes)))
}

/// Bytes as hexadecimal digits.
struct HexSum<'a>(&'a [u8]);

impl std::fmt::LowerHex for HexSum<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[test]
fn a_pack_says_verifies_answers_and_unpacks_as_its_source() {
    let place = tempfile::tempdir().unwrap();
    let (source, pack, back) = (tiny(), place.path().join("pack"), place.path().join("back"));
    let made = said(&["pack", path(&source), path(&pack), "--format", "affine"]);
    assert!(made.contains("192 records, every byte read back"), "{made}");

    let all = said(&["verify", path(&pack)]);
    assert!(all.contains("all equal") && all.contains("192 records"), "{all}");
    let quick = said(&["verify", path(&pack), "--quick", "3"]);
    assert!(quick.contains("3 records") && quick.contains("a sample"), "{quick}");

    let shown = said(&["inspect", path(&pack)]);
    for part in [
        "a streaming pack",
        "experts.bin",
        "mtp-experts.bin",
        "layers 3-7: affine 4-bit, group 64",
        "one aligned read",
    ] {
        assert!(shown.contains(part), "{part:?} is not in {shown}");
    }
    let plain = said(&["inspect", path(&source)]);
    assert!(plain.contains("9 reads") && plain.contains("flint pack"), "{plain}");
    let json: Value = serde_json::from_str(&said(&["inspect", path(&pack), "--json"])).unwrap();
    assert_eq!((&json["is_pack"], &json["experts"]), (&Value::Bool(true), &Value::from(32)));

    let answer = |model: &Path| {
        let fixed =
            ["generate", "What is 7 times 11?", "--temperature", "0", "--arithmetic", "fp32", "--model"];
        said(&[&fixed[..], &[path(model)]].concat())
    };
    assert_eq!(answer(&pack), answer(&source));

    said(&["unpack", path(&pack), path(&back)]);
    assert_eq!(tree(&back), tree(&source));
}

#[test]
fn a_pack_that_was_killed_at_any_time_goes_on_to_the_same_bytes() {
    let place = tempfile::tempdir().unwrap();
    let (source, whole, folder) = (tiny(), place.path().join("whole"), place.path().join("killed"));
    let start = Instant::now();
    said(&["pack", path(&source), path(&whole)]);
    let usual = start.elapsed();
    let mut kills = 0_u32;
    // Times spread over a whole run; a run is let go when it has been killed often enough.
    while !folder.exists() && kills < 30 {
        let mut child = flint(&["pack", path(&source), path(&folder)]).spawn().unwrap();
        let share = f64::from(kills.wrapping_mul(2_654_435_769) >> 8) / f64::from(1_u32 << 24);
        std::thread::sleep(usual.mul_f64(share));
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        kills += 1;
    }
    if !folder.exists() {
        said(&["pack", path(&source), path(&folder)]);
    }
    assert_eq!(tree(&folder), tree(&whole), "after {kills} kills");
    assert!(!place.path().join("killed.partial").exists());
}

#[test]
fn a_second_packer_of_one_folder_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let partial = place.path().join("pack.partial");
    std::fs::create_dir(&partial).unwrap();
    let lock = std::fs::File::create(partial.join(".flint-pack")).unwrap();
    lock.lock().unwrap();
    let error = refused(&["pack", path(&tiny()), path(&place.path().join("pack"))]);
    assert!(error.contains("another flint pack writes here"), "{error}");
}

#[test]
fn verification_fails_with_what_is_wrong_and_where() {
    let place = tempfile::tempdir().unwrap();
    let pack = place.path().join("pack");
    said(&["pack", path(&tiny()), path(&pack)]);
    let bank = pack.join("experts.bin");
    let mut bytes = std::fs::read(&bank).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 8;
    std::fs::write(&bank, bytes).unwrap();
    let output = run(&["verify", path(&pack)]);
    let found = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{found}");
    assert!(found.contains("experts.bin: record of layer ") && found.contains("at offset "), "{found}");
    assert!(found.contains("2 things wrong"), "{found}");
    let missing = refused(&["verify", path(&tiny())]);
    assert!(missing.contains("nothing to compare with"), "{missing}");
    std::fs::remove_file(&bank).unwrap();
    let missing = refused(&["inspect", path(&pack)]);
    assert!(missing.contains("BankMissing: experts.bin"), "{missing}");
}

/// The project's checkpoint as a hub has it.
fn served() -> Vec<Served> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(tiny()).unwrap() {
        let entry = entry.unwrap();
        let (name, bytes) = (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
        let large = name.ends_with(".safetensors") || name == "tokenizer.json";
        let sum = large.then(|| sum(&bytes));
        files.push((name, bytes, sum));
    }
    files
}

#[test]
fn a_repository_is_packed_through_a_bad_connection() {
    let place = tempfile::tempdir().unwrap();
    let (pack, back) = (place.path().join("pack"), place.path().join("back"));
    let server = LocalHub::start(served(), |number, name| match number % 5 {
        0 if name.ends_with("safetensors") => Fault::Cut(3_000_000),
        2 => Fault::Redirects,
        3 if number < 20 => Fault::Status(502),
        _ => Fault::None,
    });
    let source = format!("hf:{REPOSITORY}@{COMMIT}");
    said(&["pack", &source, path(&pack), "--hub", &server.address]);
    said(&["verify", path(&pack)]);
    let shown = said(&["inspect", path(&pack)]);
    assert!(shown.contains(&format!("{REPOSITORY}@{COMMIT}")), "{shown}");
    said(&["unpack", path(&pack), path(&back)]);
    assert_eq!(tree(&back), tree(&tiny()));
}

#[test]
fn a_flipped_bit_on_the_way_is_caught_and_fetched_again() {
    let place = tempfile::tempdir().unwrap();
    let pack = place.path().join("pack");
    let source = format!("hf:{REPOSITORY}@{COMMIT}");
    let bad = LocalHub::start(served(), |number, name| {
        // The first six requests are for config, index and headers.
        if number > 5 && name.starts_with("model-00002") { Fault::Flips } else { Fault::None }
    });
    let error = refused(&["pack", &source, path(&pack), "--hub", &bad.address]);
    assert!(
        error.contains("model-00002-of-00002.safetensors: the whole file at offset 0: SHA-256"),
        "{error}"
    );
    assert!(!pack.exists());
    let good = LocalHub::start(served(), |_, _| Fault::None);
    let output = run(&["pack", &source, path(&pack), "--hub", &good.address]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("1 shard had been copied by an earlier run"),
        "{}",
        text(&output.stderr)
    );
    said(&["verify", path(&pack)]);
}

#[test]
fn a_repository_without_a_commit_is_refused() {
    let error = refused(&["pack", "hf:owner/name@main", "/nowhere/pack"]);
    assert!(error.contains("\"main\" is no commit") && error.contains("hf:owner/name@COMMIT"), "{error}");
    let start = Instant::now();
    let error = refused(&["pack", &format!("hf:{REPOSITORY}@{COMMIT}"), "/nowhere/pack", "--hub", "ftp://x"]);
    assert!(error.contains("--hub") && start.elapsed() < Duration::from_secs(5), "{error}");
}
