//! Packs that Flint makes: the source's bytes, whole or not there, the same whatever interrupted the work.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use flint_weights::pack::{
    ExpertLayer, ExpertSource, Folder, Numbering, Origin, OriginFile, Pack, PackOptions, PackPlan, Scope,
    inspect, pack, unpack, verify,
};
use flint_weights::{Checkpoint, Error, HostBytes, ModelConfig, Result, Source};
use support::layout::Layout;
use support::packs::{Plain, assert_same_tree, hex, make, read, tree};
use support::{EXPERTS, LAYERS, Random, Storage, open, says};

fn affine(name: &str) -> Storage {
    match name {
        _ if !name.contains(".experts.") => Storage::Bf16,
        _ if name.contains("down_proj") => Storage::Affine(6, 64),
        _ => Storage::Affine(4, 64),
    }
}

fn fp8(name: &str) -> Storage {
    if name.contains(".experts.") { Storage::Fp8 } else { Storage::Bf16 }
}

fn widths(layer: usize, projection: &str) -> usize {
    match (layer, projection) {
        (1, _) => 6,
        (2, "down_proj") => 5,
        (2, _) => 4,
        _ => 8,
    }
}

/// Every way in which experts are stored, with shards.
fn sources() -> Vec<(&'static str, Plain, usize)> {
    // One width for all, since the config's table names no module.
    let one_width =
        |name: &str| if name.contains(".experts.") { Storage::Affine(4, 64) } else { Storage::Bf16 };
    vec![
        ("exl3", Plain::exl3(widths), 3),
        ("affine", Plain::new(Layout::Official, affine), 4),
        ("affine stacks", Plain::new(Layout::Mlx, one_width), 1),
        ("affine, bare names", Plain::new(Layout::Bare, one_width), 2),
        ("fp8", Plain::new(Layout::Official, fp8), 3),
        ("bf16, gate and up fused", Plain::new(Layout::Transformers, |_| Storage::Bf16), 2),
    ]
}

/// A checkpoint and its pack, in a folder that goes away.
fn packed(plain: &Plain, shards: usize) -> tempfile::TempDir {
    let place = tempfile::tempdir().unwrap();
    plain.write(&place.path().join("source"), shards);
    make(&place.path().join("source"), &place.path().join("pack"));
    place
}

#[test]
fn every_expert_of_a_pack_has_the_bytes_of_its_source() {
    for (name, plain, shards) in sources() {
        let place = packed(&plain, shards);
        let source = ExpertSource::open(&place.path().join("source")).unwrap();
        let pack = ExpertSource::open(&place.path().join("pack")).unwrap();
        assert!(pack.has_records() && !source.has_records());
        let layers: Vec<usize> = pack.layers().iter().map(ExpertLayer::layer).collect();
        assert_eq!(layers, [1, 2, 3, 4], "{name}");
        for layer in layers {
            for expert in 0..EXPERTS {
                let (one, two) = (source.record(layer, expert).unwrap(), pack.record(layer, expert).unwrap());
                let forms = |record: &flint_weights::pack::ExpertRecord<'_>| {
                    record.segments().map(|s| (s.component, s.dtype, s.shape.to_vec())).collect::<Vec<_>>()
                };
                assert_eq!(forms(&one), forms(&two), "{name}");
                let bytes = read(&source, &one, 0);
                assert_eq!(bytes, read(&source, &one, 64), "{name}: with gaps read along");
                assert_eq!(bytes, read(&pack, &two, 0), "{name}, layer {layer}, expert {expert}");
                assert_eq!(two.reads(0).len(), 1);
                assert!(two.reads(0)[0].offset.is_multiple_of(4096));
            }
        }
        assert!(pack.record(0, 0).is_none() && pack.record(1, EXPERTS).is_none());
    }
}

#[test]
fn segments_are_the_stored_tensors_themselves() {
    let plain = Plain::exl3(widths);
    let place = packed(&plain, 3);
    let pack = ExpertSource::open(&place.path().join("pack")).unwrap();
    let record = pack.record(2, 1).unwrap();
    for (segment, bytes) in record.segments().zip(read(&pack, &record, 0)) {
        let end = format!(
            "layers.2.mlp.experts.1.{}.{}",
            segment.component.projection.name(),
            segment.component.part.tensor()
        );
        let tensor = plain.tensors.iter().find(|tensor| tensor.name.ends_with(&end)).unwrap();
        assert!(tensor.bytes == bytes && tensor.shape == segment.shape, "{end}");
    }
}

