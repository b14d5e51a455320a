//! Packs that are not opened: each reason by its name, with file and place.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may end them")]

mod support;

use std::path::{Path, PathBuf};

use flint_weights::pack::{ExpertSource, Pack, Refusal};
use flint_weights::{Checkpoint, Error, ModelConfig, Source};
use serde_json::{Value, json};
use support::layout::Layout;
use support::packs::{Plain, make};
use support::{Storage, says};

const V2: &str = "expert-manifest-v2.json";
const V1: &str = "expert-manifest.json";
const MTP: &str = "mtp-expert-manifest-v2.json";

/// A reason, what is changed, how, and a part of the message.
type Case = (Refusal, &'static str, fn(&mut Value), &'static str);
/// The same for the older manifest.
type OlderCase = (Refusal, fn(&mut Value), &'static str);

/// A pack of EXL3 experts: layer 1 with K = 3, layer 2 with K = 2, 2, 2.5, the others with K = 4.
struct Made {
    place: tempfile::TempDir,
}

impl Made {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let plain = Plain::exl3(|layer, projection| match (layer, projection) {
            (1, _) => 6,
            (2, "down_proj") => 5,
            (2, _) => 4,
            _ => 8,
        });
        plain.write(&place.path().join("source"), 2);
        make(&place.path().join("source"), &place.path().join("pack"));
        Self { place }
    }

    fn folder(&self) -> PathBuf {
        self.place.path().join("pack")
    }

    fn json(&self, file: &str) -> Value {
        serde_json::from_slice(&std::fs::read(self.folder().join(file)).unwrap()).unwrap()
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.folder().join(file), bytes).unwrap();
    }

    fn open(&self) -> Result<Pack, Error> {
        let config = support::config();
        Pack::open(&self.folder(), &ModelConfig::from_json(config.as_object().unwrap()).unwrap())
    }

    /// The reason for which the pack is not opened, and its words; the file is put back.
    fn refusal_with(&self, file: &str, bytes: impl AsRef<[u8]>) -> (Refusal, String) {
        let before = std::fs::read(self.folder().join(file)).unwrap();
        self.write(file, bytes);
        let refusal = self.refusal();
        self.write(file, before);
        refusal
    }

    fn refusal(&self) -> (Refusal, String) {
        match self.open() {
            Ok(_) => panic!("the pack was opened"),
            Err(Error::Pack { refusal, file, what, .. }) => (refusal, format!("{file}: {what}")),
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`refusal_with`](Self::refusal_with), after a change of the file's JSON.
    fn changed(&self, file: &str, change: &dyn Fn(&mut Value)) -> (Refusal, String) {
        let mut value = self.json(file);
        change(&mut value);
        self.refusal_with(file, value.to_string())
    }
}

