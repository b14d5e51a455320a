//! Fixtures outside the repository.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::Outcome;

/// Compares fixtures that are too large for the repository.
#[derive(Args)]
pub(crate) struct Goldens {
    /// Folder with `config.json`, `model.safetensors` and `goldens.safetensors` of the random tiny model in the official
    /// layout.
    folder: PathBuf,
}

impl Goldens {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        let folder = self.folder.canonicalize().map_err(|e| format!("{}: {e}", self.folder.display()))?;
        let status = Command::new("cargo")
            .current_dir(root)
            .args(["run", "--quiet", "--package", "flint-contracts", "--bin", "goldens", "--"])
            .arg(folder)
            .status()
            .map_err(|e| format!("cargo: {e}"))?;
        if status.success() { Ok(()) } else { Err("a golden differs".into()) }
    }
}
