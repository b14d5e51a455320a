//! Makes packs of checkpoints that are too large for the repository and takes them apart: `packs FOLDER...`.
//!
//! For each: pack, verify, every segment of every expert against the source's, unpack, every file against the source's.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // a command for developers

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use flint_weights::pack::{
    ExpertRecord, ExpertSource, FilePlace, Folder, PackOptions, PackPlan, Scope, pack, unpack, verify,
};
use flint_weights::{Checkpoint, Source};

fn main() {
    let folders: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if folders.is_empty() {
        eprintln!("usage: packs FOLDER...");
        std::process::exit(2);
    }
    for folder in folders {
        check(&folder);
    }
}

fn check(source: &Path) {
    let place = tempfile::tempdir().unwrap();
    let (packed, back) = (place.path().join("pack"), place.path().join("back"));
    let origin = Folder::new(source);
    let plan = PackPlan::new(&origin, &PackOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    pack(&plan, &origin, &packed, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"));
    let verified = verify(&packed, Scope::All, &mut |_, _| {}).unwrap();
    assert!(verified.findings.is_empty(), "{verified:?}");
    let (one, two) = (ExpertSource::open(source).unwrap(), ExpertSource::open(&packed).unwrap());
    let mut ranges = 0;
    for layer in one.layers() {
        for expert in 0..layer.experts() {
            let records = [&one, &two].map(|of| (of, of.record(layer.layer(), expert).unwrap()));
            let [plain, packed] = records.map(|(of, record)| segments(of, &record));
            assert!(plain == packed, "layer {}, expert {expert}", layer.layer());
            ranges = ranges.max(one.record(layer.layer(), expert).unwrap().reads(64).len());
        }
    }
    same_stacks(source, &packed);
    unpack(&packed, &back, &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"));
    let (back, mut expected) = (tree(&back), tree(source));
    // Tensors that the index does not name are not the checkpoint's.
    expected
        .retain(|name, _| back.contains_key(name) || !name.ends_with(".safetensors") || name.contains('/'));
    assert!(back == expected, "unpacking gives other files");
    println!(
        "{}: {} records of {}, {ranges} reads an expert before, unpacked byte for byte",
        source.display(),
        plan.records(),
        plan.mode().name()
    );
}

/// The experts' numbers, as a backend gets them from the source and from the pack.
fn same_stacks(source: &Path, packed: &Path) {
    let open = |folder: &Path| Checkpoint::open(Source::Folder(folder.to_owned()));
    let one = match open(source) {
        Ok(one) => one,
        Err(error) => return println!("{}: compared by bytes only: {error}", source.display()),
    };
    let two = open(packed).unwrap_or_else(|error| panic!("{error}"));
    let layers = ExpertSource::open(source).unwrap();
    for layer in layers.layers() {
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            let name = format!("layers.{}.mlp.experts.{projection}", layer.layer());
            let (one, two) = (one.stack(&name).unwrap(), two.stack(&name).unwrap());
            assert_eq!(one.len(), two.len(), "{name}");
            for (one, two) in one.iter().zip(&two) {
                assert_eq!(
                    one.decode_row_f64(one.rows - 1),
                    two.decode_row_f64(two.rows - 1),
                    "{}",
                    one.name
                );
            }
        }
    }
}

/// Types, shapes and bytes of an expert's arrays.
fn segments(source: &ExpertSource, record: &ExpertRecord<'_>) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let segments = record.segments().map(|segment| {
        let FilePlace::Disk(path) = &source.files()[segment.file].place else { panic!("a folder") };
        let mut bytes = vec![0; segment.length as usize];
        std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, segment.offset).unwrap();
        (format!("{} {:?}", segment.component, segment.dtype), segment.shape.to_vec(), bytes)
    });
    segments.collect()
}

fn tree(folder: &Path) -> BTreeMap<String, Vec<u8>> {
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