#[test]
fn a_pack_opens_as_the_checkpoint_that_it_was_made_of() {
    for (name, plain, shards) in sources() {
        if name == "exl3" {
            continue; // Its matrices belong to the encoding's own tests.
        }
        let place = packed(&plain, shards);
        let folder = |name: &str| Source::Folder(place.path().join(name));
        if name == "affine" {
            continue; // Two widths, which this config's table does not name.
        }
        let (source, pack) = (open(folder("source")), open(folder("pack")));
        let same = |one: &Checkpoint, two: &Checkpoint, module: &str| {
            let bytes = |checkpoint: &Checkpoint| {
                let stack = checkpoint.stack(module).unwrap();
                stack.iter().map(|m| (m.name.clone(), m.decode_row_f64(m.rows - 1))).collect::<Vec<_>>()
            };
            assert_eq!(bytes(one), bytes(two), "{name}: {module}");
        };
        for layer in 1..=LAYERS {
            for projection in ["gate_proj", "up_proj", "down_proj"] {
                same(&source, &pack, &format!("layers.{layer}.mlp.experts.{projection}"));
            }
        }
        assert_eq!(source.vector("norm").unwrap(), pack.vector("norm").unwrap());
        assert_ne!(source.manifest_digest(), pack.manifest_digest());
        assert!(ExpertSource::of_checkpoint(&pack).unwrap().has_records());
    }
}

#[test]
fn unpacking_gives_the_source_back_byte_for_byte() {
    for (name, plain, shards) in sources() {
        let place = packed(&plain, shards);
        let back = place.path().join("back");
        unpack(&place.path().join("pack"), &back, &mut |_, _| {})
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut source = tree(&place.path().join("source"));
        source.remove(".hidden");
        assert_same_tree(&tree(&back), &source);
    }
}

#[test]
fn unpacking_names_the_tensor_that_was_damaged() {
    let place = packed(&Plain::exl3(widths), 2);
    let bank = place.path().join("pack/experts.bin");
    let source = ExpertSource::open(&place.path().join("pack")).unwrap();
    let start = source.record(1, 1).unwrap().whole().unwrap().offset;
    let mut bytes = std::fs::read(&bank).unwrap();
    bytes[start as usize + 7000] ^= 1;
    std::fs::write(&bank, bytes).unwrap();
    let error = unpack(&place.path().join("pack"), &place.path().join("back"), &mut |_, _| {}).unwrap_err();
    says(&error, &["model-0000", "tensor model.language_model.layers.1.mlp.experts.1", "SHA-256"]);
    assert!(!place.path().join("back").exists());
}

#[test]
fn a_pack_passes_its_own_verification_and_tells_what_it_is() {
    for (name, plain, shards) in sources() {
        let place = packed(&plain, shards);
        let folder = place.path().join("pack");
        for scope in [Scope::All, Scope::Quick { records: 5, seed: 1 }] {
            let mut last = (0, 0);
            let verified = verify(&folder, scope, &mut |done, all| last = (done, all)).unwrap();
            assert_eq!(verified.findings, [], "{name}");
            assert_eq!(verified.unlisted, [""; 0], "{name}");
            assert_eq!(verified.records, if scope == Scope::All { 4 * EXPERTS } else { 5 });
            assert_eq!(last.0, last.1, "{name}");
        }
        let summary = inspect(&folder).unwrap();
        assert!(summary.is_pack && summary.banks.len() == 2 && summary.notes.is_empty(), "{summary:?}");
        assert!(summary.banks[0].layers.iter().all(|layer| layer.reads == 1));
        let plain = inspect(&place.path().join("source")).unwrap();
        assert_eq!(plain.expert_bytes, summary.expert_bytes, "{name}");
        assert_eq!(plain.trunk_bytes, summary.trunk_bytes + markers(name), "{name}");
    }
}

/// Bytes of the codebook's markers, which a pack's trunk does not have.
fn markers(name: &str) -> u64 {
    if name == "exl3" { 4 * EXPERTS as u64 * 3 * 4 } else { 0 }
}

