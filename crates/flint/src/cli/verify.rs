//! `flint verify`: a pack against its sums. The exit status is 1 when anything is wrong.

use std::process::ExitCode;

use flint_weights::pack::{Scope, verify};

use crate::config::VerifyFlags;
use crate::config::packing::verify_scope;
use crate::error::Result;
use crate::progress::{bytes_bar, show};
use crate::terminal::{Style, Terminal, bytes, counted, printable};

/// Something is wrong with the pack.
const WRONG: u8 = 1;

/// Reads the pack and names everything that is wrong.
pub(crate) fn run(flags: &VerifyFlags, terminal: Terminal) -> Result<ExitCode> {
    let scope = verify_scope(flags)?;
    let bar = bytes_bar("verifying".to_owned(), terminal);
    let verified = verify(&flags.dir, scope, &mut |done, all| show(&bar, done, all))?;
    bar.finish_and_clear();
    for finding in &verified.findings {
        terminal.line(Style::Warning, &printable(&finding.to_string()))?;
    }
    if !verified.unlisted.is_empty() {
        let names = verified.unlisted.join(", ");
        terminal
            .note(Style::Dim, &printable(&format!("without a sum, so nothing is known of them: {names}")));
    }
    let looked = format!(
        "{}, {} read",
        [counted(verified.files, "file"), counted(verified.records, "record")].join(" and "),
        bytes(verified.bytes)
    );
    if verified.findings.is_empty() {
        let rest = if scope == Scope::All { "" } else { " (a sample: without --quick everything is read)" };
        terminal.line(Style::Plain, &format!("{}: all equal; {looked}{rest}", flags.dir.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let wrong = counted(verified.findings.len(), "thing");
    let remedy = "download what is named again, or make the pack anew with flint pack";
    terminal.line(Style::Plain, &format!("{}: {wrong} wrong; {looked}; {remedy}", flags.dir.display()))?;
    Ok(ExitCode::from(WRONG))
}
