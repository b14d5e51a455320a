//! Everything the user sees goes through here: replies to standard output, the rest to standard error.
//!
//! Styles are ANSI codes, used only where the stream is a terminal and the user did not turn colour off. A reader that
//! goes away ends the command quietly ([`Error::OutputClosed`]).

use std::io::{IsTerminal as _, Write as _};

use crate::error::{Error, Result};

/// The two output streams.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "three streams, each a person's or not, and the user's wish"
)]
pub(crate) struct Terminal {
    /// Standard input comes from a person.
    pub(crate) person_types: bool,
    /// Standard output goes to a person.
    pub(crate) person_reads: bool,
    /// Standard error goes to a person.
    pub(crate) person_reads_notes: bool,
    colour: bool,
}

/// How text looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// Less important: reasoning, statistics.
    Dim,
    Bold,
    /// Something the user should look at.
    Warning,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Dim => "\x1b[2m",
            Self::Bold => "\x1b[1m",
            Self::Warning => "\x1b[33m",
        }
    }
}

impl Terminal {
    /// The process's streams; `colour` is the user's wish.
    pub(crate) fn new(colour: bool) -> Self {
        Self {
            person_types: std::io::stdin().is_terminal(),
            person_reads: std::io::stdout().is_terminal(),
            person_reads_notes: std::io::stderr().is_terminal(),
            colour,
        }
    }

    /// Writes text to standard output at once: a reply is read while it grows.
    pub(crate) fn write(self, style: Style, text: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let styled = styled(style, text, self.colour && self.person_reads);
        out.write_all(styled.as_bytes()).and_then(|()| out.flush()).map_err(Error::output)
    }

    /// Writes a line to standard output.
    pub(crate) fn line(self, style: Style, text: &str) -> Result<()> {
        self.write(style, &format!("{text}\n"))
    }

    /// Writes a line to standard error. If even that is gone there is nobody to tell.
    pub(crate) fn note(self, style: Style, text: &str) {
        let styled = styled(style, text, self.colour && self.person_reads_notes);
        let _ = writeln!(std::io::stderr().lock(), "{styled}");
    }
}

/// Text with a style's codes around each line's content, so that a style never crosses a line break.
fn styled(style: Style, text: &str, colour: bool) -> String {
    if !colour || style == Style::Plain {
        return text.to_owned();
    }
    let mut styled = String::with_capacity(text.len() + 16);
    for line in text.split_inclusive('\n') {
        let (content, end) = line.strip_suffix('\n').map_or((line, ""), |content| (content, "\n"));
        if !content.is_empty() {
            styled.push_str(style.code());
            styled.push_str(content);
            styled.push_str("\x1b[0m");
        }
        styled.push_str(end);
    }
    styled
}

/// Text that a model or a client wrote, made safe for a terminal: control characters other than line breaks and tabs
/// could move the cursor, change the title or answer for the user.
pub(crate) fn printable(text: &str) -> String {
    let shown = |c: char| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

/// "1 thread", "2 threads".
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// A number of bytes for people.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ if value < 10.0 => format!("{value:.2} {}", UNITS[unit]),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_style_never_crosses_a_line_break() {
        assert_eq!(styled(Style::Dim, "a\n\nb\n", true), "\x1b[2ma\x1b[0m\n\n\x1b[2mb\x1b[0m\n");
        assert_eq!(styled(Style::Dim, "a\n", false), "a\n");
    }

    #[test]
    fn escape_codes_in_a_reply_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[2J\tb\r\n\u{9b}c"), "a\u{fffd}[2J\tb\u{fffd}\n\u{fffd}c");
    }

    #[test]
    fn bytes_are_shown_in_units_that_people_read() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(24_269_000), "23.1 MiB");
        assert_eq!(bytes(328_326_771_576), "305.8 GiB");
        assert_eq!(bytes(3 << 29), "1.50 GiB");
    }
}