/// A source that fails after so many bytes.
struct Failing {
    folder: Folder,
    left: AtomicU64,
}

struct FailingReader<'a> {
    inner: Box<dyn Read + Send + 'a>,
    left: &'a AtomicU64,
}

impl Read for FailingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(std::io::Error::other("the cable was pulled"));
        }
        let most = buffer.len().min(left as usize).min(10_000);
        let read = self.inner.read(&mut buffer[..most])?;
        self.left.store(left - read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Origin for Failing {
    fn label(&self) -> String {
        "a bad disk".to_owned()
    }

    fn repository(&self) -> Option<(String, String)> {
        None
    }

    fn files(&self) -> Result<Vec<OriginFile>> {
        self.folder.files()
    }

    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>> {
        let inner = self.folder.open(file, offset, length)?;
        Ok(Box::new(FailingReader { inner, left: &self.left }))
    }
}

/// One run that may fail after so many bytes.
fn run(source: &Path, folder: &Path, bytes: u64) -> Result<()> {
    let origin = Failing { folder: Folder::new(source), left: AtomicU64::new(u64::MAX) };
    let plan = PackPlan::new(&origin, &PackOptions::default())?;
    origin.left.store(bytes, Ordering::Relaxed);
    pack(&plan, &origin, folder, &mut |_| {}).map(|_| ())
}

#[test]
fn a_pack_that_was_interrupted_anywhere_is_the_same_pack() {
    for (name, plain, shards) in sources() {
        let place = packed(&plain, shards);
        let expected = tree(&place.path().join("pack"));
        let (source, folder) = (place.path().join("source"), place.path().join("again"));
        let all: u64 = tree(&source).values().map(|bytes| bytes.len() as u64).sum();
        let mut random = Random::new(name);
        let mut failures = 0;
        for _ in 0..200 {
            match run(&source, &folder, random.next() % (all / 2)) {
                Ok(()) => break,
                Err(error) => says(&error, &["a bad disk", "the cable was pulled"]),
            }
            failures += 1;
            assert!(!folder.exists(), "a pack that is not whole has no name");
        }
        assert!(failures > 0, "{name}");
        if !folder.exists() {
            run(&source, &folder, u64::MAX).unwrap();
        }
        assert_same_tree(&tree(&folder), &expected);
    }
}

#[test]
fn bytes_that_a_disk_gives_back_otherwise_are_found_and_copied_anew() {
    let place = packed(&Plain::exl3(widths), 3);
    let (source, folder) = (place.path().join("source"), place.path().join("again"));
    // Fails among the small files, when everything large is there and checked.
    let weights: u64 = (1..=3)
        .map(|shard| source.join(format!("model-0000{shard}-of-00003.safetensors")).metadata().unwrap().len())
        .sum();
    run(&source, &folder, weights).unwrap_err();
    let partial = place.path().join("again.partial");
    for (file, at, parts) in [
        ("experts.bin", 10_000, vec!["experts.bin: record of layer 1, expert ", "_proj.", "SHA-256"]),
        (
            "model-00002-of-00003-nonexpert.safetensors",
            9,
            vec!["nonexpert.safetensors: the header at offset 0"],
        ),
        ("model-00003-of-00003-nonexpert.safetensors", 70_000, vec!["nonexpert.safetensors: tensor model."]),
    ] {
        let mut bytes = std::fs::read(partial.join(file)).unwrap();
        bytes[at] ^= 0x10;
        std::fs::write(partial.join(file), bytes).unwrap();
        says(&run(&source, &folder, u64::MAX).unwrap_err(), &parts);
        assert!(!folder.exists());
    }
    run(&source, &folder, u64::MAX).unwrap();
    assert_same_tree(&tree(&folder), &tree(&place.path().join("pack")));
}

#[test]
fn a_source_that_changed_since_it_was_copied_is_copied_anew() {
    let place = tempfile::tempdir().unwrap();
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    let mut plain = Plain::exl3(widths);
    plain.write(&source, 2);
    let first = source.join("model-00001-of-00002.safetensors");
    run(&source, &folder, first.metadata().unwrap().len()).unwrap_err();
    // The same header, other numbers, another time.
    for tensor in plain.tensors.iter_mut().filter(|tensor| !tensor.name.ends_with("mul1")) {
        tensor.bytes[0] ^= 1;
    }
    plain.write(&source, 2);
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    std::fs::File::options().write(true).open(&first).unwrap().set_modified(later).unwrap();
    run(&source, &folder, u64::MAX).unwrap();
    make(&source, &place.path().join("fresh"));
    assert_same_tree(&tree(&folder), &tree(&place.path().join("fresh")));
}

#[test]
fn what_cannot_be_packed_is_refused_before_a_byte_is_written() {
    let place = packed(&Plain::exl3(widths), 2);
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    let plan = |source: &Path, options: &PackOptions| PackPlan::new(&Folder::new(source), options);
    says(&run(&source, &folder, 0).unwrap_err(), &["pack: there is something already", "does not exist"]);
    says(&plan(&folder, &PackOptions::default()).unwrap_err(), &["streaming pack already"]);
    let options = PackOptions { format: Some("affine".into()), ..PackOptions::default() };
    says(&plan(&source, &options).unwrap_err(), &["--format affine", "exl3 K=3", "converts nothing"]);
    let empty = place.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    says(&plan(&empty, &PackOptions::default()).unwrap_err(), &["no config.json"]);
    // An empty folder is a place for a pack.
    run(&source, &empty, u64::MAX).unwrap();
    let other = place.path().join("other");
    Plain::new(Layout::Official, fp8).write(&other, 2);
    run(&source, &place.path().join("third"), 1000).unwrap_err();
    let error = run(&other, &place.path().join("third"), u64::MAX).unwrap_err();
    says(&error, &["third.partial", "an unfinished pack of another source", "remove that folder"]);
}

#[test]
fn experts_that_do_not_fit_together_are_refused_by_name() {
    let refusal = |change: &dyn Fn(&mut Plain)| {
        let place = tempfile::tempdir().unwrap();
        let mut plain = Plain::exl3(widths);
        change(&mut plain);
        plain.write(place.path(), 1);
        PackPlan::new(&Folder::new(place.path()), &PackOptions::default()).unwrap_err()
    };
    let find = |plain: &Plain, end: &str| plain.tensors.iter().position(|t| t.name.ends_with(end)).unwrap();
    let error = refusal(&|plain| {
        let at = find(plain, "layers.2.mlp.experts.1.up_proj.svh");
        plain.tensors.remove(at);
    });
    says(&error, &["layers.2.mlp.experts.1", "other arrays than expert 0"]);
    let error = refusal(&|plain| {
        let at = find(plain, "layers.2.mlp.experts.2.up_proj.trellis");
        let shape = plain.tensors[at].shape.clone();
        plain.tensors[at].bytes.resize(shape[0] * shape[1] * 48 * 2, 0);
        plain.tensors[at].shape[2] = 48;
    });
    says(&error, &["layers.2.mlp.experts.2", "up_proj.trellis", "must be stored alike"]);
    let error = refusal(&|plain| {
        let at = find(plain, "layers.3.mlp.experts.0.up_proj.mul1");
        plain.tensors[at].name = plain.tensors[at].name.replace("mul1", "mcg");
    });
    says(&error, &["layers.3.mlp.experts.0", "different codebooks"]);
    let error = refusal(&|plain| {
        let at = find(plain, "layers.3.mlp.experts.0.up_proj.suh");
        plain.tensors[at].name = plain.tensors[at].name.replace("suh", "su");
    });
    says(&error, &["up_proj.su", "not read by this build"]);
    let error = refusal(&|plain| {
        let expert = |tensor: &support::Tensor| tensor.name.contains("layers.3.mlp.experts.");
        plain.tensors.retain(|tensor| !expert(tensor));
    });
    says(&error, &["layers.3.mlp.experts.0", "no tensor of it"]);
}

#[test]
fn a_marker_of_another_value_ends_the_copy() {
    let place = tempfile::tempdir().unwrap();
    let mut plain = Plain::exl3(widths);
    let at = plain.tensors.iter().position(|t| t.name.ends_with("experts.2.up_proj.mul1")).unwrap();
    plain.tensors[at].bytes[3] ^= 1;
    plain.write(&place.path().join("source"), 1);
    let error = run(&place.path().join("source"), &place.path().join("pack"), u64::MAX).unwrap_err();
    says(&error, &["model.safetensors", "experts.2.up_proj.mul1", "0x83dcd12d"]);
}

/// A source that knows its files' sums.
struct Sums(Folder, [u8; 32]);

impl Origin for Sums {
    fn label(&self) -> String {
        "hf:owner/name".to_owned()
    }

    fn repository(&self) -> Option<(String, String)> {
        Some(("owner/name".to_owned(), "0".repeat(40)))
    }

    fn files(&self) -> Result<Vec<OriginFile>> {
        let mut files = self.0.files()?;
        files.iter_mut().filter(|f| f.name.ends_with("safetensors")).for_each(|f| f.sha256 = Some(self.1));
        Ok(files)
    }

    fn open(&self, file: &OriginFile, offset: u64, length: u64) -> Result<Box<dyn Read + Send + '_>> {
        self.0.open(file, offset, length)
    }
}

