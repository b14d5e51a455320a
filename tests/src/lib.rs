//! What the whole-program contracts share: tiny checkpoints in every layout, goldens, and ways to feed a model.
//!
//! The contracts themselves are the files of `tests/tests`, one for each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::missing_panics_doc)] // test support

pub mod checks;
pub mod contracts;
pub mod exl3;
pub mod feeding;
pub mod goldens;
pub mod nano;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use flint_backend::Backend;
use flint_cpu::{Arithmetic, Cpu, Level, Options};
use flint_model::bank::{BankOptions, Experts};
use flint_model::{Glm, GlmOptions};
use flint_weights::stream::{ExpertStream, ReadOptions};
use flint_weights::{Checkpoint, Source};

/// A tiny checkpoint of the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiny {
    /// Random weights, fused MLX modules, affine 4/64.
    Mlx4,
    /// Random weights, unfused MLX modules, a width for each module.
    MixedWidths,
    /// The trained model that the binary embeds: affine 4, 6 and 8 bits.
    Trained,
}

/// Every tiny checkpoint.
pub const TINY: [Tiny; 3] = [Tiny::Mlx4, Tiny::MixedWidths, Tiny::Trained];

/// The repository's root: where it was built, or the folder that a program which travelled stands in.
pub fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if built.is_dir() { built } else { PathBuf::from(".") }
}

impl Tiny {
    /// Its folder.
    pub fn folder(self) -> PathBuf {
        match self {
            Self::Mlx4 => root().join("tests/fixtures/glm5_next_nano_mlx4"),
            Self::MixedWidths => root().join("tests/fixtures/glm5_next_nano_oq"),
            Self::Trained => root().join("models/flint-tiny"),
        }
    }

    /// Opens it.
    pub fn checkpoint(self) -> Checkpoint {
        Checkpoint::open(Source::Folder(self.folder())).unwrap()
    }
}

/// Sizes that the contracts use.
pub fn sizes() -> GlmOptions {
    GlmOptions { context: 4096, sequences: 24, rows: 512, drafts: 8 }
}

/// A CPU backend of the given kind with `threads` threads at the best level.
pub fn cpu(arithmetic: Arithmetic, threads: usize) -> Cpu {
    Cpu::new(Options { arithmetic, threads, level: Level::detect() }).unwrap()
}

/// The arithmetics that this machine has.
pub fn arithmetics() -> Vec<Arithmetic> {
    let mut all = vec![Arithmetic::Lanes];
    if Arithmetic::dot_is_available() {
        all.push(Arithmetic::Dot);
    }
    all
}

/// A tiny model on a backend.
pub fn load<B: Backend>(tiny: Tiny, backend: B) -> Glm<B> {
    Glm::load(&tiny.checkpoint(), backend, sizes(), Experts::Resident, &mut |_, _| {}).unwrap()
}

/// A tiny model on a backend with only some of its experts there, the others in its files.
pub fn load_streamed<B: Backend>(tiny: Tiny, backend: B, options: BankOptions) -> Glm<B> {
    streamed_from(&tiny.folder(), backend, options)
}

/// The same of any folder.
pub fn streamed_from<B: Backend>(folder: &Path, backend: B, options: BankOptions) -> Glm<B> {
    let checkpoint = Arc::new(Checkpoint::open(Source::Folder(folder.to_owned())).unwrap());
    let stream = ExpertStream::open(checkpoint.clone(), ReadOptions::default()).unwrap();
    let experts = Experts::Streamed(Box::new(stream), options);
    Glm::load(&checkpoint, backend, sizes(), experts, &mut |_, _| {}).unwrap()
}

/// A tiny model on the CPU with one thread; `everywhere.rs` compares thread counts.
pub fn model(tiny: Tiny, arithmetic: Arithmetic) -> Glm<Cpu> {
    load(tiny, cpu(arithmetic, 1))
}