#[test]
fn every_reason_of_a_manifest_has_its_name() {
    use Refusal::{
        CodebookMultiplier, CodebookNotImplemented, DimsInvalid, DimsNotImplemented, KNotImplemented,
        LayerGeometry, ManifestFormat, ManifestSyntax, ParityNotPassed, RecordCount, RecordDuplicate,
        RecordGeometry, RecordSha256, RuntimeModeNotExl3, SidecarGeometry,
    };
    let made = Made::new();
    made.open().unwrap();
    let cases: &[Case] = &[
        (ManifestFormat, "no format", |m| drop(m.as_object_mut().unwrap().remove("format")), "no format"),
        (
            ManifestFormat,
            "v3",
            |m| m["format"] = json!("mtplx-expert-manifest-v3"),
            "mtplx-expert-manifest-v3",
        ),
        (ManifestSyntax, "no layers", |m| drop(m.as_object_mut().unwrap().remove("layers")), "layers"),
        (ManifestSyntax, "text for a number", |m| m["sidecar"]["size"] = json!("many"), "many"),
        (ManifestSyntax, "negative", |m| m["records"][3]["sidecar_offset"] = json!(-1), "-1"),
        (CodebookNotImplemented, "codebook", |m| m["quantization"]["codebook"] = json!("mul2"), "mul2"),
        (
            CodebookMultiplier,
            "multiplier",
            |m| m["quantization"]["codebook_multiplier"] = json!(1),
            "2212286765",
        ),
        (CodebookMultiplier, "of another", |m| m["quantization"]["codebook"] = json!("mcg"), "3417055213"),
        (RuntimeModeNotExl3, "mode", |m| m["quantization"]["mode"] = json!("mxfp4"), "mxfp4"),
        (LayerGeometry, "tile", |m| m["quantization"]["tile"]["size"] = json!(8), "tile"),
        (DimsInvalid, "zero", |m| m["dims"]["inter"] = json!(0), "inter 0"),
        (DimsInvalid, "absurd", |m| m["dims"]["n_experts"] = json!(65_537), "65537"),
        (DimsInvalid, "absurd", |m| m["dims"]["n_layers"] = json!(u64::MAX), "no model has"),
        (DimsNotImplemented, "another model", |m| m["dims"]["hidden"] = json!(4096), "hidden 128"),
        (DimsNotImplemented, "another depth", |m| m["dims"]["n_layers"] = json!(2), "n_layers 3"),
        (SidecarGeometry, "path", |m| m["sidecar"]["file"] = json!("../experts.bin"), "../experts.bin"),
        (SidecarGeometry, "alignment", |m| m["sidecar"]["alignment"] = json!(1000), "1000"),
        (SidecarGeometry, "alignment 0", |m| m["sidecar"]["alignment"] = json!(0), "alignment is 0"),
        (SidecarGeometry, "size", |m| m["sidecar"]["size"] = json!(4096), "sidecar.size is 4096"),
        (KNotImplemented, "K 9", |m| m["layers"][0]["K"] = json!(9), "K is 9"),
        (KNotImplemented, "K 2.25", |m| m["layers"][0]["K"] = json!(2.25), "K is 2.25"),
        (KNotImplemented, "K -1", |m| m["layers"][0]["K"] = json!(-1), "layer 0"),
        (KNotImplemented, "both", |m| m["layers"][0]["projection_K"] = json!([3, 3, 3]), "both"),
        (
            KNotImplemented,
            "neither",
            |m| drop(m["layers"][0].as_object_mut().unwrap().remove("K")),
            "neither",
        ),
        (LayerGeometry, "another K", |m| m["layers"][0]["K"] = json!(4), "its shapes give"),
        (LayerGeometry, "layer number", |m| m["layers"][0]["layer"] = json!(7), "its layers are [7, 1, 2]"),
        (LayerGeometry, "layer twice", |m| m["layers"][0]["layer"] = json!(1), "its layers are [1, 1, 2]"),
        (
            LayerGeometry,
            "order",
            |m| m["layers"][1]["segments"].as_array_mut().unwrap().swap(1, 2),
            "layer 1",
        ),
        (
            LayerGeometry,
            "one less",
            |m| drop(m["layers"][1]["segments"].as_array_mut().unwrap().pop()),
            "layer 1",
        ),
        (
            LayerGeometry,
            "name",
            |m| m["layers"][1]["segments"][0]["component"] = json!("gate.code"),
            "gate.code",
        ),
        (LayerGeometry, "dtype", |m| m["layers"][1]["segments"][1]["dtype"] = json!("BF16"), "BF16"),
        (LayerGeometry, "no dtype", |m| m["layers"][1]["segments"][1]["dtype"] = json!("F17"), "F17"),
        (LayerGeometry, "shape", |m| m["layers"][1]["segments"][1]["shape"] = json!([64]), "[64]"),
        (
            LayerGeometry,
            "offset",
            |m| m["layers"][1]["segments"][1]["offset"] = json!(1),
            "gate_proj.rout: offset 1",
        ),
        (LayerGeometry, "length", |m| m["layers"][1]["segments"][1]["length"] = json!(1), "length 1"),
        (LayerGeometry, "record size", |m| m["layers"][1]["record_bytes"] = json!(1), "record_bytes 1"),
        (LayerGeometry, "logical size", |m| m["layers"][1]["logical_bytes"] = json!(1), "logical_bytes 1"),
        (LayerGeometry, "base", |m| m["layers"][1]["base_offset"] = json!(4096), "base_offset 4096"),
        (RecordCount, "one less", |m| drop(m["records"].as_array_mut().unwrap().pop()), "8 records"),
        (RecordCount, "declared", |m| m["artifact"]["record_count"] = json!(10), "record_count is 10"),
        (
            RecordDuplicate,
            "twice",
            |m| m["records"][4] = m["records"][3].clone(),
            "layer 1, expert 0: it stands twice",
        ),
        (
            RecordGeometry,
            "offset",
            |m| m["records"][4]["sidecar_offset"] = json!(0),
            "layer 1, expert 1: offset 0",
        ),
        (RecordGeometry, "size", |m| m["records"][4]["record_bytes"] = json!(4096), "4096 bytes"),
        (RecordGeometry, "expert", |m| m["records"][4]["expert"] = json!(288), "expert 288"),
        (RecordGeometry, "layer", |m| m["records"][4]["layer"] = json!(9), "layer 9"),
        (
            RecordSha256,
            "none",
            |m| drop(m["records"][0].as_object_mut().unwrap().remove("sha256")),
            "missing",
        ),
        (RecordSha256, "no hex", |m| m["records"][0]["sha256"] = json!("z".repeat(64)), "zzz"),
        (RecordSha256, "short", |m| m["records"][0]["sha256"] = json!("ab"), "\"ab\""),
        (ParityNotPassed, "false", |m| m["parity"]["all_pass"] = json!(false), "false"),
        (ParityNotPassed, "text", |m| m["parity"]["all_pass"] = json!("true"), "\"true\""),
        (ParityNotPassed, "none", |m| drop(m.as_object_mut().unwrap().remove("parity")), "missing"),
    ];
    for (expected, name, change, part) in cases {
        let (found, text) = made.changed(V2, change);
        assert_eq!(found, *expected, "{name}: {text}");
        assert!(text.starts_with(V2) && text.contains(part), "{name}: {part:?} is not in {text}");
    }
    // The other bank is held to the same.
    let (found, text) = made.changed(MTP, &|m| m["parity"]["all_pass"] = json!(false));
    assert!(found == ParityNotPassed && text.starts_with(MTP), "{text}");
    made.open().unwrap();
}

