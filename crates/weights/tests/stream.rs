//! Experts that are read one by one are the experts that the checkpoint maps, whoever reads them; files that end early,
//! change or are swapped end a read with an error that names them.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use flint_weights::config::FeedForward;
use flint_weights::pack::{Folder, PackOptions, PackPlan, pack};
use flint_weights::stream::{Arrival, ExpertId, ExpertStream, ReadEngine, ReadOptions, Slab, VerifyRecords};
use flint_weights::{Checkpoint, Form, HostBytes, QuantMatrix, Source};

const LONG: Duration = Duration::from_secs(10);

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/flint-tiny")
}

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/glm5_next_nano_mlx4")
}

fn open(folder: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(Source::Folder(folder.to_owned())).unwrap())
}

fn options(engine: ReadEngine, direct: bool) -> ReadOptions {
    ReadOptions { engine, depth: 4, chunk: 8192, direct, verify: VerifyRecords::First }
}

/// Engines that this machine has.
fn engines() -> Vec<ReadEngine> {
    let checkpoint = open(&nano());
    let has = |engine: &ReadEngine| ExpertStream::open(checkpoint.clone(), options(*engine, false)).is_ok();
    [ReadEngine::Threads, ReadEngine::Ring, ReadEngine::Auto].into_iter().filter(has).collect()
}

fn all(checkpoint: &Checkpoint) -> Vec<ExpertId> {
    let config = checkpoint.config();
    let sparse = (0..config.layers()).filter(|layer| config.feed_forward[*layer] == FeedForward::Sparse);
    sparse.flat_map(|layer| (0..config.experts).map(move |expert| ExpertId { layer, expert })).collect()
}

fn read(stream: &mut ExpertStream, id: ExpertId) -> Arrival {
    stream.start(id, Slab::new(stream.slab_bytes(id.layer)).unwrap()).unwrap();
    stream.next(LONG).unwrap()
}

fn arrays(matrix: &QuantMatrix) -> Vec<&HostBytes> {
    match &matrix.form {
        Form::Plain { values, .. } => vec![values],
        Form::Affine { codes, scales, biases, .. } => vec![codes, scales, biases],
        Form::Fp8Block { codes, scales, .. } => vec![codes, scales],
        Form::Exl3(exl3) => vec![&exl3.trellis, &exl3.input_scales, &exl3.output_scales],
    }
}

fn assert_same(a: &QuantMatrix, b: &QuantMatrix) {
    assert_eq!((a.rows, a.cols), (b.rows, b.cols));
    for (a, b) in arrays(a).into_iter().zip(arrays(b)) {
        assert!(a.as_slice() == b.as_slice(), "{}", b.len());
    }
}

#[test]
fn streamed_experts_are_the_mapped_ones_whoever_reads_them() {
    for (folder, direct) in [(tiny(), true), (nano(), true), (nano(), false)] {
        let checkpoint = open(&folder);
        for engine in engines() {
            let mut stream = ExpertStream::open(checkpoint.clone(), options(engine, direct)).unwrap();
            let ids = all(&checkpoint);
            for id in &ids {
                stream.start(*id, Slab::new(stream.slab_bytes(id.layer)).unwrap()).unwrap();
            }
            let mut seen = Vec::new();
            while stream.under_way() > 0 {
                let arrival = stream.next(LONG).unwrap();
                let matrices = arrival.matrices.unwrap();
                for (part, matrix) in [
                    ("gate_proj", &matrices.gate_up[0]),
                    ("up_proj", &matrices.gate_up[1]),
                    ("down_proj", &matrices.down),
                ] {
                    let name = format!("layers.{}.mlp.experts.{part}", arrival.id.layer);
                    assert_same(matrix, &checkpoint.stack(&name).unwrap()[arrival.id.expert]);
                }
                seen.push(arrival.id);
            }
            seen.sort_unstable();
            assert_eq!(seen, ids, "each expert once");
        }
    }
}

#[test]
fn a_slab_is_free_again_when_nobody_holds_its_matrices() {
    let mut stream = ExpertStream::open(open(&nano()), options(ReadEngine::Auto, true)).unwrap();
    let id = all(&open(&nano()))[0];
    let arrival = read(&mut stream, id);
    let kept = Arc::try_unwrap(arrival.slab).unwrap_err();
    drop(arrival.matrices);
    let slab = Arc::try_unwrap(kept).unwrap();
    stream.start(id, slab).unwrap();
    assert!(stream.next(LONG).unwrap().matrices.is_ok());
}

