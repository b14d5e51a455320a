//! Development commands: `cargo xtask COMMAND`.

#![allow(clippy::print_stdout, clippy::print_stderr)] // commands for developers speak to a terminal

mod goldens;
mod kernels;
mod peers;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

/// Development commands of the project.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Counts lines and names files that are too long to find one's way in.
    Tidy,
    /// Compares fixtures that are too large for the repository.
    Goldens(goldens::Goldens),
    /// Packs checkpoints that are too large for the repository, and takes the packs apart.
    Packs(goldens::Packs),
    /// Measures Flint against llama.cpp and transformers on the same weights, interleaved in one run.
    Peers(peers::Peers),
    /// Compiles the CUDA kernels into the code that the program embeds, and says what each costs.
    Kernels(kernels::Kernels),
    /// Runs every law and contract on this machine's CUDA device.
    Cuda(kernels::Cuda),
}

/// What a command that failed says.
type Outcome<T = ()> = Result<T, String>;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Task::Tidy => tidy::run(&root()),
        Task::Goldens(task) => task.run(&root()),
        Task::Packs(task) => task.run(&root()),
        Task::Peers(task) => task.run(&root()),
        Task::Kernels(task) => task.run(&root()),
        Task::Cuda(task) => task.run(&root()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

/// The repository's root.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs a command to its end; what it printed on standard output.
fn output(command: &mut Command) -> Outcome<String> {
    let done = command.output().map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let tail: Vec<&str> = said.lines().rev().take(20).collect();
    let tail: Vec<&str> = tail.into_iter().rev().collect();
    Err(format!("{command:?} failed ({}):\n{}", done.status, tail.join("\n")))
}