#[test]
fn a_manifest_that_is_missing_unreadable_or_twice_minded() {
    let made = Made::new();
    assert_eq!(made.refusal_with(V2, "{").0, Refusal::ManifestSyntax);
    assert_eq!(made.refusal_with(V2, "[]").0, Refusal::ManifestSyntax);
    let text = std::fs::read_to_string(made.folder().join(V2)).unwrap();
    let twice = text.replacen("\"K\": 3", "\"K\": 3, \"K\": 3", 1);
    let (refusal, what) = made.refusal_with(V2, twice);
    assert!(refusal == Refusal::ManifestSyntax && what.contains("\"K\" stands twice"), "{what}");
    let unknown = text.replacen('{', "{\"whatever\": [1, {\"x\": null}],", 1);
    let before = std::fs::read(made.folder().join(V2)).unwrap();
    made.write(V2, unknown);
    made.open().unwrap();
    made.write(V2, before);
    for (file, refusal) in [(V2, Refusal::ManifestMissing), (MTP, Refusal::ManifestMissing)] {
        let (from, to) = (made.folder().join(file), made.folder().join("aside"));
        std::fs::rename(&from, &to).unwrap();
        assert_eq!(made.refusal().0, refusal, "{file}");
        std::fs::create_dir(&from).unwrap();
        assert_eq!(made.refusal().0, Refusal::ManifestOpen, "{file}");
        std::fs::remove_dir(&from).unwrap();
        std::fs::rename(&to, &from).unwrap();
    }
    std::fs::rename(made.folder().join(V2), made.folder().join("expert-manifest-v3.json")).unwrap();
    let (refusal, what) = made.refusal();
    assert!(refusal == Refusal::ManifestFormat && what.contains("v3"), "{what}");
}

#[test]
fn a_manifest_above_the_bound_is_not_read_into_memory() {
    let made = Made::new();
    let file = std::fs::File::options().write(true).open(made.folder().join(V2)).unwrap();
    file.set_len((128 << 20) + 1).unwrap();
    let (refusal, what) = made.refusal();
    assert!(refusal == Refusal::ManifestOpen && what.contains("134217728"), "{what}");
}