/// A copy of the nano checkpoint that may be damaged.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(nano()).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
        }
    }
    folder
}

#[test]
fn a_file_that_is_cut_or_written_while_it_is_read_is_refused_by_name() {
    for engine in engines() {
        for (direct, cut) in [(true, true), (false, true), (true, false)] {
            let folder = copy();
            let shard = folder.path().join("model.safetensors");
            let checkpoint = open(folder.path());
            let mut stream = ExpertStream::open(checkpoint.clone(), options(engine, direct)).unwrap();
            let ids = all(&checkpoint);
            assert!(read(&mut stream, ids[0]).matrices.is_ok());
            let len = std::fs::metadata(&shard).unwrap().len();
            let file = OpenOptions::new().append(true).open(&shard).unwrap();
            if cut {
                file.set_len(len / 3).unwrap();
            } else {
                (&file).write_all(b"more").unwrap();
            }
            for id in &ids {
                let error = read(&mut stream, *id).matrices.unwrap_err().to_string();
                assert!(error.contains("model.safetensors"), "{error}");
                assert!(error.contains(&format!("expert {}", id.expert)), "{error}");
                assert!(error.contains(&format!("layers.{}", id.layer)), "{error}");
                assert!(error.contains("the file "), "{error}");
            }
        }
    }
}

#[test]
fn a_file_that_vanishes_is_still_read_from_its_open_handle() {
    let folder = copy();
    let checkpoint = open(folder.path());
    let mut stream = ExpertStream::open(checkpoint.clone(), options(ReadEngine::Auto, true)).unwrap();
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(read(&mut stream, all(&checkpoint)[1]).matrices.is_ok());
}

#[test]
fn experts_that_are_not_there_and_slabs_that_are_too_short_are_refused() {
    let checkpoint = open(&tiny());
    let mut stream = ExpertStream::open(checkpoint.clone(), options(ReadEngine::Auto, true)).unwrap();
    let id = all(&checkpoint)[0];
    let missing = ExpertId { expert: 10_000, ..id };
    assert!(stream.start(missing, Slab::new(1 << 20).unwrap()).is_err());
    assert!(stream.start(ExpertId { layer: 0, ..id }, Slab::new(1 << 20).unwrap()).is_err());
    assert!(stream.start(id, Slab::new(4096).unwrap()).is_err());
}

/// A pack of flint-tiny.
fn packed() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let origin = Folder::new(tiny());
    let plan = PackPlan::new(&origin, &PackOptions::default()).unwrap();
    pack(&plan, &origin, folder.path(), &mut |_| {}).unwrap();
    folder
}

#[test]
fn a_pack_streams_the_experts_of_its_source_and_checks_each_record() {
    let folder = packed();
    let (source, opened) = (open(&tiny()), open(folder.path()));
    let ids = all(&source);
    for engine in engines() {
        let mut stream = ExpertStream::open(opened.clone(), options(engine, true)).unwrap();
        for id in &ids {
            let matrices = read(&mut stream, *id).matrices.unwrap();
            let expected = source.stack(&format!("layers.{}.mlp.experts.down_proj", id.layer)).unwrap();
            assert_same(&matrices.down, &expected[id.expert]);
        }
    }
    // One bit of the third expert's record.
    let bank = folder.path().join("experts.bin");
    let record = std::fs::metadata(&bank).unwrap().len() / ids.len() as u64;
    let at = 2 * record + record / 2;
    let mut bytes = std::fs::read(&bank).unwrap();
    bytes[at as usize] ^= 4;
    std::fs::write(&bank, bytes).unwrap();
    let opened = open(folder.path());
    for verify in [VerifyRecords::Always, VerifyRecords::First, VerifyRecords::Never] {
        let options = ReadOptions { verify, ..options(ReadEngine::Auto, true) };
        let mut stream = ExpertStream::open(opened.clone(), options).unwrap();
        assert!(read(&mut stream, ids[1]).matrices.is_ok());
        let found = read(&mut stream, ids[2]).matrices;
        if verify == VerifyRecords::Never {
            assert!(found.is_ok());
            continue;
        }
        let error = found.unwrap_err().to_string();
        for part in ["experts.bin", "expert 2", "SHA-256", &format!("byte {}", 2 * record)] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
}