#[test]
fn a_shard_with_another_sum_than_its_repository_says_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    Plain::exl3(widths).write(&source, 1);
    let pack_of = |sum: [u8; 32]| {
        let origin = Sums(Folder::new(&source), sum);
        let plan = PackPlan::new(&origin, &PackOptions::default()).unwrap();
        pack(&plan, &origin, &folder, &mut |_| {})
    };
    let error = pack_of([7; 32]).unwrap_err();
    says(&error, &["hf:owner/name/model.safetensors: the whole file", &"07".repeat(32)]);
    std::fs::remove_dir_all(place.path().join("pack.partial")).unwrap();
    let sum =
        <sha2::Sha256 as sha2::Digest>::digest(std::fs::read(source.join("model.safetensors")).unwrap());
    pack_of(sum.into()).unwrap();
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    assert!(config.contains("\"repo\": \"owner/name\""), "{config}");
}

#[test]
fn layers_may_have_the_models_numbers() {
    let place = tempfile::tempdir().unwrap();
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    Plain::new(Layout::Official, fp8).write(&source, 2);
    let origin = Folder::new(&source);
    let options = PackOptions { numbering: Numbering::Model, ..PackOptions::default() };
    let plan = PackPlan::new(&origin, &options).unwrap();
    pack(&plan, &origin, &folder, &mut |_| {}).unwrap();
    let manifest = std::fs::read_to_string(folder.join("expert-manifest-v2.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(manifest["layers"][0]["layer"], 1);
    let layers: Vec<usize> =
        ExpertSource::open(&folder).unwrap().layers().iter().map(ExpertLayer::layer).collect();
    assert_eq!(layers, [1, 2, 3, 4]);
}

#[test]
fn verification_names_every_file_and_record_that_is_wrong() {
    let place = packed(&Plain::exl3(widths), 2);
    let folder = place.path().join("pack");
    let flip = |file: &str, at: usize| {
        let mut bytes = std::fs::read(folder.join(file)).unwrap();
        bytes[at] ^= 1;
        std::fs::write(folder.join(file), bytes).unwrap();
    };
    let source = ExpertSource::open(&folder).unwrap();
    let (one, two) = (source.record(2, 1).unwrap().reads(0), source.record(4, 0).unwrap().reads(0));
    flip("experts.bin", one[0].offset as usize + 17);
    flip("mtp-experts.bin", two[0].offset as usize);
    flip("tokenizer.json", 0);
    std::fs::remove_file(folder.join("receipts/state.json")).unwrap();
    std::fs::write(folder.join("stray.txt"), "x").unwrap();
    let verified = verify(&folder, Scope::All, &mut |_, _| {}).unwrap();
    let found: Vec<String> = verified.findings.iter().map(ToString::to_string).collect();
    let has = |parts: &[&str]| {
        assert!(
            found.iter().any(|text| parts.iter().all(|part| text.contains(part))),
            "{parts:?} in {found:#?}"
        );
    };
    has(&["experts.bin: record of layer 2, expert 1 at offset", &one[0].offset.to_string(), "SHA-256"]);
    has(&["mtp-experts.bin: record of layer 4, expert 0 at offset 0"]);
    has(&["experts.bin: SHA-256", "manifest.sha256 says"]);
    has(&["tokenizer.json: SHA-256"]);
    has(&["receipts/state.json: the file is not there"]);
    assert_eq!(found.len(), 6, "{found:#?}");
    assert_eq!(verified.unlisted, ["stray.txt"]);
    let quick = verify(&folder, Scope::Quick { records: 99, seed: 3 }, &mut |_, _| {}).unwrap();
    assert!(quick.findings.iter().any(|finding| finding.record == Some((2, 1))), "{quick:?}");
    std::fs::write(folder.join("experts.bin"), b"short").unwrap();
    let cut = verify(&folder, Scope::All, &mut |_, _| {}).unwrap();
    assert!(cut.findings.iter().any(|finding| finding.what.contains("SidecarOpen")), "{cut:?}");
    let plain = verify(&place.path().join("source"), Scope::All, &mut |_, _| {}).unwrap_err();
    says(&plain, &["nothing to compare with"]);
}

#[test]
fn the_sums_are_what_shasum_reads() {
    let place = packed(&Plain::new(Layout::Official, fp8), 2);
    let folder = place.path().join("pack");
    let files = tree(&folder);
    let sums = String::from_utf8(files["manifest.sha256"].clone()).unwrap();
    let listed: Vec<&str> = sums.lines().map(|line| line.split_once("  ").unwrap().1).collect();
    let expected: Vec<&str> = files
        .keys()
        .map(String::as_str)
        .filter(|name| !["manifest.sha256", "README.md"].contains(name))
        .collect();
    assert_eq!(listed, expected);
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").unwrap();
        let found: [u8; 32] = <sha2::Sha256 as sha2::Digest>::digest(&files[name]).into();
        assert_eq!(sum, hex(&found), "{name}");
    }
}

#[test]
fn the_release_is_planned_from_its_headers() {
    use support::release::{Form, config, tensors, write};
    let place = tempfile::tempdir().unwrap();
    for (form, bytes) in [(Form::Fp8, 25_174_016), (Form::Affine4, 14_155_776)] {
        let source = place.path().join(format!("{bytes}"));
        std::fs::create_dir(&source).unwrap();
        write(&source, &config(form, 288), &tensors(form, 288), 62);
        let plan = PackPlan::new(&Folder::new(&source), &PackOptions::default()).unwrap();
        assert_eq!((plan.records(), plan.bank_bytes()), (43 * 288, 43 * 288 * bytes));
        assert!(plan.trunk_bytes() > 10_000_000_000);
        let experts = ExpertSource::open(&source).unwrap();
        let reads = experts.record(3, 5).unwrap().reads(64);
        assert!((1..=9).contains(&reads.len()), "{reads:?}");
    }
}

#[test]
fn experts_of_a_model_in_the_program_are_found_too() {
    let plain = Plain::new(Layout::MlxFused, |name| {
        if name.contains(".experts.") { Storage::Affine(4, 64) } else { Storage::Bf16 }
    });
    let source = support::source(&plain.config, &plain.tensors);
    let checkpoint = open(source);
    let experts = ExpertSource::of_checkpoint(&checkpoint).unwrap();
    let record = experts.record(3, 2).unwrap();
    assert_eq!(record.reads(0).len(), 9);
    let bytes: Vec<Vec<u8>> = read(&experts, &record, 0);
    let expert = &checkpoint.stack("layers.3.mlp.experts.gate_proj").unwrap()[2];
    let flint_weights::Form::Affine { codes, scales, biases, .. } = &expert.form else {
        panic!("{expert:?}")
    };
    let arrays: Vec<&[u8]> = [codes, scales, biases].map(HostBytes::as_slice).to_vec();
    assert_eq!(bytes[..3].iter().map(Vec::as_slice).collect::<Vec<_>>(), arrays);
}

#[test]
fn a_pack_of_another_model_is_not_opened() {
    let place = packed(&Plain::new(Layout::Official, fp8), 1);
    let mut config = support::config();
    config["text_config"]["moe_intermediate_size"] = serde_json::json!(128);
    let config = ModelConfig::from_json(config.as_object().unwrap()).unwrap();
    let error = Pack::open(&place.path().join("pack"), &config).unwrap_err();
    assert!(
        matches!(error, Error::Pack { refusal: flint_weights::pack::Refusal::DimsNotImplemented, .. }),
        "{error}"
    );
}
