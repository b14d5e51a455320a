//! `flint`: GLM-5.3-Flash on the machine you have, exact.
//!
//! [`config`] reads options, [`assemble`] turns them into a running engine, `cli/` holds one file for each command,
//! [`terminal`] is the only way to the user. Start at [`run`].

mod assemble;
mod cli;
mod config;
mod device;
mod embedded;
mod error;
mod hub;
mod interrupt;
mod machine;
mod memory;
mod progress;
mod talk;
mod terminal;

use std::process::ExitCode;

use clap::Parser as _;

use crate::config::{Command, Flags};
use crate::error::{Error, Result};
use crate::interrupt::Interrupts;
use crate::terminal::{Style, Terminal};

/// A command failed; the reason was written to standard error.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let terminal = Terminal::new(flags.colour());
    match run(flags, terminal) {
        Ok(status) => status,
        Err(Error::OutputClosed) => ExitCode::SUCCESS,
        Err(error) => {
            terminal.note(Style::Warning, &format!("flint: {error}"));
            ExitCode::from(FAILED)
        }
    }
}

fn run(flags: Flags, terminal: Terminal) -> Result<ExitCode> {
    let file = flags.config_file()?;
    let interrupts = Interrupts::listen()?;
    match flags.command {
        Command::Chat(flags) => cli::chat::run(flags, &file, &interrupts, terminal),
        Command::Generate(flags) => cli::generate::run(&flags, &file, &interrupts, terminal),
        Command::Serve(flags) => cli::serve::run(flags, &file, &interrupts, terminal),
        Command::Plan(flags) => cli::plan::run(flags, &file, terminal),
        Command::Bench(flags) => cli::bench::run(&flags, terminal),
        Command::Pack(flags) => cli::pack::run(flags, terminal),
        Command::Unpack(flags) => cli::pack::unpack(&flags, terminal),
        Command::Verify(flags) => cli::verify::run(&flags, terminal),
        Command::Inspect(flags) => cli::inspect::run(&flags, terminal),
    }
}