#[test]
fn the_older_manifest_must_say_the_same_where_it_is_there() {
    let made = Made::new();
    let cases: &[OlderCase] = &[
        (Refusal::RuntimeModeNotExl3, |m| m["quantization"]["mode"] = json!("affine"), "affine"),
        (Refusal::ManifestFormat, |m| m["format"] = json!("other"), "other"),
        (Refusal::RuntimeRecordMismatch, |m| drop(m["records"].as_array_mut().unwrap().pop()), "8 records"),
        (Refusal::RuntimeRecordMismatch, |m| m["sidecar"]["size"] = json!(1), "1 bytes"),
        (
            Refusal::RuntimeRecordMismatch,
            |m| m["records"][4]["sidecar_offset"] = json!(0),
            "layer 1, expert 1",
        ),
        (
            Refusal::RuntimeRecordMismatch,
            |m| m["records"][4]["sidecar_length"] = json!(1),
            "sidecar_length 1",
        ),
        (Refusal::RuntimeRecordMismatch, |m| m["records"][4]["expert"] = json!(0), "stands twice"),
        (
            Refusal::RuntimeRecordMismatch,
            |m| m["records"][4]["segments"][2]["offset"] = json!(8),
            "gate_proj.rin",
        ),
        (Refusal::RuntimeRecordMismatch, |m| m["records"][4]["segments"][2]["dtype"] = json!("I16"), "I16"),
        (Refusal::ManifestSyntax, |m| m["records"][4]["segments"] = json!(3), "3"),
    ];
    for (expected, change, part) in cases {
        let (found, text) = made.changed(V1, change);
        assert_eq!(found, *expected, "{text}");
        assert!(text.starts_with(V1) && text.contains(part), "{part:?} is not in {text}");
    }
    std::fs::remove_file(made.folder().join(V1)).unwrap();
    made.open().unwrap();
}

#[test]
fn a_bank_that_is_missing_short_long_or_a_link() {
    let made = Made::new();
    let bank = made.folder().join("experts.bin");
    let size = bank.metadata().unwrap().len();
    let resize =
        |bytes: u64| std::fs::File::options().write(true).open(&bank).unwrap().set_len(bytes).unwrap();
    resize(size - 1);
    let (refusal, what) = made.refusal();
    assert!(refusal == Refusal::SidecarOpen && what.contains("1 are missing"), "{what}");
    resize(size + 1);
    assert_eq!(made.refusal().0, Refusal::SidecarGeometry);
    resize(size);
    made.open().unwrap();
    let aside = made.place.path().join("aside");
    std::fs::rename(&bank, &aside).unwrap();
    assert_eq!(made.refusal().0, Refusal::SidecarMissing);
    std::fs::create_dir(&bank).unwrap();
    assert_eq!(made.refusal().0, Refusal::SidecarOpen);
    std::fs::remove_dir(&bank).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&aside, &bank).unwrap();
        let (refusal, what) = made.refusal();
        assert!(refusal == Refusal::SidecarOpen && what.contains("link"), "{what}");
        std::fs::remove_file(&bank).unwrap();
        let manifest = made.folder().join(V2);
        std::fs::rename(&aside, &bank).unwrap();
        std::fs::rename(&manifest, &aside).unwrap();
        std::os::unix::fs::symlink(&aside, &manifest).unwrap();
        assert_eq!(made.refusal().0, Refusal::ManifestOpen);
    }
}

#[test]
fn the_bank_of_the_mtp_layers_may_not_be_missing_alone() {
    let place = tempfile::tempdir().unwrap();
    let plain = Plain::new(Layout::Official, |_| Storage::Bf16);
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    plain.write(&source, 2);
    make(&source, &folder);
    std::fs::remove_file(folder.join("mtp-experts.bin")).unwrap();
    assert_eq!(refusal_of(&folder).0, Refusal::SidecarMissing);
    std::fs::remove_file(folder.join(MTP)).unwrap();
    let (refusal, what) = refusal_of(&folder);
    assert!(refusal == Refusal::ManifestMissing && what.starts_with(MTP), "{what}");
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    std::fs::write(folder.join("config.json"), config.replace("mtp_manifest", "nothing")).unwrap();
    let (refusal, what) = refusal_of(&folder);
    assert!(refusal == Refusal::BankMissing && what.starts_with("mtp-experts.bin"), "{what}");
}

#[test]
fn no_damage_to_a_manifest_does_more_than_a_refusal() {
    let made = Made::new();
    let mut random = support::Random::new("damage");
    for file in [V2, V1, MTP, "config.json", "manifest.sha256", "receipts/source-headers.json"] {
        let whole = std::fs::read(made.folder().join(file)).unwrap();
        for _ in 0..60 {
            let mut bytes = whole.clone();
            match random.below(3) {
                0 => bytes.truncate(random.below(whole.len())),
                1 => {
                    let at = random.below(whole.len());
                    bytes[at] = random.byte();
                }
                _ => {
                    let at = random.below(whole.len());
                    let end = (at + random.below(40)).min(whole.len());
                    bytes.drain(at..end);
                }
            }
            made.write(file, bytes);
            // Opened or refused, never a panic: what may be opened is held to its sums by `verify`.
            let _ = made.open();
            let _ = flint_weights::pack::inspect(&made.folder());
            let quick = flint_weights::pack::Scope::Quick { records: 1, seed: 1 };
            let _ = flint_weights::pack::verify(&made.folder(), quick, &mut |_, _| {});
        }
        for _ in 0..20 {
            made.write(file, &whole[..random.below(whole.len() - 2)]);
            if [V2, V1, MTP].contains(&file) {
                assert_eq!(made.refusal().0, Refusal::ManifestSyntax, "{file} is cut");
            }
        }
        made.write(file, whole);
        made.open().unwrap();
    }
}

