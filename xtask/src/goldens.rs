//! Fixtures outside the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::Outcome;

/// Compares fixtures that are too large for the repository.
#[derive(Args)]
pub(crate) struct Goldens {
    /// Folder with `config.json`, `model.safetensors` and `goldens.safetensors` of the random tiny model in the official
    /// layout; folder of the tiny model in EXL3 with its `goldens`; or the file of EXL3 matrices.
    place: PathBuf,
}

/// Packs checkpoints that are too large for the repository, takes the packs apart, and compares every byte.
#[derive(Args)]
pub(crate) struct Packs {
    /// Folders of plain checkpoints.
    #[arg(required = true)]
    folders: Vec<PathBuf>,
}

impl Goldens {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        run(root, "goldens", std::slice::from_ref(&self.place), "a golden differs")
    }
}

impl Packs {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        run(root, "packs", &self.folders, "a pack differs from its source")
    }
}

/// Runs a program of the contracts on folders.
fn run(root: &Path, program: &str, folders: &[PathBuf], failed: &str) -> Outcome {
    let absolute = |folder: &PathBuf| folder.canonicalize().map_err(|e| format!("{}: {e}", folder.display()));
    let folders = folders.iter().map(absolute).collect::<Outcome<Vec<_>>>()?;
    let status = Command::new("cargo")
        .current_dir(root)
        .args(["run", "--quiet", "--package", "flint-contracts", "--bin", program, "--"])
        .args(folders)
        .status()
        .map_err(|e| format!("cargo: {e}"))?;
    if status.success() { Ok(()) } else { Err(failed.into()) }
}
