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

impl Goldens {
    pub(crate) fn run(&self, root: &Path) -> Outcome {
        let place = self.place.canonicalize().map_err(|e| format!("{}: {e}", self.place.display()))?;
        let status = Command::new("cargo")
            .current_dir(root)
            .args(["run", "--quiet", "--package", "flint-contracts", "--bin", "goldens", "--"])
            .arg(place)
            .status()
            .map_err(|e| format!("cargo: {e}"))?;
        if status.success() { Ok(()) } else { Err("a golden differs".into()) }
    }
}