fn refusal_of(folder: &Path) -> (Refusal, String) {
    match Checkpoint::open(Source::Folder(folder.to_owned())) {
        Err(Error::Pack { refusal, file, what, .. }) => (refusal, format!("{file}: {what}")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_mark_of_a_pack_without_the_other_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let plain = Plain::new(Layout::Official, |_| Storage::Bf16);
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    plain.write(&source, 1);
    make(&source, &folder);
    Checkpoint::open(Source::Folder(folder.clone())).unwrap();
    std::fs::rename(folder.join("experts.bin"), place.path().join("aside")).unwrap();
    let (refusal, what) = refusal_of(&folder);
    assert!(refusal == Refusal::BankMissing && what.contains("without its bank"), "{what}");
    std::fs::rename(place.path().join("aside"), folder.join("experts.bin")).unwrap();
    std::fs::copy(source.join("config.json"), folder.join("config.json")).unwrap();
    let (refusal, what) = refusal_of(&folder);
    assert!(refusal == Refusal::BankMissing && what.starts_with("config.json"), "{what}");
}

#[test]
fn a_routed_expert_in_the_trunk_and_a_trunk_without_a_tensor_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let plain = Plain::new(Layout::Official, |_| Storage::Bf16);
    let (source, folder) = (place.path().join("source"), place.path().join("pack"));
    plain.write(&source, 1);
    make(&source, &folder);
    let trunk = |tensors: &[support::Tensor]| {
        let name = "model-00001-of-00001-nonexpert.safetensors";
        std::fs::write(folder.join(name), support::file(tensors)).unwrap();
        let map: serde_json::Map<String, Value> =
            tensors.iter().map(|t| (t.name.clone(), json!(name))).collect();
        let index = json!({"weight_map": map}).to_string();
        std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    };
    let of_trunk = |tensor: &&support::Tensor| !tensor.name.contains(".mlp.experts.");
    let mut tensors: Vec<support::Tensor> = plain.tensors.iter().filter(of_trunk).cloned().collect();
    trunk(&tensors);
    Checkpoint::open(Source::Folder(folder.clone())).unwrap();
    let one = tensors.pop().unwrap();
    trunk(&tensors);
    let error = Checkpoint::open(Source::Folder(folder.clone())).unwrap_err();
    says(&error, &["missing"]);
    tensors.push(one);
    tensors.push(plain.tensors.iter().find(|tensor| !of_trunk(tensor)).unwrap().clone());
    trunk(&tensors);
    let (refusal, what) = refusal_of(&folder);
    assert!(refusal == Refusal::ExpertInTrunk && what.contains(".mlp.experts."), "{what}");
}

#[test]
fn other_manifests_that_the_block_names_are_told_and_left_aside() {
    let made = Made::new();
    let mut config = made.json("config.json");
    config["expert_streaming"]["manifest"] = json!("other.json");
    made.write("config.json", config.to_string());
    assert!(made.open().unwrap().notes().is_empty(), "it is not there");
    made.write("other.json", "{}");
    let notes = made.open().unwrap().notes().to_vec();
    assert!(notes.len() == 1 && notes[0].contains("names other.json"), "{notes:?}");
}

#[test]
fn a_record_with_a_flipped_bit_is_named_when_it_is_checked() {
    let made = Made::new();
    let source = ExpertSource::open(&made.folder()).unwrap();
    let record = source.record(2, 1).unwrap();
    let whole = record.whole().unwrap();
    let bank = std::fs::read(made.folder().join("experts.bin")).unwrap();
    let mut bytes = bank[whole.offset as usize..][..whole.length as usize].to_vec();
    record.check(&bytes).unwrap();
    for at in [0, bytes.len() / 2, bytes.len() - 1] {
        bytes[at] ^= 4;
        let error = record.check(&bytes).unwrap_err();
        says(&error, &["experts.bin: record of layer 2, expert 1 at offset", &whole.offset.to_string()]);
        bytes[at] ^= 4;
    }
}
