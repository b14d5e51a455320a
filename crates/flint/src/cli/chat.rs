//! `flint chat`: a conversation in the terminal.
//!
//! [`input`] reads lines from a person's editor or from a pipe, [`command`] tells messages from `/commands`,
//! [`session`] holds the conversation. When standard output is no terminal only the answers go there, so that
//! `echo question | flint chat` prints an answer and nothing else.

mod command;
mod input;
mod session;

use std::process::ExitCode;

use crate::assemble::assemble;
use crate::config::settings::ModelSettings;
use crate::config::{ChatFlags, ConfigFile, history_file};
use crate::embedded;
use crate::error::Result;
use crate::interrupt::Interrupts;
use crate::terminal::{Style, Terminal};
use command::{Line, parse};
use input::{Input, Read};
use session::Session;

/// Loads the model and talks until the user leaves.
pub(crate) fn run(
    flags: ChatFlags,
    file: &ConfigFile,
    interrupts: &Interrupts,
    terminal: Terminal,
) -> Result<ExitCode> {
    let sampling = flags.sampling.over(file)?;
    let settings = ModelSettings::new(flags.model.over(file)?, flags.dir, 1, flags.force)?;
    let assembled = assemble(&settings, 0, terminal)?;
    greet(terminal, &assembled.summary, &assembled.name);
    let mut session = Session::new(&assembled, sampling, flags.system, !flags.no_think, terminal)?;
    let mut input = Input::new(terminal, history_file())?;
    let mut status = ExitCode::SUCCESS;
    loop {
        let text = match input.read()? {
            Read::Text(text) => text,
            Read::Interrupted => {
                terminal.note(Style::Dim, "Ctrl-C again or /quit ends the conversation");
                continue;
            }
            Read::End => break,
        };
        match parse(&text) {
            Line::Empty => {}
            Line::Message(message) => {
                if let Some(press) = session.reply(&message, interrupts)? {
                    status = ExitCode::from(press.status());
                    break;
                }
            }
            Line::Command(command) => {
                if session.obey(command).is_break() {
                    break;
                }
            }
            Line::Wrong(what) => terminal.note(Style::Warning, &what),
        }
    }
    assembled.engine.shutdown();
    Ok(status)
}

fn greet(terminal: Terminal, summary: &str, name: &str) {
    terminal.note(Style::Bold, &format!("flint {} · {summary}", env!("CARGO_PKG_VERSION")));
    if name == embedded::NAME {
        terminal.note(
            Style::Dim,
            "flint-tiny is a toy: sums, times, units, lists, copying, short stories. Try: What is 7 times 11?",
        );
    }
    if terminal.person_types {
        terminal.note(Style::Dim, "/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends");
    }
}
