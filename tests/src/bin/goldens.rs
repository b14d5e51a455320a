//! Compares fixtures that are too large for the repository: `goldens PLACE`, where PLACE is
//! - a folder with `config.json`, `model.safetensors` and `goldens.safetensors`: the random tiny model in the official layout;
//! - a folder with a checkpoint and `goldens/goldens.safetensors`: the tiny model as exllamav3's converter wrote it;
//! - a file: matrices that exllamav3 quantised, with what its kernels made of them.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)] // a command for developers

use std::path::{Path, PathBuf};

use flint_contracts::{cpu, exl3, nano, sizes};
use flint_cpu::Arithmetic;
use flint_model::Glm;
use flint_model::bank::Experts;
use flint_weights::{Checkpoint, Source};

fn main() {
    let Some(place) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: goldens PLACE");
        std::process::exit(2);
    };
    if place.is_file() {
        exl3::check_fixture(&place);
    } else if place.join("goldens").is_dir() {
        exl3::check_model(&place);
    } else {
        check_official(&place);
    }
}

fn check_official(folder: &Path) {
    let checkpoint = Checkpoint::open(Source::Folder(folder.to_owned())).unwrap();
    let cpu = cpu(Arithmetic::Lanes, 2);
    let mut model = Glm::load(&checkpoint, cpu, sizes(), Experts::Resident, &mut |_, _| {}).unwrap();
    nano::check_official(&mut model, folder);
    println!("{}: every stored value is within its tolerance", folder.display());
}
