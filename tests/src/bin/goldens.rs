//! Compares fixtures that are too large for the repository: `goldens FOLDER`, where FOLDER holds `config.json`,
//! `model.safetensors` and `goldens.safetensors` of the random tiny model in the official layout.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)] // a command for developers

use std::path::PathBuf;

use flint_contracts::{cpu, nano, sizes};
use flint_cpu::Arithmetic;
use flint_model::Glm;
use flint_model::bank::Experts;
use flint_weights::{Checkpoint, Source};

fn main() {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: goldens FOLDER");
        std::process::exit(2);
    };
    let checkpoint = Checkpoint::open(Source::Folder(folder.clone())).unwrap();
    let mut model =
        Glm::load(&checkpoint, cpu(Arithmetic::Lanes, 2), sizes(), Experts::Resident, &mut |_, _| {})
            .unwrap();
    nano::check_official(&mut model, &folder);
    println!("{}: every stored value is within its tolerance", folder.display());
}
